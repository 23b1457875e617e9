"""The built-in models again, written as plainly as possible: the reference of `verify`.

The models that train are written for speed, with fused kernels and manual backward
passes. Here each part is its formula, in float64, and autograd does the rest. No code
is shared with `phalanx.models`, so a mistake there is a difference between the two.
Read the file from the end for a transformer from the outside in.

Letters in comments: B sequences, T tokens in each, C the width of the residual stream,
H query heads, G KV heads, D head dimension, E experts, K experts of a token, V
vocabulary size. Weights have their names in a checkpoint; a matrix is (features out,
features in).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..layout import Shape
from .adapters import adapter_output
from .mixers import MIXERS

Weights = Mapping[str, Tensor]
Bits = npt.NDArray[np.uint32]
IGNORED = -100  # targets with this value are ignored
LATENT_EPS = (
    1e-6  # DeepSeek's norms of latents use this eps, whatever the others use
)


# ---- linears and norms


def linear(
    shape: Shape, w: Weights, name: str, x: Tensor, *, biased: bool = False
) -> Tensor:
    """W x + b, and the output of an adapter beside it."""
    y = x @ w[f"{name}.weight"].T
    if biased:
        y = y + w[f"{name}.bias"]
    if name.split(".")[-1] in shape.adapters:
        y = y + adapter_output(shape, w, name, x)
    return y


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square (Zhang and Sennrich 2019, equation 4)."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x minus its mean, divided by its standard deviation (Ba et al. 2016, section
    3)."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * scale + bias


def norm(shape: Shape, w: Weights, name: str, x: Tensor) -> Tensor:
    """The norm of the residual stream. Gemma stores weights minus one."""
    scale = w[f"{name}.weight"]
    if shape.norm == "layer":
        return layer_norm(x, scale, w[f"{name}.bias"], shape.eps)
    return rms_norm(x, 1 + scale if shape.norm == "rms1" else scale, shape.eps)


def head_norm(shape: Shape, w: Weights, name: str, x: Tensor) -> Tensor:
    """The norm of queries or keys, always an RMS norm (Henry et al. 2020)."""
    scale = w[f"{name}.weight"]
    return rms_norm(x, 1 + scale if shape.norm == "rms1" else scale, shape.eps)


# ---- rotary positions (Su et al. 2021)


def rotate(shape: Shape, x: Tensor, positions: Tensor, window: int) -> Tensor:
    """Rotate the first features of queries or keys x (B, T, heads, D).

    Pairs of features are complex numbers, each turned by the position times its own
    frequency. A score then depends on distances alone (section 3.2.2).
    """
    rest = x[..., x.shape[-1] :]
    if shape.rope_dim:  # rope turns a part of each head
        x, rest = x[..., : shape.rope_dim], x[..., shape.rope_dim :]
    # (B, T, D / 2)
    angle = positions.unsqueeze(-1) * frequencies(shape, window, x.shape[-1])
    length = torch.full_like(angle, stretch_of_length(shape, window))
    turn = torch.polar(length, angle).unsqueeze(2)  # equal for all heads
    if shape.rope_pairs == "neighbours":
        pairs = torch.complex(x[..., 0::2], x[..., 1::2])
    else:
        first, second = x.chunk(2, dim=-1)
        pairs = torch.complex(first, second)
    turned = pairs * turn
    # Queries and keys have the same order of features, which does not affect the dot
    # product.
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


def frequencies(shape: Shape, window: int, size: int) -> Tensor:
    """Return theta^(-2i/D) for each pair i of a head's D features, scaled for longer
    contexts.

    Blocks with a window may have another theta without scaling (Gemma 3).
    """
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    if window and shape.rope_local_theta:
        return shape.rope_local_theta**-exponent
    plain = shape.rope_theta**-exponent
    if shape.rope_factor == 1:
        return plain
    # Position interpolation (Chen et al. 2023).
    if shape.rope_scaling == "linear":
        return plain / shape.rope_factor
    if shape.rope_scaling == "dynamic":
        return dynamic_theta(shape, size) ** -exponent
    kept = (
        kept_by_yarn(shape, size)
        if shape.rope_scaling == "yarn"
        else kept_by_llama(shape, plain)
    )
    return kept * plain + (1 - kept) * plain / shape.rope_factor


def kept_by_llama(shape: Shape, frequency: Tensor) -> Tensor:
    """The share of each frequency that Llama 3.1 keeps (Dubey et al. 2024;
    `apply_scaling` in meta-llama/llama-models): waves shorter than L / high are kept,
    those longer than L / low are slowed down."""
    wavelength = 2 * math.pi / frequency
    turns = shape.rope_original / wavelength
    between = (turns - shape.rope_low) / (shape.rope_high - shape.rope_low)
    short = wavelength < shape.rope_original / shape.rope_high
    long = wavelength > shape.rope_original / shape.rope_low
    return torch.where(short, 1.0, torch.where(long, 0.0, between))


def kept_by_yarn(shape: Shape, size: int) -> Tensor:
    """The share of each frequency that YaRN keeps (Peng et al. 2023, section 3.2, as in
    their code): a ramp over the pairs' indices, between those that turn `high` and
    `low` times in L tokens."""

    def index_of(turns: float) -> float:
        length = shape.rope_original / (2 * math.pi * turns)
        return size / 2 * math.log(length) / math.log(shape.rope_theta)

    first, last = index_of(shape.rope_high), index_of(shape.rope_low)
    if shape.rope_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    index = torch.arange(size // 2, dtype=torch.float64)
    return 1 - ((index - first) / (last - first)).clamp(0, 1)


def dynamic_theta(shape: Shape, size: int) -> float:
    """NTK-aware scaling (Peng et al. 2023, section 3.4) for the longest training
    sequence."""
    longest = max(shape.sequence, shape.rope_original)
    grown = shape.rope_factor * longest / shape.rope_original - (
        shape.rope_factor - 1
    )
    power: float = grown ** (size / (size - 2))
    return shape.rope_theta * power


def stretch_of_length(shape: Shape, window: int) -> float:
    """The factor by which YaRN lengthens queries and keys (Peng et al. 2023, equation
    21)."""
    own_theta = window and shape.rope_local_theta
    return 1.0 if own_theta or shape.rope_factor == 1 else shape.rope_attention


# ---- attention


def visible(length: int, window: int, documents: Tensor | None) -> Tensor:
    """A mask, true where a query (rows) sees a key (columns): (B or 1, 1, T, T).

    Keys are not later than the query, fewer than `window` tokens before it, and in the
    same document.
    """
    time = torch.arange(length)
    before = time.unsqueeze(1) - time  # distance from a key to a query
    seen = before >= 0
    if window:
        seen = seen & (before < window)
    if documents is None:
        return seen.view(1, 1, length, length)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)  # (B, T, T)
    return (seen & same).unsqueeze(1)


def attend(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(D)) v (Vaswani et al. 2017, equation 1) for q (B, T, H, D)
    and k, v (B, T, G, D); each KV head serves H / G query heads (Ainslie et al. 2023).
    """
    shared = q.shape[2] // k.shape[2]
    k, v = (
        k.repeat_interleave(shared, dim=2),
        v.repeat_interleave(shared, dim=2),
    )
    scores = torch.einsum("bihd,bjhd->bhij", q, k)  # query i, key j
    scores = scores / math.sqrt(shape.query_scalar or shape.head_dim)
    if shape.softcap:  # Gemma 2, section 2
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    # gpt-oss: one more key for each head, with a learned score and without a value
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape x (B, T, heads * D) to (B, T, heads, D)."""
    return x.view(*x.shape[:2], heads, -1)


def projected(
    shape: Shape, w: Weights, x: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, T, H, D), keys and values (B, T, G, D) of grouped-query attention."""
    biased = shape.bias != "none"
    q = linear(shape, w, "attn.wq", x, biased=biased)
    k = linear(shape, w, "attn.wk", x, biased=biased)
    v = linear(shape, w, "attn.wv", x, biased=biased)
    # over all heads together: OLMo 2, section 3
    if shape.qk_norm and shape.qk_norm_wide:
        q = head_norm(shape, w, "attn.q_wide_norm", q)
        k = head_norm(shape, w, "attn.k_wide_norm", k)
    q = in_heads(q, shape.heads)
    k = in_heads(k, shape.kv_heads)
    v = in_heads(v, shape.kv_heads)
    # over each head separately: Qwen 3, Gemma 3
    if shape.qk_norm and not shape.qk_norm_wide:
        q = head_norm(shape, w, "attn.q_norm", q)
        k = head_norm(shape, w, "attn.k_norm", k)
    if shape.positions == "rope":
        q = rotate(shape, q, positions, window)
        k = rotate(shape, k, positions, window)
    return q, k, v


