"""Dropout masks: the same by value for any part, independent between parts, of the right rate."""

import pytest
import torch
from torch import Tensor

from phalanx.models import (
    Attention,
    Decoder,
    DecoderSizes,
    Dropout,
    token_noise,
)
from phalanx.models.noise import _scramble, block_noise

RATE = 0.25


def _keys(rows: int, length: int, piece: int = 0, step: int = 5) -> Tensor:
    tokens = torch.arange(rows * length).reshape(rows, length)
    return block_noise(token_noise(3, step, tokens), torch.tensor([piece]))


def _mask(
    noise: Tensor, width: int, place: int = 1, index: Tensor | None = None
) -> Tensor:
    return Dropout(RATE, place)(torch.ones(*noise.shape, width), noise, index)


def test_a_slice_of_tokens_has_the_slice_of_the_mask() -> None:
    whole = _mask(_keys(3, 8), 16)
    assert torch.equal(_mask(_keys(3, 8)[1:, 2:5], 16), whole[1:, 2:5])


def test_a_slice_of_heads_has_the_slice_of_the_mask() -> None:
    """Through attention itself, with wo as identity so that the dropped heads come out."""
    x, noise, positions = (
        torch.randn(2, 6, 8),
        _keys(2, 6),
        torch.arange(6).expand(2, 6),
    )
    sizes = DecoderSizes(
        hidden=8, heads=4, head_dim=2, positions="learned", dropout=RATE
    )
    whole = Attention(sizes)
    whole.wo.weight.data = torch.eye(8)
    full = whole(x, positions, None, noise)
    for half in range(2):
        part = Attention(sizes)
        for name in ("wq", "wk", "wv"):
            getattr(part, name).weight.data = getattr(
                whole, name
            ).weight.data.chunk(2)[half]
        part.wo.weight.data = torch.eye(4)
        part.heads = whole.heads.chunk(2)[half]
        got = part(x, positions, None, noise)
        want = full.chunk(2, -1)[half]
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want)
    columns = (full == 0).flatten(0, 1).T
    # No two features share a mask.
    assert columns.unique(dim=0).shape == columns.shape


def test_the_rate_holds_for_every_token_feature_place_and_block() -> None:
    """Within six standard deviations of a fair draw, along each dim of the mask."""
    masks = torch.stack(
        [
            _mask(_keys(16, 64, piece), 128, place) == 0
            for piece in range(4)
            for place in range(3)
        ]
    ).double()
    for kept in ((0,), (1,), (2,), (3,)):
        others = tuple(d for d in range(4) if d not in kept)
        rate, count = masks.mean(others), masks.numel() // masks.shape[kept[0]]
        bound = 6 * (RATE * (1 - RATE) / count) ** 0.5
        assert (rate - RATE).abs().max() < bound, kept


def test_masks_of_blocks_places_steps_and_seeds_are_independent() -> None:
    """Two masks agree as often as two fair draws do, and so do neighbouring tokens and features."""
    first, agree = _mask(_keys(16, 64), 128) == 0, RATE**2 + (1 - RATE) ** 2
    tokens = torch.arange(16 * 64).reshape(16, 64)
    reseeded = block_noise(token_noise(4, 5, tokens), torch.tensor([0]))
    others = {
        "block": _mask(_keys(16, 64, piece=1), 128) == 0,
        "place": _mask(_keys(16, 64), 128, place=2) == 0,
        "step": _mask(_keys(16, 64, step=6), 128) == 0,
        "seed": _mask(reseeded, 128) == 0,
        "token": first.roll(1, 1),
        "feature": first.roll(1, 2),
    }
    bound = 6 * (agree * (1 - agree) / first.numel()) ** 0.5
    for name, other in others.items():
        assert abs((first == other).double().mean() - agree) < bound, name


def test_what_is_kept_is_scaled_so_that_the_mean_stays() -> None:
    mask = _mask(_keys(2, 8), 64)
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / (1 - RATE)])


def test_keys_of_a_step_differ_for_every_token_and_between_steps() -> None:
    tokens = torch.arange(100_000)
    both = torch.cat((token_noise(0, 1, tokens), token_noise(0, 2, tokens)))
    assert both.unique().numel() == 200_000
    assert (both >= 0).all()
    assert torch.equal(both & 0xFFFFFFFF, tokens.repeat(2))


def test_one_flipped_bit_of_the_key_flips_half_of_the_bits_of_the_draw() -> (
    None
):
    keys = torch.randint(
        0, 2**32, (4096,), generator=torch.Generator().manual_seed(0)
    )
    bits = 1 << torch.arange(32)
    flipped = _scramble(keys.unsqueeze(1) ^ bits) ^ _scramble(keys).unsqueeze(
        1
    )
    share = ((flipped.unsqueeze(-1) & bits) != 0).double().mean(0)
    assert (share - 0.5).abs().max() < 6 * 0.5 / 4096**0.5


def test_recomputing_a_block_draws_the_same_mask_and_no_noise_draws_none() -> (
    None
):
    model = Decoder(
        vocab=11, hidden=8, layers=2, heads=2, dropout=0.5
    ).double()
    x, positions = (
        torch.randn(2, 5, 8, dtype=torch.float64),
        torch.arange(5).expand(2, 5),
    )
    noise = token_noise(1, 2, torch.arange(10).reshape(2, 5))
    block, other = model.layers[0], model.layers[1]
    other.load_state_dict(block.state_dict())
    once = block(x, positions=positions, noise=noise)
    assert torch.equal(once, block(x, positions=positions, noise=noise))
    assert not torch.equal(once, other(x, positions=positions, noise=noise))
    plain = block(x, positions=positions)
    assert not torch.equal(once, plain)
    assert torch.equal(plain, other(x, positions=positions))


def test_buffers_are_numbered_again_after_the_meta_device() -> None:
    with torch.device("meta"):
        model = Decoder(vocab=11, hidden=8, layers=3, heads=4, dropout=0.5)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    assert [block.piece.item() for block in model.layers] == [0, 1, 2]
    assert all(
        torch.equal(block.attn.heads, torch.arange(4))
        for block in model.layers
    )
    assert not any(
        "heads" in name or "piece" in name for name in model.state_dict()
    )
