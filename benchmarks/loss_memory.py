"""Memory of the loss over a large vocabulary: torch's in float32 and 16 bits, and ours.

    python benchmarks/loss_memory.py --tokens 8192 --words 131072

A matmul computes the logits, then the loss runs forward and backward on fake tensors:
each operation runs and each storage counts, but no memory is allocated. Memory that
kernels allocate internally is not counted.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from phalanx.cost.live import Live
from phalanx.models.loss import token_loss


def in_float32(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def in_16_bits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


WAYS = {
    "cross_entropy(logits.float())": in_float32,
    "cross_entropy(logits)": in_16_bits,
    "token_loss(logits)": token_loss,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--words", type=int, default=1 << 17)
    args = parser.parse_args()
    print(
        "| GiB of live storages | kept after forward | most in forward | most in backward |"
    )
    print("|---|--:|--:|--:|")
    with FakeTensorMode():
        for name, way in WAYS.items():
            x, head = (
                torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
                for size in ((args.tokens, 1), (1, args.words))
            )
            targets = torch.zeros(args.tokens, dtype=torch.int64)
            with Live() as live:
                loss = way(x @ head, targets)
                kept, forward, live.most = live.now, live.most, live.now
                loss.backward()  # type: ignore[no-untyped-call]
            print(
                f"| `{name}` |",
                *(f"{n / 2**30:.2f} |" for n in (kept, forward, live.most)),
            )


if __name__ == "__main__":
    main()
