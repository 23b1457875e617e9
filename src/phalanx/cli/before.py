"""Checks that catch a command's early failures before torch is loaded or a process is
started."""

import os
from pathlib import Path

from ..layout import Layout, Run, RunError, Shape, legal
from ..layout.choices import DTYPES, FP32, LOCAL_RANKS, PYTHON
from ..layout.codec import Mistake
from ..layout.environment import launched
from ..layout.files import open_regular, reason
from ..layout.host import machine_memory
from ..layout.pieces import staged_pieces
from ..layout.run import refuse_random_by_name
from ..layout.source import names_source
from ..layout.state_bytes import engine_state, held_bytes
from ..layout.url import Url
from ..program import build, check, refuse_own
from ..program.options import options_of
from .usage import UsageError

GIB = 2**30


def refuse_before(run: Run) -> None:
    """Raise with everything that is wrong with a run's schedule, memory and journal."""
    refuse_random_by_name(run)
    shape = None if run.own else run.shape
    layout = run.layout_of(shape)
    if layout is not None and names_source(layout.schedule):
        # A user's schedule is run once here; otherwise every rank would report its
        # errors.
        refuse_own(layout)
        # `legal` reports its own violations later, with ways out.
        if (
            shape is not None
            and layout.recompute != "fit"
            and not legal(layout, shape)
        ):
            check(build(layout, staged_pieces(layout, shape), options_of(run)))
    wrong: list[Mistake] = []
    elsewhere = launched(
        os.environ
    )  # under a launcher, other machines run ranks too
    if layout is not None and not elsewhere and layout.ranks > LOCAL_RANKS:
        many = f"{layout.ranks:,} ranks; one machine starts {LOCAL_RANKS}"
        what = f"layout = {run.layout!r} has {many}"
        raise RunError(
            "run",
            [Mistake("layout", what, "Start more with torchrun or Slurm")],
        )
    # A GPU's memory is not known before torch is loaded, so this is about
    # CPUs.
    if not _has_gpu():
        if layout is not None and layout.recompute == "fit" and not run.memory:
            what = f"layout = {run.layout!r}: how much a rank may hold is not known without a GPU"
            wrong.append(
                Mistake(
                    "layout",
                    what,
                    "Write memory = 2.5 (GiB), or recompute:all",
                )
            )
        if shape is not None and not elsewhere:
            wrong += _memory(run, shape, layout)
    wrong += _variables(Url(run.checkpoint.remote))
    wrong = wrong or _journal(Path(run.out, "metrics.jsonl"))
    if wrong:
        raise RunError("run", wrong)
    # Opened here once, so that damaged data is reported before any rank
    # starts.
    for path in (path for path, _ in run.sources if path != PYTHON):
        from ..training.data.token_files import open_corpus

        open_corpus(path)


def refuse_large(need: float, what: str, way_out: str) -> None:
    """Raise if this machine cannot hold `need` bytes."""
    # A GPU's memory is unknown without torch, but no GPU has a TiB.
    have = max(machine_memory(), 2.0**40 if _has_gpu() else 0)
    if need > have:
        raise UsageError(
            f"{what} needs at least {need / GIB:,.0f} GiB, but this machine has"
            f" {have / GIB:,.0f} GiB. {way_out}."
        )


def _has_gpu() -> bool:
    return any(
        Path(device).exists()
        for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    )


def _memory(run: Run, shape: Shape, layout: Layout | None) -> list[Mistake]:
    """Explain why this machine cannot hold all ranks.

    The estimate is a lower bound, so a run refused here could not have started.
    """
    have = machine_memory()
    # Bytes of one rank, times the ranks that are on this machine.
    precision = (layout.precision if layout else "") or FP32
    dtype = DTYPES[precision]
    buffers = engine_state(precision, run.optimizer.fewest_moments)
    # Offloaded state is in this machine's memory, too.
    cut = Layout(layout.mesh, zero=layout.zero) if layout else Layout()
    held = held_bytes(cut, buffers)
    # Ranks that hold a part of each weight.
    copies = layout.copies if layout else 1
    gradient = held.gradient
    # ZeRO-2 and 3 hold shards of the gradient, not whole ones.
    if layout and layout.zero >= 2 and held.gradient_shard:
        gradient = held.gradient_shard
    state = shape.total * copies * (held.weight + gradient + held.optimizer)
    name = shape.name if isinstance(run.model, dict) else run.model
    if state > have:
        what = (
            f"model = {name!r} takes {state / GIB:,.0f} GiB for weights, gradients and optimizer"
            f" state of {run.layout!r}, and this machine has {have / GIB:,.0f} GiB"
        )
        way_out = "Take a smaller model, fewer ranks or zero3; `phalanx plan` finds a cluster"
        return [Mistake("model", what, way_out)]
    tokens = (
        shape.batch
        * run.tokens(shape)
        # Sequences of one microbatch.
        / (layout.microbatches if layout else shape.batch)
    )
    # Recomputation keeps one block's input at a time, at least.
    blocks = (
        1 if layout is None or layout.recompute != "none" else shape.layers
    )
    # the least that a block keeps: its input
    inputs = tokens * shape.hidden * min(4, dtype.bytes) * blocks
    if inputs > have:
        what = (
            f"batch = {shape.batch:,} with sequence = {run.tokens(shape):,} keeps"
            f" {inputs / GIB:,.0f} GiB between forward and backward, and this machine has"
            f" {have / GIB:,.0f} GiB"
        )
        return [
            Mistake(
                "batch",
                what,
                "Write a smaller batch, or more microbatches: accum:16",
            )
        ]
    return []


def _variables(url: Url) -> list[Mistake]:
    """Report environment variables that a URL refers to and that are not set."""
    return [
        Mistake(
            "checkpoint.remote",
            f"checkpoint.remote = {str(url)!r}: the environment variable {name} is not set",
            f"Write `export {name}=...` before the command, or the whole URL as checkpoint.remote=URL",
        )
        for name in url.unset
    ]


def _journal(path: Path) -> list[Mistake]:
    """Explain why a run's journal cannot be appended to."""
    if not os.path.lexists(path):
        return []
    try:
        # A link is not followed: in a folder from elsewhere it could lead to any file
        # of the user's.
        open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW).close()
    except OSError as error:
        why = "it is a link" if path.is_symlink() else reason(error)
        what = f"{str(path)!r} cannot be written: {why}"
        return [Mistake("out", what, "Remove it, or name another folder")]
    return []
