"""`phalanx audit`: any torch program's gradients and updates, recorded and compared with one process.

  phalanx audit run --out one --one -- python train.py
  phalanx audit run --out many -- torchrun --nproc-per-node 4 train.py
  phalanx audit compare one many

No line of the program is changed. Exit code 0: equal, or no fault was seen; 1: a run is refuted; 2: the
runs are not comparable, or wrong usage.
"""

from pathlib import Path

from .parser import Parser, chosen, whole
from .usage import result


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    return chosen(parser, argv, {"run": _record, "compare": _compare})


def _record(argv: list[str]) -> int:
    """`phalanx audit run`: records some steps of a program, on all of its ranks.

    The program's command stands behind two dashes: phalanx audit run --out A -- python train.py
    """
    from torch_audit.command import record_all, split_words
    from torch_audit.start import Settings

    # Split first, as the program's own options would confuse our parser.
    words, program = split_words(argv)
    parser = Parser(_record.__doc__)
    parser.add(
        "--out",
        required=True,
        metavar="DIR",
        help="a new folder for the record",
    )
    parser.add("--steps", type=whole(), default=3, help="steps to record")
    what = "the program is one process: a reference"
    parser.add("--one", action="store_true", help=what)
    what = (
        "run it N times, with weights moved by one unit in the last place, into DIR-1 to DIR-N:"
        " the tolerances of a comparison"
    )
    parser.add("--perturb", type=whole(0, 99), default=0, help=what)
    what = "make float64 the default dtype of the program's tensors"
    parser.add("--float64", action="store_true", help=what)
    what = "also write hashes of the weights' rows and columns, for --find-in"
    parser.add("--contents", action="store_true", help=what)
    what = "find shards that nobody declares by their contents in a reference"
    parser.add("--find-in", type=Path, metavar="ONE", help=what)
    args = parser.read(words)
    settings = Settings(
        Path(args.out),
        args.steps,
        float64=args.float64,
        contents=args.contents,
        find_in=args.find_in,
    )
    recorded = record_all(
        settings, program, one=args.one, perturb=args.perturb
    )
    # Without --json everything has been said while the program ran.
    if args.json:
        result(args, recorded.figures, "")
    return recorded.code


def _compare(argv: list[str]) -> int:
    """`phalanx audit compare`: compares recorded runs with a reference."""
    from torch_audit.command import compare_folders

    parser = Parser(_compare.__doc__)
    parser.add("reference", metavar="ONE", help="the folder of the reference")
    parser.add(
        "runs", nargs="+", metavar="RUN", help="the folders of other runs"
    )
    what = "perturbed runs of the reference, which give the tolerances"
    parser.add("--perturbed", nargs="+", default=[], metavar="DIR", help=what)
    what = (
        "record a difference in float64 again in the run's own dtype, by the"
        " commands that the records name"
    )
    parser.add("--repeat", action="store_true", help=what)
    args = parser.read(argv)
    compared = compare_folders(
        Path(args.reference),
        [Path(x) for x in args.runs],
        [Path(x) for x in args.perturbed],
        repeated=args.repeat,
    )
    result(args, compared.figures, compared.text)
    return compared.code
