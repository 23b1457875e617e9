"""Generation of text by a trained model, on one process.

The prompt is processed at once. Then each token costs one pass over one token, because
the keys and values of earlier tokens are cached (`cached.py`). `train/text.py` opens a
generator from a checkpoint or a Hugging Face folder, and writes text with it.
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
    """Decoder with its weights, and the cached keys and values of the tokens read so
    far."""

    def __init__(
        self, model: Model, dtype: torch.dtype = torch.float32
    ) -> None:
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
        self.read = 0  # tokens read, equal for all rows

    @classmethod
    def of(
        cls,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Generator:
        """Create a generator from a model on the meta device and its weights by
        name."""
        generator = cls(model, dtype)
        fill(model, weights, dtype)
        return generator

    @property
    def shape(self) -> Shape:
        assert (
            self.model.shape is not None
        )  # set for every model of `build_model`
        return self.model.shape

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens in a sequence, or None; learned positions limit
        it."""
        return (
            self.shape.sequence if self.shape.positions == "learned" else None
        )

    def reset(self) -> None:
        """Forget all tokens."""
        self.read = 0
        for core in self.cores:
            core.reset()

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read new tokens (batch, new) after those read so far; return their logits
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
        """Return the log-probabilities (count, vocabulary) of each of the last `count`
        tokens, given the tokens before it."""
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
        """Yield the next token of each of `rows` continuations of a prompt, at most
        `count` times.

        A row ends at one of the tokens `ends`, which it then repeats. The generator
        stops when all rows have ended.
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
                "the prompt is empty. Write at least one character."
            )
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise GenerateError(
                f"the prompt has token {max(prompt)}, but the model's vocabulary is {vocabulary:,}."
                " Name the tokenizer that the model was trained with: --tokenizer FOLDER."
            )
        longest = self.longest
        if longest is not None and len(prompt) + count > longest:
            raise GenerateError(
                f"a prompt of {len(prompt)} tokens and {count} new ones exceed the model's {longest}"
                f" positions. Write --tokens {max(0, longest - len(prompt))}, or a"
                " shorter prompt."
            )


def _cacheable(blocks: list[nn.Module]) -> bool:
    return all(
        isinstance(getattr(getattr(b, "attn", None), "core", None), Core)
        for b in blocks
    )


def _cached(block: nn.Module) -> CachedCore:
    """Replace a block's attention core by one with a cache, and return it."""
    attention = block.attn
    assert isinstance(attention, nn.Module)
    assert isinstance(attention.core, Core)
    attention.core = CachedCore(attention.core)
    return attention.core
