"""A run on the command line: its file and `key=value`, in the same words for every command."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace

from ..layout.run import Adopt, Run
from .usage import UsageError

# The keys of a run file. Layouts have `=` only behind a colon: recompute:every=2.
_KEYS = "|".join(field.name for field in fields(Run))
_KEY = re.compile(rf"({_KEYS})(\.[a-z_]+)*=")


def load_run(words: Sequence[str], adopt: Adopt | None = None) -> Run:
    """The run of a file, or of nothing, and of the keys that are set beside it."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UsageError(
            f"{' and '.join(files)}: name one run file; keys are set by key=value."
        )
    overrides = tuple(word for word in words if "=" in word)
    return Run.load(files[0] if files else "", overrides, adopt)


def run_of_words(words: Sequence[str], layout: str | None = None) -> Run | None:
    """The run that words name which may also be a layout; None if they name no run. `layout` is that of
    `--layout`."""
    if not any(word.endswith(".toml") or _KEY.match(word) for word in words):
        if layout is not None:
            raise UsageError(
                "--layout goes with a run file. Write the layout itself in its place."
            )
        return None
    own = [] if layout is None else [f"layout={layout}"]
    return load_run([*words, *own], adopted_model)


def adopted_model(plain: Run) -> Run:
    """A run that names no model continues with the model of its newest checkpoint."""
    return adopted(plain)[0]


def adopted(run: Run) -> tuple[Run, str]:
    """A run that names no model goes on with that of its newest checkpoint, trained or imported."""
    if not run.checkpoints.is_dir():
        return run, ""
    from ..train.checkpoint_load import differing_sizes, newest, own_model, table_of

    saved = newest(run.checkpoints)
    if saved is None:
        return run, ""
    path, manifest = saved
    if own := own_model(manifest):
        raise UsageError(
            f"{path} is of the model {own!r}, and the run names none. Write model={own!r}: code is"
            " never run because a checkpoint names it."
        )
    shape = manifest.shape
    if shape is None or not differing_sizes(shape, run.shape):
        return run, ""
    text = f"model: {shape.name!r} with {shape.layers} layers, as {path} has it"
    return replace(run, model=table_of(shape)), text
