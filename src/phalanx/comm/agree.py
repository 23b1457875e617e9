"""Compares the facts that all ranks must agree on, before any of them begins.

A rank brings facts: names with values, both text. Only JSON text and numbers travel,
never objects. All ranks reach the same verdict, so none continues alone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.comm.base import CommError, CommMisuse, Group, World, named

MOST = 12  # listed differences; one wrong file may cause hundreds
LONGEST = 200  # characters shown of a value
ERROR = 4000  # characters of one rank's error that reach the others
PIECE = 1 << 16  # bytes of each rank's text in one message
FAILED = "failed"  # the fact of a rank that could not begin


class RanksDiffer(CommMisuse):
    """Raised if ranks were started differently: the ranks, the fact and both values."""

    exit_code = 2


class PeerFailed(CommError, ValueError):
    """Raised if another rank could not begin, with its reason."""

    exit_code = 2


@contextmanager
def agreement(world: World) -> Iterator[dict[str, str]]:
    """A context with a dictionary of this rank's facts, compared when it ends.

    Every rank of the world enters it, as its first call of the world or after the same
    calls. If facts differ, all ranks raise `RanksDiffer`. If a rank raises inside the
    block, where it makes no call, all do: that rank its own error, the others
    `PeerFailed`.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    # The others wait for this rank's facts, so the failure is sent in their place.
    except Exception as error:
        _facts_of_all(world, {FAILED: f"{type(error).__name__}: {error}"})
        raise
    everyone = _facts_of_all(world, facts)
    # The error itself is raised on the rank that has it; the others name that rank.
    if failed := [
        (rank, each[FAILED])
        for rank, each in enumerate(everyone)
        if FAILED in each
    ]:
        lines = [
            f"rank {rank} could not begin: {error}"
            for rank, error in failed[:MOST]
        ]
        raise PeerFailed("\n".join(lines))
    # No one failed: all facts must be equal.
    if lines := differences(dict(enumerate(everyone))):
        raise RanksDiffer(not_alike(lines))


def _facts_of_all(
    world: World, facts: Mapping[str, str]
) -> list[dict[str, str]]:
    """All ranks' facts in rank order, on all ranks; empty if they are equal."""
    text = json.dumps(facts, sort_keys=True)
    group = world.split("agreement", [range(world.size)])
    # One short message in the usual case; the texts travel only if digests differ.
    digest = hashlib.sha256(text.encode()).hexdigest()
    alike = len(set(exchange(group, digest))) == 1
    facts_of = (
        [] if alike else [json.loads(other) for other in exchange(group, text)]
    )
    world.release("agreement")
    return facts_of


def exchange(group: Group, text: str, root: int | None = None) -> list[str]:
    """All members' texts in group order; with a root, only there.

    Even for one root this is an all-gather, in pieces: sending to one rank would open
    one NCCL connection there for each rank.
    """
    raw = _packed(text)
    # 1. The lengths of all texts: (ranks)
    sizes = torch.empty(group.size, dtype=torch.int64, device=group.device)
    group.all_gather(sizes, torch.tensor([len(raw)], device=group.device))
    with group.reading():
        counts: list[int] = sizes.tolist()
    # 2. The texts, padded to the longest. In pieces, so that a long one needs at most
    # (ranks, PIECE) bytes at once.
    texts = [bytearray() for _ in counts]
    for start in range(0, max(counts), PIECE):
        # Bytes of every rank in this piece.
        width = min(PIECE, max(counts) - start)
        piece = torch.zeros(width, dtype=torch.uint8)
        mine = raw[start : start + width]
        piece[: len(mine)] = mine
        # pieces: (ranks, width)
        pieces = torch.empty(
            group.size, width, dtype=torch.uint8, device=group.device
        )
        group.all_gather(pieces, piece.to(group.device))
        if root in (None, group.rank):
            with group.reading():
                rows = pieces.cpu()
            for whole, row in zip(texts, rows, strict=True):
                whole += row.numpy().tobytes()
    if root not in (None, group.rank):
        return []
    # 3. Cut off the padding. A piece may end inside a character, so decode here.
    return [whole[:n].decode() for whole, n in zip(texts, counts, strict=True)]


def broadcast_text(group: Group, text: str, root: int = 0) -> str:
    """The root's text, on every member."""
    raw = _packed(text if group.rank == root else "").to(group.device)
    # The length first, as the others must allocate the text.
    size = torch.tensor([len(raw)], device=group.device)
    group.broadcast(size, root)
    with group.reading():
        count = int(size)
    whole = raw if group.rank == root else raw.new_empty(count)
    group.broadcast(whole, root)
    with group.reading():
        return whole.cpu().numpy().tobytes().decode()


def _packed(text: str) -> Tensor:
    # One byte more than needed, as torch takes no empty buffer.
    raw = bytearray(text.encode("utf-8", "replace") + b".")
    return torch.frombuffer(raw, dtype=torch.uint8)[:-1]


def errors_of(group: Group, error: str) -> list[str]:
    """The errors of all members, the same list on each; empty if nobody failed."""
    errors = exchange(group, error[:ERROR])
    return [f"rank {rank}: {each}" for rank, each in enumerate(errors) if each]


def not_alike(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    items = "".join(f"\n- {each}" for each in [*lines[:MOST], *more])
    return (
        f"the ranks were not started alike:{items}\n"
        "Start every rank with the same command, on the same files and versions."
    )


def differences(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each fact in which ranks differ, the rarest value first."""
    lines = []
    # All facts that anybody has brought; a missing one is the value "nothing".
    for name in sorted({name for each in facts.values() for name in each}):
        ranks: dict[str, list[int]] = {}
        for rank, each in facts.items():
            ranks.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            # The odd ones out come first. Among values with equally many ranks, rank
            # 0's is taken to be right.
            order = sorted(
                ranks.items(), key=lambda item: (len(item[1]), -item[1][0])
            )
            shown = [
                f"{named(who)} {_short(value)}" for value, who in order[:4]
            ]
            rest = (
                f" and {len(order) - 4} other values" if len(order) > 4 else ""
            )
            lines.append(f"{name}: {', '.join(shown)}{rest}")
    return lines


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
