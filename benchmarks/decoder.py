"""`Decoder` against a hand-written model, piece by piece, in one process.

    OMP_NUM_THREADS=1 python benchmarks/decoder.py --size 5m --rounds 40

Both have the same weights and alternate, forward and backward. Times are CPU time,
which depends little on the machine's other load; a ratio is the median over rounds,
with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hand_model import HandModel
from phalanx.models import Decoder
from phalanx.training.rank import keep_freed_memory
from train_steps import ROWS, SEQUENCE, SIZES

Call = Callable[[], Tensor]


def pairs(size: str) -> dict[str, tuple[Call, Call]]:
    """Return two calls for each piece, ours and the hand-written one; each returns a
    scalar to call backward on."""
    sizes: dict[str, Any] = SIZES[size]
    torch.manual_seed(0)
    ours = Decoder(**sizes)
    by_hand = HandModel(**sizes, sequence=SEQUENCE)
    by_hand.load_state_dict(ours.state_dict())
    tokens = torch.randint(sizes["vocab"], (ROWS, SEQUENCE))
    targets = torch.randint(sizes["vocab"], (ROWS, SEQUENCE))
    positions = torch.arange(SEQUENCE).expand(ROWS, -1)
    x = torch.randn(ROWS, SEQUENCE, sizes["hidden"], requires_grad=True)
    logits = torch.randn(ROWS * SEQUENCE, sizes["vocab"])
    angles = ours.derived["angles"]({"positions": positions}, x.dtype)
    cos, sin = by_hand.cos, by_hand.sin
    ones = torch.ones_like(x)

    def block(model: Any, **how: Any) -> Call:
        return lambda: (model.layers[0](x, **how) * ones).sum()

    def norm(model: Any) -> Call:
        return lambda: (model.layers[0].attn_norm(x) * ones).sum()

    def attention(call: Callable[[], Tensor]) -> Call:
        return lambda: (call() * ones).sum()

    def mlp(model: Any) -> Call:
        return lambda: (model.layers[0].mlp(x) * ones).sum()

    def loss(of: Callable[[Tensor, Tensor], Tensor]) -> Call:
        # The copy stands for the matmul that computes the logits: ours overwrites them.
        return lambda: of((logits * 1.0).requires_grad_(), targets.flatten())

    def cross_entropy(given: Tensor, wanted: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            given, wanted, reduction="sum"
        )

    first = ours.layers[0].attn, by_hand.layers[0].attn
    both: dict[str, tuple[Call, Call]] = {
        "model": (
            lambda: ours(tokens, targets, positions=positions),
            lambda: by_hand(tokens, targets),
        ),
        "block": (
            block(ours, positions=positions, angles=angles),
            block(by_hand, cos=cos, sin=sin),
        ),
        "norm": (norm(ours), norm(by_hand)),
        "attention": (
            attention(lambda: first[0](x, positions, None, None, angles)),
            attention(lambda: first[1](x, cos, sin)),
        ),
        "mlp": (mlp(ours), mlp(by_hand)),
        "loss": (loss(ours.head.loss), loss(cross_entropy)),
        "head": (
            lambda: ours.head(x, targets),
            lambda: by_hand.head(x, targets),
        ),
    }
    return both


def taken(call: Call, times: int) -> float:
    """Return the CPU time of a forward and backward pass in milliseconds."""
    begun = time.process_time()
    for _ in range(times):
        call().backward()
    return (time.process_time() - begun) * 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=())
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    print(
        f"| {args.size} | ours, ms | by hand, ms | ratio (quartiles) |\n|---|--:|--:|--:|"
    )
    for name, calls in pairs(args.size).items():
        if args.only and name not in args.only:
            continue
        each = [taken(call, 2) for call in calls]
        times = max(1, round(40 / max(each)))
        rounds: list[tuple[float, float]] = []
        for number in range(args.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            found = {which: taken(calls[which], times) for which in order}
            rounds.append((found[0], found[1]))
        ours, by_hand = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        low, middle, high = statistics.quantiles(
            (a / b for a, b in rounds), n=4
        )
        ratio = f"{middle:.3f} ({low:.3f}-{high:.3f})"
        print(f"| {name} | {ours:.3f} | {by_hand:.3f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
