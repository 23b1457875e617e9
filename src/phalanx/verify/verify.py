"""Every layout against one process, gradient by gradient.

In float64 a layout passes when nothing differs by more than 1e-10. In a narrower precision the
tolerance is measured: what one process in that precision is off from float64, times four.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..comm.launch import workers
from ..layout import Layout, LayoutError, Shape
from ..parallel import Model, Precision, build_model, refuse_unfit
from ..program import Recorded, Timeline
from ..train.precision import precision_of
from ..train.program import program_of
from .cases import batch_of
from .compare import Difference, compare
from .reference import Step, reference
from .trial import Seen, Setting, join, train_layout

__all__ = ["EXACT", "Verdict", "judge", "true_steps", "verify"]

EXACT = 1e-10
SLACK = 4.0


@dataclass(frozen=True)
class Verdict:
    """What became of one layout."""

    layout: str
    ranks: int
    passed: bool
    max_rel_error: float
    first_difference: str = ""


def precision_named(dtype: str) -> Precision:
    """The precision that computes in a dtype of torch's name."""
    words = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if dtype not in words:
        raise LayoutError(f"there is no dtype {dtype!r}; choose {', '.join(words)}.")
    return precision_of(words[dtype])


def verify(
    shape: Shape,
    layouts: Iterable[Layout],
    *,
    wire: str = "threads",
    steps: int = 3,
    dtype: str = "float64",
    seed: int = 0,
    packed: bool = False,
    log: Path | None = None,
    record: Path | None = None,
    make: Callable[[], Model] | None = None,
) -> Iterator[Verdict]:
    """A verdict for each layout, as they come; those that the log already tells are not run again.

    One world of ranks serves all layouts of its size. `record` is where the last layout's last step
    is written, for `phalanx draw run`.
    """
    make, layouts = make or partial(build_model, shape), tuple(layouts)
    for layout in layouts:
        refuse_unfit(make(), layout)
    precision = precision_named(dtype)
    wide = torch.float64
    setting = Setting(
        partial(batch_of, shape, seed=seed, dtype=wide, packed=packed),
        steps=steps, precision=Precision(wide, wide, wide), seed=seed,
    )  # fmt: skip
    known = _told(log)
    truth = true_steps(make, setting)
    narrow = replace(
        setting, precision=precision,
        batches=partial(batch_of, shape, seed=seed, dtype=precision.compute, packed=packed),
    )  # fmt: skip
    tolerance = EXACT if dtype == "float64" else _measured(make, narrow, truth)
    by_size: dict[int, list[Layout]] = {}
    for layout in layouts:
        by_size.setdefault(layout.ranks, []).append(layout)
    for size, group in sorted(by_size.items()):
        yield from (known[str(x)] for x in group if str(x) in known)
        new = [x for x in group if str(x) not in known]
        for verdict in (
            _world(size, new, wire, make, narrow, truth, tolerance, record) if new else ()
        ):
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
            yield verdict


def _world(
    size: int,
    layouts: list[Layout],
    wire: str,
    make: Callable[[], Model],
    setting: Setting,
    truth: list[Step],
    tolerance: float,
    record: Path | None,
) -> Iterator[Verdict]:
    with workers(size, wire=wire) as run:
        for layout in layouts:
            try:
                seen: list[Seen] = run(train_layout, layout, make, setting)
            except RuntimeError as error:
                yield Verdict(str(layout), size, False, float("inf"), str(error).splitlines()[0])
                return
            got = join(seen, setting.steps)
            if record:
                spans = tuple(span for rank in seen for span in rank.timeline.spans)
                program = program_of(make(), layout, agree=True)
                record.write_text(str(Recorded(program, Timeline(spans))))
            yield judge(layout, compare(got, truth, setting.lr), tolerance)


def judge(layout: Layout, found: list[Difference], tolerance: float) -> Verdict:
    worst = max(found, key=lambda d: d.error)
    first = next((str(d) for d in found if not d.error <= tolerance), "")
    return Verdict(str(layout), layout.ranks, not first, worst.error, first)


def true_steps(make: Callable[[], Model], setting: Setting) -> list[Step]:
    """What one process does, in float64."""
    return reference(
        make(), setting.batches, steps=setting.steps, optimizer=setting.optimizer,
        lr=setting.lr, clip=setting.clip, dtype=torch.float64, seed=setting.seed,
    )  # fmt: skip


def _measured(make: Callable[[], Model], setting: Setting, truth: list[Step]) -> float:
    """How far one process in this precision is from float64, with room for another order of sums."""
    with workers(1, wire="threads") as run:
        alone = join(run(train_layout, Layout(), make, setting), setting.steps)
    return SLACK * max(d.error for d in compare(alone, truth, setting.lr))


def _told(log: Path | None) -> dict[str, Verdict]:
    if log is None or not log.exists():
        return {}
    verdicts = (Verdict(**json.loads(line)) for line in log.read_text().splitlines() if line)
    return {v.layout: v for v in verdicts}
