"""CPU time of `phalanx plan` and `phalanx check`, including start-up, cold and warm.

    python benchmarks/planner_times.py [--rounds 3] [--beside OTHER/src] [--only "plan 8b"]

A cold run has an empty cost cache; a warm run follows with the same cache. Python's
compiled files exist in both, as in an installed package. With `--beside`, another
checkout of phalanx alternates with this one.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLANS = {
    "8b": "--model 8b --cluster h100x64",
    "405b": "--model 405b --cluster h100x16384 --seq 8192 --batch-tokens 16777216",
    "405b, 131,072 tokens": "--model 405b --cluster h100x16384 --seq 131072 --batch-tokens 16777216",
    "1t-gpt": "--model 1t-gpt --cluster h100x98304",
}
# 405b has 126 blocks, too few for 128 stages.
CHECKS = {"1f1b": "405b", "zb-h1": "405b", "interleaved2": "1t-gpt"}
OURS = Path(__file__).parents[1] / "src"


def commands() -> dict[str, list[str]]:
    """Return the arguments of every timed command, by name."""
    found = {
        f"plan {name}": ["plan", *words.split(), "--json"]
        for name, words in PLANS.items()
    }
    for schedule, model in CHECKS.items():
        layout = f"dp2 pp64 tp8 zero1 {schedule}:512"
        words = ["check", layout, "--model", model, "--batch", "1024"]
        found[f"check {schedule}"] = words
    return found


def processor_seconds(source: Path, words: list[str], cache: str) -> float:
    """Return the user and system time of one command in seconds."""
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": cache,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "phalanx", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)}: {ended.stderr[-800:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return user + system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="SRC")
    parser.add_argument("--only", default="", help="the command of this name")
    args = parser.parse_args()
    sources = {"ours": OURS}
    if args.beside:
        sources["the other"] = args.beside
    for source in sources.values():
        compileall.compile_dir(source, quiet=1)
    print("| command | of | cold | warm, median (least to most) |")
    print("|---|---|--:|--:|")
    for name, words in commands().items():
        if args.only not in ("", name):
            continue
        cold: dict[str, list[float]] = {who: [] for who in sources}
        warm: dict[str, list[float]] = {who: [] for who in sources}
        for _ in range(args.rounds):
            for who, source in sources.items():
                with tempfile.TemporaryDirectory() as cache:
                    for found in (cold, warm):
                        took = processor_seconds(source, words, cache)
                        found[who].append(took)
        for who in sources:
            print(
                f"| {name} | {who} | {_cell(cold[who])} | {_cell(warm[who])} |"
            )


def _cell(seconds: list[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