def from_latents(
    shape: Shape, w: Weights, x: Tensor, positions: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of latent attention (DeepSeek-V2 2024, equations 37 to
    45).

    Keys and values are projected from one narrow vector; the rotated features are one
    key shared by all heads.
    """
    turned = shape.rope_dim or shape.head_dim
    plain = shape.head_dim - turned
    if shape.q_latent:
        latent = linear(shape, w, "attn.wq_a", x)
        latent = rms_norm(latent, w["attn.q_a_norm.weight"], LATENT_EPS)
        q = linear(shape, w, "attn.wq_b", latent)
    else:
        q = linear(shape, w, "attn.wq", x)
    q_plain, q_turned = torch.split(
        in_heads(q, shape.heads), [plain, turned], dim=-1
    )
    both = linear(shape, w, "attn.wkv_a", x)
    latent, k_turned = torch.split(both, [shape.kv_latent, turned], dim=-1)
    latent = rms_norm(latent, w["attn.kv_a_norm.weight"], LATENT_EPS)
    kv = in_heads(linear(shape, w, "attn.wkv_b", latent), shape.heads)
    k_plain, v = torch.split(
        kv, [plain, shape.value_dim or shape.head_dim], dim=-1
    )
    q_turned = rotate(shape, q_turned, positions, window)
    # (B, T, 1, turned)
    k_turned = rotate(shape, k_turned.unsqueeze(2), positions, window)
    k_turned = k_turned.expand(-1, -1, shape.heads, -1)
    return (
        torch.cat((q_plain, q_turned), -1),
        torch.cat((k_plain, k_turned), -1),
        v,
    )


def attention(
    shape: Shape, w: Weights, x: Tensor, batch: Weights, block: BlockOptions
) -> Tensor:
    """All heads' mixtures of values, combined by the output projection."""
    make = from_latents if shape.kv_latent else projected
    q, k, v = make(shape, w, x, batch["positions"], block.window)
    seen = visible(x.shape[1], block.window, batch.get("documents"))
    sinks = w["attn.sinks"] if shape.sinks else None
    mixed = attend(shape, q, k, v, seen, sinks).flatten(2)  # (B, T, H * D)
    if shape.output_gate:  # Qwen3-Next
        mixed = mixed * torch.sigmoid(linear(shape, w, "attn.wg", x))
    mixed = dropped(mixed, batch, block.number, shape.dropout, place=0)
    return linear(shape, w, "attn.wo", mixed, biased=shape.bias == "all")


# ---- MLPs and experts


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016, section 2)."""
    inside = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inside))


def gated(shape: Shape, gate: Tensor, up: Tensor) -> Tensor:
    """The middle of a gated MLP (Shazeer 2020), or gpt-oss's clamped form (OpenAI
    2025)."""
    if shape.activation == "clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return (gelu(gate) if shape.activation == "gelu" else silu(gate)) * up


def mlp(shape: Shape, w: Weights, name: str, x: Tensor) -> Tensor:
    biased = shape.bias == "all"
    up = linear(shape, w, f"{name}.up", x, biased=biased)
    if shape.gated:
        middle = gated(
            shape, linear(shape, w, f"{name}.gate", x, biased=biased), up
        )
    else:
        middle = silu(up) if shape.activation == "silu" else gelu(up)
    return linear(shape, w, f"{name}.down", middle, biased=biased)


@dataclass
class RouterResult:
    """The result of a router.

    `chosen`: experts (B, T, K). `scores` (B, T, E): those used for ranking, minus
    infinity for excluded groups. `loss`: the router's own loss. `excess` (E): tokens
    above the mean for each expert, times E, for the balancing bias.
    """

    chosen: Tensor
    scores: Tensor
    loss: Tensor
    excess: Tensor


def route(shape: Shape, w: Weights, x: Tensor) -> tuple[Tensor, RouterResult]:
    """Gates (B, T, E), zero for experts that are not chosen (Shazeer et al. 2017,
    section 2.1)."""
    logits = x @ w["mlp.router.weight"].T
    if shape.bias == "all":
        logits = logits + w["mlp.router.logit_bias"]
    scores = (
        logits.softmax(-1) if shape.scores == "softmax" else logits.sigmoid()
    )
    ranked = ranking(shape, w, scores.detach())
    chosen = ranked.argsort(-1, descending=True)[..., : shape.top_k]
    # (B, T, E): one where chosen
    taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    gates = scores * taken
    if shape.normalized:
        gates = gates / gates.sum(-1, keepdim=True)
    counts = taken.sum((0, 1))
    excess = shape.experts * counts - counts.sum()
    loss = router_loss(shape, logits, scores, taken)
    return gates * shape.routed_scale, RouterResult(
        chosen, ranked, loss, excess
    )


def ranking(shape: Shape, w: Weights, scores: Tensor) -> Tensor:
    """The scores used for choosing, with the balancing bias (Wang et al. 2024, section
    3).

    Of groups of experts only those with the highest sums of their two best scores
    remain (DeepSeek-V3 2024, section 2.1.2).
    """
    if shape.balance == "bias":
        scores = scores + w["mlp.router.bias"].detach()
    if shape.expert_groups == 1:
        return scores
    # (B, T, groups, experts of one)
    grouped = in_heads(scores, shape.expert_groups)
    best_two = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
    # rank of each group; the best has 0
    place = best_two.argsort(-1, descending=True).argsort(-1)
    out = place >= shape.top_groups
    return grouped.masked_fill(out.unsqueeze(-1), -math.inf).view_as(scores)


def router_loss(
    shape: Shape, logits: Tensor, scores: Tensor, taken: Tensor
) -> Tensor:
    """E sum f p, with f the share of tokens that chose an expert and p its mean score
    (Fedus et al. 2021, equation 4), over each sequence or the batch; and the z-loss
    (Zoph et al. 2022, equation 5)."""
    p = scores / scores.sum(-1, keepdim=True)
    of_sequences = shape.experts * (taken.mean(1) * p.mean(1)).sum(-1).mean()
    of_batch = shape.experts * (taken.mean((0, 1)) * p.mean((0, 1))).sum()
    z = logits.logsumexp(-1).pow(2).mean()
    return (
        shape.sequence_loss * of_sequences
        + shape.batch_loss * of_batch
        + shape.z_loss * z
    )


def experts(
    shape: Shape, w: Weights, x: Tensor
) -> tuple[Tensor, RouterResult]:
    """Every expert on every token, times its gate, mostly zero; plus a shared expert
    for all tokens (DeepSeekMoE 2024, section 3.2)."""
    gates, routing = route(shape, w, x)
    y = torch.zeros_like(x)
    for e in range(shape.experts):
        gate = x @ w["mlp.routed.gate"][e].T
        up = x @ w["mlp.routed.up"][e].T
        if shape.bias == "all":
            gate = gate + w["mlp.routed.gate_bias"][e]
            up = up + w["mlp.routed.up_bias"][e]
        down = gated(shape, gate, up) @ w["mlp.routed.down"][e].T
        if shape.bias == "all":
            down = down + w["mlp.routed.down_bias"][e]
        y = y + gates[..., e].unsqueeze(-1) * down
    if shape.shared_experts:
        shared = mlp(shape, w, "mlp.shared", x)
        if shape.shared_gate:  # Qwen3-Next
            shared = shared * torch.sigmoid(x @ w["mlp.shared_gate.weight"].T)
        y = y + shared
    return y, routing


# ---- dropout (Srivastava et al. 2014)

_EMBEDDING = 2**31 - 1  # its number among the blocks


def mixed_bits(x: Bits) -> Bits:
    """A 32-bit hash (C. Wellons' hash prospector). Products of uint32 wrap around, as
    intended."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def keyed_bits(key: Bits, number: npt.ArrayLike) -> Bits:
    """Derive a new key from a key and a number."""
    return mixed_bits(
        key + np.uint32(0x9E3779B1) * np.asarray(number, np.uint32)
    )


def dropped(
    x: Tensor, batch: Weights, number: int, rate: float, place: int
) -> Tensor:
    """x (B, T, features) with a share of its features zeroed, the others scaled up.

    Which ones is decided by a hash of the token's noise, the block's number, the place
    in the block and the feature.
    """
    if "noise" not in batch or not rate:
        return x
    noise = batch["noise"].numpy().astype(np.uint64)  # (B, T)
    low, high = (
        noise.astype(np.uint32),
        (noise >> np.uint64(32)).astype(np.uint32),
    )
    key = mixed_bits(mixed_bits(low) ^ high)
    key = keyed_bits(keyed_bits(key, number), place)
    bits = keyed_bits(key[..., np.newaxis], np.arange(x.shape[-1]))
    stays = torch.from_numpy(bits >= round(rate * 2**32))
    return x * stays / (1 - rate)


# ---- the model


@dataclass(frozen=True)
class BlockOptions:
    """A block's number, its window (0: none), and its layer between tokens."""

    number: int
    window: int
    mixer: str


@dataclass
class ForwardResult:
    """The result for a batch.

    `loss` is summed over all tokens with a target; `outputs` are those of every piece
    except the head, and `routings` those of blocks with experts, by piece name. `ahead`
    is the weighted loss of multi-token prediction, a sum over tokens too.
    """

    loss: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)
    routings: dict[str, RouterResult] = field(default_factory=dict)
    ahead: Tensor | float = 0.0


