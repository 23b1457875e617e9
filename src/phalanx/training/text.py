"""Text generation with a saved model: its weights and tokenizer, from a checkpoint or a Hugging
Face folder."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..comm import World
from ..generate import GenerateError, Generator, Sampling
from ..generate.shared import SharedReader
from ..layout import Layout, Shape
from ..layout.families import code_of
from ..layout.hub import model_folder
from ..layout.run import Run
from ..layout.shape import HUB
from ..parallel import Model, build_model, load_model
from .checkpoint_exchange import HubReader
from .checkpoint_format import WEIGHT, Manifest, read_manifest
from .checkpoint_load import TensorReader, own_model
from .data.token_files import AS_BYTES, tokenizer_of
from .data.vocabulary import Bytes, Tokenizer, Vocabulary, open_vocabulary
from .program import program_of

AS_TRAINED = "run"  # --layout of a sample: that of the checkpoint
Weights = dict[str, torch.Tensor]


def open_generator(
    source: Path | str, dtype: torch.dtype = torch.float32, *, own: str = ""
) -> Generator:
    """Open the model of a checkpoint in any layout, or of a Hugging Face folder, hf:FOLDER.

    `own` is FILE.py:Class of a user's model.
    """
    return Generator.of(*model_of(source, own), dtype)


def open_shared_generator(
    world: World, source: Path | str, layout: Layout
) -> Generator:
    """Open this rank's part of a saved model. Collective."""
    with _reader_of(source) as reader:
        model = _model_saved_in(reader.manifest, str(source), "")
        program = program_of(model, layout)
        weights = SavedWeights(reader)
        shared = SharedReader(world, layout, model, program, weights)
    assert model.shape is not None  # set for every decoder
    return Generator(shared, model.shape)


class SavedWeights(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by name; each is read when it is asked for."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self.stored = {
            tensor.name: tensor
            for tensor in reader.manifest.tensors
            if tensor.kind == WEIGHT
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.reader.whole(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def sampling_layout(text: str, source: str) -> Layout:
    """Return the ranks over which a model is sampled: those of tp and pp.

    `run` stands for the layout in which the checkpoint was written.
    """
    if text != AS_TRAINED:
        layout = Layout.parse(text)
        plain = _sharing(layout)
        if plain.mesh != layout.mesh:
            raise GenerateError(
                f"--layout {text!r}: ranks share a model that is sampled over tp and pp alone, as in"
                f" 'tp2 pp2'. Write {str(plain) or 'no --layout'}."
            )
        return plain
    if source.startswith(HUB):
        raise GenerateError(
            f"{source} was trained in no layout. Write --layout 'tp2 pp2'."
        )
    return _sharing(Layout.parse(read_manifest(Path(source)).layout))


def _sharing(layout: Layout) -> Layout:
    """The axes of a layout over which ranks share a model: tp and pp."""
    sizes = {"tp": layout.tp, "pp": layout.pp}
    shared = (f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    return Layout.parse(" ".join(shared))


def model_of(source: Path | str, own: str = "") -> tuple[Model, Weights]:
    """Return a saved model on the meta device, and its weights by name.

    The code of a user's model runs only if `own` names it: a checkpoint that comes from
    elsewhere must not choose what is run.
    """
    with _reader_of(source) as reader:
        model = _model_saved_in(reader.manifest, str(source), own)
        weights = dict(SavedWeights(reader))
    return model, weights


def _reader_of(source: Path | str) -> TensorReader:
    name = str(source)
    if name.startswith(HUB):
        return HubReader(Path(model_folder(name.removeprefix(HUB))))
    return TensorReader(Path(source), read_manifest(Path(source)))


def _model_saved_in(manifest: Manifest, source: str, own: str) -> Model:
    """Build the model of a manifest on the meta device."""
    recorded = own_model(manifest)
    if source.startswith(HUB) and code_of(source)[0]:
        recorded = source
    in_file = recorded and not recorded.startswith(HUB)
    if own and not in_file:
        raise GenerateError(
            f"{source} holds no model of a file: leave --model out."
        )
    if in_file and not own:
        raise GenerateError(
            f"{source} holds the model {recorded}, and a checkpoint does not choose which code is run."
            f" Name it yourself: --model {shlex.quote(recorded)}"
        )
    if own or recorded:
        return load_model(own or recorded)
    shape = manifest.shape
    if shape is None or shape.kind != "decoder":
        raise GenerateError(
            f"{source} is not a decoder, so it cannot generate text."
        )
    return build_model(shape)


def run_of(source: str) -> Run:
    """Return a run with the model, data and sequence settings of a checkpoint's run."""
    settings: Any = read_manifest(Path(source)).config.get("run", {})
    plain = Run()
    # Only what decides how text becomes tokens, and tokens sequences.
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
    # Folders of Hugging Face have their tokenizer beside the weights.
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
    # Bytes, if all of the data is bytes; other tokens do not name their texts.
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


def refuse_long_sample(run: Run, shape: Shape) -> None:
    """Raise if the texts of a run would be longer than its model's learned positions."""
    wanted = run.sample
    if not wanted.every or shape.positions != "learned":
        return
    if wanted.tokens >= shape.sequence:
        raise GenerateError(
            f"sample.tokens = {wanted.tokens}: the model has learned {shape.sequence} positions. Write"
            " fewer, with room for the prompt."
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
        # U+FFFD at the end: the character's other bytes are in tokens to come.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    # The last character may be incomplete; it is shown as it is.
    yield vocabulary.decode(tokens)[len(shown) :]
