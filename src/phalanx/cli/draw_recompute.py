"""`phalanx draw recompute`: what each way to recompute costs in time and saves in memory.

Every line of the table is a program that was built, checked and simulated: one stage of N layers,
one microbatch. Nothing in it is a formula.
"""

from __future__ import annotations

from ..draw import text_table
from ..layout import Layout
from ..program import Costs, Sizes, build, check, ops, simulate
from .step import costs_of
from .usage import Parser, UsageError, print_json, say

__all__ = ["run", "table"]


def run(argv: list[str]) -> int:
    """Print the table."""
    parser = Parser(
        "phalanx draw recompute", "Time and space of recomputation on one stage, one microbatch."
    )
    parser.add_argument("--layers", type=int, default=16, metavar="N", help="layers (default 16)")
    parser.add_argument("--costs", metavar="K=T,...", help="of one layer (default F=1,B=2)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    args = parser.read(argv)
    if args.layers < 1:
        raise UsageError(f"--layers is {args.layers}; a stage has 1 or more.")
    lines = table(args.layers, costs_of(args.costs, split=False))
    if args.json:
        print_json({"layers": args.layers, "table": lines})
        return 0
    say(
        f"{args.layers} layers on one stage, one microbatch; the peak counts what is held at once\n"
    )
    head = ("recompute", "recomputed", "time", "against none", "peak", "pieces", "inputs")
    formats = ("", "", ".4g", ".3f", ".4g", ".4g", ".4g")
    rows = [[format(x, f) for x, f in zip(line.values(), formats, strict=True)] for line in lines]
    say(text_table(head, rows), end="")
    say(
        "\npieces: layers whose every activation is held; inputs: layers of which only the input is"
    )
    return 0


def table(layers: int, costs: dict[str, float]) -> list[dict[str, object]]:
    """A line for each mode: forwards computed again, time, and what is held at the peak."""
    powers = [2**k for k in range(1, layers.bit_length()) if 2**k <= layers]
    sizes = Sizes(kept=(1.0,) * layers, input=(1.0,) * layers)
    found: list[dict[str, object]] = []
    least = 0.0
    for mode in ("none", "all", *(f"every={c}" for c in powers), "sqrt"):
        program = build(Layout(recompute=mode), [range(layers)])
        proof = check(program, sizes)
        peak = (proof.bytes or proof.counts)[0]
        time = simulate(program, Costs(costs)).makespan
        least = least or time
        found.append(
            {
                "recompute": mode,
                "recomputed": sum(op.kind == ops.RECOMPUTE for op in program.rows[0]),
                "time": time,
                "against_none": time / least,
                "peak": peak.total,
                "pieces": peak.then.get("activations", 0.0),
                "inputs": peak.then.get("inputs", 0.0),
            }
        )
    return found
