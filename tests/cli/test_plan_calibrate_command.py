"""`phalanx plan calibrate` as somebody types it: run folders in, a profile file out that plans read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from phalanx.cli.main import main
from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape
from phalanx.planner import Curve, Machine, Rate, Store
from phalanx.planner.local import hardware_of_machine, local_profile
from phalanx.planner.profile import NUMBERS, SoftwareProfile, profile
from phalanx.planner.search import judge
from phalanx.planner.step import Request

SHAPE = Shape(
    name="small",
    layers=4,
    hidden=256,
    heads=4,
    ffn=1024,
    vocab=1024,
    sequence=256,
    batch=16,
)
MACHINE = Machine(
    name="small", date="2026-01-31", method="by hand", device="some CPU", kind="cpu", count=1,
    cores=4, memory=8e9, launch=1e-6, stores=(Store("copy", 1e10),),
    rates=(Rate("fp32", 128, 128, 128, 1e11), Rate("fp32", 1024, 1024, 1024, 4e11)),
    curves=tuple(
        Curve(op, "gloo", 2, "ring", 1e-4, 1e9, 0.0, 1, 1 << 20)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send")
    ),
)  # fmt: skip
# What the runs of these tests were "run" with: slower products, dearer traffic than a plan thinks.
TRUTH = replace(local_profile(), speed=0.5, attention=0.3, traffic=1.8)
LAYOUTS = ("dp2", "tp2 seq", "dp4 zero1", "dp2 tp2 seq", "pp2 1f1b:4")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def seconds(text: str, under: SoftwareProfile) -> float:
    """A step of a layout as the planner judges it."""
    layout = Layout.parse(text)
    hardware = hardware_of_machine(MACHINE, layout.ranks)
    costs = partial(cached_costs, target="cpu")
    request = Request(
        SHAPE, hardware, under, costs, SHAPE.sequence, SHAPE.batch, "fp32"
    )
    (choice,) = judge(request, [layout])
    return choice.step


def run_of(folder: Path, text: str, times: Sequence[float]) -> str:
    """The journal of a run whose first step warmed up."""
    folder.mkdir()
    start = {
        "event": "start",
        "step": 0,
        "layout": text,
        "model": asdict(SHAPE),
    }
    steps = [
        {"event": "step", "step": n, "steps": 1, "seconds": s}
        for n, s in enumerate(times)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in (start, *steps))
    (folder / "metrics.jsonl").write_text(lines)
    return str(folder)


def machine_of(folder: Path) -> str:
    (folder / "machine.toml").write_text(MACHINE.text())
    return str(folder / "machine.toml")


def test_runs_move_the_profile_towards_what_they_ran_with_and_a_plan_reads_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, out = machine_of(tmp_path), tmp_path / "profile.toml"
    runs = [
        run_of(tmp_path / str(n), text, [9.0, *[seconds(text, TRUTH)] * 3])
        for n, text in enumerate(LAYOUTS[:-1])
    ]
    words = [
        "plan",
        "calibrate",
        *runs,
        "--machine",
        machine,
        "--out",
        str(out),
    ]
    assert main([*words, "--json"]) == 0
    args = json.loads(capsys.readouterr().out)
    assert [row["layout"] for row in args["runs"]] == list(LAYOUTS[:-1])
    for row in args["runs"]:
        assert abs(row["after"]) < 0.1 < abs(row["before"])
    found = profile(str(out))
    assert args["profile"] == {name: getattr(found, name) for name in NUMBERS}
    # A layout that was not among the runs is told better too.
    unseen = LAYOUTS[-1]
    truth, before, after = (
        seconds(unseen, s) for s in (TRUTH, local_profile(), found)
    )
    assert abs(after / truth - 1) < abs(before / truth - 1) / 2
    plan = [
        "plan",
        "--model",
        "tiny",
        "--machine",
        machine,
        "--ranks",
        "2",
        "--json",
    ]
    assert main([*plan, "--explain", "dp2", "--profile", str(out)]) == 0
    slow = json.loads(capsys.readouterr().out)["step_time_s"]
    assert main([*plan, "--explain", "dp2"]) == 0
    assert slow > json.loads(capsys.readouterr().out)["step_time_s"]


def test_the_table_names_each_run_with_its_error_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "dp2", [9.0, 0.5, 0.5])
    assert (
        main(["plan", "calibrate", run, "--machine", machine_of(tmp_path)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    before = seconds("dp2", local_profile()) / 0.5 - 1
    assert lines[1].startswith(run)
    assert f"{before:+7.0%}" in lines[1]
    assert lines[1].endswith("dp2")
    assert [line.split()[0] for line in lines[3:7]] == list(NUMBERS)
    assert "1 runs for 3 numbers" in lines[-1]
    assert not (tmp_path / "profile.toml").exists()


def test_with_rows_the_other_runs_tell_how_far_off_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        run_of(tmp_path / str(n), text, [9.0, *[seconds(text, TRUTH)] * 2])
        for n, text in enumerate(LAYOUTS)
    ]
    words = [
        "plan",
        "calibrate",
        *runs,
        "--machine",
        machine_of(tmp_path),
        "--rows",
        "2",
    ]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert sum(row["used"] for row in rows) == 2
    unseen = [row for row in rows if not row["used"]]
    before, after = (
        median(abs(row[when]) for row in unseen)
        for when in ("before", "after")
    )
    assert after < before / 2
    assert main(words) == 0
    told = capsys.readouterr().out
    line = f"Median error of the 3 runs that were not used: {before:.0%} before, {after:.0%} after."
    assert line in told
    assert "2 runs for 3 numbers" in told


def test_a_calibration_that_would_not_help_leaves_the_numbers_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, out = local_profile(), tmp_path / "profile.toml"
    # Each run is off in its own direction: nothing in common to learn.
    runs = [
        run_of(
            tmp_path / str(n), text, [9.0, *[off * seconds(text, start)] * 2]
        )
        for n, (text, off) in enumerate(
            zip(LAYOUTS[:4], (1.2, 0.8, 1.2, 0.8), strict=True)
        )
    ]
    words = ["plan", "calibrate", *runs, "--machine", machine_of(tmp_path)]
    assert main([*words, "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(
        "The numbers stay: of 4 runs, each predicted after a fit to the others"
    )
    found = profile(str(out))
    assert all(
        getattr(found, name) == getattr(start, name) for name in NUMBERS
    )
    # Its range is that of these runs all the same.
    assert found.own_runs == 4
    assert found.own_above > 0.2


def test_what_is_no_run_or_no_machine_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = machine_of(tmp_path)
    good = run_of(tmp_path / "good", "dp2", [9.0, 0.5, 0.5])
    short = run_of(tmp_path / "short", "dp2", [9.0])
    for words, args in (
        ([good, str(tmp_path), "--machine", machine], "cannot read the run"),
        ([good, short, "--machine", machine], "1 lines of steps"),
        (
            [good, "--machine", str(tmp_path / "nowhere.toml")],
            "there is no machine file",
        ),
        ([good, "--machine", machine, "--cluster", "h100x8"], "name one"),
        (
            [good, "--machine", machine, "--profile", "phalamx"],
            "Did you mean 'phalanx'",
        ),
        ([good, "--machine", machine, "--out", "profile.json"], "suffix"),
    ):
        assert main(["plan", "calibrate", *words]) == 2
        told = capsys.readouterr()
        assert not told.out
        assert args in told.err
        assert told.err.count("\n") == 1
