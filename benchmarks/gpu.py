"""All tests and measurements that need a GPU, in one command: `make gpu`.

Each case is one command in its own process, with a time limit. Cases that compare
numbers and measure no time run first and at the same time, if the machine has eight
cores; then the others run alone, the most valuable first. All limits together are at
most 540 seconds. A case that fails or is stopped is reported with its last lines, and
the others still run. Nothing is installed, saved or downloaded: this needs Python >=
3.11 and torch >= 2.11 with CUDA, and lists other missing modules.

After each case it writes a table (`benchmarks/gpu.md`), the same results with the full
output of each case (`benchmarks/gpu.json`), and a machine file for `phalanx plan`.

With one GPU, NCCL runs with several ranks on it, which communicate over sockets. With
more, each rank has its own. `--device cpu` runs the same cases over gloo in sizes for a
laptop, to show that they still work; `tests/gpu/test_emulated.py` runs them with the
code for CUDA and NCCL on an emulated device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

TREE = Path(__file__).parent.parent
LIMIT = 540.0  # seconds for all cases
THREADED = "dp2 zero3; tp2 seq; cp2; pp2 zb-v:4; dp2 zero1 offload:optimizer"
# Documents need a kernel for each dtype, and a ring another for visiting blocks.
PACKED = "cp2; dp2 zero3; tp2 seq recompute:selective"
TWO_RANKS = "dp2; dp2 zero3; tp2 seq; cp2; pp2 1f1b:4"
FOUR_RANKS = "pp4 1f1b:4; dp2x2 zero3; dp2 pp2 zb-v:4; cp2 tp2"
# Decoder blocks of an 8B model, only as many as fit one GPU with AdamW's state.
WIDE = (
    '{name="8b-width", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32768,'
    " sequence=4096, batch=4}"
)
SMALL = '{name="small", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, sequence=64, batch=4}'
# In float32 the backward of a block takes half a second on an H100.
SLOW = (
    '{name="slow", layers=2, hidden=4096, heads=32, ffn=16384, vocab=256,'
    " sequence=8192, batch=1}"
)
_KEPT = 100_000  # characters of each case's output
CORES = 8  # with fewer, cases never run at the same time
BESIDE = 100.0  # seconds for each case that runs beside others


class Finding(NamedTuple):
    """Result of a case: a sentence for the table, and whether its goal is met."""

    text: str
    met: bool


@dataclass(frozen=True)
class Case:
    """One command and a function that reads its output; `goal` is shown beside the
    result."""

    name: str
    words: Sequence[str]
    read: Callable[[str], Finding]
    goal: str = ""
    limit: float = 30.0  # seconds
    needs: Sequence[str] = ()  # modules that it requires
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = (
        True  # False: it measures no time, so others may run beside it
    )


class Row(NamedTuple):
    """One row of the table, with the output of its case."""

    case: Case
    result: str
    met: bool
    seconds: float
    output: str = ""

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-25:])

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "command": list(self.case.words[1:]),
            "environment": dict(self.case.environment),
            "result": self.result,
            "goal": self.case.goal,
            "met": self.met,
            "seconds": round(self.seconds, 1),
            "output": self.output[-_KEPT:],
        }


# ---- how outputs are read


def _json(output: str) -> Any:
    """Return the JSON object in a command's output, which may include lines of standard
    error."""
    for start in re.finditer("^{", output, re.MULTILINE):
        try:
            return json.JSONDecoder().raw_decode(output, start.start())[0]
        except ValueError:
            continue
    raise ValueError("no JSON object in the output")


def tests(output: str) -> Finding:
    counts = {
        word: int(n)
        for n, word in re.findall(
            r"(\d+) (passed|failed|skipped|error)", output
        )
    }
    text = (
        ", ".join(f"{n} {word}" for word, n in counts.items()) or "no test ran"
    )
    ran = {"passed", "skipped"} & {*counts}
    broken = {"failed", "error"} & {*counts}
    return Finding(text, bool(ran) and not broken)


def agreement(output: str) -> Finding:
    found = _json(output)
    worst = max(
        (one["max_rel_error"] or 0.0 for one in found["layouts"]), default=0.0
    )
    differ = [one["layout"] for one in found["layouts"] if not one["passed"]]
    text = f"{found['passed']} of {len(found['layouts'])} layouts agree, error at most {worst:.1e}"
    return Finding(
        text + (f"; differ: {'; '.join(differ)}" if differ else ""), not differ
    )


def products(goal: float) -> Callable[[str], Finding]:
    """Report the fastest square matmul of each dtype, as a share of the maker's
    peak."""

    def read(output: str) -> Finding:
        best: dict[str, dict[str, Any]] = {}
        for one in _json(output)["products"]:
            if one["rate"] > best.get(one["dtype"], {"rate": 0.0})["rate"]:
                best[one["dtype"]] = one
        texts = [
            f"{dtype} {one['rate'] / 1e12:.3g} TFLOP/s"
            + (f" (HFU {one['hfu']:.0%})" if one.get("hfu") else "")
            for dtype, one in best.items()
        ]
        reached = (best.get("bf16") or {}).get("hfu")
        return Finding(", ".join(texts), reached is None or reached >= goal)

    return read


def beside_loops(goal: float) -> Callable[[str], Finding]:
    """Report the ratio of phalanx's step to that of the fastest hand-written loop."""

    def read(output: str) -> Finding:
        seconds = {
            name: statistics.median(each["seconds"])
            for name, each in _json(output).items()
        }
        own = next(name for name in seconds if name.startswith("phalanx"))
        loops = {name: each for name, each in seconds.items() if name != own}
        fastest = min(loops, key=loops.__getitem__)
        ratio = seconds[own] / loops[fastest]
        each = ", ".join(
            f"{name} {one * 1e3:.0f} ms" for name, one in seconds.items()
        )
        return Finding(f"{ratio:.3f} of {fastest}: {each}", ratio <= goal)

    return read


