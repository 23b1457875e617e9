"""Attention against its definition, written out with loops over tokens in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models import Attention, Core, DecoderSizes, RopeScaling, kernels
from phalanx.models.rope import Rope, rotate

Q, T, HEADS, KV, SIZE = 2, 7, 4, 2, 6
SIZES = DecoderSizes(
    hidden=8, heads=HEADS, kv_heads=KV, head_dim=SIZE, rope_theta=100.0
)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    return (
        _random(Q, T, HEADS, SIZE),
        _random(Q, T, KV, SIZE, seed=1),
        _random(Q, T, KV, SIZE, seed=2),
    )


def _positions(rows: int = Q, length: int = T) -> Tensor:
    return torch.arange(length).expand(rows, length)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None
) -> Tensor:
    """One query, one key at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for head in range(q.shape[2]):
                kv = head // (q.shape[2] // k.shape[2])
                seen = [
                    s
                    for s in range(t + 1)
                    if documents is None or documents[b, s] == documents[b, t]
                ]
                scores = [
                    float(q[b, t, head] @ k[b, s, kv]) / math.sqrt(q.shape[3])
                    for s in seen
                ]
                weights = [math.exp(score) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    out[b, t, head] += weight / sum(weights) * v[b, s, kv]
    return out


@pytest.mark.parametrize(
    "documents", [None, torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5] * 7])]
)
def test_the_core_is_attention_written_out_by_hand(
    documents: Tensor | None,
) -> None:
    q, k, v = _qkv()
    got = Core()(q, k, v, _positions(), documents)
    torch.testing.assert_close(
        got, _by_hand(q, k, v, documents), rtol=1e-12, atol=1e-12
    )


DOCUMENTS = torch.tensor(
    [
        [7] * 13,
        [7] * 13,
        [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 0],
        [*range(12), 11],
        [4] * 6 + [9] * 7,
    ]
)


def _with_gradients(
    attend: Callable[..., Tensor], *qkv: Tensor
) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in qkv]
    y = attend(*own)
    y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos())
    return [y.detach(), *(x.grad for x in own if x.grad is not None)]


