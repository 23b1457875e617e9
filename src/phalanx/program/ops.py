"""The one table of operation kinds. Everything that reads a program reads it here.

A row says how a kind is written and shown, its lane, the mesh axes over which it
communicates, and what it takes and gives. The parser, the passes, the dependencies,
`check`, memory, `simulate`, the pictures, the reports and the executor derive what they
know of kinds from it, and no other file names a letter. A new kind needs a row (here,
or entered by `add`), a pass that places it, a cost, and a handler in the executor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"  # the lane of the device's arithmetic

# The meaning of an operation's piece and index.
MICROBATCH = "microbatch"  # a piece of the model, and a microbatch: 2F0
# A unit of weights, and a count: 2G is its first gather, 2G#1 the second.
UNIT = "unit"
STEP = "step"  # no piece, and a count: N
# A piece, a microbatch, the kind of value and the piece at the far end: 2F0>3.
MESSAGE = "message"

# The values that operations take and give.
VALUE = "value"  # a piece's output, the next piece's input
GRADIENT = "gradient"  # the gradient of such a value
KEPT = "kept"  # what a forward keeps for its backward, on the device
SELECTED = "selected"  # the part of it from which the rest can be recomputed
CHOICES = "choices"  # the number of times each expert was chosen, for a router's losses
ROUTES = "routes"  # the number of tokens for each expert from each rank
FACTORS = (
    "factors"  # the factors of weight gradients, left by the input gradient
)
AWAY = "away"  # kept, on the host
WEIGHTS = "weights"  # whole, ready to compute with
HOME = "home"  # the shard of the weights that a rank owns and updates
# The scales of a unit's weights gathered in 8 bits, and its weights that are not.
SCALES = "scales"
OWN = "own"  # that shard on the device, if home is on the host
# One microbatch's gradient of a unit, added to its whole buffer.
CONTRIBUTION = "contribution"
SUMS = "sums"  # of a unit's gradients, over the microbatches of a rank
REDUCED = "reduced"  # a unit's gradient, summed over copies
TOKENS = "tokens"  # the count by which the loss is divided
NORM = "norm"  # the gradient norm, over all ranks


class Paint(NamedTuple):
    """Colours of a kind of operation: fill, text, and a terminal's nearest."""

    fill: str
    ink: str
    terminal: int


# The palette of Okabe and Ito (2008), which colour-blind readers can distinguish. Every
# colour comes with a letter, so nothing depends on colour alone.
_BLUE, _ORANGE = (
    Paint("#56b4e9", "#000000", 74),
    Paint("#e69f00", "#000000", 178),
)
_GREEN, _PINK = (
    Paint("#2fb98f", "#000000", 36),
    Paint("#cc79a7", "#000000", 175),
)
_NAVY, _RED = Paint("#0072b2", "#ffffff", 25), Paint("#d55e00", "#000000", 166)
_YELLOW, _GREY = (
    Paint("#f0e442", "#000000", 185),
    Paint("#6e6e6e", "#ffffff", 242),
)
_SILVER, _PURPLE = (
    Paint("#b0b0b0", "#000000", 249),
    Paint("#8c6bb1", "#ffffff", 97),
)


@dataclass(frozen=True)
class Kind:
    """A kind of operation: a row of the table."""

    letter: str
    name: str  # in two words, for legends and tables
    does: str  # in a sentence
    on: str  # the meaning of its piece and index
    # Operations of one lane run in the order of the list. A message's lane is its flow.
    lane: str
    axes: tuple[str, ...]  # mesh axes; not empty for a collective
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    paint: Paint
    # Axes over which the model itself communicates while the operation computes: the
    # regions of tensor parallelism, the attention of context parallelism. The operation
    # waits for these messages inside. A handler waits for nothing else.
    inside: tuple[str, ...] = ()


_COPIES = ("dp", "cp", "ep")  # ranks that see different tokens
# Ranks that hold shards of one copy of the weights.
_SHARDS = ("dp.shard", "cp", "ep")
# Ranks of one stage: each holds parts of its matrices, or copies.
_PARTS = ("dp", "cp", "tp", "ep")
_ALL = ("dp", "pp", "cp", "tp", "ep")
_SHARING = ("cp", "tp", "ep")  # ranks among which experts may be shared
_MODEL = ("cp", "tp")  # ranks that compute one microbatch together

