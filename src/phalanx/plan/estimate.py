"""Step time and memory of many layouts at once, in closed form: what a search screens with.

Each column is an array with one number a candidate. The best of them are then simulated as programs;
the two agree where a schedule's closed form is exact; `benchmarks/planner_score.py` compares
both with published runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import SCHEDULES, Columns
from .hardware import Hardware, Numbers
from .price import Trio
from .profile import Profile

__all__ = [
    "KINDS",
    "Estimates",
    "Ranks",
    "counting",
    "estimate",
    "gathering",
    "held_by_stage",
    "summing",
    "summing_replicas",
    "tying",
]

# The kinds of memory, in the order in which they are printed.
KINDS = (
    "weights", "gradients", "optimizer", "activations", "gathered", "temporary", "other",
)  # fmt: skip
_FULL = (0.88, 0.94)  # of a device's memory: where an allocator begins to thrash, and does
_HOST = 40e9  # bytes a second of a host's memory for each of its devices: assumed, of 300 for eight
_NUMBER = 8.0  # bytes of one number that ranks agree on
_TOUCHED = 30.0  # bytes that an Adam update reads and writes for each parameter


@dataclass(frozen=True)
class Estimates:
    """What was found, an array each: seconds of a step and its parts, bytes of the fullest rank."""

    compute: Numbers
    tensor: Numbers  # exposed messages inside operations
    data: Numbers  # exposed gathering of weights and summing of gradients
    pipe: Numbers  # exposed sends between stages
    bubble: Numbers
    update: Numbers
    memory: Mapping[str, Numbers]
    first: Numbers  # bytes of the first rank of a pipeline

    @property
    def step(self) -> Numbers:
        return self.compute + self.tensor + self.data + self.pipe + self.bubble + self.update

    def told(self, profile: Profile) -> Numbers:
        """Bytes of the rank whose memory the profile's log tells."""
        return self.first if profile.tells_first else self.bytes

    @property
    def bytes(self) -> Numbers:
        total: Numbers = np.asarray(np.sum([self.memory[kind] for kind in KINDS], axis=0))
        return total

    def breakdown(self, i: int) -> dict[str, float]:
        names = ("compute", "tensor", "data", "pipe", "bubble", "update")
        return {name: float(getattr(self, name)[i]) for name in names}

    def held(self, i: int) -> dict[str, float]:
        return {kind: float(self.memory[kind][i]) for kind in KINDS}


class _Of:
    """Numbers of the priced pieces, picked for every candidate by its key."""

    def __init__(self, table: Sequence[tuple[Trio, Trio, Trio]], key: Numbers) -> None:
        self.key = key.astype(int)
        self.table = table
        self.known: dict[tuple[int, *tuple[str, ...]], Numbers] = {}

    def __call__(self, place: int, *path: str) -> Numbers:
        if (place, *path) not in self.known:
            self.known[place, *path] = self._read(place, path)
        return self.known[place, *path]

    def _read(self, place: int, path: tuple[str, ...]) -> Numbers:
        def read(trio: Trio) -> float:
            found: object = trio
            for name in path:
                found = getattr(found, name)
            return float(found)  # type: ignore[arg-type]

        column: Numbers = np.array([read(trios[place]) for trios in self.table])
        return np.asarray(column[self.key])

    def spent(
        self, place: int, ops: Sequence[str], slow: tuple[float, float], piped: NDArray[np.bool_]
    ) -> tuple[Numbers, Numbers]:
        """Seconds of computing and of messages of operations together. `slow` multiplies what
        starting kernels takes, outside a pipeline and inside one."""
        times = [[getattr(trios[place], op) for op in ops] for trios in self.table]
        messages = np.array([sum(t.messages for t in each) for each in times])
        alone, inside = (
            np.array([sum(max(t.device, by * t.host - t.messages) for t in each) for each in times])
            for by in slow
        )
        return np.where(piped, inside[self.key], alone[self.key]), messages[self.key]


@dataclass(frozen=True)
class Ranks:
    """What ranks of a pipeline hold: blocks, and whether embedding and head are there, 0 or 1."""

    blocks: Numbers
    embed: Numbers
    head: Numbers

    def of(self, embed: Numbers, block: Numbers, head: Numbers) -> Numbers:
        return self.blocks * block + self.embed * embed + self.head * head


def _ends(c: Columns) -> tuple[Ranks, Ranks]:
    """The first rank of a pipeline and the last. The first of a V holds its last stage too, and a
    rank without a pipeline holds all."""
    alone = c.pp <= 1
    both = alone | (c.schedule == SCHEDULES.index("zb-v"))
    one = np.ones_like(c.pp)
    first = Ranks(np.where(alone, c.layers, c.first), one, both * one)
    return first, Ranks(np.where(alone, 0.0, c.last), 0.0 * one, one - both)


