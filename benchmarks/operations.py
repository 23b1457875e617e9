"""Python's overhead per operation of a step, beside the work given to torch.

    OMP_NUM_THREADS=1 python benchmarks/operations.py [--layout recompute:all] [--profile]

Runs the tiny model with rows of 16 tokens on one rank, in one process. Contenders alternate every few
steps and are compared by CPU time; of all turns the table shows the 10th percentile, because others
use the machine too:

- loop: forward, backward, clipping and fused AdamW in plain torch, including reading the loss;
- pieces: the pieces, units and updates of a step, called one after the other without a program;
- step: `Executor.step` on the same batches;
- list: a step whose pieces, units and updates return ready values at once. What remains is the work
  of the executor: walking the list, waiting, recording times, checking for non-finite values,
  agreeing and reading the loss;
- block, its module: the forward of one block that keeps activations for backward, as a piece and in
  plain torch. On a GPU, a host slower than the device's kernels determines the time of a step.

The cost of an operation is the time by which a step exceeds the loop, divided by the number of
operations. The executor's part is the excess over the pieces. The rest is the cost of cutting a model
into pieces: an edge of autograd's graph and a backward call for each, and updates by unit.
`--profile` prints a profile of steps.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from phalanx.comm import Work
from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout, Run
from phalanx.parallel import data, pieces
from phalanx.train import executor, optimizer
from phalanx.train.optimizer import Scale
from phalanx.train.rank import Rank
from torch_loops import Plain
from train_steps import SIZES

TOKENS = 16


@contextmanager
def nothing_computed(rank: Rank, own: Any) -> Iterator[None]:
    """Replace pieces, units and updates by ones that do no work and return the values
    of the step just before."""
    outputs: dict[tuple[str, int], Any] = {}

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(pieces.Piece, name)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            outputs[name, id(self)] = out = real(self, *args, **options)
            return out

        return call

    def given(name: str) -> Callable[..., Any]:
        return lambda self, *args, **options: outputs[name, id(self)]

    def reduced(self: Any) -> Any:
        self.full, self._open, self._summed = None, False, True
        return Work()

    names = ("forward", "backward", "seed")
    with mock.patch.multiple(
        pieces.Piece, **{name: noted(name) for name in names}
    ):
        rank.part.trainer.step(own, 0.0)
    norms = torch.ones(1)

    def no_update(self: Any, *args: Any) -> None:
        pass

    def norms_of(unit: Any) -> Any:
        return norms

    with (
        mock.patch.multiple(
            pieces.Piece, **{name: given(name) for name in names}
        ),
        mock.patch.object(data.Unit, "reduce", reduced),
        mock.patch.object(data.PlainUnit, "reduce", reduced),
        mock.patch.object(optimizer.Update, "__call__", no_update),
        mock.patch.object(executor, "_norms", norms_of),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", default="fp32")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = "1"
    sizes = SIZES["tiny"]
    keys = ",".join(f"{name}={value}" for name, value in sizes.items())
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"model={{name='tiny',{keys},sequence={TOKENS},batch=2}}",
            "document_masks=false",
            f"out={folder}/run",
        )
        run = Run.parse("", "run", words)
        rank = Rank(AloneWorld(), run, Layout.parse(args.layout))
        loop = Plain(sizes, list(words), 0, 1, compiled=False)
        own = rank.batch(0)
        mine = rank.batches.batch(0)

        def plain() -> None:
            total = loop.gradients(mine, (mine["targets"] != -100).sum())
            loop.clip()
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=True)
            float(total)

        def called() -> None:
            trainer, ordered = (
                rank.part.trainer,
                list(rank.part.local.pieces.values()),
            )
            count, bundle = executor.count_valid(own[0]).double().view(1), {}
            for piece in ordered:
                bundle = piece.forward(0, bundle, own[0], keep=True)
            gradients = ordered[-1].seed(0, 1.0 / count)
            for piece in reversed(ordered):
                gradients = piece.backward(0, gradients)
            for unit in rank.part.local.units.values():
                unit.reduce().wait()
            norms = torch.cat(
                [
                    executor._norms(unit)
                    for unit in rank.part.local.units.values()
                ]
            )
            norm = norms.double().square_().sum().sqrt().view(1)
            for update in trainer.updates.values():
                update(3e-4, Scale.of(norm, 1.0, 1.0))
            torch.cat((bundle["x"].view(1), norm)).tolist()

        def step() -> None:
            rank.part.trainer.step(own, 3e-4)

        def turn(one: Callable[[], None]) -> float:
            begun = time.process_time()
            for _ in range(args.steps):
                one()
            return (time.process_time() - begun) / args.steps * 1e6

        block = rank.part.local.pieces[1]
        batch = rank.part.local.complete(own[0])
        bundle = rank.part.local.pieces[0].forward(0, {}, batch, keep=False)
        given = {name: batch[name] for name in block.takes if name in batch}

        def forward() -> None:
            block.forward(0, bundle, batch, keep=True)

        def module() -> None:
            block.module(bundle["x"].detach().requires_grad_(), **given)

        turns = {
            "loop": plain,
            "pieces": called,
            "step": step,
            "block": forward,
            "its module": module,
        }
        for one in turns.values():
            turn(one)
        if args.profile:
            with cProfile.Profile(time.process_time) as profile:
                for _ in range(args.rounds):
                    turn(step)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            return
        times: dict[str, list[float]] = {name: [] for name in (*turns, "list")}
        for _ in range(args.rounds):
            for name, one in turns.items():
                times[name].append(turn(one))
            with nothing_computed(rank, own):
                times["list"].append(turn(step))
    low = {
        name: statistics.quantiles(each, n=10)[0]
        for name, each in times.items()
    }
    # Differences between neighbouring turns.
    pairs = {"step, more than loop": "loop", "of it the executor": "pieces"}
    low |= {
        what: statistics.median(
            a - b for a, b in zip(times["step"], times[name], strict=True)
        )
        for what, name in pairs.items()
    }
    count = len(rank.part.trainer.row)
    words = str(rank.part.layout) or "one rank"
    print(f"{words}: {count} operations, load {os.getloadavg()[0]:.1f}\n")
    print("| | us | us an operation |\n|---|--:|--:|")
    for name, us in low.items():
        each = "" if name in ("block", "its module") else f"{us / count:.1f}"
        print(f"| {name} | {us:.0f} | {each} |")


if __name__ == "__main__":
    main()
