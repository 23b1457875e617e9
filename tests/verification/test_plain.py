"""The plain form of the built-in models against `transformers`, and the modules against the plain form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hub_models import FAMILIES, TIME, VOCAB, in_float64, theirs, widened
from phalanx.layout import Layout, Shape
from phalanx.models import DecoderSizes, RMSNorm, kernels, noise
from phalanx.models.norm import _RootMeanSquare
from phalanx.models.rope import RopeScaling
from phalanx.parallel import Model, build_model
from phalanx.training.checkpoint_exchange import HubReader
from phalanx.training.program import with_z_loss
from phalanx.verification import SHAPES, plain, verify
from phalanx.verification.reference import PlainForward
from phalanx.verification.verify import modules_differ
from seeded import setting_of, swapped

IGNORED = -100
ROWS = ((TIME,), (9, 15))  # the lengths of the documents of each sequence


def by_our_names(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors of a model of theirs by our names for them."""
    model.save_pretrained(folder)
    with HubReader(folder) as reader:
        return {
            tensor.name: reader.whole(tensor)
            for tensor in reader.manifest.tensors
        }


def batch_of(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    size = len(rows), TIME
    batch = {
        name: torch.randint(0, VOCAB, size, generator=draw)
        for name in ("tokens", "targets")
    }
    batch["targets"][1, 5:12] = IGNORED
    batch["positions"] = torch.stack(
        [torch.cat([*map(torch.arange, row)]) for row in rows]
    )
    numbers = [
        torch.arange(len(row)).repeat_interleave(torch.tensor(row))
        for row in rows
    ]
    return {**batch, "documents": torch.stack(numbers)}


def their_loss(
    model: Any, batch: Mapping[str, Tensor], rows: tuple[tuple[int, ...], ...]
) -> Tensor:
    """The sum over tokens, of each document by itself."""
    losses = []
    for row, lengths in enumerate(rows):
        parts = (
            batch[name][row].split(lengths) for name in ("tokens", "targets")
        )
        for tokens, targets in zip(*parts, strict=True):
            logits = model(tokens.unsqueeze(0)).logits[0]
            losses.append(
                nn.functional.cross_entropy(logits, targets, reduction="sum")
            )
    return torch.stack(losses).sum()


def zero(family: str, weight: str) -> bool:
    """True of a weight whose gradient is zero: a key's bias without rotation moves all scores alike."""
    return family == "gpt2" and weight.endswith("wk.bias")


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_of_the_plain_form_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    # The angles of dynamic scaling depend on how long a sequence is.
    rows = ((TIME,), (TIME,)) if name == "dynamic" else ROWS
    batch = batch_of(rows)
    with widened():
        model = in_float64(theirs(name))
        wanted = their_loss(model, batch, rows)
        wanted.backward()
    values = by_our_names(model, tmp_path / "hub")
    shape = replace(Shape.load(f"hf:{tmp_path}/hub"), sequence=TIME)
    weights = {name: nn.Parameter(x) for name, x in values.items()}
    assert {x.dtype for x in weights.values()} == {torch.float64}
    found = plain.decoder(shape, weights, batch)
    assert float(found.loss.detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-12
    )
    found.loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    for key, gradient in by_our_names(model, tmp_path / "gradients").items():
        # a buffer of theirs: it has a part in the choice alone
        if key.endswith("router.bias"):
            assert weights[key].grad is None
            continue
        own = weights[key].grad
        assert own is not None, key
        largest = 0.0 if zero(name, key) else float(gradient.abs().max())
        assert (own - gradient).abs().max() <= 1e-10 * largest + 1e-14, key
        assert zero(name, key) or largest > 1e-6, key


def test_the_loss_of_a_router_over_a_batch_is_that_of_mixtral() -> None:
    from transformers.models.mixtral.modeling_mixtral import (
        load_balancing_loss_func,
    )

    shape = replace(
        SHAPES["experts"], scores="softmax", balance="none", batch_loss=1.0
    )
    draw = torch.Generator().manual_seed(0)
    x, matrix = (
        torch.randn(*size, generator=draw, dtype=torch.float64)
        for size in ((3, 7, 16), (9, 16))
    )
    routing = plain.route(shape, {"mlp.router.weight": matrix}, x)[1]
    logits = (x @ matrix.T).flatten(0, 1)
    wanted = load_balancing_loss_func((logits,), shape.experts, shape.top_k)
    # theirs is in float32
    assert routing.loss.item() == pytest.approx(float(wanted), rel=1e-6)


def test_an_adapter_is_that_of_peft() -> None:
    import peft

    shape = replace(SHAPES["gqa"], lora_r=3, lora_alpha=5.0)
    chosen = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["up"])
    base = nn.ModuleDict({"up": nn.Linear(16, 24)})
    made: Any = peft.inject_adapter_in_model(chosen, base)
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in made.double().named_parameters():
        own = name.replace(".base_layer", "").replace(
            ".lora_A.default", ".lora.a"
        )
        own = own.replace(".lora_B.default", ".lora.b")
        weight.data = torch.randn(
            weight.shape, generator=draw, dtype=torch.float64
        )
        tensors[own] = weight.detach()
    assert len(tensors) == 4
    x = torch.randn(2, 5, 16, generator=draw, dtype=torch.float64)
    found = plain.linear(shape, tensors, "up", x, biased=True)
    assert torch.allclose(found, made["up"](x), rtol=1e-12)


# ---- the modules


