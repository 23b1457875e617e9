"""A trained model that continues sequences of tokens, on one process.

The prompt is read at once; then each token costs one pass over one token, as the keys and values of all
earlier tokens are kept (`cached.py`). `train/text.py` opens one from a checkpoint or a folder of Hugging
Face, and writes text with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..layout import Shape
from ..models import Core
from ..models.decoder import Head
from ..parallel import Model
from .cached import CachedCore
from .filled import fill
from .sampling import GenerateError, Sampling


class Generator:
    """A decoder with its weights, and the keys and values of the tokens that it has read."""

    def __init__(self, model: Model, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model, dtype
        self.blocks = [piece for _, piece in model.pieces[1:-1]]
        self.embed, head = model.pieces[0][1], model.pieces[-1][1]
        if not isinstance(head, Head) or not _cacheable(self.blocks):
            raise GenerateError(
                "only models of phalanx's own decoder can be sampled. Export the checkpoint"
                " (phalanx checkpoint export) and call transformers' generate; or call your own module"
                " with the weights of state_dict()."
            )
        self.head = head
        self.cores = [_cached(block) for block in self.blocks]
        self.read = 0  # tokens of each row

    @classmethod
    def of(
        cls,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Generator:
        """A model on the meta device with these weights, by their names in it."""
        generator = cls(model, dtype)
        fill(model, weights, dtype)
        return generator

    @property
    def shape(self) -> Shape:
        assert self.model.shape is not None  # of every model of `build_model`
        return self.model.shape

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence: with learned positions, as many as there are; else any number."""
        return self.shape.sequence if self.shape.positions == "learned" else None

    def reset(self) -> None:
        """Forget all tokens."""
        self.read = 0
        for core in self.cores:
            core.reset()

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read tokens (batch, new) that follow those read so far; the logits after each of them,
        (batch, new, vocabulary)."""
        time = torch.arange(self.read, self.read + tokens.shape[1])
        positions = time.expand_as(tokens)
        self.read += tokens.shape[1]
        x = self.embed(tokens, positions)
        shared = {
            name: make({"positions": positions}, x.dtype)
            for name, make in self.model.derived.items()
        }
        for block in self.blocks:
            x = block(x, positions=positions, **shared)
        return self.head.logits(x)

    def log_probabilities(self, tokens: list[int], count: int) -> Tensor:
        """The log-probabilities of all words for each of the last `count` tokens of a sequence, given
        those before it: (count, vocabulary)."""
        self._refuse(tokens[:-1], 0)
        self.reset()
        rows = self.logits(torch.tensor([tokens[:-1]]))[0, -count:]
        return rows.float().log_softmax(-1)

    def generate(
        self,
        prompt: list[int],
        count: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
        *,
        rows: int = 1,
        ends: Collection[int] = (),
    ) -> Iterator[list[int]]:
        """Yields the next token of each of `rows` continuations of a prompt, `count` times at most.

        A row ends with one of the tokens `ends`, which it then repeats; when all rows have ended, so
        does the generator.
        """
        self._refuse(prompt, count)
        self.reset()
        draws = sampling.generator()
        tokens = torch.tensor([prompt]).expand(rows, -1)
        closing = torch.tensor(sorted(ends), dtype=torch.long)
        done = torch.zeros(rows, dtype=torch.bool)
        chosen = torch.zeros(rows, dtype=torch.long)
        for _ in range(count):
            latest = self.logits(tokens)[:, -1]
            chosen = torch.where(done, chosen, sampling.choose(latest, draws))
            done |= torch.isin(chosen, closing)
            yield chosen.tolist()
            if bool(done.all()):
                return
            tokens = chosen.unsqueeze(1)

    def _refuse(self, prompt: list[int], count: int) -> None:
        vocabulary = self.shape.vocab
        if not prompt:
            raise GenerateError(
                "the prompt holds no token. Write at least one character."
            )
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise GenerateError(
                f"the prompt has token {max(prompt)}, and the model knows {vocabulary:,}."
                " Name the tokenizer that the model was trained with: --tokenizer FOLDER."
            )
        longest = self.longest
        if longest is not None and len(prompt) + count > longest:
            raise GenerateError(
                f"a prompt of {len(prompt)} tokens and {count} new ones are more than the {longest}"
                f" positions of the model. Write --tokens {max(0, longest - len(prompt))}, or a"
                " shorter prompt."
            )


def _cacheable(blocks: list[nn.Module]) -> bool:
    return all(
        isinstance(getattr(getattr(b, "attn", None), "core", None), Core)
        for b in blocks
    )


def _cached(block: nn.Module) -> CachedCore:
    """Gives a block a core that keeps keys and values, and returns it."""
    attention = block.attn
    assert isinstance(attention, nn.Module)
    assert isinstance(attention.core, Core)
    attention.core = CachedCore(attention.core)
    return attention.core
