"""Bitwise comparison of weights, optimizer state and buffers that several ranks hold
copies of.

A bit that flips in the memory of one rank changes its copy of a weight and nothing
else: every step continues, and from then on the ranks train different models. Copies
are compared between steps. Each rank computes 64-bit checksums of its tensors on the
device, and one small all-reduce in each group of ranks with copies compares them; the
host reads one number at the end. Only if checksums differ do the ranks exchange them
weight by weight, to name the weight and the ranks.

Copies are bit-equal by construction: every rank applies the same update to the same
summed gradient.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Group
from ..comm.agree import exchange
from ..comm.base import named
from ..parallel import Entry, Unit
from ..parallel.local import LocalModel
from .optimizer import Update

COLUMNS = 4096  # columns of the table that a tensor is viewed as
# Elements widened to int64 at once: they fit into a cache.
CHUNK = {"cpu": 1 << 18}
LARGE_CHUNK = 1 << 22  # on a GPU
MOST = 6  # maximum number of differences listed
ORDERS = 3  # process groups of a tensor: see `ComparedTensor`
WEIGHT, COMPUTE_COPY, BUFFER = "weight", "compute copy", "buffer"
APART = " of "  # separates a weight's name from what its copies share
# integer dtype by itemsize
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@cache
def _odd_numbers(count: int, salt: int, device: torch.device) -> Tensor:
    """Return pseudo-random odd 64-bit numbers, the same everywhere (splitmix64, Steele
    et al. 2014)."""
    z = (
        # 0x9E3779B97F4A7C15, the golden ratio in 64 bits, as a signed number.
        torch.arange(1 + salt, 1 + salt + count, device=device)
        * -7046029254386353131
    )
    for shift, factor in (
        (30, -4658895280553007687),
        (27, -7723592293110705685),
        (31, 1),
    ):
        # An arithmetic shift copies the sign bit; clear the bits that it fills in.
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    # Odd numbers have an inverse modulo 2^64: one changed element changes the
    # sum.
    return z | 1


def checksum(x: Tensor) -> Tensor:
    """Return the checksum of a flat tensor's bits, an int64 scalar on its device.

    It is the sum over all elements, taken as integers of at most 32 bits, of the
    element times an odd 64-bit number that depends on its position, modulo 2^64. One
    changed element always changes the sum; any other change (a swap, two equal and
    opposite changes) goes unseen with probability at most 2^-32. 64-bit elements are
    split into halves: a flipped sign bit counts 2^63, and two of them would cancel
    modulo 2^64.
    """
    bits = x.detach().reshape(-1).view(_INTEGERS[x.element_size()])
    columns = _odd_numbers(COLUMNS, 0, bits.device)
    rows = bits.numel() // COLUMNS
    whole = rows * COLUMNS
    # The multiplier of an element is that of its row times that of its column, so that
    # no table of multipliers is as large as the tensor.
    multipliers = _odd_numbers(_at_least(rows + 1), 1 << 32, bits.device)
    # The elements behind the last whole row.
    total = (
        bits[whole:] * columns[: bits.numel() - whole]
    ).sum() * multipliers[rows]
    # In chunks: int64 is wider than the elements, and a whole copy would take
    # memory.
    step = max(1, CHUNK.get(bits.device.type, LARGE_CHUNK) // COLUMNS)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        table = bits[first * COLUMNS : last * COLUMNS].view(-1, COLUMNS)
        # Sums wrap around modulo 2^64, which is meant.
        by_row = table.long().mul_(columns).sum(1)
        total = total + (by_row * multipliers[first:last]).sum()
    return total


def _at_least(count: int) -> int:
    """Round up to a power of two, so that few tables of multipliers are cached."""
    return 1 << max(10, (count - 1).bit_length())


class CopyOf(NamedTuple):
    """The object of a checksum: one kind of a unit's values, or a buffer by its index."""

    kind: str
    unit: int
    frozen: bool = False


class ComparedTensor(NamedTuple):
    """A checksum that the ranks of some groups compare.

    The groups have the same order on all ranks: data-parallel replicas, copies along
    tp, stages that share a tied weight.
    """

    where: CopyOf
    numbers: Tensor
    groups: tuple[Group | None, Group | None, Group | None]

    @property
    def has_copies(self) -> bool:
        return any(
            group is not None and group.size > 1 for group in self.groups
        )


