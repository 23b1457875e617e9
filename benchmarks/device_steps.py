"""Steps of phalanx on one device, in turn with hand-written loops of plain PyTorch.

    python benchmarks/device_steps.py --model 8b-width --batch 4 --sequence 4096
    python benchmarks/device_steps.py --model 8b-width --compile --profile /tmp/kernels.txt
    python benchmarks/device_steps.py --device cpu --model small --sequence 64

All contenders are in one process and take steps in turn, so that a GPU's clock is the
same for all. A ratio compares medians within a round. A step reads its batch, computes
the loss, clips the gradient norm at 1, updates with AdamW, and reads the loss.

- phalanx: `Executor.step` with a prefetched batch, as `phalanx train` makes it;
- autocast: the model of `hand_model.py` with float32 weights, under `torch.autocast`,
  with torch's fused AdamW;
- masters: the same model in bfloat16 with float32 masters, which torch's fused AdamW
  updates, as phalanx does.

With `--profile FILE` the kernels of one step of each contender are written, and the time
in which the device was idle.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

from hand_model import HandModel
from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout, Run, Shape
from phalanx.training.next_batch import NextBatch
from phalanx.training.program import shape_of
from phalanx.training.rank import Rank, batches_of

MODELS = {
    "1b": "1b",
    "25m": "25m",
    "8b-width": (
        '{name="8b-width", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336,'
        " vocab=32768, sequence=4096, batch=4}"
    ),
    "small": (
        '{name="small", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256,'
        " sequence=64, batch=4}"
    ),
}
LR = 3e-4


def run_of(args: argparse.Namespace, folder: str) -> Run:
    words = (
        f"model={MODELS[args.model]}",
        f"batch={args.batch}",
        f"sequence={args.sequence}",
        "data=python",
        # plain attention knows no documents
        f"document_masks={str(args.documents).lower()}",
        f"out={folder}/run",
    )
    return Run.parse("", "run", words)


class Contender:
    """Base class of what takes steps."""

    name = ""

    def step(self) -> float:
        """Take a step and return its loss."""
        raise NotImplementedError


class Phalanx(Contender):
    """The trainer of `phalanx train` on one rank, without its log."""

    def __init__(self, run: Run, device: torch.device, words: str) -> None:
        self.name = f"phalanx {words}"
        self.rank = Rank(AloneWorld(device), run, Layout.parse(words))
        self.number = 0

    def step(self) -> float:
        own = self.rank.next_batch.take(self.number)
        self.number += 1

        def read_ahead() -> None:
            self.rank.next_batch.read_ahead(self.number)

        result = self.rank.part.trainer.step(own, LR, meanwhile=read_ahead)
        return result.total


class Hand(Contender):
    """Base class of the hand-written loops."""

    # bfloat16 weights with float32 masters, else float32 weights and autocast
    masters = False

    def __init__(
        self, run: Run, device: torch.device, *, compiled: bool
    ) -> None:
        shape = shape_of(run)
        self.device, self.number = device, 0
        self.batches = batches_of(run, shape)
        self.next_batch = NextBatch(self.read, device)
        with device:
            self.model: Any = model_of(shape, run.tokens(shape))
        if self.masters:
            self.model.to(torch.bfloat16)
        if compiled:
            self.model.compile()
        self.weights = list(self.model.parameters())
        # in the optimizer's precision
        self.updated = [
            weight.detach().float() if self.masters else weight
            for weight in self.weights
        ]
        matrices = [w for w in self.updated if w.dim() > 1]
        vectors = [w for w in self.updated if w.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=LR,
            betas=(0.9, 0.95),
            fused=True,
        )

    def read(self, step: int) -> list[dict[str, Tensor]]:
        rows = self.batches.batch(step)
        pinned = self.device.type == "cuda"
        names = ("tokens", "targets")
        on_host = {
            name: rows[name].pin_memory() if pinned else rows[name]
            for name in names
        }
        return [
            {
                name: rows.to(self.device, non_blocking=True)
                for name, rows in on_host.items()
            }
        ]

    def step(self) -> float:
        (own,) = self.next_batch.take(self.number)
        self.number += 1
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=not self.masters
        ):
            total = self.model(own["tokens"], own["targets"])
        loss = total / (own["targets"] != -100).sum()
        loss.backward()
        if self.masters:
            for master, weight in zip(self.updated, self.weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        clip_grad_norm_(self.updated, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.updated)
        self.next_batch.read_ahead(self.number)
        return float(loss.detach())


class Autocast(Hand):
    name = "autocast"


class Masters(Hand):
    name = "masters"
    masters = True


def model_of(shape: Shape, sequence: int) -> HandModel:
    """A hand-written model of these sizes, with weights as the decoder draws them."""
    model = HandModel(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        vocab=shape.vocab,
        sequence=sequence,
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    if shape.tied:
        model.head.output.weight = model.embed.tokens.weight
    return model


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- kernels of a step


def kernels_of(contender: Contender, device: torch.device) -> dict[str, Any]:
    """The kernels of one step, with their share, and the device's idle time."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        contender.step()
        wait(device)
    spans = []
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    host: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            # a range such as "Optimizer.step" spans several kernels
            if event.is_user_annotation:
                continue
            span = event.time_range
            spans.append((span.start, span.end))
            times[event.name] += span.elapsed_us()
            counts[event.name] += 1
        else:
            host[event.name] += event.self_cpu_time_total
    spans.sort()
    busy, until = 0.0, 0.0
    gaps = []
    for start, end in spans:
        if until and start > until:
            gaps.append(start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0] if spans else 0.0
    return {
        "name": contender.name,
        "ms": whole / 1e3,
        "idle": 1 - busy / whole if whole else 0.0,
        "longest_gaps_us": [round(gap) for gap in sorted(gaps)[-12:]],
        "kernels": len(spans),
        "top": [
            (name[:110], round(us / 1e3, 3), counts[name])
            for name, us in times.most_common(45)
        ],
        "host_ms": [
            (name[:60], round(us / 1e3, 2))
            for name, us in host.most_common(25)
        ],
    }


