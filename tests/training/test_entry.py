"""The package as a library: `from phalanx import Run, join, train`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loop_worlds import losses, small, trained

import phalanx
from phalanx import Run, train
from phalanx.comm import CommMisuse, World, join, launch
from phalanx.layout import LayoutError


def test_names_of_the_package_come_without_torch() -> None:
    code = "import phalanx, sys; from phalanx import Run, train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert phalanx.Run is Run
    assert phalanx.join is join
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        _ = phalanx.runs


def test_a_run_alone_is_two_lines(tmp_path: Path) -> None:
    outcome = train(
        join(environment={}),
        small(tmp_path / "run", "layout=fp32"),
        quiet=True,
    )
    assert outcome.step == 5
    trained(small(tmp_path / "same"), "fp32")
    assert losses(tmp_path / "run") == losses(tmp_path / "same")


def _joined(world: World, run: Run) -> float:
    """What a worker of Ray or Accelerate does: its process has a process group already."""
    there = join()
    with pytest.raises(
        CommMisuse, match="needs 3 ranks, but the existing process group has 2"
    ):
        join(3)
    train(there, run, quiet=True)
    there.close()
    x = torch.tensor([float(world.rank + 1)])
    # the group is its maker's, and still works
    world.split("after", [range(2)]).all_reduce(x)
    return float(x)


def test_a_process_group_that_is_there_is_joined_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    run = small(tmp_path / "run", "layout=dp4", "train.fallback=dp2 zero1")
    assert launch(_joined, 2, run, backend="gloo", timeout=60.0) == [3.0, 3.0]
    trained(small(tmp_path / "same"), "dp2 zero1", backend="gloo")
    assert losses(tmp_path / "run") == losses(tmp_path / "same")


def test_a_layout_for_other_ranks_than_there_are_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        LayoutError, match=r"is for 4 ranks, and there are 1.*train\.fallback"
    ):
        train(
            join(environment={}),
            small(tmp_path / "run", "layout=dp4"),
            quiet=True,
        )
