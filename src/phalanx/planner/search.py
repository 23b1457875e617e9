"""Searches the best layouts: bounds screen all, the most promising are simulated.

Candidates are simulated in the order of their bounds. The search ends when the next
bound is less than 0.2 % below the worst step asked for, far less than the error of
predictions. A piece is costed when the first layout with it comes up.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..layout import Axis, Layout, LayoutError, Mesh, legal, recipe
from ..layout.choices import traits
from ..layout.state_bytes import held_bytes
from ..program.program import uncollected
from .bounds import Array, Bounds, LeastTimes, bounds
from .followed import followed
from .plausible import LONGEST_STEP, refuse_too_long
from .refused import Refusal, refusals
from .space import ORDERS, Grid, Inner, Options, Space, divisors, overlaps
from .step import Choice, Pricer, Request

_OPS = 2_000_000  # operations simulated in total
# operations simulated before smaller candidates are tried, if too few fit
_MISSES = 300_000
# Shares of the memory that bounds may fill.
_ROOMS = (
    1.0,
    0.85,
    0.7,
    0.55,
    0.4,
)
_MORE = 80_000  # operations simulated to measure by how much families lost
_EMPTIEST = 60  # smallest candidates, tried if the fast ones do not fit
# a candidate that cannot be faster than this share of a known step is not simulated
_ALIKE = 0.998
_NEARLY = 1.1  # of the memory: with other microbatches a layout may fit
# A simpler layout is advised if its step is at most this much longer than the fastest.
# Predictions are not accurate to 2 %, and fewer techniques have fewer ways to go wrong.
_WORTH = 1.02
_SIMPLER = 200_000  # operations simulated to find one
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The best layouts, and why each kind of other layout is not among them.

    The first is the advised one: the simplest of those at most 2 % slower than the
    fastest. The others follow by time.
    """

    layouts: tuple[Choice, ...]
    fastest: Choice | None
    smallest: Choice | None  # of all that were simulated, also too large ones
    refused: tuple[Refusal, ...]
    considered: int
    fitting: int
    simulated: int
    costed: int
    room: float  # bytes that a rank may hold
    # The lower bounds of all candidates, in seconds and bytes, and the layout of each.
    points: tuple[Array, Array]
    named: Callable[[int], Layout]


class Queue:
    """Candidates in the order of their bounds of step time, which may grow meanwhile.

    Only candidates with a bound of memory up to `least`. Among equally fast ones, the
    smaller is first.
    """

    def __init__(self, step: Array, held: Array, least: float) -> None:
        self._step, self._held, self._least = step, held, least
        fits = np.flatnonzero(held <= least)
        # By time, rounded so that bounds equal but for rounding are ordered by
        # memory.
        rounded = np.round(np.log(step[fits]), 6)
        order = fits[np.lexsort((held[fits], rounded))][::-1]
        # In reverse, with the bounds at the time of sorting.
        self._order: list[int] = order.tolist()
        self._then: list[float] = step[order].tolist()
        # a heap of candidates whose bound has grown since
        self._grown: list[tuple[float, int]] = []

    def next(self) -> int:
        """The candidate with the lowest bound; -1 if none is left."""
        while self._order or self._grown:
            # Both lists are ordered: take the lower of their heads.
            if self._grown_first():
                then, i = heappop(self._grown)
            else:
                then, i = self._then.pop(), self._order.pop()
            # A bound of memory may have grown beyond the limit meanwhile.
            if self._held[i] > self._least:
                continue
            # The bound is still that by which it was ordered, so nothing can
            # be lower.
            if self._step[i] <= then:
                return i
            heappush(self._grown, (float(self._step[i]), i))
        return -1

    def later(self, i: int) -> bool:
        """True if another candidate is now first; this one is queued again."""
        heappush(self._grown, (float(self._step[i]), i))
        # Still first: take it back off the heap.
        if self._grown_first() and self._grown[0][1] == i:
            heappop(self._grown)
            return bool(self._held[i] > self._least)
        return True

    def _grown_first(self) -> bool:
        if not self._grown or not self._then:
            return bool(self._grown)
        return self._grown[0][0] <= self._then[-1]


