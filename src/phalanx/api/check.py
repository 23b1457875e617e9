"""Checks a layout against a model: every reason why it does not fit, and the memory of
its ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from ..drawing import text_table
from ..drawing.words import wrapped
from ..layout import (
    Layout,
    Run,
    Shape,
    StagedPieces,
    Violation,
    legal,
    nearest,
)
from ..layout.numbers import bytes_text, count_text, si_text
from ..layout.optimizer_row import MatrixRow
from ..planner.case import ranks_of
from ..planner.hardware import Hardware, hardware_of
from ..planner.link import whole_servers
from ..planner.matrices import owners_work, row_matrices
from ..planner.step import Request
from ..program import Program, Proof, build
from ..program import check as checked
from . import UsageError
from .request import (
    RunStep,
    held,
    held_text,
    misfit,
    range_text,
    refuse_beside_run,
    request_for,
    run_named,
    step_of_layout,
    step_of_run,
    verdict,
    where,
)
from .sharding import LowerStage, less_sent_text, lower_stages
from .step import many


@dataclass(frozen=True)
class Checked:
    """The result of checking a layout against a model. Prints like `phalanx check`.

    `figures` are those of `--json`. `fits`: the layout is legal, and fits in the memory
    of the named device. `right`: it is legal, and its sums over ranks have no fault, if
    they were checked.
    """

    layout: Layout
    shape: Shape
    figures: Mapping[str, Any]
    violations: tuple[Violation, ...] = ()
    nearest: tuple[Layout, ...] = ()
    refusal: str = field(default="", repr=False)

    @property
    def legal(self) -> bool:
        return not self.violations

    @property
    def fits(self) -> bool:
        return bool(self.legal and self.figures.get("fits", True))

    @property
    def right(self) -> bool:
        return self.legal and not self.figures.get("faults_of_sums")

    @property
    def memory(self) -> dict[str, float]:
        """Bytes of the fullest rank, by kind."""
        kinds = self.figures.get("memory_by_kind_gb", {})
        return {kind: 1e9 * size for kind, size in kinds.items()}

    def __str__(self) -> str:
        return self.refusal or _text(self.layout, self.shape, self.figures)

    __repr__ = __str__  # shown by notebooks


def check(
    layout: str | Layout | Run,
    model: str | Shape | type = "",
    *,
    batch: int = 0,
    sequence: int = 0,
    device: str = "",
    cluster: str = "",
    optimizer: str = "",
    clip: bool = False,
    sums: bool = False,
) -> Checked:
    """Check that a layout fits a model, and compute the bytes of its fullest rank.

    `layout` may be a run or a run file; then its step is checked. `model` is the name
    of a shape, a .toml file, hf:FOLDER or FILE.py:Class. `batch` is in sequences,
    `sequence` in tokens; 0 means the model's. With `device` or `cluster` the bytes are
    compared with its memory. `optimizer` defaults to that of a run file, else adamw.
    `clip` has no effect: every run computes the gradient norm. `sums` finds sums over
    ranks that are missing, made twice or over the wrong axis, in the operations that
    train; this loads torch.

    check("dp2 pp4 tp2 1f1b:8", "8b", device="h100").fits
    check("run.toml").memory
    """
    del clip
    run = run_named(layout, model)
    if run is not None:
        refuse_beside_run(batch=batch, sequence=sequence, optimizer=optimizer)
        step = step_of_run(run)
    else:
        assert not isinstance(layout, Run)
        step = step_of_layout(
            layout, model, optimizer=optimizer, batch=batch, sequence=sequence
        )
    layout, shape = step.layout, step.shape
    step.refuse_unfit()
    sizes = {"batch": step.batch, "sequence": step.sequence}
    # A refusal is a result, not an error: a notebook shows the reasons and the
    # layouts that do fit.
    if wrong := misfit(layout, shape, **sizes):
        violations = tuple(legal(layout, shape, **sizes))
        near = tuple(nearest(layout, shape, **sizes))
        reasons = [
            {"rule": v.rule, "what": v.what, "way_out": v.way_out}
            for v in violations
        ]
        refused = {
            "legal": False,
            "violations": reasons,
            "nearest": [*map(str, near)],
        }
        return Checked(layout, shape, refused, violations, near, wrong)
    request = request_for(
        shape,
        _hardware(layout, device, cluster),
        batch=step.batch,
        sequence=step.sequence,
        model=step.model,
        optimizer=step.optimizer,
    )
    # The precision that a layout names wins; otherwise that of the device,
    # bf16 on a GPU.
    precision = layout.precision if step.has_precision else request.precision
    figures = _figures(step, request, replace(layout, precision=precision))
    # This check runs operations of a model; without it, a shape by name needs
    # no torch.
    if sums:
        from ..parallel import build_model
        from ..verification import placement_faults

        make = step.make or partial(build_model, shape)
        figures["faults_of_sums"] = [
            *placement_faults(make, layout, step.options)
        ]
    return Checked(layout, shape, figures)


def _hardware(layout: Layout, device: str, cluster: str) -> Hardware:
    """Return the named hardware; without a name, memory is unlimited."""
    if cluster and device:
        raise UsageError(
            "--cluster and --device exclude each other; name one."
        )
    if cluster:
        return where(cluster, None, layout.ranks).hardware
    # The bytes are those of a GPU; without a name no verdict is given on
    # whether they fit.
    hardware = hardware_of(
        whole_servers(device or "h100", layout.ranks), layout.ranks
    )
    return hardware if device else replace(hardware, name="", memory=math.inf)


def proved_program(step: RunStep) -> Program:
    """Build the program that is checked: the run's own.

    What `recompute:fit` recomputes depends on bytes that are unknown here; everything
    else is checked, without recomputation.
    """
    fitting = step.layout.recompute == "fit"
    layout = replace(step.layout, recompute="none") if fitting else step.layout
    return build(layout, step.pieces, step.options)


def _figures(
    step: RunStep, request: Request, priced: Layout
) -> dict[str, Any]:
    layout, shape = step.layout, step.shape
    program = proved_program(step)
    proof = checked(program)
    return {
        "legal": True,
        "layout": str(layout),
        "model": shape.name,
        "ranks": layout.ranks,
        # Elements, as are the two counts below; routed experts count whole in
        # `parameters` only.
        "parameters": sum(row.numel for row in step.pieces.rows),
        "active_parameters": shape.active,
        "trained_parameters": sum(
            row.trained_numel for row in step.pieces.rows
        ),
        "operations": sum(map(len, program.rows)),
        "virtual_stages": [
            [stage.start, stage.stop] for stage in step.pieces.stages
        ],
        "stages": [
            _held(step, program, proof, row) for row in range(layout.pp)
        ],
    } | _memory(request, priced, step.pieces)


def _memory(
    request: Request, layout: Layout, pieces: StagedPieces
) -> dict[str, Any]:
    """Return the memory of the fullest rank, compared with a device's."""
    # Bytes: expected, and the range between no fragmentation and the usual
    # one.
    choice = held(request, layout)
    kinds, range_ = choice.memory, choice.range(request.profile)
    figures: dict[str, Any] = {
        "precision": layout.precision,
        "batch": request.batch,
        "sequence": request.sequence,
        "memory_gb": sum(kinds.values()) / 1e9,
        "memory_by_kind_gb": {
            kind: size / 1e9 for kind, size in kinds.items()
        },
        "memory_range_gb": [size / 1e9 for size in range_],
    }
    if smaller := _one_sequence(request, layout, figures["memory_gb"]):
        figures["one_sequence"] = smaller
    if request.hardware.name:
        memory = request.hardware.memory
        figures |= {"device": request.hardware.name, "device_gb": memory / 1e9}
        # By the lower end of the range: what fits only without fragmentation
        # is a `may not fit`, not a refusal.
        figures["fits"] = range_[0] <= memory
    if lower := lower_stages(request, layout):
        figures["sends_less"] = [
            _lower_stage(request, stage) for stage in lower
        ]
        figures["less_sent"] = less_sent_text(
            layout, lower, request.hardware.memory
        )
    if update := request.profile.matrix_row:
        figures["matrix_updates"] = _owners_work(
            update, request, layout, pieces
        )
    return figures


