"""Records of a run's own steps: layouts compare equal with one process, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_worlds import small, trained
from torch_audit import records
from torch_audit.checks import check_run
from torch_audit.compare import EQUAL, REFUTED, compare
from torch_audit.report import verdict_text
from torch_audit.runs import Names, Run, load
from torch_audit.shards import whole_place
from torch_audit.sketch import sketch

from phalanx.parallel import Unit
from phalanx.train.audit import folder_of

DENSE = ("steps=2", "train.audit=2", "validation.batches=0")
EXPERTS = (
    *DENSE,
    "model.experts=4",
    "model.top_k=2",
    "model.heads=4",
    "model.kv_heads=2",
)


def recorded(out: Path, layout: str, *more: str) -> Run:
    trained(small(out, *more), layout)
    return load(folder_of(out, 0))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("one") / "run", "fp64", *DENSE)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2x2 zero3 acc:3 fp64",
        "tp2 seq pp2 1f1b:2 fp64",
        "dp2 cp2 zero1 fp64",
        "tp3 fp64",
    ],
)
def test_a_layout_records_the_step_of_one_process(
    tmp_path: Path, one: Run, layout: str
) -> None:
    run = recorded(tmp_path / "run", layout, *DENSE)
    verdict = compare(one, run)
    assert verdict.result == EQUAL, verdict_text(verdict, layout, "one")
    assert (verdict.steps, verdict.precision) == (2, "float64")
    assert 0 < verdict.worst < 1e-12
    assert not [x for x in check_run(run) if x.fault]
