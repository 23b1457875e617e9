"""The decoder: published sizes, pieces that chain, no leak in time or between documents, exact loss."""

import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models import Decoder, RopeScaling, decoder, token_noise

LLAMA_3_8B = {
    "hidden": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        {
            "vocab": 50257,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            "tied": True,
            "bias": "all",
        },
    ),
    "llama-2-7b": (
        6_738_415_616,
        {
            "vocab": 32000,
            "hidden": 4096,
            "layers": 32,
            "heads": 32,
            "ffn": 11008,
        },
    ),
    "llama-3-8b": (
        8_030_261_248,
        {
            "vocab": 128256,
            "rope_theta": 5e5,
            "rope_scaling": RopeScaling(),
            **LLAMA_3_8B,
        },
    ),
    "mistral-7b": (7_241_732_096, {"vocab": 32000, **LLAMA_3_8B}),
    "qwen2-0.5b": (
        494_032_768,
        {
            "vocab": 151936,
            "hidden": 896,
            "layers": 24,
            "heads": 14,
            "kv_heads": 2,
            "ffn": 4864,
            "bias": "qkv",
            "tied": True,
        },
    ),
    "qwen3-0.6b": (
        596_049_920,
        {
            "vocab": 151936,
            "hidden": 1024,
            "layers": 28,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 128,
            "ffn": 3072,
            "qk_norm": True,
            "tied": True,
        },
    ),
}
SMALL: dict[str, Any] = {
    "vocab": 13,
    "hidden": 12,
    "layers": 2,
    "heads": 4,
    "ffn": 20,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2, "head_dim": 4},
    "gpt2": {
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "tied": True,
        "bias": "all",
        "head_dim": 3,
    },
    "qwen": {"kv_heads": 1, "head_dim": 6, "bias": "qkv", "qk_norm": True},
}


def _small(kind: str, **more: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**{**SMALL, **KINDS[kind], **more}).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model


