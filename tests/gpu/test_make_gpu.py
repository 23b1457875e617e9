"""`make gpu` itself, on a CPU: its cases are commands that exist, and one that fails ends no other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import monotonic

import pytest
import torch
from device_runs import attention_operators, losses

from gpu import (
    LIMIT,
    WIDE,
    Case,
    Finding,
    agreement,
    beside_loops,
    cases,
    main,
    perform,
    performed,
    table,
)
from phalanx.layout import Layout, Shape
from phalanx.layout.legal import legal
from phalanx.layout.run import Run
from phalanx.models.attention import Core
from phalanx.parallel import build_model
from phalanx.parallel.fitness import misfits
from phalanx.training.program import shape_of
from phalanx.verification import SHAPES

pytestmark = pytest.mark.long_file

PYTHON = sys.executable


def finding(output: str) -> Finding:
    return Finding(output.strip(), True)


def test_a_case_that_fails_or_hangs_is_reported_with_what_it_printed() -> None:
    hangs = "import time; print('so far', flush=True); time.sleep(60)"
    listed = [
        Case(
            "fails",
            (PYTHON, "-c", "raise SystemExit('out of memory')"),
            agreement,
        ),
        Case("hangs", (PYTHON, "-c", hangs), finding, limit=3.0),
        Case("lacks", (PYTHON, "-c", ""), finding, needs=("no_such_module",)),
        Case("works", (PYTHON, "-c", "print('done')"), finding),
    ]
    rows = [perform(case, os.environ) for case in listed]
    rows.append(perform(listed[3], os.environ, left=0.0))
    assert [row.met for row in rows] == [False, False, False, True, False]
    text = table(rows, ["a machine"])
    for part in (
        "exit code 1",
        "out of memory",
        "stopped after 3 s",
        "so far",
        "no module no_such_module",
        "time of all cases",
    ):
        assert part in text
    assert "| works | done |  | yes |" in text


def test_a_case_never_outlasts_what_is_left_of_the_whole() -> None:
    long = Case(
        "long",
        (PYTHON, "-c", "import time; time.sleep(60)"),
        finding,
        limit=50.0,
    )
    row = perform(long, os.environ, left=1.5)
    assert row.result == "stopped after 2 s"
    assert row.seconds < 20.0


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_limits_of_all_cases_fit_into_the_whole(
    gpus: int, tmp_path: Path
) -> None:
    *listed, machine_file = cases("cuda", gpus, tmp_path)
    beside = max(case.limit for case in listed if not case.alone)
    alone = sum(case.limit for case in listed if case.alone)
    # The last takes what is left.
    assert beside + alone <= LIMIT
    assert machine_file.name == "machine file"


def argument(case: Case, option: str) -> str:
    words = list(case.words)
    return words[words.index(option) + 1] if option in words else ""


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_every_layout_to_verify_fits_its_model_and_the_gpus(
    gpus: int, tmp_path: Path
) -> None:
    seen = 0
    for case in cases("cuda", gpus, tmp_path):
        if "verify" not in case.words:
            continue
        shape: Shape = SHAPES[argument(case, "--model") or "gqa"]
        for layout in Layout.parse_many(argument(case, "--layouts")):
            assert not legal(layout, shape, batch=shape.batch), (
                case.name,
                layout,
            )
            assert not misfits(build_model(shape), layout)
            if argument(case, "--backend") == "nccl" and gpus > 1:
                assert layout.ranks <= gpus
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_nccl_carries_every_axis(gpus: int, tmp_path: Path) -> None:
    """With one GPU its ranks share it; NCCL took no layout at all there."""
    over = [
        case
        for case in cases("cuda", gpus, tmp_path)
        if argument(case, "--backend") == "nccl"
    ]
    layouts = [
        x
        for case in over
        for x in Layout.parse_many(argument(case, "--layouts"))
    ]
    for axis in ("dp", "tp", "cp", "ep", "pp"):
        assert any(layout.mesh.of(axis) > 1 for layout in layouts), axis
    assert any(layout.zero == 3 for layout in layouts)
    if gpus != 2:
        assert any(
            layout.mesh.of("dp") > 1 and layout.pp > 1 for layout in layouts
        )
    shared = {case.environment.get("PHALANX_SHARE_GPUS") for case in over}
    assert shared == ({"1"} if gpus == 1 else {None})


def test_trainings_are_runs_that_save_nothing(tmp_path: Path) -> None:
    trainings = [
        case for case in cases("cuda", 1, tmp_path) if "train" in case.words
    ]
    assert len(trainings) >= 4
    for case in trainings:
        keys = tuple(word for word in case.words if "=" in word)
        run = Run.parse("", "case", keys)
        assert not run.checkpoint.at_end
        assert run.checkpoint.every == 0
        assert not legal(
            Layout.parse(run.layout), shape_of(run), batch=run.batch or 4
        )
    assert any(WIDE in " ".join(case.words) for case in trainings)


def test_a_case_runs_from_the_tree_and_its_results_are_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "gpu.md"
    words = [
        "gpu.py",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--only",
        "1b, offload:activations",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0, capsys.readouterr().out
    assert "GiB promised" in out.read_text()
    (row,) = json.loads(out.with_suffix(".json").read_text())["cases"]
    assert row["met"]
    assert "step 12/12" in row["output"]


def test_the_ratio_is_to_the_fastest_loop() -> None:
    seconds = {"phalanx bf16": [2.0, 3.0, 4.0], "a": [5.0] * 3, "b": [3.0] * 3}
    found = {name: {"seconds": each} for name, each in seconds.items()}
    output = f"| a table |\n{json.dumps(found)}\n"
    assert beside_loops(1.02)(output).text.startswith("1.000 of b: ")
    assert beside_loops(1.0)(output).met
    assert not beside_loops(0.99)(output).met


def test_cases_that_measure_no_time_run_at_the_same_time_and_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The two wait for each other, and the third needs both."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    wait = (
        "import sys, time, pathlib; own, other = map(pathlib.Path, sys.argv[1:])\n"
        "own.touch()\nwhile not other.exists(): time.sleep(0.01)"
    )
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    both = f"import pathlib; print(len([*pathlib.Path({str(tmp_path)!r}).iterdir()]))"
    listed = [
        Case("alone", (PYTHON, "-c", both), finding),
        Case("first", (PYTHON, "-c", wait, one, two), finding, alone=False),
        Case("second", (PYTHON, "-c", wait, two, one), finding, alone=False),
    ]
    rows = [*performed(listed, os.environ, monotonic() + 60)]
    names = [row.case.name for row in rows]
    assert names == ["first", "second", "alone"]
    assert rows[-1].result == "2"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 4])
def test_the_whole_list_runs_to_its_end_on_a_cpu(
    gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same list as on a GPU, with small sizes and gloo. It waits for no time: a CPU may be slow."""
    out = tmp_path / "gpu.md"
    monkeypatch.setattr("gpu.LIMIT", 3000.0)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", f"--gpus={gpus}", f"--out={out}",
                                      "--limit=3000"])  # fmt: skip
    code = main()
    found = json.loads(out.with_suffix(".json").read_text())["cases"]
    assert [row["case"] for row in found if not row["met"]] == [], (
        capsys.readouterr().out
    )
    assert code == 0
    assert len(found) == len(cases("cpu", gpus, tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert main() == 2
    assert "no GPU" in capsys.readouterr().out


# ---- what the device tests look with, where there is no device


def test_operators_inside_an_operator_of_ours_are_seen() -> None:
    """The device tests looked with a dispatch mode, and could pass on no GPU."""
    q, k, v = (torch.randn(2, 32, n, 16) for n in (4, 2, 2))
    documents = torch.arange(32).div(10, rounding_mode="floor").expand(2, -1)
    seen = attention_operators(
        lambda: Core()(q, k, v, torch.empty(0), documents)
    )
    assert "_scaled_dot_product_flash_attention_for_cpu" in seen


def test_short_runs_of_the_device_tests_train_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(
        tmp_path / "whole", "fp64", monkeypatch, "steps=6", gpu=False
    )
    assert (
        losses(tmp_path / "run", "fp64", monkeypatch, gpu=False) == whole[:4]
    )
    more = losses(
        tmp_path / "run", "dp2 fp64", monkeypatch, "steps=6", gpu=False
    )
    assert more == pytest.approx(whole, rel=1e-10)