def embed(shape: Shape, w: Weights, batch: Weights) -> Tensor:
    """A row of the embedding for each token, plus one for its position in GPT-2: (B, T,
    C)."""
    x = shape.embed_scale * w["embed.tokens.weight"][batch["tokens"]]
    if shape.positions == "learned":
        x = x + w["embed.positions.weight"][batch["positions"]]
    return dropped(x, batch, _EMBEDDING, shape.dropout, place=0)


def transformer_block(
    shape: Shape, w: Weights, x: Tensor, batch: Weights, block: BlockOptions
) -> tuple[Tensor, RouterResult | None]:
    """x + attention(norm(x)), then x + mlp(norm(x)); norms are before, after, or on
    both sides."""
    before, behind = shape.norms != "post", shape.norms != "pre"
    routing = None
    y = norm(shape, w, "attn_norm", x) if before else x
    if block.mixer in MIXERS:
        mixer = MIXERS[block.mixer]
        by_name = partial(linear, shape, w)
        y = mixer.layer(shape, w, by_name, y, batch.get("documents"))
    else:
        y = attention(shape, w, y, batch, block)
    y = norm(shape, w, "attn_post_norm", y) if behind else y
    x = x + dropped(y, batch, block.number, shape.dropout, place=1)
    y = norm(shape, w, "mlp_norm", x) if before else x
    if shape.experts and block.number >= shape.dense_layers:
        y, routing = experts(shape, w, y)
    else:
        y = mlp(shape, w, "mlp", y)
    y = norm(shape, w, "mlp_post_norm", y) if behind else y
    return x + dropped(y, batch, block.number, shape.dropout, place=2), routing


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float) -> Tensor:
    """The sum of -log softmax(logits)[target], plus z_loss log(Z)^2 (PaLM: Chowdhery et
    al. 2022, section 5), over all tokens with a target. Logits (B, T, V), targets (B,
    T)."""
    counted = targets != IGNORED
    # (tokens, V) and (tokens)
    logits, targets = (
        logits[counted],
        targets[counted],
    )
    log_z = logits.logsumexp(-1)
    of_target = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (log_z - of_target + z_loss * log_z**2).sum()


