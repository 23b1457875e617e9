"""Finds modules that mix tokens where a rank has only a part of them, by a trial on a short sequence.

Under `seq` a rank of tp computes on its own tokens, except between a column and a row weight of the rule
table. Under cp every rank does, except in attention's `core`. A module that mixes tokens anywhere else
(attention without a row in the table, a convolution over time, a mean over time) raises no error and
computes something else. Its code does not say so, therefore each kind of piece runs once whole, and once
on ranks that are threads of this process, with the regions that training installs. Weights are random,
and large ones overlap in memory, so that a trial holds little.

A trial sees what a sequence of up to 1,024 tokens shows. `verify` compares gradients too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..comm import RankFailed, World
from ..comm.threads import run_threads
from ..layout import Layout, LayoutError
from .batch import DOCUMENTS, held_times, microbatches, time_multiple
from .context import install_context
from .kinds import one_of_each
from .model import Model
from .tensor import Weight, cut_of, cut_weights, install_regions

_LONGEST, _SHORTEST = 1024, 16  # tokens
_WORK = 2e10  # multiply-adds of the largest piece: with large pieces the sequence is shorter
_PLAIN = 1 << 20  # elements up to which a weight has memory of its own
_NARROW = 1e8  # weights from which on a trial computes in float32
# Of the largest value. Sums in another order differ by less, and tokens that are missing make more.
_APART = 1e-3
_SECONDS = 120.0  # that a rank waits for another one

_known: WeakKeyDictionary[Model, dict[Layout, str]] = WeakKeyDictionary()


def refuse_mixing(model: Model, layout: Layout) -> None:
    """Raise a LayoutError with every module that this layout would give too few tokens."""
    if wrong := mixing(model, layout):
        raise LayoutError("\n".join(wrong))


def mixing(model: Model, layout: Layout) -> tuple[str, ...]:
    """A sentence for each way in which this layout separates tokens that the model mixes."""
    if all(type(piece).__module__.startswith("phalanx.models.") for _, piece in model.pieces):
        return ()
    found = _known.setdefault(model, {})
    trials = tuple(_trials(layout))
    for trial in trials:
        if trial not in found:
            with torch.device("cpu"):
                found[trial] = _Trial.of(model, trial).wrong()
    return tuple(found[trial] for trial in trials if found[trial])


def _trials(layout: Layout) -> Iterator[Layout]:
    """The smallest layouts that cut the tokens of a sequence in the same ways."""
    if layout.seq and layout.tp > 1:
        yield Layout.parse(f"tp{_smallest_factor(layout.tp)} seq")
    for way in ("ring", "ulysses"):
        size = layout.mesh.of(f"cp.{way}")
        if size > 1:
            yield Layout.parse(f"cp{_smallest_factor(size)}:{way}")


def _smallest_factor(number: int) -> int:
    return next(n for n in range(2, number + 1) if number % n == 0)


# ---- runs of the pieces


@dataclass(frozen=True)
class _Call:
    """A call of a module: the first tensor that it took, and what it gave."""

    path: str
    kind: str
    took: Tensor | None
    gave: Mapping[str, Tensor]


@dataclass
class _ProbeRun:
    """The pieces run one after the other: what each gave, and the calls in it as they ended."""

    gave: list[Mapping[str, Tensor]] = field(default_factory=list)
    calls: list[list[_Call]] = field(default_factory=list)


class _Difference(RuntimeError):
    """The first piece that computes something else, and the module in it."""

    def __init__(self, piece: int, path: str, kind: str) -> None:
        super().__init__(f"{path} ({kind})")
        self.piece, self.path, self.kind = piece, path, kind


@dataclass(frozen=True)
class _Trial:
    """One piece of each kind, random weights for them, a batch of one sequence, and a layout."""

    model: Model
    layout: Layout
    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Model, layout: Layout) -> _Trial:
        few = one_of_each(model)
        sizes = [sum(p.numel() for p in piece.parameters()) for _, piece in few.pieces]
        tokens = min(_LONGEST, max(_SHORTEST, int(_WORK / max(1, *sizes))))
        tokens = min(tokens, few.shape.sequence if few.shape else _SHORTEST)
        tokens -= tokens % time_multiple(layout)
        dtype = torch.float64 if sum(sizes) < _NARROW else torch.float32
        weights = {name: _random(name, p.shape, dtype) for name, p in few.weights.items()}
        return cls(few, layout, weights, _batch(few, tokens))

    @property
    def tokens(self) -> int:
        return self.batch["tokens"].shape[1]

    def wrong(self) -> str:
        """Why the model computes something else in the layout; "" if it computes the same."""
        if not self.tokens:
            return ""  # a sequence shorter than the ranks, which the layout refuses elsewhere
        try:
            whole = self._alone()
            _refuse_nan(whole)
        except Exception as error:
            text = str(error) if isinstance(error, _Failed) else _text(error)
            return self._sentence(f"The model cannot be tried on one process: {text}")
        found = self._difference(whole)
        plain = replace(self, layout=replace(self.layout, seq=False))
        if not found or (self.layout.seq and plain._difference(whole)):
            return ""  # a table that is wrong in every layout of tp is for `verify` to show
        return found

    def _difference(self, whole: _ProbeRun) -> str:
        """The difference from the whole run, in a sentence; "" where nothing is."""
        try:
            ranks = run_threads(_on_rank, self.layout.ranks, (self,), _SECONDS, 0)
            self._compare(whole, ranks)
        except RankFailed as failed:
            if failed.refusal:
                return failed.refusal.partition(": ")[2]
            error = failed.reports[0].error.removeprefix(f"{_Failed.__name__}: ")
            return self._sentence(f"A trial of {self.layout} fails in {error}")
        except _Difference as found:
            if self.layout.cp > 1:
                why = (
                    "under cp only a child named 'core', core(q, k, v, positions, documents), sees"
                )
            else:
                why = "under seq only what is between a column and a row weight of the table sees"
            return self._sentence(f"{found} mixes tokens, and {why} those of other ranks")
        return ""

    def _sentence(self, what: str) -> str:
        if self.layout.cp > 1:
            return f"{what}. Use dp in place of cp."
        return f"{what}. Name its weights in the table (heads, kv, ffn) in place of '-', or use no seq."

    def _alone(self) -> _ProbeRun:
        """The pieces as one process computes them."""
        model = one_of_each(self.model)
        _bind(model, self.weights, Layout(), {})
        return _run(model, self.batch)

    def on_rank(self, world: World) -> _ProbeRun:
        """The pieces on one rank of the layout."""
        model, layout, at = one_of_each(self.model), self.layout, {"tp": 0, "cp": 0}
        at |= layout.mesh.coordinates(world.rank)
        every, alone = [range(world.size)], [[n] for n in range(world.size)]

        def group(name: str, size: int) -> Any:
            return world.split(name, every if size > 1 else alone)

        groups: Any = SimpleNamespace(tp=group("trial tp", layout.tp))
        ring = group("trial ring", layout.mesh.of("cp.ring"))
        ulysses = group("trial ulysses", layout.mesh.of("cp.ulysses"))
        held = cut_weights(model, layout, at)
        install_context(model, layout, ring, ulysses)
        install_regions(model, layout, groups)
        _bind(model, {n: _part(self.weights[n], weight) for n, weight in held.items()}, layout, at)
        (batch,) = microbatches(self.batch, layout, 0, at["cp"])
        return _run(model, batch)

    def _compare(self, whole: _ProbeRun, ranks: list[_ProbeRun]) -> None:
        """Raise a _Difference for the first piece that a rank computes otherwise."""
        for piece, (name, module) in enumerate(self.model.pieces):
            last = piece == len(self.model.pieces) - 1
            for rank, run in enumerate(ranks):
                times = self._times(rank)
                gave = whole.gave[piece]
                # The loss of a rank of cp is that of its own tokens: there is no whole to compare with.
                partial = last and self.layout.cp > 1
                same = partial or all(
                    _same(run.gave[piece].get(key), x, times, cut=key == "x" and not last)
                    for key, x in gave.items()
                )
                found = _culprit(whole.calls[piece], run.calls[piece], times)
                if found is not None and (partial or not same):
                    path = f"{name}.{found.path}".rstrip(".")
                    raise _Difference(piece, path, found.kind)
                if not same:
                    raise _Difference(piece, name, type(module).__name__)

    def _times(self, rank: int) -> Tensor:
        """The tokens of the sequence that a rank has."""
        layout, at = self.layout, self.layout.mesh.coordinates(rank)
        ring, ulysses = layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses")
        times = held_times(self.tokens, ring, ulysses, at.get("cp", 0))
        return times.chunk(layout.tp)[at.get("tp", 0)] if layout.seq else times


def _refuse_nan(run: _ProbeRun) -> None:
    """Raise if a piece gives values that cannot be compared."""
    for gave in run.gave:
        if not all(bool(x.isfinite().all()) for x in gave.values()):
            raise ValueError("with random weights it gives values that are not finite")


def _on_rank(world: World, trial: _Trial) -> _ProbeRun:
    return trial.on_rank(world)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _culprit(whole: list[_Call], own: list[_Call], times: Tensor) -> _Call | None:
    """The innermost module that took the right tokens and gave something else for them."""
    there = {call.path: call for call in reversed(whole)}
    for call in own:
        want = there.get(call.path)
        if want is None or want.took is None or not _same(call.took, want.took, times):
            continue
        for key, x in want.gave.items():
            got = call.gave.get(key)
            cut = x.dim() > 1 and got is not None and got.shape[:2] == (x.shape[0], len(times))
            if cut and not _same(got, x, times):
                return call
    return None


def _same(own: Tensor | None, whole: Tensor, times: Tensor, *, cut: bool = False) -> bool:
    """True if a rank has its tokens' part of a tensor; or all of it, where that need not be `cut`."""
    if own is None:
        return False
    differs = cut or own.shape != whole.shape
    if differs and whole.dim() > 1 and whole.shape[1] > times.max():
        whole = whole.index_select(1, times)
    if own.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(own, whole)
    scale = whole.abs().max().clamp_min(1e-30)
    return bool((own - whole).abs().max() <= _APART * scale)


