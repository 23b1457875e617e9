"""Rounds in which NCCL can split a communicator without confusing two groups.

`torch.distributed.split_group` gives each group a colour, a hash of its ranks modulo
2**31 - 1, and `ncclCommSplit` puts all ranks of one colour into one communicator. Two
groups with the same hash would share a communicator that torch takes for two: a send
then reaches the wrong rank and an all-reduce sums over both. It happens from 2,048
ranks on: [1478, 1486] and [1988, 1996] have the same colour.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from phalanx.comm.base import CommError, named

Ranks = tuple[int, ...]
_MODULUS = 2**31 - 1


def colours(groups: Sequence[Ranks]) -> list[int]:
    """The colour of each group, as `genNcclSplitColor` of torch 2.11 to 2.13 has it.

    All groups of one size are hashed together: a split of 131,072 ranks has up to
    65,536 of them.
    """
    result = [0] * len(groups)
    by_size: dict[int, list[int]] = {}
    for index, ranks in enumerate(groups):
        by_size.setdefault(len(ranks), []).append(index)
    for indices in by_size.values():
        # (groups, ranks)
        table = np.array([groups[index] for index in indices], dtype=np.uint64)
        hashed = np.zeros(len(indices), dtype=np.uint64)
        # boost's hash_combine, one rank of every group at a time
        for column in table.T:
            shifted = (hashed << np.uint64(6)) + (hashed >> np.uint64(2))
            # modulo 2**64, as in C++
            hashed ^= column + np.uint64(0x9E3779B9) + shifted
        for index, colour in zip(
            indices, hashed % np.uint64(_MODULUS), strict=True
        ):
            result[index] = int(colour)
    return result


def rounds(groups: Sequence[Ranks], world: int) -> list[list[Ranks]]:
    """Lists of groups for one split each, without two of the same colour.

    Every list contains every rank of the world exactly once, because torch names a
    group by the number of groups that its ranks have created. A rank whose group is in
    another round is alone or, if its own colour is taken, together with other idle
    ranks. A group that clashes even alone with the idle ranks is refused.
    """
    waiting = list(groups)
    made = []
    while waiting:
        chosen: dict[int, Ranks] = {}
        later = []
        # A group waits for a later round if its colour is taken in this one.
        for colour, ranks in zip(colours(waiting), waiting, strict=True):
            if colour in chosen:
                later.append(ranks)
            else:
                chosen[colour] = ranks
        # Without free colours for the idle ranks, take a group out of this round again.
        while (
            fillers := _fillers(_idle(chosen.values(), world), set(chosen))
        ) is None:
            if len(chosen) == 1:
                [ranks] = chosen.values()
                raise CommError(
                    f"NCCL cannot split off a group that {named(ranks)}: its "
                    "colour, a hash of its ranks, would also be that of others"
                )
            _, ranks = chosen.popitem()
            later.append(ranks)
        made.append([*chosen.values(), *fillers])
        waiting = later
    return made


def _idle(groups: Iterable[Ranks], world: int) -> list[int]:
    return sorted(set(range(world)).difference(*groups))


def _fillers(idle: Sequence[int], taken: set[int]) -> list[Ranks] | None:
    """Groups for a round's remaining ranks; None if one has no colour left."""
    fillers: list[Ranks] = []
    clashing: list[Ranks] = []
    singles = [(rank,) for rank in idle]
    for colour, single in zip(colours(singles), singles, strict=True):
        (clashing if colour in taken else fillers).append(single)
        taken.add(colour)
    for group in clashing:
        # Joining another idle rank changes the colour.
        while (colour := colours([group])[0]) in taken:
            if not fillers:
                return None
            group = tuple(sorted((*group, *fillers.pop())))
        taken.add(colour)
        fillers.append(group)
    return fillers
