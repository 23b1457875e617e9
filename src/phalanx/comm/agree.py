"""What ranks must have in common, compared by all of them before they begin.

A rank brings facts: names with values, both text. Only text in JSON and numbers travel, never
objects. All ranks come to the same answer, so that none goes on alone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor

from phalanx.comm.base import CommError, CommMisuse, Group, World

MOST = 12  # differences that are told; one wrong file may make hundreds
LONGEST = 200  # characters of a value that is told
ERROR = 4000  # characters of one rank's error that all hear of
FAILED = "failed"  # the fact of a rank that could not begin


class RanksDiffer(CommMisuse):
    """The ranks of a run were not started alike: which rank, in what, with both values."""


class PeerFailed(CommError, ValueError):
    """Another rank could not begin, and has said why."""


@contextmanager
def agreement(world: World) -> Iterator[dict[str, str]]:
    """A dictionary to put this rank's facts into; they are compared at the end of the block.

    Every rank of the world comes here, as its first call of the world or after the same calls. If
    facts differ all ranks raise `RanksDiffer`. If a rank raises inside the block, where it makes no
    call, so do all: that rank its own error, the others `PeerFailed`.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as error:
        _hear_all(world, {FAILED: f"{type(error).__name__}: {error}"})
        raise
    heard = _hear_all(world, facts)
    if failed := [(rank, each[FAILED]) for rank, each in enumerate(heard) if FAILED in each]:
        lines = [f"rank {rank} could not begin: {error}" for rank, error in failed[:MOST]]
        raise PeerFailed("\n".join(lines))
    if found := differences(dict(enumerate(heard))):
        raise RanksDiffer(not_alike(found))


def _hear_all(world: World, facts: Mapping[str, str]) -> list[dict[str, str]]:
    """The facts of all ranks, in rank order, on all of them; nothing if all facts are the same."""
    text = json.dumps(facts, sort_keys=True)
    group = world.split("agreement", [range(world.size)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    alike = len(set(exchange(group, digest))) == 1
    heard = [] if alike else [json.loads(other) for other in exchange(group, text)]
    world.release("agreement")
    return heard


def exchange(group: Group, text: str) -> list[str]:
    """The texts of all members, in group order, on every member."""
    mine, counts = _padded(group, text)
    if not len(mine):
        return [""] * group.size
    whole = mine.new_empty(group.size * len(mine))
    group.all_gather(whole, mine)
    rows = whole.cpu().view(group.size, len(mine))
    return [_text(row[:n]) for row, n in zip(rows, counts, strict=True)]


def gather_texts(group: Group, text: str, root: int = 0) -> list[str]:
    """The texts of all members, in group order, on the root; nothing elsewhere."""
    mine, counts = _padded(group, text)
    outs = [torch.empty_like(mine) for _ in counts] if group.rank == root else None
    group.gather(outs, mine, root)
    return [_text(out[:n]) for out, n in zip(outs or [], counts, strict=False)]


def broadcast_text(group: Group, text: str, root: int = 0) -> str:
    """The root's text, on every member."""
    mine = _packed(text if group.rank == root else "").to(group.device)
    size = torch.tensor([mine.numel()], device=group.device)
    group.broadcast(size, root)
    whole = mine if group.rank == root else mine.new_empty(int(size))
    group.broadcast(whole, root)
    return _text(whole)


def errors_of(group: Group, error: str) -> list[str]:
    """What went wrong on any member, the same list on all; empty when nothing did."""
    errors = exchange(group, error[:ERROR])
    return [f"rank {rank}: {each}" for rank, each in enumerate(errors) if each]


def _padded(group: Group, text: str) -> tuple[Tensor, list[int]]:
    """This member's text, as long as the longest, and the length of each member's."""
    mine = _packed(text).to(group.device)
    sizes = torch.empty(group.size, dtype=torch.int64, device=group.device)
    group.all_gather(sizes, torch.tensor([mine.numel()], device=group.device))
    counts: list[int] = sizes.tolist()
    padded = mine.new_zeros(max(counts))
    padded[: mine.numel()] = mine
    return padded, counts


def _packed(text: str) -> Tensor:
    raw = bytearray(text.encode("utf-8", "replace"))
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _text(row: Tensor) -> str:
    return bytes(row.cpu().numpy()).decode()


def not_alike(found: Sequence[str]) -> str:
    """The sentence about differences."""
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    lines = "".join(f"\n- {each}" for each in [*found[:MOST], *more])
    return (
        f"the ranks were not started alike:{lines}\n"
        "Start every rank with the same command, on the same files and versions."
    )


def differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for every fact in which ranks differ: the fewest ranks first, with each value."""
    lines = []
    for name in sorted({name for each in facts.values() for name in each}):
        ranks: dict[str, list[int]] = {}
        for rank, each in facts.items():
            ranks.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            # The odd ones out come first; of as many, rank 0 is taken to be right.
            order = sorted(ranks.items(), key=lambda item: (len(item[1]), -item[1][0]))
            told = [f"{named(who)} {_short(value)}" for value, who in order[:4]]
            rest = f" and {len(order) - 4} other values" if len(order) > 4 else ""
            lines.append(f"{name}: {', '.join(told)}{rest}")
    return lines


def named(ranks: Sequence[int]) -> str:
    """rank 3 has; ranks 0-2, 5 have."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    text = ", ".join([*names[:8], *more])
    return f"rank {text} has" if len(ranks) == 1 else f"ranks {text} have"


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
