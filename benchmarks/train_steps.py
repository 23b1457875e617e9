"""Steps of `phalanx train` against loops of plain PyTorch: one rank, data and tensor
parallelism, pipelines.

    python benchmarks/train_steps.py one --size 27m --accum 4 [--beside OTHER/src]
    python benchmarks/train_steps.py data --size 5m --only DDP "phalanx dp2,"
    python benchmarks/train_steps.py experts --size sparse --accum 4 --ranks 4
    python benchmarks/train_steps.py tensor --size 27m
    python benchmarks/train_steps.py pipeline --accum 8
    python benchmarks/train_steps.py exact --size 5m --accum 2
    python benchmarks/train_steps.py one --memory

Each contender runs in its own processes with one thread each. All are alive at once and
take steps in turn, woken through a socket; a step lasts until its slowest rank is done.
A ratio compares medians within a round. phalanx is the unchanged command `phalanx
train`, whose steps wait until they are woken; `torch_loops.py` has the others. All have
the same model and batches, with 512 tokens per rank and microbatch, clip the norm at 1,
use a fused AdamW, and read the loss once a step.

The base is a plain loop with one rank's share of the batch; for tensor parallelism and
pipelines, with the whole batch; with experts, FSDP2 over the same decoder; for a layout
of `exact`, the same layout without the word. "hand" is a
model of torch's own modules, compiled as a whole; "FSDP2, accum" keeps weights and
gradients over a step's microbatches. "two plain loops" do not communicate, which shows
the cost of sharing the machine. With `--memory` each contender trains two steps alone,
and live storages are counted from before the model is created.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TREE = Path(__file__).parent.parent
SIZES = {
    "5m": {"layers": 8, "hidden": 192, "heads": 6, "kv_heads": 2, "ffn": 544, "vocab": 1024},
    "tiny": {"layers": 6, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 256},
    "27m": {"layers": 8, "hidden": 480, "heads": 8, "kv_heads": 4, "ffn": 1312, "vocab": 4096},
    "sparse": {"layers": 4, "hidden": 192, "heads": 6, "kv_heads": 2, "ffn": 544, "vocab": 1024,
               "experts": 8, "top_k": 2, "expert_ffn": 544},
    "fine": {"layers": 4, "hidden": 192, "heads": 6, "kv_heads": 2, "ffn": 544, "vocab": 1024,
             "experts": 64, "top_k": 6, "expert_ffn": 128},
}  # fmt: skip
ROWS, SEQUENCE = 2, 256  # of a microbatch on one rank
OTHER = "the other checkout"
ALONE = ("plain", "hand")  # loops in one process


def over(
    layouts: tuple[str, ...], backends: tuple[str, ...] = ("gloo", "shm")
) -> dict[str, str]:
    return {
        f"phalanx {layout}, {backend}": f"phalanx --ranks N --backend {backend} {layout}"
        for backend in backends for layout in layouts
    }  # fmt: skip


SETS: dict[str, dict[str, str]] = {
    "one": {
        "plain loop": "plain", "plain loop, compiled": "plain compile",
        "hand": "hand", "hand, compiled": "hand compile",
        "phalanx": "phalanx --ranks 1", "phalanx, compiled": "phalanx --ranks 1 compile",
    },
    "data": {
        "plain loop": "plain", "two plain loops": "apart",
        "DDP": "ddp", "FSDP2": "fsdp", "FSDP2, kept": "fsdp-kept", "FSDP2, accum": "fsdp-accum",
        **over(("dpN", "dpN zero1", "dpN zero3", "dpN zero3 gather:step reduce:step")),
    },
    "experts": {  # with --size sparse, or fine
        "FSDP2": "fsdp", "FSDP2, kept": "fsdp-kept",
        **over(("dpN zero3", "epN", "epN overlap")),
    },
    "tensor": {
        "plain loop": "plain", "DTensor": "dtensor", "DTensor, shm": "dtensor-shm",
        **over(("tpN", "tpN seq")),
    },
    "pipeline": {
        "plain loop": "plain", "torch GPipe": "gpipe", "torch 1F1B": "1f1b",
        "torch interleaved": "interleaved", "torch zero bubble": "zero-bubble",
        **over(("ppN gpipe", "ppN 1f1b", "ppN interleaved2", "ppN zb-h1"), ("gloo",)),
    },
    "exact": over((
        "dpN", "dpN exact", "dpN zero2", "dpN zero2 exact", "dpN zero3", "dpN zero3 exact",
        "ppN 1f1b", "ppN 1f1b exact", "tpN", "tpN exact:4",
    ), ("shm",)),
}  # fmt: skip  # N: --ranks


# ---- in a contender's process


# Times of this rank's last step: tokens in flight to or from experts, and the part
# during which the rank computed nothing.
TRAVELS = [0.0, 0.0]
MESSAGE = 128


def look_at_travels() -> None:
    """Record the exchange times of each step's measured timeline; a span ends when it
    is waited for."""
    from phalanx.program import Timeline, ops
    from phalanx.training.executor import Executor

    real = Executor.step

    def step(self: Any, *args: Any) -> Any:
        result = real(self, *args)
        kinds = (*ops.EXCHANGES, *ops.COMPUTES)
        spans = tuple(
            span for span in result.timeline.spans if span.op.kind in kinds
        )
        ways = tuple(span for span in spans if span.op.kind in ops.EXCHANGES)
        # Without any computation, all of their time is exposed.
        TRAVELS[:] = (
            (Timeline(each).exposed(self.rank) for each in (ways, spans))
            if ways
            else (0.0, 0.0)
        )
        return result

    Executor.step = step  # type: ignore[method-assign]


class Gate:
    """Place where a rank waits to be woken for a step; it reports the step's time."""

    def __init__(self, rank: int) -> None:
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(os.environ["STEPS_SOCKET"])
        self.line.sendall(bytes([rank]))

    def begin(self) -> None:
        if not self.line.recv(1):
            os._exit(0)
        self.begun, self.worked = time.perf_counter(), time.process_time()

    def end(self) -> None:
        took = (
            time.perf_counter() - self.begun,
            time.process_time() - self.worked,
        )
        self.line.sendall(
            json.dumps([*took, *TRAVELS]).encode().ljust(MESSAGE)
        )


