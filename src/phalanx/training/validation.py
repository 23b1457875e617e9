"""The validation loss, and how often experts were chosen in it."""

from __future__ import annotations

import json

from ..comm.agree import exchange
from .log import RunLog
from .rank import Rank
from .step import CompletedStep


class Validations:
    """Validates every `validation.every` steps and after the last one. `loss` is the
    newest result."""

    def __init__(self, rank: Rank, log: RunLog) -> None:
        self.rank, self.log = rank, log
        self.loss: float | None = None

    def after_step(self, step: CompletedStep) -> None:
        wanted = self.rank.run.validation
        if not wanted.batches or not (step.last or step.due(wanted.every)):
            return
        with self.log.positions.phase("validating"):
            self.loss = validation_loss(self.rank)
            experts = (
                expert_tokens(self.rank) if self.rank.shape.experts else []
            )
        if self.loss is not None:
            bits = self.rank.batches.bits_per_byte(self.loss)
            self.log.validation(step.done, self.loss, bits, experts)


def validation_loss(rank: Rank) -> float | None:
    """Return the loss per token of the held-out part, or of as many batches of it as
    the run asks for."""
    batches, part = rank.batches, rank.part
    # No more batches than are held out.
    count = min(rank.run.validation.batches, batches.validations)
    rows = (batches.validation(index, rank.rows) for index in range(count))
    return part.validator.mean_loss(map(part.microbatches, rows))


def expert_tokens(rank: Rank) -> list[list[int]]:
    """Return by layer how often each expert was chosen in the last validation; on rank
    0."""
    part = rank.part
    # Ranks that see the same tokens.
    same = 1 if part.layout.seq else part.layout.tp
    own = {number: x.tolist() for number, x in part.validator.chosen.items()}
    layers: dict[int, list[int]] = {}
    # Ranks have other blocks in a pipeline, and other tokens elsewhere.
    for text in exchange(part.everyone, json.dumps(own), 0):
        for number, counts in json.loads(text).items():
            before = layers.setdefault(int(number), [0] * len(counts))
            before[:] = (a + b for a, b in zip(before, counts, strict=True))
    return [
        [count // same for count in layers[number]]
        for number in sorted(layers)
    ]