# In the order in which legends and tables list them.
_TABLE = (
    Kind("N", "count tokens", "count the valid tokens of the step over all ranks",
         STEP, "agree", _ALL, (), (TOKENS,), _GREY),
    Kind("F", "forward", "forward of a piece on a microbatch",
         MICROBATCH, COMPUTE, (), (VALUE, WEIGHTS), (VALUE, KEPT, CHOICES), _BLUE,
         _MODEL),
    Kind("B", "backward", "backward of a piece, whole",
         MICROBATCH, COMPUTE, (), (GRADIENT, KEPT, WEIGHTS, CHOICES), (GRADIENT, CONTRIBUTION),
         _ORANGE, _MODEL),
    Kind("I", "input gradient", "backward of a piece, gradient of its input only",
         MICROBATCH, COMPUTE, (), (GRADIENT, KEPT, WEIGHTS, CHOICES), (GRADIENT, FACTORS), _ORANGE,
         _MODEL),
    # The input times the output's gradient: no weights are needed. For a piece without
    # an input it is the whole backward.
    Kind("W", "weight gradient", "backward of a piece, gradient of its weights only",
         MICROBATCH, COMPUTE, (), (FACTORS,), (CONTRIBUTION,), _GREEN, _MODEL),
    Kind("R", "recompute", "recompute what the forward did not keep",
         MICROBATCH, COMPUTE, (), (KEPT, WEIGHTS), (KEPT,), _PINK, _MODEL),
    # Matmuls, attention and sums are not repeated: their outputs were kept.
    Kind("P", "recompute part", "recompute the cheap part of a forward that kept the rest",
         MICROBATCH, COMPUTE, (), (SELECTED, WEIGHTS), (KEPT,), _PINK, _MODEL),
    # Over dp and ep too if a loss covers the whole batch. Only the backward needs the
    # sums.
    Kind("C", "sum choices", "sum the choices of each expert over the ranks that share a loss",
         MICROBATCH, "choices", _PARTS, (CHOICES,), (CHOICES,), _GREY),
    Kind("K", "count routes", "send token counts to the ranks that share experts",
         MICROBATCH, "routes", _SHARING, (VALUE,), (ROUTES,), _GREY),
    # Into the experts' piece this is their dispatch, into the next piece their results.
    Kind("E", "exchange tokens", "send tokens to the ranks that have their experts, or back",
         MICROBATCH, "tokens", _SHARING, (VALUE, ROUTES), (VALUE,), _SILVER),
    Kind("J", "exchange gradients", "send the gradients of tokens back to their ranks",
         MICROBATCH, "tokens", _SHARING, (GRADIENT,), (GRADIENT,), _SILVER),
    Kind("M", "agree on scales", "agree on the scales of a unit's weights gathered in 8 bits",
         UNIT, "scales", _SHARDS, (HOME,), (SCALES,), _NAVY),
    Kind("G", "gather weights", "gather the weights of a unit",
         UNIT, "gather", _SHARDS, (HOME, SCALES), (WEIGHTS,), _NAVY),
    Kind("L", "load weights", "copy the rank's shard of a unit's weights from the host",
         UNIT, "in", (), (HOME,), (OWN,), _PURPLE),
    Kind("D", "drop weights", "drop the gathered weights of a unit",
         UNIT, COMPUTE, (), (WEIGHTS,), (), _GREY),
    Kind("S", "sum gradients", "sum the gradients of a unit over its copies",
         UNIT, "reduce", _COPIES, (CONTRIBUTION,), (REDUCED,), _RED),
    Kind("H", "sum replicas", "sum a unit's reduced gradient over the replicas of its shard",
         UNIT, "replicas", ("dp.replicate",), (REDUCED,), (REDUCED,), _RED),
    # Of a step in which sums have one fixed order: see `tree.py`.
    Kind("^", "add in tree", "add a microbatch's gradient of a unit to the sums of the tree",
         UNIT, COMPUTE, (), (CONTRIBUTION,), (SUMS,), _RED),
    Kind("X", "exchange parts", "exchange the parts of a unit's gradient, and add them as the tree says",
         UNIT, "reduce", _COPIES, (SUMS,), (REDUCED,), _RED),
    Kind("~", "share sums", "gather a unit's summed parts from the replicas of its shard",
         UNIT, "replicas", _COPIES, (REDUCED,), (REDUCED,), _RED),
    Kind("T", "tied sum", "sum the gradients of a weight that two stages hold",
         UNIT, "tie", ("pp",), (REDUCED,), (REDUCED,), _RED),
    Kind("Q", "tensor sum", "sum a unit's reduced gradient over the tp ranks that did other work",
         UNIT, "tensor sums", ("tp",), (REDUCED,), (REDUCED,), _RED),
    Kind("A", "agree on norm", "agree on the gradient norm, and that all values are finite",
         STEP, "agree", _ALL, (REDUCED, TOKENS), (NORM,), _GREY),
    Kind("U", "update", "update a unit's weights",
         UNIT, COMPUTE, (), (REDUCED, NORM), (HOME,), _YELLOW),
    Kind("Y", "gather matrices", "send whole gradients of matrices to their owners",
         UNIT, "matrices", _PARTS, (REDUCED, NORM), (REDUCED,), _NAVY),
    Kind("V", "return matrices", "send updates of matrices from their owners to the shards",
         UNIT, "matrices", _PARTS, (HOME,), (HOME,), _NAVY),
    Kind(">", "message", "send", MESSAGE, "", (), (VALUE, GRADIENT), (), _SILVER),
    Kind("<", "receive", "receive", MESSAGE, "", (), (), (VALUE, GRADIENT), _SILVER),
    Kind("O", "out to host", "move the activations of a forward to the host",
         MICROBATCH, "out", (), (KEPT,), (AWAY,), _PURPLE),
    Kind("Z", "back from host", "move them back to the device",
         MICROBATCH, "in", (), (AWAY,), (KEPT,), _PURPLE),
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.letter: kind for kind in _TABLE}

