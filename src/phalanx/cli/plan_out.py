"""A run file with a planned layout, for `phalanx train`."""

from __future__ import annotations

from pathlib import Path

from ..layout import Layout, Run
from .plan_figures import Asked
from .usage import UsageError

__all__ = ["write_run"]


def write_run(path: str, asked: Asked, layout: Layout) -> None:
    """The run of a model in this layout; steps and data are left to be said."""
    if Path(path).suffix != ".toml":
        raise UsageError(f"--out {path}: a run file ends in .toml.")
    run = Run.parse(
        f'model = "{asked.own or asked.shape.name}"\nlayout = "{layout}"\n'
        f"batch = {asked.batch}\nsequence = {asked.sequence}\n",
        path,
    )
    try:
        Path(path).write_text(str(run), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from None
