"""What the ranks of the group tests do, at the top of a module so that processes can find it, and
what plain torch on one process says should come of it."""

import gc
import os
import signal
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm import World

M = 3  # elements per part; every tensor of a step has one part per rank
EXACT = (torch.int64, torch.int32, torch.uint8, torch.bool)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *EXACT)


@dataclass(frozen=True)
class Step:
    """One call of a random sequence."""

    kind: str
    op: str = "sum"
    root: int = 0
    dtype: torch.dtype = torch.float64
    wait: bool = True


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
KINDS = (
    *REDUCING,
    "broadcast",
    "all_gather",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "ring",
)


def meaningful(step: Step) -> bool:
    if step.kind not in REDUCING:
        return True
    if step.op == "average":
        return step.dtype.is_floating_point
    return not (step.op == "sum" and step.dtype == torch.bool)


def start(k: int, step: Step, rank: int, size: int) -> Tensor:
    """What a rank brings to step k."""
    g = torch.Generator().manual_seed(1000 * k + rank)
    if step.dtype in EXACT:
        low = 0 if step.dtype in (torch.uint8, torch.bool) else -2
        return torch.randint(low, 2, (size * M,), generator=g).to(step.dtype)
    return torch.randn(size * M, generator=g, dtype=torch.float64).to(
        step.dtype
    )


def begin(group, step, x):
    """Make the call; return the work and the tensor that its result will be in."""
    n, me, root, wait = group.size, group.rank, step.root, step.wait
    rows = x.view(n, M)
    if step.kind == "all_reduce":
        return group.all_reduce(x, step.op, wait=wait), x
    if step.kind == "reduce":
        return group.reduce(x, root, step.op, wait=wait), x
    if step.kind == "broadcast":
        return group.broadcast(x, root, wait=wait), x
    if step.kind == "all_gather":
        out = torch.zeros_like(x)
        return group.all_gather(out, rows[me].clone(), wait=wait), out
    if step.kind == "reduce_scatter":
        out = torch.zeros_like(rows[0])
        return group.reduce_scatter(out, x, step.op, wait=wait), out
    if step.kind == "all_to_all":
        out = torch.zeros_like(x)
        return group.all_to_all(out, x, wait=wait), out
    if step.kind == "gather":
        out = torch.zeros_like(rows)
        outs = list(out) if me == root else None
        return group.gather(outs, rows[0].clone(), root, wait=wait), out
    if step.kind == "scatter":
        out = torch.zeros_like(rows[0])
        return group.scatter(
            out, list(rows) if me == root else None, root, wait=wait
        ), out
    if step.kind == "barrier":
        return group.barrier(wait=wait), x
    # Everyone sends first and receives then.
    out = torch.zeros_like(x)
    group.send(x, (me + 1) % n)
    return group.receive(out, (me - 1) % n, wait=wait), out


def one_process(parts: list[Tensor], op: str) -> Tensor:
    wide = [
        part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        for part in parts
    ]
    total = wide[0]
    for part in wide[1:]:
        if op == "min":
            total = torch.minimum(total, part)
        elif op == "max":
            total = torch.maximum(total, part)
        else:
            total = total * part if op == "product" else total + part
    if op == "average":
        total = total / len(parts)
    return total.to(parts[0].dtype)


def expected(step: Step, xs: list[Tensor]) -> list[Tensor]:
    """Each rank's result, from everyone's tensors."""
    n, root = len(xs), step.root
    rows = [x.view(n, M) for x in xs]
    if step.kind == "all_reduce":
        return [one_process(xs, step.op)] * n
    if step.kind == "reduce":
        return [
            one_process(xs, step.op) if i == root else xs[i] for i in range(n)
        ]
    if step.kind == "broadcast":
        return [xs[root]] * n
    if step.kind == "all_gather":
        return [torch.cat([rows[i][i] for i in range(n)])] * n
    if step.kind == "reduce_scatter":
        return list(one_process(xs, step.op).view(n, M))
    if step.kind == "all_to_all":
        return [torch.cat([rows[j][i] for j in range(n)]) for i in range(n)]
    if step.kind == "gather":
        none = torch.zeros_like(rows[0])
        return [
            torch.stack([row[0] for row in rows]) if i == root else none
            for i in range(n)
        ]
    if step.kind == "scatter":
        return list(rows[root])
    if step.kind == "barrier":
        return xs
    return [xs[i - 1] for i in range(n)]


# Terms whose sum in float32 depends on the order: 2^24 + 1 is rounded to 2^24.
ORDERED = (2.0**24, 1.0, 1.0, 1.0, 3.0, -(2.0**24), 1.0, 1.0)


