"""The operations of a training step, and the step as one value: a list for each rank.

An operation prints as `2F0` (piece 2, forward, microbatch 0) and parses back. A program
saves as text that a person can edit. Only `state.py` and `graph.py` know what must come
before what.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..layout import LayoutError, Mesh
from . import ops

_HEADER = "phalanx program 1"
MOST = 999_999  # the largest number of a piece, a microbatch or a rank
_N = "[0-9]{1,6}"
_SIGNS = "".join(ops.ON_UNIT)
_WRITTEN = {  # (piece)(kind)(microbatch or count)
    ops.MICROBATCH: re.compile(rf"({_N})([A-Za-z])({_N})"),
    ops.UNIT: re.compile(rf"({_N})([A-Za-z{_SIGNS}])(?:#({_N}))?"),
    ops.STEP: re.compile(rf"()([A-Za-z])(?:#({_N}))?"),
}
_TRAVELS = "".join((ops.FORWARD, *ops.PROPAGATES))
_MESSAGE = re.compile(
    rf"({_N})([{_TRAVELS}])({_N})([{''.join(ops.MESSAGES)}])({_N})"
)


class ProgramError(ValueError):
    """Raised if a program cannot run, with the operation, the rank and the reason."""


class DoesNotFit(ProgramError):
    """Raised if a rank exceeds its memory limit even with everything recomputed."""


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without garbage collection.

    A large program is a million tuples without a cycle, and searching for cycles again
    and again took as long as the work itself.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Op(NamedTuple):
    """One operation, unique in its rank's list.

    `piece` is a piece, or the unit of weights with its number. `index` is a microbatch,
    or a count. A message also has the kind of value (`of`) and the piece at the far end
    (`peer`): `2F0>3` sends the output of 2F0 to the rank with piece 3, and `3F0<2`
    receives the input of 3F0.
    """

    kind: str
    piece: int = -1
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which is not needed
    of: str = ""
    peer: int = -1

    def __str__(self) -> str:
        if self.of:
            return f"{self.piece}{self.of}{self.index}{self.kind}{self.peer}"
        if self.kind in ops.ON_MICROBATCH:
            return f"{self.piece}{self.kind}{self.index}"
        unit = "" if self.piece < 0 else str(self.piece)
        return f"{unit}{self.kind}" + (f"#{self.index}" if self.index else "")

    def described(self, names: Sequence[str]) -> str:
        """The operation in words: forward of layers.2, microbatch 0."""
        kind = ops.KINDS[self.of or self.kind].name
        if self.of:
            kind += f", {ops.KINDS[self.kind].name} {'to' if self.kind == ops.SEND else 'from'}"
            return f"{names[self.piece]} {kind} {names[self.peer]}, microbatch {self.index}"
        of = f" of {names[self.piece]}" if self.piece >= 0 else ""
        return f"{kind}{of}" + f", microbatch {self.index}" * (
            self.kind in ops.ON_MICROBATCH
        )

    @classmethod
    def parse(cls, word: str) -> Op:
        # A letter belongs to one way of writing: 2F0, 2G#1 or N.
        for on, pattern in _WRITTEN.items():
            match = pattern.fullmatch(word)
            if (
                match
                and match[2] in ops.KINDS
                and ops.KINDS[match[2]].on == on
            ):
                return cls(match[2], int(match[1] or -1), int(match[3] or 0))
        if match := _MESSAGE.fullmatch(word):
            kind, of = match[4], match[2]
            piece = int(match[1])
            index = int(match[3])
            peer = int(match[5])
            return cls(kind, piece, index, of, peer)
        raise ProgramError(
            f"{word[:60]!r} is not an operation. Write 2F0, 2G#1, 2F0>3, 3F0<2, N, A or 2U, with"
            f" numbers up to {MOST:,}."
        )


@dataclass(frozen=True)
class Program:
    """A training step: one list of operations for every rank that differs.

    `owner[rank]` is the row that a rank follows; if left out, the row of its coordinate
    along `pp`. `tied` lists (piece, unit) pairs: the piece also uses the weights of
    that unit. `frozen` lists the units without trained weights, which have no gradient.
    """

    rows: tuple[tuple[Op, ...], ...]
    mesh: Mesh = Mesh()
    owner: tuple[int, ...] = ()
    tied: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.owner:
            by_stage = tuple(
                self.mesh.coordinates(r).get("pp", 0)
                for r in range(self.mesh.size)
            )
            object.__setattr__(self, "owner", by_stage)
        used, count = sorted(set(self.owner)), len(self.rows)
        if len(self.owner) != self.mesh.size or used != list(range(count)):
            raise ProgramError(
                f"{count} rows for a mesh {str(self.mesh)!r} of {self.mesh.size} ranks;"
                f" {len(self.owner)} ranks follow rows {used}."
            )

    @classmethod
    def pipeline(cls, rows: Iterable[Iterable[Op]]) -> Program:
        """A program whose ranks are the stages of a single pipeline."""
        fixed = tuple(tuple(row) for row in rows)
        return cls(fixed, Mesh.parse(f"pp{len(fixed)}"))

    def with_rows(self, rows: Iterable[Iterable[Op]]) -> Program:
        made = replace(self, rows=tuple(tuple(row) for row in rows))
        # Groups of rows depend on the mesh and the owners alone.
        made.__dict__["_members"] = self._members
        return made

    def ranks(self, row: int) -> tuple[int, ...]:
        """The ranks that follow a row."""
        return tuple(r for r, o in enumerate(self.owner) if o == row)

    def members(self, row: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The rows of ranks that differ from a row's first only along these axes."""
        # Axes of one rank change nothing, so they are left out of the key.
        wanted = tuple(axis for axis in axes if self.mesh.of(axis) > 1)
        if (row, wanted) not in self._members:
            group = self.mesh.group(self.owner.index(row), wanted)
            self._members[row, wanted] = tuple(
                sorted({self.owner[rank] for rank in group})
            )
        return self._members[row, wanted]

    @cached_property
    def _members(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        return {}

    @cached_property
    def homes(self) -> tuple[dict[int, int], ...]:
        """For each row, the row of its pipeline that holds each piece's forward.

        Rows may also differ along dp (a person may write one list per rank); then each
        pipeline has its own.
        """
        holds = [
            {op.piece for op in row if op.kind == ops.FORWARD}
            for row in self.rows
        ]
        lines = [self.line(row) for row in range(len(self.rows))]
        # Rows of one pipeline share a table.
        homes = {
            line: {p: r for r in line for p in holds[r]} for line in {*lines}
        }
        return tuple(homes[line] for line in lines)

    def line(self, row: int) -> tuple[int, ...]:
        """The rows of the pipeline that a row is part of."""
        return self.members(row, ("pp",))

    @cached_property
    def host(self) -> dict[int, int]:
        """The row that holds each piece, in the first pipeline that does."""
        return {
            p: r for homes in reversed(self.homes) for p, r in homes.items()
        }

    @cached_property
    def pieces(self) -> int:
        return max(self.host, default=-1) + 1

    @cached_property
    def microbatches(self) -> int:
        forwards = (
            op for row in self.rows for op in row if op.kind == ops.FORWARD
        )
        return 1 + max((op.index for op in forwards), default=-1)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of operation that occur on any rank."""
        return frozenset(op.kind for row in self.rows for op in row)

    @cached_property
    def replicated(self) -> bool:
        """True if gradients are reduced over shards, then over replicas (HSDP)."""
        return not self.kinds.isdisjoint(ops.REPLICA_SUMS)

    @cached_property
    def exact(self) -> bool:
        """True if gradients are added in one fixed tree: see `tree.py`."""
        return ops.ADD in self.kinds

    def tree_op(self, kind: str, unit: int, user: int, m: int = 0) -> Op:
        """An operation on the gradient that the piece `user` makes of a unit.

        A unit that two pieces use has a tree for each, so that their place on one
        stage or on two makes no difference. `m` is a microbatch, for an addition.
        """
        tree = self.users(unit).index(user)
        each = self.microbatches if kind == ops.ADD else 1
        return Op(kind, unit, tree * each + m)

    def tree_of(self, op: Op) -> tuple[int, int]:
        """The piece whose gradient `op` adds or sums, and the microbatch of an addition."""
        each = self.microbatches if op.kind == ops.ADD else 1
        tree, m = divmod(op.index, each)
        users = self.users(op.piece)
        return (users[tree] if tree < len(users) else -1), m

    def units(self, piece: int) -> tuple[int, ...]:
        """The units whose weights a piece uses: its own, and a tied one."""
        return self._units.get(piece) or (piece,)

    def trained(self, piece: int) -> tuple[int, ...]:
        """The piece's units that have a gradient."""
        units = self.units(piece)
        return (
            tuple(u for u in units if u not in self.frozen)
            if self.frozen
            else units
        )

    @cached_property
    def _units(self) -> dict[int, tuple[int, ...]]:
        # Own weights first; most pieces have nothing else and are not in the table.
        users = dict.fromkeys(user for user, _ in self.tied)
        return {
            p: (p, *(unit for user, unit in self.tied if user == p))
            for p in users
        }

    def users(self, unit: int) -> tuple[int, ...]:
        """The pieces that use a unit's weights."""
        return (unit, *(user for user, tied in self.tied if tied == unit))

    def __repr__(self) -> str:
        operations = sum(map(len, self.rows))
        mesh = str(self.mesh) or "one rank"
        return f"<Program of {mesh}: {operations:,} operations in {len(self.rows)} lists>"

    def __str__(self) -> str:
        lines = [_HEADER, f"mesh {self.mesh}".rstrip()]
        lines += [f"tied {piece}:{unit}" for piece, unit in self.tied]
        lines += [f"frozen {' '.join(map(str, self.frozen))}"] * bool(
            self.frozen
        )
        for number, row in enumerate(self.rows):
            lines.append(f"ranks {','.join(map(str, self.ranks(number)))}:")
            words = " ".join(map(str, row))
            # Lines of up to 97 characters, broken between operations.
            lines += [
                "  " + part for part in re.findall(r"\S.{0,96}(?!\S)", words)
            ]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str, source: str = "program") -> Program:
        """Parse a program's text. A mistake is reported with its line."""
        reading = _Reading()
        for number, raw in enumerate(text.splitlines(), 1):
            line = "" if raw.startswith("#") else raw.split(" #")[0].rstrip()
            try:
                if line and (number > 1 or line != _HEADER):
                    reading.read(line)
            except (LayoutError, ProgramError) as error:
                raise ProgramError(
                    f"{source}, line {number}: {error}"
                ) from None
        mesh, owner = reading.mesh, reading.owner
        # Ranks without a list, and lists of ranks that do not exist.
        if missing := sorted(set(range(mesh.size)) ^ set(owner)):
            shown = ", ".join(map(str, missing[:8]))
            shown += f" and {len(missing) - 8:,} more" * (len(missing) > 8)
            raise ProgramError(
                f"{source}: the mesh {str(mesh)!r} has ranks 0 to {mesh.size - 1}; ranks"
                f" {shown} are missing or too many in the 'ranks' lines."
            )
        rows = tuple(map(tuple, reading.rows))
        of_ranks = tuple(owner[rank] for rank in range(mesh.size))
        return cls(
            rows, mesh, of_ranks, tuple(reading.tied), tuple(reading.frozen)
        )


