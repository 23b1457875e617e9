"""The one table of operation kinds. Everything that reads a program reads it here.

A row says how a kind is written and shown, on which lane it runs, over which axes of the mesh it
communicates, and what it takes and gives. The parser, the passes, the dependencies, `check`, memory,
`simulate`, the pictures, the reports and the executor derive what they know of kinds from it, and no
other file names a letter. A new kind needs a row (here, or entered by `add`), a pass that places it, a
cost, and a handler in the executor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"  # the lane of the device's arithmetic

# What the piece and the index of an operation are.
MICROBATCH = "microbatch"  # a piece of the model and a microbatch: 2F0
# a unit of weights and which time it is: 2G is the first, 2G#1 the second
UNIT = "unit"
STEP = "step"  # no piece, and which time it is: N
# a piece, a microbatch, what travels and the piece at the far end: 2F0>3
MESSAGE = "message"

# What operations take and give.
VALUE = "value"  # a piece's output, the next piece's input
GRADIENT = "gradient"  # of such a value
KEPT = "kept"  # what a forward leaves for its backward, on the device
SELECTED = "selected"  # the part of it from which the rest can be computed again
CHOICES = "choices"  # how often tokens chose each expert, for the losses of a router
ROUTES = "routes"  # how many tokens come to each expert from each rank
FACTORS = "factors"  # what the weight gradient multiplies, left by the input gradient
AWAY = "away"  # kept, on the host
WEIGHTS = "weights"  # whole, ready to compute with
HOME = "home"  # the part of the weights that a rank owns and updates
# of a unit's weights that travel in 8 bits; with them the weights that do not
SCALES = "scales"
OWN = "own"  # that part on the device, where home is on the host
# one microbatch's gradient of a unit, added in its whole buffer
CONTRIBUTION = "contribution"
REDUCED = "reduced"  # a unit's gradient, summed over copies
TOKENS = "tokens"  # the count by which the loss is divided
NORM = "norm"  # the gradient's, over all ranks


class Paint(NamedTuple):
    """Colours of a kind of operation: its fill, its text, and the nearest of a terminal's 256."""

    fill: str
    ink: str
    terminal: int


# The palette of Okabe and Ito (2008), which colour-blind readers tell apart. Letters stand beside
# every colour, so colour alone says nothing.
_BLUE, _ORANGE = Paint("#56b4e9", "#000000", 74), Paint("#e69f00", "#000000", 178)
_GREEN, _PINK = Paint("#2fb98f", "#000000", 36), Paint("#cc79a7", "#000000", 175)
_NAVY, _RED = Paint("#0072b2", "#ffffff", 25), Paint("#d55e00", "#000000", 166)
_YELLOW, _GREY = Paint("#f0e442", "#000000", 185), Paint("#6e6e6e", "#ffffff", 242)
_SILVER, _PURPLE = Paint("#b0b0b0", "#000000", 249), Paint("#8c6bb1", "#ffffff", 97)


@dataclass(frozen=True)
class Kind:
    """A kind of operation: a row of the table."""

    letter: str
    name: str  # in two words, as legends and tables show it
    does: str  # in a sentence
    on: str  # what its piece and index are
    # operations of one lane run in the order of the list; a message's is its flow
    lane: str
    axes: tuple[str, ...]  # of the mesh: it is a collective over them
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    paint: Paint
    # Axes over which the model itself communicates while the operation computes: the regions of tensor
    # parallelism, the attention of context parallelism. It waits for these messages inside; a handler
    # waits for nothing else.
    inside: tuple[str, ...] = ()