def overlaps(output: str) -> Finding:
    found = _json(output)["overlaps"]
    texts = [f"{one['name']}: {one['hidden']:.0%} hidden" for one in found]
    return Finding("; ".join(texts), all(one["hidden"] > 0.5 for one in found))


def run(folder: Path, goal: float) -> Callable[[str], Finding]:
    """Report the loss, the MFU of the last steps, peak memory, and planned and measured
    state."""

    def read(output: str) -> Finding:
        lines = [
            json.loads(line)
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        steps = [line for line in lines if line["event"] == "step"]
        mfu = sorted(line["mfu"] for line in steps[len(steps) // 2 :])[
            len(steps) // 4
        ]
        falls = steps[-1]["loss"] < steps[0]["loss"]
        peak = max(line["memory"] for line in steps)
        text = f"MFU {mfu:.0%}, peak {peak / 2**30:.1f} GiB, loss {steps[0]['loss']:.2f}"
        text += f" -> {steps[-1]['loss']:.2f}"
        for line in lines:
            if line["event"] == "memory":
                sums = [
                    sum(rank[kind].values()) / 2**30
                    for rank in line["ranks"][:1]
                    for kind in ("promised", "measured")
                ]
                text += ", state {:.2f} GiB promised, {:.2f} held".format(
                    *sums
                )
                break
        return Finding(text, falls and mfu >= goal)

    return read


def outlasted(folder: Path) -> Callable[[str], Finding]:
    """Report a run whose device works longer on one operation than `hang.timeout`."""

    def read(output: str) -> Finding:
        lines = [
            json.loads(line)
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        seconds = [x["seconds"] for x in lines if x["event"] == "step"]
        hangs = sum(x["event"] == "hang" for x in lines)
        ended = any(x["event"] == "end" for x in lines)
        text = f"{len(seconds)} steps of {statistics.median(seconds):.1f} s"
        return Finding(f"{text}, {hangs} hangs reported", ended and not hangs)

    return read


def ran(output: str) -> Finding:
    return Finding("it ran", True)


# ---- the cases


def cases(
    device: str, gpus: int, folder: Path, *, small: bool = False
) -> list[Case]:
    """Return the cases for this device, the most valuable first, in sizes for a CPU if
    `small`."""
    made = _Cases(device, folder, small)
    if gpus > 1:
        ranks = max(n for n in (2, 4, 8) if n <= gpus)
        over_nccl = made.several_gpus(ranks)
    else:
        over_nccl = made.shared_gpu()
    return [
        made.device_tests(),
        *over_nccl,
        made.verify("float64", THREADED),
        made.verify("bfloat16", PACKED, "--packed"),
        made.long_operations(),
        made.beside_loops(limit=50.0),
        made.training("1b, bf16", "1b", "bf16", 0.35, limit=40.0),
        made.beside_loops("--compile", "--hand", "masters", limit=75.0),
        # torchtitan's 8B on eight H100 reaches an MFU of 33 % eager and 39 % compiled
        # (arXiv 2410.06511).
        made.training(
            "four blocks of 8b, compiled",
            WIDE,
            "bf16 compile",
            0.45,
            limit=60.0,
        ),
        made.training(
            "four blocks of 8b, fp8",
            WIDE,
            "bf16 fp8 compile",
            0.45,
            limit=70.0,
        ),
        # 21 GB of activations cross the link to the host twice a step. At 55 GB/s, the
        # rate of PCIe 5, that takes 0.78 s: an MFU of 17 % at most. An H200 reached
        # 16 %, and an H100 with a slower link 13 %.
        made.training(
            "1b, offload:activations",
            "1b",
            "bf16 offload:activations",
            0.12,
            limit=35.0,
        ),
        made.training(
            "four blocks of 8b, bf16", WIDE, "bf16", 0.40, limit=35.0
        ),
        made.overlap(),
        made.products(),
        made.machine_file(),
    ]


class _Cases:
    """Builds the cases for one device."""

    def __init__(self, device: str, folder: Path, small: bool) -> None:
        self.device, self.folder, self.small = device, folder, small

    def _phalanx(self, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "phalanx", *words)

    def device_tests(self) -> Case:
        words = (sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu")
        return Case(
            "device tests",
            words,
            tests,
            "all pass",
            BESIDE,
            ("pytest",),
            alone=False,
        )

    def verify(
        self, dtype: str, layouts: str, *more: str, backend: str = "threads"
    ) -> Case:
        if backend == "nccl" and self.device == "cpu":
            backend = "gloo"
        words = (
            "verify",
            "--backend",
            backend,
            "--dtype",
            dtype,
            "--layouts",
            layouts,
            *more,
        )
        ranks = f", {layouts.split(';')[0]} and others"
        name = f"verify over {backend}, {dtype}{''.join(more).replace('--', ', ')}{ranks}"
        goal = "all agree with one process"
        return Case(
            name,
            self._phalanx(*words, "--json"),
            agreement,
            goal,
            BESIDE,
            alone=False,
        )

    def shared_gpu(self) -> list[Case]:
        """NCCL with several ranks on one GPU: slow, but it shows that their calls
        match."""
        listed = [
            self.verify("float64", TWO_RANKS, backend="nccl"),
            self.verify(
                "float64", "ep2", "--model", "experts", backend="nccl"
            ),
            self.verify("float64", FOUR_RANKS, backend="nccl"),
        ]
        shared = {"PHALANX_SHARE_GPUS": "1"}
        return [replace(case, environment=shared) for case in listed]

    def several_gpus(self, ranks: int) -> list[Case]:
        """NCCL with one GPU per rank."""
        n, half = ranks, ranks // 2
        # Limited by the heads, layers and tokens of the small model.
        few = min(n, 4)
        over = (
            f"dp{n}; dp{n} zero3; tp{few} seq; cp{few}; pp{few} 1f1b:{2 * few}"
        )
        both = (
            f"dp{half} pp2 1f1b:4; dp{half}x2 zero3" if n > 2 else "dp2 zero1"
        )
        return [
            self.verify("float64", over, backend="nccl"),
            self.verify(
                "float64", f"ep{n}", "--model", "experts", backend="nccl"
            ),
            self.verify("float64", both, backend="nccl"),
        ]

    def training(
        self, name: str, model: str, layout: str, goal: float, *, limit: float
    ) -> Case:
        out = self.folder / re.sub(r"\W+", "-", name)
        size = () if self.small else ("batch=4", "sequence=4096")
        keys = (
            f"model={SMALL if self.small else model}", *size, f"layout={layout}", f"out={out}",
            "steps=12", "data=python", "checkpoint.at_end=false", "validation.batches=0",
        )  # fmt: skip
        words = self._phalanx("train", *keys, "--ranks", "1")
        bound = "the loss falls" if self.small else f"MFU at least {goal:.0%}"
        return Case(
            name, words, run(out, 0.0 if self.small else goal), bound, limit
        )

    def long_operations(self) -> Case:
        """A healthy run whose operations take longer than `hang.timeout`."""
        out = self.folder / "long-operations"
        keys = (
            f"model={SMALL if self.small else SLOW}", f"out={out}", "layout=fp32",
            "steps=6", "hang.timeout=0.3", "data=python", "checkpoint.at_end=false",
            "validation.batches=0",
        )  # fmt: skip
        return Case(
            "operations longer than hang.timeout",
            self._phalanx("train", *keys, "--ranks", "1"),
            outlasted(out),
            "the run is not ended",
            BESIDE,
            alone=False,
        )

    def beside_loops(self, *more: str, limit: float) -> Case:
        """Steps in turn with hand-written loops of plain PyTorch."""
        sizes = ("--model", "8b-width", "--batch", "4")
        if self.small:
            sizes = ("--model", "small", "--sequence", "64", "--rounds", "1")
        words = ("benchmarks/device_steps.py", "--device", self.device, *sizes)
        bound = 1000.0 if self.small else 1.02
        goal = "it runs" if self.small else f"at most {bound}"
        compiled = ", compiled" if "--compile" in more else ""
        return Case(
            f"four blocks of 8b, beside plain loops{compiled}",
            (sys.executable, *words, *more),
            beside_loops(bound),
            goal,
            limit,
        )

    def overlap(self) -> Case:
        sizes = (
            ("--size", "256", "--copy", "1M", "--limit", "3")
            if self.small
            else ()
        )
        words = self._phalanx(
            "bench", "overlap", *sizes, "--device", self.device, "--json"
        )
        goal = "it runs" if self.small else "more than half is hidden"
        return Case(
            "overlap", words, ran if self.small else overlaps, goal, 20.0
        )

    def products(self) -> Case:
        sizes = (
            ("256", "--limit", "3")
            if self.small
            else ("2048:8192", "--limit", "10")
        )
        words = (
            "bench",
            "matmul",
            "--sizes",
            *sizes,
            "--device",
            self.device,
            "--json",
        )
        # The best published bf16 matmul on an H100 reaches 80 % of the maker's peak
        # (github.com/stas00/ml-engineering, compute/accelerator).
        least = 0.0 if self.small else 0.70
        goal = f"bf16 HFU at least {least:.0%}"
        return Case(
            "matrix products",
            self._phalanx(*words),
            products(least),
            goal,
            20.0,
        )

    def machine_file(self) -> Case:
        """Measuring the machine gets the remaining time."""
        file = str(self.folder / "machine.toml")
        words = (
            "doctor",
            "--out",
            file,
            "--device",
            self.device,
            "--limit",
            "3",
        )
        return Case("machine file", self._phalanx(*words), ran, limit=40.0)


# ---- running them


def perform(
    case: Case, environment: Mapping[str, str], left: float = LIMIT
) -> Row:
    """Run a case within its limit and the time left for all cases."""
    limit = min(case.limit, left)
    if limit < 1.0:
        return Row(case, "not run: the time of all cases is over", False, 0.0)
    missing = [
        name for name in case.needs if importlib.util.find_spec(name) is None
    ]
    if missing:
        return Row(
            case, f"not run: no module {', '.join(missing)}", False, 0.0
        )
    start = time.monotonic()
    # To a file, so that a stopped case still shows its output.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            case.words,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=TREE,
            env={**environment, **case.environment},
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        seconds = time.monotonic() - start
        out.seek(0)
        output = out.read()
    if process.returncode == -signal.SIGKILL and seconds >= limit:
        return Row(
            case, f"stopped after {limit:.0f} s", False, seconds, output
        )
    try:
        text, met = case.read(output)
    except (ValueError, KeyError, IndexError, OSError) as error:
        text = f"exit code {process.returncode}, no result ({error!r})"
        return Row(case, text, False, seconds, output)
    if process.returncode:
        return Row(
            case,
            f"exit code {process.returncode}; {text}",
            False,
            seconds,
            output,
        )
    return Row(case, text, met, seconds, output)


def performed(
    listed: Sequence[Case], environment: Mapping[str, str], until: float
) -> Iterator[Row]:
    """Run the cases until a time of the monotonic clock; yield their rows.

    Cases that measure no time run at the same time first, if there are enough cores.
    """
    beside = [case for case in listed if not case.alone]
    if (os.cpu_count() or 1) < CORES:
        beside = []
    # Several processes share the cores.
    threads = {"OMP_NUM_THREADS": "2"}

    def run_beside(case: Case) -> Row:
        left = until - time.monotonic()
        return perform(case, {**environment, **threads}, left)

    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        yield from pool.map(run_beside, beside)
    for case in listed:
        if case not in beside:
            yield perform(case, environment, until - time.monotonic())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a case and the ranks that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(rows: Sequence[Row], about: Sequence[str]) -> str:
    lines = [
        "# On a GPU", "", "Written by `make gpu`; each case is a command of its own.", "",
        *(f"- {line}" for line in about), "",
        "| case | result | goal | met | seconds |", "|---|---|---|---|--:|",
    ]  # fmt: skip
    for row in rows:
        met = "yes" if row.met else "**no**"
        lines.append(
            f"| {row.case.name} | {row.result} | {row.case.goal} | {met} | {row.seconds:.0f} |"
        )
    lines += ["", "## Commands", ""]
    for row in rows:
        words = [
            f"{name}={value}" for name, value in row.case.environment.items()
        ]
        words += [
            "python",
            *(shlex.quote(word) for word in row.case.words[1:]),
        ]
        lines.append(f"- {row.case.name}: `{' '.join(words)}`")
    for row in rows:
        if not row.met and row.last_lines:
            lines += [
                "",
                f"## {row.case.name}, last lines",
                "",
                "```",
                row.last_lines,
                "```",
            ]
    return "\n".join(lines) + "\n"


def environment_of(device: str) -> tuple[list[str], int]:
    """Return the report's lines about the machine, and its number of GPUs."""
    import torch

    about = [
        f"{date.today()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    ]
    gpus = (
        torch.cuda.device_count()
        if device == "cuda" and torch.cuda.is_available()
        else 0
    )
    if gpus:
        about.append(
            f"{gpus} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
        )
    about += [
        f"no module {name}: what only shows with it is left out"
        for name in ("rich", "safetensors", "xxhash", "numpy", "pytest")
        if importlib.util.find_spec(name) is None
    ]
    return about, gpus


def main() -> int:
    parser = argparse.ArgumentParser(
        description="All that only a GPU can show, case by case."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORD",
        help="cases whose name contains it",
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help="seconds for all cases"
    )
    parser.add_argument(
        "--case-limit", type=float, default=0.0, help="seconds for each case"
    )
    parser.add_argument(
        "--small", action="store_true", help="sizes for a CPU, without goals"
    )
    parser.add_argument(
        "--gpus", type=int, default=0, help="list the cases of so many GPUs"
    )
    parser.add_argument(
        "--out", default=str(TREE / "benchmarks" / "gpu.md"), metavar="FILE"
    )
    args = parser.parse_args()
    about, gpus = environment_of(args.device)
    if args.device == "cuda" and not gpus:
        print(
            "no GPU that torch can use; `--device cpu` shows that the commands work."
        )
        return 2
    folders = ("src", "torch-shm/src", "rank-watch/src")
    sources = [str(TREE / folder) for folder in folders]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path.rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    until = time.monotonic() + args.limit
    with tempfile.TemporaryDirectory() as folder:
        small = args.small or args.device == "cpu"
        listed = [
            replace(case, limit=args.case_limit or case.limit)
            for case in cases(
                args.device, args.gpus or gpus, Path(folder), small=small
            )
            if args.only in case.name
        ]
        for row in performed(listed, environment, until):
            rows.append(row)
            print(
                f"{row.case.name}: {row.result} ({'met' if row.met else 'NOT MET'})",
                flush=True,
            )
            # After each case, so that an interrupted run keeps its results so far.
            out.write_text(table(rows, about))
            found = {"about": about, "cases": [row.to_json() for row in rows]}
            out.with_suffix(".json").write_text(json.dumps(found, indent=1))
        machine = Path(folder, "machine.toml")
        if machine.exists():
            out.with_name("gpu-machine.toml").write_text(machine.read_text())
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
