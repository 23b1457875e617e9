"""`phalanx report`: a run's folder as one HTML page, and its step beside what a plan counts for it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.request import where
from ..layout.files import reason, write_text
from .usage import Parser, UsageError, flags, result, save

if TYPE_CHECKING:
    from ..report.compared import Compared

_EPILOG = """\
The page is one file that fetches nothing: loss with restarts, step time, MFU, memory, a measured
step, the mesh, the configuration and versions. With --machine or --cluster also what a plan counts
for each kind of operation, against what it took in the measured step.

  phalanx report runs/run
  phalanx report runs/run --out page.html
  phalanx report runs/run --machine machine.toml

Exit code 0: done; 2: wrong usage."""
_HOW = (
    "Predicted against measured, by kind of operation: add --machine machine.toml\n"
    "(phalanx doctor --out machine.toml writes it) or --cluster NAME, as h100x8."
)
_SITE = ("backend", "profile", "model")


def run(argv: list[str]) -> int:
    """Write the page of a run."""
    parser = Parser("phalanx report", "A run's folder as one HTML page.", _EPILOG)
    add = parser.add
    add("folder", metavar="RUNDIR", help="the folder of a run: its `out`")
    parser.add_output("--out", help="where to write; default RUNDIR/report.html")
    add("--machine", metavar="FILE", help="where it ran: the file that doctor --out wrote there")
    add("--cluster", metavar="NAME", help="where it ran, as h100x8")
    add("--backend", default=None, metavar="NAME", help="backend whose measured curves are used")
    add("--profile", metavar="NAME|FILE", help="software to predict; default: this one")
    add("--model", metavar="FILE.py:Class", help="the run's model, if your own (its file is run)")
    add("--json", help="print the path and the comparison as JSON")
    args = parser.read(argv)
    from ..report import report

    folder = Path(args.folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}. Name the `out` of a run.")
    out = Path(args.out) if args.out else folder / "report.html"
    compared = _compared(folder, args)
    page = report(folder, compared)
    if args.out:
        save(out, page)
    else:  # in the run's folder, which may be somebody else's: a link there is not followed
        try:
            write_text(out, page)
        except OSError as error:
            raise UsageError(f"cannot write {out}: {reason(error)}. Write --out FILE.") from None
    figures = {"report": str(out), "bytes": len(page)}
    more = {"compared": compared.figures()} if compared else {}
    text = f"{compared.text()}\n\nwrote {out}" if compared else f"wrote {out}\n{_HOW}"
    result(args, figures | more, text)
    return 0


def _compared(folder: Path, args: argparse.Namespace) -> Compared | None:
    """The run's step beside its prediction, if it was named where it ran."""
    if not args.machine and not args.cluster:
        if given := flags(args, _SITE):
            raise UsageError(
                f"{given[0]} goes with --machine or --cluster, which say where it ran."
            )
        return None
    from ..cost import cached_costs
    from ..plan.local import profile_for
    from ..report.predicted import predicted, read_step

    step = read_step(folder)
    if step.own and args.model != step.own:
        raise UsageError(
            f"the model of {folder} is {step.own}, and a report runs no code of a run's folder by"
            f" itself. Say that it may: --model {step.own}"
        )
    at = where(args.cluster, args.machine, step.layout.ranks, args.backend or "")
    # A run tells its GPU by the driver's name, and every CPU as CPU.
    alike = at.kind == "cpu" if step.device == "CPU" else step.device in at.names
    if step.device and not alike:
        raise UsageError(
            f"the run was on {step.device}, and {args.cluster or args.machine} is {at.names[0]}. Name"
            " the machine it ran on: phalanx doctor --out machine.toml writes it there."
        )
    profile = profile_for(at.hardware, args.profile, step.layout.precision)
    if args.profile or not at.hardware.cores:
        # A file of calibrate still has the name of the profile with which its fit began.
        profile = replace(profile, name=args.profile or profile.name)
    return predicted(step, at.hardware, profile, partial(cached_costs, target=at.hardware.target))
