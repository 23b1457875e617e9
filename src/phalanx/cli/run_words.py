"""Runs on the command line: a run file and `key=value`, parsed alike for every
command."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace

from ..layout.run import Adopt, Run
from .usage import UsageError

# The keys of a run file. In a layout `=` occurs only after a colon: recompute:every=2.
_KEYS = "|".join(field.name for field in fields(Run))
_KEY = re.compile(rf"({_KEYS})(\.[a-z_]+)*=")


def load_run(words: Sequence[str], adopt: Adopt | None = None) -> Run:
    """Return the run of a file, if any, with the keys that are set beside it."""
    # A key has "=", a file has none.
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise UsageError(
            f"{' and '.join(files)}: name one run file; keys are set by key=value."
        )
    overrides = tuple(word for word in words if "=" in word)
    return Run.load(files[0] if files else "", overrides, adopt)


def run_of_words(
    words: Sequence[str], layout: str | None = None
) -> Run | None:
    """Return the run that words name, or None if they name a layout. `layout` is the
    value of `--layout`."""
    # "steps=5" names a run; "dp2 tp2" a layout.
    if not any(word.endswith(".toml") or _KEY.match(word) for word in words):
        if layout is not None:
            raise UsageError(
                "--layout needs a run file. Write the layout itself instead."
            )
        return None
    own = [] if layout is None else [f"layout={layout}"]
    return load_run([*words, *own], adopted_model)


def adopted_model(plain: Run) -> Run:
    """Let a run that names no model continue with the model of its newest
    checkpoint."""
    return adopted(plain)[0]


def adopted(run: Run) -> tuple[Run, str]:
    """Let a run that names no model continue with its newest checkpoint's; also return
    a notice."""
    # A run that has not begun has no model to continue with.
    if not run.checkpoints.is_dir():
        return run, ""
    from ..training.checkpoint_load import (
        differing_sizes,
        newest,
        own_model,
        table_of,
    )

    saved = newest(run.checkpoints)
    if saved is None:
        return run, ""
    path, manifest = saved
    # Never run code because a file in the folder names it.
    if own := own_model(manifest):
        raise UsageError(
            f"{path} has the model {own!r}, but the run names none. Write model={own!r}: code is"
            " never run because a checkpoint names it."
        )
    shape = manifest.shape
    # The run's own sizes fit already.
    if shape is None or not differing_sizes(shape, run.shape):
        return run, ""
    text = (
        f"model: {shape.name!r} with {shape.layers} layers, as {path} has it"
    )
    return replace(run, model=table_of(shape)), text
