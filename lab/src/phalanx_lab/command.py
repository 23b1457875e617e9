"""`phalanx lab`: a lecture that builds every strategy from collectives. Lists its
experiments, runs them on real ranks and checks them, or writes them as a page.

  phalanx lab                            lists the chapters
  phalanx lab zero-3 --ranks 2           runs one, shows and checks its values
  phalanx lab pipeline --backend gloo    the same with a process for each rank
  phalanx lab all --html lab.html        runs all, writes one page
  phalanx lab zero-3 -v                  shows every step and every claim
  phalanx lab exercise                   lists twenty exercises, checks your answers
  phalanx lab zero-3 --script            prints a script for torchrun, to copy

Exit code 0: every claim holds; 1: one does not, or a rank failed; 2: wrong usage.
"""

import argparse

from phalanx.cli.before import refuse_large
from phalanx.cli.parser import Parser, whole
from phalanx.cli.usage import UsageError, print_json, result, save, say
from phalanx.layout.choices import GLOO, THREADS

from . import exercise_command
from .catalogue import NAMES, Size, experiment, listing, scripted

# Options that a printed script does not read.
_OF_A_RUN = ("html", "ranks", "backend", "batch", "width", "layers", "steps")


def run(argv: list[str]) -> int:
    if argv[:1] == ["exercise"]:
        return exercise_command.run(argv[1:])
    default = Size()
    parser = Parser(__doc__)
    add = parser.add
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help="chapters to run, or all; default: list them",
    )
    add("--ranks", default=4, help="number of ranks")
    what = "threads, or gloo for processes"
    add("--backend", choices=(THREADS, GLOO), default=THREADS, help=what)
    add("--batch", default=default.batch, help="rows in a batch")
    add(
        "--width",
        type=whole(1, 1 << 20),
        default=default.width,
        help="width of the model",
    )
    add("--layers", default=default.layers, help="layers of the model")
    add("--steps", type=whole(), default=default.steps, help="training steps")
    parser.add_output(
        "--html", help="write one page with prose, code, values and pictures"
    )
    parser.add(
        "--script",
        action="store_true",
        help="print the chapter as a script of torch.distributed alone",
    )
    args = parser.read(argv)
    if args.script:
        unused = [
            f"--{name}"
            for name in _OF_A_RUN
            if getattr(args, name) != parser.get_default(name)
        ]
        if unused:
            raise UsageError(
                f"--script prints a file and runs nothing; leave out {', '.join(unused)}."
            )
        return _print_script(args)
    if not args.names:
        if args.html:
            raise UsageError("--html needs an experiment's name, or all.")
        return result(
            args, {name: experiment(name).title for name in NAMES}, listing()
        )
    names = list(NAMES) if args.names == ["all"] else args.names
    for name in names:
        experiment(name)
    size = Size(args.batch, args.width, args.layers, args.steps)
    # Weights, gradients and their reference; and the activations that each layer keeps.
    need = 3.0 * size.bytes + 8.0 * size.batch * size.width * size.layers
    way_out = "Write a smaller --width, --batch or --layers"
    refuse_large(need, f"an MLP of {size.layers:,} layers", way_out)
    from .show import as_json, claims_text, lab_page, lab_text
    from .trial import conduct

    trials = []
    for trial in conduct(names, size, ranks=args.ranks, backend=args.backend):
        trials.append(trial)
        if args.json:
            continue
        if args.html or args.names == ["all"]:
            shown = f"{trial.experiment.name:24}" + claims_text(
                trial, verbose=args.verbose
            )
        else:
            shown = lab_text(trial, verbose=args.verbose)
        say(shown, end="", flush=True)
    if args.html:
        save(args.html, lab_page(trials))
    if args.json:
        print_json({"experiments": [as_json(trial) for trial in trials]})
    return 0 if all(trial.holds for trial in trials) else 1


def _print_script(args: argparse.Namespace) -> int:
    if len(args.names) != 1:
        raise UsageError("--script needs the name of one chapter.")
    (name,) = args.names
    script = experiment(name).script
    if not script:
        known = ", ".join(scripted())
        raise UsageError(f"{name} has no script; these have one: {known}.")
    return result(args, {"name": name, "script": script}, script)
