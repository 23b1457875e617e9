"""Generation of text by a trained model, on one process.

The prompt is processed at once. Then each token costs one pass: over one token where
keys and values are cached, as for the built-in decoder (`cached.py`) and transformers'
code (`transformers_cached.py`), and over the whole sequence for a user's own module
(`recomputed.py`). `training/text.py` opens a generator from a checkpoint or a Hugging Face
folder, and writes text with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from ..layout import Shape
from ..parallel import Model
from .cached import DecoderReader, is_cacheable
from .filled import fill
from .recomputed import RecomputedReader
from .sampling import GenerateError, Sampling
from .token_reader import TokenReader
from .transformers_cached import TransformersReader


class Generator:
    """A model with its weights that continues a prompt."""

    def __init__(self, reader: TokenReader, shape: Shape) -> None:
        self.reader, self.shape = reader, shape

    @classmethod
    def of(
        cls,
        model: Model,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Generator:
        """Create a generator from a model on the meta device and its weights by
        name."""
        if model.shape is None:
            raise GenerateError(
                "the model's vocabulary is unknown. Add shape=Shape(...) to the Model that describe()"
                " returns, or call your own module with the weights of state_dict()."
            )
        return cls(_reader_of(model, weights, dtype), model.shape)

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens in a sequence, or None; learned positions limit
        it."""
        return (
            self.shape.sequence if self.shape.positions == "learned" else None
        )

    def reset(self) -> None:
        """Forget all tokens."""
        self.reader.reset()

    @torch.inference_mode()
    def logits(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """Read new tokens (batch, new) after those read so far; return the logits
        (batch, last, vocabulary) of the last ones, by default of all new ones."""
        return self.reader.logits(tokens, last or tokens.shape[1])

    def log_probabilities(self, tokens: list[int], count: int) -> Tensor:
        """Return the log-probabilities (count, vocabulary) of each of the last `count`
        tokens, given the tokens before it."""
        self._refuse(tokens[:-1], 0)
        self.reset()
        # Row i of the logits predicts token i + 1, so the last token is not
        # read.
        rows = self.logits(torch.tensor([tokens[:-1]]), count)[0]
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
        # All rows read the same prompt, in one pass.
        tokens = torch.tensor([prompt]).expand(rows, -1)
        closing = torch.tensor(sorted(ends), dtype=torch.long)
        done = torch.zeros(rows, dtype=torch.bool)
        chosen = torch.zeros(rows, dtype=torch.long)
        for _ in range(count):
            # Only the last position is sampled from.
            latest = self.logits(tokens, last=1)[:, -1]
            # A row that has ended repeats its last token, so that rows stay of
            # equal length.
            chosen = torch.where(done, chosen, sampling.choose(latest, draws))
            done |= torch.isin(chosen, closing)
            yield chosen.tolist()
            if bool(done.all()):
                return
            # From now on one token for each row.
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


def _reader_of(
    model: Model, weights: Mapping[str, Tensor], dtype: torch.dtype
) -> TokenReader:
    if model.original is not None and model.whole is not None:
        # transformers' own forward, with its own cache.
        whole = model.whole()  # made while the weights are still on meta
        assert whole is not None
        whole.bind(fill(model, weights, dtype))
        return TransformersReader(whole)
    # Decided before `DecoderReader` replaces the cores that this looks for.
    own = is_cacheable(model)
    reader = DecoderReader(model) if own else RecomputedReader(model, dtype)
    fill(model, weights, dtype)
    return reader
