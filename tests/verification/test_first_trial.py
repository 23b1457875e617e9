"""A user's model is compared with one process before its first step in a layout, once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gained
import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.cli.main import main
from phalanx.comm import RankFailed, World, launch
from phalanx.layout import Layout, Run
from phalanx.verification.first import FirstStepDiffers, trial_layout
from phalanx.verification.first_known import trial_key

FILE = Path(gained.__file__)
DIFFERS = (
    r"differs from one process: step 0: the gradient of blocks\.\d\.mlp\.gain"
)


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of passed trials, which is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "phalanx" / "verified"


def _files(folder: Path) -> set[str]:
    return (
        {each.name for each in folder.iterdir()} if folder.exists() else set()
    )


def _train(name: str, out: Path, *words: str) -> int:
    own = f"model={FILE}:{name}", "steps=1", "batch=4", f"out={out}"
    return main(["train", *own, *words, "--backend", "threads"])


def test_train_refuses_a_wrong_rule_before_its_first_step(
    tmp_path: Path, known: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert _train("Wrong", out, "layout=tp2") == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "tp2 differs from one process: step 0" in said
    assert "blocks.1.mlp.gain" in said
    assert "Nothing was trained." in said
    assert not (out / "metrics.jsonl").exists()
    assert not _files(known)
    # where the wrong rule changes nothing, it trains
    assert _train("Wrong", out, "layout=dp2") == 0
    assert len(_files(known)) == 1


def test_a_trial_that_passed_is_not_repeated_until_the_source_changes(
    tmp_path: Path, known: Path
) -> None:
    assert _train("Right", tmp_path / "a", "layout=tp2") == 0
    first = _files(known)
    assert len(first) == 1
    (before,) = (each.stat().st_mtime_ns for each in known.iterdir())
    assert _train("Right", tmp_path / "b", "layout=tp2") == 0
    (after,) = (each.stat().st_mtime_ns for each in known.iterdir())
    assert before == after
    other = tmp_path / "other.py"
    other.write_text(FILE.read_text().replace("torch.tanh(", "torch.sin("))
    own = f"model={other}:Right", "steps=1", "batch=4", f"out={tmp_path}/c"
    assert main(["train", *own, "layout=tp2", "--backend", "threads"]) == 0
    assert len(_files(known)) == 2


def test_verify_own_turns_it_off(
    tmp_path: Path, known: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _train("Wrong", tmp_path, "layout=tp2", "verify_own=false")
    assert "step 1/1" in capfd.readouterr().out
    assert not _files(known)


def _trained(world: World, kind: str, out: str) -> str:
    words = f"model={FILE}:{kind}", "steps=1", "batch=4", f"out={out}"
    run = Run.parse("", "run", (*words, "layout=tp2"))
    phalanx.train(world, run, quiet=True)
    return out


def test_training_from_python_refuses_it_too(tmp_path: Path) -> None:
    given = str(tmp_path / "run"), str(tmp_path / "other")
    with pytest.raises(RankFailed, match=DIFFERS):
        launch(_trained, 2, "Wrong", given[0], backend="threads")
    launch(_trained, 2, "Right", given[1], backend="threads")


def _batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(gained.VOCAB, (4, gained.TIME + 1), generator=draw)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def _step(
    world: World, kind: str, layout: str, verify: bool, early: bool
) -> float:
    model: nn.Module = getattr(gained, kind)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = _batch() if early else None
    run = phalanx.prepare(
        model, optimizer, layout, example=example, world=world, verify=verify
    )
    assert run.steps == 0
    return run.step(_batch()).loss


@pytest.mark.parametrize("early", [True, False])
def test_prepare_refuses_a_wrong_rule_before_its_first_step(
    known: Path, early: bool
) -> None:
    given = "Wrong", "tp2", True, early
    with pytest.raises(RankFailed, match=DIFFERS):
        launch(_step, 2, *given, backend="threads")
    assert not _files(known)
    launch(_step, 2, "Right", "tp2", True, early, backend="threads")
    assert len(_files(known)) == 1


def test_prepare_may_be_told_not_to_compare(known: Path) -> None:
    launch(_step, 2, "Wrong", "tp2", False, True, backend="threads")
    assert not _files(known)


class Centred(nn.Module):
    """A module whose rows influence each other: dp and accumulation change it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        y: Tensor = self.out(inputs - inputs.mean(0))
        return y


def _squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["targets"]).square().sum()


def _centred(world: World, layout: str) -> None:
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = phalanx.prepare(model, optimizer, layout, loss=_squares, world=world)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, 3, generator=draw)
    targets = torch.randn(8, 2, generator=draw)
    run.step((inputs, targets))


@pytest.mark.parametrize("layout", ["dp2", "accum:2"])
def test_rows_that_influence_each_other_are_noticed(layout: str) -> None:
    ranks = Layout.parse(layout).ranks
    differs = "differs from one process"
    with pytest.raises((RankFailed, FirstStepDiffers), match=differs):
        launch(_centred, ranks, layout, backend="threads")


@pytest.mark.parametrize(
    ("layout", "tried"),
    [
        ("dp2 tp2 bf16", "dp2 tp2 fp64"),
        ("dp64 pp4 tp8 zero1 1f1b:32", "dp2 pp2 tp2 zero1 1f1b:4 fp64"),
        ("tp8 seq compile", "tp8 seq fp64"),
        ("dp2 exact", "dp2 fp64"),
    ],
)
def test_the_layout_of_the_trial_has_few_ranks_and_the_same_kinds_of_split(
    layout: str, tried: str
) -> None:
    assert trial_layout(Layout.parse(layout)) == Layout.parse(tried)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((4, 8), (9, 8)),
        (torch.relu, torch.tanh),
        (SimpleNamespace(eps=1.0), SimpleNamespace(eps=2.0)),
        ({"window": 4}, {"window": 9}),
        (torch.float32, torch.bfloat16),
    ],
    ids=["tuple", "function", "configuration", "dict", "dtype"],
)
def test_an_attribute_that_a_forward_may_read_belongs_to_the_key(
    one: object, other: object
) -> None:
    def key(value: object) -> str:
        model = gained.describe(gained.Right())
        model.pieces[1][1].setting = value
        return trial_key(model, Layout.parse("dp2"))

    assert key(one) == key(one) != key(other)
    assert key(one)


def test_a_file_of_the_model_s_own_code_belongs_to_the_key(
    tmp_path: Path,
) -> None:
    file = tmp_path / "net.py"
    keys = set()
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        model = gained.describe(gained.Right())
        keys.add(trial_key(model, Layout.parse("dp2"), (file,)))
    assert len(keys) == 2