def in_tree(world: World) -> tuple[Tensor, Tensor]:
    """A sum over all ranks and a part of one, on a group that adds in the tree."""
    group = world.split("tree", [range(world.size)])
    group.in_tree = True
    # more elements than parts, and no multiple of them
    whole = torch.full((2 * world.size + 1,), ORDERED[world.rank])
    group.all_reduce(whole, wait=False).wait()
    own = torch.empty(3)
    each = torch.full((world.size, 3), ORDERED[world.rank])
    group.reduce_scatter(own, each)
    return whole, own


def sequence(world: World, steps: list[Step]) -> list[Tensor]:
    """Every step on tensors of its own; those without wait are waited for at the end, last first."""
    group = world.split("all", [range(world.size)])
    results = []
    works = []
    for k, step in enumerate(steps):
        work, result = begin(
            group, step, start(k, step, world.rank, world.size)
        )
        works.append(work)
        results.append(result)
    for work in reversed(works):
        work.wait()
        assert work.done()
    world.clear()
    return results


def halves(world: World) -> list[Tensor]:
    group = world.split("all", [range(world.size)])
    mine = 256.0 if world.rank == 0 else 1.0
    x = torch.full((world.size,), mine, dtype=torch.bfloat16)
    part = torch.zeros(1, dtype=torch.bfloat16)
    group.reduce_scatter(part, x)
    group.all_reduce(x)
    world.clear()
    return [x, part]


def nothing(world: World, dtype: torch.dtype) -> int:
    """Reductions of no numbers at all, as a shard of a small weight over many ranks may be."""
    group = world.split("all", [range(world.size)])
    empty = torch.empty(0, dtype=dtype)
    group.all_reduce(empty)
    group.reduce(empty, 0)
    group.reduce_scatter(torch.empty(0, dtype=dtype), empty)
    group.barrier()
    return empty.numel()


def large_numbers(world: World) -> list[Tensor]:
    """Integers that no float32 holds, reduced to each rank in turn and to all."""
    group = world.split("all", [range(world.size)])
    results = []
    for root in (*range(world.size), None):
        x = torch.tensor([2**40 + 1 + world.rank])
        group.all_reduce(x) if root is None else group.reduce(x, root)
        if root in (None, world.rank):
            results.append(x)
    return results


def nans(world: World) -> list[Tensor]:
    group = world.split("all", [range(world.size)])
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for op in ("min", "max"):
            # One NaN that only the last rank holds, infinities, and both zeros.
            values = [
                float("inf"),
                float("-inf"),
                -0.0,
                float(world.rank),
                -1.5 - world.rank,
            ]
            values[0] = (
                float("nan") if world.rank == world.size - 1 else values[0]
            )
            x = torch.tensor(values, dtype=dtype)
            group.all_reduce(x, op)
            results.append(x)
    world.clear()
    return results


def uneven(world: World) -> list[Tensor]:
    """Rank i sends i + j rows to rank j."""
    group = world.split("all", [range(world.size)])
    n, me = world.size, world.rank
    counts = [me + j for j in range(n)]
    x = torch.cat(
        [torch.full((me + j, 2), float(10 * me + j)) for j in range(n)]
    )
    out = torch.zeros(sum(counts), 2)
    group.all_to_all(out, x, counts, counts)
    world.clear()
    return [out]


def letters(world: World) -> list[float]:
    """Several messages each way between the first and the last, sends first, of unlike sizes."""
    group = world.split("all", [range(world.size)])
    peer = {0: group.size - 1, group.size - 1: 0}.get(group.rank)
    got = []
    if peer is not None:
        for i in range(4):
            x = torch.full(
                (1 + 100_000 * (i % 2),), float(10 * group.rank + i)
            )
            group.send(x, peer)
            x.fill_(-1.0)  # what was sent is the sender's again at once
        late = [torch.zeros(1 + 100_000 * (i % 2)) for i in range(4)]
        works = [
            group.receive(x, peer, wait=i == 0) for i, x in enumerate(late)
        ]
        for work in reversed(works):
            work.wait()
        got = [x[-1].item() for x in late]
    world.clear()
    return got


