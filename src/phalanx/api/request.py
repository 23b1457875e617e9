"""The user's request: a model by name, a layout that fits it, hardware by name, and all
that a plan needs.

Nothing here loads torch, except for a model in the user's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..cost import cached_costs
from ..layout import (
    Layout,
    LayoutError,
    Run,
    Shape,
    StagedPieces,
    legal,
    nearest,
    staged_pieces,
)
from ..layout.choices import BF16, FP32, MATMUL_WORDS
from ..layout.families import code_of
from ..layout.numbers import bytes_text
from ..layout.optimizers import ADAMW
from ..layout.run import run_file, shape_named
from ..layout.source import name_of_class, names_source, refuse_broken
from ..planner import Machine, cluster
from ..planner.hardware import Hardware, hardware_of
from ..planner.local import hardware_of_machine, profile_for
from ..planner.step import Choice, Pricer, Request
from ..program import StepOptions, options_for
from . import UsageError

if TYPE_CHECKING:
    from ..parallel import Model


def misfit(
    layout: Layout, shape: Shape, *, batch: int = 0, sequence: int = 0
) -> str:
    """Return every reason why a layout does not fit a model and the nearest that do, or
    "" if it fits."""
    violations = legal(layout, shape, batch=batch, sequence=sequence)
    if not violations:
        return ""
    near = nearest(layout, shape, batch=batch, sequence=sequence)
    reasons = "".join(f"\n- {violation}" for violation in violations)
    way_out = (
        f"Nearest that fit: {'; '.join(map(str, near))}."
        if near
        else "No similar layout fits."
    )
    # One reason a line, as several rules often refuse the same layout.
    return f"{layout} does not fit {shape.name}:{reasons}\n{way_out}"


def refuse_illegal(
    layout: Layout, shape: Shape, *, batch: int = 0, sequence: int = 0
) -> None:
    """Raise with every reason why a layout does not fit a model."""
    if wrong := misfit(layout, shape, batch=batch, sequence=sequence):
        raise LayoutError(wrong)


def in_precision(words: str, precision: str) -> Layout:
    """Parse a layout, in this precision unless it names its own."""
    layout = Layout.parse(words)
    return (
        layout
        if "precision" in Layout.written(words)
        else replace(layout, precision=precision)
    )


def named_model(model: object) -> str | Shape:
    """Return a model's name or shape; of a class FILE.py:Class."""
    if isinstance(model, str | Shape):
        return model
    if isinstance(model, type):
        return name_of_class(model, UsageError)
    kind = type(model).__name__
    raise UsageError(
        f"a model is a name, a Shape or a class here, and this is a {kind}. Name how it is made,"
        f" 'FILE.py:{kind}(n_layer=6)'; phalanx.prepare takes a module."
    )


def model_of(name: str) -> tuple[Shape, Callable[[], Model] | None]:
    """Return the shape of --model, which may be a run file, and a function that makes
    the user's own model.

    A user's model file is executed, as only it knows the model's sizes.
    """
    # A shape by name, a TOML file or a run file without code: torch is not
    # needed.
    if not code_of(name)[0]:
        return shape_named(name), None
    # Broken imports are reported before torch is loaded, which takes seconds.
    if names_source(name):
        refuse_broken(name, LayoutError)
    from ..parallel.load import load_model

    make = partial(load_model, name)
    shape = make().shape
    if shape is None:
        raise LayoutError(
            f"{name}: describe() returns no shape; add shape=Shape(...) to its Model."
        )
    return shape, make