def head(
    shape: Shape,
    w: Weights,
    x: Tensor,
    targets: Tensor,
    z_loss: float,
    last_norm: str = "head.norm",
) -> Tensor:
    """The loss of the last norm's output, projected to the vocabulary."""
    x = norm(shape, w, last_norm, x)
    words = w["embed.tokens.weight"] if shape.tied else w["head.output.weight"]
    logits = x @ words.T
    if shape.logit_softcap:
        logits = shape.logit_softcap * torch.tanh(logits / shape.logit_softcap)
    return cross_entropy(logits, targets, z_loss)


def decoder(
    shape: Shape,
    weights: Weights,
    batch: Weights,
    *,
    z_loss: float = 0.0,
) -> ForwardResult:
    """A decoder-only transformer on a batch of tokens, positions and targets, each (B,
    T), and optionally documents and noise."""
    x = embed(shape, weights, batch)
    outputs, routings = {"embed": x}, dict[str, RouterResult]()
    windows = shape.windows or (0,)
    mixers = shape.mixers or ("attention",)

    def block_of(number: int, x: Tensor) -> Tensor:
        name = f"layers.{number}"
        # A block of multi-token prediction is like the last one before it.
        like = min(number, shape.layers - 1)
        block = BlockOptions(
            number,
            windows[like % len(windows)],
            mixers[like % len(mixers)],
        )
        x, routing = transformer_block(
            shape, within(weights, name), x, batch, block
        )
        outputs[name] = x
        if routing is not None:
            routings[name] = routing
        return x

    for number in range(shape.layers):
        x = block_of(number, x)
    loss = head(shape, weights, x, batch["targets"], z_loss)
    ahead: Tensor | float = 0.0
    for k in range(1, shape.mtp + 1):
        name = f"mtp.{k - 1}"
        later = later_tokens(batch, k)
        x = joined(shape, weights, name, x, later["tokens"])
        outputs[name] = x
        x = block_of(shape.layers + k - 1, x)
        own_norm = f"head.predicted.{k - 1}.norm"
        own = head(shape, weights, x, later["targets"], z_loss, own_norm)
        ahead = ahead + shape.mtp_weight / shape.mtp * own
    return ForwardResult(loss, outputs, routings, ahead)


