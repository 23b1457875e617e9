"""Estimates the memory that a comparison will take, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Layout, Shape
from ..layout.choices import COMPARED, DTYPES, FP64

GIB = float(1 << 30)
PROCESS = 0.4 * GIB  # a Python process that has imported torch


@dataclass(frozen=True)
class Need:
    """Peak bytes while one process trains, and afterwards while the ranks of the
    largest layout do."""

    reference: float
    ranks: float
    layout: Layout

    @property
    def total(self) -> float:
        return max(self.reference, self.ranks)

    def __str__(self) -> str:
        return (
            f"about {self.total / GIB:,.1f} GiB of memory ({self.reference / GIB:,.1f} while one"
            f" process trains, {self.ranks / GIB:,.1f} for {str(self.layout) or 'one rank'!r})"
        )


def needed(
    shape: Shape,
    parameters: int,
    layouts: Sequence[Layout],
    *,
    steps: int,
    dtype: str,
    processes: bool,
    builtin: bool = True,
) -> Need:
    """Estimate the memory from the numbers of weights and activations.

    `processes`: ranks are processes instead of threads. `builtin`: the model is built
    in, and thus has a plain form.
    """
    exact, compute = COMPARED[dtype] == FP64, DTYPES[COMPARED[dtype]].bytes
    # Masters are kept in float32 at least.
    master = max(4, compute)
    # the start; gradients and weights of each step
    kept = (1 + 2 * steps) * master * parameters
    activations = _activations(shape, compute)
    copies = 0 if exact else 2 * compute * parameters
    # weights, gradients and Adam's two moments, in addition to the recorded steps
    training = 4 * master * parameters + copies + activations
    # Below float64 one training is kept while another runs.
    reference = kept + training + (0 if exact else kept)
    if builtin:  # its plain form runs on one batch or, in float64, in training
        of_form = _plain_activations(shape)
        # In float64: weights, gradients and their record.
        once = 3 * 8 * parameters + of_form
        trained = kept + training - activations + of_form if exact else 0.0
        # Whichever moment of the reference takes most.
        reference = max(reference, once, trained)

    def together(layout: Layout) -> float:
        """Return the bytes of all ranks of a layout, with their records and the joined
        trace."""
        # number of ranks that hold each value, if nothing is sharded
        wholes = layout.copies
        shards = layout.shards if layout.zero else 1
        at_home = (
            (4 if layout.zero else 3) * master * parameters * wholes / shards
        )
        gathered = (compute + master) * parameters * wholes
        # Records of processes exist twice while they are sent.
        written = kept * wholes / shards * (2 if processes else 1)
        # Without `seq` every rank of tp holds the residual stream, about half
        # of the activations.
        repeated = 1 if layout.seq else (1 + layout.tp) / 2
        # Threads share one process.
        each = layout.ranks * PROCESS if processes else 0.0
        # in two bytes beside each value, the rank that holds it
        joined = kept * (1 + 2 / master)
        return (
            at_home
            + gathered
            + written
            + joined
            + activations * repeated
            + each
        )

    largest = max(layouts, key=together)
    # While the ranks run, only the record of the one process is left.
    return Need(
        reference + PROCESS, kept + together(largest) + PROCESS, largest
    )


def _activations(shape: Shape, itemsize: int) -> float:
    """Return the bytes that autograd keeps for the whole batch, with logits in at least
    float32."""
    if shape.kind == "mlp":
        return float(3 * shape.batch * shape.hidden * shape.layers * itemsize)
    tokens = shape.batch * shape.sequence
    wide, narrow = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
    )
    # Elements of a token in a block: norms and residuals, queries and outputs,
    # keys and values, MLP.
    block = 8 * shape.hidden + 6 * wide + 6 * narrow + 5 * shape.ffn
    # inputs, outputs and intermediate values, for each of a token's experts
    if shape.experts:
        block += (
            shape.top_k * (6 * shape.hidden + 5 * shape.expert_ffn)
            + 6 * shape.experts
        )
    logits = 4 * shape.vocab * max(4, itemsize)
    return float(tokens * (shape.layers * block * itemsize + logits))


def _plain_activations(shape: Shape) -> float:
    """Return the bytes for a model's plain form in float64: all attention scores before
    and after the softmax, and every expert on every token."""
    plain = _activations(shape, 8)
    if shape.kind == "mlp":
        return plain
    tokens = shape.batch * shape.sequence
    # of each block, and four more in the block being computed
    scores = (2 * shape.layers + 4) * shape.heads * shape.sequence
    experts = (
        shape.layers
        * shape.experts
        * (2 * shape.hidden + 5 * shape.expert_ffn)
    )
    return plain + 8.0 * tokens * (scores + experts)
