"""Text that a trained model writes: its weights and its tokenizer, from a checkpoint or a folder."""

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


def open_generator(source: Path | str, dtype: torch.dtype = torch.float32) -> Generator:
    """The model of a checkpoint in any layout, or of a folder of Hugging Face named as hf:FOLDER."""
    return Generator.of(*model_of(source), dtype)


def model_of(source: Path | str) -> tuple[Model, Weights]:
    """A saved decoder on the meta device, and its weights by name."""
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
                f"{source} holds no decoder: there is nothing to sample from."
            )
        model = build_model(shape)
        weights = {
            tensor.name: reader.whole(tensor)
            for tensor in reader.manifest.tensors
            if tensor.kind == WEIGHT
        }
    return model, weights


def run_of(source: str) -> Run:
    """What a checkpoint's run was trained on, with which model, and how its text was cut."""
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
    """The tokenizer that a checkpoint's run was trained with, or a folder of Hugging Face brings.

    `tokenizer`: a tokenizer.json or its folder, which is taken instead.
    """
    if (vocabulary := vocabulary_if_known(source, tokenizer)) is None:
        raise GenerateError(
            f"{source}: the tokenizer of its data is not known. Name it: --tokenizer FOLDER."
        )
    return vocabulary


def vocabulary_if_known(source: str, tokenizer: str = "") -> Vocabulary | None:
    """The same, or None where the run's data does not name its tokenizer."""
    if source.startswith(HUB) and not tokenizer:
        return open_vocabulary(Path(model_folder(source.removeprefix(HUB))))
    run = Run() if tokenizer else run_of(source)
    return vocabulary_of_run(run, tokenizer)


def vocabulary_of_run(run: Run, tokenizer: str = "") -> Vocabulary | None:
    """The tokenizer of a run's model or data, or the one that is named; None if it is not known."""
    if tokenizer or run.hub:
        return open_vocabulary(Path(tokenizer) if tokenizer else run.hub_folder)
    names = {tokenizer_of(path) for path, _ in run.sources}
    return Bytes() if names == {AS_BYTES} else None


def refuse_unknown_vocabulary(run: Run) -> None:
    """Raise if a run is to write text and nobody knows how its tokens become text."""
    wanted = run.sample
    if wanted.every and vocabulary_of_run(run, wanted.tokenizer) is None:
        raise GenerateError(
            "sample.every needs the tokenizer of the data, which its files do not name. Write"
            " sample.tokenizer = FOLDER, or sample.every = 0."
        )


def prompt_of(vocabulary: Vocabulary, text: str, *, chat: bool) -> list[int]:
    """The tokens of a prompt; for a model of chats it is a message of the user's."""
    if chat and isinstance(vocabulary, Tokenizer):
        return vocabulary.chat_prompt([{"role": "user", "content": text}])
    return vocabulary.prompt(text)


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
