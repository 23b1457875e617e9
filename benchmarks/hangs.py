"""Detection of hangs: time to a correct report, and no false alarm for slow runs.

    python benchmarks/hangs.py --hangs 32 --healthy 16 --seed 0

The kind, rank, layout, backend, step and operation of each hang are drawn. A hang
counts as named if the screen shows the rank, the operation and the cause, and as in
time if the report comes within 2 seconds after the limit on the screen (`hang.timeout`
and the longest operation so far).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 3.0
SMALL = [
    "model={layers=3,hidden=32,heads=2,ffn=48,vocab=256}", "batch=4", "sequence=16", "steps=400",
    "validation.batches=0", f"hang.timeout={TIMEOUT}",
]  # fmt: skip
LAYOUTS = [
    "dp2",
    "dp2 zero3",
    "tp2",
    "pp2 1f1b:2",
    "dp2 pp2 1f1b:2",
    "dp2 tp2 zero1",
    "dp4 zero2",
]
BACKENDS = ["gloo", "shm"]


# ---- what goes wrong, on one rank


def stopped(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.01)  # where it is when it continues


def sleeps(folder: Path) -> None:
    time.sleep(1e6)


def computes_for_ever(folder: Path) -> None:
    while True:
        pass


def holds_the_lock(folder: Path) -> None:
    # exponential time, in C, without releasing the lock
    re.match(r"(a+)+$", "a" * 80 + "b")


def reads_a_pipe(folder: Path) -> None:
    with open(folder / "pipe") as file:
        file.read()


def reads_an_open_pipe(folder: Path) -> None:
    file = os.open(folder / "pipe", os.O_RDWR)
    os.read(file, 1)


def blocked_in_the_kernel(folder: Path) -> None:
    # The parent of a vfork whose child opens a pipe without a writer: like a process
    # waiting for a disk, it handles no signal but SIGKILL and holds the interpreter's
    # lock.
    opens = (os.POSIX_SPAWN_OPEN, 9, str(folder / "pipe"), os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opens])


def locks_twice(folder: Path) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleeps_in_c(folder: Path) -> None:
    library = ctypes.PyDLL(None)  # holds the interpreter's lock
    while True:
        library.usleep(900_000)


# The cause, as the screen must name it.
KINDS: dict[str, tuple[Callable[[Path], None] | None, str]] = {
    "stopped": (stopped, r"stopped \(SIGSTOP\)"),
    "asleep": (sleeps, r"asleep in clock_nanosleep[^$]*in sleeps"),
    "busy": (computes_for_ever, r"computing[^$]*in computes_for_ever"),
    "lock held": (
        holds_the_lock,
        r"holds the interpreter's lock[^$]*in holds_the_lock",
    ),
    "data": (
        reads_an_open_pipe,
        r"loading data[^$]*in read of \S*pipe[^$]*in reads_an_open_pipe",
    ),
    "disk": (blocked_in_the_kernel, r"waits for a disk or the kernel"),
    "locked": (locks_twice, r"asleep in futex \(a lock\)[^$]*in locks_twice"),
    "mismatch": (None, r"first that differs|disagree|has not made"),
}
# ---- what is only slow
HEALTHY = (
    "save",
    "data",
    "validation",
    "compile",
    "operation",
    "straggler",
    "stop for a second",
)


def train_with(
    world: Any, run: Any, layout: str, fault: dict[str, Any]
) -> Any:
    """Run `train` with a fault on one rank."""
    from phalanx.program import ops
    from phalanx.training import checkpoint, executor, loop, rank, validation

    folder = Path(fault["folder"])
    kind, step = fault["kind"], fault["step"]
    mine = world.rank == fault["rank"]
    at = {"step": 0, "operations": 0}
    perform, batch = executor.Executor._perform, rank.Rank.batch

    def begin(op: object) -> None:
        (folder / "begun").write_text(json.dumps([time.monotonic(), str(op)]))

    def performed(self: Any, op: Any) -> None:
        at["operations"] += 1
        here = (
            mine
            and at["step"] == step
            and at["operations"] == fault["place"] % len(self.row) + 1
        )
        if fault["healthy"]:
            if here and kind == "operation":
                time.sleep(TIMEOUT - 1)
            if mine and kind == "straggler" and op.kind == ops.FORWARD:
                time.sleep(0.2)
            if here and kind == "compile":
                with fault["positions"].phase("compiling"):
                    time.sleep(2.5 * TIMEOUT)
            return perform(self, op)
        if here and KINDS[kind][0] is not None and kind != "data":
            begin(op)
            KINDS[kind][0](folder)
        skips = (
            kind == "mismatch"
            and mine
            and at["step"] == step
            and op.kind in fault["skips"]
        )
        if skips and at.setdefault("skipped", op) is op:
            begin(op)
            self.under_way[op] = (executor.Work(), self.clock.moment())
            return None
        return perform(self, op)

    def batches(self: Any, number: int) -> Any:
        at.update(step=number, operations=0)
        if mine and number == step and kind == "data":
            if fault["healthy"]:
                time.sleep(TIMEOUT - 1)
            else:
                begin("loading data")
                KINDS["data"][0](folder)  # type: ignore[misc]
        if number == step and kind == "stop for a second" and mine:
            os.system(
                f"(kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}) &"
            )
        return batch(self, number)

    executor.Executor._perform = performed  # type: ignore[method-assign]
    rank.Rank.batch = batches  # type: ignore[method-assign]
    if fault["healthy"] and mine:
        write = checkpoint.write_file
        validate, steps = validation.validation_loss, loop.make_steps

        def slow_write(*given: Any) -> Any:
            time.sleep(2.5 * TIMEOUT if kind == "save" else 0)
            return write(*given)

        def slow_validation(of: Any) -> Any:
            time.sleep(TIMEOUT - 1 if kind == "validation" else 0)
            return validate(of)

        def stepping(of: Any, positions: Any, *more: Any) -> Any:
            fault["positions"] = positions
            return steps(of, positions, *more)

        checkpoint.write_file = slow_write
        validation.validation_loss = slow_validation
        loop.make_steps = stepping
    return loop.train(world, run, layout, True, False)


def one(fault: dict[str, Any]) -> int:
    """Run the ranks of one run, with the fault on one of them."""
    from phalanx.comm import RankFailed, launch
    from phalanx.layout import Layout
    from phalanx.layout.run import Run
    from phalanx.program import ops
    from phalanx.training.watched import call_timeout

    words = [*SMALL, f"out={fault['folder']}/run", *fault["words"]]
    run = Run.parse("", "run", tuple(words))
    skips = (ops.REDUCE, ops.GATHER, ops.COUNT)
    ranks = Layout.parse(fault["layout"]).ranks
    more = {"backend": fault["backend"], "timeout": call_timeout(run)}
    try:
        launch(
            train_with,
            ranks,
            run,
            fault["layout"],
            {**fault, "skips": skips},
            **more,
        )
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found += [int(path.parent.name), *children(int(path.parent.name))]
    return found


def carried_out(fault: dict[str, Any]) -> tuple[int, str, float, int]:
    """Run one fault; return the exit code, the output, the time of the screen, and the
    number of processes left."""
    command = [sys.executable, __file__, "--one", json.dumps(fault)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    lines, seen, known = list[str](), list[float](), set[int]()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "hangs at step" in line or "disagree" in line:
                seen.append(time.monotonic())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < end:
        known |= set(children(process.pid))
        time.sleep(0.5)
    process.kill()
    # The child of the vfork, which stands for a disk, is not a rank: it ends when its
    # pipe is opened.
    pipe = os.open(Path(fault["folder"], "pipe"), os.O_RDWR | os.O_NONBLOCK)
    time.sleep(1.0)
    os.close(pipe)
    left = [pid for pid in known if Path(f"/proc/{pid}/stat").exists()]
    left = [
        p
        for p in left
        if Path(f"/proc/{p}/stat").read_text().rpartition(")")[2][1] != "Z"
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    reader.join(5)
    return process.wait(), "".join(lines), (seen or [0.0])[0], len(left)


def judged(
    fault: dict[str, Any], text: str, seen: float, folder: Path
) -> tuple[str, float, float]:
    """Return what the screen does not name, the seconds from the fault to the screen,
    and the seconds beyond the limit."""
    if not (folder / "begun").is_file():
        return "the fault never came", 0.0, 0.0
    begun, op = json.loads((folder / "begun").read_text())
    missing = []
    if fault["kind"] != "mismatch":
        if not re.search(rf"rank {fault['rank']}( should be in|:)", text):
            missing.append("rank")
        if not re.search(rf"it is (\S+ \S+, )?(at )?{re.escape(op)}", text):
            missing.append("operation")
    elif not re.search(rf"ranks? [\d, -]*{fault['rank']}|{op}", text):
        missing.append("rank or operation")
    if not re.search(KINDS[fault["kind"]][1], text):
        missing.append("cause")
    longest = re.search(r"longest operation ([\d.]+) s", text)
    limit = TIMEOUT + (float(longest[1]) if longest else 0.0)
    return " and ".join(missing), seen - begun, seen - begun - limit


def drawn(
    draw: random.Random, number: int, *, healthy: bool, folder: str
) -> dict[str, Any]:
    kind = (HEALTHY if healthy else tuple(KINDS))[
        number % (len(HEALTHY) if healthy else len(KINDS))
    ]
    layout = draw.choice(LAYOUTS)
    if kind == "mismatch" and "dp" not in layout:
        # Every skipped operation there is a call to another rank.
        layout = LAYOUTS[0]
    ranks = (
        4
        if layout.count("2") > 1
        and ("pp" in layout or "tp2" in layout)
        and "dp" in layout
        else 2
    )
    ranks = 4 if layout.startswith("dp4") else ranks
    words = []
    if healthy:
        words = [
            "steps=12",
            "checkpoint.every=6",
            "validation.every=6",
            "validation.batches=1",
        ]
    return {
        "kind": kind, "healthy": healthy, "layout": layout, "rank": draw.randrange(ranks),
        "backend": BACKENDS[number // len(KINDS) % 2], "step": draw.randint(3, 8),
        "place": draw.randrange(1000), "folder": folder, "words": words,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hangs", type=int, default=32)
    parser.add_argument("--healthy", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only this kind")
    parser.add_argument(
        "--show", action="store_true", help="print every screen"
    )
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(json.loads(args.one))
    draw, counts, late = (
        random.Random(args.seed),
        Counter[str](),
        list[float](),
    )
    for number in range(args.hangs + args.healthy):
        with tempfile.TemporaryDirectory(prefix="hangs-") as name:
            folder, healthy = Path(name), number >= args.hangs
            os.mkfifo(folder / "pipe")
            fault = drawn(
                draw,
                number - args.hangs * healthy,
                healthy=healthy,
                folder=name,
            )
            if args.kind and fault["kind"] != args.kind:
                continue
            code, text, seen, left = carried_out(fault)
            who = f"{fault['kind']}, rank {fault['rank']}, {fault['layout']}, {fault['backend']}"
            counts["processes left"] += left
            if healthy:
                counts["healthy"] += 1
                counts["healthy and ended"] += code != 0
                print(
                    f"healthy {who}: {'ENDED' if code else 'ok'}", flush=True
                )
                if code or args.show:
                    print(text)
                continue
            missing, after, beyond = judged(fault, text, seen, folder)
            counts["hangs"] += 1
            counts["named"] += not missing
            counts["in time"] += beyond <= 2.0 and bool(seen)
            late.append(beyond)
            print(
                f"{who}: {'MISSING ' + missing if missing else 'named'}, {after:.1f} s after it"
                f" began, {beyond:+.1f} s of the limit, code {code}, {left} left",
                flush=True,
            )
            if missing or args.show:
                print(text, flush=True)
    print(dict(counts))
    if late:
        late.sort()
        print(
            f"beyond the limit: median {late[len(late) // 2]:.2f} s, most {late[-1]:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
