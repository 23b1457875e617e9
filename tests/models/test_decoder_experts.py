"""Experts against the same computed token by token, and their counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from phalanx.layout import Shape
from phalanx.layout.shape import ShapeError
from phalanx.models import Decoder, DecoderSizes, ExpertMlps, Router
from phalanx.models.experts import Merge, Spread
from phalanx.models.routed import CHOICES
from phalanx.parallel import build_model

HIDDEN, FFN, EXPERTS, TOP = 8, 6, 5, 2


def made(**changed: Any) -> Any:
    options = {
        "scores": "softmax",
        "normalized": True,
        "routed_scale": 1.0,
        "balance": "bias",
    }
    torch.manual_seed(0)
    model = Decoder(
        vocab=11, hidden=HIDDEN, layers=2, heads=2, ffn=10, experts=EXPERTS, top_k=TOP,
        expert_ffn=FFN, dense_layers=1, **{"shared_experts": 2} | options | changed,
    ).double()  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight))
    return model.layers[1].mlp


def by_token(
    mlp: Any, x: Tensor, kind: str, normalized: bool, scale: float
) -> Tensor:
    """One token and one expert after the other."""
    rows = []
    for token in x.flatten(0, 1):
        logits = torch.stack([row @ token for row in mlp.router.weight])
        scores = (
            logits.exp() / logits.exp().sum()
            if kind == "softmax"
            else 1 / (1 + (-logits).exp())
        )
        best = sorted(
            range(EXPERTS),
            key=lambda e: -float((scores[e] + mlp.router.bias[e]).detach()),
        )[:TOP]
        whole = sum(scores[e] for e in best) if normalized else 1.0
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in best:
            gate, up, down = (
                getattr(mlp.routed, n)[e] for n in ("gate", "up", "down")
            )
            y = y + scale * scores[e] / whole * (
                down @ (F.silu(gate @ token) * (up @ token))
            )
        shared = mlp.shared
        wide = F.silu(shared.gate.weight @ token) * (shared.up.weight @ token)
        rows.append(y + shared.down.weight @ wide)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize(
    ("kind", "normalized", "scale"),
    [("softmax", True, 1.0), ("softmax", False, 1.0), ("sigmoid", True, 2.5)],
)
def test_experts_give_what_one_token_after_the_other_gives(
    kind: str, normalized: bool, scale: float
) -> None:
    mlp = made(scores=kind, normalized=normalized, routed_scale=scale)
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64, requires_grad=True)
    aim = torch.randn_like(x)
    want, got = by_token(mlp, x, kind, normalized, scale), mlp(x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weights = [
        x,
        *(w for name, w in mlp.named_parameters() if name != "router.bias"),
    ]
    for a, b in zip(
        torch.autograd.grad(got, weights, aim),
        torch.autograd.grad(want, weights, aim),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def clamped_by_hand(mlp: Any, x: Tensor) -> Tensor:
    """gpt-oss's experts, one token and one number after the other."""
    rows, seven = [], torch.tensor(7.0, dtype=torch.float64)
    for token in x.flatten(0, 1):
        logits = [
            row @ token + b
            for row, b in zip(*each_of(mlp.router), strict=True)
        ]
        best = sorted(
            range(EXPERTS), key=lambda e: -float(logits[e].detach())
        )[:TOP]
        total = sum(logits[e].exp() for e in best)
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in best:
            at = mlp.routed
            wide = []
            for n in range(FFN):
                gate = at.gate[e, n] @ token + at.gate_bias[e, n]
                up = at.up[e, n] @ token + at.up_bias[e, n]
                gate, up = (
                    min(gate, seven),
                    min(max(up, -seven), seven),
                )
                wide.append((up + 1) * gate / (1 + (-1.702 * gate).exp()))
            y = y + logits[e].exp() / total * (
                at.down[e] @ torch.stack(wide) + at.down_bias[e]
            )
        rows.append(y)
    return torch.stack(rows).view(x.shape)


def each_of(router: Any) -> tuple[Tensor, Tensor]:
    return router.weight, router.logit_bias


