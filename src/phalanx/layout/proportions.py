"""A small run in the proportions of a real one: the subject of `verify run.toml`.

Every kind of block stays, with the ratios of heads, MLPs and windows. Widths,
layers, vocabulary and mesh axes shrink.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields, replace
from math import ceil
from typing import Any

from .adapters import ADAPTERS, AdapterSizes
from .layout import Layout
from .mesh import Axis, Mesh
from .mixers import shrunk_sizes
from .mlps import mlps_in, shrunk_mlps
from .run import CLASS, Checkpoints, Metrics, Run, Training, Validation
from .shape import HUB, Shape

TOKENS, STEPS, WORDS = 24, 5, 257
SAVED, KEPT = 2, 2  # steps between checkpoints, and checkpoints that are kept
_HEAD = 8  # features of a head
# Keys of a shape that a run sets outside its model.
_OF_THE_RUN = (
    "name",
    "source",
    "freeze",
    *(each.name for each in fields(AdapterSizes)),
)


def small_shape(shape: Shape) -> Shape:
    """The sizes of a model with a few narrow layers of every kind."""
    layers = _layers(shape)
    # Heads in the same proportion, with up to four queries for each KV head.
    per_group = min(4, max(1, shape.heads // shape.kv_heads))
    kv_heads = 1 if shape.kv_heads == 1 else 2
    heads = kv_heads * per_group if shape.heads > 1 else 1
    hidden = 2 * _HEAD * max(2, heads // 2)
    sizes: dict[str, object] = {
        "name": f"{shape.name}-small",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads if shape.heads > 1 else 1,
        "head_dim": _HEAD,
        "ffn": _even(hidden * shape.ffn / shape.hidden),
        "vocab": WORDS,
        "sequence": TOKENS,
        "windows": tuple(
            # A window shrinks with the sequence, but keeps more than the token
            # itself.
            max(2, ceil(width * TOKENS / shape.sequence)) if width else 0
            for width in shape.windows[:layers]
        ),
        "rope_original": max(
            1, shape.rope_original * TOKENS // shape.sequence
        ),
        "freeze": _frozen(shape, layers),
        **{x.rank: min(x.rank_of(shape), x.small_rank) for x in ADAPTERS},
        "source": "",
    }
    if shape.rope_dim:
        sizes |= {"rope_dim": _HEAD // 2}
    sizes |= shrunk_sizes(shape, layers, _HEAD)
    if shape.kv_latent:
        # Latent attention has as many keys as queries.
        sizes |= {"kv_heads": heads, "kv_latent": 12, "rope_dim": _HEAD // 2}
        sizes |= {"q_latent": 10 if shape.q_latent else 0}
        sizes |= {"value_dim": _HEAD - 2 if shape.value_dim else 0}
    sizes |= shrunk_mlps(
        shape, lambda width: _even(hidden * width / shape.hidden)
    )
    return replace(shape, **sizes)  # type: ignore[arg-type]


def _layers(shape: Shape) -> int:
    """The number of layers with each kind of block, at least three if possible."""
    return min(
        shape.layers,
        max(
            3,
            len(shape.windows),
            len(shape.mixers),
            len(mlps_in(shape)),
        ),
    )


def _even(width: float) -> int:
    """A width that tp up to four divides."""
    return min(128, max(16, 8 * round(width / 8)))


def _frozen(shape: Shape, layers: int) -> tuple[str, ...]:
    """The pieces that are not trained, with block numbers in the same proportion."""

    def moved(match: re.Match[str]) -> str:
        return str(min(layers - 1, int(match[0]) * layers // shape.layers))

    return tuple(re.sub("[0-9]+", moved, name) for name in shape.freeze)


def small_layout(layout: Layout) -> Layout:
    """The layout with at most two ranks on each axis, or on each part of one."""
    axes = []
    for axis in layout.mesh.axes:
        parts = tuple(min(part, 2) for part in axis.parts)
        axes.append(Axis(axis.name, parts))
    # At most two microbatches for each stage.
    few = 2 * min(layout.pp, 2)
    count = min(layout.microbatches, few)
    return replace(
        layout, mesh=Mesh(tuple(axes)), microbatches=count, stages=()
    )


def _own_model(own: str) -> str | dict[str, str]:
    """The key of a model made by its own code.

    A model of a folder starts from random weights, not from those in the folder.
    """
    return {CLASS: own} if own.startswith(HUB) else own


def _small_adapters(run: Run, small: Shape) -> dict[str, Any]:
    """The run's tables about adapters, with the ranks of the small model."""
    tables = {}
    for row in ADAPTERS:
        key = row.keys[row.rank].removeprefix(f"{row.key}.")
        rank = {key: row.rank_of(small)}
        tables[row.key] = replace(getattr(run, row.key), **rank)
    return tables


def small_run(
    run: Run,
    shape: Shape,
    layout: Layout,
    out: str,
    own: str = "",
) -> Run:
    """The run with a small model and layout, and few steps over its whole schedule.

    `own` names the small form of a model by its own code; without it, it keeps the
    sizes that it is created with.
    """
    short = replace(shape, sequence=min(TOKENS, shape.sequence))
    small = short if run.own else small_shape(shape)
    few = small_layout(layout)
    o, steps = run.optimizer, run.steps
    # The learning-rate schedule in proportion to the steps that are left.
    warmup = ceil(o.warmup_steps * STEPS / steps)
    if o.warmup_steps > 1:
        # So that the learning rate rises.
        warmup = max(2, min(warmup, STEPS - 2))
    decay = max(1, o.decay_steps * STEPS // steps) if o.decay_steps else 0
    decay = min(decay, STEPS - 1 - warmup)
    # One sequence more than the ranks and microbatches divide.
    batch = few.data * few.microbatches + 1
    table = {
        name: value
        for name, value in asdict(small).items()
        if name not in _OF_THE_RUN
    }
    return replace(
        run,
        model=_own_model(own or run.own) or table | {"batch": batch},
        layout=str(few),
        # The layout's text has the precision already.
        precision="",
        weights="",
        data="python",
        batch=batch,
        microbatch=0,
        sequence=small.sequence
        if run.own or small.positions != "learned"
        else 0,
        steps=STEPS,
        freeze=run.freeze if run.own else " ".join(small.freeze),
        out=out,
        **_small_adapters(run, small),
        optimizer=replace(o, warmup_steps=warmup, decay_steps=decay),
        checkpoint=Checkpoints(
            every=SAVED, keep=KEPT, asynchronous=run.checkpoint.asynchronous
        ),
        # Restarts and copies in memory do not change the numbers.
        train=Training(),
        metrics=Metrics(every=1),
        validation=Validation(batches=2),
    )
