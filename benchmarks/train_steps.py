"""Seconds of a step of `phalanx train`, beside a plain loop of the same model and another checkout.

    OMP_NUM_THREADS=1 python benchmarks/train_steps.py [--size 5m] [--accum 4] [--beside OTHER/src]
    OMP_NUM_THREADS=1 python benchmarks/train_steps.py --words "--ranks 2 --layout dp2 --backend gloo"

Each contender is a command that trains some steps on the same batches; they take turns, and the first
steps of each turn do not count. The plain loop is PyTorch's: a fused AdamW, `clip_grad_norm_` and one
`backward` for each microbatch. Ratios are of medians within a round; the table has their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TREE = Path(__file__).parent.parent
SIZES = {
    "5m": "{name='5m',layers=6,hidden=224,heads=8,kv_heads=4,ffn=640,vocab=1024,sequence=256,batch=8}",
    "27m": "{name='27m',layers=8,hidden=480,heads=8,kv_heads=4,ffn=1312,vocab=4096,sequence=256,batch=8}",
}  # fmt: skip
STEPS, SKIPPED = 14, 4
COMMAND = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"


def plain(size: str, accum: int) -> list[float]:
    """A loop of PyTorch alone, on the batches that a run of this size has."""
    import torch

    from phalanx.layout import Run
    from phalanx.models import Decoder
    from phalanx.train.rank import batches_of

    run = Run.parse("", "run", (f"model={SIZES[size]}",))
    batches, shape = batches_of(run, run.shape), run.shape
    model = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, ffn=shape.ffn,
    )  # fmt: skip
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    seconds = []
    for step in range(STEPS):
        begun = time.perf_counter()
        rows = batches.batch(step)
        count = (rows["targets"] != -100).sum()
        for part in range(accum):
            own = {name: x.chunk(accum)[part] for name, x in rows.items()}
            shared = {name: own[name] for name in ("positions", "documents") if name in own}
            (model(own["tokens"], own["targets"], **shared) / count).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begun)
    return seconds


def trained(source: Path, words: list[str], size: str, accum: int) -> list[float]:
    """The seconds of each step, by the log of a run of the checkout at `source`."""
    with tempfile.TemporaryDirectory() as out:
        layout = [] if "--layout" in words else ["--ranks", "1", "--layout", f"accum:{accum}"]
        keys = [f"model={SIZES[size]}", f"steps={STEPS}", f"out={out}", "validation.batches=0"]
        subprocess.run(
            [sys.executable, "-c", COMMAND, "train", *keys, *layout, *words],
            env=os.environ | {"PYTHONPATH": str(source)}, check=True, capture_output=True,
        )  # fmt: skip
        lines = Path(out, "metrics.jsonl").read_text().splitlines()
    return [line["seconds"] for line in map(json.loads, lines) if line["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of a run beside a plain loop.")
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", default="", help="further words of `phalanx train`")
    parser.add_argument("--beside", type=Path, metavar="SRC", help="another checkout's src")
    parser.add_argument("--beside-words", default=None, help="its words, where they differ")
    parser.add_argument("--as-plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_plain:
        print(json.dumps(plain(args.size, args.accum)))
        return
    words = shlex.split(args.words)
    theirs = words if args.beside_words is None else shlex.split(args.beside_words)
    rounds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        times = {"phalanx train": trained(TREE / "src", words, args.size, args.accum)}
        if args.beside:
            times["the other checkout"] = trained(args.beside, theirs, args.size, args.accum)
        if not args.words:
            own = [sys.executable, __file__, "--as-plain", "--size", args.size]
            done = subprocess.run(
                [*own, "--accum", str(args.accum)], check=True, capture_output=True,
                env=os.environ | {"PYTHONPATH": str(TREE / "src")},
            )  # fmt: skip
            times["a plain loop"] = json.loads(done.stdout)
        for name, each in times.items():
            rounds.setdefault(name, []).append(statistics.median(each[SKIPPED:]))
    first = rounds["phalanx train"]
    print(
        f"{args.size}, accum {args.accum}, {args.words or 'one rank'}; {args.rounds} rounds of {STEPS}\n"
    )
    print(
        "| | ms a step, median of rounds | phalanx train / it, median (quartiles) |\n|---|--:|--:|"
    )
    for name, each in rounds.items():
        ratios = [a / b for a, b in zip(first, each, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {name} | {statistics.median(each) * 1e3:.1f} | {middle:.3f} ({low:.3f}-{high:.3f}) |"
        )


if __name__ == "__main__":
    main()
