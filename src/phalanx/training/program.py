"""The model of a run and its program in a layout. The model may be the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..cost import sizes_of
from ..layout import Layout, LayoutError, Shape, recipe
from ..layout.choices import FP32
from ..layout.optimizers import USUAL_OPTIMIZER, OptimizerChoice
from ..layout.run import DPO, Run
from ..models.loss import CrossEntropy
from ..parallel import Model, Precision, build_model, load_model
from ..parallel.block_parts import cut_blocks
from ..parallel.preference import give_preference_loss
from ..parallel.rows import model_pieces
from ..program import Program, StepOptions, build, check
from ..program.build import DEFAULT
from ..program.memory import peaks

Maker = Callable[[], Model]


def maker_of(run: Run) -> Maker:
    """Return a function that builds the run's model on the meta device, anew in each
    call."""
    made = (
        partial(load_model, run.own)
        if run.own
        else partial(build_model, run.shape)
    )
    if run.loss == DPO:
        beta = run.dpo.beta
        # Pairs replace the loss; z_loss only adds to the plain one.
        return lambda: give_preference_loss(made(), beta)
    return partial(with_z_loss, made, run.z_loss) if run.z_loss else made


def with_z_loss(make: Maker, z: float) -> Model:
    """Build the model with z log(Z)^2 added to each token's loss."""
    model = make()
    modules = [
        module for _, piece in model.pieces for module in piece.modules()
    ]
    losses = [module for module in modules if isinstance(module, CrossEntropy)]
    if not losses:
        raise LayoutError(
            f"z_loss = {z}, and the model has no phalanx.models.loss.CrossEntropy that it could be added to."
            " Add it in the model's own loss, or leave z_loss out."
        )
    for loss in losses:
        loss.z = z
    return model


def shape_of(run: Run) -> Shape:
    """Return the sizes of a run's model. The user's own model file is run to find
    them."""
    if not run.own:
        return run.shape
    plain = load_model(run.own).shape
    if plain is None:
        raise LayoutError(
            f"{run.own}: describe() returns no shape; add shape=Shape(...) to its Model."
        )
    return run.sized(plain)


def layout_for(run: Run, ranks: int) -> Layout:
    """Return a run's layout for this number of ranks; for `auto` the recipe's, as only
    the command plans."""
    shape = shape_of(run)
    layout = run.for_ranks(ranks).layout_of(shape)
    # "auto": the command would have passed a layout; a rank has the recipe
    # alone.
    if layout is None:
        tokens = run.tokens(shape)
        precision = run.precision or FP32
        made = recipe(
            shape,
            ranks,
            batch=shape.batch,
            sequence=tokens,
            precision=precision,
        )
        layout = run.divided(made, shape.batch)
    if layout.ranks != ranks:
        raise LayoutError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks, and there are {ranks}."
            " Set train.fallback to layouts for other numbers of ranks."
        )
    return layout


def program_of(
    model: Model, layout: Layout, options: StepOptions = DEFAULT
) -> Program:
    """Build and check the program of a layout for this model."""
    program = build(layout, model_pieces(model, layout), options)
    check(program)
    return program


def fitting_program(
    make: Maker,
    layout: Layout,
    batch: Mapping[str, Tensor],
    precision: Precision,
    limit: Callable[[float], float],
    options: StepOptions = DEFAULT,
    optimizer: OptimizerChoice = USUAL_OPTIMIZER,
) -> Program:
    """Build the program of a `recompute:fit` layout.

    `limit` returns the bytes that a rank may hold, given those of the fullest rank
    without any recomputation.
    """
    # Sizes of all pieces without recomputation, from which a selection is
    # made.
    model = cut_blocks(make(), layout)
    plain = program_of(model, replace(layout, recompute="none"), options)
    sizes = sizes_of(
        make, layout, plain, batch, precision, optimizer=optimizer
    )
    most = limit(max(peak.total for peak in peaks(plain, sizes)))
    return program_of(model, layout, replace(options, sizes=sizes, limit=most))