class Copies:
    """Compares the values that several ranks hold copies of. Every rank has one, and
    its methods are collective.

    `names` are those of the model's pieces. `any` is true if any rank has a copy of
    anything; ZeRO shards, which one rank alone holds, have none.
    """

    def __init__(
        self,
        local: LocalModel,
        updates: Mapping[int, Update],
        names: Sequence[str],
    ) -> None:
        self.local, self.updates = local, updates
        self.everyone = local.groups.everyone
        self.along_tp = local.groups.units[0].also
        # Buffers belong to modules, which may change them: their start is
        # remembered.
        self.buffers = dict(_buffers(local, names))
        self.at_start = [checksum(x) for x in self.buffers.values()]
        self.any = self._anywhere(
            any(each.has_copies for each in self._compared())
        )

    @torch.no_grad()
    def differences(self) -> str:
        """Describe the weights whose copies differ and the ranks that hold them; "" if
        all are equal.

        Collective, between two steps. The text is the same on all ranks.
        """
        if not self.any:
            return ""
        compared = [each for each in self._compared() if each.has_copies]
        sums = [self._sum(each) for each in compared]
        # Groups in one order on all ranks: each all-reduce needs all of its
        # members.
        verdicts: list[tuple[list[int], Tensor]] = []
        for order in range(ORDERS):
            members: dict[Group, list[int]] = {}
            for i, each in enumerate(compared):
                group = each.groups[order]
                if group is not None and group.size > 1:
                    members.setdefault(group, []).append(i)
            for group, chosen in members.items():
                # One message for all checksums of a group.
                verdicts.append(
                    (
                        chosen,
                        _differ(group, torch.stack([sums[i] for i in chosen])),
                    )
                )
        differ = [verdict for _, verdict in verdicts]
        # The only value that the host waits for if all copies are equal.
        if not self._anywhere(torch.cat(differ).any() if differ else False):
            return ""
        found = {
            compared[i].where
            for chosen, verdict in verdicts
            for i, differs in zip(chosen, verdict.tolist(), strict=True)
            if differs
        }
        return self._named(found)

    def _anywhere(self, own: Tensor | bool) -> bool:
        """True if `own` is true on any rank."""
        flag = torch.as_tensor(own, device=self.everyone.device).long().view(1)
        self.everyone.all_reduce(flag, "max")
        return bool(int(flag))

    # ---- what is compared

    def _compared(self) -> Iterator[ComparedTensor]:
        """Yield this rank's flat tensors, grouped by the ranks that share them, and the
        buffers."""
        for unit in self.local.every_unit:
            tie = self.local.groups.units[unit.number].tie
            for run, tp in self._runs(unit):
                groups = unit.groups.replica, tp, tie
                for kind, numbers in self._kinds(unit, run):
                    yield ComparedTensor(
                        CopyOf(kind, unit.number, unit.frozen), numbers, groups
                    )
        # Ranks of data parallelism, then those of tp, have the same buffers.
        every_rank = self.local.groups.count, self.along_tp["norms"], None
        for i, buffer in enumerate(self.buffers.values()):
            yield ComparedTensor(CopyOf(BUFFER, i), buffer, every_rank)

    def _runs(self, unit: Unit) -> Iterator[tuple[slice, Group | None]]:
        """Yield runs of this rank's elements of a unit, each with the group of its
        copies along tp."""
        runs: list[tuple[slice, Group | None]] = []
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            group = self._group_along_tp(entry)
            # Neighbouring runs of one group are one checksum.
            if runs and runs[-1] == (
                slice(runs[-1][0].start, run.start),
                group,
            ):
                run = slice(runs.pop()[0].start, run.stop)
            runs.append((run, group))
        yield from runs

    def _group_along_tp(self, entry: Entry) -> Group | None:
        weight = entry.weight
        # shared by neighbouring ranks that repeat the same KV head
        if weight.copies > 1:
            return self.along_tp["kv"]
        # Weights sharded by tp have no copies along it; others have as for
        # norms.
        return None if any(weight.over_tp) else self.along_tp["norms"]

    def _kinds(self, unit: Unit, run: slice) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank keeps of a run of elements: weights, compute copy,
        optimizer state."""
        yield WEIGHT, unit.home[run]
        # A copy for computing exists where weights are wider at home.
        if (
            unit.buffer is not None
            and not unit.same
            and unit.groups.gather.size == 1
        ):
            # a gathered buffer is as old as the last gather, so it is not compared
            yield COMPUTE_COPY, unit.buffer[run]
        if unit.frozen:
            return
        update = self.updates[unit.number]
        # The part of the update's run that lies in this run.
        for part, view in update.every_run:
            first, last = max(run.start, part.start), min(run.stop, part.stop)
            for kind, kept in (
                update.state.get(view, {}).items() if first < last else ()
            ):
                if kept.shape == view.shape and kind != "step":
                    yield kind, kept[first - part.start : last - part.start]

    def _sum(self, compared: ComparedTensor) -> Tensor:
        own = checksum(compared.numbers.flatten())
        if compared.where.kind == BUFFER:
            # A module may change its buffers, differently on each rank: compare only
            # whether they changed.
            own = (own != self.at_start[compared.where.unit]).long()
        return own.to(self.everyone.device)

    # ---- where copies differ

    def _named(self, found: set[CopyOf]) -> str:
        """Name the weights that differ and their ranks. Collective, so it also runs
        where all are equal."""
        # Collective, and a rank whose own copies are equal takes part.
        texts = exchange(self.everyone, json.dumps(sorted(found)))
        everywhere = {
            CopyOf(*each) for text in texts for each in json.loads(text)
        }
        # Weight by weight, so that all copies of a weight are found, along any axis.
        own = dict(self._sums_by_weight(everywhere))
        holders: dict[str, dict[str, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for rank, text in enumerate(exchange(self.everyone, json.dumps(own))):
            for key, value in json.loads(text).items():
                holders[key][value].append(rank)
        # Holders of one weight with more than one checksum.
        lines = {
            _line(key.partition(APART)[0], who)
            for key, who in holders.items()
            if len(who) > 1
        }
        shown = sorted(lines)[:MOST]
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        return "; ".join([*shown, *more])

    def _sums_by_weight(self, found: set[CopyOf]) -> Iterator[tuple[str, str]]:
        """Yield the checksum of each weight that this rank holds, keyed by the region
        its copies share."""
        names = list(self.buffers)
        for each in self._compared():
            if each.where in found and each.where.kind == BUFFER:
                yield (
                    f"{names[each.where.unit]}[{BUFFER}]",
                    str(int(self._sum(each))),
                )
        for unit in self.local.every_unit:
            for entry in unit.entries():
                weight = entry.weight
                run = slice(
                    entry.offset, entry.offset + entry.stop - entry.start
                )
                sums: dict[str, list[int]] = {}
                for kind, numbers in self._kinds(unit, run):
                    if CopyOf(kind, unit.number, unit.frozen) in found:
                        sums.setdefault(kind, []).append(
                            int(checksum(numbers))
                        )
                for kind, values in sums.items():
                    name = (
                        weight.name
                        if kind == WEIGHT
                        else f"{weight.name}[{kind}]"
                    )
                    # Copies share the box of tp and the elements of the shard.
                    place = f"{weight.box} {entry.start} {entry.stop}"
                    yield f"{name}{APART}{place}", " ".join(map(str, values))


def _buffers(
    local: LocalModel, names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of this rank's modules by name. `names` are those of the
    model's pieces."""
    for number, piece in local.pieces.items():
        for name, buffer in piece.module.named_buffers():
            if buffer.numel():
                yield f"{names[number]}.{name}", buffer


def _differ(group: Group, sums: Tensor) -> Tensor:
    """Return a mask of the checksums that differ between members of a group."""
    # The maximum, and the minimum as the complement of the largest complement, in one
    # call.
    both = torch.cat((sums, ~sums))
    group.all_reduce(both, "max")
    largest, smallest = both[: len(sums)], ~both[len(sums) :]
    return largest != smallest


def _line(name: str, holders: Mapping[str, Sequence[int]]) -> str:
    """Describe the ranks whose copy of a weight differs from the majority's."""
    # The largest group first; of equal ones, the one with the lowest rank.
    alike = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks))
    most, rest = (
        alike[0],
        sorted(rank for ranks in alike[1:] for rank in ranks),
    )
    # No majority: nobody knows which copies are right.
    if len(most) == len(alike[1]):
        return f"{name}: {named(sorted([*most, *rest]))} copies that differ"
    return f"{name}: {named(rest)} another copy than {named(most).rpartition(' ')[0]}"
