"""Runs that are killed repeatedly, and one that meets faults for an hour.

    python benchmarks/kills.py --kills 300 --seed 0
    python benchmarks/kills.py --soak 3600 --between 60

A kill is SIGKILL at a drawn moment, to one rank, to the command or torchrun's agent, or
to all of them; a third of the kills hit a save. After each kill every checkpoint is
verified, and no process or shared memory may be left. After ten kills the run continues
to its end; its losses and weights must equal those of an undisturbed run, bit for bit.
The checks are in `tests/training/kill_worlds.py`.

The soak is one run with `train.restarts`. Faults come at drawn moments, `--between`
seconds apart on average: one rank or all are killed, a rank is stopped (SIGSTOP), or
the command is killed and started again. Effective time is the share of the total spent
in steps that count, each counted once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "training"))

from kill_worlds import CODE, Campaign, family
from loop_worlds import records

COURSES = [
    ("dp2 zero1", False, ""), ("pp2 1f1b:2", True, ""), ("tp2", False, "torchrun"),
    ("dp2 zero3", True, ""), ("dp2 zero2", True, "torchrun"), ("cp2", False, ""),
]  # fmt: skip
AGENT = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--no-python",
]
SOAKED = [
    "model={layers=4,hidden=128,heads=4,ffn=352,vocab=256}", "batch=8", "sequence=128",
    "validation.batches=0", "steps=1000000", "checkpoint.every=20", "checkpoint.async=true",
    "hang.timeout=5", "train.restarts=1000", "layout=dp2 zero1", "metrics.every=1",
]  # fmt: skip


class UnderAgent(Campaign):
    """The same under torchrun's agent, which starts the ranks."""

    def python(self) -> list[str]:
        return [sys.executable, *AGENT, sys.executable]


def course(number: int, kills: int, counts: Counter[str]) -> None:
    """Kill one run several times, and check its end."""
    layout, asynchronous, agent = COURSES[number % len(COURSES)]
    who = f"{layout}{', saves in the background' if asynchronous else ''}{agent and ', ' + agent}"
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        made = UnderAgent if agent else Campaign
        run = made(Path(name, "run"), layout, asynchronous, seed=number)
        try:
            for kill in range(kills):
                run.kill(in_save=kill % 3 == 0)
            last = run.end()
            run.undisturbed(Path(name, "undisturbed"), last)
            wrong = "bit-equal"
        except (AssertionError, subprocess.TimeoutExpired):
            traceback.print_exc()
            wrong, counts["courses that went wrong"] = (
                "WRONG",
                counts["courses that went wrong"] + 1,
            )
    counts["kills"] += run.killed
    counts["of them inside a save"] += run.killed_in_save
    counts["most steps lost"] = max(counts["most steps lost"], *run.lost, 0)
    print(
        f"{who}: {run.killed} kills, {run.killed_in_save} inside a save, {max(run.lost, default=0)}"
        f" steps lost at most: {wrong}",
        flush=True,
    )


def soak(seconds: float, between: float, seed: int) -> None:
    draw, faults = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        out, mark = Path(name, "run"), f"TMPDIR={name}/temporary"
        Path(name, "temporary").mkdir()
        words = [sys.executable, "-c", CODE, *SOAKED, f"out={out}"]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": f"{name}/temporary",
        }
        with Path(name, "log").open("ab") as log:

            def begin() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    words, env=env, stdout=subprocess.DEVNULL, stderr=log
                )

            begun = time.time()
            process, at = begin(), begun + draw.expovariate(1 / between)
            while time.time() < begun + seconds:
                time.sleep(0.05)
                if process.poll() is not None:
                    faults["commands that ended by themselves"] += (
                        process.returncode != -9
                    )
                    process = begin()
                if time.time() < at:
                    continue
                at = time.time() + draw.expovariate(1 / between)
                ranks = sorted(set(family(mark)) - {process.pid})
                fault = draw.choices(
                    (
                        "rank killed",
                        "rank stopped",
                        "all ranks killed",
                        "command killed",
                    ),
                    (4, 3, 1, 2),
                )[0]
                victims = (
                    ranks
                    if fault == "all ranks killed"
                    else [draw.choice(ranks or [0])]
                )
                if fault == "command killed":
                    victims = [process.pid]
                sent = (
                    signal.SIGSTOP
                    if fault == "rank stopped"
                    else signal.SIGKILL
                )
                for victim in filter(None, victims):
                    with suppress(ProcessLookupError):
                        os.kill(victim, sent)
                faults[fault] += 1
            ended = time.time()
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=120)
        time.sleep(1)
        took = {
            int(r["step"]): float(r["seconds"]) for r in records(out, "step")
        }
        starts = len(records(out, "start"))
        effective = sum(took.values()) / (ended - begun)
        print(
            f"{ended - begun:.0f} s, {sum(faults.values())} faults {dict(faults)}, {starts} starts,"
            f" {len(took)} steps, effective {effective:.1%}, ended with {code},"
            f" {len(family(mark))} processes left"
        )
        if code != 75:
            print(Path(name, "log").read_text()[-4000:])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first course of ten kills"
    )
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument(
        "--between", type=float, default=60.0, metavar="SECONDS"
    )
    args = parser.parse_args()
    if args.soak:
        soak(args.soak, args.between, args.seed)
        return 0
    counts = Counter[str]()
    for number in range(-(-args.kills // 10)):
        course(args.seed + number, min(10, args.kills - 10 * number), counts)
    print(dict(counts))
    return int(counts["courses that went wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
