"""`phalanx report`: renders a run's folder as one HTML page, with its step beside the
plan's prediction.

The page is one file that loads nothing: loss with restarts, step time, MFU, goodput, a
measured step over the predicted one with memory by kind, the parts of that step's time,
the mesh and the shards of each weight, the configuration and versions. --machine or
--cluster adds the predicted time of each kind of operation beside the measured one, and
the measured bandwidths. --svg DIR writes all pictures as files.

  phalanx report runs/run
  phalanx report runs/run --machine machine.toml --svg pictures
  phalanx report runs/eight --beside runs/two runs/four

Exit code 0: done; 2: wrong usage.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.request import model_of, request_for, where
from ..drawing import WIDE
from ..layout import Layout, Run, Shape
from ..layout.codec import decode
from ..layout.files import reason, write_text
from ..layout.optimizers import USUAL_OPTIMIZER
from ..planner import Machine
from ..planner.device import MachineFileError
from ..planner.step import Pricer
from ..report import Extras, Section
from .bench_chart import curves_svg
from .parser import Parser
from .usage import UsageError, result, save
from .verify_page import verified_svg

if TYPE_CHECKING:
    from ..report.compared import Compared
    from ..report.scaling import Speed

_HOW = (
    "Predicted against measured, by kind of operation: add --machine machine.toml\n"
    "(phalanx doctor --out machine.toml writes it) or --cluster NAME, as h100x8."
)


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add("folder", metavar="RUNDIR", help="the folder of a run: its `out`")
    parser.add_output(
        "--out", help="file to write; default RUNDIR/report.html"
    )
    parser.add_output(
        "--svg",
        folder=True,
        help="also write every picture, and a trace for Perfetto",
    )
    add(
        "--beside",
        nargs="+",
        metavar="RUNDIR",
        help="other runs, for a chart of speed over ranks",
    )
    add(
        "--verified",
        metavar="FILE",
        help="output of verify --log, shown as a matrix",
    )
    add(
        "--machine",
        metavar="FILE",
        help="machine file of the run, written there by doctor --out",
    )
    add(
        "--cluster",
        metavar="NAME",
        help="the cluster it ran on, such as h100x8",
    )
    add(
        "--backend",
        default=None,
        metavar="NAME",
        help="backend whose measured curves are used",
    )
    add(
        "--profile",
        metavar="NAME|FILE",
        help="software profile; default: phalanx itself",
    )
    add(
        "--model",
        metavar="FILE.py:Class",
        help="the run's model, if it is your own (its file is executed)",
    )
    args = parser.read(argv)
    from ..report import report

    folder = Path(args.folder)
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}. Name the `out` of a run."
        )
    # In the run's folder by default, beside what it shows.
    out = Path(args.out) if args.out else folder / "report.html"
    compared = _compared(folder, args)
    found = report(folder, _extras(folder, compared, args))
    page = found.html()
    # A file that the user names may be a link or a pipe.
    if args.out:
        save(out, page)
    # The run's folder may be somebody else's, so a link there is not followed.
    else:
        try:
            write_text(out, page)
        except OSError as error:
            raise UsageError(
                f"cannot write {out}: {reason(error)}. Write --out FILE."
            ) from None
    figures: dict[str, object] = {"report": str(out), "bytes": len(page)}
    if args.svg:
        Path(args.svg).mkdir(parents=True, exist_ok=True)
        drawn = found.pictures()
        for name, picture in drawn.items():
            save(Path(args.svg, name), picture)
        figures["pictures"] = sorted(drawn)
    more = {"compared": compared.figures()} if compared else {}
    text = (
        f"{compared.text()}\n\nwrote {out}"
        if compared
        else f"wrote {out}\n{_HOW}"
    )
    return result(args, figures | more, text)


def _extras(
    folder: Path, compared: Compared | None, args: argparse.Namespace
) -> Extras:
    """Return the sections of the report beyond the run's own records."""
    from ..report.scaling import scaling_svg, speeds
    from ..report.step import step_extras

    make = model_of(args.model)[1] if args.model else None
    # The run file may be missing, or be of another version.
    try:
        optimizer = Run.load(str(folder / "run.toml")).optimizer
    except ValueError:
        optimizer = USUAL_OPTIMIZER
    extras = step_extras(folder, compared, make, optimizer)
    sections = list(extras.sections)
    runs = speeds([folder, *map(Path, args.beside or ())])
    draw = partial(
        scaling_svg, runs, {run: _planned(run, args) for run in runs}.get
    )
    # Empty for runs of one number of ranks.
    if draw(WIDE):
        sections.append(Section("Scaling", name="scaling", draw=draw))
    if args.machine and (curves := Machine.load(args.machine).curves):
        sections.append(
            Section(
                "Bandwidth", name="bandwidth", draw=partial(curves_svg, curves)
            )
        )
    if args.verified:
        from ..verification.verify import logged

        verdicts = tuple(logged(Path(args.verified)).values())
        draw = partial(verified_svg, f"layouts of {args.verified}", verdicts)
        sections.append(
            Section(
                "Verified", name="verified", draw=draw if draw(WIDE) else None
            )
        )
    return replace(extras, sections=tuple(sections))


def _planned(run: Speed, args: argparse.Namespace) -> float | None:
    """Return the predicted tokens per second of a start's layout; None unless its
    hardware was named."""
    model, sequence = run.start.get("model"), run.start.get("sequence")
    # Code of the user is not run to predict its speed.
    if (
        not (args.machine or args.cluster)
        or not isinstance(model, dict)
        or run.start.get("own")
    ):
        return None
    shape = decode(Shape, model, f"{run.run}, model", MachineFileError)
    layout = Layout.parse(str(run.start.get("layout", "")))
    hardware = where(
        args.cluster, args.machine, run.ranks, args.backend or ""
    ).hardware
    tokens, precision = (
        sequence if isinstance(sequence, int) else 0,
        layout.precision,
    )
    request = request_for(
        shape,
        hardware,
        sequence=tokens,
        precision=precision,
        profile=args.profile,
    )
    return request.tokens / Pricer(request).choose(layout).step


def _compared(folder: Path, args: argparse.Namespace) -> Compared | None:
    """Return the run's step beside its prediction; None unless its hardware was
    named."""
    # These describe the hardware, and mean nothing without it.
    if not args.machine and not args.cluster:
        for name in ("backend", "profile", "model"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} needs --machine or --cluster, which name the hardware."
                )
        return None
    from ..cost import cached_costs
    from ..planner.local import profile_for
    from ..report.step import predicted, read_step

    step = read_step(folder)
    if step.own and args.model != step.own:
        raise UsageError(
            f"the model of {folder} is {step.own}, and a report executes no code of a run's folder by"
            f" itself. Allow it with --model {step.own}"
        )
    at = where(
        args.cluster, args.machine, step.layout.ranks, args.backend or ""
    )
    # A run records its GPU by the driver's name, and every CPU as CPU.
    alike = (
        at.kind == "cpu" if step.device == "CPU" else step.device in at.names
    )
    if step.device and not alike:
        raise UsageError(
            f"the run used {step.device}, but {args.cluster or args.machine} is {at.names[0]}. Name"
            " the machine it ran on: phalanx doctor --out machine.toml writes it there."
        )
    profile = profile_for(at.hardware, args.profile, step.layout.precision)
    if args.profile or not at.hardware.cores:
        # A file of `plan calibrate` still has the name of the profile that its fit
        # started from.
        profile = replace(profile, name=args.profile or profile.name)
    return predicted(
        step,
        at.hardware,
        profile,
        partial(cached_costs, target=at.hardware.target),
    )
