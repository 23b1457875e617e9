"""Cross-entropy over the vocabulary, without a second matrix of logits.

The logits of 8,192 tokens over 128k words take 2 GiB in 16 bits. With a float32 copy,
its softmax and its gradient they would take 14 GiB. So the logits are read a few rows
at a time, forward keeps one number for each token, and backward overwrites the logits
with their gradient.

If a head hands over its last product instead of the logits (`ChunkedLogits`), they never
exist as a whole either: fused linear cross-entropy, as in Liger Kernel (Hsu et al. 2024).
Each chunk of tokens makes its logits, turns them into their gradient, and multiplies it
with the weight and the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fused import fuses, write_loss_gradient

IGNORED = -100  # targets with this value add nothing to the loss

# Elements in a tile, by device: a float32 copy fits in a CPU's cache, or keeps a GPU
# busy.
NUMBERS, LARGE = {"cpu": 1 << 20}, 1 << 25

# Elements in a chunk of logits, likewise; on a GPU 2,048 tokens over 128k words. Each
# chunk reads and writes the weight's whole gradient, so it has enough tokens to hide
# that.
CHUNK, LARGE_CHUNK = {"cpu": 1 << 24}, 1 << 28

Agree = Callable[[Tensor, str], object]
Add = Callable[[Sequence[Tensor]], Tensor]


class ExtraLoss(NamedTuple):
    """An additional loss that a head returns as a sum.

    A log divides `share` times the sum by the number of targets. The whole loss
    includes `factor` times the same product.
    """

    share: float
    factor: float


class Words(NamedTuple):
    """A rank's part of the vocabulary.

    The first `width` columns of its logits are the words from `first` on, and any
    further columns are padding. `agree` all-reduces a tensor in place ("max" or "sum").

    The logits may be computed in `parts` equal slices of the vocabulary, out of
    `all_parts` on all ranks. Then `add` sums over this rank's slices.
    """

    first: int = 0
    width: int | None = None  # None: all columns
    agree: Agree | None = None
    parts: int = 1
    all_parts: int = 1
    add: Add | None = None

    def part(self, number: int, width: int) -> Words:
        """A part of `width` words."""
        return self._replace(first=self.first + number * width, width=width)

    def sum(self, terms: Sequence[Tensor]) -> Tensor:
        """The sum over the parts of this rank."""
        if self.add is None:
            (only,) = terms
            return only
        return self.add(terms)


EVERY_WORD = Words()


class ChunkedLogits(NamedTuple):
    """Logits as the product that makes them: x times a weight, then a soft cap.

    The weight is read when a chunk is made. Its gradient goes to `contribute`, as two
    factors, and the rows of the weight if the logits are made in parts; None if the
    weight is frozen.
    """

    x: Tensor  # (..., in)
    weight: nn.Parameter  # (words, in)
    contribute: Callable[..., None] | None
    cap: float = 0.0
    # True: the loss has its value after the forward. The backward makes the logits again.
    at_once: bool = False


Logits = Tensor | ChunkedLogits
AnyLogits = TypeVar("AnyLogits", Tensor, ChunkedLogits)


def soft_cap(logits: AnyLogits, cap: float) -> AnyLogits:
    """The logits l as c tanh(l / c), with the cap c; a cap of 0 changes nothing."""
    if not cap:
        return logits
    if isinstance(logits, ChunkedLogits):
        return logits._replace(cap=cap)
    return cap * torch.tanh(logits / cap)


def whole_logits(logits: Logits) -> Tensor:
    """The logits (..., words), computed at once where a head hands over its product."""
    if not isinstance(logits, ChunkedLogits):
        return logits
    whole = F.linear(logits.x, logits.weight)
    return soft_cap(whole, logits.cap)


class _Tile(NamedTuple):
    """A few tokens of the logits."""

    rows: slice
    logits: Tensor  # (tokens, width): a view
    wide: Tensor  # in float32 or wider, (tokens, width); a copy if the logits are narrower
    room: Tensor  # scratch of that size and dtype, shared by all tiles


def _tiles(logits: Tensor, width: int) -> Iterator[_Tile]:
    """Yield tiles of a few tokens, with the first `width` words of each."""
    dtype = _wide(logits)
    numbers = NUMBERS.get(logits.device.type, LARGE)
    tokens = logits.shape[0]
    count = max(1, min(tokens, numbers // max(1, width)))
    copied = dtype != logits.dtype
    rooms = [
        torch.empty(count, width, dtype=dtype, device=logits.device)
        for _ in range(1 + copied)
    ]
    if logits.is_meta:
        # On meta only sizes count: all tokens at once, with the memory of one tile.
        rooms = [
            room.as_strided((tokens, width), (width, 1)) for room in rooms
        ]
        count = tokens
    for start in range(0, tokens, count):
        rows = slice(start, min(start + count, tokens))
        x = logits[rows, :width]
        room, *more = (room[: rows.stop - start] for room in rooms)
        wide = more[0].copy_(x) if copied else x
        yield _Tile(rows, x, wide, room)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _TokenSums(NamedTuple):
    """Sums over a token's logits for its loss and its gradient: (tokens,) each."""

    losses: Tensor
    # Log-sum-exp over the words of each part, (tokens, parts), and over all words; None
    # if no gradient needs them.
    own: Tensor | None = None
    total: Tensor | None = None