@dataclass(frozen=True)
class RunStep:
    """The step of a run: a layout, the model it is for, and the run's options.

    `make` builds a user's own model, whose modules then define its pieces. `batch` and
    `sequence` are those of the run; 0 means the model's.
    """

    layout: Layout
    shape: Shape
    optimizer: str = ADAMW
    make: Callable[[], Model] | None = None
    model: str = ""  # FILE.py:Class of the user's own model
    batch: int = 0
    sequence: int = 0
    # False if the layout names no precision; on a GPU it may then be bf16
    has_precision: bool = True

    @property
    def options(self) -> StepOptions:
        return options_for(self.optimizer)

    @cached_property
    def pieces(self) -> StagedPieces:
        if self.make is None:
            return staged_pieces(self.layout, self.shape)
        from ..parallel.rows import model_pieces

        # Units of a user's model come from its modules, not from a table of a
        # decoder.
        return model_pieces(self.make(), self.layout)

    def refuse_unfit(self) -> None:
        """Raise if the layout would change what a user's own model computes."""
        if self.make is not None:
            from ..parallel import refuse_mixing, refuse_unfit

            own = self.make()
            refuse_unfit(own, self.layout)
            refuse_mixing(own, self.layout)


def run_named(what: object, model: object = "") -> Run | None:
    """Return the run if one was named in place of a layout: a run, or the path of its
    file."""
    if isinstance(what, Run):
        run: Run | None = what
    elif isinstance(what, str) and what.endswith(".toml"):
        run = Run.load(what)
    else:
        return None
    if model:
        raise UsageError(
            "--model cannot be combined with a run file. Set its key: model=NAME."
        )
    return run


def refuse_beside_run(**given: object) -> None:
    """Raise if an argument was given that is a key of the run."""
    keys = {"seq": "sequence", "optimizer": "optimizer.name"}
    for name, value in given.items():
        if value:
            key = keys.get(name, name)
            raise UsageError(
                f"--{name} cannot be combined with a run file. Set its key: {key}={value}."
            )


def step_of_run(run: Run) -> RunStep:
    """Return the step that a run trains with."""
    shape, make = model_of(run.own) if run.own else (run.shape, None)
    # A model of the user's own takes batch and sequence from the run, a shape
    # has its own.
    shape = run.sized(shape) if run.own else shape
    layout = run.layout_of(shape)
    if layout is None:
        raise UsageError(
            'layout = "auto" is resolved when the run starts. Name a layout: layout="dp2 tp2".'
        )
    return RunStep(
        layout,
        shape,
        run.optimizer.name,
        make,
        run.own,
        batch=shape.batch,
        sequence=run.tokens(shape),
    )


def step_of_layout(
    layout: str | Layout,
    model: str | Shape | type,
    *,
    optimizer: str = "",
    batch: int = 0,
    sequence: int = 0,
) -> RunStep:
    """Return the step of a layout for a model. The optimizer is that of a run file that
    names the model."""
    model = named_model(model)
    run = None if isinstance(model, Shape) else run_file(model)
    shape, make = (
        (model, None) if isinstance(model, Shape) else model_of(model)
    )
    optimizer = optimizer or (run.optimizer.name if run else ADAMW)
    # the balance of stages depends on the sequence length
    if sequence and shape.positions != "learned":
        shape = replace(shape, sequence=sequence)
    own = str(model) if make else ""
    # Layouts do not remember whether a precision was written, but a GPU's
    # default depends on it.
    named = "precision" in Layout.written(str(layout))
    parsed = Layout.parse(str(layout))
    return RunStep(
        parsed,
        shape,
        optimizer,
        make,
        own,
        batch,
        sequence,
        has_precision=named,
    )


def ways_refused(make: Callable[[], Model]) -> frozenset[str]:
    """Return the ways among tp, seq, ring and ulysses that would change what a user's
    model computes."""
    from ..parallel import fitting

    model = make()
    heads = model.counts.get("heads", 2)
    # The smallest tp that divides the heads: 2 for 12 heads, 3 for 9. A single
    # head gets 2, which is refused.
    tp = next((n for n in range(2, heads + 1) if heads % n == 0), 2)
    ways = {
        "tp": f"tp{tp}",
        "seq": f"tp{tp} seq",
        "ring": "cp2",
        "ulysses": "cp2:ulysses",
    }
    # A way that fits in its smallest form is taken to fit: misfits do not
    # depend on sizes.
    return frozenset(
        way
        for way, text in ways.items()
        if not fitting(model, [Layout.parse(text)])
    )


