"""Mistakes of a run whose keys are each valid alone.

Keys that contradict each other, missing data, files and packages, and a model that
cannot be trained as the run says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .adapters import ADAPTERS
from .choices import BYTES, GRAPHS, PYTHON, elsewhere
from .codec import FileError, Mistake, Reader
from .files import unmakable
from .layout import Layout
from .legal import legal, nearest
from .mesh import LayoutError
from .optimizers import OPTIMIZERS
from .shape import HUB, Shape, ShapeError
from .source import arguments_of, split_name, syntax_error

if TYPE_CHECKING:
    from .run import Run

# Keys of a shape that belong to the run, not to the model.
_TRAINED = {"freeze": "freeze"}
for _row in ADAPTERS:
    _TRAINED |= _row.keys


def mistakes_of(run: Run) -> Iterator[Mistake]:
    """Yield mistakes between keys that are each valid alone. `place` is a key."""
    yield from _plan(run)
    yield from _files(run)
    if run.weights and (run.own or run.hub):
        what = f"weights = {run.weights!r} with model = {run.model!r}, which has weights of its own"
        yield Mistake(
            "weights", what, "Leave it out, or write a shape's name, as 8b"
        )
    # Built-in decoders alone have these: a user's class has its own way.
    if run.own:
        chosen = [
            row.keys[row.rank]
            for row in ADAPTERS
            if row.sizes(getattr(run, row.key))
        ]
        for place in chosen + ["freeze"] * bool(run.freeze):
            what = f"{place} with model = {run.own!r}, no built-in decoder"
            way_out = (
                "Leave it out; your own class may use requires_grad_(False)"
            )
            yield Mistake(place, what, way_out)
    if run.dropout and run.own:
        what = f"dropout with model = {run.own!r}, no built-in decoder"
        yield Mistake(
            "dropout",
            what,
            "Leave it out; your own class may use phalanx.models.Dropout",
        )
    yield from _preference(run)
    shape = None
    try:
        # Read here again, for the keys of its mistakes.
        if isinstance(run.model, dict) and not run.own:
            words = elsewhere("model").items()
            pointers = {other: f"Write model.{ours}" for other, ours in words}
            reader = Reader(Shape, pointers=pointers)
            reader.table(Shape, {"name": "model", **run.model}, "model.")
            yield from reader.mistakes
        shape = None if run.own else run.shape
    except ShapeError as error:
        # Keys that the run sets on a shape are reported under the run's names.
        for wrong in error.mistakes:
            if wrong.place in _TRAINED:
                yield wrong._replace(place=_TRAINED[wrong.place])
            # Mistakes inside [model] were yielded by the reader above.
            elif not isinstance(run.model, dict):
                what = f"model = {run.model!r}: {wrong.place}: {wrong.what}"
                yield Mistake("model", what, wrong.way_out)
    except LayoutError as error:
        what = f"model = {run.model!r}: {str(error).rstrip('.')}"
        yield Mistake("model", what, "See `phalanx check --help`")
    extra = shape.extra_losses if shape is not None else {}
    for name, value in extra.items():
        if run.loss:
            what = f"loss = {run.loss!r} with {name} = {value}, which adds losses of its own"
            yield Mistake("loss", what, f"Leave {name} out")
    yield from _layout(run, shape)
    for each in run.fallbacks:
        yield from (
            m._replace(place="train.fallback") for m in _layout(each, shape)
        )


def _preference(run: Run) -> Iterator[Mistake]:
    """Yields what does not go with the loss of pairs."""
    if not run.loss:
        return
    if run.own:
        what = f"loss = {run.loss!r} with model = {run.own!r}, no built-in decoder"
        yield Mistake(
            "loss", what, "Write it in your own loop: docs/your-own-loop.md"
        )
    if run.z_loss:
        what = f"z_loss = {run.z_loss:g} with loss = {run.loss!r}"
        yield Mistake("z_loss", what, "Leave it out")
    if run.verify:
        what = f"verify = true with loss = {run.loss!r}, which verify does not know"
        yield Mistake("verify", what, "Leave it out")


def _layout(run: Run, shape: Shape | None) -> Iterator[Mistake]:
    layout = None
    try:
        layout = run.layout_of(shape)
    except FileError as error:
        yield from error.mistakes
    except LayoutError as error:
        what = f"layout = {run.layout!r}: {str(error).rstrip('.')}"
        yield Mistake("layout", what, 'Or write "auto"')
    if layout is not None and layout.exact and run.loss:
        what = f"layout = {run.layout!r} with loss = {run.loss!r}, whose bits have not been compared"
        yield Mistake("layout", what, "Leave exact out")
    graphs = layout is not None and layout.compile == GRAPHS
    # Pairs of answers are kept apart whatever the run says.
    if graphs and (run.document_masks or run.loss):
        what = f"layout = {run.layout!r}: attention inside documents has shapes that depend on the data"
        way_out = "Write document_masks = false, or compile without graphs"
        yield Mistake("layout", what, way_out)
    if shape is not None:
        yield from misfits(run, shape, layout)


def _tokens(run: Run, shape: Shape) -> Iterator[Mistake]:
    if shape.kind != "decoder":
        what = f"model = {run.model!r} is not a decoder, and the data is text"
        decoders = [
            name
            for name in Shape.names()
            if Shape.load(name).kind == "decoder"
        ]
        yield Mistake("model", what, f"Choose one of {', '.join(decoders)}")
        return
    if shape.positions == "learned" and run.sequence > shape.sequence:
        what = f"sequence = {run.sequence}: {shape.name} has learned {shape.sequence} positions"
        yield Mistake(
            "sequence", what, f"Write sequence = {shape.sequence} or less"
        )
    learned = shape.positions == "learned"
    if run.sample.every and learned and run.sample.tokens >= shape.sequence:
        what = f"sample.tokens = {run.sample.tokens}: {shape.name} has learned {shape.sequence} positions"
        yield Mistake(
            "sample.tokens", what, "Write fewer, with room for the prompt"
        )
    named = [path for path, _ in run.sources]
    if PYTHON in named and not run.hub and shape.vocab < BYTES:
        what = f"model = {run.model!r} has a vocabulary of {shape.vocab}, and bytes are {BYTES}"
        yield Mistake("model", what, f"Give it vocab = {BYTES} or more")


def _plan(run: Run) -> Iterator[Mistake]:
    # The number of steps follows from the data, which is not read yet.
    if not run.epochs:  # else the data says how many steps there are
        yield from _schedule(run)
    yield from _optimizer(run)


def _schedule(run: Run) -> Iterator[Mistake]:
    o = run.optimizer
    for name, steps in (
        ("warmup_steps", o.warmup_steps),
        ("decay_steps", o.decay_steps),
    ):
        if steps > run.steps:
            what = f"optimizer.{name} = {steps} is longer than steps = {run.steps}"
            yield Mistake(
                f"optimizer.{name}", what, f"Write {run.steps} or less"
            )
    both = o.warmup_steps + o.decay_steps
    # The decay follows the warmup, so both have to fit.
    if o.schedule == "wsd" and o.warmup_steps <= run.steps < both:
        what = f"optimizer.warmup_steps + optimizer.decay_steps = {both} of steps = {run.steps}"
        way_out = f"Write decay_steps = {run.steps - o.warmup_steps} or less"
        yield Mistake("optimizer.decay_steps", what, way_out)
    if run.profile.steps and run.profile.start + run.profile.steps > run.steps:
        what = f"profile.start + profile.steps = {run.profile.start + run.profile.steps} of {run.steps} steps"
        yield Mistake("profile.start", what, "Profile earlier, or fewer steps")


def _optimizer(run: Run) -> Iterator[Mistake]:
    o = run.optimizer
    if o.decay_steps and o.schedule != "wsd":
        what = f"optimizer.decay_steps = {o.decay_steps} has no effect"
        what += f" with schedule = {o.schedule!r}"
        yield Mistake(
            "optimizer.decay_steps",
            what,
            'Leave it out, or write schedule = "wsd"',
        )
    if o.min_lr is not None and o.min_lr > o.lr:
        what = f"optimizer.min_lr = {o.min_lr:g} is more than lr = {o.lr:g}"
        yield Mistake(
            "optimizer.min_lr", what, "Write a learning rate, up to lr"
        )
    # Keys of other optimizers that differ from their defaults.
    owners = {
        name: row.name
        for row in reversed(OPTIMIZERS.values())
        for name in row.keys
    }
    for name, owner in owners.items():
        value, default = getattr(o, name), getattr(type(o), name)
        # A key that is unset by default may also be 0.
        without_effect = value == default or (default is None and value == 0)
        if name in o.row.keys or without_effect:
            continue
        what = f"optimizer.{name} = {value} has no effect on {o.name}"
        yield Mistake(
            f"optimizer.{name}",
            what,
            f'Leave it out, or write name = "{owner}"',
        )


def _files(run: Run) -> Iterator[Mistake]:
    for path, _ in run.sources:
        named = path.startswith(HUB)  # of the hub: looked for when it is read
        if path != PYTHON and not named and not Path(path).exists():
            what = f"data = {path!r} is not there"
            yield Mistake(
                "data",
                what,
                'Write data = "python" for the built-in text, or a path',
            )
    # Weights are given for all sources or for none.
    if len({weight > 0 for _, weight in run.sources}) != 1:
        beside = "a source without a weight beside one with"
        what = f"data names {beside if run.sources else 'nothing'}"
        yield Mistake(
            "data",
            what,
            'Write data = "a:0.7, b:0.3", or none for all in full',
        )
    for name in ("tensorboard", "wandb", "trackio"):
        if (
            # Looked up without importing: a package may take seconds to load.
            getattr(run.metrics, name)
            and importlib.util.find_spec(name) is None
        ):
            what = f"metrics.{name} = true, and {name} is not installed"
            yield Mistake(
                f"metrics.{name}", what, f"pip install {name}, or leave it out"
            )
    for name, folder in (
        ("out", run.out),
        ("checkpoint.dir", run.checkpoint.dir),
    ):
        if "://" in folder:
            what = f"{name} = {folder!r} is a URL, and a folder of this machine belongs there"
            yield Mistake(
                name, what, "Write checkpoint.remote for what is uploaded"
            )
        elif folder and (why := unmakable(folder)):
            yield Mistake(
                name,
                f"{name} = {folder!r} {why}",
                "Name another folder, or a new one",
            )
    if run.checkpoint.remote:
        yield from _remote(run.checkpoint.remote)
    # Code of the user is checked without being run.
    file = split_name(run.own)[0]
    if file and not Path(file).is_file():
        what = f"model = {run.own!r}: there is no file {file}"
        yield Mistake("model", what, "See docs/bring-your-model.md")
    elif file and (wrong := _unread(run.own)):
        yield Mistake(
            "model", wrong, "Write [model] keys as the class names them"
        )
    elif file and (wrong := syntax_error(file)):
        yield Mistake("model", f"model = {run.own!r}: {wrong}", "Fix it there")
    if run.machine and not Path(run.machine).is_file():
        what = f"machine = {run.machine!r} is not there"
        yield Mistake(
            "machine", what, f"Measure it: phalanx doctor --out {run.machine}"
        )


def _unread(own: str) -> str:
    """Explains why the arguments of FILE.py:Class(...) cannot be read, or returns ""."""
    try:
        arguments_of(own, LayoutError)
    except LayoutError as error:
        return str(error).partition(". ")[0]
    return ""


def _remote(url: str) -> Iterator[Mistake]:
    """Yield the reason why nothing can be uploaded to a URL."""
    place = "checkpoint.remote"
    what, (scheme, separator, _) = f"{place} = {url!r}", url.partition("://")
    if not separator:
        yield Mistake(
            place,
            f"{what} is no URL",
            "Write s3://bucket/run, or leave it out",
        )
    elif importlib.util.find_spec("fsspec") is None:
        what += " needs fsspec, which is not installed"
        yield Mistake(place, what, "pip install 'phalanx[remote]'")
    else:
        try:
            # An unknown scheme, or a known one whose package is missing.
            importlib.import_module("fsspec").get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            yield Mistake(
                place, f"{what}: {str(error).rstrip('.')}", "Or another URL"
            )


def misfits(
    run: Run, shape: Shape, layout: Layout | None
) -> Iterator[Mistake]:
    """Yield reasons why a model of this shape cannot be trained as the run asks."""
    yield from _tokens(run, shape)
    if layout is None or shape.kind != "decoder":
        return
    batch, sequence = shape.batch, run.tokens(shape)
    broken = legal(layout, shape, batch=batch, sequence=sequence)
    # Suggestions after the last violation only: they are the same for all.
    near = (
        nearest(layout, shape, batch=batch, sequence=sequence)
        if broken
        else ()
    )
    hint = f" Nearest that fit: {'; '.join(map(str, near))}." if near else ""
    for violation in broken:
        what = f"layout = {str(layout)!r}: {violation.what.rstrip('.')}"
        last = hint if violation is broken[-1] else ""
        yield Mistake(
            "layout", what, violation.way_out.rstrip(".") + "." + last
        )
