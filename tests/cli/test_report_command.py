"""`phalanx report` as somebody types it: the page, and the measured step beside its prediction."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html import escape
from pathlib import Path

import pytest

from phalanx.cli import report as report_verb
from phalanx.cli import train as train_verb
from phalanx.cli.main import main
from phalanx.layout import Layout, Shape, plain_pieces, staged_pieces
from phalanx.planner import Curve, Machine, Rate, Store
from phalanx.program import Costs, Recorded, StepOptions, build, simulate

SHAPE = Shape(
    name="small",
    layers=2,
    hidden=32,
    heads=2,
    ffn=64,
    vocab=256,
    sequence=16,
    batch=4,
)
MACHINE = Machine(
    name="small", date="2026-01-31", method="by hand", device="some CPU", kind="cpu", count=1,
    cores=4, memory=8e9, launch=1e-6, stores=(Store("copy", 1e10),),
    rates=(Rate("fp32", 128, 128, 128, 1e10),),
    curves=tuple(
        Curve(op, "gloo", 2, "ring", 1e-4, 1e9, 0.0, 1, 1 << 20)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ),
)  # fmt: skip


# A step of one rank that took no time.
PROGRAM = str(
    build(Layout.parse(""), plain_pieces([range(1)]), StepOptions(agree=False))
)
SPANS = [[0, "compute", "0F0", 0.0, 0.0]]
STEP = json.dumps({"phalanx run": 1, "program": PROGRAM, "spans": SPANS})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_of(
    folder: Path, text: str = "dp2 zero1", device: str = "CPU", own: str = ""
) -> Path:
    """What a run leaves, with a step of which every forward took 2 ms and every backward 3."""
    layout = Layout.parse(text)
    folder.mkdir()
    start = {
        "event": "start", "time": 0.0, "step": 0, "steps": 4, "layout": text, "ranks": 2,
        "model": asdict(SHAPE), "sequence": 16, "own": own, "versions": {"device": device},
    }  # fmt: skip
    steps = [
        {"event": "step", "time": 1.0, "step": n, "steps": 1, "loss": 5.0, "seconds": seconds,
         "tokens_per_second": 1.0, "goodput": 1.0}
        for n, seconds in ((1, 9.0), (2, 0.02), (3, 0.04), (4, 0.03))
    ]  # fmt: skip
    lines = "".join(json.dumps(record) + "\n" for record in (start, *steps))
    (folder / "metrics.jsonl").write_text(lines)
    program = build(layout, staged_pieces(layout, SHAPE))
    costs = Costs({"F": 2e-3, "I": 1.5e-3, "W": 1.5e-3, "G": 1e-3})
    recorded = Recorded(program, simulate(program, costs))
    args = json.loads(str(recorded)) | {"step": 3, "layout": text}
    (folder / "timeline.json").write_text(json.dumps(args))
    return folder


def machine_of(folder: Path) -> str:
    (folder / "machine.toml").write_text(MACHINE.text())
    return str(folder / "machine.toml")


def test_the_table_is_in_the_terminal_on_the_page_and_in_the_json_with_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_of(tmp_path / "run")), "--machine", machine_of(tmp_path)]
    assert report_verb.run(words) == 0
    told = capsys.readouterr().out
    assert report_verb.run([*words, "--json"]) == 0
    args = json.loads(capsys.readouterr().out)["compared"]
    page = (tmp_path / "run" / "report.html").read_text()
    rows = {row["kind"]: row for row in args["rows"]}
    assert rows["F"]["measured"] == pytest.approx(2e-3)
    assert rows["F"]["count"] == 4
    assert rows["B"]["measured"] == pytest.approx(3e-3)
    assert rows["F"]["ratio"] == pytest.approx(2e-3 / rows["F"]["predicted"])
    assert rows["A"]["predicted"] > 0
    # Without the first, in which a process warms up.
    assert args["usual"] == 0.03
    for row in rows.values():
        price = (
            "-"
            if row["predicted"] is None
            else f"{1e3 * row['predicted']:.4g} ms"
        )
        for cell in (row["words"], price, f"{1e3 * row['measured']:.4g} ms"):
            assert cell in told
            assert escape(cell) in page
    assert "<h2>Predicted against measured</h2>" in page


def test_without_a_machine_the_page_stays_as_it_is_and_a_line_says_how_to_get_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_verb.run([str(run_of(tmp_path / "run"))]) == 0
    told = capsys.readouterr().out
    assert "--machine machine.toml" in told
    assert "doctor --out machine.toml" in told
    assert (
        "Predicted against"
        not in (tmp_path / "run" / "report.html").read_text()
    )


def test_a_run_on_a_gpu_of_the_catalogue_is_compared_with_its_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "dp2 zero1 bf16", "NVIDIA H100 80GB HBM3")
    assert report_verb.run([str(run), "--cluster", "h100x8"]) == 0
    told = capsys.readouterr().out
    assert "on h100x8, profile phalanx" in told
    assert "timed until it is launched" in " ".join(told.split())


def test_a_stack_that_is_half_as_fast_predicts_longer_computing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        str(run_of(tmp_path / "run")),
        "--machine",
        machine_of(tmp_path),
        "--json",
    ]
    times = []
    for speed in (0.9, 0.45):
        (tmp_path / "profile.toml").write_text(
            f"speed = {speed}\nhost = 0.0\n"
        )
        assert (
            report_verb.run(
                [*words, "--profile", str(tmp_path / "profile.toml")]
            )
            == 0
        )
        args = json.loads(capsys.readouterr().out)["compared"]
        times.append(
            next(r["predicted"] for r in args["rows"] if r["kind"] == "F")
        )
    assert times[0] < times[1] < 2 * times[0]


def _refused(
    capsys: pytest.CaptureFixture[str], *words: str, lines: int = 1
) -> str:
    assert main(["report", *words]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert "Traceback" not in told.err
    assert told.err.count("\n") == lines
    return told.err


def test_what_cannot_be_compared_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, machine = str(run_of(tmp_path / "run")), machine_of(tmp_path)
    gpu = str(run_of(tmp_path / "gpu", device="NVIDIA H200"))
    missing = _refused(capsys, run, "--machine", "nowhere.toml")
    assert "there is no machine file nowhere.toml" in missing
    assert "the run used CPU, but h100x8 is h100-sxm" in _refused(
        capsys, run, "--cluster", "h100x8"
    )
    assert "the run used NVIDIA H200" in _refused(
        capsys, gpu, "--machine", machine
    )
    assert "needs --machine or --cluster" in _refused(
        capsys, run, "--profile", "phalanx"
    )
    both = _refused(capsys, run, "--machine", machine, "--cluster", "h100x8")
    assert "name one" in both
    wide = str(run_of(tmp_path / "wide", "dp4 tp4", "NVIDIA H100 80GB HBM3"))
    assert "16 ranks" in _refused(capsys, wide, "--cluster", "h100x8")
    # It would only be missing on the page.
    for other in (
        "nowhere",
        str(tmp_path),
    ):
        beside = _refused(capsys, run, "--beside", wide, other)
        assert f"{other} is not the folder of a run" in beside


@pytest.mark.parametrize(
    "name, text, args",
    [
        ("timeline.json", None, "cannot read .*timeline.json: No such file"),
        ("timeline.json", "{}", "this is not the file of a run"),
        ("timeline.json", STEP, "its layout or step is missing"),
        (
            "timeline.json",
            STEP[:-1] + ', "step": 3, "layout": "dp2"}',
            "no operation",
        ),
        ("timeline.json", "\x00", "cannot be read"),
        (
            "metrics.jsonl",
            '{"event": "start", "step": 9}',
            "no start as dp2 zero1 before step 3",
        ),
    ],
)
def test_a_folder_that_lacks_its_step_is_refused_in_a_sentence(
    name: str,
    text: str | None,
    args: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of(tmp_path / "run")
    if text is None:
        (run / name).unlink()
    else:
        (run / name).write_text(text)
    told = _refused(capsys, str(run), "--machine", machine_of(tmp_path))
    assert re.search(args, told), told


def test_a_model_of_ones_own_is_run_only_when_the_command_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n"
    )
    own = f"{tmp_path / 'mine.py'}:Mine"
    run = run_of(tmp_path / "run", own=own)
    words = [str(run), "--machine", machine_of(tmp_path)]
    assert f"--model {own}" in _refused(capsys, *words)
    assert not (tmp_path / "ran").exists()


def test_a_real_run_is_compared_operation_by_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    model = "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}"
    words = [
        model,
        "batch=4",
        "sequence=12",
        "validation.batches=0",
        f"out={out}",
        "steps=5",
    ]
    assert (
        train_verb.run([*words, "layout=accum:2", "--ranks", "1", "--json"])
        == 0
    )
    capsys.readouterr()
    assert (
        report_verb.run(
            [str(out), "--machine", machine_of(tmp_path), "--json"]
        )
        == 0
    )
    rows = {
        r["kind"]: r
        for r in json.loads(capsys.readouterr().out)["compared"]["rows"]
    }
    assert (rows["F"]["count"], rows["B"]["count"], rows["U"]["count"]) == (
        8,
        8,
        4,
    )
    assert all(
        rows[kind]["predicted"] > 0 and rows[kind]["measured"] > 0
        for kind in "FBU"
    )