class Counted:
    """Replaces the gate: runs two steps, counts the bytes of live storages, and
    exits."""

    def __init__(self, rank: int) -> None:
        from phalanx.cost.live import Live

        self.steps, self.live = 0, Live()
        self.live.__enter__()

    def begin(self) -> None:
        if self.steps == 2:
            # Not `print`: in `phalanx train` a thread writes its output, and it ends
            # with the process.
            os.write(1, f"most {self.live.most}\n".encode())
            os._exit(0)
        self.steps += 1

    def end(self) -> None:
        pass


def phalanx(words: list[str], gate_of: Callable[[int], Any]) -> None:
    """Run `phalanx train` with these words, with steps that wait at a gate.

    A step is timed from its batch to its log line.
    """
    from phalanx.cli.main import main
    from phalanx.training.log import RunLog
    from phalanx.training.rank import Rank

    gates: list[Any] = []
    made, batch, line = Rank.__init__, Rank.batch, RunLog.step

    def making(self: Any, world: Any, *args: Any, **options: Any) -> None:
        # created here, because ranks are forked after this function
        gates.append(gate_of(world.rank))
        made(self, world, *args, **options)

    def begin(self: Any, step: int) -> Any:
        gates[0].begin()
        return batch(self, step)

    def end(self: Any, *args: Any) -> None:
        line(self, *args)
        gates[0].end()

    Rank.__init__ = making  # type: ignore[method-assign]
    Rank.batch = begin  # type: ignore[method-assign]
    RunLog.step = end  # type: ignore[method-assign]
    sys.exit(main(words))


