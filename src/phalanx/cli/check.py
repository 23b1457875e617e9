"""`phalanx check`: whether a layout fits a model, or a program file can run, and what each rank holds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from ..draw import text_table
from ..layout import Layout, Shape, legal, nearest, stage_pieces
from ..program import Program, Proof, build, check, faults
from .usage import Parser, UsageError, print_json, read, say

__all__ = ["run"]

_EPILOG = """\
Exit code 0: it fits and its program is proved; 1: it does not, with every reason; 2: wrong usage.

  phalanx check "dp2 pp4 tp2 1f1b:8" --model 8b
  phalanx check step.txt"""


def run(argv: list[str]) -> int:
    """Check a layout against a shape, or a program file by itself."""
    parser = Parser(
        "phalanx check",
        "Why a layout does not fit a model, all reasons at once, or what its ranks hold.",
        _EPILOG,
    )
    parser.add_argument(
        "what", nargs="+", metavar="LAYOUT", help="a layout's text, or a program file"
    )
    parser.add_argument("--model", metavar="SHAPE", help="a shape's name, or a .toml file")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="sequences of a step")
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="tokens of a sequence")
    parser.add_argument("--clip", action="store_true", help="with the agreement of clipping")
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    args = parser.read(argv)
    text = " ".join(args.what)
    if args.batch < 0 or args.seq < 0:
        raise UsageError("--batch and --seq are 1 or more.")
    if args.model is None:
        if text.endswith(".txt") or Path(text).is_file():
            return _file(text, args)
        Layout.parse(text)
        raise UsageError(
            f"the layout {text!r} needs a model: add --model with one of {', '.join(Shape.names())}."
        )
    return _layout(Layout.parse(text), Shape.load(args.model), args)


def _layout(layout: Layout, shape: Shape, args: argparse.Namespace) -> int:
    violations = legal(layout, shape, batch=args.batch, sequence=args.seq)
    if violations:
        near = nearest(layout, shape, batch=args.batch, sequence=args.seq)
        if args.json:
            reasons = [{"rule": v.rule, "what": v.what, "way_out": v.way_out} for v in violations]
            print_json({"legal": False, "violations": reasons, "nearest": list(map(str, near))})
            return 1
        say(f"{layout} does not fit {shape.name}:")
        for violation in violations:
            say(f"- {violation}")
        say("nearest that fit: " + "; ".join(map(str, near)) if near else "nothing near it fits.")
        return 1
    stages = stage_pieces(layout, shape)
    tied = ((shape.pieces - 1, 0),) if shape.tied else ()
    fitting = layout.recompute == "fit"
    # What `fit` recomputes depends on bytes, which costing tells; the rest is proved without it.
    program = build(
        replace(layout, recompute="none") if fitting else layout,
        stages,
        tied,
        agree=args.clip,
    )
    proof = check(program)
    if args.json:
        print_json({"legal": True, **_statement(layout, shape, stages, program, proof)})
    else:
        _say(layout, shape, program, proof)
    return 0


def _statement(
    layout: Layout, shape: Shape, stages: tuple[range, ...], program: Program, proof: Proof
) -> dict[str, object]:
    """What is known of a legal layout before anything is costed."""
    return {
        "layout": str(layout),
        "model": shape.name,
        "ranks": layout.ranks,
        "parameters": shape.total,
        "operations": sum(map(len, program.rows)),
        "virtual_stages": [[stage.start, stage.stop] for stage in stages],
        "stages": [_stage(layout, shape, program, proof, row) for row in range(layout.pp)],
    }


class _Stage(TypedDict):
    ranks: list[int]
    pieces: list[int]
    parameters: int
    parameters_per_rank: int
    held_microbatches: float
    held_pieces: float
    gathered_units: float


def _stage(layout: Layout, shape: Shape, program: Program, proof: Proof, row: int) -> _Stage:
    """What the ranks of one pipeline stage hold."""
    pieces = sorted(p for p, at in program.host.items() if at == row)
    whole = sum(shape.parameters(unit) for unit in {u for p in pieces for u in program.units(p)})
    parts = layout.tp * (layout.shards if layout.zero == 3 else 1)
    kinds = proof.counts[row].kinds
    return {
        "ranks": list(program.ranks(row)),
        "pieces": pieces,
        "parameters": whole,
        # Norms and repeated k/v heads, which tp does not cut, come on top: a few in a thousand.
        "parameters_per_rank": -(-whole // parts),
        "held_microbatches": proof.held[row],
        "held_pieces": kinds.get("activations", 0.0) + kinds.get("inputs", 0.0),
        "gathered_units": kinds.get("gathered", 0.0),
    }


def _say(layout: Layout, shape: Shape, program: Program, proof: Proof) -> None:
    say(f"{layout} fits {shape.name} ({_big(shape.total)} parameters); its program is proved.\n")
    mesh = f"{layout.ranks} ranks" + (f" as {layout.mesh}" if layout.ranks > 1 else "")
    zero = f", zero{layout.zero} over {layout.shards} shards" if layout.zero else ""
    say(
        f"{mesh}{zero}; {layout.microbatches} microbatches, {layout.schedule};"
        f" {sum(map(len, program.rows))} operations\n"
    )
    rows = []
    for row in range(layout.pp):
        stage = _stage(layout, shape, program, proof, row)
        weights = f"about {_big(stage['parameters_per_rank'])}"
        held = (f"{stage['held_microbatches']:g}", f"{stage['gathered_units']:g}")
        rows.append((row, _runs(program.ranks(row)), _runs(stage["pieces"]), weights, *held))
    head = ("stage", "ranks", "pieces", "weights a rank", "held", "gathered")
    say(text_table(head, rows, left="rrrrrr"), end="")
    say(
        f"\nPiece 0 is the embedding, piece {shape.pieces - 1} the head.\n"
        "At most so many at once: held microbatches, gathered units of weights."
    )


def _big(count: int) -> str:
    """124.4M, 8.03B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return str(count)


def _runs(numbers: Sequence[int]) -> str:
    """0-3,8-11: neighbours together."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    args = [f"{a}-{b}" if a < b else str(a) for a, b in out]
    return ",".join(args if len(args) <= 6 else [*args[:5], "..."])


def _file(path: str, args: argparse.Namespace) -> int:
    program = Program.parse(read(path, "program"), path)
    wrong = faults(program)
    if args.json:
        peak = list(check(program).held) if not wrong else None
        print_json({"sound": not wrong, "faults": list(wrong), "peak_held": peak})
    elif wrong:
        say(f"{path} cannot run:")
        for fault in wrong:
            say(f"- {fault}")
    else:
        held = " ".join(f"{h:g}" for h in check(program).held)
        say(
            f"{path} is sound: {program.mesh.size} ranks, {program.pieces} pieces,"
            f" {program.microbatches} microbatches; held by stage: {held}"
        )
    return 1 if wrong else 0
