"""The order of sums in a step of `exact`: one binary tree over the global microbatches.

Each node adds two neighbouring runs of microbatches. The left one has the largest power
of two of them that is smaller than the run:

    0 1 2 3 4 5      6 microbatches
    0+1 2+3 4+5
    0+1+2+3
    0+1+2+3 + 4+5

A rank that computes an aligned power of two of neighbouring microbatches therefore adds
them exactly as one process would, whatever the others do. The sums of ranks are added by
the same rule, as a tree over the ranks.
"""

from collections.abc import Collection, Iterator


def split(run: range) -> tuple[range, range]:
    """The two runs whose sums a node of the tree adds."""
    left = 1 << (len(run) - 1).bit_length() - 1
    middle = run.start + left
    return range(run.start, middle), range(middle, run.stop)


def merges(count: int) -> Iterator[tuple[int, int]]:
    """Yield the additions of the tree over `count` terms, each as (into, term).

    Terms lie in a row; each addition adds the sum at `term` to that at `into`.
    """

    def added(run: range) -> Iterator[tuple[int, int]]:
        if len(run) > 1:
            left, right = split(run)
            yield from added(left)
            yield from added(right)
            yield left.start, right.start

    yield from added(range(count))


def completed(
    sums: Collection[range], count: int
) -> list[tuple[range, range]]:
    """The pairs of neighbouring sums that the tree over `count` terms adds next."""
    held, found = set(sums), []

    def whole(run: range) -> bool:
        """True if this node's sum is there, once its own additions are made."""
        if run in held:
            return True
        if len(run) < 2:
            return False
        left, right = split(run)
        both = [whole(left), whole(right)]
        if all(both):
            found.append((left, right))
        return all(both)

    whole(range(count))
    return found


def add_in_tree(sums: list[range], leaf: int, count: int) -> int:
    """Put a leaf among the sums of a tree, make the additions that it completes.

    Returns the number of additions.
    """
    sums.append(range(leaf, leaf + 1))
    pairs = completed(sums, count)
    for left, right in pairs:
        sums.remove(left)
        sums.remove(right)
        sums.append(range(left.start, right.stop))
    return len(pairs)
