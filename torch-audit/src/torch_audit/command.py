"""`audit`: records steps of a torch program, and compares them with another layout's.

audit run --out one --one -- python train.py       a reference, on one process
audit run --out many -- torchrun --nproc-per-node 4 train.py
audit compare one many                             exit code 0: equal, 1: refuted, 2: not comparable
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .checks import check_run, first_of_each
from .compare import EXIT, REFUTED, compare
from .launch import LaunchError, record, say_at_once
from .records import RecordError
from .repeat import can_repeat, repeat
from .report import (
    finding_text,
    repeated_text,
    verdict_json,
    verdict_text,
)
from .runs import load
from .start import Settings


def parser(prog: str) -> argparse.ArgumentParser:
    """The parser of both verbs."""
    result = argparse.ArgumentParser(
        prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = result.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="record a program")
    run.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new folder"
    )
    run.add_argument(
        "--steps", type=int, default=3, help="steps to record (default 3)"
    )
    run.add_argument(
        "--one",
        action="store_true",
        help="the program is one process: a reference",
    )
    run.add_argument(
        "--perturb",
        type=int,
        default=0,
        metavar="N",
        help="run it N times with weights moved by one unit in the last place, into DIR-1 to DIR-N",
    )
    run.add_argument(
        "--float64", action="store_true", help="make float64 the default dtype"
    )
    run.add_argument(
        "--contents",
        action="store_true",
        help="also write hashes of the weights' rows and columns, for --find-in",
    )
    run.add_argument(
        "--find-in",
        type=Path,
        metavar="ONE",
        help="find shards that nobody declares by their contents in a reference",
    )
    run.usage = f"{run.prog} --out DIR [options] -- PROGRAM ..."
    compared = verbs.add_parser("compare", help="compare recorded runs")
    compared.add_argument("reference", type=Path)
    compared.add_argument("runs", type=Path, nargs="+", metavar="run")
    compared.add_argument(
        "--perturbed",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="perturbed runs of the reference, which give the tolerances",
    )
    compared.add_argument(
        "--repeat",
        action="store_true",
        help="record a difference in float64 again in the run's own dtype, by"
        " the commands that the records name",
    )
    compared.add_argument(
        "--json", action="store_true", help="the result as JSON"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    words, program = split_words(given)
    args = parser("python -m torch_audit").parse_args(words)
    try:
        if args.verb == "run":
            settings = Settings(
                args.out,
                args.steps,
                float64=args.float64,
                contents=args.contents,
                find_in=args.find_in,
            )
            recorded = record_all(
                settings, program, one=args.one, perturb=args.perturb
            )
            return recorded.code
        compared = compare_folders(
            args.reference,
            args.runs,
            args.perturbed,
            repeated=args.repeat,
        )
    except (RecordError, LaunchError) as error:
        print(f"torch_audit: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps(compared.figures, indent=1) if args.json else compared.text
    )
    return compared.code


def split_words(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those of the audited program behind `--`."""
    words = list(given)
    if "--" not in words:
        return words, []
    at = words.index("--")
    # Options of the audited program may have the same names as ours, so only
    # `--` separates them.
    return words[:at], words[at + 1 :]


@dataclass(frozen=True)
class Outcome:
    """The result of a command: its exit code, as JSON and as text."""

    code: int
    figures: dict[str, Any]
    text: str


def record_all(
    settings: Settings, program: list[str], *, one: bool, perturb: int
) -> Outcome:
    """Records a program once, or `perturb` times with perturbed weights into DIR-1 to DIR-N."""
    if not program:
        raise LaunchError(
            "the program is missing: write its command behind --."
        )
    chosen = [settings]
    if perturb:
        # Seeds from 1, as 0 stands for no perturbation.
        out = settings.out
        folders = {
            seed: f"{out.name}-{seed}" for seed in range(1, perturb + 1)
        }
        chosen = [
            replace(
                settings,
                out=out.with_name(name),
                perturbed=seed,
                contents=False,
            )
            for seed, name in folders.items()
        ]
    for each in chosen:
        ended, findings = record(each, program, one=one, say=say_at_once)
        faults = sum(finding.fault for finding in findings)
        steps = len(load(each.out).steps)
        say_at_once(
            f"audit: {steps} steps recorded in {each.out}; {faults} faults"
        )
        # The next would fail alike.
        if ended or faults:
            break
    if ended:
        say_at_once(f"audit: the program ended with code {ended}")
    figures = {
        "folder": str(each.out),
        "steps": steps,
        "ended": ended,
        "findings": [asdict(finding) for finding in findings],
    }
    return Outcome(1 if ended or faults else 0, figures, "")


def compare_folders(
    reference: Path,
    folders: Sequence[Path],
    perturbed: Sequence[Path],
    *,
    repeated: bool = False,
) -> Outcome:
    """Each run against the reference; the exit code is the worst of all.

    With `repeated`, a difference in float64 is looked for again in the run's own dtype. This
    runs the commands in the records, which may be somebody else's, so it must be asked for.
    """
    expected = load(reference)
    # Without perturbed runs the limits are those usual for the precision.
    measured = [load(folder) for folder in perturbed]
    results, lines, codes = [], [], []
    for folder in folders:
        run = load(folder)
        verdict = compare(expected, run, measured)
        findings = check_run(run)
        faults = [x for x in first_of_each(findings) if x.fault]
        own = None
        wrong = verdict.result == REFUTED
        # A refutation in float64 may be an artefact of libraries, which only
        # the own dtype can show.
        if repeated and wrong and can_repeat([reference, folder]):
            own = repeat(reference, folder, verdict, say_at_once)
        result = {"run": str(folder), **verdict_json(verdict, findings)}
        result["repeated"] = None if own is None else own.figures()
        results.append(result)
        text = verdict_text(
            verdict, str(folder), str(reference), repeated=own is not None
        )
        lines.append(text)
        lines += [f"  {finding_text(fault)}" for fault in faults]
        code = EXIT[verdict.result]
        if own is not None:
            lines.append(repeated_text(own, str(folder), str(reference)))
            # Not a fault of the run, if it shows in float64 alone.
            code = 0 if own.only_in_float64 else code
        # A run with a fault of its own is not accepted, even if it equals the
        # reference.
        codes.append(1 if code == 0 and faults else code)
    figures = {"reference": str(reference), "runs": results}
    # The worst code of all runs, as for any check in a script.
    return Outcome(max(codes), figures, "\n".join(lines))