_COPIES = ("dp", "cp", "ep")  # ranks that see other tokens
# those of them that hold parts of one copy of the weights
_SHARDS = ("dp.shard", "cp", "ep")
# ranks of one stage: each has parts of its matrices, or copies
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
    # The input times the output's gradient: no weights are needed. Of a piece without an input it is the
    # whole backward.
    Kind("W", "weight gradient", "backward of a piece, gradient of its weights only",
         MICROBATCH, COMPUTE, (), (FACTORS,), (CONTRIBUTION,), _GREEN, _MODEL),
    Kind("R", "recompute", "recompute what the forward did not keep",
         MICROBATCH, COMPUTE, (), (KEPT, WEIGHTS), (KEPT,), _PINK, _MODEL),
    # Products, attention and sums are not repeated: their outputs are what was kept.
    Kind("P", "recompute part", "recompute the cheap part of a forward that kept the rest",
         MICROBATCH, COMPUTE, (), (SELECTED, WEIGHTS), (KEPT,), _PINK, _MODEL),
    # Over dp and ep too where a loss is of the whole batch; only the backward needs the sums.
    Kind("C", "sum choices", "sum how often each expert was chosen over the ranks that share a loss",
         MICROBATCH, "choices", _PARTS, (CHOICES,), (CHOICES,), _GREY),
    Kind("K", "count routes", "tell the ranks that share experts how many tokens come to each",
         MICROBATCH, "routes", _SHARING, (VALUE,), (ROUTES,), _GREY),
    # Into the experts it is their dispatch, into what follows them what they made of it.
    Kind("E", "exchange tokens", "send tokens to the ranks that have their experts, or back",
         MICROBATCH, "tokens", _SHARING, (VALUE, ROUTES), (VALUE,), _SILVER),
    Kind("J", "exchange gradients", "send the gradients of tokens back the way these came",
         MICROBATCH, "tokens", _SHARING, (GRADIENT,), (GRADIENT,), _SILVER),
    Kind("M", "agree on scales", "agree on the scales of a unit's weights that travel in 8 bits",
         UNIT, "scales", _SHARDS, (HOME,), (SCALES,), _NAVY),
    Kind("G", "gather weights", "gather the weights of a unit",
         UNIT, "gather", _SHARDS, (HOME, SCALES), (WEIGHTS,), _NAVY),
    Kind("L", "load weights", "copy the part of a unit's weights that a rank owns from the host",
         UNIT, "in", (), (HOME,), (OWN,), _PURPLE),
    Kind("D", "drop weights", "drop the gathered weights of a unit",
         UNIT, COMPUTE, (), (WEIGHTS,), (), _GREY),
    Kind("S", "sum gradients", "sum the gradients of a unit over its copies",
         UNIT, "reduce", _COPIES, (CONTRIBUTION,), (REDUCED,), _RED),
    Kind("H", "sum replicas", "sum a unit's reduced gradient over the replicas of its shard",
         UNIT, "replicas", ("dp.replicate",), (REDUCED,), (REDUCED,), _RED),
    Kind("T", "tied sum", "sum the gradients of a weight that two stages hold",
         UNIT, "tie", ("pp",), (REDUCED,), (REDUCED,), _RED),
    Kind("Q", "tensor sum", "sum a unit's reduced gradient over the ranks of tp that did other work",
         UNIT, "tensor sums", ("tp",), (REDUCED,), (REDUCED,), _RED),
    Kind("A", "agree on norm", "agree on the gradient norm and that all numbers are finite",
         STEP, "agree", _ALL, (REDUCED, TOKENS), (NORM,), _GREY),
    Kind("U", "update", "update a unit's weights",
         UNIT, COMPUTE, (), (REDUCED, NORM), (HOME,), _YELLOW),
    Kind("Y", "gather matrices", "bring whole gradients of matrices to their owners",
         UNIT, "matrices", _PARTS, (REDUCED, NORM), (REDUCED,), _NAVY),
    Kind("V", "return matrices", "bring updates of matrices from their owners to their shards",
         UNIT, "matrices", _PARTS, (HOME,), (HOME,), _NAVY),
    Kind(">", "message", "send", MESSAGE, "", (), (VALUE, GRADIENT), (), _SILVER),
    Kind("<", "receive", "receive", MESSAGE, "", (), (), (VALUE, GRADIENT), _SILVER),
    Kind("O", "out to host", "move what a forward kept out to the host",
         MICROBATCH, "out", (), (KEPT,), (AWAY,), _PURPLE),
    Kind("Z", "back from host", "bring it back",
         MICROBATCH, "in", (), (AWAY,), (KEPT,), _PURPLE),
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.letter: kind for kind in _TABLE}

# Operations carry the letter; code writes the name.
(
    COUNT, FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, RECOMPUTE, RECOMPUTE_PART,
    SUM_CHOICES, COUNT_ROUTES, EXCHANGE, EXCHANGE_GRADIENT, AGREE_SCALES, GATHER, LOAD, DROP, REDUCE,
    REDUCE_REPLICAS, TIE, SUM_PARTS, AGREE, UPDATE, TO_OWNERS, FROM_OWNERS, SEND, RECEIVE, OFFLOAD, RELOAD,
) = KINDS  # fmt: skip


_DERIVED: list[tuple[Callable[[Kind], object], list[str]]] = []


def _those(of: Callable[[Kind], object]) -> list[str]:
    letters = [kind.letter for kind in _TABLE if of(kind)]
    _DERIVED.append((of, letters))
    return letters


def _brings(value: str) -> Callable[[Kind], object]:
    """Beside computing, on the way into a piece (or, of a gradient, out of it)."""
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
REDUCTIONS = (REDUCE, REDUCE_REPLICAS)


def add(kind: Kind) -> Callable[[], None]:
    """Enter a kind of one's own into the table; returns what takes it out again. What it waits for
    follows from what it takes and gives. A pass of one's own places it in a program, `Costs` give
    its time by its letter, `Executor.handlers` carry it out. Small letters are never ours."""
    assert kind.letter not in KINDS, f"{kind.letter} is {KINDS[kind.letter].name}"
    mine = [letters for of, letters in _DERIVED if of(kind)]
    KINDS[kind.letter] = kind
    for letters in mine:
        letters.append(kind.letter)

    def remove() -> None:
        del KINDS[kind.letter]
        for letters in mine:
            letters.remove(kind.letter)

    return remove