class _Reading:
    """The state of parsing a program's text."""

    def __init__(self) -> None:
        self.mesh = Mesh()
        self.tied: list[tuple[int, int]] = []
        self.frozen: list[int] = []
        self.rows: list[list[Op]] = []
        self.owner: dict[int, int] = {}

    def read(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "mesh":
            self.mesh = Mesh.parse(rest)
        elif word == "tied":
            if not (pair := re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", rest)):
                raise ProgramError(
                    f"{line[:40]!r}: write 'tied PIECE:UNIT', as in 'tied 5:0'."
                )
            self.tied.append((int(pair[1]), int(pair[2])))
        elif word == "frozen":
            if not re.fullmatch(r"[0-9]{1,6}( [0-9]{1,6})*", rest):
                raise ProgramError(
                    f"{line[:40]!r}: write 'frozen UNIT UNIT', as in 'frozen 0 5'."
                )
            self.frozen += map(int, rest.split())
        elif word == "ranks":
            names, colon, words = rest.partition(":")
            if not colon or not re.fullmatch(
                r"[0-9]{1,6}(,[0-9]{1,6})*", names
            ):
                raise ProgramError(
                    f"{line[:40]!r}: write 'ranks 0,1: ' and their operations."
                )
            for rank in map(int, names.split(",")):
                if rank in self.owner:
                    raise ProgramError(
                        f"rank {rank} has a list already; each rank follows one."
                    )
                self.owner[rank] = len(self.rows)
            self.rows.append([Op.parse(word) for word in words.split()])
        elif word:
            what = "is none of 'mesh', 'tied', 'frozen' and 'ranks 0,1: ...'."
            raise ProgramError(f"{line[:40]!r} {what}")
        elif not self.rows:
            raise ProgramError(
                "operations come before the first 'ranks 0,1:' line."
            )
        else:
            self.rows[-1] += map(Op.parse, line.split())
