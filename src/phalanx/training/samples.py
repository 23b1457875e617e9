"""Text that the model writes at intervals during training, logged like its loss.

Rank 0 collects the weights one at a time and writes the text on its CPU; the other
ranks wait for the next step.
"""

from __future__ import annotations

from torch import Tensor

from ..generate import Generator, Sampling
from ..layout.host import machine_memory
from ..layout.numbers import bytes_text
from .data.vocabulary import Vocabulary
from .log import RunLog
from .program import maker_of
from .rank import Rank
from .step import CompletedStep
from .text import continued, prompt_of, vocabulary_of_run
from .whole_weights import whole_weights

_BYTES = 4  # of a weight: text is generated in float32
_SHARE = (
    0.5  # largest share of the machine's memory that whole weights may take
)


class Samples:
    """Writes a text every `sample.every` steps, and after the last one."""

    def __init__(self, rank: Rank, log: RunLog) -> None:
        self.rank, self.log = rank, log
        self.every = rank.run.sample.every
        self.vocabulary: Vocabulary | None = None
        if not self.every:
            return
        # Bytes of all weights on rank 0.
        held = _BYTES * rank.parameters
        memory = machine_memory()
        if held > _SHARE * memory:
            self.every = 0
            log.event(
                "sample",
                f"sample.every: no text is written, because whole weights take {bytes_text(held)} of rank 0's"
                f" memory, which is {bytes_text(memory)}; use phalanx sample on another machine",
            )
        elif not rank.world.rank:
            self.vocabulary = vocabulary_of_run(
                rank.run, rank.run.sample.tokenizer
            )

    def after_step(self, step: CompletedStep) -> None:
        if not self.every or not (step.last or step.due(self.every)):
            return
        with self.log.positions.phase("sampling"):
            # Collective: all ranks give their shards.
            weights = self._weights_on_first()
            if self.vocabulary is not None:
                text = self._written(self.vocabulary, weights)
                self.log.sample(step.done, self.rank.run.sample.prompt, text)

    def _weights_on_first(self) -> dict[str, Tensor]:
        """Return all weights on rank 0, and an empty dict on other ranks."""
        kept: dict[str, Tensor] = {}
        for name, whole in whole_weights(self.rank.part):
            # Other ranks take part in the sums, and keep nothing.
            if not self.rank.world.rank:
                kept[name] = whole.float().cpu()
        return kept

    def _written(
        self, vocabulary: Vocabulary, weights: dict[str, Tensor]
    ) -> str:
        rank, wanted = self.rank, self.rank.run.sample
        # The run's own model, whole, on the CPU of rank 0.
        generator = Generator.of(maker_of(rank.run)(), weights)
        prompt = prompt_of(vocabulary, wanted.prompt, chat=rank.batches.chats)
        sampling = Sampling(wanted.temperature, seed=rank.run.seed)
        tokens = wanted.tokens
        return "".join(
            continued(generator, vocabulary, prompt, tokens, sampling)
        )
