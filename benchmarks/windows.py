"""CPU time of attention with a window, against torch's kernel with a mask of all pairs.

OMP_NUM_THREADS=1 python benchmarks/windows.py
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from phalanx.models.kernels import attention


def masked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    length = q.shape[1]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    mask = q.new_full((length, length), -math.inf)
    mask = mask.masked_fill_((apart >= 0) & (apart < window), 0.0)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(
        1, 2
    )


def strips(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return attention(q, k, v, window=window)


def main() -> None:
    torch.manual_seed(0)
    print(
        "| tokens, window | mask of all pairs, ms | strips, ms | ratio |\n|---|--:|--:|--:|"
    )
    for length, window in ((1024, 512), (2048, 512), (4096, 512), (4096, 128)):
        shapes = [(1, length, heads, 64) for heads in (8, 2, 2)]
        qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
        spent: dict[str, list[float]] = {}
        for _ in range(6):
            for function in (masked, strips):
                began = time.process_time()
                function(*qkv, window).sum().backward()
                spent.setdefault(function.__name__, []).append(
                    time.process_time() - began
                )
        all_pairs, own = (statistics.median(each) for each in spent.values())
        times = (
            f"{1e3 * all_pairs:.0f} | {1e3 * own:.0f} | {own / all_pairs:.2f}"
        )
        print(f"| {length:,}, {window} | {times} |")


if __name__ == "__main__":
    main()