# ---- weights, buffers, calls


def _random(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A weight that hides nothing: none of it is 0, whatever the model would start with."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    draw = torch.Generator().manual_seed(seed)
    if shape.numel() <= _PLAIN:
        x = torch.randn(shape, generator=draw, dtype=dtype)
    else:  # element [i, j, ...] is number i + j + ...
        line = torch.randn(sum(shape), generator=draw, dtype=dtype)
        x = line.as_strided(shape, (1,) * len(shape))
        line *= shape[0] ** 0.5 / shape.numel() ** 0.5
        return x
    return 1 + 0.1 * x if len(shape) < 2 else x * (shape[0] / shape.numel()) ** 0.5


def _part(whole: Tensor, weight: Weight) -> Tensor:
    """A rank's part of a weight, with zeros where it is padded."""
    part = whole[weight.box]
    if tuple(part.shape) == weight.local:
        return part
    padded = part.new_zeros(weight.local)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def _bind(
    model: Model, weights: Mapping[str, Tensor], layout: Layout, at: Mapping[str, int]
) -> None:
    """Put weights into the modules in place of those on meta, and make their buffers."""
    names = {parameter: name for name, parameter in model.weights.items()}
    for prefix, piece in model.pieces:
        for path, module in piece.named_modules():
            for key, parameter in list(module._parameters.items()):
                if parameter is not None:
                    real = weights[names[parameter]]
                    module._parameters[key] = nn.Parameter(real, requires_grad=False)
            _make_buffers(module)
            for key, x in list(module._buffers.items()):
                if x is not None:
                    name = f"{prefix}.{path}".rstrip(".") + f".{key}"
                    cuts = cut_of(model, layout, name, x.shape, at)
                    module._buffers[key] = x[tuple(slice(c.start, c.stop) for c in cuts)]


def _make_buffers(module: nn.Module) -> None:
    buffers = {key: x for key, x in module._buffers.items() if x is not None}
    for key, x in buffers.items():
        if x.is_meta:
            module._buffers[key] = torch.empty(x.shape, dtype=x.dtype)
    reset = getattr(module, "reset_buffers", None)
    if buffers and callable(reset):
        reset()


def _batch(model: Model, tokens: int) -> Mapping[str, Tensor]:
    """One sequence, with all that a batch of text may have."""
    draw = torch.Generator().manual_seed(0)
    vocab = model.shape.vocab if model.shape else 2
    ids = torch.randint(vocab, (2, 1, tokens), generator=draw)
    positions = torch.arange(tokens).expand(1, -1)
    batch = {"tokens": ids[0], "targets": ids[1], "positions": positions}
    return {**batch, DOCUMENTS: torch.zeros(1, tokens, dtype=torch.int64)}


class _Failed(RuntimeError):
    """A module that raised, and what."""


@torch.no_grad()
def _run(model: Model, batch: Mapping[str, Tensor]) -> _ProbeRun:
    """The pieces one after the other, as `Piece.forward` calls them, with every call noted down."""
    run, bundle = _ProbeRun(), dict[str, Tensor]()
    for number, (prefix, piece) in enumerate(model.pieces):
        takes = model.takes(number)
        names = takes if not number or takes[0] in bundle else ("x", *takes[1:])
        mine = [bundle[name] for name in names[:1] if name in bundle]
        more = {n: x for n, x in bundle.items() if n in names[len(mine) :]}
        named = {n: x for n, x in batch.items() if n in names and n not in bundle}
        notes = _Notes(piece)
        try:
            gave = _tensors(piece(*mine, **more, **named))
        except Exception as error:
            raise _Failed(f"{prefix}.{notes.inside}".rstrip(".") + f": {_text(error)}") from error
        finally:
            notes.close()
        bundle = {n: x for n, x in bundle.items() if n not in names} | gave
        run.gave.append(gave)
        run.calls.append(notes.calls)
    return run


class _Notes:
    """The calls of all modules of a piece while it runs."""

    def __init__(self, piece: nn.Module) -> None:
        self.calls: list[_Call] = []
        self._open: list[str] = []
        self._handles: list[Any] = []
        for path, module in piece.named_modules():
            enter, leave = partial(self._enter, path), partial(self._leave, path)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]

    @property
    def inside(self) -> str:
        """The innermost module that has not ended."""
        return self._open[-1] if self._open else ""

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, path: str, module: nn.Module, args: Any, named: Any) -> None:
        self._open.append(path)

    def _leave(
        self, path: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any
    ) -> None:
        self._open.pop()
        took = next((x for x in (*args, *named.values()) if isinstance(x, Tensor)), None)
        self.calls.append(_Call(path, type(module).__name__, took, _tensors(out)))


def _tensors(out: Any) -> dict[str, Tensor]:
    """The tensors of an output by name; one alone is x."""
    if isinstance(out, Tensor):
        return {"x": out}
    items = (
        out.items()
        if isinstance(out, Mapping)
        else enumerate(out)
        if isinstance(out, tuple)
        else ()
    )
    return {str(key): x for key, x in items if isinstance(x, Tensor)}
