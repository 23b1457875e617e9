"""Gated delta rule layers: linear attention with a state (Yang et al. 2024, "Gated Delta
Networks"), as Qwen3-Next uses them.

Each head keeps a matrix S (key_dim, value_dim). A token with key k, value v, decay
a and writing strength b changes it to

    S = a (I - b k k') S + b k v'

and reads S' q. Queries, keys and values pass a short causal convolution first, and the
result is normalized and gated by each head.

A sequence is computed in chunks of C tokens. Within a chunk the recurrence is a
triangular system (the WY form of section 3.3), so all chunks are matmuls in one batch.
Only the states at the starts of chunks depend on each other: S_next = M S + N.

Not here: a cache for generation, and dropout of the heads' outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norm import RMSNorm
from .sizes import DecoderSizes

# Lines of the decoder's rule table. `groups` counts key heads; each serves a run of
# neighbouring value heads.
RULES = """\
layers.*.attn.in_*.weight : groups embed
layers.*.attn.taps_* : groups - -
layers.*.attn.decay : groups
layers.*.attn.step : groups
layers.*.attn.head_norm.weight : head
layers.*.attn.out.weight : embed groups
"""
# Added to squared lengths of queries and keys, whatever eps the norms use.
LENGTH_EPS = 1e-6
# The initial decay of a state is exp(-r softplus(1)) with r in this range.
SLOWEST, FASTEST = 0.01, 16.0


def draw(name: str, weight: Tensor, generator: torch.Generator | None) -> bool:
    """Fill a weight of this layer with its initial values; False for any other."""
    inner = name.partition(".attn.")[2]
    if inner in ("step", "head_norm.weight"):
        weight.fill_(1.0)
    elif inner == "decay":
        weight.uniform_(SLOWEST, FASTEST, generator=generator).log_()
    elif inner.startswith("taps_"):
        # As torch draws a convolution of this width.
        bound = 1 / math.sqrt(weight.shape[-1])
        weight.uniform_(-bound, bound, generator=generator)
    else:
        return False
    return True


class ChunkTerms(NamedTuple):
    """The chunks of a sequence, as functions of the state S at the start of each.

    A chunk's outputs are `reads` S + `mixes` (`values` - `keys` S), and the next
    chunk's state is `moves` S + `adds`. The first four dims are (B, key heads,
    value heads of one, chunks); C stands for the tokens of a chunk.
    """

    reads: Tensor  # (..., C, key_dim): decayed queries
    mixes: Tensor  # (..., C, C): decayed products of queries and keys
    values: Tensor  # (..., C, value_dim): values, corrected within the chunk
    keys: Tensor  # (..., C, key_dim): what each token removes of S
    moves: Tensor  # (..., key_dim, key_dim)
    adds: Tensor  # (..., key_dim, value_dim)

    def states(self, first: Tensor) -> Tensor:
        """The state at the start of each chunk, from that of the first one."""
        state = first
        found = []
        moves = self.moves.unbind(3)
        adds = self.adds.unbind(3)
        for move, add in zip(moves, adds, strict=True):
            found.append(state)
            moved = move @ state
            state = moved + add
        return torch.stack(found, 3)

    def total(self) -> tuple[Tensor, Tensor]:
        """All chunks together: the matrices M and N that lead from start to end."""
        whole, *moves = self.moves.unbind(3)
        added, *adds = self.adds.unbind(3)
        for move, add in zip(moves, adds, strict=True):
            whole = move @ whole
            moved = move @ added
            added = moved + add
        return whole, added

    def outputs(self, first: Tensor) -> Tensor:
        """Reads of all tokens: (B, key heads, value heads of one, chunks, C, value_dim)."""
        states = self.states(first)
        removed = self.keys @ states
        corrected = self.values - removed
        before = self.reads @ states
        inside = self.mixes @ corrected
        return before + inside


class DeltaCore(nn.Module):
    """The convolution and the delta rule, on the tokens that a process holds.

    `x` (B, T, channels) holds queries, then keys, then values of all heads; `taps`
    (channels, width) holds the convolution of each channel. `log_decay` and `strength`
    are (B, T, value heads). It returns (B, T, value heads, value_dim). With `ids`
    (B, T of whole sequences), state and convolution start again where they change.

    Subclasses may hold other tokens: several runs of a sequence, with tokens and states
    before them that other processes compute.
    """

    def __init__(self, key_dim: int, value_dim: int, chunk: int) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.chunk = chunk
        self.runs = (
            1  # runs of neighbouring tokens of a sequence, of equal length
        )

    def held_ids(self, ids: Tensor, length: int, before: int) -> Tensor:
        """The documents of each run's tokens and of the `before` tokens before it.

        `ids` (B, T of whole sequences) are from `numbered`, and a process holds `length`
        tokens. Returns (B * runs, before + tokens), with -1 before a sequence's start.
        """
        return F.pad(ids, (before, 0), value=-1)

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens before each run: (B * runs, count, channels)."""
        return x.new_zeros(x.shape[0], count, x.shape[2])

    def states_before(self, terms: ChunkTerms) -> Tensor:
        """The state before each run: (B * runs, key heads, ..., key_dim, value_dim)."""
        return torch.zeros_like(terms.adds[:, :, :, 0])

    def forward(
        self,
        x: Tensor,
        taps: Tensor,
        log_decay: Tensor,
        strength: Tensor,
        ids: Tensor | None,
    ) -> Tensor:
        size = x.shape[:2]
        heads = log_decay.shape[-1]
        width = taps.shape[-1]
        runs = partial(_in_runs, count=self.runs)
        x = runs(x)  # (B * runs, T / runs, channels)
        if ids is not None:
            ids = self.held_ids(ids, size[1], width - 1)
        before = self.tokens_before(x, width - 1)
        line = torch.cat((before, x), 1)
        convolved = short_convolution(line, taps, ids)
        x = F.silu(convolved)
        # Each key head's part of the channels: its query, its key, its values.
        wide = heads * self.value_dim
        narrow = (x.shape[2] - wide) // 2
        sizes = [narrow, narrow, wide]
        q, k, v = torch.split(x, sizes, -1)
        # A chunk needs to know the document before it.
        near = None if ids is None else ids[:, width - 2 :]
        terms = chunk_terms(
            _in_heads(q, self.key_dim),
            _in_heads(k, self.key_dim),
            _in_heads(v, self.value_dim),
            runs(log_decay),
            runs(strength),
            near,
            self.chunk,
        )
        states = self.states_before(terms)
        y = terms.outputs(states)
        # (B * runs, heads, padded T / runs, value_dim)
        y = y.flatten(3, 4).flatten(1, 2)
        y = y[:, :, : x.shape[1]].transpose(1, 2)
        return y.reshape(*size, heads, self.value_dim)