class Screened:
    """All candidates with their bounds, and those that were simulated."""

    def __init__(self, space: Space, pricer: Pricer) -> None:
        self.space, self.pricer = space, pricer
        # The plainest cuts: each bounds the cuts with cp, recomputation or a
        # split backward.
        cuts = {
            space.cut(
                x.grid._replace(ring=1, ulysses=1),
                inner._replace(recompute="none"),
                split=False,
            )
            for x in space.options
            for inner in x.inners
        }
        pricer.cost(cuts)
        self.least = LeastTimes(space, pricer)
        self.found: list[Bounds] = [
            bounds(x, self.least) for x in space.options
        ]
        # Candidates are numbered grid by grid; a grid's own begin at `starts`.
        self.starts = np.cumsum(
            [0, *(np.prod(x.sizes) for x in space.options)]
        )
        self.step = np.concatenate(
            [found.step.ravel() for found in self.found]
        )
        self.bytes = np.concatenate(
            [found.bytes.ravel() for found in self.found]
        )
        self.choices: dict[int, Choice] = {}
        self.followed: dict[int, float] = {}
        self.spent = 0
        # The number of costed cuts when each grid was looked at last, and the cuts
        # that its bounds follow from.
        self._costed = [len(pricer.pieces)] * len(space.options)
        self._sources = [self.least.sources(x) for x in space.options]

    def __len__(self) -> int:
        return len(self.step)

    def at(self, i: int) -> tuple[int, Options, tuple[int, int, int, int]]:
        """The options of a candidate with their index, and its choice of each."""
        # The number inside a grid's four-dimensional array, taken apart.
        o = int(np.searchsorted(self.starts, i, side="right")) - 1
        x = self.space.options[o]
        z, c, p, q = (
            int(n) for n in np.unravel_index(i - self.starts[o], x.sizes)
        )
        return o, x, (z, c, p, q)

    def layout(self, i: int) -> Layout:
        _, x, at = self.at(i)
        return self.space.layout(x, *at)

    def idea(self, i: int) -> tuple[object, ...]:
        """The identity of a candidate.

        It ignores the order of axes, the split of dp into replicas and shards, and the
        division of blocks into stages.
        """
        _, x, (z, c, p, q) = self.at(i)
        pipe = x.pipelines[p]
        zero = x.zeros[z]._replace(shards=0)
        count = x.counts[c]
        kind = *pipe[:2], overlaps(pipe, count)
        return x.grid._replace(order=""), zero, count, kind, x.inners[q]

    def known(self) -> NDArray[np.bool_]:
        """A mask of candidates whose pieces are costed."""
        each, known, cut = [], self.pricer.pieces, self.space.cut
        for x in self.space.options:
            split = [
                traits(pipe.schedule).splits_backward for pipe in x.pipelines
            ]
            flags = [
                [cut(x.grid, inner, split=s) in known for inner in x.inners]
                for s in split
            ]
            each.append(np.broadcast_to(np.array(flags), x.sizes).ravel())
        return np.concatenate(each)

    def costs(self, i: int) -> None:
        """Cost the pieces of a candidate, if needed, and bound its grid again.

        Bounds of other grids stay lower than necessary until one of their candidates
        comes up.
        """
        _, options, (_, _, _, chosen) = self.at(i)
        split = self.layout(i).splits_backward
        self.pricer.cost(
            [self.space.cut(options.grid, options.inners[chosen], split=split)]
        )
        self.refresh(i)

    def refresh(self, i: int) -> bool:
        """Bound a candidate's grid by everything costed; True if that changed."""
        number, options, _ = self.at(i)
        # Nothing was costed since: the bounds would be the same.
        if self._costed[number] == len(self.pricer.pieces):
            return False
        self._costed[number] = len(self.pricer.pieces)
        sources = self.least.sources(options)
        # What was costed since is no better bound of this grid.
        if sources == self._sources[number]:
            return False
        self._sources[number] = sources
        found = bounds(options, self.least, self.found[number])
        self.found[number] = found
        begin, end = self.starts[number : number + 2]
        # A bound may only rise: following a schedule has raised some already.
        self.step[begin:end] = np.maximum(
            self.step[begin:end], found.step.ravel()
        )
        self.bytes[begin:end] = found.bytes.ravel()
        return True

    def follow(self, i: int) -> float:
        """The bound of a costed candidate, raised by following its own schedule."""
        if i not in self.followed:
            number, options, at = self.at(i)
            collectives = self.found[number].collectives
            self.followed[i] = followed(
                self.space, options, at, self.pricer, collectives
            )
            self.step[i] = max(self.step[i], self.followed[i])
        return float(self.step[i])

    def simulate(self, i: int) -> Choice:
        if i not in self.choices:
            self.spent += self.operations(i)
            self.choices[i] = self.pricer.choose(
                self.layout(i), self.space.request.room
            )
        return self.choices[i]

    def operations(self, i: int) -> int:
        """The approximate number of operations that a simulation runs."""
        layout = self.layout(i)
        return (
            3
            * self.space.request.shape.pieces
            # Only so many microbatches of a long step are simulated, because
            # the rest repeats.
            * min(layout.microbatches, 3 * layout.pp + 2)
        )

    def best(self, top: int, room: float) -> list[int]:
        """The best candidates that fit, best first, no two with one identity.

        If too many turn out to be too large, only candidates with a lower bound of
        memory are tried. A faster one may then be missed.
        """
        ideas: dict[tuple[object, ...], int] = {}
        # Bounds of memory may be loose: if too many fail, try only emptier
        # candidates.
        for part in _ROOMS:
            if self._walk(ideas, top, room, part * room):
                break
            # If not even those with the lowest bounds fit, emptier ones will not.
            if not ideas and not self.emptiest(room):
                break
        return sorted(ideas.values(), key=lambda j: self.choices[j].step)[:top]

    def _walk(
        self,
        ideas: dict[tuple[object, ...], int],
        top: int,
        room: float,
        least: float,
    ) -> bool:
        """Simulate candidates with a bound of memory up to `least`, by bounds of time.

        Ends when no other can be among the best. Returns False if too many did not fit.
        """
        missed = self.spent + _MISSES
        queue = Queue(self.step, self.bytes, least)
        looked_at = set[int]()
        while (i := queue.next()) >= 0:
            # The simulated steps of the ideas found so far, best first.
            ahead = sorted(self.choices[j].step for j in ideas.values())
            # The bounds are in order: once one is too slow, all the rest are.
            if len(ahead) >= top and _ALIKE * ahead[top - 1] <= self.step[i]:
                return True
            if self.spent > _OPS:
                return True
            if self.spent > missed and len(ahead) < top:
                return False
            if not self._next_is(i, queue, looked_at):
                continue
            # Another order of axes or split of stages is worth it only if it
            # is faster.
            idea = self.idea(i)
            known = (
                self.choices[ideas[idea]].step if idea in ideas else math.inf
            )
            if _ALIKE * known <= self.step[i]:
                continue
            found = self.simulate(i)
            if found.bytes <= room and found.step < known:
                ideas[idea] = i
        return True

    def _next_is(self, i: int, queue: Queue, looked_at: set[int]) -> bool:
        """Bound a candidate more closely; False if it is not the next to simulate.

        It may be illegal, or another one is now ahead. It then comes up again when
        nothing else could be faster.
        """
        if i not in looked_at:
            # Costing may raise the bound, so another candidate may now be
            # first.
            looked_at.add(i)
            self.costs(i)
            if not self._legal(i) or queue.later(i):
                return False
        # Following its schedule is cheaper than simulating it, and may raise
        # the bound again.
        if i not in self.followed:
            self.follow(i)
            if queue.later(i):
                return False
        return True

    def techniques(self, i: int) -> int:
        """The number of techniques that a candidate combines."""
        _, x, (z, c, p, q) = self.at(i)
        grid, zero, pipe, inner = (
            x.grid,
            x.zeros[z],
            x.pipelines[p],
            x.inners[q],
        )
        sizes = (grid.dp, grid.pp, grid.ring, grid.ulysses, grid.tp, grid.ep)
        used = (
            *(size > 1 for size in sizes),
            zero.stage > 0 and 1 < zero.shards < grid.dp,  # HSDP
            pipe.chunks > 1,
            traits(pipe.schedule).splits_backward,
            overlaps(pipe, x.counts[c]),
            inner.recompute != "none",
            bool(self.space.offload),
        )
        return sum(map(bool, used))

    def simplest(self, best: Sequence[int], room: float) -> int:
        """The simplest fitting candidate within 2 % of the fastest, ties by time."""
        limit = _WORTH * self.choices[best[0]].step

        def rank(i: int) -> tuple[int, float]:
            return self.techniques(i), self.choices[i].step

        near = [
            i
            for i, choice in self.choices.items()
            if choice.bytes <= room and choice.step <= limit
        ]
        first = min(near, key=rank)
        # Then the others whose bound is within the limit, in the order of
        # their bounds.
        queue, looked_at = Queue(self.step, self.bytes, room), set[int]()
        most = self.spent + _SIMPLER
        while (
            (i := queue.next()) >= 0
            and self.step[i] <= limit
            and self.spent < most
        ):
            least = self.techniques(i), float(self.step[i])
            if least >= rank(first) or not self._next_is(i, queue, looked_at):
                continue
            choice = self.simulate(i)
            if choice.bytes <= room and choice.step <= limit:
                first = min(first, i, key=rank)
        return first

    def _legal(self, i: int) -> bool:
        request = self.space.request
        terms = {"batch": request.batch, "sequence": request.sequence}
        layout = self.layout(i)
        return not legal(layout, request.shape, **terms) and request.says(
            layout
        )

    def emptiest(self, room: float) -> list[int]:
        """A candidate that fits, among those with the lowest bounds of memory."""
        # A stable sort: equal candidates keep their order.
        for i in np.argsort(self.bytes, kind="stable")[:_EMPTIEST].tolist():
            self.costs(i)
            says = self.space.request.says(self.layout(i))
            if says and self.simulate(i).bytes <= room:
                return [i]
        return []


