"""The forward of a block starts few operations: on a small device their starts take most of its time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hand_model import HandModel
from phalanx.models import Decoder

SIZES = {
    "layers": 1,
    "hidden": 24,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 40,
    "vocab": 61,
}
TIME = 8


class Counted(TorchDispatchMode):
    """Counts the operations that torch starts."""

    started = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.started += 1
        return operation(*args, **(kwargs or {}))


def test_a_block_starts_no_more_operations_than_a_hand_written_one() -> None:
    ours, by_hand = Decoder(**SIZES), HandModel(**SIZES, sequence=TIME)
    x = torch.randn(2, TIME, SIZES["hidden"], requires_grad=True)
    positions = torch.arange(TIME).expand(2, -1)
    angles = ours.derived["angles"]({"positions": positions}, x.dtype)
    with Counted() as own:
        ours.layers[0](x, positions=positions, angles=angles)
    with Counted() as hand:
        by_hand.layers[0](x, by_hand.cos, by_hand.sin)
    assert own.started <= hand.started


def test_angles_of_a_microbatch_start_few_operations() -> None:
    """Frequencies depend on no batch: only the first of a device and dtype computes them."""
    ours = Decoder(**SIZES)
    batch = {"positions": torch.arange(TIME).expand(2, -1)}
    angles = ours.derived["angles"]
    first = angles(batch, torch.float32)
    with Counted() as counted:
        again = angles(batch, torch.float32)
    # The dtype, view and conversion of the positions, their product with the frequencies,
    # cosine, sine, and one tensor of both with its view.
    assert counted.started <= 8
    assert torch.equal(first, again)
    wide = angles(batch, torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), first, rtol=0.0, atol=1e-5)
