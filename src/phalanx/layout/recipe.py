"""The layout that `auto` means: a rule of thumb for users who do not want to choose.

Plain data parallelism up to 128 devices and 1B parameters. Above that the optimizer is
sharded and every block recomputed, which allows a larger batch. Gradients and weights
are sharded too if whole ones do not fit (ZeRO-1, 2, 3): each stage sends more often.
Above 256 devices shards stay within groups of a node or more (HSDP). Above 1,000
devices, 50B parameters or 16k tokens also tensor, pipeline and context parallelism.
After that, measure, and tune for the highest MFU.
"""

import math

from .choices import ACCUM, FP32, ONE_F_ONE_B
from .layout import Layout
from .legal import legal, nearest
from .mesh import Axis, LayoutError, Mesh
from .shape import Shape
from .state_bytes import StateBytes, engine_state, held_bytes

NODE = 8  # devices with fast links between them
# In mixed precision. The optimizer keeps two averages and a float32 copy.
STATE = StateBytes(weight=2, gathered=2, gradient=2, reduced=2, optimizer=12)
FEW, MANY, VERY_MANY = 128, 256, 1000
SMALL, LARGE = 1e9, 50e9
LONG = 16384


def recipe(
    shape: Shape,
    ranks: int,
    *,
    batch: int = 0,
    sequence: int = 0,
    memory: float = 0.0,
    precision: str = FP32,
) -> Layout:
    """A legal layout for `ranks` ranks. `memory` is a device's bytes, or 0 if unknown."""
    batch, sequence = batch or shape.batch, sequence or shape.sequence
    # A rank of cp for every 16k tokens.
    cp = _divisor(ranks, -(-sequence // LONG))
    vast = shape.total > LARGE or ranks > VERY_MANY
    tp = _divisor(ranks // cp, NODE) if vast else 1
    # A pipeline stage for every 50B parameters, at least two.
    stages = max(2, -(-shape.total // int(LARGE)))
    pp = _divisor(ranks // cp // tp, min(shape.layers, stages)) if vast else 1
    dp = ranks // (tp * pp * cp)
    sharded = shape.total > SMALL or ranks > FEW
    # HSDP above 256 devices; below, all ranks of dp shard.
    parts = (
        _shards(dp, shape.total / (tp * pp), memory)
        if sharded and ranks > MANY
        else dp
    )
    sizes = [("dp", dp), ("pp", pp), ("cp", cp), ("tp", tp)]
    words = [f"{axis}{size}" for axis, size in sizes if size > 1]
    # dp16 -> dp2x8: replicas of shards.
    if 1 < parts < dp:
        words[0] = f"dp{dp // parts}x{parts}"
    words += ["seq"] * (tp > 1)
    zero = _stage(shape.total / (tp * pp), parts, memory, precision)
    if zero == 2 and pp > 1:
        # In a pipeline ZeRO-3 also gathers once a step, and drops weights after use.
        zero = 3
    words += [f"zero{zero}", "recompute:all"] * sharded
    words += [precision] * (precision != FP32)
    # Sequences of a step on each rank.
    rows = batch // max(1, dp)
    # The largest batch per device that fits in half the memory.
    fits = (
        memory / 2 // (_bytes(shape, sequence // cp, sharded) / (tp * pp))
        if memory
        else rows
    )
    # As many microbatches as memory asks for, and four for each stage to fill
    # a pipeline.
    count = max(-(-rows // max(1, int(fits))), 4 * pp if pp > 1 else 1)
    count = max(1, min(count, rows))
    layout = Layout.parse(
        " ".join([*words, f"{ONE_F_ONE_B if pp > 1 else ACCUM}:{count}"])
    )
    if not legal(layout, shape, batch=batch, sequence=sequence):
        return layout
    # Sizes may not divide: take the nearest legal layout.
    near = nearest(layout, shape, batch=batch, sequence=sequence, most=1)
    if not near:
        raise LayoutError(
            f"auto finds no layout of {shape.name} for {ranks} ranks and a batch of {batch}."
            f" Use a batch of {ranks} or more, or fewer ranks."
        )
    return near[0]


def module_recipe(
    parameters: int,
    ranks: int,
    memory: float,
    precision: str,
    *,
    rows: int = 0,
    kept: float = 0.0,
) -> Layout:
    """The layout of a module of which only the number of weights is known: dp over all ranks,
    with the lowest ZeRO stage whose weights, gradients and optimizer fit in half of `memory`,
    a rank's bytes. A batch of so many `rows`, of which each keeps `kept` bytes until its backward,
    is cut into microbatches that fit in the other half.
    """
    # A module of unknown structure: no axis but dp can split it.
    words = [f"dp{ranks}"] * (ranks > 1) + [precision] * (precision != FP32)
    own_rows = -(-rows // ranks)
    count = min(own_rows, math.ceil(own_rows * kept / (memory / 2)))
    words += [f"{ACCUM}:{count}"] * (count > 1)
    plain = Layout.parse(" ".join(words))
    state = engine_state(precision)
    held = held_bytes(plain, state)
    whole = held.weight + held.gradient + held.optimizer
    if ranks == 1 or parameters * whole <= memory / 2:
        return plain
    stage = _stage(parameters, ranks, memory, precision)
    return Layout.parse(" ".join([*words, f"zero{stage}"]))


def _divisor(ranks: int, wanted: int) -> int:
    """The first power of two from `wanted` that divides `ranks`, else the largest."""
    divisor = 1
    # Powers of two, because devices and model widths come in them.
    while divisor < wanted and ranks % (2 * divisor) == 0:
        divisor *= 2
    return divisor


def _shards(dp: int, parameters: float, memory: float) -> int:
    """The shards of a replica: a node's ranks, or until one fits half the memory."""
    parts = _divisor(dp, NODE)
    # Double the shards until the state of a replica's share fits.
    while (
        memory
        and parameters * STATE.total / parts > memory / 2
        and dp % (2 * parts) == 0
    ):
        parts *= 2
    return parts


def _stage(
    parameters: float, parts: int, memory: float, precision: str
) -> int:
    """The lowest ZeRO stage whose state fits in half the memory.

    Buffers that are not sharded are sent once a step, not for every microbatch. 3 if
    the memory is unknown.
    """
    state = engine_state(precision)
    mesh = Mesh((Axis("dp", (1, parts)),))
    for stage in (1, 2):
        held = held_bytes(Layout(mesh, zero=stage), state)
        gradient = held.gradient
        if stage == 2 and held.gradient_shard:
            gradient = held.gradient_shard
        if (
            parameters * (held.weight + gradient + held.optimizer)
            <= memory / 2
        ):
            return stage
    return 3


def _bytes(shape: Shape, tokens: int, recomputed: bool) -> float:
    """The bytes that one sequence keeps until its backward, in 16-bit elements.

    Korthikanti et al. 2022, eq. 2, without the scores, which are never kept: 34 bytes
    per token and hidden feature of a block, or 2, its input alone, if it is recomputed;
    six bytes per logit.
    """
    per_block = 34.0
    blocks = (
        2.0 * shape.layers + per_block
        if recomputed
        else per_block * shape.layers
    )
    return tokens * (shape.hidden * blocks + 6.0 * shape.vocab)
