"""Tables of `docs/verified.md`: each seeded fault with the finding of `verify`, or of
`verify --exact`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from . import FAULTS, catch
from .exact import catch_exactly, table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seeded",
        description="Plant each seeded fault and print what `verify` finds, as the first table of"
        " docs/verified.md. All faults take some minutes. The exit code is 1 if one is missed.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="run only faults whose names contain all of these words",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--exact",
        action="store_true",
        help="print the findings of `verify --exact` in bfloat16",
    )
    form.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    words = " ".join(args.words).split()
    chosen = [
        fault for fault in FAULTS if all(word in fault.name for word in words)
    ]
    if args.exact:
        found = [*map(catch_exactly, chosen)]
        print(table(found))
        return 0 if all(c.refused or c.first_difference for c in found) else 1
    caught = [
        catch(fault, dtype) for fault in chosen for dtype in fault.dtypes
    ]
    missed = [c for c in caught if not (c.caught and c.named)]
    if args.json:
        print(json.dumps({"faults": [asdict(c) for c in caught]}))
        return 1 if missed else 0
    print(
        "| fault | layout | verify says | loss of the first step off by | of three steps |"
    )
    print("|---|---|---|---|---|")
    for c in caught:
        layout = c.layout.replace(" fp64", "")
        says = c.first_difference.split(" is ")[0]
        says = says if c.caught else f"NOT CAUGHT {says}".strip()
        print(
            f"| {c.fault} | {layout} | {says} | {c.first_loss_error:.0e} | {c.loss_error:.0e} |"
        )
    first = sum(c.first_loss_error > 1e-3 for c in caught)
    three = sum(c.loss_error > 1e-3 for c in caught)
    print(
        f"\nverify catches {sum(c.caught for c in caught)} of {len(caught)}. Losses that agree to"
        f" 1e-3 would have caught {first} after one step, {three} after three."
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