@dataclass(frozen=True)
class Where:
    """Named hardware, with the names of its devices in the catalogue and by their
    driver."""

    hardware: Hardware
    device: str
    kind: str
    names: tuple[str, ...]


def where(
    cluster_: str | None, file: str | None, ranks: int = 0, backend: str = ""
) -> Where:
    """Return the hardware that --cluster or --machine names, for this many ranks.

    `this` or nothing means machine.toml.
    """
    if cluster_ == "this":
        cluster_ = None
    if cluster_ and (file or backend):
        what = (
            "--machine exclude each other"
            if file
            else "--backend, which is for a machine file, exclude each other"
        )
        raise UsageError(f"--cluster and {what}; name one.")
    if cluster_:
        found = cluster(cluster_)
        if ranks > found.size:
            raise UsageError(
                f"{ranks} ranks do not fit: {cluster_} has {found.size} devices."
            )
        # The names under which a driver reports this device, to recognize a
        # machine that has it.
        names = (found.device, *found.kind.drivers)
        return Where(hardware_of(found, ranks), found.device, "cuda", names)
    file = file or "machine.toml"
    if not Path(file).is_file():
        raise UsageError(
            f"there is no machine file {file}. Measure one: phalanx doctor --out {file};"
            " or name a cluster: --cluster h100x64."
        )
    machine = Machine.load(file)
    hardware = hardware_of_machine(machine, ranks, backend)
    return Where(hardware, machine.catalogue, machine.kind, (machine.device,))


def request_for(
    shape: Shape,
    hardware: Hardware,
    *,
    batch: int = 0,
    sequence: int = 0,
    precision: str | None = "",
    model: str = "",
    profile: str | None = None,
    optimizer: str = ADAMW,
) -> Request:
    """Build the planner's request, for our own software or a named profile.

    The precision is bf16 on a GPU unless `precision` names another; an fp8 matmul
    format is tried beside it.
    """
    # "fp8" is a format of matmuls alone; the rest has the device's default
    # precision.
    matmul = MATMUL_WORDS.get(precision or "", "")
    precision = (precision if not matmul else "") or (
        # Only CPUs have `cores`.
        FP32 if hardware.cores else BF16
    )
    sequence = sequence or shape.sequence
    # A shape's batch and sequence are its defaults, not properties of its
    # weights.
    if shape.positions != "learned":
        shape = replace(shape, sequence=sequence)
    software = profile_for(hardware, profile, precision, optimizer=optimizer)
    # Costs are looked up when the search first needs them, and kept between
    # runs.
    costs = partial(cached_costs, target=hardware.target)
    batch = batch or shape.batch
    return Request(
        shape,
        hardware,
        software,
        costs,
        sequence,
        batch,
        precision,
        matmul,
        model=model,
    )


def held(request: Request, layout: Layout) -> Choice:
    """Return the memory of a layout's ranks as `plan --explain` prints it, without
    times."""
    return Pricer(replace(request, precision=layout.precision)).choose(
        layout, 0.0
    )


def held_text(kinds: Mapping[str, float]) -> str:
    """`50.7 GB on the fullest rank: weights 2.27 GB, gradients 4.54 GB, ...`."""
    parts = ", ".join(
        f"{kind} {bytes_text(size)}" for kind, size in kinds.items() if size
    )
    return f"{bytes_text(sum(kinds.values()))} on the fullest rank: {parts}"


def verdict(least: float, most: float, memory: float) -> str:
    """Say whether the bytes fit, for the range that allocator fragmentation causes."""
    if least > memory:
        return "does not fit"
    return "may not fit" if most > memory else "fits"


def range_text(least: float, most: float) -> str:
    """`53.1 to 58.2 GB`."""
    return f"{bytes_text(least).removesuffix(' GB')} to {bytes_text(most)}"