def spaces(request: Request, pricer: Pricer) -> Iterator[Space]:
    """The usual layouts, then those that are tried only if none of them fits.

    These keep the inputs of fewer blocks, or the optimizer on the host.
    """
    space = Space(request)
    space = replace(space, seq_only=_seq_only(space, pricer))
    yield space
    yield replace(space, recomputes=("every=2", "every=4", "every=8"))
    yield replace(space, recomputes=("all", "every=4"), offload=("optimizer",))


@uncollected()
def could_fit(request: Request) -> bool:
    """False if every layout needs more memory than there is, by its lower bound.

    It takes a small part of a search's time, as no program is built.
    """
    pricer = Pricer(request)
    return any(
        bool((Screened(space, pricer).bytes <= request.room).any())
        for space in spaces(request, pricer)
        if space.options
    )


@uncollected()
def search(request: Request, *, top: int = 10, explained: bool = True) -> Plan:
    """The plan for a request: its best layouts.

    Unless `explained`, it lacks the reasons why other layouts lost.
    """
    pricer, room = Pricer(request), request.room
    smallest: Choice | None = None
    for each in spaces(request, pricer):
        screened = Screened(each, pricer)
        fits = screened.bytes <= room
        best = screened.best(top, room) or (
            # Too many missed, but some bounds fit: try the smallest
            # candidates.
            screened.emptiest(room) if fits.any() else []
        )
        _LOG.debug(
            "%d candidates, %d simulated, %d found",
            len(screened),
            len(screened.choices),
            len(best),
        )
        tried = [*screened.choices.values()]
        if smallest:
            tried.append(smallest)
        smallest = min(tried, key=lambda choice: choice.bytes, default=None)
        if best:
            break
    for i in best:
        refuse_too_long(
            screened.choices[i].case,
            request.hardware,
            screened.choices[i].parts,
        )
    fastest, shown = None, list[int]()
    if best:
        fastest = screened.choices[best[0]]
        first = screened.simplest(best, room)
        idea = screened.idea(first)
        shown = [first, *(i for i in best if screened.idea(i) != idea)][:top]
    compared = [*best[:1], *shown[:1]]
    refused = refusals(screened, compared, room, _MORE) if explained else ()
    # The advised layout first, without its other variants.
    return Plan(
        layouts=tuple(screened.choices[i] for i in shown),
        fastest=fastest,
        smallest=smallest,
        refused=refused,
        considered=len(screened),
        fitting=int(fits.sum()),
        simulated=len(screened.choices),
        costed=len(pricer.pieces),
        room=room,
        points=(screened.step, screened.bytes),
        named=screened.layout,
    )