def _masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention with a dense mask. A document is a run of equal numbers."""
    runs = (DOCUMENTS.diff(dim=1, prepend=DOCUMENTS[:, :1]) != 0).cumsum(1)
    mask = (runs.unsqueeze(-1) == runs.unsqueeze(-2)).tril().unsqueeze(1)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize("kernel", ["CPU", "PLAIN"])
@pytest.mark.parametrize("strip", [5, 512])
def test_documents_and_their_gradients_are_those_of_a_dense_mask(
    kernel: str, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels, "_kernels", lambda q, mask=None: getattr(kernels, kernel)
    )
    monkeypatch.setattr(kernels, "STRIP", strip)
    rows, length = DOCUMENTS.shape
    qkv = [
        _random(rows, length, n, SIZE, seed=seed)
        for seed, n in enumerate((HEADS, KV, KV))
    ]
    got = _with_gradients(lambda *x: Core()(*x, None, DOCUMENTS), *qkv)
    for one, other in zip(got, _with_gradients(_masked, *qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_compiled_core_keeps_documents_apart() -> None:
    rows, length = DOCUMENTS.shape
    qkv = [
        _random(rows, length, n, SIZE, seed=seed)
        for seed, n in enumerate((HEADS, KV, KV))
    ]
    core = torch.compile(Core(), fullgraph=True, backend="aot_eager")
    got = _with_gradients(lambda *x: core(*x, None, DOCUMENTS), *qkv)
    for one, other in zip(got, _with_gradients(_masked, *qkv), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    runs: Tensor,
    window: int,
    softcap: float,
) -> Tensor:
    """The scores of all pairs and one column more, whose probability is dropped: as gpt-oss has it."""
    k, v = (x.repeat_interleave(HEADS // KV, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(SIZE)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    sees = (
        torch.ones(T, T, dtype=torch.bool)
        .tril()
        .triu(1 - window if window else -T)
    )
    sees = sees & (runs.unsqueeze(-1) == runs.unsqueeze(-2)).unsqueeze(1)
    scores = scores.masked_fill(~sees, -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(Q, -1, T, 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bshd->bthd", shares, v)


@pytest.mark.parametrize("kernel", ["CPU", "PLAIN"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_sinks_and_their_gradients_are_those_of_one_more_column_of_scores(
    packed: bool,
    window: int,
    softcap: float,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        kernels, "_kernels", lambda q, mask=None: getattr(kernels, kernel)
    )
    monkeypatch.setattr(kernels, "STRIP", 4)
    documents = torch.tensor([[0] * 3 + [1] * 4, [2] * 7])
    runs = documents if packed else torch.zeros_like(documents)
    inputs = *_qkv(), 2 * _random(HEADS, seed=3)
    core = Core(window, softcap)
    got = _with_gradients(
        lambda q, k, v, s: core(
            q, k, v, None, documents if packed else None, s
        ),
        *inputs,
    )
    want = _with_gradients(
        lambda *x: _with_sinks(*x, runs, window, softcap), *inputs
    )
    assert len(got) == 5
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class _Pairs(TorchDispatchMode):
    """How many queries meet how many keys, over all calls of a kernel."""

    pairs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            q, k = args[:2]
            self.pairs += q.shape[0] * q.shape[2] * k.shape[2]
            assert "attn_mask" not in (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_between_documents() -> None:
    rows, length = DOCUMENTS.shape
    x = _random(rows, length, HEADS, SIZE)
    with _Pairs() as seen:
        kernels.attend_own(x, x, x, DOCUMENTS, None)
    lengths = [13, 13, 1, 3, 6, 2, 1, *[1] * 11, 2, 6, 7]
    assert seen.pairs == sum(n * n for n in lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_grouped_queries_equal_repeated_key_heads(packed: bool) -> None:
    q, k, v = _qkv()
    documents = torch.tensor([[0] * 3 + [1] * 4] * Q) if packed else None
    grouped = Core()(q, k, v, _positions(), documents)
    repeated = Core()(
        q,
        k.repeat_interleave(2, 2),
        v.repeat_interleave(2, 2),
        _positions(),
        documents,
    )
    torch.testing.assert_close(grouped, repeated, rtol=1e-13, atol=1e-13)


def test_the_whole_of_attention_is_the_formula_with_complex_rotations() -> (
    None
):
    torch.manual_seed(0)
    attn = Attention(
        replace(SIZES, hidden=10, bias="all", qk_norm=True)
    ).double()
    for weight in attn.parameters():
        torch.nn.init.normal_(weight)
    x, positions = (
        _random(Q, T, 10),
        torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]]),
    )

    def turned(linear: torch.nn.Linear, heads: int, norm: Tensor) -> Tensor:
        y = (x @ linear.weight.T + linear.bias).reshape(Q, T, heads, SIZE)
        y = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm
        out = torch.empty_like(y)
        for b in range(Q):
            for t in range(T):
                for i in range(SIZE // 2):
                    angle = float(positions[b, t]) * 100.0 ** (-2 * i / SIZE)
                    z = torch.complex(y[b, t, :, i], y[b, t, :, i + SIZE // 2])
                    z = z * complex(math.cos(angle), math.sin(angle))
                    out[b, t, :, i], out[b, t, :, i + SIZE // 2] = (
                        z.real,
                        z.imag,
                    )
        return out

    with torch.no_grad():
        q = turned(attn.wq, HEADS, attn.q_norm.weight)
        k = turned(attn.wk, KV, attn.k_norm.weight)
        v = (x @ attn.wv.weight.T + attn.wv.bias).reshape(Q, T, KV, SIZE)
        want = (
            _by_hand(q, k, v, None).flatten(2) @ attn.wo.weight.T
            + attn.wo.bias
        )
        torch.testing.assert_close(
            attn(x, positions), want, rtol=1e-11, atol=1e-11
        )


def test_rotary_scores_depend_only_on_relative_positions() -> None:
    rope = Rope(10000.0)
    q, k = _random(1, T, HEADS, SIZE), _random(1, T, HEADS, SIZE, seed=1)

    def scores(positions: Tensor) -> Tensor:
        angles = rope.angles(positions, SIZE, torch.float64)
        return torch.einsum(
            "bthd,bshd->bhts", rotate(q, *angles), rotate(k, *angles)
        )

    start = _positions(1)
    torch.testing.assert_close(
        scores(start), scores(start + 1000), rtol=1e-10, atol=1e-10
    )
    assert not torch.allclose(scores(start), scores(start * 2))


def test_rotation_keeps_lengths_and_leaves_position_zero() -> None:
    x = _random(1, T, HEADS, SIZE)
    turned = rotate(x, *Rope(10.0).angles(_positions(1), SIZE, x.dtype))
    torch.testing.assert_close(
        turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0
    )
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1], x[:, 1])


def test_llama_scaling_keeps_fast_waves_and_slows_the_slow_ones() -> None:
    """The three cases of Llama 3.1's published rule, by wavelength."""
    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, sequence=8192)
    waves = [100.0, 2047.0, 4096.0, 8193.0, 1e6]
    half = (torch.tensor(waves, dtype=torch.float64) / (2 * math.pi)).log()
    got = scaling(math.e, half)
    blend = (8192 / 4096 - 1) / (4 - 1)
    slowed = [1, 1, (1 - blend) / 8 + blend, 1 / 8, 1 / 8]
    want = [
        2 * math.pi / wave * slow
        for wave, slow in zip(waves, slowed, strict=True)
    ]
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=0
    )


def test_a_replaced_core_is_used_and_a_cut_by_heads_sums_to_the_whole() -> (
    None
):
    """Each half of the heads, with its half of the weights, gives one term of wo's sum."""
    torch.manual_seed(1)
    whole = Attention(SIZES).double()
    x, total = _random(Q, T, 8), torch.zeros(Q, T, 8, dtype=torch.float64)
    for half in range(2):
        part = Attention(SIZES).double()
        for name in ("wq", "wk", "wv"):
            weight = getattr(whole, name).weight.data.chunk(2, 0)[half]
            getattr(part, name).weight.data = weight
        part.wo.weight.data = whole.wo.weight.data.chunk(2, 1)[half]
        total += part(x, _positions())
    torch.testing.assert_close(
        total, whole(x, _positions()), rtol=1e-12, atol=1e-12
    )

    class Values(torch.nn.Module):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
        ) -> Tensor:
            return v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    whole.core = Values()
    v = (
        F.linear(x, whole.wv.weight)
        .unflatten(-1, (KV, SIZE))
        .repeat_interleave(2, 2)
        .flatten(2)
    )
    torch.testing.assert_close(
        whole(x, _positions()), F.linear(v, whole.wo.weight)
    )
