"""Builds the training step of a layout: a schedule, then the passes, in this order."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..layout import Layout
from ..layout.choices import traits
from ..layout.pieces import StagedPieces
from . import passes
from .ops import (
    AGREE_SCALES,
    BACKWARDS,
    COUNT,
    COUNT_ROUTES,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
)
from .options import StepOptions
from .program import Op, Program, ProgramError, uncollected
from .schedules import refuse_vast, schedule
from .search import search
from .simulate import Costs

DEFAULT = StepOptions()


@uncollected()
def build(
    layout: Layout, pieces: StagedPieces, options: StepOptions = DEFAULT
) -> Program:
    """Build the program of a layout: one training step of a model with these pieces."""
    stages, receivers = pieces.stages, pieces.receivers
    refuse_vast(len(pieces) * layout.microbatches)
    # 1. The order of computing: whole virtual stages, then their pieces.
    order = _order(layout, stages, options)
    program = Program(order.rows, layout.mesh)
    program = passes.expand(program, stages, pieces.tied, pieces.frozen)

    first, each = (
        traits(layout.schedule).forward_first,
        layout.reduce == "micro",
    )
    # A second sum over the replicas follows the one over the shards (HSDP).
    replicas = layout.shards > 1 and layout.mesh.of("dp.replicate") > 1

    # 2. Everything else is placed around the computations, pass by pass.
    def rest(program: Program) -> Program:
        """Add everything that follows from the order of computing."""
        if receivers and (layout.overlap or first):
            program = passes.overlap(
                program, stages, receivers, forward_first=first
            )
        if "activations" in layout.offload:
            program = passes.offload_activations(program)
        program = passes.sum_choices(program, pieces.sums_choices)
        program = _fed(
            layout,
            program,
            receivers,
            pieces.scaled,
            at_once=options.gathers_at_once,
        )
        at_end = not (options.overlaps or each)
        if layout.exact:
            program = passes.sum_in_tree(
                program,
                replicas=layout.copies > layout.shards,
                at_end=at_end,
            )
        else:
            program = passes.reduce(
                program,
                each_microbatch=each,
                replicas=replicas,
                at_end=at_end,
            )
        program = passes.sum_parts(passes.tie(program), pieces.partial)
        program = passes.finish(program, agree=options.agree)
        return passes.matrices(
            program, pieces.matrices if options.whole_matrices else ()
        )

    # 3. The recomputations first: the other passes look at the rank's whole computing.
    if layout.recompute != "fit":
        # A compiled backward recomputes by itself what its graph did not keep.
        inside = layout.compile and layout.recompute == "selective"
        mode = "none" if inside else layout.recompute
        return rest(passes.recompute(program, stages, mode, receivers))
    if options.sizes is None:
        raise ProgramError(
            "recompute:fit needs the bytes that pieces keep and a memory limit."
        )
    # Tries how many pieces to recompute, with all that `rest` adds to memory.
    limits = [options.limit] * len(program.rows)
    return rest(passes.recompute_to_fit(program, options.sizes, limits, rest))


def _order(
    layout: Layout, stages: Sequence[range], options: StepOptions
) -> Program:
    """The schedule: the order in which virtual stages compute."""
    if not traits(layout.schedule).searched:
        return schedule(
            layout.schedule, layout.pp, layout.microbatches, layout.chunks
        )
    # Without costs, the three parts of a microbatch take the same time.
    costs = options.costs or Costs(
        {FORWARD: 1, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: 1}
    )
    whole_stages = _stage_costs(costs, stages)
    return search(
        layout.pp,
        layout.microbatches,
        layout.chunks,
        whole_stages,
        options.held,
    )


def _fed(
    layout: Layout,
    program: Program,
    receivers: Collection[int],
    scaled: Collection[int],
    *,
    at_once: bool = True,
) -> Program:
    """Add operations that bring inputs and weights: exchanges, messages, gathers.

    Weights gathered once a step are in memory together anyway, so all are gathered at
    its start: no pipeline stage then waits for another's gather. `scaled` units have
    scales to agree on.
    """
    program, away = (
        passes.messages(passes.exchange(program, receivers)),
        {*layout.offload},
    )
    if layout.zero or "weights" in away:
        # ZeRO-1 and 2 gather once a step, and the weights stay.
        drop, load = (
            layout.zero == 3 or "weights" in away,
            layout.weights_on_host,
        )
        each = drop and layout.gather == "micro"
        whole = at_once and layout.prefetch and not (each or load)
        # `whole`: so far ahead that all gathers stand at the start of the step.
        ahead = program.pieces if whole else layout.prefetch
        program = passes.gather(
            program, each_use=each, drop=drop, prefetch=ahead, load=load
        )
        program = passes.agree_scales(program, scaled)
    return program


def forward_only(program: Program, layout: Layout) -> Program:
    """The forward operations of a training program in order, with what they need."""
    bare = program.with_rows(
        [op for op in row if op.kind == FORWARD] for row in program.rows
    )
    receivers = _pieces_with(program, COUNT_ROUTES)
    bare = _fed(layout, bare, receivers, _pieces_with(program, AGREE_SCALES))
    return bare.with_rows((Op(COUNT), *row) for row in bare.rows)


def _pieces_with(program: Program, kind: str) -> set[int]:
    """The pieces, or units, that have an operation of this kind."""
    return {op.piece for row in program.rows for op in row if op.kind == kind}


def _stage_costs(costs: Costs, stages: Sequence[range]) -> Costs:
    """Costs of whole virtual stages if pieces differ, because a search orders stages."""
    if not costs.pieces and not costs.share:
        return costs
    # Ranks' factors apply to a whole stage later, so they are left out of the sums.
    flat = replace(costs, ranks={})
    whole = {
        (kind, s): sum(flat.of(Op(kind, p), 0) for p in pieces)
        for s, pieces in enumerate(stages)
        for kind in (FORWARD, *BACKWARDS)
    }
    return Costs(costs.kinds, whole, costs.ranks)