def grid(world: World) -> tuple:
    """Rows and columns of a 2 x n/2 grid, then the same names again for other groups."""
    n = world.size
    rows = [range(n // 2), range(n // 2, n)]
    columns = [[i, i + n // 2] for i in range(n // 2)]
    row, column = world.split("row", rows), world.split("column", columns)
    a, b = torch.tensor([float(world.rank)]), torch.tensor([float(world.rank)])
    row.all_reduce(a)
    column.broadcast(b, 1)
    world.clear()
    again = world.split("row", columns)
    c = torch.tensor([float(world.rank)])
    again.all_reduce(c)
    world.clear()
    return row.ranks, row.rank, a.item(), b.item(), c.item()


def closed_and_held(world: World) -> tuple[int, int, int]:
    """Threads of this process before groups are split, while they are open, and once they are closed,
    though somebody still holds them."""
    counts = []
    gc.disable()
    try:
        counts.append(len(os.listdir("/proc/self/task")))
        groups = [
            world.split(f"held{i}", (tuple(range(world.size)),))
            for i in range(4)
        ]
        for group in groups:
            group.all_reduce(torch.ones(4))
        counts.append(len(os.listdir("/proc/self/task")))
        world.clear()
        counts.append(len(os.listdir("/proc/self/task")))
    finally:
        gc.enable()
    return counts[0], counts[1], counts[2]


def listening(world: World) -> list[str]:
    """The addresses on which this process listens, as the kernel writes them."""
    world.split("all", [range(world.size)]).barrier()
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the listing's own descriptor
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        found += [
            row[1]
            for row in rows
            if row[3] == "0A" and f"socket:[{row[9]}]" in mine
        ]
    return found


def process(world: World) -> int:
    return os.getpid()


def one_raises(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    if world.rank == 1:
        raise KeyError("the second rank stumbles")
    group.all_reduce(torch.ones(3))


def one_is_killed(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.ones(3))


def one_stays_away(world: World) -> None:
    """The last rank calls on another group."""
    here, there = (
        world.split(name, [range(world.size)]) for name in ("tp", "dp")
    )
    (there if world.rank == world.size - 1 else here).all_gather(
        torch.zeros(3 * world.size), torch.ones(3)
    )


def one_returns(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    if world.rank:
        group.all_reduce(torch.ones(3))


def other_size(world: World) -> None:
    world.split("tp", [range(world.size)]).all_reduce(
        torch.ones(3 + world.rank)
    )


def other_order(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    calls = [
        lambda: group.barrier(),
        lambda: group.broadcast(torch.ones(2), 0),
    ]
    for call in calls if world.rank else reversed(calls):
        call()


def other_splits(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    counts = [world.rank + 1] * world.size
    x = torch.ones(sum(counts))
    group.all_to_all(x.clone(), x, counts, counts)


def other_letter(world: World) -> None:
    group = world.split("tp", [range(world.size)])
    if group.rank == 0:
        group.send(torch.ones(3), 1)
    if group.rank == 1:
        group.receive(torch.ones(4), 0)
    group.barrier()


def both_wait(world: World) -> None:
    """Say so, and wait for what never comes."""
    group = world.split("all", [range(world.size)])
    os.write(1, b"here\n")
    group.receive(torch.ones(3), (world.rank + 1) % world.size)


def late_letters(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Three letters to each neighbour, sent before three collectives and received after them."""
    group = world.split("all", [range(world.size)])
    n, me = world.size, world.rank
    for i in range(3):
        group.send(torch.tensor([100.0 * i + me]), (me + 1) % n)
    gathered = [torch.zeros(n) for _ in range(3)]
    for i, everyone in enumerate(gathered):
        group.all_gather(everyone, torch.tensor([10.0 * i + me]))
    letters = [torch.zeros(1) for _ in range(3)]
    for letter in letters:
        group.receive(letter, (me - 1) % n)
    world.clear()
    return gathered, letters


def letters_to_all(world: World) -> dict[int, list[float]]:
    """Two letters from each rank to each other one, received in the opposite order of peers; what came,
    by sender. Ranks send unlike numbers of letters before, so their counts of messages differ."""
    group = world.split("all", [range(world.size)])
    n, me = world.size, world.rank
    for _ in range(me):
        group.send(torch.tensor([-1.0]), me)
        group.receive(torch.zeros(1), me)
    others = [rank for rank in range(n) if rank != me]
    for i in range(2):
        for rank in others:
            group.send(torch.tensor([100.0 * me + 10 * rank + i]), rank)
    came: dict[int, list[float]] = {}
    for rank in reversed(others):
        letters = [torch.zeros(1) for _ in range(2)]
        works = [group.receive(letter, rank, wait=False) for letter in letters]
        for work in works:
            work.wait()
        came[rank] = [letter.item() for letter in letters]
    world.clear()
    return came


def sent_and_overwritten(world: World) -> list[tuple[float, float]]:
    """Letters that the first rank overwrites before the last one posts its receives: the first and the
    last number of each."""
    group = world.split("all", [range(world.size)])
    later = world.split("later", [range(world.size)])
    sizes, last = (1, 1000, 300_000), world.size - 1
    if world.rank == 0:
        for size in sizes:
            x = torch.arange(1.0, size + 1)
            group.send(x, last)
            x.fill_(-1.0)
    later.barrier()
    got = []
    for size in sizes if world.rank == last else ():
        x = torch.zeros(size)
        group.receive(x, 0)
        got.append((x[0].item(), x[-1].item()))
    world.clear()
    return got