MORE: dict[str, Shape] = {
    "linear": replace(SHAPES["gqa"], rope_scaling="linear", rope_factor=4.0),
    "dynamic": replace(
        SHAPES["gqa"], rope_scaling="dynamic", rope_factor=4.0, rope_original=6
    ),
    "llama3": replace(SHAPES["gqa"], rope_factor=4.0, rope_original=16),
    "adapters": replace(SHAPES["gpt"], lora_r=3),
    "adapted latents": replace(SHAPES["latent"], lora_r=3),
    "silu without a gate": replace(SHAPES["gpt"], activation="silu"),
    "a loss of the batch": replace(SHAPES["experts"], batch_loss=0.3),
    "values wider than keys": replace(
        SHAPES["latent"], value_dim=12, q_latent=0
    ),
}


def differences(
    shape: Shape, *, packed: bool, dropout: float = 0.0, z: float = 0.0
) -> str:
    shape = replace(shape, dropout=dropout)
    make: partial[Model] = partial(build_model, shape)
    if z:
        make = partial(with_z_loss, make, z)
    setting = setting_of(shape, packed=packed, noisy=dropout > 0)
    return modules_differ(make, setting, PlainForward(shape, z))


@pytest.mark.parametrize("name", [*SHAPES, *MORE])
def test_the_modules_of_every_kind_of_model_are_their_formulas(
    name: str,
) -> None:
    shape = (SHAPES | MORE)[name]
    assert (
        differences(
            shape, packed=False, dropout=0.2 * (shape.kind == "decoder")
        )
        == ""
    )
    assert (
        differences(shape, packed=True, z=0.1 * (shape.kind == "decoder"))
        == ""
    )


def _another_eps() -> AbstractContextManager[None]:
    right = _RootMeanSquare.forward

    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return right(ctx, x, weight, 1.001 * eps)

    return swapped(_RootMeanSquare, "forward", staticmethod(forward))


def _a_gradient_by_hand() -> AbstractContextManager[None]:
    right = kernels.own_gradients

    def doubled(gradient: Tensor, qkv: Any, *more: Any, **options: Any) -> Any:
        into_q, *others = right(gradient, qkv, *more, **options)
        return [into_q * 1.001, *others]

    return swapped(kernels, "own_gradients", doubled)


def _the_other_end_of_a_blend() -> AbstractContextManager[None]:
    """RopeScalinges from and to whole indices where others do not, and the reverse."""
    right = RopeScaling.__call__

    def frequencies(self: RopeScaling, theta: float, half: Tensor) -> Tensor:
        return right(replace(self, truncated=not self.truncated), theta, half)

    return swapped(RopeScaling, "__call__", frequencies)


def _a_key_head_for_each_query_head() -> AbstractContextManager[None]:
    """Sizes of a model that forgets how many heads keys and values have."""
    right = DecoderSizes.__post_init__

    def filled(self: DecoderSizes) -> None:
        object.__setattr__(self, "kv_heads", self.heads)
        right(self)

    return swapped(DecoderSizes, "__post_init__", filled)


def _weights_that_count_from_zero() -> AbstractContextManager[None]:
    def forward(self: RMSNorm, x: Tensor) -> Tensor:
        y: Tensor = _RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y

    return swapped(RMSNorm, "forward", forward)


def _a_mask_of_other_features() -> AbstractContextManager[None]:
    right = noise._stir

    def stir(key: Any, salt: Any) -> Any:
        return right(key, salt + 1 if isinstance(salt, Tensor) else salt)

    return swapped(noise, "_stir", stir)


@pytest.mark.parametrize(
    ("patch", "name", "where"),
    [
        (_the_other_end_of_a_blend, "olmo", "of layers.0"),
        (_the_other_end_of_a_blend, "sinks", "of layers.0"),
        (_a_key_head_for_each_query_head, "gqa", "do not fit its formulas"),
    ],
)
def test_each_small_model_shows_a_mistake_in_its_own_parts(
    patch: Callable[[], AbstractContextManager[None]], name: str, where: str
) -> None:
    with patch():
        assert where in differences(SHAPES[name], packed=False)


@pytest.mark.parametrize(
    ("patch", "name", "layout", "dtype", "where"),
    [
        (_another_eps, "gqa", "dp2", "bfloat16", "the output of layers.0"),
        (
            _a_gradient_by_hand,
            "gemma",
            "dp2 fp8",
            "float64",
            "the gradient of layers.3",
        ),
        (
            _weights_that_count_from_zero,
            "gemma",
            "tp2",
            "float16",
            "the output of layers.0",
        ),
        (
            _a_mask_of_other_features,
            "gqa",
            "dp2",
            "float32",
            "the output of embed",
        ),
    ],
)
def test_verify_says_in_any_precision_that_modules_are_not_their_formulas(
    patch: Callable[[], AbstractContextManager[None]],
    name: str,
    layout: str,
    dtype: str,
    where: str,
) -> None:
    dropout = 0.2 * (patch is _a_mask_of_other_features)
    layouts = Layout.parse_many(layout)
    terms: dict[str, Any] = {"dtype": dtype, "dropout": dropout, "steps": 1}
    assert [
        v.first_difference for v in verify(SHAPES[name], layouts, **terms)
    ] == [""]
    with patch():
        (verdict,) = verify(SHAPES[name], layouts, **terms)
    assert not verdict.passed
    assert (
        "the model's modules are not its formulas (verification/plain.py)"
        in verdict.first_difference
    )
    assert where in verdict.first_difference
