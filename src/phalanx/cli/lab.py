"""`phalanx lab`: the experiments, listed, run on real ranks and checked, or written as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lab import NAMES, Size, experiment, listing
from .before import refuse_large, refuse_ranks
from .outputs import try_file
from .usage import Parser, UsageError, complain, print_json, save, say

if TYPE_CHECKING:
    from ..lab import Trial

__all__ = ["run"]

_EPILOG = """\
  phalanx lab                               lists the experiments
  phalanx lab zero-3 --ranks 2              runs one, shows the values of each rank, checks them
  phalanx lab pipeline --backend gloo       the same with a process for each rank
  phalanx lab all --html lab.html           runs all, writes one page

Exit code 0: every claim holds; 1: one does not, or a rank failed; 2: wrong usage."""


def run(argv: list[str]) -> int:
    """List the experiments, or run those that are named."""
    args = _parser().read(argv)
    refuse_ranks(args.ranks)
    if not args.names:
        if args.html:
            raise UsageError("--html needs an experiment's name, or all.")
        if args.json:
            print_json({name: experiment(name).title for name in NAMES})
        else:
            say(listing(), end="")
        return 0
    names = list(NAMES) if args.names == ["all"] else args.names
    for name in names:
        experiment(name)
    size = Size(args.batch, args.width, args.layers, args.steps)
    # Weights, gradients and what they are compared with; what each layer keeps.
    need = 3.0 * size.bytes + 8.0 * size.batch * size.width * size.layers
    refuse_large(
        need, f"an MLP of {size.layers:,} layers", "Write less --width, --batch or --layers"
    )
    try_file(args.html, "--html")
    from ..comm import RankFailed
    from ..lab import as_json, claims_text, conduct, lab_page, lab_text

    trials: list[Trial] = []
    try:
        for trial in conduct(names, size, ranks=args.ranks, backend=args.backend):
            trials.append(trial)
            if not args.json:
                if args.html or args.names == ["all"]:
                    name = f"{trial.experiment.name:24}"
                    say(name + claims_text(trial, verbose=args.verbose), end="", flush=True)
                else:
                    say(lab_text(trial, verbose=args.verbose), end="", flush=True)
    except RankFailed as failed:
        complain(str(failed))
        return 1
    if args.html:
        save(args.html, lab_page(trials))
    if args.json:
        print_json({"experiments": [as_json(trial) for trial in trials]})
    return 0 if all(trial.holds for trial in trials) else 1


def _parser() -> Parser:
    parser = Parser(
        "phalanx lab", "Every strategy from bare collectives, to read and to run.", _EPILOG
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="experiments, or all; none: list them")
    add("--ranks", type=int, default=4, metavar="N", help="how many ranks (default 4)")
    add(
        "--backend",
        choices=("threads", "gloo"),
        default="threads",
        help="the transport: ranks are threads, or processes with gloo",
    )
    default = Size()
    add(
        "--batch", type=int, default=default.batch, metavar="N", help="rows of a step (default 128)"
    )
    add("--width", type=int, default=default.width, metavar="N", help="of the MLP (default 1024)")
    add("--layers", type=int, default=default.layers, metavar="N", help="of the MLP (default 4)")
    add("--steps", type=int, default=default.steps, metavar="N", help="of training (default 5)")
    add("--html", metavar="FILE", help="write one page with sources, values and pictures")
    add("--verbose", action="store_true", help="every claim, also those that hold")
    add("--json", action="store_true", help="everything that was recorded, as JSON")
    return parser
