"""Text generation with a saved model: its weights and tokenizer, from a checkpoint or a Hugging
Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..generate import GenerateError, Generator, Sampling
from ..layout.hub import model_folder
from ..layout.run import Run
from ..layout.shape import HUB
from ..parallel import Model, build_model
from .checkpoint_exchange import HubReader
from .checkpoint_format import WEIGHT, read_manifest
from .checkpoint_load import TensorReader
from .data.token_files import AS_BYTES, tokenizer_of
from .data.vocabulary import Bytes, Tokenizer, Vocabulary, open_vocabulary

Weights = dict[str, torch.Tensor]


def open_generator(
    source: Path | str, dtype: torch.dtype = torch.float32
) -> Generator:
    """Open the model of a checkpoint in any layout, or of a Hugging Face folder, hf:FOLDER."""
    return Generator.of(*model_of(source), dtype)


def model_of(source: Path | str) -> tuple[Model, Weights]:
    """Return a saved decoder on the meta device, and its weights by name."""
    name = str(source)
    reader = (
        HubReader(Path(model_folder(name.removeprefix(HUB))))
        if name.startswith(HUB)
        else TensorReader(Path(source), read_manifest(Path(source)))
    )
    with reader:
        shape = reader.manifest.shape
        if shape is None or shape.kind != "decoder":
            raise GenerateError(
                f"{source} is not a decoder, so it cannot generate text."
            )
        model = build_model(shape)
        weights = {
            tensor.name: reader.whole(tensor)
            for tensor in reader.manifest.tensors
            if tensor.kind == WEIGHT
        }
    return model, weights


def run_of(source: str) -> Run:
    """Return a run with the model, data and sequence settings of a checkpoint's run."""
    settings: Any = read_manifest(Path(source)).config.get("run", {})
    plain = Run()
    return Run(
        model=settings.get("model", ""),
        data=_data(settings.get("data", "")),
        sequence=settings.get("sequence", plain.sequence),
        packing=settings.get("packing", plain.packing),
        document_masks=settings.get("document_masks", plain.document_masks),
    )


def vocabulary_of(source: str, tokenizer: str = "") -> Vocabulary:
    """Return the tokenizer of a checkpoint's run, or of a Hugging Face folder.

    `tokenizer`: a tokenizer.json or its folder, to be used instead.
    """
    if (vocabulary := vocabulary_if_known(source, tokenizer)) is None:
        raise GenerateError(
            f"{source}: the tokenizer of its data is unknown. Name it: --tokenizer FOLDER."
        )
    return vocabulary


def vocabulary_if_known(source: str, tokenizer: str = "") -> Vocabulary | None:
    """Return the same, or None if the run's data does not name its tokenizer."""
    if source.startswith(HUB) and not tokenizer:
        return open_vocabulary(Path(model_folder(source.removeprefix(HUB))))
    run = Run() if tokenizer else run_of(source)
    return vocabulary_of_run(run, tokenizer)


def vocabulary_of_run(run: Run, tokenizer: str = "") -> Vocabulary | None:
    """Return the named tokenizer, or that of a run's model or data; None if unknown."""
    if tokenizer or run.hub:
        return open_vocabulary(
            Path(tokenizer) if tokenizer else run.hub_folder
        )
    names = {tokenizer_of(path) for path, _ in run.sources}
    return Bytes() if names == {AS_BYTES} else None


def refuse_unknown_vocabulary(run: Run) -> None:
    """Raise if a run is to write samples but its tokenizer is unknown."""
    wanted = run.sample
    if wanted.every and vocabulary_of_run(run, wanted.tokenizer) is None:
        raise GenerateError(
            "sample.every needs the tokenizer of the data, which its files do not name. Write"
            " sample.tokenizer = FOLDER, or sample.every = 0."
        )


def prompt_of(vocabulary: Vocabulary, text: str, *, chat: bool) -> list[int]:
    """Tokenize a prompt; for a chat model, as a message of the user."""
    if chat and isinstance(vocabulary, Tokenizer):
        return vocabulary.chat_prompt([{"role": "user", "content": text}])
    return vocabulary.prompt(text)


def _data(value: Any) -> str | tuple[str, ...]:
    return (
        tuple(map(str, value))
        if isinstance(value, list | tuple)
        else str(value)
    )


def continued(
    generator: Generator,
    vocabulary: Vocabulary,
    prompt: list[int],
    count: int,
    sampling: Sampling,
) -> Iterator[str]:
    """Yield the text of a continuation piece by piece.

    A character made of several tokens is yielded with the last of them.
    """
    tokens: list[int] = []
    shown = ""
    for (token,) in generator.generate(
        prompt, count, sampling, ends=vocabulary.ends
    ):
        if token in vocabulary.ends:
            break
        tokens.append(token)
        text = vocabulary.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield vocabulary.decode(tokens)[len(shown) :]
