"""The state of one rank at each operation of its list; no other file follows a list.

`State` walks a rank's row and knows, before every operation, which weights are gathered
or stale, which gradients are open, in flight or reduced, and which activations are
kept, recomputed or on the host. From this follow the operation's *needs* (`graph` turns
them into edges, `check` reports missing ones, the executor waits for them) and its
*changes* (`memory` gives them sizes).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from . import ops
from .program import Op, Program
from .tree import add_in_tree

# Reductions of one lane in flight at once. Each holds a whole gradient: without a
# limit, a step over a slow link would hold the whole model's. Once all gradients have
# begun, waiting frees nothing.
IN_FLIGHT = 2


class Change(NamedTuple):
    """A buffer of a kind and piece that an operation allocates (1) or frees (-1)."""

    what: str
    piece: int
    sign: int


_NO_MESSAGE = Op("")[3:]

# Kinds of buffers besides those of the table (`ops.KEPT`, `ops.SELECTED`,
# `ops.FACTORS`, `ops.WEIGHTS`).
INPUT = "input"  # what is kept of a segment that will be recomputed
WORKING = "working"  # needed only while the operation runs
WHOLE = "whole"  # a unit's whole gradient, to which contributions are added
PART = "part"  # the shard of it that remains after its reduction
# A message; its piece is the lower of its two ends.
SENT, RECEIVED = (
    "sent",
    "received",
)
MATRICES = "matrices"  # on their way to owners and back


def recomputed(row: Iterable[Op]) -> dict[tuple[int, int], Op]:
    """The recomputations of a row, by piece and microbatch."""
    return {
        (op.piece, op.index): op for op in row if op.kind in ops.RECOMPUTES
    }


def restarts(at: Mapping[Any, int], piece: int, index: int) -> bool:
    """True if a piece's recomputation starts from its own kept input.

    Otherwise it starts from the output of the recomputed piece before it. `at` maps
    operations to positions in the list.
    """
    # Plain tuples: creating an Op takes as long as three of these look-ups.
    if (ops.RECOMPUTE_PART, piece, index, *_NO_MESSAGE) in at:
        return True
    recompute = at.get((ops.RECOMPUTE, piece, index, *_NO_MESSAGE))
    before = at.get((ops.RECOMPUTE, piece - 1, index, *_NO_MESSAGE))
    if recompute is None or before is None or before > recompute:
        return recompute is not None
    # An input that another operation brought is kept, because it is not brought a
    # second time.
    return any(
        (kind, piece, index, *_NO_MESSAGE) in at for kind in ops.BRINGS_VALUE
    )


# Operations of the rank, and descriptions of what is missing.
Needs = list[Op | str]
Changes = tuple[Change, ...]


class _Flow(NamedTuple):
    """Everything that the changes of a computation or a message depend on."""

    kind: str
    piece: int  # for a message, its lower end
    before: str = ""  # activations kept before it
    after: str = ""  # activations kept after it
    receives: bool = False  # it takes a message of another stage
    tokens_in: bool = False  # it takes tokens of other ranks
    tokens_out: bool = False  # its output tokens travel
    opened: tuple[int, ...] = ()  # units of which a whole gradient begins


# The rest of a message, which has nothing but kind and piece.
_NO_FLOW = _Flow("", 0)[2:]


class State:
    """One rank's list, followed operation by operation.

    `in_place`: a reduced gradient stays in the whole buffer, as without shards.
    Otherwise it moves to a buffer of its own when its reduction starts.
    """

    def __init__(
        self, program: Program, number: int, *, in_place: bool = False
    ) -> None:
        self.program, self.ops, self.in_place = (
            program,
            program.rows[number],
            in_place,
        )
        # The first place of each operation, also in a list with repetitions.
        self.at = dict(
            zip(
                reversed(self.ops),
                range(len(self.ops) - 1, -1, -1),
                strict=True,
            )
        )
        self.named = {op[:3]: op for op in self.ops if not op.of}
        # The list by kind, in one pass: most kinds are few operations.
        by_kind: defaultdict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            by_kind[op[0]].append(op)
        self.has = {*by_kind}

        def of_kinds(*kinds: str) -> list[Op]:
            return [op for kind in kinds for op in by_kind.get(kind, ())]

        self.recomputes = recomputed(of_kinds(*ops.RECOMPUTES))
        self.brings = self._there(ops.BRINGS_VALUE)
        # The kinds that give the piece below its gradient: tokens that come back
        # from other ranks, or the backward itself.
        self.brings_gradient = self._there(ops.BRINGS_GRADIENT)
        self.gives_gradient = self._there(
            (*ops.BRINGS_GRADIENT, *ops.PROPAGATES)
        )
        self.last_piece = program.pieces - 1
        gathered = {op.piece for op in of_kinds(ops.GATHER)}
        # Units always whole at home, whatever is gathered beside them.
        self.at_home = {*program.frozen} - gathered
        received = of_kinds(ops.RECEIVE)
        self.incoming = {
            (op.piece, op.of == ops.FORWARD, op.index): op for op in received
        }
        self.entries = {op.piece for op in received}
        # The pieces whose backward needs summed choices.
        self.chooses = {op.piece for op in of_kinds(ops.SUM_CHOICES)}
        # Activations by (piece, microbatch): ops.KEPT, ops.SELECTED, INPUT or
        # ops.FACTORS.
        self.kept: dict[tuple[int, int], str] = {}
        self.away: dict[tuple[int, int], str] = {}  # on the host
        # Weights by unit.
        self.gathered: dict[int, Op] = {}  # by their gathers
        # Units whose own shard has been copied from the host into their buffer.
        self.loaded: set[int] = set()
        self.stale: set[int] = set()  # updated since they were gathered
        self.updated: dict[int, Op] = {}
        # Units whose gathers need scales, and their agreements since the last update.
        self.narrow = {op.piece for op in of_kinds(ops.AGREE_SCALES)}
        self.scaled: dict[int, Op] = {}
        self.updates: Counter[int] = Counter()  # in this step
        # Gradients by unit.
        # Contributions in the whole buffer.
        self.open: dict[int, list[Op]] = {}
        # Reductions that nothing has waited for, in order.
        self.under_way: dict[Op, None] = {}
        # Reductions whose gradient has not begun.
        self.unbegun = len(of_kinds(*ops.FIRST_SUMS))
        # In a step of `exact`: by unit and the piece that uses it, the microbatches
        # that wait for their addition, and those that each sum of the tree covers.
        self.leaves: dict[tuple[int, int], set[int]] = {}
        self.trees: dict[tuple[int, int], list[range]] = {}
        self.added: dict[tuple[int, int], Op] = {}  # the last additions
        self.sums = {*ops.FIRST_SUMS} & self.has
        copies = ops.KINDS[ops.EXCHANGE_PARTS].axes
        self.exchanges = any(program.mesh.of(axis) > 1 for axis in copies)
        # Each unit's last reduction since its update.
        self.reduced: dict[int, Op] = {}
        self.arrived: set[int] = set()  # units whose reduction was waited for
        # units whose finished sums were added: no further sum may follow
        self.tied: set[int] = set()
        self.counted: Op | None = None
        # the agreement on the norm of all that is reduced
        self.agreed: Op | None = None
        # For each operation walked past: its needs, and the numbers of the changes at
        # its start and end. There are few different bundles of changes, and each occurs
        # in many places.
        self.needed: list[Needs] = []
        self.flow: list[int] = []
        self.bundles: list[Changes] = []
        self._numbers: dict[Changes, int] = {}
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}
        # Needs of weights by piece, until an operation on a unit changes them.
        self._of_weights: dict[int, Needs] = {}

    def _there(self, kinds: Iterable[str]) -> list[str]:
        """The kinds that occur in the list."""
        return [kind for kind in kinds if kind in self.has]

    def walk(self) -> Iterator[tuple[Op, Needs]]:
        """Yield each operation and its needs, with the state before it."""
        # Not stored: an object that refers to itself is freed late, and a search
        # creates many.
        needs_of = {kind: self._needs_of(kind) for kind in self.has}
        for op in self.ops:
            needs = needs_of[op.kind](op)
            yield op, needs
            self.needed.append(needs)
            self.flow += self.apply(op, needs)
        # What nothing waits for arrives when the step ends.
        if self.flow:
            bundle = self.bundles[self.flow[-1]]
            self.flow[-1] = self._number((*bundle, *self._rest()))

    def follow(self) -> State:
        """Walk to the end of the list and return the state."""
        for _ in self.walk():
            pass
        return self

    # ---- needs

    def needs(self, op: Op) -> Needs:
        """Operations of this rank that must have finished, and unmet needs."""
        return self._needs_of(op.kind)(op)

    def _needs_of(self, kind: str) -> Callable[[Op], Needs]:
        """A function that finds the needs of operations of this kind."""
        one = self._one_of
        if kind == ops.FORWARD:
            return lambda op: [
                *self._weights(op.piece),
                *self._input(op.piece, op.index),
            ]
        if kind in ops.PROPAGATES:
            return self._of_backward
        if kind == ops.WEIGHT_GRADIENT:
            return lambda op: [one(op, ops.INPUT_GRADIENT)]
        if kind in ops.RECOMPUTES:
            return self._of_recompute
        if kind in (ops.OFFLOAD, ops.SUM_CHOICES):
            return lambda op: [one(op, ops.FORWARD)]
        if kind == ops.RELOAD:
            return lambda op: [one(op, ops.OFFLOAD)]
        if kind == ops.EXCHANGE:
            return lambda op: [
                *self._handed_on(op.piece, op.index),
                self._routes(op),
            ]
        if kind in ops.BRINGS_VALUE or kind == ops.COUNT_ROUTES:
            return lambda op: self._handed_on(op.piece, op.index)
        if kind in ops.BRINGS_GRADIENT:
            return lambda op: [one(op, *ops.PROPAGATES)]
        if kind == ops.SEND:
            gradient = (*ops.BRINGS_GRADIENT, *ops.PROPAGATES)
            return lambda op: [
                one(op, *((op.of,) if op.of == ops.FORWARD else gradient))
            ]
        return (lambda op: []) if kind == ops.RECEIVE else self._of_unit

    def _of_backward(self, op: Op) -> Needs:
        # The recomputation stands for what the forward has not kept.
        recompute = self.recomputes.get((op.piece, op.index))
        kept = [recompute] if recompute else self._kept(op)
        gradient = self._gradient(op.piece, op.index)
        needs = [*self._weights(op.piece), *kept, *gradient]
        if op.piece in self.chooses:
            needs.append(self._one_of(op, ops.SUM_CHOICES))
        return needs

    def _of_recompute(self, op: Op) -> Needs:
        if restarts(self.at, op.piece, op.index):
            return [*self._weights(op.piece), *self._kept(op)]
        return [*self._weights(op.piece), op._replace(piece=op.piece - 1)]

    def _of_unit(self, op: Op) -> Needs:
        kind = op.kind
        unit = op.piece
        takes = ops.KINDS[kind].takes
        if kind == ops.REDUCE:
            none: Needs = [f"a gradient of unit {unit} not yet summed"]
            return [*(self.open.get(unit) or none), *self._turn(op)]
        if kind == ops.REDUCE_REPLICAS:
            return [self._one_of(op, ops.REDUCE), *self._turn(op)]
        if kind == ops.ADD:
            return self._for_addition(op)
        if kind == ops.EXCHANGE_PARTS:
            return [*self._for_exchange(op), *self._turn(op)]
        if kind == ops.SHARE_SUMS:
            return [self._one_of(op, ops.EXCHANGE_PARTS), *self._turn(op)]
        if kind == ops.AGREE:
            # The count too: ranks also agree on the loss.
            counted = [self.counted] if self.counted else []
            return [*counted, *map(self._complete, self.reduced)]
        if ops.NORM in takes:
            return self._for_update(unit)
        if ops.REDUCED in takes:
            return [self._complete(unit)]
        if ops.WEIGHTS in takes:
            return [
                self.gathered.get(unit, f"a gather of unit {unit} before it")
            ]
        needs: Needs = []
        if ops.HOME in takes and unit in self.updated:
            needs.append(self.updated[unit])
        if kind == ops.GATHER:
            needs += self._for_gather(op)
        return needs

    def _for_addition(self, op: Op) -> Needs:
        """The backward of the microbatch whose gradient is added."""
        user, m = self.program.tree_of(op)
        made = [
            each
            for each in self.open.get(op.piece, ())
            if (each.piece, each.index) == (user, m)
        ]
        if made:
            return [*made]
        return [f"a gradient of microbatch {m} by piece {user} not yet added"]

    def _for_exchange(self, op: Op) -> Needs:
        """The last addition of the tree that is exchanged."""
        user, _ = self.program.tree_of(op)
        count = self.program.microbatches
        tree = self.trees.get((op.piece, user), [])
        last = self.added.get((op.piece, user))
        if last is not None and tree == [range(count)]:
            return [last]
        return [
            f"all {count} additions {Op(ops.ADD, op.piece)} of its tree before it"
        ]

    def _for_gather(self, op: Op) -> Iterator[Op | str]:
        """The unit's shard on the device, and the scales of its matrices."""
        load = Op(ops.LOAD, op.piece, op.index)
        if load in self.at:
            yield load
        if op.piece in self.narrow:
            agreement = Op(ops.AGREE_SCALES, op.piece)
            yield self.scaled.get(
                op.piece, f"{agreement} before it, after the last update"
            )

    def _turn(self, op: Op) -> Iterator[Op]:
        """The reductions that must be waited for before this one starts.

        These are earlier ones of the same unit, as results add up, and the oldest if
        the lane is full.
        """
        others = [other for other in self.under_way if other.kind == op.kind]
        # With one more there would be more than IN_FLIGHT on the lane.
        oldest = (
            others[: max(0, len(others) - IN_FLIGHT + 1)]
            if self.unbegun
            else []
        )
        yield from (
            other
            for other in others
            if other.piece == op.piece or other in oldest
        )

    def _complete(self, unit: int) -> Op | str:
        """The operation that completes a unit's gradient over all its copies."""
        last = self.reduced.get(unit)
        part = last and self.program.replicated and last.kind in ops.FIRST_SUMS
        if last and not part:
            return last
        return f"the sum {Op(self._last_sum, unit)} before it"

    @property
    def _last_sum(self) -> str:
        """The kind of operation that completes a gradient."""
        kinds = ops.REPLICA_SUMS if self.program.replicated else ops.FIRST_SUMS
        return kinds[self.program.exact]

    def _for_update(self, unit: int) -> Needs:
        needs: Needs = []
        if ops.AGREE in self.has:
            # A sum after the agreement invalidates it: ranks would apply another
            # gradient than agreed on.
            needs.append(
                self.agreed or f"{ops.AGREE} before it, after every sum"
            )
        contributions = self.open.get(unit, [])
        # Without reductions, as on one rank, the contributions themselves are complete.
        for user in self.program.users(unit):
            if self.trees.get((unit, user)):
                op = self.program.tree_op(ops.EXCHANGE_PARTS, unit, user)
                needs.append(f"the sum {op} of a finished tree before it")
        if not self.sums:
            needs += contributions or [f"a gradient of unit {unit}"]
        elif contributions:
            of = ", ".join(map(str, contributions[:2]))
            first = ops.FIRST_SUMS[self.program.exact]
            needs.append(f"the sum {Op(first, unit)} of {of} before it")
        else:
            needs.append(self._complete(unit))
        return needs

    def _one_of(self, op: Op, *kinds: str) -> Op | str:
        """The first such operation with the same piece and index, or a description."""
        for kind in kinds:
            if choice := self.named.get((kind, op.piece, op.index)):
                return choice
        return " or ".join(str(Op(kind, op.piece, op.index)) for kind in kinds)

    def _weights(self, piece: int) -> Needs:
        if piece not in self._of_weights:
            self._of_weights[piece] = self._find_weights(piece)
        return self._of_weights[piece]

    def _find_weights(self, piece: int) -> Needs:
        needs: Needs = []
        for unit in self.program.units(piece):
            # A gather since the last update has the weights of this step.
            if unit in self.gathered and unit not in self.stale:
                needs.append(self.gathered[unit])
            elif ops.GATHER in self.has and unit not in self.at_home:
                # If weights are gathered, no unit is whole at home.
                last = f"the last {unit}{ops.DROP} and {unit}{ops.UPDATE}"
                must = (
                    f"a {unit}{ops.GATHER} must come before it, after {last}"
                )
                needs.append(f"the weights of unit {unit}: {must}")
            elif unit in self.updated:
                needs.append(self.updated[unit])
        return needs

    def _input(self, piece: int, m: int) -> Needs:
        for kind in self.brings:
            if brought := self.named.get((kind, piece, m)):
                return [brought]
        if self._apart(piece, m):
            return [str(Op(ops.EXCHANGE, piece, m))]
        return self._handed_on(piece, m)

    def _apart(self, piece: int, m: int) -> bool:
        """True if tokens change ranks between the previous piece and this one."""
        kind = ops.COUNT_ROUTES
        return kind in self.has and any(
            (kind, p, m) in self.named for p in (piece, piece - 1)
        )

    def _routes(self, op: Op) -> Op | str:
        """The operation that counted arriving tokens, here or one piece before."""
        before = self.named.get((ops.COUNT_ROUTES, op.piece - 1, op.index))
        return before or self._one_of(op, ops.COUNT_ROUTES)

    def _handed_on(self, piece: int, m: int) -> Needs:
        """The previous piece's output, or the message that carries it."""
        if not piece:
            return []
        if before := self.named.get((ops.FORWARD, piece - 1, m)):
            return [before]
        received = self.incoming.get((piece, True, m))
        return [
            received or str(Op(ops.RECEIVE, piece, m, ops.FORWARD, piece - 1))
        ]

    def _kept(self, op: Op) -> Needs:
        """The activations that the forward kept, reloaded if they are on the host."""
        needs = [self._one_of(op, ops.FORWARD)]
        if (ops.OFFLOAD, op.piece, op.index) in self.named:
            needs.append(self._one_of(op, ops.RELOAD))
        return needs

    def _gradient(self, piece: int, m: int) -> Needs:
        # Losses, also those of routers in any piece, are sums over tokens divided by
        # their number over all ranks.
        counted = [self.counted or f"{ops.COUNT} before it"] * (
            ops.COUNT in self.has
        )
        return (
            counted
            if piece == self.last_piece
            else [*self._from_above(piece, m), *counted]
        )

    def _from_above(self, piece: int, m: int) -> Needs:
        """The gradient that the next piece gives, or its message."""
        apart = self._apart(piece + 1, m)
        for kind in self.brings_gradient if apart else self.gives_gradient:
            if above := self.named.get((kind, piece + 1, m)):
                return [above]
        if apart:
            return [str(Op(ops.EXCHANGE_GRADIENT, piece + 1, m))]
        received = self.incoming.get((piece, False, m))
        return [
            received or str(Op(ops.RECEIVE, piece, m, ops.BACKWARD, piece + 1))
        ]

    # ---- changes

    def apply(self, op: Op, needs: Needs) -> tuple[int, int]:
        """Advance past an operation.

        Returns the numbers of the changes at its start and at its end. Everything that
        it has waited for has arrived at its start.
        """
        # Waited for, so its buffers change before this operation starts.
        way = self.under_way
        arrived = (
            [c for n in needs if n in way for c in self._arrive(n)]
            if way
            else []
        )
        kind = op.kind
        if kind in ops.COMPUTES:
            start, end = self._compute(op)
        elif op.of:
            start, end = self._after((kind, min(op.piece, op.peer), *_NO_FLOW))
        else:
            changed: tuple[list[Change], list[Change]] = [], []
            if kind in (ops.OFFLOAD, ops.RELOAD):
                self._to_or_from_host(op, *changed)
            elif kind in (ops.EXCHANGE, ops.EXCHANGE_GRADIENT):
                changed[0].append(Change(RECEIVED, op.piece - 1, 1))
            elif kind not in ops.ON_MICROBATCH:
                self._unit(op, *changed)
            start, end = (
                self._number(tuple(changed[0])),
                self._number(tuple(changed[1])),
            )
        if arrived:
            start = self._number((*arrived, *self.bundles[start]))
        return start, end

    def _number(self, changes: Changes) -> int:
        number = self._numbers.setdefault(changes, len(self.bundles))
        if number == len(self.bundles):
            self.bundles.append(changes)
        return number

    def _compute(self, op: Op) -> tuple[int, int]:
        kind, piece, m = op[:3]
        receives = tokens_in = tokens_out = False
        if kind == ops.FORWARD or kind in ops.PROPAGATES:
            far = piece - 1 if kind == ops.FORWARD else piece + 1
            # From here on the message belongs to the operation, and counts with its
            # activations.
            receives = (
                piece in self.entries
                and (ops.RECEIVE, piece, m, kind, far) in self.at
            )
            if ops.EXCHANGE in self.has:
                sent = (
                    ops.EXCHANGE
                    if kind == ops.FORWARD
                    else ops.EXCHANGE_GRADIENT
                )
                # Tokens exist twice from their creation until the operation that takes
                # them begins: as sent, and as received.
                tokens_in = (
                    sent,
                    piece + (kind != ops.FORWARD),
                    m,
                ) in self.named
                tokens_out = (
                    sent,
                    piece + (kind == ops.FORWARD),
                    m,
                ) in self.named
        # What this piece kept so far is replaced by what it keeps from here on.
        before = self.kept.pop((piece, m), "")
        if kind == ops.FORWARD:
            keeps = self._keeps(piece, m)
        elif kind in ops.RECOMPUTES:
            keeps = ops.KEPT
        else:
            keeps = ops.FACTORS if kind == ops.INPUT_GRADIENT else ""
        if keeps:
            self.kept[piece, m] = keeps
        opened: list[int] = []
        # Norms and biases get their gradient with the input's. A piece without an input
        # has none.
        contributes = kind in ops.CONTRIBUTES
        if contributes or (kind == ops.INPUT_GRADIENT and piece):
            for unit in self.program.trained(piece):
                if self._opens(unit, piece, m):
                    opened.append(unit)
                if contributes:
                    self.open[unit].append(op)
        tokens = tokens_in, tokens_out
        flow = kind, piece, before, keeps, receives, *tokens, tuple(opened)
        return self._after(flow)

    def _opens(self, unit: int, piece: int, m: int) -> bool:
        """True if a piece's backward begins a whole gradient of a unit."""
        new = unit not in self.open
        self.open.setdefault(unit, [])
        if not self.program.exact:
            self.unbegun -= new
            return new
        tree = unit, piece
        if tree not in self.leaves:
            self.unbegun -= 1
        leaves = self.leaves.setdefault(tree, set())
        if m in leaves:
            return False
        leaves.add(m)
        return True

    def _add(self, op: Op, end: list[Change]) -> None:
        """Add a microbatch's gradient to its tree: each addition frees a buffer."""
        user, m = self.program.tree_of(op)
        tree = op.piece, user
        self.leaves.get(tree, set()).discard(m)
        contributions = self.open.get(op.piece, [])
        self.open[op.piece] = [
            other
            for other in contributions
            if (other.piece, other.index) != (user, m)
        ]
        sums = self.trees.setdefault(tree, [])
        additions = add_in_tree(sums, m, self.program.microbatches)
        end += [Change(WHOLE, op.piece, -1)] * additions
        self.added[tree] = op

    def _after(self, key: tuple[Any, ...]) -> tuple[int, int]:
        """The changes of a message or a computation, at its start and at its end.

        `key` has the fields of a `_Flow`: creating one takes as long as three of these
        look-ups, and few of them differ.
        """
        if key in self._known:
            return self._known[key]
        flow = _Flow(*key)
        kind = flow.kind
        piece = flow.piece
        start: list[Change] = []
        end: list[Change] = []
        forward = kind == ops.FORWARD
        # Messages carry the number of their lower end.
        into, out = (piece - 1, piece) if forward else (piece, piece - 1)
        if flow.receives:
            start.append(Change(RECEIVED, into, -1))
        if flow.tokens_in:  # both copies, as sent and as received
            start += [Change(RECEIVED, into, -1), Change(RECEIVED, into, -1)]
        if flow.tokens_out:
            end.append(Change(RECEIVED, out, 1))
        if kind in ops.MESSAGES:
            start.append(
                Change(SENT if kind == ops.SEND else RECEIVED, piece, 1)
            )
        start += (Change(WHOLE, unit, 1) for unit in flow.opened)
        # A forward's results grow while it runs; a backward needs kept activations
        # until it ends.
        at = start if forward or kind in ops.RECOMPUTES else end
        if flow.before:
            at.append(Change(flow.before, piece, -1))
        if flow.after:
            at.append(Change(flow.after, piece, 1))
        if kind in ops.COMPUTES:
            start.append(Change(WORKING, piece, 1))
            end.append(Change(WORKING, piece, -1))
        self._known[key] = (
            self._number(tuple(start)),
            self._number(tuple(end)),
        )
        return self._known[key]

    def _keeps(self, piece: int, m: int) -> str:
        """The activations kept after a forward: all, a part, its input or none."""
        recompute = self.recomputes.get((piece, m))
        if recompute is None:
            return ops.KEPT
        if recompute.kind == ops.RECOMPUTE_PART:
            return ops.SELECTED
        # Inside a segment nothing is kept; it is recomputed from its first input.
        return INPUT if restarts(self.at, piece, m) else ""

    def _to_or_from_host(
        self, op: Op, start: list[Change], end: list[Change]
    ) -> None:
        key, out = (op.piece, op.index), op.kind == ops.OFFLOAD
        source, target = (
            (self.kept, self.away) if out else (self.away, self.kept)
        )
        if what := source.pop(key, ""):
            target[key] = what
            (end if out else start).append(
                Change(what, op.piece, -1 if out else 1)
            )

    def _unit(self, op: Op, start: list[Change], end: list[Change]) -> None:
        kind = op.kind
        unit = op.piece
        row = ops.KINDS[kind]
        self._of_weights.clear()
        start += [Change(MATRICES, unit, 1)] * (kind == ops.TO_OWNERS)
        end += [Change(MATRICES, unit, -1)] * (kind == ops.FROM_OWNERS)
        if kind in (ops.GATHER, ops.LOAD):
            # A load and its gather fill one buffer, which is taken once.
            there = unit in self.gathered or unit in self.loaded
            start += [Change(ops.WEIGHTS, unit, 1)] * (not there)
            if kind == ops.LOAD:
                self.loaded.add(unit)
            else:
                self.gathered[unit] = op
                self.loaded.discard(unit)
                self.stale.discard(unit)
        elif kind == ops.DROP:
            end += [Change(ops.WEIGHTS, unit, -1)] * (unit in self.gathered)
            self.gathered.pop(unit, None)
        elif kind == ops.ADD:
            self._add(op, end)
        elif kind in ops.REDUCTIONS:
            self._reduce(op, start)
        elif kind == ops.COUNT:
            self.counted = op
            self.updates.clear()  # a new step begins
        elif kind == ops.AGREE:
            self.agreed = op
        elif kind == ops.AGREE_SCALES:
            self.scaled[unit] = op
        # An update frees the shard; without reductions, the whole gradient.
        elif kind == ops.UPDATE:
            if not self.sums and unit in self.open:
                del self.open[unit]
                end.append(Change(WHOLE, unit, -1))
            end += [Change(PART, unit, -1)] * (unit in self.arrived)
            self.reduced.pop(unit, None)
            self.arrived.discard(unit)
            self.tied.discard(unit)
            self._change_home(op)
            self.updates[unit] += 1
            self.stale.add(unit)
        elif ops.REDUCED in row.gives:
            self.reduced[unit] = op
            if ops.NORM not in row.takes:
                self.tied.add(unit)
                self.agreed = None
        elif ops.HOME in row.gives:
            self._change_home(op)

    def _change_home(self, op: Op) -> None:
        self.updated[op.piece] = op
        self.scaled.pop(op.piece, None)

    def _reduce(self, op: Op, start: list[Change]) -> None:
        if op.kind in ops.FIRST_SUMS and op.piece in self.open:
            start += [Change(PART, op.piece, 1)] * (not self.in_place)
            self._close(op, start)
        # A sum after an agreement on the norm invalidates it.
        self.under_way[op] = None
        self.reduced[op.piece], self.agreed = op, None

    def _close(self, op: Op, start: list[Change]) -> None:
        """Take a unit's gradient for its sum; the parts of other ranks need a buffer."""
        if op.kind == ops.REDUCE:
            del self.open[op.piece]
            return
        user, _ = self.program.tree_of(op)
        self.trees.pop((op.piece, user), None)
        self.leaves.pop((op.piece, user), None)
        users = self.program.users(op.piece)
        others = [self.trees.get((op.piece, other)) for other in users]
        if not self.open[op.piece] and not any(others):
            del self.open[op.piece]
        start += [Change(WHOLE, op.piece, 1)] * self.exchanges

    def _arrive(self, op: Op) -> Iterator[Change]:
        """Complete a reduction: free the whole buffer, and add to this rank's shard."""
        del self.under_way[op]
        # With replicas the shard is complete only after the second sum.
        last = op.kind in ops.REPLICA_SUMS or not self.program.replicated
        if op.kind == ops.EXCHANGE_PARTS and self.exchanges:
            yield Change(WHOLE, op.piece, -1)  # the parts that have been added
        if last if self.in_place else op.kind in ops.FIRST_SUMS:
            yield Change(WHOLE, op.piece, -1)
        if not last:
            return
        first = op.piece not in self.arrived
        if first == self.in_place:
            yield Change(PART, op.piece, 1 if first else -1)
        self.arrived.add(op.piece)

    def _rest(self) -> list[Change]:
        """The changes of reductions that no operation of the list waits for."""
        return [
            change
            for op in tuple(self.under_way)
            for change in self._arrive(op)
        ]
