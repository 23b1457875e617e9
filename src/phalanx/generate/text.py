"""The tokenizer of a model, and text that grows with each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..layout.run import Run
from ..layout.shape import HUB
from ..train.checkpoint_format import read_manifest
from ..train.data.token_files import AS_BYTES, tokenizer_of
from ..train.data.vocabulary import Bytes, Vocabulary, open_vocabulary
from .generator import Generator
from .sampling import GenerateError, Sampling


def vocabulary_of(source: str, tokenizer: str = "") -> Vocabulary:
    """The tokenizer that a checkpoint's run was trained with, or a folder of Hugging Face brings.

    `tokenizer`: a tokenizer.json or its folder, which is taken instead.
    """
    if tokenizer:
        return open_vocabulary(Path(tokenizer))
    if source.startswith(HUB):
        return open_vocabulary(Path(source.removeprefix(HUB)))
    settings: Any = read_manifest(Path(source)).config.get("run", {})
    run = Run(model=settings.get("model", ""), data=_data(settings.get("data", "")))
    if run.hub:
        return open_vocabulary(Path(run.hub))
    names = {tokenizer_of(path) for path, _ in run.sources}
    if names == {AS_BYTES}:
        return Bytes()
    raise GenerateError(
        f"{source}: the tokenizer of its data is not known. Name it: --tokenizer FOLDER."
    )


def _data(value: Any) -> str | tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else str(value)


def continued(
    generator: Generator,
    vocabulary: Vocabulary,
    prompt: list[int],
    count: int,
    sampling: Sampling,
) -> Iterator[str]:
    """Yields the text of a continuation piece by piece; together they are the whole text.

    A character of several tokens comes with its last one.
    """
    tokens: list[int] = []
    shown = ""
    for (token,) in generator.generate(prompt, count, sampling, ends=vocabulary.ends):
        if token in vocabulary.ends:
            break
        tokens.append(token)
        text = vocabulary.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield vocabulary.decode(tokens)[len(shown) :]