@dataclass(frozen=True)
class _Stage:
    """Seconds of one microbatch on the busiest rank of a pipeline and on all of them together."""

    busiest: Numbers
    all: Numbers

    def __add__(self, other: _Stage) -> _Stage:
        return _Stage(self.busiest + other.busiest, self.all + other.all)


def estimate(
    c: Columns, table: Sequence[tuple[Trio, Trio, Trio]], hardware: Hardware, profile: Profile
) -> Estimates:
    """All candidates at once. `table` holds embedding, block and head for each key."""
    of = _Of(table, c.key)
    compute, tensor = _stages(c, of, profile)
    m = c.microbatches
    weights = _weights(c, of)
    memory, first = _memory(c, of, profile, hardware)
    held = np.sum(list(memory.values()), axis=0) / hardware.memory
    strain = 1 + profile.strain * np.clip((held - _FULL[0]) / (_FULL[1] - _FULL[0]), 0.0, 1.0)
    return Estimates(
        compute=m * compute.busiest * strain,
        tensor=m * tensor.busiest,
        data=_data(c, of, hardware, profile, weights),
        pipe=_pipe(c, of, hardware, profile),
        bubble=_bubble(c, compute + tensor),
        update=_update(c, hardware, profile, weights),
        memory=memory,
        first=first,
    )


def _stages(c: Columns, of: _Of, profile: Profile) -> tuple[_Stage, _Stage]:
    """One microbatch, forward and backward: what computes, and the messages inside it."""
    slow, piped = (1.0, profile.pipe_host), c.pp > 1
    once = ("forward", "inputs", "weights_")
    embed, block, head = (of.spent(place, once, slow, piped) for place in range(3))
    # Whole recomputation spares the head: its backward follows its forward at once.
    again = of.spent(1, ("again",), slow, piped)
    compute, messages = (
        _stage(c, embed[kind], block[kind] + again[kind] * c.again, head[kind]) for kind in (0, 1)
    )
    return compute, messages


def _stage(c: Columns, embed: Numbers, block: Numbers, head: Numbers) -> _Stage:
    return _Stage(_busiest(c, embed, block, head), c.layers * block + embed + head)


def _busiest(c: Columns, embed: Numbers, block: Numbers, head: Numbers) -> Numbers:
    """The most that any rank of a pipeline has of something that its pieces have."""
    first, last = (end.of(embed, block, head) for end in _ends(c))
    return np.maximum(np.maximum(first, last), np.where(c.pp > 2, c.most * block, 0.0))


def _bubble(c: Columns, stage: _Stage) -> Numbers:
    """Waiting while the pipeline fills and drains."""
    ramp = stage.all - stage.busiest
    part = np.select(
        [
            c.schedule == SCHEDULES.index("interleaved"),
            c.schedule == SCHEDULES.index("zb-h1"),
            c.schedule == SCHEDULES.index("zb-h2"),
            c.schedule == SCHEDULES.index("zb-v"),
        ],
        [1.0 / np.maximum(c.chunks, 1.0), 0.40, 0.10, 0.15],
        1.0,
    )
    # Few microbatches leave holes that no schedule can fill.
    few = np.clip(c.pp / np.maximum(c.microbatches, 1.0), 0.0, 1.0)
    hard = np.where(
        (c.schedule >= SCHEDULES.index("zb-h2")) & (c.microbatches < 2 * c.pp), 0.25 * few, 0.0
    )
    return np.where(c.pp > 1, ramp * np.minimum(part + hard, 1.0), 0.0)


def _pipe(c: Columns, of: _Of, hardware: Hardware, profile: Profile) -> Numbers:
    """Sends between stages: along the ramp always, at every microbatch unless they overlap."""
    one = hardware.network.seconds("send", of(1, "edge"), c.pp, c.pp_apart)
    ramp = 2 * (c.pp - 1) * one
    steady = 2 * c.microbatches * np.maximum(c.chunks, 1.0) * one
    return np.where(c.pp > 1, ramp + (1 - profile.hides_pipe) * steady, 0.0)


def _weights(c: Columns, of: _Of) -> Numbers:
    """Numbers of the fullest rank's weights."""
    embed, block, head = (of(place, "weights") for place in range(3))
    return _busiest(c, embed, block, _with_tied(c, embed, head))