# ---- multi-token prediction (DeepSeek-V3 2024, section 2.2)


def later_tokens(batch: Weights, k: int) -> dict[str, Tensor]:
    """Token i + k and its target for each token i, (B, T) each: token by token, with
    nothing to predict behind the row or in another document."""
    rows, times = batch["tokens"].shape
    tokens = torch.zeros_like(batch["tokens"])
    targets = torch.full_like(batch["targets"], IGNORED)
    for row in range(rows):
        for i in range(times - k):
            document = (
                batch["documents"][row] if "documents" in batch else None
            )
            if document is None or document[i] == document[i + k]:
                tokens[row, i] = batch["tokens"][row, i + k]
                targets[row, i] = batch["targets"][row, i + k]
    return {"tokens": tokens, "targets": targets}


def joined(
    shape: Shape, w: Weights, name: str, x: Tensor, tokens: Tensor
) -> Tensor:
    """M [RMSNorm(Emb(t)); RMSNorm(h)] (equation 21), in the order of the published
    weights."""
    token = shape.embed_scale * w["embed.tokens.weight"][tokens]
    token = norm(shape, w, f"{name}.token_norm", token)
    x = norm(shape, w, f"{name}.hidden_norm", x)
    return torch.cat((token, x), dim=-1) @ w[f"{name}.proj.weight"].T


def within(weights: Weights, name: str) -> Weights:
    """The weights whose names start with `name`, by the rest of their names."""
    prefix = name + "."
    return {
        n.removeprefix(prefix): x
        for n, x in weights.items()
        if n.startswith(prefix)
    }


def deep_mlp(shape: Shape, weights: Weights, batch: Weights) -> ForwardResult:
    """The MLP of teaching examples: layers of gelu(x W); the loss is the mean square of
    each row."""
    x = batch["inputs"]  # (B, C)
    outputs = {"embed": x}
    for number in range(shape.layers):
        # stored as (features in, features out)
        y = x @ weights[f"layers.{number}.weight"]
        x = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        outputs[f"layers.{number}"] = x
    distance = x - batch["targets"] if "targets" in batch else x
    return ForwardResult(distance.pow(2).mean(-1).sum(), outputs)