def test_clamped_experts_with_biases_are_those_written_out_by_hand() -> None:
    mlp = made(
        balance="none", shared_experts=0, bias="all", activation="clamped"
    )
    with torch.no_grad():
        mlp.routed.gate.mul_(3.0)  # so that both clamps are met
        mlp.routed.up.mul_(3.0)
    x = torch.randn(2, 7, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(
        mlp(x), clamped_by_hand(mlp, x), rtol=1e-11, atol=1e-11
    )
    assert float(F.linear(x, mlp.routed.up[0]).detach().abs().max()) > 7


def test_experts_without_a_token_and_one_with_all_of_them() -> None:
    mlp = made(balance="none")
    with torch.no_grad():
        mlp.router.weight.zero_()
        mlp.router.weight[3:, 0] = torch.tensor([1.0, 2.0])
    x = torch.rand(1, 9, HIDDEN, dtype=torch.float64) + 0.5
    mlp(x).square().sum().backward()
    busy = [e for e in range(EXPERTS) if bool(mlp.routed.up.grad[e].any())]
    assert busy == [3, 4]
    assert bool(mlp.routed.down.grad.isfinite().all())


def test_counts_are_whole_numbers_without_padding_and_once_when_computed_again() -> (
    None
):
    mlp = made()
    x = torch.randn(2, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[:, 5:] = False
    chosen = mlp.router(x)[1][:, :5].flatten().tolist()
    want = [EXPERTS * chosen.count(e) - len(chosen) for e in range(EXPERTS)]
    assert len({*want}) > 1
    mlp(x, valid).sum().backward()
    assert mlp.router.bias.grad.tolist() == want
    mlp.router.bias.grad = None
    checkpoint(mlp, x, valid, use_reentrant=False).sum().backward()
    assert mlp.router.bias.grad.tolist() == want


def test_a_bias_changes_who_is_chosen_and_no_weight() -> None:
    mlp = made(normalized=False)
    x = torch.randn(1, 4, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        mlp.router.bias.zero_()
        mlp.router.bias[2] = 5.0
    gates, chosen, _ = mlp.router(x)
    assert bool((chosen[..., 0] == 2).all())
    scores = (x @ mlp.router.weight.T).softmax(-1)
    torch.testing.assert_close(gates, scores.gather(-1, chosen))


@pytest.mark.parametrize("kind", ["sequence", "batch", "z"])
def test_losses_of_a_router_have_the_gradients_of_transformers(
    kind: str,
) -> None:
    """Three sequences, the last token of each padding; transformers adds up in float32."""
    from transformers.models.mixtral.modeling_mixtral import (
        load_balancing_loss_func,
    )

    torch.manual_seed(0)
    losses: Any = {f"{kind}_loss": 0.3}
    router = Router(
        DecoderSizes(hidden=HIDDEN, experts=EXPERTS, top_k=TOP, **losses)
    ).double()
    with torch.no_grad():
        router.weight.normal_()
    x = torch.randn(3, 7, HIDDEN, dtype=torch.float64, requires_grad=True)
    valid = torch.ones(3, 7, dtype=torch.bool)
    valid[:, 6:] = False
    inputs = x, router.weight
    logits = (x @ router.weight.T)[:, :6]
    runs = {"sequence": [*logits], "batch": [logits.flatten(0, 1)], "z": []}[
        kind
    ]
    means = [load_balancing_loss_func((run,), EXPERTS, TOP) for run in runs]
    means += [logits.logsumexp(-1).square().mean()] if kind == "z" else []
    wanted = torch.autograd.grad(0.3 * torch.stack(means).mean(), inputs)
    share = torch.tensor([1 / 18], dtype=torch.float64)
    terms = router(x, valid).terms
    choices = terms.pop(CHOICES)
    seeds = router.term_gradients(share, choices, choices.sum(0, keepdim=True))
    assert {*seeds} == {*terms}
    found = torch.autograd.grad(
        [terms[name] for name in seeds], inputs, [*seeds.values()]
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-7)
        assert bool(b.any())
    assert not any(
        bool(g.any())
        for g in torch.autograd.grad(router(x)[0].sum() * 0.0, inputs)
    )
    # As a forward that is computed again later: the counts alone.
    with torch.no_grad():
        again = router(x, valid).terms
    assert {*again} == {CHOICES}
    assert torch.equal(again[CHOICES], choices)


def test_grouped_products_give_what_a_loop_gives() -> None:
    """In 16 bits, with an expert that has no token. Widths are multiples of 16 bytes."""
    torch.manual_seed(0)
    experts = ExpertMlps(
        DecoderSizes(hidden=16, expert_ffn=24, experts=4)
    ).bfloat16()
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0.0, 0.3)
    tokens, counts = torch.randn(11, 16).bfloat16(), torch.tensor([5, 0, 2, 4])
    grouped, loop = (
        experts.grouped(tokens, counts),
        experts.on_sorted(tokens, counts),
    )
    torch.testing.assert_close(grouped, loop, rtol=2e-2, atol=2e-2)


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_gradients_of_a_token_s_copies_are_summed_with_one_rounding() -> None:
    """Without adding by index, which a GPU does with atomics: in another order each time, and in 16 bits."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, HIDDEN).bfloat16().requires_grad_()
    chosen = torch.tensor([[[4, 1, 0], [1, 2, 3], [4, 3, 1]]]).expand(
        2, -1, -1
    )
    tokens, _, order, counts = Spread(EXPERTS)(x, torch.ones(2, 3, 3), chosen)
    assert counts.tolist() == [2, 6, 2, 4, 4]
    merged = Merge()(tokens, torch.ones(2, 3, 3, dtype=torch.bfloat16), order)
    torch.testing.assert_close(merged, 3 * x.detach(), rtol=1e-2, atol=0)
    gradient = torch.randn(18, HIDDEN).bfloat16()
    with Operations() as seen:
        tokens.backward(gradient)
    by_token = [
        gradient[order.div(3, rounding_mode="floor") == token]
        for token in range(6)
    ]
    sums = [copies.double().sum(0) for copies in by_token]
    assert x.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), torch.stack(sums).bfloat16())
    assert not [name for name in seen.names if "add" in name or "put" in name]


def test_scores_of_16_bit_tokens_are_float32() -> None:
    router = Router(
        DecoderSizes(hidden=HIDDEN, experts=EXPERTS, top_k=TOP)
    ).bfloat16()
    with torch.no_grad():
        router.weight.normal_()
    assert (
        router(torch.randn(1, 3, HIDDEN).bfloat16())[0].dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("8x7b", 46.70, 12.88), ("30b-a3b", 30.53, 3.35), ("deepseek-v3", 671.03, 37.55),
        ("gpt-oss-20b", 20.91, 4.19), ("gpt-oss-120b", 116.83, 5.71),
    ],
)  # fmt: skip
def test_sizes_are_those_published(
    name: str, billions: float, active: float
) -> None:
    """Jiang et al. 2024 say 47B and 13B; Yang et al. 2025 30.5B and 3.3B; DeepSeek-V3 2024 671B and
    37B; OpenAI 2025 20.91B and 3.61B, 116.83B and 5.13B, of which the second is without
    the lookup's 0.58B."""
    shape = Shape.load(name)
    assert shape.total == sum(
        w.numel() for w in build_model(shape).weights.values()
    )
    assert (round(shape.total / 1e9, 2), round(shape.active / 1e9, 2)) == (
        billions,
        active,
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("top_k", 9, "top_k = 9 is more than experts = 4"),
        ("dense_layers", 2, "leaves no block of 2 for experts"),
        ("gated", False, "experts are gated MLPs"),
        (
            "expert_groups",
            3,
            "experts = 4 do not form 3 equal groups of two or more",
        ),
        (
            "expert_groups",
            4,
            "experts = 4 do not form 4 equal groups of two or more",
        ),
        ("top_groups", 2, "top_groups = 2 of 1 have 8 experts"),
        ("value_dim", 4, "without kv_latent"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(
    key: str, value: object, words: str
) -> None:
    with pytest.raises(ShapeError, match=words):
        Shape.of(
            {"layers": 2, "hidden": 8, "vocab": 5, "experts": 4, key: value}
        )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kv_heads": 2}, "a key for each head"),
        ({"bias": "qkv"}, "a key for each head"),
        ({"positions": "learned"}, "rope turns rope_dim = 2 of head_dim = 4"),
        ({"rope_dim": 6}, "rope turns rope_dim = 6 of head_dim = 4"),
    ],
)
def test_what_latents_cannot_have_is_refused(
    more: dict[str, object], words: str
) -> None:
    latent = {
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "vocab": 5,
        "kv_latent": 3,
        "rope_dim": 2,
    }
    assert Shape.of(latent).turned == 2
    with pytest.raises(ShapeError, match=words):
        Shape.of(latent | more)
