"""Time to save and load a checkpoint on one rank, against torch.save and torch.load.

    OMP_NUM_THREADS=1 python benchmarks/checkpoints.py [--rounds 8] [--beside OTHER/src]

All save and load the same tensors and alternate within one run; `--beside` includes
another checkout of phalanx. Every save ends with an fsync. Loads read from the page
cache; torch's have no checksums. Ten steps are timed alone, and with a background save
that begins before the first. CPU seconds are the sum over threads and depend less on
the machine's other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "model={layers=6,hidden=512,heads=8,ffn=1376,vocab=8192,sequence=256}"


def work(out: Path) -> None:
    """Run one contender: execute the commands on standard input and print the seconds
    of each."""
    import torch

    from phalanx.comm import AloneWorld
    from phalanx.layout import Layout, Run
    from phalanx.training.checkpoint import Saver
    from phalanx.training.checkpoint_format import Progress
    from phalanx.training.checkpoint_load import load
    from phalanx.training.rank import Rank

    run = Run.parse("", "run", (MODEL, "batch=1", f"out={out}"))
    rank = Rank(AloneWorld(), run, Layout.parse("fp32"))
    rank.part.trainer.step(rank.batch(0), 1e-3)
    saver = Saver(run.checkpoints, rank.part.local, rank.part.updates, keep=1)
    behind = Saver(
        out / "behind",
        rank.part.local,
        rank.part.updates,
        keep=1,
        asynchronous=True,
    )
    # possibly from another checkout
    updates: list[Any] = list(rank.part.updates.values())
    state = [
        list(s.values())
        for u in updates
        for s in getattr(u, "torch", u).state.values()
    ]
    tensors: list[Any] = [
        [unit.home for unit in rank.part.local.units.values()],
        state,
    ]

    def torch_save() -> None:
        with (out / "torch.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def steps() -> None:
        for number in range(10):
            rank.part.trainer.step(rank.batch(number), 1e-3)
            behind.poll()

    for step, line in enumerate(sys.stdin):
        begun, worked = time.perf_counter(), time.process_time()
        match line.strip():
            case "save":
                saver.save(Progress(step))
            case "load":
                load(run.checkpoints, rank.part.local, rank.part.updates)
            case "torch.save":
                torch_save()
            case "torch.load":
                torch.load(out / "torch.pt")
            case "steps":
                steps()
            case "steps, saving":
                behind.save(Progress(step))
                steps()
        print(
            time.perf_counter() - begun,
            time.process_time() - worked,
            flush=True,
        )
        behind.finish()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--beside", default="", metavar="SRC")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    sources = {"ours": os.environ.get("PYTHONPATH", "")}
    sources |= {"the other": args.beside} if args.beside else {}
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for name, source in sources.items():
            out = Path(folder, name)
            out.mkdir()
            started[name] = subprocess.Popen(
                [sys.executable, __file__, "--work", str(out)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": source},
            )  # fmt: skip
        turns = [
            (f"{what}, {name}", name, what)
            for what in ("save", "load")
            for name in sources
        ]
        turns[len(sources) : len(sources)] = [
            ("torch.save", "ours", "torch.save")
        ]
        turns.append(("torch.load", "ours", "torch.load"))
        turns += [(what, "ours", what) for what in ("steps", "steps, saving")]
        for turn in range(args.rounds + 1):
            for title, name, what in turns:
                pipes: Any = started[name]
                print(what, file=pipes.stdin, flush=True)
                wall, cpu = map(float, pipes.stdout.readline().split())
                if turn:  # the first warms up
                    seconds.setdefault(title, []).append((wall, cpu))
        for process in started.values():
            process.communicate()
    beside = {
        "save": "torch.save",
        "load": "torch.load",
        "steps, saving": "steps",
    }
    print(
        "| | s, median (quartiles) | s of CPU | ratio, median (quartiles) |\n|---|---|---|---|"
    )
    for title, values in seconds.items():
        low, middle, high = statistics.quantiles(
            (wall for wall, _ in values), n=4
        )
        cpu, ratio = statistics.median(cpu for _, cpu in values), ""
        if base := beside.get(title.partition(", ours")[0]):
            pairs = zip(values, seconds[base], strict=True)
            quartiles = statistics.quantiles(
                (a / b for (a, _), (b, _) in pairs), n=4
            )
            ratio = "{1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles)
        print(
            f"| {title} | {middle:.2f} ({low:.2f}-{high:.2f}) | {cpu:.2f} | {ratio} |"
        )


if __name__ == "__main__":
    main()
