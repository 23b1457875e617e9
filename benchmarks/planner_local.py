"""Planner against this machine: layouts are predicted, then measured in one campaign.

    OMP_NUM_THREADS=1 python benchmarks/planner_local.py --machine machine.toml --calibrate

Without --machine the machine is measured first, which takes about a minute. One world
of gloo ranks runs all layouts of its size. Each layout is built, warmed up with two
steps and timed; further rounds repeat all layouts, so that a disturbance of the machine
affects all of them. A step lasts from a barrier to the end of the slowest rank; a
layout's time is that of its fastest step.

With --calibrate half of the layouts, chosen by a hash of their text, fit the numbers of
the profile; the other half is scored.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx import bench
from phalanx.bench import Thoroughness, local_device
from phalanx.comm import World
from phalanx.comm.launch import workers
from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape, legal
from phalanx.parallel import build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.planner import Machine
from phalanx.planner.calibrate import CostedRun, Measured, calibrated, costed
from phalanx.planner.local import hardware_of_machine, local_profile
from phalanx.planner.profile import NUMBERS, SoftwareProfile
from phalanx.planner.step import case_of
from phalanx.program import StepOptions
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.precision import precision_of
from phalanx.training.program import program_of
from phalanx.verification import batch_of

MODELS = {
    "deep": Shape(
        "deep",
        layers=6,
        hidden=256,
        heads=4,
        ffn=704,
        vocab=1024,
        sequence=128,
        batch=8,
    ),
    "wide": Shape(
        "wide",
        layers=2,
        hidden=448,
        heads=4,
        ffn=1216,
        vocab=1024,
        sequence=128,
        batch=8,
    ),
}
# Layouts of one world size. With more, every second one is skipped; each pair of
# choices is still covered.
MOST = 60
WARM = 2  # untimed steps of a layout


def meshes(ranks: int) -> Iterator[str]:
    """Yield every way to write `ranks` as dp x pp x cp x tp."""
    sizes = [d for d in range(1, ranks + 1) if ranks % d == 0]
    for four in itertools.product(sizes, repeat=4):
        if four[0] * four[1] * four[2] * four[3] == ranks:
            names = zip(("dp", "pp", "cp", "tp"), four, strict=True)
            yield " ".join(f"{name}{n}" for name, n in names if n > 1)


def layouts(shape: Shape, ranks: int) -> list[Layout]:
    """Return all legal layouts or, if there are too many, a subset that still covers
    each pair of choices."""
    found = []
    for mesh in meshes(ranks):
        split = "dp" in mesh or "cp" in mesh
        schedules = (
            ("1f1b:4", "gpipe:4") if "pp" in mesh else ("accum:1", "accum:2")
        )
        choices = itertools.product(
            enumerate((0, 1, 3) if split else (0,)),
            enumerate(schedules),
            enumerate(("none", "all")),
        )
        for (i, zero), (j, schedule), (k, again) in choices:
            layout = Layout.parse(
                f"{mesh} zero{zero} {schedule} recompute:{again} fp32"
            )
            if not legal(layout, shape):
                found.append((layout, (i + j + k) % 2 == 0))
    return (
        [x for x, _ in found]
        if len(found) <= MOST
        else [x for x, kept in found if kept]
    )


# ---- measured


def steps_of(
    world: World, shape: Shape, text: str, number: int, count: int
) -> list[float]:
    """Return the seconds of `count` steps of one layout, after warm-up steps that
    allocate memory."""
    layout = Layout.parse(text)
    model = build_model(shape)
    program = program_of(model, layout, StepOptions(agree=False))
    held = build_local(
        world,
        layout,
        model,
        program,
        precision=precision_of("fp32"),
        prefix=f"{number}/",
    )
    performer = Executor(held, program, world.rank, AdamW())
    batch = batch_of(shape, 0, dtype=torch.float32)
    own = microbatches(
        batch, layout, held.coordinates["dp"], held.coordinates["cp"]
    )
    times = []
    for step in range(WARM + count):
        dist.barrier()
        begun = time.perf_counter()
        performer.step(own, 1e-4)
        mine = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        if step >= WARM:
            times.append(float(mine))
    # Otherwise the groups of all layouts so far stay open, and their threads slow down
    # later ones.
    world.clear()
    return times


def campaign(
    shape: Shape, ranks: int, asked: Sequence[Layout], rounds: int, steps: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {str(x): [] for x in asked}
    number = 0
    with workers(ranks, backend="gloo", threads_per_rank=1) as run:
        for _ in range(rounds):
            for text in times:
                number += 1
                times[text] += run(steps_of, shape, text, number, steps)[0]
    return times


# ---- scored


def tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Kendall's tau without ties."""
    agree = total = 0
    for a, b in itertools.combinations(range(len(measured)), 2):
        sign = (predicted[a] - predicted[b]) * (measured[a] - measured[b])
        agree += (sign > 0) - (sign < 0)
        total += sign != 0
    return agree / total if total else 0.0


def scored(
    name: str, runs: Sequence[CostedRun], profile: SoftwareProfile
) -> dict[str, object]:
    rows = [(run.step(profile), run.measured, run.run.name) for run in runs]
    pick, best = min(rows), min(rows, key=lambda row: row[1])
    return {
        "case": name,
        "layouts": len(rows),
        "median_error": statistics.median(abs(p / m - 1) for p, m, _ in rows),
        "bias": statistics.median(p / m - 1 for p, m, _ in rows),
        "tau": tau([p for p, _, _ in rows], [m for _, m, _ in rows]),
        "regret": pick[1] / best[1] - 1,
        "pick": pick[2],
        "best": best[2],
    }


