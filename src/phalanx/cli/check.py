"""`phalanx check`: whether a layout fits a model, or a program file can run, and what each rank holds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ..draw import text_table
from ..draw.words import wrapped
from ..layout import Layout, Shape, legal, nearest, stage_pieces
from ..layout.numbers import bytes_text, count_text
from ..layout.stages import partial_pieces
from ..plan.hardware import hardware_of
from ..plan.link import joined
from ..plan.step import Request
from ..program import Program, Proof, build, check, faults
from .before import in_precision, misfit, model_of, where
from .memory import held, held_text, request_for
from .usage import Parser, UsageError, read, result

_WIDTH = 80
_EPILOG = """\
Exit code 0: its program is proved, and fits in the memory of --device or --cluster; 1: it does not,
with every reason; 2: wrong usage. Bytes are those of `plan --explain`: in bf16, on a CPU fp32, unless
the layout says otherwise. A model that nobody has costed yet loads torch.

  phalanx check "dp2 pp4 tp2 1f1b:8" --model 8b
  phalanx check "dp8 tp8 zero1 accum:8" --model 8b --batch 64 --cluster h100x64
  phalanx check "dp8 zero3 bf16" --model run.toml --device h100
  phalanx check step.txt"""


def run(argv: list[str]) -> int:
    """Check a layout against a shape, or a program file by itself."""
    parser = Parser(
        "phalanx check",
        "Why a layout does not fit a model, all reasons at once, or what its ranks hold.",
        _EPILOG,
    )
    parser.add("what", nargs="+", metavar="LAYOUT", help="a layout's text, or a program file")
    parser.add("--model")
    parser.add("--batch")
    parser.add("--seq")
    parser.add("--device", default=None, choices=None, metavar="NAME", help="fits in it, as h100")
    parser.add("--cluster", metavar="NAME", help="fits there, as h100x64, or this")
    parser.add("--clip", action="store_true", help="with the agreement of clipping")
    parser.add("--json")
    args = parser.read(argv)
    text = " ".join(args.what)
    if args.model is not None:
        shape, make = model_of(args.model)
        if make:
            from ..parallel import refuse_unfit

            refuse_unfit(make(), Layout.parse(text))
        return _layout(text, shape, args, args.model if make else "")
    if args.device or args.cluster:
        raise UsageError("what a device has to hold is known of a layout: add --model.")
    if text.endswith(".txt") or Path(text).is_file():
        return _file(text, args)
    Layout.parse(text)
    raise UsageError(
        f"the layout {text!r} needs a model: add --model with one of {', '.join(Shape.names())}."
    )


def _layout(text: str, shape: Shape, args: argparse.Namespace, own: str) -> int:
    layout = Layout.parse(text)
    sizes = {"batch": args.batch or 0, "sequence": args.seq or 0}
    if wrong := misfit(layout, shape, **sizes):
        reasons = [
            {"rule": v.rule, "what": v.what, "way_out": v.way_out}
            for v in legal(layout, shape, **sizes)
        ]
        near = list(map(str, nearest(layout, shape, **sizes)))
        result(args, {"legal": False, "violations": reasons, "nearest": near}, wrong)
        return 1
    request = replace(_request(layout, shape, args), model=own)
    stages = stage_pieces(layout, shape)
    tied = ((shape.pieces - 1, 0),) if shape.tied else ()
    # What `fit` recomputes depends on bytes, which are not known here; the rest is proved without it.
    fitting = layout.recompute == "fit"
    built = replace(layout, recompute="none") if fitting else layout
    parts = partial_pieces(layout, shape)
    program = build(built, stages, tied, agree=args.clip, parts=parts, frozen=shape.frozen)
    proof = check(program)
    figures: dict[str, Any] = {
        "legal": True,
        "layout": str(layout),
        "model": shape.name,
        "ranks": layout.ranks,
        "parameters": shape.total,
        "active_parameters": shape.active,
        "trained_parameters": shape.trained,
        "operations": sum(map(len, program.rows)),
        "virtual_stages": [[stage.start, stage.stop] for stage in stages],
        "stages": [_held(layout, shape, program, proof, row) for row in range(layout.pp)],
    } | _memory(request, text)
    result(args, figures, _text(layout, shape, figures))
    return 0 if figures.get("fits", True) else 1


def _request(layout: Layout, shape: Shape, args: argparse.Namespace) -> Request:
    """What a plan of the layout would be asked; of memory without end where no device is named."""
    if args.cluster and args.device:
        raise UsageError("--cluster and --device both say where it runs; name one.")
    if args.cluster:
        hardware = where(args.cluster, None, layout.ranks).hardware
    else:
        hardware = hardware_of(joined(args.device or "h100", layout.ranks))
    if not (args.cluster or args.device):
        hardware = replace(hardware, name="", memory=math.inf)
    return request_for(shape, hardware, batch=args.batch or 0, sequence=args.seq or 0)


def _memory(request: Request, text: str) -> dict[str, Any]:
    """Of the fullest rank, and whether a device has it."""
    layout = in_precision(text, request.precision)
    kinds = held(request, layout).memory
    figures: dict[str, Any] = {
        "precision": layout.precision,
        "batch": request.batch,
        "sequence": request.sequence,
        "memory_gb": sum(kinds.values()) / 1e9,
        "memory_by_kind_gb": {kind: size / 1e9 for kind, size in kinds.items()},
    }
    if request.hardware.name:
        figures |= {"device": request.hardware.name, "limit_gb": request.room / 1e9}
        figures["fits"] = sum(kinds.values()) <= request.room
    return figures


def _held(
    layout: Layout, shape: Shape, program: Program, proof: Proof, row: int
) -> dict[str, object]:
    """What the ranks of one pipeline stage hold."""
    pieces = sorted(p for p, at in program.host.items() if at == row)
    units = {u for p in pieces for u in program.units(p)}
    whole, routed = sum(map(shape.parameters, units)), sum(map(shape.routed, units))
    shards = layout.shards if layout.zero == 3 else 1
    held = (whole - routed) / shards + routed / max(shards, layout.ep)
    kinds = proof.counts[row].kinds
    return {
        "ranks": list(program.ranks(row)),
        "pieces": pieces,
        "parameters": whole,
        # Norms and repeated k/v heads, which tp does not cut, come on top: a few in a thousand.
        "parameters_per_rank": math.ceil(held / layout.tp),
        "held_microbatches": proof.held[row],
        "held_pieces": kinds.get("activations", 0.0) + kinds.get("inputs", 0.0),
        "gathered_units": kinds.get("gathered", 0.0),
    }


def _text(layout: Layout, shape: Shape, figures: dict[str, Any]) -> str:
    mesh = f"{layout.ranks} ranks" + (f" as {layout.mesh}" if layout.ranks > 1 else "")
    zero = f", zero{layout.zero} over {layout.shards} shards" if layout.zero else ""
    rows = [
        (
            stage,
            _spans(held["ranks"]),
            _spans(held["pieces"]),
            f"about {count_text(held['parameters_per_rank'])}",
            f"{held['held_microbatches']:g}",
            f"{held['gathered_units']:g}",
        )
        for stage, held in enumerate(figures["stages"])
    ]
    head = ("stage", "ranks", "pieces", "weights a rank", "held", "gathered")
    size = f"{count_text(shape.total)} parameters"
    size += f", {count_text(shape.active)} active" * bool(shape.experts)
    size += f", {count_text(shape.trained)} trained" * (shape.trained < shape.total)
    proved = f"{layout} is legal for {shape.name} ({size}); its program is proved."
    needs = [line for text in (proved, *_needs(figures)) for line in wrapped(text, _WIDTH)]
    return "\n".join(needs) + (
        f"\n\n{mesh}{zero}; {layout.microbatches} microbatches, {layout.schedule};"
        f" {figures['operations']} operations\n\n{text_table(head, rows, left='rrrrrr')}"
        f"\nPiece 0 is the embedding, piece {shape.pieces - 1} the head."
        "\nAt most so many at once: held microbatches, gathered units of weights."
    )


def _needs(figures: Mapping[str, Any]) -> Iterator[str]:
    """The bytes of the fullest rank, and what a device has."""
    kinds = {kind: 1e9 * size for kind, size in figures["memory_by_kind_gb"].items()}
    step = f"{figures['batch']:,} sequences of {figures['sequence']:,} tokens"
    yield f"In {figures['precision']}, with {step}, it needs {held_text(kinds)}."
    if "fits" in figures:
        fits = "It fits" if figures["fits"] else "It does not fit"
        limit = bytes_text(1e9 * figures["limit_gb"])
        yield f"{fits} on {figures['device']}: {limit} of a device may be used."


def _spans(numbers: Iterable[int]) -> str:
    """0-3,8-11: neighbours together."""
    parts = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        span = [number for _, number in group]
        parts.append(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}")
    return ",".join(parts if len(parts) <= 6 else [*parts[:5], "..."])


def _file(path: str, args: argparse.Namespace) -> int:
    program = Program.parse(read(path, "program"), path)
    wrong = faults(program)
    held = list(check(program).held) if not wrong else None
    text = "\n- ".join([f"{path} cannot run:", *wrong])
    if held is not None:
        text = (
            f"{path} is sound: {program.mesh.size} ranks, {program.pieces} pieces,"
            f" {program.microbatches} microbatches; held by stage: {' '.join(f'{h:g}' for h in held)}"
        )
    result(args, {"sound": not wrong, "faults": list(wrong), "peak_held": held}, text)
    return 1 if wrong else 0