def _with_tied(c: Columns, embed: Numbers, head: Numbers) -> Numbers:
    """Numbers that the head adds: of a tied one its copy, where the embedding is on another rank."""
    apart = 1.0 - _ends(c)[0].head
    return head + np.where(c.tied, embed * apart, 0.0)


def _update(c: Columns, hardware: Hardware, profile: Profile, weights: Numbers) -> Numbers:
    """Adam on a rank's part; with its averages on the host, there and back, with the host's memory."""
    part = weights / np.where(c.zero >= 1, c.shards, 1.0)
    sent = (profile.gradient_bytes + profile.weight_bytes) / hardware.host
    rate = np.where(c.offload_optimizer, _TOUCHED / _HOST + sent, hardware.rates.move(_TOUCHED))
    return rate * part


def gathering(c: Columns, hardware: Hardware, size: Numbers) -> Numbers:
    """Seconds until so many bytes, of which each rank has a part, are on every rank that shares."""
    shards = np.where(c.zero >= 1, c.shards, 1.0)
    return hardware.network.seconds("all_gather", size, shards, c.shard_apart)


def summing(c: Columns, hardware: Hardware, size: Numbers) -> Numbers:
    """Seconds in which gradients of so many bytes are summed: over all copies, or sharded over
    those that share."""
    whole = hardware.network.seconds("all_reduce", size, c.replicas * c.shards, c.shard_apart)
    cut = hardware.network.seconds("reduce_scatter", size, c.shards, c.shard_apart)
    alone = hardware.network.seconds("all_reduce", size, c.replicas, c.replica_apart)
    return np.where(c.zero >= 1, np.where(c.shards > 1, cut, alone), whole)


def summing_replicas(c: Columns, hardware: Hardware, size: Numbers) -> Numbers:
    """Seconds in which the sharded sums of gradients of so many bytes are summed over replicas."""
    rest = hardware.network.seconds("all_reduce", size / c.shards, c.replicas, c.replica_apart)
    return np.where((c.zero >= 1) & (c.shards > 1), rest, 0.0)


def tying(c: Columns, hardware: Hardware, size: Numbers) -> Numbers:
    """Seconds in which the gradient of a tied weight of so many bytes is summed between the first
    stage of a pipeline and the last, after data parallel's sum."""
    if not c.tied.any():
        return np.zeros_like(c.pp)
    pair = np.where(c.tied & (_ends(c)[0].head == 0), 2.0, 1.0)
    part = size / np.where(c.zero >= 1, c.shards, 1.0)
    # Two halves of a pipeline are as far from each other as its ends.
    return hardware.network.seconds("all_reduce", part, pair, c.pp_apart * c.pp / 2)


def counting(c: Columns, hardware: Hardware) -> Numbers:
    """Seconds in which all who share a batch agree on how many tokens it has."""
    number = np.full_like(c.shards, _NUMBER)
    return hardware.network.seconds("all_reduce", number, c.replicas * c.shards, c.shard_apart)


def _data(c: Columns, of: _Of, hardware: Hardware, profile: Profile, weights: Numbers) -> Numbers:
    """Messages of data parallel that computing does not hide."""
    m = c.microbatches
    # ---- gradients summed: once a step, or after every microbatch
    often = np.where(c.reduce_micro, m, 1.0)
    size = weights * profile.reduce_bytes
    summed = (summing(c, hardware, size) + summing_replicas(c, hardware, size)) * often
    backward = of(1, "inputs", "compute") + of(1, "weights_", "compute")
    window = often * c.most * backward
    seen = summed - np.minimum(profile.hides_data * summed, window)
    # ---- weights gathered after an update
    full = gathering(c, hardware, weights * profile.gathered_bytes)
    late = np.where((c.zero >= 1) & (c.zero < 3), full, 0.0)
    forward = m * c.most * of(1, "forward", "compute")
    hidden = np.minimum(profile.hides_data * late, forward) if profile.gathers_hidden else 0.0
    # ---- ZeRO-3: each piece before each use
    each, edges = (
        gathering(c, hardware, of(place, "weights") * profile.gathered_bytes) for place in (1, 0)
    )
    uses = np.where(c.gather_micro, m, 1.0)
    for_forward = each - np.minimum(profile.hides_data * each, of(1, "forward", "compute"))
    again = of(1, "again", "compute") * c.again
    for_backward = each - np.minimum(profile.hides_data * each, backward + again)
    micro = uses * (c.most * (for_forward + for_backward) + edges)
    once = np.where(c.gather_micro, micro, c.most * for_forward + edges)
    tied = tying(c, hardware, of(0, "weights") * profile.reduce_bytes)
    return seen + tied + counting(c, hardware) + late - hidden + np.where(c.zero >= 3, once, 0.0)


