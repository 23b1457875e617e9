"""Errors that are sentences for the user, raised on ranks: the sentence without a traceback, the exit
code, and no restart."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_worlds import small, trained

import phalanx
from phalanx.api.own_loop import LoopError
from phalanx.cli.eval_tasks import TaskError
from phalanx.cli.main import main
from phalanx.cli.train_verify import RunDiffers
from phalanx.comm import CommError, RankFailed, Report, World, launch
from phalanx.comm.agree import PeerFailed, RanksDiffer
from phalanx.comm.base import CommMisuse, exit_code_of
from phalanx.layout.codec import Mistake
from phalanx.layout.run import RunError
from phalanx.training import loop
from phalanx.training.checkpoint import RanksFailed, SaveError
from phalanx.training.checkpoint_format import CheckpointError
from phalanx.training.copy_check import CopiesDiffer
from phalanx.training.data.token_files import DataError
from phalanx.training.log import JournalError
from phalanx.training.rank import Rank
from phalanx.training.step import TrainError
from phalanx.training.stop import FolderReplaced
from phalanx.verification.first import FirstStepDiffers

WORDS = [
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}",
    "batch=4",
    "sequence=12",
]


def families() -> Iterator[type[ValueError]]:
    """Every ValueError that a module of phalanx defines."""
    for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:  # kernels of a GPU
            if missing.name != "triton":
                raise
    below = list(ValueError.__subclasses__())
    for kind in below:
        below += kind.__subclasses__()
        if kind.__module__.startswith("phalanx."):
            yield kind


# the run had begun, or was refuted before it could
BEGUN = {
    FirstStepDiffers,
    TrainError,
    CopiesDiffer,
    JournalError,
    SaveError,
    FolderReplaced,
    RunDiffers,
    LoopError,
    TaskError,
}
# sentences, though they are errors between ranks
AMONG_RANKS = {RanksDiffer, PeerFailed}


def test_every_error_for_the_user_has_an_exit_code_wherever_it_is_raised() -> (
    None
):
    kinds = set(families())
    assert {
        CheckpointError,
        RanksFailed,
        DataError,
        RunError,
    } | BEGUN | AMONG_RANKS < kinds
    for kind in kinds:
        error = kind.__new__(kind)
        misuse = issubclass(kind, CommError) and kind not in AMONG_RANKS
        expected = 1 if kind in BEGUN else 0 if misuse else 2
        assert exit_code_of(error) == expected, kind
    assert [
        exit_code_of(each) for each in (ValueError(), OSError(), CommMisuse())
    ] == [
        0,
        0,
        0,
    ]


def _refuse(world: World) -> None:
    if world.rank == 1:
        raise RanksFailed(
            "step-1 cannot be loaded. ", ["rank 1: it is of another optimizer"]
        )
    world.split("all", [range(world.size)]).barrier()


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_what_a_rank_refuses_reaches_its_launcher_as_a_sentence(
    backend: str,
) -> None:
    with pytest.raises(RankFailed) as failed:
        launch(_refuse, 2, backend=backend, timeout=30.0)
    sentence = "RanksFailed: step-1 cannot be loaded. rank 1: it is of another optimizer"
    assert (failed.value.refusal, failed.value.exit_code) == (sentence, 2)


@pytest.mark.parametrize(
    "error, code, starts",
    [
        (RanksFailed("this cannot be loaded", []), 2, 1),
        (
            RunError(
                "run", [Mistake("steps", "these are too many", "Write less")]
            ),
            2,
            1,
        ),
        (RanksDiffer("the ranks were not started alike"), 2, 1),
        (TrainError("no number is finite"), 1, 1),
        (SaveError("no space left"), 1, 1),
        # Mistakes of ours, and what a library of the user's model raises.
        (ValueError("a mistake"), 1, 3),
        (CommMisuse("a call that cannot be right"), 1, 3),
        (CommError("a lost peer"), 1, 3),
    ],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, Exception) else ""
    ),
)
def test_only_what_may_go_well_the_next_time_is_started_again(
    error: Exception,
    code: int,
    starts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    begun = []

    def fail(*args: object, **terms: object) -> None:
        begun.append(terms)
        try:
            raise error
        except Exception as raised:
            raise RankFailed([Report.of(1, raised)]) from None

    monkeypatch.setattr("phalanx.comm.launch", fail)
    words = [*WORDS, f"out={tmp_path}", "layout=dp2", "train.restarts=3"]
    assert main(["train", *words]) == code
    assert len(begun) == starts
    shown = capfd.readouterr().err
    assert f"{type(error).__name__}: {error}" in shown
    assert ("Traceback" in shown) == (starts > 1)


@pytest.mark.parametrize("layout", ["", "dp2"])
def test_another_optimizer_is_refused_with_both_names(
    layout: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(small(out, "steps=1"), "")
    with pytest.raises((CheckpointError, RankFailed)) as refused:
        trained(
            small(
                out, "steps=2", "optimizer.name=sgd", "checkpoint.adopt=true"
            ),
            layout,
        )
    assert (
        "holds the state of optimizer.name = 'adamw', but the run has 'sgd'"
        in str(refused.value)
    )
    # One that keeps no state has nothing that could be of another.
    trained(small(tmp_path / "sgd", "steps=1", "optimizer.name=sgd"), "")
    trained(small(tmp_path / "sgd", "steps=2", "optimizer.name=adamw"), layout)


def test_the_command_refuses_another_optimizer_before_any_rank_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run = small(out, "steps=1", "optimizer.name=sgd", "optimizer.momentum=0.9")
    trained(run, "")
    words = [
        f"out={out}",
        "steps=2",
        f"batch={run.batch}",
        "sequence=18",
        "layout=dp2",
    ]
    assert (
        main(["train", *words, "optimizer.name=muon", "train.restarts=2"]) == 2
    )
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert (
        "holds the state of optimizer.name = 'sgd', but the run has 'muon'"
        in line
    )


def test_data_that_fails_within_a_run_is_no_wrong_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def batch(rank: Rank, step: int) -> object:
        if step == 2:
            raise DataError("train.tokens: was cut while in use")
        return plain(rank, step)

    plain = Rank.batch
    monkeypatch.setattr(loop.Rank, "batch", batch)
    words = [
        *WORDS,
        "validation.batches=0",
        "steps=4",
        "layout=fp32",
        f"out={tmp_path}",
    ]
    assert main(["train", *words]) == 1
    error = capfd.readouterr().err
    assert "TrainError: step 3: train.tokens: was cut while in use" in error