def teaches(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 0


def table(title: str, rows: Sequence[dict[str, object]]) -> str:
    lines = [
        f"### {title}",
        "",
        "| model, ranks | layouts | median error | bias | tau | pick above best | pick | best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['layouts']} | {r['median_error']:.0%} | {r['bias']:+.0%}"
        f" | {r['tau']:.2f} | {r['regret']:.1%} | `{r['pick']}` | `{r['best']}` |"
        for r in rows
    ]
    return "\n".join(lines)


def measure_machine(path: Path, most: int) -> Machine:
    asked = Thoroughness(limit=60.0, ranks=most, backend="gloo")
    machine = bench.measure_machine(
        local_device("cpu"),
        asked,
        lambda line: print(f"measuring {line}", flush=True),
    )
    path.write_text(machine.text(), encoding="utf-8")
    return machine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add(
        "--machine",
        type=Path,
        default=None,
        help="what `phalanx doctor --out` wrote",
    )
    add("--models", nargs="+", default=list(MODELS), choices=MODELS)
    add("--ranks", nargs="+", type=int, default=[2, 4])
    add("--rounds", type=int, default=2)
    add(
        "--steps",
        type=int,
        default=4,
        help="timed steps of a layout in each round",
    )
    add("--calibrate", action="store_true")
    add(
        "--times",
        type=Path,
        help="measured times are kept here, and not measured again",
    )
    add("--all", action="store_true", help="print every layout")
    said = parser.parse_args()
    print(
        f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    machine = (
        Machine.load(said.machine)
        if said.machine
        else measure_machine(Path("machine.toml"), max(said.ranks))
    )
    known = (
        json.loads(said.times.read_text())
        if said.times and said.times.is_file()
        else {}
    )
    groups: dict[str, list[CostedRun]] = {}
    for name, ranks in itertools.product(said.models, said.ranks):
        shape, key = MODELS[name], f"{name}, {ranks}"
        asked = layouts(shape, ranks)
        hardware = hardware_of_machine(machine, ranks, "gloo")
        runs = [Measured(str(x), case_of(shape, x)) for x in asked]
        # Predicted before anything runs; later only the measured times are added.
        priced = costed(
            runs,
            hardware,
            partial(cached_costs, target="cpu"),
            local_profile("fp32"),
        )
        if key not in known:
            known[key] = campaign(shape, ranks, asked, said.rounds, said.steps)
            if said.times:
                said.times.write_text(json.dumps(known))
        # The minimum over steps: other load can only make a step longer.
        groups[key] = timed(
            priced, {name: min(times) for name, times in known[key].items()}
        )
        print(f"{key} ranks: {len(asked)} layouts", flush=True)
    report(groups, known, local_profile("fp32"), said)


def rounds_agree(times: Sequence[Sequence[float]]) -> float:
    """Return tau between the layouts' order in the first half of their steps and in the
    second."""
    half = len(times[0]) // 2
    return tau([min(x[:half]) for x in times], [min(x[half:]) for x in times])


def timed(
    runs: Sequence[CostedRun], seconds: dict[str, float]
) -> list[CostedRun]:
    """Return the runs with these measured times."""
    return [
        replace(x, run=replace(x.run, seconds=seconds[x.run.name]))
        for x in runs
    ]


def report(
    groups: dict[str, list[CostedRun]], known: dict[str, dict[str, list[float]]],
    profile: SoftwareProfile, said: argparse.Namespace,
) -> None:  # fmt: skip
    print(
        "\n"
        + table(
            "As it comes",
            [scored(key, g, profile) for key, g in groups.items()],
        )
    )
    medians = {
        key: timed(
            g, {name: statistics.median(x) for name, x in known[key].items()}
        )
        for key, g in groups.items()
    }
    print(
        "\n"
        + table(
            "By medians",
            [scored(key, g, profile) for key, g in medians.items()],
        )
    )
    agree = (
        f"{key} {rounds_agree(list(known[key].values())):.2f}"
        for key in groups
    )
    print(
        f"\ntau of the first half of the steps and the second: {'; '.join(agree)}"
    )
    if said.calibrate:
        own = [
            run for g in groups.values() for run in g if teaches(run.run.name)
        ]
        profile = calibrated(profile, own)(None)
        rest = [
            scored(
                key, [run for run in g if not teaches(run.run.name)], profile
            )
            for key, g in groups.items()
        ]
        numbers = ", ".join(
            f"{name} {getattr(profile, name):g}" for name in NUMBERS
        )
        print(
            "\n"
            + table("The half that did not calibrate", rest)
            + f"\n\n{numbers}"
        )
    for key, g in groups.items() if said.all else ():
        print(f"\n{key}")
        for run in sorted(g, key=lambda run: run.measured):
            found = run.choice(profile)
            parts = "  ".join(
                f"{n} {1e3 * x:.0f}" for n, x in found.parts.items()
            )
            print(
                f"{1e3 * run.measured:7.0f} {1e3 * found.step:7.0f}  {run.run.name}  {parts}"
            )


if __name__ == "__main__":
    main()
