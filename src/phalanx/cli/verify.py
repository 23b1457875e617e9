"""`phalanx verify`: layouts against one process, every gradient and every update."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout import Layout, LayoutError, Shape, legal, nearest
from ..layout.cases import AXES, SHAPES, covering, every_layout
from ..layout.choices import DTYPES, OPTIMIZERS, WIRES
from ..layout.files import open_regular, reason
from ..layout.source import names_source, refuse_broken
from .before import refuse_ranks
from .outputs import try_file, try_folder
from .usage import Parser, UsageError, print_json, say

if TYPE_CHECKING:
    from ..parallel import Model
    from ..verify import Verdict

__all__ = ["run"]

STEPS = 10_000
MOST = 64  # ranks of which all layouts are listed: there are some hundred thousand

_EPILOG = """\
Exit code 0: every layout that was compared agrees with one process; 1: one does not; 2: wrong usage,
not enough memory, or nothing that could be compared. A `recompute:fit` that cannot be met is not
compared: it is listed and counted apart.

  phalanx verify --layouts "dp2 tp2 zero3; tp4 seq"
  phalanx verify --model gpt --ranks 4 --cover 40
  phalanx verify --ranks 8 --part 1/4
  phalanx verify --dtype bfloat16 --optimizer sgd --dropout 0.1 --layouts "dp2 tp2 seq"
  phalanx verify --faults"""


def run(argv: list[str]) -> int:
    """Train a few steps in every layout and compare."""
    parser = Parser(
        "phalanx verify",
        "Trains a few steps in each layout and on one process, and compares loss, norm, every"
        " gradient and every weight; also how weights start, the outputs of pieces, the loss scale of"
        " float16 and the validation loss.",
        _EPILOG,
    )
    add = parser.add_argument
    add("--model", default="gqa", metavar="SHAPE|FILE.py:Class", help="default gqa, a small one")
    add("--ranks", type=int, default=4, metavar="N", help="all legal layouts up to N ranks")
    add("--axes", default="dp pp cp tp", help="the axes that --ranks enumerates")
    add("--layouts", metavar="TEXT", help="these layouts instead, separated by ;")
    add("--cover", type=int, metavar="N", help="a subset of N or more that covers all pairs")
    add("--wire", default="threads", choices=WIRES, help="what carries messages; default threads")
    add("--steps", type=int, default=3)
    add("--dtype", default="float64", choices=DTYPES, help="default float64")
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="sgd has momentum")
    add("--dropout", type=float, default=0.0, metavar="RATE", help="of the built-in models")
    add("--packed", action="store_true", help="sequences packed with documents")
    add("--seed", type=int, default=0)
    add("--memory", type=float, metavar="GIB", help="what may be used; default: what is available")
    add("--part", metavar="I/N", help="one part of a long enumeration; resumes where it stopped")
    add("--log", metavar="FILE", help="verdicts as JSON lines; those it holds are not run again")
    add("--record", metavar="FILE", help="the last layout's last step, for `phalanx draw run`")
    add("--faults", action="store_true", help="put seeded faults in, and see each one caught")
    add("--json", action="store_true")
    said = parser.read(argv)
    _check(said)
    if said.faults:
        return _faults(said)
    return _verify(said)


def _verify(said: argparse.Namespace) -> int:
    shape, make = _model(said.model)
    layouts, log = _part(_layouts(said, shape), said), _log(said, shape)
    if layouts:
        _enough(said, shape, make, layouts)
    from ..verify import verify

    verdicts = []
    for verdict in verify(
        shape, layouts,
        wire=said.wire, steps=said.steps, dtype=said.dtype, seed=said.seed,
        packed=said.packed, dropout=said.dropout, optimizer=said.optimizer,
        log=log, make=make,
        record=Path(said.record) if said.record else None,
    ):  # fmt: skip
        verdicts.append(verdict)
        if not said.json:
            _print(verdict)
    compared = [v for v in verdicts if not v.cannot_fit]
    failed = sum(not v.passed for v in compared)
    if said.json:
        print_json(
            {
                "layouts": [asdict(v) for v in verdicts],
                "passed": len(compared) - failed,
                "failed": failed,
                "cannot_fit": len(verdicts) - len(compared),
            }
        )
    else:
        worst = max((v.max_rel_error for v in compared), default=0.0)
        rest = len(verdicts) - len(compared)
        apart = f" {rest} cannot fit and were not compared." if rest else ""
        say(
            f"{len(compared) - failed} of {len(compared)} layouts of {shape.name} agree with one"
            f" process in {said.dtype}; largest relative error {worst:.1e}.{apart}"
        )
    if failed:
        return 1
    return 0 if compared else 2


def _print(verdict: Verdict) -> None:
    layout = verdict.layout or "one process"
    if verdict.cannot_fit:
        say(f"none cannot fit  {layout}\n     {verdict.first_difference}", flush=True)
        return
    mark = "ok  " if verdict.passed else "FAIL"
    say(f"{mark} {verdict.max_rel_error:8.1e}  {layout}", flush=True)
    if not verdict.passed:
        say(f"     {verdict.first_difference}", flush=True)


def _check(said: argparse.Namespace) -> None:
    """Refuse what has no meaning, before anything is loaded."""
    if not 1 <= said.steps <= STEPS or (said.cover is not None and said.cover < 1):
        raise UsageError(f"--steps is 1 to {STEPS:,}, --cover 1 or more.")
    if not 1 <= said.ranks <= MOST:
        raise UsageError(
            f"--ranks is {said.ranks:,}; all layouts of 1 to {MOST} ranks can be told. Name larger"
            " ones with --layouts."
        )
    if not said.axes.split() or (wrong := [x for x in said.axes.split() if x not in AXES]):
        shown = repr(wrong[0][:60]) if said.axes.split() else "nothing"
        raise UsageError(f"--axes names {shown}; choose of {' '.join(AXES)}.")
    if said.part and not _parts(said.part):
        raise UsageError(f"--part {said.part[:60]}: write 1/4, 2/4, 3/4 or 4/4.")
    if not 0 <= said.dropout < 1:
        raise UsageError(f"--dropout is {said.dropout}; a rate is 0 or more and less than 1.")
    if said.memory is not None and not said.memory > 0:
        raise UsageError(f"--memory is {said.memory}; write how many GiB may be used.")
    if names_source(said.model):
        refuse_broken(said.model, LayoutError)
        if said.dropout:
            raise UsageError("--dropout is for the built-in models; write the rate into your own.")
    try_file(said.record, "--record")
    if said.log:
        try_folder(str(Path(said.log).parent), "--log")
        _refuse_irregular(Path(said.log))


def _refuse_irregular(log: Path) -> None:
    """A log is read before it is written: no pipe, no folder."""
    if not os.path.lexists(log):
        return
    try:
        open_regular(log).close()
    except OSError as error:
        raise UsageError(f"--log: cannot read {log}: {reason(error)}. Name another file.") from None
    try_file(str(log), "--log")


def _enough(
    said: argparse.Namespace,
    shape: Shape,
    make: Callable[[], Model] | None,
    layouts: list[Layout],
) -> None:
    """Refuse what would not fit into memory: the system would kill it half way."""
    from ..verify.memory import GIB, available, needed

    parameters = sum(weight.numel() for weight in make().weights.values()) if make else shape.total
    need = needed(
        shape, parameters, layouts,
        steps=said.steps, dtype=said.dtype, processes=said.wire != "threads",
    )  # fmt: skip
    limit = available() if said.memory is None else said.memory * GIB
    if need.total > limit:
        where = "are available" if said.memory is None else "may be used (--memory)"
        raise UsageError(
            f"verify --model {said.model} needs {need}, and {limit / GIB:,.1f} GiB {where}. Take a"
            " smaller shape with the same parts (gqa, gpt, qwen, or a TOML file of your own), fewer"
            " ranks or --steps, or --memory GIB if you know better."
        )


def _model(name: str) -> tuple[Shape, Callable[[], Model] | None]:
    if names_source(name):
        from ..parallel.model import load_model

        make = partial(load_model, name)
        shape = make().shape
        if shape is None:
            raise LayoutError(
                f"{name}: describe() gives no shape; add shape=Shape(...) to its Model."
            )
        return shape, make
    if name in SHAPES:
        return SHAPES[name], None
    if name not in Shape.names() and not name.endswith(".toml"):
        raise UsageError(
            f"there is no model {name!r}. Small ones with awkward traits are {', '.join(SHAPES)};"
            f" shapes are {', '.join(Shape.names())}; your own is FILE.py:Class."
        )
    return Shape.load(name), None


def _layouts(said: argparse.Namespace, shape: Shape) -> tuple[Layout, ...]:
    if said.layouts is None:
        every = every_layout(shape, said.ranks, axes=said.axes)
        return covering(every, said.cover) if said.cover else every
    named = Layout.parse_many(said.layouts)
    refuse_ranks(
        max((layout.ranks for layout in named), default=1),
        flag="--layouts: the most ranks of a layout",
    )
    wrong = []
    for layout in named:
        broken = legal(layout, shape)
        if broken:
            near = "; ".join(map(str, nearest(layout, shape)))
            wrong.append(f"{layout}: " + " ".join(map(str, broken)) + f" Nearest: {near}.")
    if wrong:
        raise LayoutError("\n".join(wrong))
    return tuple(replace(x, precision="fp64") if said.dtype == "float64" else x for x in named)


def _parts(text: str) -> tuple[int, int] | None:
    """The part and the number of parts that I/N says."""
    found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
    return (int(found[1]), int(found[2])) if found and 1 <= int(found[1]) <= int(found[2]) else None


def _part(layouts: Sequence[Layout], said: argparse.Namespace) -> list[Layout]:
    """Every n-th layout, so that each part has its share of the large ones."""
    part, parts = _parts(said.part or "") or (1, 1)
    return list(layouts[part - 1 :: parts])


def _log(said: argparse.Namespace, shape: Shape) -> Path | None:
    """Where verdicts are told, in a folder that is made."""
    if not said.log and not said.part:
        return None
    part = str(said.part).replace("/", "of")
    default = f"{shape.name}-{said.ranks}-{said.dtype}-{said.wire}-{part}.jsonl"
    log = Path(said.log) if said.log else Path("runs", "verify", default)
    try_folder(str(log.parent), "--log")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def _faults(said: argparse.Namespace) -> int:
    from ..verify.catch import catch
    from ..verify.faults import FAULTS

    caught = [catch(fault) for fault in FAULTS]
    if said.json:
        print_json({"faults": [asdict(c) for c in caught]})
        return 0 if all(c.caught and c.named for c in caught) else 1
    say("| fault | layout | verify says | loss of the first step off by | of three steps |")
    say("|---|---|---|---|---|")
    for c in caught:
        says = c.first_difference.split(" is ")[0] if c.caught else "NOT CAUGHT"
        say(
            f"| {c.fault} | {c.layout.removesuffix(' fp64')} | {says} |"
            f" {c.first_loss_error:.0e} | {c.loss_error:.0e} |"
        )
    first = sum(c.first_loss_error > 1e-3 for c in caught)
    three = sum(c.loss_error > 1e-3 for c in caught)
    say(
        f"\nverify catches {sum(c.caught for c in caught)} of {len(caught)}. Losses that agree to"
        f" 1e-3 would have caught {first} after one step, {three} after three."
    )
    return 0 if all(c.caught and c.named for c in caught) else 1