def _one_sequence(
    request: Request, layout: Layout, memory_gb: float
) -> dict[str, Any] | None:
    """Return the layout with one sequence per microbatch, and its memory.

    None if the batch is divided into microbatches already, or if dividing it takes at least
    half the memory.
    """
    rows = request.batch // layout.data
    # Already divided, or too few sequences to divide.
    if layout.microbatches > 1 or rows < 2:
        return None
    other = replace(layout, microbatches=rows)
    smaller = sum(held(request, other).memory.values()) / 1e9
    if smaller > memory_gb / 2:
        return None
    return {"layout": str(other), "memory_gb": smaller, "sequences": rows}


def _lower_stage(request: Request, stage: LowerStage) -> dict[str, Any]:
    """Describe a lower ZeRO stage that sends less, and whether it fits on the
    device."""
    # Expected bytes; `fits` below requires the upper end of the range too.
    figures: dict[str, Any] = {
        "layout": str(stage.layout),
        "memory_gb": stage.expected / 1e9,
    }
    if request.hardware.name:
        figures["fits"] = stage.fits(request.hardware.memory)
    return figures


def _owners_work(
    update: MatrixRow, request: Request, layout: Layout, pieces: StagedPieces
) -> dict[str, object]:
    """Return FLOPs and bytes of the matrices' updates on the busiest rank of the busiest
    stage."""
    cpu = bool(request.hardware.cores)
    work = [
        owners_work(update, row_matrices(row), layout, cpu=cpu)
        for row in pieces.rows
    ]
    # FLOPs and bytes of each stage, summed over the virtual stages that it
    # holds.
    stages = [[0.0, 0.0] for _ in range(layout.pp)]
    # "pp2 interleaved2:4": rank 0 holds virtual stages 0 and 2, rank 1 holds 1
    # and 3.
    for rank, virtual in enumerate(
        ranks_of(layout.virtual_stages, layout.pp, layout.schedule)
    ):
        for stage in virtual:
            each = (work[piece] for piece in pieces.stages[stage])
            stages[rank] = [
                sum(x) for x in zip(stages[rank], *each, strict=True)
            ]
    # Tuples compare by FLOPs first; bytes only break ties.
    flops, moved = max(stages)
    return {"title": update.title, "flops": flops, "moved": moved}