def _seq_only(space: Space, pricer: Pricer) -> frozenset[int]:
    """The sizes of tensor parallelism that are never faster without `seq`.

    Without it, more is held and as many bytes are sent in fewer messages. The shortest
    microbatch decides for all.
    """
    if space.request.shape.kind != "decoder" or "seq" in space.request.without:
        return frozenset()
    found = set()
    for tp in {x.grid.tp for x in space.options} - {1}:
        # Messages of tp depend on no other axis, so the rest of the grid is 1.
        grid = Grid(1, 1, 1, 1, tp, 1, ORDERS[0])
        cuts = (
            space.cut(grid, Inner(seq, "none"), split=False)
            for seq in (False, True)
        )
        plain, seq = (
            pricer.times(cut, space.least, False).blocks for cut in cuts
        )
        each = zip(plain, seq, strict=True)
        if all(
            a.forward.total + a.backward >= b.forward.total + b.backward
            for a, b in each
        ):
            found.add(tp)
    return frozenset(found)


def judge(request: Request, layouts: Sequence[Layout]) -> tuple[Choice, ...]:
    """Simulate given layouts as a search does; they may have custom schedules."""
    # Prices depend on the precision, so layouts share a pricer for each.
    pricers = {
        x.precision: Pricer(replace(request, precision=x.precision))
        for x in layouts
    }
    found = tuple(
        pricers[layout.precision].choose(layout) for layout in layouts
    )
    for each in found:
        refuse_too_long(each.case, request.hardware, each.parts)
    return found