class GatedDelta(nn.Module):
    """A gated delta rule layer, in the place of attention in a block.

    The positions of its tokens are their order, so it has no rotation.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        linear = partial(nn.Linear, sizes.hidden, bias=False)
        heads = sizes.delta_heads
        value_dim = sizes.delta_value_dim
        narrow = sizes.delta_key_heads * sizes.delta_key_dim
        wide = heads * value_dim
        self.in_q = linear(narrow)
        self.in_k = linear(narrow)
        self.in_v = linear(wide)
        self.in_z = linear(wide)
        # Writing strength and decay of each value head.
        self.in_b = linear(heads)
        self.in_a = linear(heads)
        width = sizes.delta_width
        self.taps_q = nn.Parameter(torch.empty(narrow, 1, width))
        self.taps_k = nn.Parameter(torch.empty(narrow, 1, width))
        self.taps_v = nn.Parameter(torch.empty(wide, 1, width))
        self.decay = nn.Parameter(torch.empty(heads))  # log of a rate
        self.step = nn.Parameter(torch.empty(heads))
        self.head_norm = RMSNorm(value_dim, sizes.eps)
        self.out = nn.Linear(wide, sizes.hidden, bias=False)
        self.core = DeltaCore(
            sizes.delta_key_dim, value_dim, sizes.delta_chunk
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        angles: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        # Meta tensors do not say where documents end, so costs are counted without
        # them.
        if documents is None or x.is_meta:
            document_ids = None
        elif document_ids is None:
            document_ids = numbered(documents).to(x.device)
        # In float32 or wider: a product of thousands of decays is one exponential.
        wide = torch.promote_types(x.dtype, torch.float32)
        rate = self.decay.to(wide).exp()
        # (B, T, heads)
        raw = self.in_a(x).to(wide)
        steps = F.softplus(raw + self.step.to(wide))
        strength = self.in_b(x).to(wide).sigmoid()
        mixed = torch.cat(
            (
                self.in_q(x),
                self.in_k(x),
                self.in_v(x),
            ),
            -1,
        )
        taps = torch.cat(
            (
                self.taps_q,
                self.taps_k,
                self.taps_v,
            )
        ).squeeze(1)
        # (B, T, heads, value_dim)
        y = self.core(mixed, taps, -rate * steps, strength, document_ids)
        gate = self.in_z(x).view(y.shape)
        normed = self.head_norm(y.to(x.dtype))
        # The gate is applied in float32, as in transformers.
        gated = normed * F.silu(gate.to(wide))
        y = gated.to(x.dtype)
        out: Tensor = self.out(y.flatten(2))
        return out


def numbered(documents: Tensor) -> Tensor:
    """Number the documents of each sequence (B, T): one for each run of equal values."""
    starts = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    return starts.cumsum(1)


def shared_ids(batch: Mapping[str, Any], dtype: torch.dtype) -> Tensor | None:
    """The numbers of a batch's documents on the device, computed once for all layers.

    Documents are on the host. Copying from pinned memory does not block the host.
    """
    documents: Tensor | None = batch.get("documents")
    if documents is None:
        return None
    device = batch["positions"].device
    ids = numbered(documents)
    if device.type == "cuda":
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


def short_convolution(x: Tensor, taps: Tensor, ids: Tensor | None) -> Tensor:
    """A causal convolution of each channel with its own `taps` (channels, width).

    `x` (B, width - 1 + T, channels) begins with the tokens before the first result.
    With `ids` for the same tokens, a token sees those of its own document alone.
    """
    width = taps.shape[-1]
    length = x.shape[1] - width + 1
    last = width - 1
    y = x[:, last:] * taps[:, last]
    for at in reversed(range(last)):
        earlier = slice(at, at + length)
        term = x[:, earlier] * taps[:, at]
        if ids is not None:
            same = ids[:, earlier] == ids[:, last:]
            term = term * same.unsqueeze(-1)
        y = y + term
    return y


def unit_length(x: Tensor) -> Tensor:
    """x divided by its length over the last dim."""
    squares = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squares + LENGTH_EPS)


def chunk_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    ids: Tensor | None,
    most: int,
) -> ChunkTerms:
    """The terms of all chunks of at most `most` tokens.

    q and k are (B, T, key heads, key_dim), v is (B, T, heads, value_dim), `log_decay`
    and `strength` (B, T, heads). `ids` (B, 1 + T) are documents, from the token before
    the first one on.
    """
    key_heads = q.shape[2]
    length = q.shape[1]
    chunk = min(most, length)
    chunks = partial(_in_chunks, heads=key_heads, chunk=chunk)
    wide = log_decay.dtype
    # (B, key heads, 1, chunks, C, key_dim)
    scale = q.shape[-1] ** -0.5
    q = chunks(unit_length(q.to(wide)) * scale)
    k = chunks(unit_length(k.to(wide)))
    v = chunks(
        v.to(wide)
    )  # (B, key heads, value heads of one, chunks, C, ...)
    b = chunks(strength.unsqueeze(-1))
    # The decay from a chunk's start to each of its tokens, as a logarithm.
    passed = chunks(log_decay.unsqueeze(-1)).cumsum(-2)  # (..., C, 1)
    end = passed[..., -1:, :]
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device)
    seen = earlier.tril()  # row i, column j: token i sees token j
    reaches = last = through = None
    if ids is not None:
        at = _in_chunks_of_ids(ids, chunk)
        seen = seen & at.same
        reaches = at.reaches
        last = at.last
        through = at.through
    # Differences of later tokens are positive, and their exponentials overflow.
    between = passed - passed.mT
    ratio = between.masked_fill(~seen, -math.inf).exp()
    # The triangular system of the WY form: each token corrects for those before it.
    products = k @ k.mT  # (B, key heads, 1, chunks, C, C)
    system = b * products * ratio
    from_start = _where(passed.exp(), reaches)  # (..., C, 1)
    written = b * v
    read = b * k * from_start
    right = torch.cat((written, read), -1)
    solved = torch.linalg.solve_triangular(
        system, right, upper=False, unitriangular=True
    )
    sizes = [v.shape[-1], k.shape[-1]]
    values, keys = torch.split(solved, sizes, -1)
    # What each token adds to the state at the chunk's end.
    left = (end - passed).exp()
    to_end = (k * _where(left, last)).mT
    kept = _where(end.exp(), through)
    identity = torch.eye(k.shape[-1], dtype=wide, device=k.device)
    removed = to_end @ keys
    scores = q @ k.mT
    return ChunkTerms(
        reads=q * from_start,
        mixes=scores * ratio,
        values=values,
        keys=keys,
        moves=kept * identity - removed,
        adds=to_end @ values,
    )


class _Documents(NamedTuple):
    """Masks of the tokens of a chunk that share a document; dims as in `ChunkTerms`."""

    same: Tensor  # (..., C, C)
    reaches: Tensor  # (..., C, 1): with the token before the chunk
    last: Tensor  # (..., C, 1): with the chunk's last token
    through: (
        Tensor  # (..., 1, 1): the last token with the one before the chunk
    )


def _in_chunks_of_ids(ids: Tensor, chunk: int) -> _Documents:
    own = ids[:, 1:]
    # Padding at the end belongs to the last document: it changes no state.
    missing = -own.shape[1] % chunk
    own = torch.cat((own, own[:, -1:].expand(-1, missing)), 1)
    own = own.view(len(own), 1, 1, -1, chunk, 1)
    before = torch.cat((ids[:, :1], own[:, 0, 0, :-1, -1, 0]), 1)
    before = before.view(len(own), 1, 1, -1, 1, 1)
    last = own[..., -1:, :]
    return _Documents(
        same=own == own.mT,
        reaches=own == before,
        last=own == last,
        through=last == before,
    )


def _where(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask


def _in_heads(x: Tensor, size: int) -> Tensor:
    """(B, T, channels) as (B, T, heads, size)."""
    return x.reshape(*x.shape[:2], -1, size)


def _in_runs(x: Tensor, count: int) -> Tensor:
    """(B, T, ...) as (B * runs, T / runs, ...)."""
    batch, length = x.shape[:2]
    return x.reshape(batch * count, length // count, *x.shape[2:])


def _in_chunks(x: Tensor, heads: int, chunk: int) -> Tensor:
    """(B, T, heads of x, features) as (B, heads, heads of x / heads, chunks, C, features).

    Zeros fill the last chunk: without key, strength and decay they change nothing.
    """
    missing = -x.shape[1] % chunk
    x = F.pad(x, (0, 0, 0, 0, 0, missing))
    batch, length, every, features = x.shape
    chunks = length // chunk
    x = x.reshape(batch, chunks, chunk, heads, every // heads, features)
    # (B, chunks, C, heads, of one, features)
    return x.permute(0, 3, 4, 1, 2, 5)
