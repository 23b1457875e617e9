"""The model that a benchmark compares with is the same function as `Decoder`, and not made of it."""

from __future__ import annotations

import torch

from hand_model import HandModel
from phalanx.models import Decoder

SIZES = {
    "layers": 2,
    "hidden": 24,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 40,
    "vocab": 61,
}


def test_a_hand_written_model_has_the_decoder_s_loss_and_gradients() -> None:
    torch.manual_seed(0)
    ours = Decoder(**SIZES).double()
    by_hand = HandModel(**SIZES, sequence=16).double()
    by_hand.load_state_dict(ours.state_dict())
    tokens = torch.randint(SIZES["vocab"], (3, 13))
    targets = torch.randint(SIZES["vocab"], (3, 13))
    targets[1, 4:9] = -100
    losses = ours(tokens, targets), by_hand(tokens, targets)
    # A table of angles in float32 is 1e-7 off.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    wanted = {name: weight.grad for name, weight in ours.named_parameters()}
    for name, weight in by_hand.named_parameters():
        torch.testing.assert_close(
            weight.grad, wanted[name], rtol=1e-5, atol=1e-7
        )
    assert not any(
        "phalanx" in type(module).__module__ for module in by_hand.modules()
    )