def run_contender(kind: str, args: argparse.Namespace) -> None:
    """Run the process of a contender."""
    name, *words = shlex.split(kind)
    gate_of = Counted if args.memory else Gate
    whole = args.set_ in ("tensor", "pipeline")
    ranks = 1 if whole or args.set_ == "one" or name in ALONE else args.ranks
    rows = ROWS * args.accum * ranks
    sizes = ",".join(
        f"{name}={value}" for name, value in SIZES[args.size].items()
    )
    model = f"model={{name='{args.size}',{sizes},sequence={SEQUENCE},batch={rows}}}"
    keys = [model, os.environ["STEPS_MASKS"]]
    if name == "phalanx":
        # Other contenders take their turn while a rank waits at its gate.
        keys.append("hang.timeout=0")
        options = (
            [*words[: words.index("--backend") + 2]]
            if "--backend" in words
            else words[:2]
        )
        layout = words[len(options) :]
        if layout and layout[0].startswith("pp"):
            layout[1] += f":{args.accum}"  # the schedule
        elif args.accum > 1:
            layout.append(f"accum:{args.accum}")
        keys += [
            "steps=1000000",
            f"out={args.out}/run",
            "validation.batches=0",
        ]
        if args.set_ == "experts":
            look_at_travels()
        phalanx(
            ["train", *keys, *options, "--layout", " ".join(layout) or "fp32"],
            gate_of,
        )
        return
    gate = gate_of(int(os.environ["RANK"]))
    from torch_loops import LOOPS

    compiled = "compile" in words
    loop = LOOPS[name](
        SIZES[args.size],
        keys,
        int(os.environ["RANK"]),
        args.accum,
        compiled=compiled,
    )
    while True:
        gate.begin()
        loop.step()
        gate.end()


# ---- in the process that wakes them


class Contender:
    """Processes of one contender."""

    def __init__(self, name: str, kind: str, args: argparse.Namespace) -> None:
        self.name = name
        source, masks = TREE / "src", "document_masks=false"
        if name.endswith(OTHER):
            source, masks = args.beside, args.beside_masks
        self.folder = tempfile.TemporaryDirectory()
        path = str(Path(self.folder.name, "socket"))
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(path)
        self.server.listen()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        own = {
            "PYTHONPATH": str(source),
            "STEPS_SOCKET": path,
            "STEPS_MASKS": masks,
        }
        own |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            __file__,
            "--as",
            kind,
            "--size",
            args.size,
            "--set",
            args.set,
        ]
        command += ["--accum", str(args.accum), "--out", self.folder.name]
        command += ["--memory"] * args.memory
        command += ["--ranks", str(args.ranks)]
        alone = "--ranks 1" in kind or kind.split()[0] in ALONE
        # phalanx starts its ranks itself
        self.ranks, started = 1 if alone else args.ranks, 1
        if not kind.startswith("phalanx"):
            started = self.ranks
        self.log = Path(self.folder.name, "log")
        with self.log.open("w") as log:
            self.processes = [
                subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True,
                    env=os.environ | own | ({} if kind.startswith("phalanx") else
                                            {"RANK": str(r), "WORLD_SIZE": str(started)}),
                )
                for r in range(started)
            ]  # fmt: skip
        self.lines: list[socket.socket] = []
        self.travels: list[tuple[float, float]] = []  # of each rank and step

    def ready(self) -> None:
        """Wait until all ranks are at the gate."""
        self.server.settimeout(1)
        while len(self.lines) < self.ranks:
            if any(process.poll() is not None for process in self.processes):
                raise ValueError(f"{self.name} ended before its first step")
            with suppress(TimeoutError):
                line, _ = self.server.accept()
                line.settimeout(600)
                line.recv(1)
                self.lines.append(line)

    def step(self) -> tuple[float, float]:
        """Return the seconds of the slowest rank, and the CPU time of all ranks
        together."""
        for line in self.lines:
            line.sendall(b"1")
        took = [json.loads(line.recv(MESSAGE)) for line in self.lines]
        self.travels += [
            (on_the_way, exposed) for *_, on_the_way, exposed in took
        ]
        return max(wall for wall, *_ in took), sum(
            worked for _, worked, *_ in took
        )

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.server.close()
        self.folder.cleanup()


@contextmanager
def contenders(
    kinds: dict[str, str], args: argparse.Namespace
) -> Iterator[list[Contender]]:
    made: list[Contender] = []
    try:
        for name, kind in kinds.items():
            made.append(Contender(name, kind, args))
        yield made
    except (OSError, ValueError):
        for each in made:
            if any(process.poll() is not None for process in each.processes):
                print(
                    f"--- {each.name}\n{each.log.read_text()[-2000:]}",
                    file=sys.stderr,
                )
        raise
    finally:
        for each in made:
            each.close()