def _batch(length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(
        0, 13, (2, length + 1), generator=torch.Generator().manual_seed(1)
    )
    return (
        tokens[:, :-1],
        tokens[:, 1:],
        torch.arange(length).expand(2, length),
    )


def _logits(model: Decoder, tokens: Tensor, **shared: Tensor) -> Tensor:
    x = model.embed(tokens, shared["positions"])
    for block in model.layers:
        x = block(x, **shared)
    return model.head.logits(x)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    count, sizes = PUBLISHED[name]
    with torch.device("meta"):
        model = Decoder(**sizes)
    assert sum(weight.numel() for weight in model.parameters()) == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_chained_pieces_are_the_forward_and_stay_float64(
    kind: str,
) -> None:
    model = _small(kind, dropout=0.1)
    tokens, targets, positions = _batch()
    shared = {
        "positions": positions,
        "documents": positions // 4,
        "noise": token_noise(0, 1, torch.arange(18).reshape(2, 9)),
    }
    pieces, _ = decoder.describe(model)
    names = [name for name, _ in pieces]
    assert names == ["embed", "layers.0", "layers.1", "head"]
    assert all(model.get_submodule(name) is piece for name, piece in pieces)
    x = pieces[0][1](tokens, positions, shared["noise"])
    for _, block in pieces[1:-1]:
        x = block(x, **shared)
        assert x.dtype == torch.float64
    loss = pieces[-1][1](x, targets)
    assert loss.dtype == torch.float64
    assert torch.equal(loss, model(tokens, targets, **shared))


def _by_hand(block: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    """A block from its formulas; attention itself has its own reference."""

    def norm(weights: nn.Module, x: Tensor) -> Tensor:
        if not hasattr(weights, "bias"):
            return (
                x
                / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
                * weights.weight
            )
        x = x - x.mean(-1, keepdim=True)
        return (
            x
            / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            * weights.weight
            + weights.bias
        )

    def times(linear: nn.Linear, x: Tensor) -> Tensor:
        y = x @ linear.weight.T
        return y if linear.bias is None else y + linear.bias

    x = x + block.attn(norm(block.attn_norm, x), positions)
    mlp, y = block.mlp, norm(block.mlp_norm, x)
    up = times(mlp.up, y)
    if mlp.gate is None:
        wide = (
            up
            / 2
            * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
        )
    else:
        gate = times(mlp.gate, y)
        wide = gate / (1 + torch.exp(-gate)) * up
    return x + times(mlp.down, wide)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_its_formula(kind: str) -> None:
    block, positions = _small(kind).layers[1], torch.arange(5).expand(2, 5)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    got = block(x, positions=positions)
    torch.testing.assert_close(
        got, _by_hand(block, x, positions), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one_and_each_sees_all_before(kind: str) -> None:
    """By gradients: output t depends on input s exactly where s <= t."""
    model = _small(kind)
    _, _, positions = _batch(6)
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: model.layers[0](x, positions=positions[:1]), x
    )
    depends = jacobian.abs().sum((0, 2, 3, 5)) > 0
    assert torch.equal(depends, torch.ones(6, 6).tril().bool())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_give_what_each_gives_alone(kind: str) -> None:
    model = _small(kind)
    tokens, _, _ = _batch(9)
    documents = torch.tensor([0] * 4 + [1] * 5).expand(2, 9)
    positions = torch.tensor([*range(4), *range(5)]).expand(2, 9)
    packed = _logits(model, tokens, positions=positions, documents=documents)
    alone = [
        _logits(
            model,
            part,
            positions=torch.arange(part.shape[1]).expand(part.shape),
        )
        for part in (tokens[:, :4], tokens[:, 4:])
    ]
    torch.testing.assert_close(
        packed, torch.cat(alone, 1), rtol=1e-11, atol=1e-11
    )


def test_learned_positions_and_rotary_ones_are_used() -> None:
    tokens, _, positions = _batch()
    for kind in KINDS:
        model = _small(kind)
        other = _logits(model, tokens, positions=positions.flip(1))
        assert not torch.allclose(
            other, _logits(model, tokens, positions=positions)
        ), kind


def test_the_loss_is_the_sum_over_valid_targets() -> None:
    model = _small("llama")
    tokens, targets, positions = _batch()
    targets = targets.clone()
    targets[0, 2:5], targets[1, 0] = -100, -100
    logits = _logits(model, tokens, positions=positions)
    valid = targets != -100
    x = model.embed(tokens, positions)
    for block in model.layers:
        x = _by_hand(block, x, positions)
    x = (
        x
        / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        * model.head.norm.weight
    )
    torch.testing.assert_close(
        logits, x @ model.head.output.weight.T, rtol=1e-10, atol=1e-10
    )
    picked = logits.log_softmax(-1)[valid, :].gather(
        1, targets[valid].unsqueeze(1)
    )
    torch.testing.assert_close(
        model(tokens, targets), -picked.sum(), rtol=1e-12, atol=0
    )
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(
        model(tokens, targets) / valid.sum(), mean, rtol=1e-12, atol=0
    )
    assert model(tokens, torch.full_like(targets, -100)) == 0


def test_a_bf16_model_sums_its_loss_in_float32() -> None:
    model = _small("llama").bfloat16()
    tokens, targets, positions = _batch()
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    logits = _logits(model, tokens, positions=positions)
    assert logits.dtype == torch.bfloat16
    want = F.cross_entropy(
        logits.double().flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)


def test_a_tied_head_is_one_parameter_or_two_whose_gradients_add() -> None:
    tokens, targets, _ = _batch()
    tied, apart = _small("gpt2"), _small("gpt2", tied=False)
    assert tied.head.output.weight is tied.embed.tokens.weight
    assert "head.output.weight" not in dict(tied.named_parameters())
    apart.load_state_dict(tied.state_dict())
    for model in (tied, apart):
        model(tokens, targets).backward()
    both = apart.embed.tokens.weight.grad + apart.head.output.weight.grad
    torch.testing.assert_close(
        tied.embed.tokens.weight.grad, both, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_one_rule_with_as_many_dims_and_every_rule_a_weight(
    kind: str,
) -> None:
    for tied in (False, True):
        model = _small(kind, tied=tied)
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers()
        )
        rules = [
            line.split(" : ")
            for line in decoder.describe(model)[1].splitlines()
        ]
        for name, tensor in tensors.items():
            fits = [
                dims
                for pattern, dims in rules
                if fnmatch.fnmatchcase(name, pattern)
            ]
            assert len(fits) == 1, name
            assert len(fits[0].split()) == tensor.dim(), name
        for pattern, _ in rules:
            assert fnmatch.filter(tensors, pattern), pattern


def test_the_named_dims_have_one_size_each() -> None:
    """Sizes that differ pairwise, so that a wrong name in a rule shows."""
    model = Decoder(
        vocab=31, hidden=10, layers=1, heads=6, kv_heads=2, head_dim=4, ffn=17, sequence=9,
        bias="all", qk_norm=True,
    )  # fmt: skip
    sizes = {
        "vocab": 31,
        "embed": 10,
        "heads": 24,
        "kv": 8,
        "head": 4,
        "ffn": 17,
        "position": 9,
    }
    rules = [line.split(" : ") for line in decoder.RULES.splitlines()]
    for name, weight in model.named_parameters():
        dims = next(
            dims
            for pattern, dims in rules
            if fnmatch.fnmatchcase(name, pattern)
        )
        assert tuple(sizes[dim] for dim in dims.split()) == tuple(
            weight.shape
        ), name


def test_blocks_of_every_depth_share_one_compiled_graph() -> None:
    compiled = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    model = _small("llama", layers=10, dropout=0.1)
    tokens, targets, positions = _batch()
    noise = token_noise(0, 1, torch.arange(18).reshape(2, 9))
    eager = model(tokens, targets, positions=positions, noise=noise)
    for block in model.layers:
        block.compile(backend=count, fullgraph=True)
    got = model(tokens, targets, positions=positions, noise=noise)
    torch.testing.assert_close(got, eager, rtol=1e-12, atol=0)
    assert compiled == 1


def test_a_start_is_drawn_by_name_from_the_generator_alone() -> None:
    model = _small("gpt2", hidden=64)
    for name, weight in model.named_parameters():
        drawn = [torch.empty_like(weight) for _ in range(2)]
        for each in drawn:
            model.draw(name, each, torch.Generator().manual_seed(7))
        assert torch.equal(*drawn), name
        if name.endswith("bias"):
            assert not drawn[0].any()
        elif "norm" in name:
            assert (drawn[0] == 1).all()
        else:
            depth = 2 if name.endswith(("wo.weight", "down.weight")) else 0.5
            assert drawn[0].std() == pytest.approx(
                0.02 / (2 * depth) ** 0.5, rel=0.1
            ), name


def test_sizes_that_do_not_fit_are_refused_at_once_with_the_numbers() -> None:
    with pytest.raises(
        ValueError,
        match=r"kv_heads=3 does not divide heads=4; head_dim=5 is odd",
    ):
        Decoder(**{**SMALL, "kv_heads": 3, "head_dim": 5})
    with pytest.raises(
        ValueError, match="norm='batch': choose rms, rms1 or layer"
    ):
        Decoder(**{**SMALL, "norm": "batch"})