def _held(
    step: RunStep, program: Program, proof: Proof, row: int
) -> dict[str, object]:
    """Summarize the weights that the ranks of one pipeline stage hold."""
    layout, rows = step.layout, step.pieces.rows
    pieces = sorted(p for p, at in program.host.items() if at == row)
    # A set, as pieces may share a unit: tied embedding and head.
    units = [
        rows[unit] for unit in {u for p in pieces for u in program.units(p)}
    ]
    whole = sum(unit.numel for unit in units)
    routed = sum(unit.routed_numel for unit in units)
    shards = layout.shards if layout.zero == 3 else 1
    # Experts are divided over the ranks of ep even without zero3, other
    # weights only with it.
    held = (whole - routed) / shards + routed / max(
        shards, layout.copies_sharing
    )
    kinds = proof.counts[row].kinds
    return {
        "ranks": list(program.ranks(row)),
        "pieces": pieces,
        "parameters": whole,
        # Norms and repeated KV heads, which tp does not shard, add a few per thousand.
        "parameters_per_rank": math.ceil(held / layout.tp),
        "held_microbatches": proof.held[row],
        "held_pieces": kinds.get("activations", 0.0)
        + kinds.get("inputs", 0.0),
        "gathered_units": kinds.get("gathered", 0.0),
    }