# ---- what plain rules would pick


@dataclass(frozen=True)
class Baseline:
    """A simple rule with its pick, or why it has none; `fits`: the pick fits memory."""

    rule: str
    choice: Choice | None
    fits: bool
    why: str = ""


@uncollected()
def baselines(request: Request) -> tuple[Baseline, ...]:
    """The picks of simple rules, to compare a search with."""
    r, pricer, ranks = request, Pricer(request), request.hardware.ranks
    terms = {"batch": r.batch, "sequence": r.sequence}
    try:
        # The rule of `train` may have no layout for this model.
        own = [
            recipe(
                r.shape,
                ranks,
                **terms,
                memory=r.hardware.memory,
                precision=r.precision,
            )
        ]
    except LayoutError:
        own = []

    def pick(meshes: Iterable[Iterable[Layout]]) -> Choice | None:
        """The first layout that fits, or else the one that needs the least memory."""
        least: Choice | None = None
        # Meshes in the rule's order; in each, the largest microbatch that
        # fits.
        for each in meshes:
            layouts = [
                x
                for x in each
                if r.takes(x) and not legal(x, r.shape, **terms)
            ]
            # The smallest microbatch needs about the least memory: if it is far too
            # large, all are.
            smallest = [pricer.choose(x, r.room) for x in layouts[-1:]]
            near = any(choice.bytes <= _NEARLY * r.room for choice in smallest)
            for choice in (
                (pricer.choose(x, r.room) for x in layouts)
                if near
                else smallest
            ):
                if choice.bytes <= r.room:
                    return choice
                if least is None or choice.bytes < least.bytes:
                    least = choice
        # Known so far by its memory only, because it is too large.
        return least and pricer.choose(least.layout)

    rules = {
        "data parallel with recomputation": [
            _layouts(r, "recompute:all", dp=ranks)
        ],
        "smallest tp x pp that fits, biggest microbatch": _smallest(r),
        "the recipe of `train --layout auto`": [own],
    }
    return tuple(
        _baseline(rule, pick(meshes), r.room) for rule, meshes in rules.items()
    )


def _baseline(rule: str, choice: Choice | None, room: float) -> Baseline:
    if choice is None:
        return Baseline(rule, None, False, "no legal layout")
    if choice.step > LONGEST_STEP:
        return Baseline(
            rule,
            None,
            False,
            f"one step of {choice.layout} takes more than a day",
        )
    return Baseline(rule, choice, choice.bytes <= room)


def _layouts(request: Request, words: str, **sizes: int) -> Iterator[Layout]:
    """Layouts of a mesh, the largest microbatch first."""
    axes = " ".join(
        f"{name}{size}" for name, size in sizes.items() if size > 1
    )
    layout = Layout.parse(f"{axes} {words} {request.precision}")
    # Counts ascend, so the largest microbatch comes first.
    for count in divisors(request.batch // sizes["dp"]):
        yield replace(layout, microbatches=count)


def _smallest(request: Request) -> Iterator[Iterator[Layout]]:
    """Meshes with the fewest ranks per copy, tensor parallelism before pipelines."""
    ranks, node, profile, shape = (
        request.hardware.ranks,
        request.hardware.node,
        request.profile,
        request.shape,
    )
    for model in divisors(ranks):
        dp = ranks // model
        held = held_bytes(
            Layout(Mesh((Axis("dp", (1, dp)),)), zero=1), profile.state
        )
        # Bytes for each trained element that every step needs.
        states = held.weight + held.gradient + held.optimizer
        # If the permanent state does not fit, no microbatch is small enough.
        least_held = states * shape.trained + held.frozen * (
            shape.total - shape.trained
        )
        # A mesh without one sequence for each copy, or without room for the
        # states.
        if request.batch < dp or (
            model < ranks and least_held / model > request.room
        ):
            continue
        for tp in (d for d in reversed(divisors(model)) if d <= node):
            seq = tp > 1 and "seq" not in request.without
            words = f"{'seq' if seq else ''} {'zero1' if dp > 1 else ''}"
            yield _layouts(request, words, dp=dp, pp=model // tp, tp=tp)
