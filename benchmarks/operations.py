"""Python's overhead per operation of a step, beside the work given to torch.

    OMP_NUM_THREADS=1 python benchmarks/operations.py [--layout recompute:all] [--profile]
    OMP_NUM_THREADS=1 python benchmarks/operations.py --beside OTHER/src

Runs the tiny model with rows of 16 tokens on one rank, in one process. Contenders alternate every few
steps and are compared by CPU time; of all turns the table shows the 10th percentile, because others
use the machine too:

- loop: forward, backward, clipping and fused AdamW in plain torch, including reading the loss;
- pieces: the pieces, units and updates of a step, called one after the other without a program;
- step: `Executor.step` on the same batches;
- list: a step whose pieces, units and updates return ready values at once. What remains is the work
  of the executor: walking the list, waiting, recording times, checking for non-finite values,
  agreeing and reading the loss;
- block, its module: the forward of one block that keeps activations for backward, as a piece and
  alone. On a GPU, a host slower than the device's kernels determines the time of a step;
- hand block: the block of `hand_model.py`, which has modules of torch and none of phalanx;
- its calls: the same calls of torch written one after the other, without modules, and the same without
  autograd's graph: the least time in which Python can start them.

The cost of an operation is the time by which a step exceeds the loop, divided by the number of
operations. The executor's part is the excess over the pieces. The rest is the cost of cutting a model
into pieces: an edge of autograd's graph and a backward call for each, and updates by unit.
`--profile` prints a profile of steps. `--beside` runs the same turns with another source tree, in
a process of its own, each turn after that of this tree.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from hand_model import EPS, Block, HandModel, rotate
from phalanx.comm import Work
from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout, Run
from phalanx.parallel import count_valid, data, pieces
from phalanx.training import optimizer, totals
from phalanx.training.optimizer import Scale
from phalanx.training.rank import Rank
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
        mock.patch.object(totals, "norms_of", norms_of),
    ):
        yield


def called_in_order(
    block: Block, x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """The calls of torch in the forward of a hand-written block, without its modules."""
    attn, mlp, heads = block.attn, block.mlp, (-1, block.attn.size)
    weight = block.attn_norm.weight
    h = F.rms_norm(x, weight.shape, weight, EPS)
    # (batch, heads, time, size)
    q = F.linear(h, attn.wq.weight).unflatten(-1, heads).transpose(1, 2)
    k = F.linear(h, attn.wk.weight).unflatten(-1, heads).transpose(1, 2)
    v = F.linear(h, attn.wv.weight).unflatten(-1, heads).transpose(1, 2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    x = x + F.linear(y.transpose(1, 2).flatten(2), attn.wo.weight)
    weight = block.mlp_norm.weight
    h = F.rms_norm(x, weight.shape, weight, EPS)
    wide = F.silu(F.linear(h, mlp.gate.weight)) * F.linear(h, mlp.up.weight)
    return x + F.linear(wide, mlp.down.weight)


class Contenders:
    """The contenders of this process; each is a call that takes one step or forward."""

    def __init__(self, layout: str, folder: str) -> None:
        sizes = SIZES["tiny"]
        keys = ",".join(f"{name}={value}" for name, value in sizes.items())
        words = (
            f"model={{name='tiny',{keys},sequence={TOKENS},batch=2}}",
            "document_masks=false",
            f"out={folder}/run",
        )
        run = Run.parse("", "run", words)
        self.rank = Rank(AloneWorld(), run, Layout.parse(layout))
        self.plain = Plain(sizes, list(words), 0, 1, compiled=False)
        self.own = self.rank.batch(0)
        self.whole = self.rank.batches.batch(0)
        local = self.rank.part.local
        self.block = local.pieces[1]
        self.batch = local.complete(self.own[0])
        self.bundle = local.pieces[0].forward(0, {}, self.batch, keep=False)
        self.given = {
            name: self.batch[name]
            for name in self.block.takes
            if name in self.batch
        }
        hand = HandModel(**sizes, sequence=TOKENS)
        block: Any = hand.layers[0]
        self.by_hand: Block = block
        self.angles = hand.cos, hand.sin
        self.turns: dict[str, Callable[[], object]] = {
            "loop": self.loop,
            "pieces": self.pieces,
            "step": self.step,
            "list": self.step,
            "block": self.forward,
            "its module": self.module,
            "hand block": self.hand_block,
            "its calls": self.calls,
            "its calls, no graph": self.calls_without_graph,
        }

    def loop(self) -> None:
        loop = self.plain
        count = (self.whole["targets"] != -100).sum()
        total = loop.gradients(self.whole, count)
        loop.clip()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=True)
        float(total)

    def pieces(self) -> None:
        part = self.rank.part
        ordered = list(part.local.pieces.values())
        batch = part.local.complete(self.own[0])
        count = count_valid(batch).double().view(1)
        bundle: dict[str, Tensor] = {}
        for piece in ordered:
            bundle = piece.forward(0, bundle, batch, keep=True)
        gradients = ordered[-1].seed(0, 1.0 / count)
        for piece in reversed(ordered):
            gradients = piece.backward(0, gradients)
        units = part.local.units.values()
        for unit in units:
            unit.reduce().wait()
        norms = torch.cat([totals.norms_of(unit) for unit in units])
        norm = norms.double().square_().sum().sqrt().view(1)
        for update in part.trainer.updates.values():
            update(3e-4, Scale.of(norm, 1.0, 1.0))
        torch.cat((bundle["x"].view(1), norm)).tolist()

    def step(self) -> None:
        self.rank.part.trainer.step(self.own, 3e-4)

    def forward(self) -> None:
        self.block.forward(0, self.bundle, self.batch, keep=True)

    def module(self) -> None:
        self.block.module(self._input(), **self.given)

    def hand_block(self) -> None:
        self.by_hand(self._input(), *self.angles)

    def calls(self) -> None:
        called_in_order(self.by_hand, self._input(), *self.angles)

    def calls_without_graph(self) -> None:
        with torch.no_grad():
            called_in_order(self.by_hand, self.bundle["x"], *self.angles)

    def _input(self) -> Tensor:
        return self.bundle["x"].detach().requires_grad_()

    def turn(self, name: str, steps: int) -> float:
        """The microseconds of processor time of one call."""
        call = self.turns[name]
        if name == "list":
            with nothing_computed(self.rank, self.own):
                return _microseconds(call, steps)
        return _microseconds(call, steps)


def _microseconds(call: Callable[[], object], steps: int) -> float:
    begun = time.process_time()
    for _ in range(steps):
        call()
    return (time.process_time() - begun) / steps * 1e6


@contextmanager
def other_tree(
    source: str, layout: str
) -> Iterator[Callable[[str, int], float]]:
    """Yield the turns of another source tree, which its own process takes when asked."""
    path = os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))
    command = (sys.executable, __file__, "--serve", "--layout", layout)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        questions: Any = process.stdin
        answers: Any = process.stdout

        def turn(name: str, steps: int) -> float:
            print(f"{steps} {name}", file=questions, flush=True)
            return float(answers.readline())

        yield turn
        questions.close()


def serve(contenders: Contenders) -> None:
    """Take the turns that the standard input names, and print their microseconds."""
    for line in sys.stdin:
        steps, name = line.rstrip("\n").split(" ", 1)
        print(contenders.turn(name, int(steps)), flush=True)


def profile(contenders: Contenders, count: int) -> None:
    with cProfile.Profile(time.process_time) as profiled:
        for _ in range(count):
            contenders.step()
    pstats.Stats(profiled).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", default="fp32")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=10, help="of each turn")
    parser.add_argument("--beside", default="", help="another source tree")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(args.layout, folder)
        for name in contenders.turns:
            contenders.turn(name, args.steps)
        if args.serve:
            serve(contenders)
        elif args.profile:
            profile(contenders, args.rounds * args.steps)
        else:
            compare(contenders, args)


def compare(contenders: Contenders, args: argparse.Namespace) -> None:
    """Take all turns, with those of another tree in between, and print the tables."""
    trees: dict[str, Callable[[str, int], float]] = {"": contenders.turn}
    beside = (
        other_tree(args.beside, args.layout) if args.beside else nullcontext()
    )
    with beside as other:
        if other:
            trees["before"] = other
        taken: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(args.rounds):
            for name in contenders.turns:
                for tree, turn in trees.items():
                    taken[tree, name].append(turn(name, args.steps))
    part = contenders.rank.part
    count = len(part.trainer.row)
    words = str(part.layout) or "one rank"
    print(f"{words}: {count} operations, load {os.getloadavg()[0]:.1f}")
    for tree in trees:
        own = {name: taken[tree, name] for name in contenders.turns}
        print(f"\n| {tree} | us | us an operation |\n|---|--:|--:|")
        for name, us in rows_of(own).items():
            of_step = "block" not in name and not name.startswith("its")
            each = f"{us / count:.1f}" if of_step else ""
            print(f"| {name} | {us:.0f} | {each} |")
    if other:
        print("\n| | ratio to before (quartiles) |\n|---|--:|")
        for name in contenders.turns:
            both = zip(taken["", name], taken["before", name], strict=True)
            low, middle, high = statistics.quantiles(a / b for a, b in both)
            print(f"| {name} | {middle:.3f} ({low:.3f}-{high:.3f}) |")


def rows_of(times: dict[str, list[float]]) -> dict[str, float]:
    """The 10th percentile of each contender, and the differences between some."""
    low = {
        name: statistics.quantiles(each, n=10)[0]
        for name, each in times.items()
    }
    # Differences between neighbouring turns.
    pairs = {"step, more than loop": "loop", "of it the executor": "pieces"}
    return low | {
        what: statistics.median(
            a - b for a, b in zip(times["step"], times[name], strict=True)
        )
        for what, name in pairs.items()
    }


if __name__ == "__main__":
    main()
