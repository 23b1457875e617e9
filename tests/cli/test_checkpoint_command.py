"""`phalanx checkpoint` as somebody types it: a run, its saves, or one save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import checkpoint as checkpoint_verb
from phalanx.cli import train as train_verb
from phalanx.cli.usage import UsageError

SMALL = [
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}", "batch=4", "sequence=12",
    "validation.batches=0", "checkpoint.every=2", "--ranks", "1", "--json",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with saves of steps 2 and 4."""
    out = tmp_path_factory.mktemp("run") / "first"
    assert train_verb.run([*SMALL, f"out={out}", "steps=4"]) == 0
    return out


@pytest.fixture(params=["", "checkpoints", "checkpoints/step-00000004"])
def source(request: pytest.FixtureRequest, run_folder: Path) -> Path:
    return run_folder / request.param


def _said(
    capsys: pytest.CaptureFixture[str], *argv: object
) -> dict[str, object]:
    capsys.readouterr()
    assert checkpoint_verb.run([*map(str, argv), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_run_its_saves_and_one_save_are_all_shown(
    source: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _said(capsys, "show", source)
    newest = run_folder / "checkpoints" / "step-00000004"
    older = (
        [] if source == newest else [str(newest.with_name("step-00000002"))]
    )
    assert (shown["path"], shown["step"], shown["older"]) == (
        str(newest),
        4,
        older,
    )


def test_a_run_its_saves_and_one_save_are_all_verified(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = _said(capsys, "verify", source)
    assert verified["sound"]
    faults = verified["faults"]
    assert isinstance(faults, dict)
    assert len(faults) == (1 if source.name.startswith("step") else 2)


def test_a_run_its_saves_and_one_save_are_all_exported_and_a_run_begins_with_them(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _said(capsys, "export", source, "--to", tmp_path / "hub")
    assert (
        json.loads((tmp_path / "hub" / "config.json").read_text())[
            "hidden_size"
        ]
        == 16
    )
    second = tmp_path / "second"
    _said(capsys, "import", tmp_path / "hub", "--out", second)
    assert _said(capsys, "show", second)["step"] == 0
    assert train_verb.run([*SMALL, f"out={second}", "steps=1"]) == 0
    resumed = [
        json.loads(x)
        for x in (second / "metrics.jsonl").read_text().splitlines()
    ]
    assert "step-00000000" in next(
        r["text"] for r in resumed if r["event"] == "resume"
    )


def test_a_damaged_save_of_a_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train_verb.run([*SMALL, f"out={out}", "steps=2"]) == 0
    capsys.readouterr()
    (out / "checkpoints/step-00000002/rank-00000.safetensors").write_bytes(b"")
    assert checkpoint_verb.run(["verify", str(out)]) == 1
    assert "rank-00000.safetensors" in capsys.readouterr().out


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint_verb.run(["show", str(tmp_path)])