class _Terms(NamedTuple):
    """The loss to compute: this rank's words, and the factor of z-loss."""

    words: Words
    z: float

    def width(self, logits: Tensor) -> int:
        width = self.words.width
        return logits.shape[1] if width is None else width

    def whole(self, logits: Tensor) -> bool:
        """True if this rank has the logits of all words."""
        words = self.words
        every = self.width(logits) == logits.shape[1] and not words.first
        return every and words.agree is None and words.all_parts == 1

    def part(self, number: int, width: int) -> _Terms:
        """The terms of one part of the words."""
        if self.words.all_parts == 1:
            return self
        return self._replace(words=self.words.part(number, width))

    def place(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The column of each target, and True where this rank has it."""
        first = self.words.first
        mine = (targets >= first) & (targets < first + width)
        return torch.where(mine, targets - first, 0), mine


def _token_sums(
    parts: Sequence[Tensor], targets: Tensor, terms: _Terms
) -> _TokenSums:
    """The losses of tokens from their logits, (tokens, words) of each part."""
    if terms.whole(parts[0]):
        sums = _whole_sums(parts[0], targets, terms)
    else:
        sums = _shared_sums(parts, targets, terms)
    if not terms.z:
        return sums
    assert sums.total is not None
    losses = sums.losses + terms.z * sums.total.square()
    valid = targets != IGNORED
    return sums._replace(losses=torch.where(valid, losses, 0.0))


def _whole_sums(logits: Tensor, targets: Tensor, terms: _Terms) -> _TokenSums:
    """The sums over all words.

    Softmax and its logarithm are one fused kernel each: on a CPU they take half as long
    as exp, sum and log one after the other.
    """
    losses = targets.new_empty(targets.shape, dtype=_wide(logits))
    totals = torch.empty_like(losses) if terms.z else None
    for rows, _, x, room in _tiles(logits, logits.shape[1]):
        torch.log_softmax(x, -1, out=room)
        losses[rows] = F.nll_loss(
            room, targets[rows], ignore_index=IGNORED, reduction="none"
        )
        if totals is not None:
            totals[rows] = _log_sum(x, room)
    return _TokenSums(losses, None, totals)


def _part_sums(
    logits: Tensor, targets: Tensor, terms: _Terms
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp over one part of the words, and the target's logit if it is there.

    Both are (tokens,).
    """
    width = terms.width(logits)
    at, mine = terms.place(targets, width)
    chosen = torch.zeros_like(targets, dtype=_wide(logits))
    own = torch.full_like(chosen, -math.inf)
    if width:
        index = at.unsqueeze(-1)
        logit = logits.gather(-1, index).squeeze(-1)
        # Only the part with the target's column has its logit.
        chosen.copy_(logit).mul_(mine)
        for rows, _, x, room in _tiles(logits, width):
            torch.log_softmax(x, -1, out=room)
            own[rows] = _log_sum(x, room)
    return own, chosen


def _shared_sums(
    parts: Sequence[Tensor], targets: Tensor, terms: _Terms
) -> _TokenSums:
    """The sums over a vocabulary in parts: ranks all-reduce two numbers per token."""
    words = terms.words
    found = [
        _part_sums(part, targets, terms.part(number, part.shape[1]))
        for number, part in enumerate(parts)
    ]
    own = torch.stack([each for each, _ in found], -1)  # (tokens, parts)
    total, chosen = found[0]
    # log Z = most + log(sum over parts of exp(own - most)), which cannot overflow.
    # Both sums are stacked into one all-reduce.
    if words.agree is not None:
        most = own.amax(-1)
        words.agree(most, "max")
        # (2, tokens) of each part
        terms_of = [
            torch.stack(((each - most).exp_(), logit)) for each, logit in found
        ]
        sums = words.sum(terms_of)
        words.agree(sums, "sum")
        total = most.add_(sums[0].log())
        chosen = sums[1]
    losses = torch.where(targets != IGNORED, total - chosen, 0.0)
    return _TokenSums(losses, own, total)


def _log_sum(x: Tensor, logs: Tensor) -> Tensor:
    """The log-sum-exp of each row, where `logs` is log_softmax(x).

    Computed as the largest logit minus its log-probability, which lies between
    -log(width) and 0, so few digits are lost.
    """
    return x.amax(-1) - logs.amax(-1)


def _write_gradient(
    logits: Tensor,
    targets: Tensor,
    sums: _TokenSums,
    gradient: Tensor,
    terms: _Terms,
    part: int = 0,
) -> Tensor:
    """Overwrite the logits (tokens, words) of a part with their gradient.

    `gradient` (tokens) is that of each token's loss.
    """
    terms = terms.part(part, logits.shape[1])
    # Shares storage. If anything else saved the logits, autograd's version check raises.
    into = logits.detach()
    width = terms.width(into)
    at, mine = terms.place(targets, width)
    each = gradient * (targets != IGNORED)
    # Weight of this part's softmax, which sums to one over this part's words alone.
    share = each
    if not terms.whole(into):
        assert sums.own is not None
        assert sums.total is not None
        share = share * (sums.own[:, part] - sums.total).exp()
    if terms.z:
        # d log(sum exp) is the softmax as well, so z-loss scales it
        assert sums.total is not None
        share = share * (1.0 + 2.0 * terms.z * sums.total)
    target = -each * mine
    if width < into.shape[1]:
        into[:, width:] = 0.0
    # d loss / d logits = share * softmax + target * one_hot(at)
    for rows, x, wide, room in _tiles(into, width) if width else ():
        torch.softmax(wide, -1, out=room)
        torch.mul(room, share[rows].unsqueeze(-1), out=wide)
        index = at[rows].unsqueeze(-1)
        added = target[rows].unsqueeze(-1).to(wide.dtype)
        wide.scatter_add_(-1, index, added)
        if wide is not x:
            x.copy_(wide)
    return into


class _TokenLosses(torch.autograd.Function):
    """Each token's loss, from logits that exist as a whole."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, terms: _Terms
    ) -> Tensor:
        assert terms.words.parts == 1, "whole logits are not made in parts"
        sums = _token_sums([logits], targets, terms)
        ctx.terms = terms
        ctx.save_for_backward(logits, targets, sums.own, sums.total)
        return sums.losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, own, total = ctx.saved_tensors
        sums = _TokenSums(gradient, own, total)
        into = _write_gradient(logits, targets, sums, gradient, ctx.terms)
        return into, None, None


class _Chunk(NamedTuple):
    """The logits of a chunk of tokens, in equal slices of the vocabulary."""

    rows: slice
    x: Tensor  # (tokens, in)
    logits: list[Tensor]  # (tokens, words) of each part
    # With a soft cap c: tanh(product / c), (tokens, words) of each part.
    turned: list[Tensor]


def _logit_chunks(
    x: Tensor, of: ChunkedLogits, words: Words
) -> Iterator[_Chunk]:
    """Yield the logits of x (tokens, in), a chunk of tokens at a time.

    Ranks of tp have weights of one size, so they have equally many chunks.
    """
    weights = of.weight.detach().chunk(words.parts)
    width, tokens = weights[0].shape[0], x.shape[0]
    numbers = CHUNK.get(x.device.type, LARGE_CHUNK)
    # Logits in parts have chunks of one size in every layout.
    count = max(1, min(tokens, numbers // max(1, width * words.all_parts)))
    rooms = [x.new_empty(count, width) for _ in weights]
    spares = [torch.empty_like(room) for room in rooms if of.cap]
    if x.is_meta:
        # As for tiles: all tokens at once, with the memory of one chunk.
        count = tokens
        whole = tokens, width
        rooms = [room.as_strided(whole, (width, 1)) for room in rooms]
        spares = [spare.as_strided(whole, (width, 1)) for spare in spares]
    for start in range(0, tokens, count):
        rows = slice(start, min(start + count, tokens))
        part = x[rows]
        size = part.shape[0]
        logits = [
            torch.mm(part, weight.mT, out=room[:size])
            for weight, room in zip(weights, rooms, strict=True)
        ]
        turned: list[Tensor] = []
        if of.cap:
            turned = [each.div_(of.cap).tanh_() for each in logits]
            logits = [
                torch.mul(each, of.cap, out=spare[:size])
                for each, spare in zip(turned, spares, strict=True)
            ]
        yield _Chunk(rows, part, logits, turned)


def _send_back(
    chunk: _Chunk,
    gradients: Sequence[Tensor],
    of: ChunkedLogits,
    words: Words,
    into: Tensor,
) -> None:
    """Pass a chunk's gradients of the logits on to `into` (tokens, in) and the weight."""
    for gradient, turned in zip(gradients, chunk.turned, strict=False):
        # The cap's factors cancel.
        aten = torch.ops.aten.tanh_backward
        aten.grad_input(gradient, turned, grad_input=gradient)
    weights = of.weight.detach().chunk(words.parts)
    if words.all_parts == 1:
        torch.mm(gradients[0], weights[0], out=into[chunk.rows])
    else:
        products = [
            torch.mm(gradient, weight)
            for gradient, weight in zip(gradients, weights, strict=True)
        ]
        into[chunk.rows] = words.sum(products)
    if of.contribute is None:
        return
    if words.all_parts == 1:
        of.contribute(gradients[0].mT, chunk.x)
        return
    for number, gradient in enumerate(gradients):
        width = gradient.shape[1]
        rows = slice(number * width, (number + 1) * width)
        of.contribute(gradient.mT, chunk.x, rows)


def _chunk_gradients(
    chunk: _Chunk,
    targets: Tensor,
    sums: _TokenSums,
    each: Tensor,
    terms: _Terms,
) -> list[Tensor]:
    """Overwrite the logits of a chunk with their gradients; `each` is its losses'."""
    return [
        _write_gradient(logits, targets, sums, each, terms, part)
        for part, logits in enumerate(chunk.logits)
    ]


class _ChunkedTokenLosses(torch.autograd.Function):
    """Each token's loss by chunks, whose backward makes the logits once more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, of: ChunkedLogits, terms: _Terms
    ) -> Tensor:
        parts = [
            _token_sums(chunk.logits, targets[chunk.rows], terms)
            for chunk in _logit_chunks(x, of, terms.words)
        ]
        losses, own, total = map(_joined, zip(*parts, strict=True))
        ctx.of = of._replace(x=x.new_empty(0))
        ctx.terms = terms
        ctx.save_for_backward(x, targets, own, total)
        assert losses is not None
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, targets, own, total = ctx.saved_tensors
        into = torch.empty_like(x)
        terms, words = ctx.terms, ctx.terms.words
        for chunk in _logit_chunks(x, ctx.of, words):
            parts = (
                None if y is None else y[chunk.rows]
                for y in (gradient, own, total)
            )
            sums = _TokenSums(*parts)  # type: ignore[arg-type]
            target = targets[chunk.rows]
            given = _chunk_gradients(chunk, target, sums, sums.losses, terms)
            _send_back(chunk, given, ctx.of, words, into)
        return into, None, None, None


def _fuses(parts: Sequence[Tensor], terms: _Terms) -> bool:
    """True if one kernel computes the losses of these logits and their gradient."""
    return len(parts) == 1 and terms.whole(parts[0]) and fuses(parts[0])


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    there = [x for x in parts if x is not None]
    return torch.cat(there) if there else None


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss, computed by chunks in the backward.

    A chunk's gradient needs nothing of the other chunks, so its logits are made once, for
    the loss and the gradient. The output is filled in by the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, of: ChunkedLogits, terms: _Terms
    ) -> Tensor:
        loss = x.new_zeros((), dtype=_wide(x))
        # Detached: the output itself would keep this node alive, and this node it.
        ctx.loss = loss.detach()
        ctx.of = of._replace(x=x.new_empty(0))
        ctx.terms = terms
        ctx.save_for_backward(x, targets)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, targets = ctx.saved_tensors
        into = torch.empty_like(x)
        terms, words = ctx.terms, ctx.terms.words
        for chunk in _logit_chunks(x, ctx.of, words):
            target = targets[chunk.rows]
            if terms.z == 0 and _fuses(chunk.logits, terms):
                # One kernel computes the losses and overwrites the logits.
                (logits,) = given = chunk.logits
                scale = gradient.view(1)
                losses = write_loss_gradient(logits, target, scale, IGNORED)
            else:
                sums = _token_sums(chunk.logits, target, terms)
                losses = sums.losses
                each = gradient.expand(target.shape)
                given = _chunk_gradients(chunk, target, sums, each, terms)
            ctx.loss += losses.sum()
            _send_back(chunk, given, ctx.of, words, into)
        return into, None, None, None


def token_loss(
    logits: Logits,
    targets: Tensor,
    words: Words = EVERY_WORD,
    z: float = 0.0,
) -> Tensor:
    """The sum of the tokens' cross-entropies: see `token_losses`.

    The sum of `ChunkedLogits` whose gradient is needed has its value after the backward.
    """
    if not isinstance(logits, ChunkedLogits):
        return token_losses(logits, targets, words, z).sum()
    later = torch.is_grad_enabled() and logits.x.requires_grad
    if logits.at_once or not later:
        return token_losses(logits, targets, words, z).sum()
    x, flat = logits.x.flatten(0, -2), targets.flatten()
    loss: Tensor = _ChunkedLoss.apply(x, flat, logits, _Terms(words, z))  # type: ignore[no-untyped-call]
    return loss


def token_losses(
    logits: Logits,
    targets: Tensor,
    words: Words = EVERY_WORD,
    z: float = 0.0,
) -> Tensor:
    """Each token's cross-entropy, flat, in float32 or wider; 0 without a target.

    Logits are (..., words). With `z`, each token adds z log(Z)^2, where Z is the sum of
    exp of its logits: PaLM's z-loss.
    """
    terms, flat = _Terms(words, z), targets.flatten()
    losses: Tensor  # (tokens,)
    if isinstance(logits, ChunkedLogits):
        x = logits.x.flatten(0, -2)
        losses = _ChunkedTokenLosses.apply(x, flat, logits, terms)  # type: ignore[no-untyped-call]
    else:
        losses = _TokenLosses.apply(logits.flatten(0, -2), flat, terms)  # type: ignore[no-untyped-call]
    return losses


class CrossEntropy(nn.Module):
    """The sum of tokens' cross-entropies, in float32 or wider; -100 adds nothing."""

    z = 0.0  # see `token_losses`
    words = EVERY_WORD

    def forward(self, logits: Logits, targets: Tensor) -> Tensor:
        return token_loss(logits, targets, self.words, self.z)