def _flight(c: Columns) -> tuple[Numbers, Numbers]:
    """Microbatches whose forward is kept: on the first stage and on the last, in whole stages."""
    m, p, v = c.microbatches, c.pp, np.maximum(c.chunks, 1.0)
    code = c.schedule
    gpipe = (code == SCHEDULES.index("gpipe")) | (code == SCHEDULES.index("naive"))
    first = np.select(
        [
            code == SCHEDULES.index("accum"),
            gpipe,
            code == SCHEDULES.index("interleaved"),
            code == SCHEDULES.index("zb-h2"),
        ],
        [np.ones_like(m), m, p + (p - 1) / v, 2 * p - 1],
        p,
    )
    last = np.select(
        [
            gpipe,
            code == SCHEDULES.index("interleaved"),
            code == SCHEDULES.index("zb-h2"),
            code == SCHEDULES.index("zb-v"),
            code == SCHEDULES.index("zb-h1"),
        ],
        [m, 1 + (p - 1) / v, p, p, p],
        1.0,
    )
    return np.minimum(first, m), np.minimum(last, m)


def _memory(
    c: Columns, of: _Of, profile: Profile, hardware: Hardware
) -> tuple[dict[str, Numbers], Numbers]:  # fmt: skip
    """By kind, of the fuller of the first and the last rank of a pipeline; and all of the first's."""
    embed, block, head = (of(place, "weights") for place in range(3))
    head = _with_tied(c, embed, head)
    keeps = np.where(c.whole, of(1, "input") / c.segment, of(1, "kept"))
    found = [
        _held(
            c, of, profile, hardware,
            numbers=end.of(embed, block, head),
            activations=end.of(of(0, "kept"), keeps * flight, of(2, "kept")),
            head=end.head,
        )
        for end, flight in zip(_ends(c), _flight(c), strict=True)
    ]  # fmt: skip
    first, last = (np.sum(list(held.values()), axis=0) for held in found)
    most = {kind: np.where(first >= last, found[0][kind], found[1][kind]) for kind in KINDS}
    return most, first


def held_by_stage(
    c: Columns, trios: tuple[Trio, Trio, Trio], ranks: Ranks, activations: Numbers, profile: Profile,
    hardware: Hardware,
) -> list[dict[str, float]]:  # fmt: skip
    """By kind, of every rank of one candidate's pipeline, of which forwards keep so many bytes."""
    of = _Of([trios], np.zeros(1))
    embed, block, head = (of(place, "weights") for place in range(3))
    numbers = ranks.of(embed, block, _with_tied(c, embed, head))
    held = _held(
        c, of, profile, hardware, numbers=numbers, activations=activations, head=ranks.head
    )
    wide = {kind: np.broadcast_to(held[kind], numbers.shape) for kind in KINDS}
    return [{kind: float(wide[kind][i]) for kind in KINDS} for i in range(len(numbers))]


def _held(
    c: Columns, of: _Of, profile: Profile, hardware: Hardware, *,
    numbers: Numbers, activations: Numbers, head: Numbers,
) -> dict[str, Numbers]:  # fmt: skip
    """Bytes by kind of ranks with so many weights, bytes kept, and a head or none."""
    embed, block = of(0, "weights"), of(1, "weights")
    one = np.where(c.zero >= 1, c.shards, 1.0)
    # Gradients wait whole for a sum once a step; with a sum after every microbatch, in parts.
    micro_sums = c.reduce_micro & (c.zero >= 1)
    working = np.where(c.whole, of(1, "kept") * c.segment, 0.0) + of(1, "temporary")
    busy = np.where(micro_sums, profile.reduce_bytes * (block + embed), 0.0)
    micro = np.where(c.gather_micro, 2 * block + embed, numbers)
    found = {
        # With ZeRO-3 the weights' home is the float32 shard that the optimizer updates.
        "weights": np.where(c.zero >= 3, 0.0, profile.weight_bytes * numbers),
        "gradients": profile.gradient_bytes * numbers / np.where(micro_sums, c.shards, 1.0) + busy,
        "optimizer": np.where(c.offload_optimizer, 0.0, profile.optimizer_bytes * numbers / one),
        "activations": activations,
        "gathered": np.where(c.zero >= 3, micro * profile.gathered_bytes, 0.0),
        "temporary": np.maximum(working, head * of(2, "temporary")),
    }
    used = np.asarray(np.sum(np.broadcast_arrays(*found.values()), axis=0))
    other = profile.context + (profile.reserve - 1) * used
    return found | {"other": np.zeros_like(used) if hardware.cores else other}