# Operations carry the letter; code uses the name.
(
    COUNT,
    FORWARD,
    BACKWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    RECOMPUTE,
    RECOMPUTE_PART,
    SUM_CHOICES,
    COUNT_ROUTES,
    EXCHANGE,
    EXCHANGE_GRADIENT,
    AGREE_SCALES,
    GATHER,
    LOAD,
    DROP,
    REDUCE,
    REDUCE_REPLICAS,
    ADD,
    EXCHANGE_PARTS,
    SHARE_SUMS,
    TIE,
    SUM_PARTS,
    AGREE,
    UPDATE,
    TO_OWNERS,
    FROM_OWNERS,
    SEND,
    RECEIVE,
    OFFLOAD,
    RELOAD,
) = KINDS


_DERIVED: list[tuple[Callable[[Kind], object], list[str]]] = []


def _those(of: Callable[[Kind], object]) -> list[str]:
    letters = [kind.letter for kind in _TABLE if of(kind)]
    _DERIVED.append((of, letters))
    return letters


def _brings(value: str) -> Callable[[Kind], object]:
    """A predicate for operations that bring a value into a piece, or a gradient out."""
    return lambda k: (
        k.on == MICROBATCH
        and k.lane != COMPUTE
        and value in k.takes
        and value in k.gives
    )


ON_MICROBATCH = _those(lambda k: k.on == MICROBATCH)
ON_UNIT = _those(lambda k: k.on == UNIT)
ON_STEP = _those(lambda k: k.on == STEP)
MESSAGES = _those(lambda k: k.on == MESSAGE)
COMPUTES = _those(lambda k: k.on == MICROBATCH and k.lane == COMPUTE)
USES_WEIGHTS = _those(
    lambda k: k.on == MICROBATCH and k.lane == COMPUTE and WEIGHTS in k.takes
)
PROPAGATES = _those(
    lambda k: k.on == MICROBATCH and k.lane == COMPUTE and GRADIENT in k.gives
)
CONTRIBUTES = _those(lambda k: CONTRIBUTION in k.gives)
BACKWARDS = _those(lambda k: k.letter in (*PROPAGATES, *CONTRIBUTES))
RECOMPUTES = _those(
    lambda k: k.on == MICROBATCH and k.lane == COMPUTE and k.gives == (KEPT,)
)
COLLECTIVES = _those(lambda k: k.axes)
EXCHANGES = _those(lambda k: k.on == MICROBATCH and k.axes)
BRINGS_VALUE = _those(_brings(VALUE))
BRINGS_GRADIENT = _those(_brings(GRADIENT))
# The sum over a unit's copies, or over its shards, and then that over replicas.
FIRST_SUMS = (REDUCE, EXCHANGE_PARTS)
REPLICA_SUMS = (REDUCE_REPLICAS, SHARE_SUMS)
REDUCTIONS = (*FIRST_SUMS, *REPLICA_SUMS)


def add(kind: Kind) -> Callable[[], None]:
    """Add a custom kind of operation to the table; returns a function that removes it.

    Its waits follow from what it takes and gives. A pass of yours places it in a
    program, `Costs` give its time by its letter, and `Executor.handlers` carry it out.
    Built-in kinds never use small letters.
    """
    assert kind.letter not in KINDS, (
        f"{kind.letter} is {KINDS[kind.letter].name}"
    )
    mine = [letters for of, letters in _DERIVED if of(kind)]
    KINDS[kind.letter] = kind
    for letters in mine:
        letters.append(kind.letter)

    def remove() -> None:
        del KINDS[kind.letter]
        for letters in mine:
            letters.remove(kind.letter)

    return remove