def shown(found: dict[str, Any]) -> str:
    lines = [
        f"## {found['name']}: {found['ms']:.1f} ms, idle {found['idle']:.1%},"
        f" {found['kernels']} kernels, gaps {found['longest_gaps_us']} us"
    ]
    lines += [f"{ms:9.3f} ms {n:5} x {name}" for name, ms, n in found["top"]]
    lines += ["host:"]
    lines += [f"{ms:9.2f} ms {name}" for name, ms in found["host_ms"]]
    return "\n".join(lines)


# ---- turns


class Turns:
    """Contenders that take steps in turn, and their times."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.lines: list[str] = []
        self.found: dict[str, Any] = {}

    def race(self, contenders: list[Contender]) -> None:
        times: dict[str, list[float]] = {each.name: [] for each in contenders}
        losses: dict[str, list[float]] = {each.name: [] for each in contenders}
        first: dict[str, float] = {}
        peaks: dict[str, int] = {}
        for each in contenders:
            begun = time.perf_counter()
            each.step()
            first[each.name] = time.perf_counter() - begun
            for _ in range(self.args.warm):
                losses[each.name].append(each.step())
        for _ in range(self.args.rounds):
            for each in contenders:
                turn = []
                wait(self.device)
                held = _memory(self.device)
                for _ in range(self.args.steps):
                    begun = time.perf_counter()
                    losses[each.name].append(each.step())
                    turn.append(time.perf_counter() - begun)
                times[each.name].append(statistics.median(turn))
                peaks[each.name] = _memory(self.device, peak=True) - held
        base = min(
            (name for name in times if not name.startswith("phalanx")),
            key=lambda name: statistics.median(times[name]),
            default=contenders[0].name,
        )
        for name, each in times.items():
            ratios = [a / b for a, b in zip(each, times[base], strict=True)]
            low, middle, high = (
                min(ratios),
                statistics.median(ratios),
                max(ratios),
            )
            self.lines.append(
                f"| {name} | {statistics.median(each) * 1e3:.1f}"
                f" | {middle:.3f} ({low:.3f}-{high:.3f}) | {first[name]:.1f}"
                f" | {peaks[name] / 1e9:.2f} | {losses[name][0]:.2f} -> {losses[name][-1]:.2f} |"
            )
            self.found[name] = {"seconds": each, "first": first[name]}

    def table(self) -> str:
        args = self.args
        head = [
            f"{args.model}, batch {args.batch}, sequence {args.sequence}"
            f"{', compiled' if args.compile else ''}\n",
            "| | ms a step, median | ratio to the faster loop (range) | first step, s"
            " | GB beside the state | loss |",
            "|---|--:|--:|--:|--:|--:|",
        ]
        return "\n".join(head + self.lines)


def _memory(device: torch.device, *, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="8b-width", choices=MODELS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layout", default="bf16")
    parser.add_argument("--documents", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each turn")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument(
        "--hand", nargs="*", default=("masters", "autocast"), help="the loops"
    )
    parser.add_argument("--profile", type=Path, help="file for the kernels")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        work(args, run_of(args, folder))


def work(args: argparse.Namespace, run: Run) -> None:
    turns = Turns(args)
    loops: dict[str, Callable[..., Hand]] = {
        "masters": Masters,
        "autocast": Autocast,
    }
    words = f"{args.layout} compile" if args.compile else args.layout
    contenders: list[Contender] = [Phalanx(run, turns.device, words)]
    contenders += [
        loops[name](run, turns.device, compiled=args.compile)
        for name in args.hand
    ]
    turns.race(contenders)
    print(turns.table(), flush=True)
    if args.profile:
        found = [kernels_of(each, turns.device) for each in contenders]
        args.profile.write_text("\n\n".join(map(shown, found)) + "\n")
        for each in found:
            print(
                f"{each['name']}: {each['ms']:.1f} ms, idle {each['idle']:.1%}, {each['kernels']} kernels"
            )
    print(json.dumps(turns.found), file=sys.stderr)


if __name__ == "__main__":
    main()