def measured(kinds: dict[str, str], args: argparse.Namespace) -> None:
    """Print the peak bytes of each contender, one after the other."""
    print("| | most MB of live storages on a rank |\n|---|--:|")
    for name, kind in kinds.items():
        with contenders({name: kind}, args) as (one,):
            for process in one.processes:
                process.wait()
            most = [
                line
                for line in one.log.read_text().splitlines()
                if line.startswith("most ")
            ]
            if not most:
                raise ValueError(f"{name} did not come to its end")
            print(
                f"| {name} | {max(int(m.split()[1]) for m in most) / 1e6:.0f} |",
                flush=True,
            )


def timed(kinds: dict[str, str], args: argparse.Namespace) -> None:
    """Print the seconds of all contenders, which take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in kinds}
    worked: dict[str, list[float]] = {name: [] for name in kinds}
    with contenders(kinds, args) as every:
        for one in every:
            one.ready()
            one.step(), one.step()
            one.travels.clear()
        for _ in range(args.rounds):
            for one in every:
                turn = [one.step() for _ in range(args.steps)]
                rounds[one.name].append(
                    statistics.median(wall for wall, _ in turn)
                )
                worked[one.name] += [cpu for _, cpu in turn]
    base = args.base or next(iter(rounds))
    ordinary = args.set == "exact" and not args.base
    to = "the layout without exact" if ordinary else base
    print(
        f"| | ms a step, median | ratio to {to}, median (quartiles) | processor ms, all ranks |"
    )
    print("|---|--:|--:|--:|")
    for name, each in rounds.items():
        other = re.sub(" exact[^,]*", "", name) if ordinary else base
        ratios = [a / b for a, b in zip(each, rounds[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        wall, cpu = (statistics.median(x) * 1e3 for x in (each, worked[name]))
        print(
            f"| {name} | {wall:.1f} | {middle:.3f} ({low:.3f}-{high:.3f}) | {cpu:.0f} |"
        )
    for one in every:
        if any(on_the_way for on_the_way, _ in one.travels):
            ways, exposed = (
                statistics.median(x) * 1e3
                for x in zip(*one.travels, strict=True)
            )
            shares = [1 - b / a for a, b in one.travels if a]
            print(
                f"\n{one.name}: tokens on their way {ways:.1f} ms of a rank's step, {exposed:.1f} of them"
                f" with nothing computed; {statistics.median(shares):.0%} under computing"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("set", choices=SETS, nargs="?", default="one")
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument(
        "--accum", type=int, default=0, help="microbatches: 1, of pipelines 8"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="PATTERN",
        help="those it matches",
    )
    parser.add_argument("--base", help="the contender that ratios are to")
    parser.add_argument(
        "--memory", action="store_true", help="count bytes, not seconds"
    )
    parser.add_argument(
        "--beside", type=Path, metavar="SRC", help="another checkout's src too"
    )
    parser.add_argument(
        "--beside-masks",
        default="document_masks=false",
        help="its key for no document masks",
    )
    parser.add_argument(
        "--beside-backend",
        default="--backend",
        help="its option for the backend",
    )
    for hidden in ("--as", "--set", "--out"):
        parser.add_argument(
            hidden, dest=f"{hidden[2:]}_", help=argparse.SUPPRESS
        )
    args = parser.parse_args()
    args.out, args.accum = (
        args.out_,
        args.accum or (8 if args.set == "pipeline" else 1),
    )
    if args.as_:
        run_contender(args.as_, args)
        return
    many = str(args.ranks)
    kinds = {name.replace("N", many, 1) if name.startswith("phalanx") else name: kind.replace("N", many)
             for name, kind in SETS[args.set].items()}  # fmt: skip
    if args.beside:
        kinds |= {
            f"{name}, {OTHER}": kind.replace("--backend", args.beside_backend)
            for name, kind in kinds.items()
            if name.startswith("phalanx") and "compile" not in kind
        }
    if args.only:
        always = (next(iter(kinds)), args.base)
        kinds = {
            name: kind for name, kind in kinds.items()
            if name in always or any(re.search(pattern, name) for pattern in args.only)
        }  # fmt: skip
    load = os.getloadavg()[0]
    print(
        f"{args.set}, {args.size}, accum {args.accum}, load {load:.1f}\n",
        flush=True,
    )
    measured(kinds, args) if args.memory else timed(kinds, args)


if __name__ == "__main__":
    main()
