"""Finds modules that mix tokens where a rank holds only some of them, by a trial.

Under `seq` a rank of tp computes on its own tokens, except between a column and a row
weight of the rule table. Under cp every rank does, except in attention's `core`. A
module that mixes tokens anywhere else (attention missing from the table, a convolution
or a mean over time) raises no error and computes something else. Its code does not show
this, so each kind of piece runs once whole, and once on ranks that are threads of this
process, with the regions that training installs.

A trial shows what a sequence of up to 1,024 tokens can show. `verify` compares
gradients too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..comm import RankFailed, World
from ..comm.threads import run_threads
from ..layout import Layout, LayoutError
from .batch import held_times, microbatches, time_multiple
from .context import install_context
from .kinds import one_of_each
from .model import Model
from .own_tp_trial import refuse_wrong_plan
from .probe import (
    ModuleCall,
    ProbeFailed,
    ProbeRun,
    bind_part,
    bind_weights,
    error_text,
    frozen_parameters,
    probe_batch,
    probe_dtype,
    random_weight,
    refuse_not_finite,
    run_pieces,
)
from .tensor import cut_weights, install_regions

_LONGEST, _SHORTEST = 1024, 16  # tokens
# Multiply-adds of the largest piece. Larger pieces are tried with shorter sequences.
_WORK = 2e10
# Tolerance relative to the largest value. Sums in another order differ by less, missing
# tokens by more.
_APART = 1e-3
_SECONDS = 120.0  # time limit for a rank that waits for another

_known: WeakKeyDictionary[Model, dict[Layout, str]] = WeakKeyDictionary()


def refuse_mixing(
    model: Model, layout: Layout, batch: Mapping[str, Tensor] | None = None
) -> None:
    """Raise a LayoutError with every module that would receive too few tokens."""
    # A wrong plan for tp would make any trial differ, so it is refused first.
    if model.as_it_is and layout.tp > 1:
        tokens = min(
            _SHORTEST, model.shape.sequence if model.shape else _SHORTEST
        )
        refuse_wrong_plan(model, layout, batch or probe_batch(model, tokens))
    if wrong := mixing(model, layout):
        raise LayoutError("\n".join(wrong))


def mixing(model: Model, layout: Layout) -> tuple[str, ...]:
    """A sentence for each way in which a layout separates tokens that are mixed."""
    # Built-in pieces need no trial: tests compare them with one process.
    if all(
        type(piece).__module__.startswith("phalanx.models.")
        for _, piece in model.pieces
    ):
        return ()
    # One trial for each way to shard tokens, kept while the model lives.
    found = _known.setdefault(model, {})
    trials = tuple(_trials(layout))
    for trial in trials:
        if trial not in found:
            with torch.device("cpu"):
                found[trial] = _Trial.of(model, trial).wrong()
    return tuple(found[trial] for trial in trials if found[trial])


def _trials(layout: Layout) -> Iterator[Layout]:
    """The smallest layouts that shard the tokens of a sequence in the same ways."""
    if layout.seq and layout.tp > 1:
        yield Layout.parse(f"tp{_smallest_factor(layout.tp)} seq")
    for way in ("ring", "ulysses"):
        size = layout.mesh.of(f"cp.{way}")
        if size > 1:
            yield Layout.parse(f"cp{_smallest_factor(size)}:{way}")


def _smallest_factor(number: int) -> int:
    return next(n for n in range(2, number + 1) if number % n == 0)


# ---- runs of the pieces


class _Difference(RuntimeError):
    """Raised for the first piece that computes something else, and the module in it."""

    def __init__(self, piece: int, path: str, kind: str) -> None:
        super().__init__(f"{path} ({kind})")
        self.piece, self.path, self.kind = piece, path, kind


@dataclass(frozen=True)
class _Trial:
    """One piece of each kind with random weights, a batch, and a layout."""

    model: Model
    layout: Layout
    weights: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Model, layout: Layout) -> _Trial:
        few = one_of_each(model)
        sizes = [
            sum(p.numel() for p in piece.parameters())
            for _, piece in few.pieces
        ]
        # A piece's multiply-adds are about its parameters times the tokens.
        tokens = min(_LONGEST, max(_SHORTEST, int(_WORK / max(1, *sizes))))
        tokens = min(tokens, few.shape.sequence if few.shape else _SHORTEST)
        # A whole number of equal parts, so that no padding blurs the comparison.
        tokens -= tokens % time_multiple(layout)
        dtype = probe_dtype(few)
        weights = {
            name: random_weight(name, p.shape, dtype)
            for name, p in few.weights.items()
        }
        return cls(few, layout, weights, probe_batch(few, tokens))

    @property
    def tokens(self) -> int:
        return self.batch["tokens"].shape[1]

    def wrong(self) -> str:
        """Explain the difference that the layout makes to the model, or return ""."""
        if not self.tokens:
            # The sequence is shorter than the number of ranks, which the layout refuses
            # elsewhere.
            return ""
        try:
            whole = self._alone()
            refuse_not_finite(whole)
        except Exception as error:
            text = (
                str(error)
                if isinstance(error, ProbeFailed)
                else error_text(error)
            )
            return self._sentence(
                f"The model cannot be tried on one process: {text}"
            )
        found = self._difference(whole)
        # Without seq the same table must be right, or the mistake is not one of tokens.
        plain = replace(self, layout=replace(self.layout, seq=False))
        if not found or (self.layout.seq and plain._difference(whole)):
            # A table that is wrong in every layout with tp is left to `verify`.
            return ""
        return found

    def _difference(self, whole: ProbeRun) -> str:
        """Describe the difference from the whole run in a sentence, or return ""."""
        try:
            ranks = run_threads(
                _on_rank, self.layout.ranks, (self,), _SECONDS, 0
            )
            self._compare(whole, ranks)
        except RankFailed as failed:
            # A refusal for the user, without the name of its class.
            if failed.refusal:
                return failed.refusal.partition(": ")[2]
            # An error of a module in the trial, such as a shape that does not fit.
            error = failed.reports[0].error.removeprefix(
                f"{ProbeFailed.__name__}: "
            )
            return self._sentence(f"A trial of {self.layout} fails in {error}")
        except _Difference as found:
            if self.layout.cp > 1:
                why = "under cp only a child named 'core', core(q, k, v, positions, documents), sees"
            else:
                why = "under seq only what is between a column and a row weight of the table sees"
            return self._sentence(
                f"{found} mixes tokens, and {why} those of other ranks"
            )
        return ""

    def _sentence(self, what: str) -> str:
        if self.layout.cp > 1:
            return f"{what}. Use dp in place of cp."
        return f"{what}. Name its weights in the table (heads, kv, ffn) in place of '-', or use no seq."

    def _alone(self) -> ProbeRun:
        """Run the pieces on one process."""
        model = one_of_each(self.model)
        bind_weights(model, frozen_parameters(self.weights))
        with torch.no_grad():
            return run_pieces(model, self.batch)

    def on_rank(self, world: World) -> ProbeRun:
        """Run the pieces on one rank of the layout."""
        model, layout, at = (
            one_of_each(self.model),
            self.layout,
            {"tp": 0, "cp": 0},
        )
        at |= layout.mesh.coordinates(world.rank)
        every, alone = [range(world.size)], [[n] for n in range(world.size)]

        # Each of tp, ring and ulysses is all ranks of the trial, or one rank alone.
        def group(name: str, size: int) -> Any:
            return world.split(name, every if size > 1 else alone)

        groups: Any = SimpleNamespace(tp=group("trial tp", layout.tp))
        ring = group("trial ring", layout.mesh.of("cp.ring"))
        ulysses = group("trial ulysses", layout.mesh.of("cp.ulysses"))
        # From here on as `build_local` does it, without units.
        held = cut_weights(model, layout, at)
        install_context(model, layout, ring, ulysses)
        install_regions(model, layout, groups)
        bind_part(model, layout, held, self.weights, at)
        (batch,) = microbatches(self.batch, layout, 0, at["cp"])
        with torch.no_grad():
            return run_pieces(model, batch)

    def _compare(self, whole: ProbeRun, ranks: list[ProbeRun]) -> None:
        """Raise a _Difference for the first piece that a rank computes differently."""
        # Later pieces only carry on the first difference.
        for piece, (name, module) in enumerate(self.model.pieces):
            last = piece == len(self.model.pieces) - 1
            for rank, run in enumerate(ranks):
                times = self._times(rank)
                gave = whole.gave[piece]
                # A cp rank's loss covers its own tokens, so there is no whole value to
                # compare with.
                partial = last and self.layout.cp > 1
                same = partial or all(
                    _same(
                        run.gave[piece].get(key),
                        x,
                        times,
                        cut=key == "x" and not last,
                    )
                    for key, x in gave.items()
                )
                found = _culprit(whole.calls[piece], run.calls[piece], times)
                if found is not None and (partial or not same):
                    path = f"{name}.{found.path}".rstrip(".")
                    raise _Difference(piece, path, type(found.module).__name__)
                if not same:
                    raise _Difference(piece, name, type(module).__name__)

    def _times(self, rank: int) -> Tensor:
        """The token indices of the sequence that a rank holds."""
        layout, at = self.layout, self.layout.mesh.coordinates(rank)
        ring, ulysses = layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses")
        times = held_times(self.tokens, ring, ulysses, at.get("cp", 0))
        return times.chunk(layout.tp)[at.get("tp", 0)] if layout.seq else times


def _on_rank(world: World, trial: _Trial) -> ProbeRun:
    return trial.on_rank(world)


def _culprit(
    whole: list[ModuleCall], own: list[ModuleCall], times: Tensor
) -> ModuleCall | None:
    """The innermost module with the right input and a wrong output."""
    # Reversed, so that a module's first call is the one that stays.
    there = {call.path: call for call in reversed(whole)}
    # Calls are noted at their end, so inner modules come first.
    for call in own:
        want = there.get(call.path)
        if (
            want is None
            or want.took is None
            or not _same(call.took, want.took, times)
        ):
            continue
        for key, x in want.gave.items():
            got = call.gave.get(key)
            # Only an output that is cut along time can be compared with the whole one.
            cut = (
                x.dim() > 1
                and got is not None
                and got.shape[:2] == (x.shape[0], len(times))
            )
            if cut and not _same(got, x, times):
                return call
    return None


def _same(
    own: Tensor | None, whole: Tensor, times: Tensor, *, cut: bool = False
) -> bool:
    """True if `own` is a rank's tokens of `whole`, or all of it unless `cut`."""
    if own is None:
        return False
    differs = cut or own.shape != whole.shape
    # (B, T, ...)
    if differs and whole.dim() > 1 and whole.shape[1] > times.max():
        whole = whole.index_select(1, times)
    if own.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(own, whole)
    scale = whole.abs().max().clamp_min(1e-30)
    return bool((own - whole).abs().max() <= _APART * scale)
