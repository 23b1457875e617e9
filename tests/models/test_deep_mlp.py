"""The deep MLP of teaching examples: the formula, the summed loss, pieces that chain."""

import torch

from phalanx.models import DeepMlp, mlp


def test_the_loss_is_the_mean_square_times_the_rows() -> None:
    torch.manual_seed(0)
    model = DeepMlp(width=6, layers=3).double()
    rows, targets = (torch.randn(5, 6, dtype=torch.float64) for _ in range(2))
    x = rows
    for n in range(3):
        x = x @ model.get_parameter(f"layers.{n}.weight")
        x = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    torch.testing.assert_close(
        model(rows) / 5, x.square().mean(), rtol=1e-12, atol=0
    )
    want = (x - targets).square().mean()
    torch.testing.assert_close(
        model(rows, targets) / 5, want, rtol=1e-12, atol=0
    )


def test_the_chained_pieces_are_the_forward_whatever_blocks_share() -> None:
    model = DeepMlp(width=4, layers=2).double()
    pieces, rules = mlp.describe(model)
    assert [name for name, _ in pieces] == [
        "embed",
        "layers.0",
        "layers.1",
        "head",
    ]
    assert rules == "layers.*.weight : embed ffn"
    rows = torch.randn(2, 3, 4, dtype=torch.float64)
    x = pieces[0][1](rows, torch.arange(3))
    for _, layer in pieces[1:-1]:
        x = layer(x, positions=torch.arange(3), documents=None, noise=None)
    assert torch.equal(pieces[-1][1](x, None), model(rows))
    assert model(rows).dtype == torch.float64


def test_the_sum_over_parts_of_the_rows_is_the_whole() -> None:
    model = DeepMlp(width=4, layers=2).double()
    rows = torch.randn(7, 4, dtype=torch.float64)
    parts = sum(model(part) for part in rows.split([1, 4, 2]))
    torch.testing.assert_close(parts, model(rows), rtol=1e-12, atol=0)


def test_a_bf16_loss_is_summed_in_float32() -> None:
    assert (
        DeepMlp(width=4, layers=1)
        .bfloat16()(torch.randn(3, 4).bfloat16())
        .dtype
        == torch.float32
    )