def _text(layout: Layout, shape: Shape, figures: Mapping[str, Any]) -> str:
    mesh = (
        f"{layout.ranks} ranks as {layout.mesh}"
        if layout.ranks > 1
        else "1 rank"
    )
    zero = (
        f", zero{layout.zero} over {layout.shards} shards"
        if layout.zero
        else ""
    )
    rows = [
        (
            stage,
            spans(held["ranks"]),
            spans(held["pieces"]),
            f"about {count_text(held['parameters_per_rank'])}",
            f"{held['held_microbatches']:g}",
            f"{held['gathered_units']:g}",
        )
        for stage, held in enumerate(figures["stages"])
    ]
    head = (
        "stage",
        "ranks",
        "pieces",
        "weights a rank",
        "microbatches",
        "units",
    )
    size = f"{count_text(shape.total)} parameters"
    size += f", {count_text(shape.active)} active" * bool(shape.routed.count)
    size += f", {count_text(shape.trained)} trained" * (
        shape.trained < shape.total
    )
    sound = (
        f"{str(layout) or 'One rank'} is legal for {shape.name} ({size}); its program is complete and"
        " cannot deadlock."
    )
    needs = [
        line for text in (sound, *_needs(figures)) for line in wrapped(text)
    ]
    return "\n".join(needs) + (
        f"\n\n{mesh}{zero}; {many(layout.microbatches, 'microbatch')}, {layout.schedule};"
        f" {figures['operations']} operations\n\n{text_table(head, rows, left='rrrrrr')}"
        f"\nPiece 0 is the embedding, piece {figures['virtual_stages'][-1][1] - 1} the head."
        "\nMicrobatches: most with kept activations. Units: most with gathered weights."
    )


def _needs(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the bytes of the fullest rank and the memory of the device."""
    kinds = {
        kind: 1e9 * size for kind, size in figures["memory_by_kind_gb"].items()
    }
    step = f"{figures['batch']:,} sequences of {figures['sequence']:,} tokens"
    yield f"In {figures['precision']}, with {step}, it needs {held_text(kinds)}."
    if smaller := figures.get("one_sequence"):
        size = bytes_text(1e9 * smaller["memory_gb"])
        yield (
            f"That is one microbatch of {smaller['sequences']:,} sequences a rank. With one sequence in each"
            f" microbatch, {smaller['layout']!r}, it needs {size}."
        )
    if work := figures.get("matrix_updates"):
        flops, moved = si_text(work["flops"]), bytes_text(work["moved"])
        yield f"{work['title']} takes {flops} FLOPs on the busiest rank, once a step, and moves {moved}."
    if "fits" in figures:
        least, most, memory = (
            1e9 * size
            for size in (*figures["memory_range_gb"], figures["device_gb"])
        )
        yield (
            f"It {verdict(least, most, memory)} on {figures['device']}, which has"
            f" {bytes_text(memory)}: {range_text(least, most)} depending on allocator"
            " fragmentation."
        )
    if less_sent := figures.get("less_sent"):
        yield str(less_sent)
    if faults := figures.get("faults_of_sums"):
        yield f"Its sums over ranks are wrong in {len(faults)} places. The first are:"
        yield from (f"- {fault}" for fault in faults[:8])
    elif faults is not None:
        yield (
            "No sum over ranks is missing, made twice or made over a wrong axis: outputs and"
            " gradients of pieces, weight gradients, token counts, the loss and the gradient norm."
            " `phalanx verify` compares the values themselves."
        )


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0-3,8-11."""
    parts = []
    for _, group in groupby(
        enumerate(numbers), lambda pair: pair[1] - pair[0]
    ):
        span = [number for _, number in group]
        parts.append(
            str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
        )
    return ",".join(parts if len(parts) <= 6 else [*parts[:5], "..."])
