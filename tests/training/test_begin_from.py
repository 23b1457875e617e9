"""Weights from elsewhere replace drawn ones only when no rank reads those any more."""

from __future__ import annotations

import pytest
import torch
from checkpoint_worlds import SHAPE

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.comm.threads import ThreadGroup
from phalanx.layout import Layout
from phalanx.parallel import Precision, build_model
from phalanx.parallel.local import build_local
from phalanx.training.checkpoint_format import CheckpointError
from phalanx.training.checkpoint_load import TensorReader, begin
from phalanx.training.program import program_of
from torch_shm.calls import Call

WIDE = Precision(torch.float64, torch.float64, torch.float64)


def order_of(world: World) -> list[str]:
    """What a rank does, up to the read of weights that are not there."""
    layout, model = Layout.parse("dp2 zero1 fp64"), build_model(SHAPE)
    program = program_of(model, layout)
    local = build_local(world, layout, model, program, precision=WIDE)
    done: list[str] = []

    class Listed(ThreadGroup):
        def _begin(self, call: Call) -> object:  # type: ignore[override]
            done.append(call.kind)
            return super()._begin(call)

    local.groups.everyone.__class__ = Listed

    def source() -> TensorReader:
        done.append("read")
        raise CheckpointError("no such folder")

    with pytest.raises(CheckpointError, match="no such folder"):
        begin(source, local, {})
    return done


def test_ranks_meet_before_weights_from_elsewhere_replace_drawn_ones() -> None:
    for done in launch(order_of, 2, backend="threads"):
        assert done[:2] == ["barrier", "read"]
