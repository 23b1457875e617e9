"""Compares the values in a run's journal with independently computed ones.

Loss and norm must be those of the ranks, which are compared with one process. Tokens
are counted by hand. FLOPs are those that torch's counter finds in the plain form of the
model (`plain.py`), which computes every score of a sequence and every expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..layout import Shape
from ..layout.journal import Record
from ..layout.mixers import unusual_mixers
from ..parallel import build_model
from . import plain

_CLOSE = 1e-9  # relative tolerance of values that involve a division by a time


@dataclass(frozen=True)
class LoggedStep:
    """The values that the journal must have for a step."""

    loss: float
    norm: float
    rate: float


@dataclass(frozen=True)
class CountedFlops:
    """FLOPs of a step: `full` with all attention scores, `causal` with the visible
    ones."""

    full: float
    causal: float


def journal_faults(
    records: Sequence[Record],
    steps: Sequence[LoggedStep],
    tokens: int,
    flops: CountedFlops | None,
    validation: float | None,
) -> Iterator[str]:
    """Describe mistakes in a trial's journal, one sentence each. Without `flops`, none
    are compared."""
    lines = [record for record in records if record["event"] == "step"]
    numbers = [line["step"] for line in lines]
    # Exactly the trial's steps, in order; a repeated line would count a step
    # twice.
    if numbers != [*range(1, len(steps) + 1)]:
        yield f"the journal has lines of the steps {numbers}"
        return
    for line, step in zip(lines, steps, strict=True):
        yield from _line_faults(line, step, tokens)
    if flops:
        yield from _flops_faults(records, flops)
    recorded = [
        record["loss"] for record in records if record["event"] == "validation"
    ]
    if validation is not None and [_number(x) for x in recorded] != [
        validation
    ]:
        yield f"the journal has the validation losses {recorded}, the ranks have {validation:.9g}"


def _line_faults(line: Record, step: LoggedStep, tokens: int) -> Iterator[str]:
    wanted = {"loss": step.loss, "norm": step.norm}
    for name, value in wanted.items():
        recorded = _number(line[name])
        # Equal to the bit: the journal writes what the ranks have. Both not
        # finite: a skipped step.
        if recorded != value and not (
            math.isnan(recorded) and not math.isfinite(value)
        ):
            yield _fault(line, name, recorded, value)
    counted = {
        "lr": (line["lr"], step.rate),
        # Divided by a time on writing and multiplied again here: close, not
        # equal.
        "tokens": (line["tokens_per_second"] * line["seconds"], tokens),
    }
    for name, (recorded, value) in counted.items():
        if not math.isclose(recorded, value, rel_tol=_CLOSE):
            yield _fault(line, name, recorded, value)


def _flops_faults(
    records: Sequence[Record], flops: CountedFlops
) -> Iterator[str]:
    peak = math.nan
    for record in records:
        if record["event"] == "start":
            peak = record["peak_flops"]
        if record["event"] != "step":
            continue
        wanted = {"mfu": flops.causal, "mfu_full": flops.full}
        for name, value in wanted.items():
            # MFU * seconds * peak gives back the FLOPs.
            recorded = record[name] * record["seconds"] * peak
            if not math.isclose(recorded, value, rel_tol=_CLOSE):
                yield _fault(record, f"FLOPs of {name}", recorded, value)


def _fault(line: Record, name: str, recorded: float, wanted: float) -> str:
    return (
        f"step {line['step'] - 1}: the journal's {name} is {recorded:.9g}, counted otherwise it is"
        f" {wanted:.9g}"
    )


def _number(value: Any) -> float:
    """Convert a number of the journal, which writes non-finite values as text."""
    return float(value)


# ---- FLOPs


def counted_flops(
    shape: Shape, batch: int, sequence: int
) -> CountedFlops | None:
    """Count the FLOPs of a step of a built-in decoder, as torch counts the matmuls of
    its plain form.

    Returns None in two cases: for a frozen embedding that is also the head, because the
    plain form cannot omit its matmuls, and for mixers other than attention, because the
    plain form computes them token by token.
    """
    if unusual_mixers(shape.mixers):
        return None
    frozen = build_model(shape).frozen
    if shape.tied and "embed.tokens.weight" in frozen:
        return None
    every = _products(shape, batch, sequence)
    products, scores = every["products"], every["scores"]
    # all blocks have the same number of heads, and a score for each pair of tokens
    blocks = sum(map(shape.is_block, range(shape.pieces)))
    of_block = scores / blocks
    causal = products
    for number in range(blocks):
        windows = shape.windows or (0,)
        # A block that predicts later tokens is like the last one before it.
        like = min(number, shape.layers - 1)
        seen = plain.visible(sequence, windows[like % len(windows)], None)
        # The share of pairs that a query may see: about half for causal
        # attention.
        causal += of_block * float(seen.double().mean())
    return CountedFlops(products + scores, causal)


def _products(shape: Shape, batch: int, sequence: int) -> dict[str, float]:
    """Count FLOPs of matmuls with weights and of scores, forward and backward.

    The counted model has only as many experts as a token chooses, so that each token
    uses all; the router FLOPs of the other experts are added.
    """
    counted = shape
    if shape.experts:
        # top_k experts in all, so the plain form's loop over every expert
        # counts the right number.
        few = {"experts": shape.top_k, "expert_groups": 1, "top_groups": 1}
        counted = replace(shape, **few, balance="none")  # type: ignore[arg-type]
    model = build_model(counted)
    more = shape.experts - counted.experts
    beside = 0.0
    for name in model.weights:
        if name.endswith("router.weight"):
            # Forward, gradient of the input, and gradient of the weight unless
            # frozen. 2 FLOPs a multiply-add.
            passes = 2.0 if name in model.frozen else 3.0
            beside += passes * 2.0 * batch * sequence * shape.hidden * more
    # Each block passes a gradient to the previous one, so the embedding gets one too.
    weights = {
        name: torch.zeros(x.shape, dtype=torch.float64).requires_grad_(
            name not in model.frozen or name.startswith("embed.")
        )
        for name, x in model.weights.items()
    }
    time = torch.arange(sequence).expand(batch, -1)
    # Values do not matter, as only shapes are counted.
    tokens_of = {
        "tokens": torch.zeros_like(time),
        "targets": time % shape.vocab,
    }
    with FlopCounterMode(display=False) as counter:
        batch_of = {**tokens_of, "positions": time}
        found = plain.decoder(counted, weights, batch_of)
        loss = found.loss + found.ahead
        loss.backward()  # type: ignore[no-untyped-call]
    operations = counter.get_flop_counts()["Global"]
    # Batched matmuls are those of scores; matmuls with weights are not
    # batched.
    scores = sum(n for op, n in operations.items() if "bmm" in str(op))
    return {
        "products": sum(operations.values()) - scores + beside,
        "scores": scores,
    }
