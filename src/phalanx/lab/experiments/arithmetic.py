"""Arithmetic: the memory of weights, states and activations, by hand and as torch counts it.

Training at 2 bytes a number with four numbers for every weight (weight, gradient, Adam's two) takes
8 bytes a weight: 1B weights 8 GB, 10B fill a device of 80 GB, 100B take 800 GB, 10 GB on each of 80
devices. That is the least; mixed-precision Adam in practice takes 16 to 18: weight 2 and gradient
2 or 4 bytes, master weight 4, Adam's two 4 each. And activations: a model of 126 layers and width
16,384, on 4,096 tokens with an ffn of 4 x width, keeps 67.6 GB of hidden activations of its ffn
alone. By the library: the same tensors are made on the meta device, and their bytes counted. GB is
1e9 bytes, GiB is 2^30.
"""

import torch

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import one_process, start

GB, GIB = 1e9, 2**30
LAYERS, WIDTH, TOKENS, FFN = 126, 16_384, 4_096, 53_248  # Llama 3 405B
BY_HAND = {
    "1B weights, 4 numbers of 2 bytes": 8e9,
    "10B weights": 80e9,
    "100B weights": 800e9,
    "100B weights, each of 80 devices": 10e9,
    "1B weights, mixed-precision Adam": 16e9,
    "1B weights, the same with gradients of 4 bytes": 18e9,
    "ffn hidden, 126 layers, ffn 4 x 16,384": 2 * 126 * 65_536 * 4_096,
    "ffn hidden, 126 layers, ffn 53,248": 2 * 126 * 53_248 * 4_096,
}


def nbytes(count: int, *dtypes: torch.dtype) -> int:
    """The bytes of a tensor of each dtype with that many numbers; nothing is allocated."""
    return sum(torch.empty(count, dtype=dtype, device="meta").nbytes for dtype in dtypes)


def ffn_hidden(ffn: int) -> int:
    """The bytes of the output of one layer's first matmul, times layers."""
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta")
    w = torch.empty(WIDTH, ffn, dtype=torch.bfloat16, device="meta")
    return LAYERS * (x @ w).nbytes


def by_library() -> list[float]:
    half, wide = torch.bfloat16, torch.float32
    four = [half] * 4
    billion = 10**9
    return [
        nbytes(billion, *four),
        nbytes(10 * billion, *four),
        nbytes(100 * billion, *four),
        nbytes(100 * billion, *four) / 80,
        nbytes(billion, half, half, wide, wide, wide),
        nbytes(billion, half, wide, wide, wide, wide),
        ffn_hidden(4 * WIDTH),
        ffn_hidden(FFN),
    ]


def adam_in_torch(weights: list[torch.Tensor]) -> tuple[float, int]:
    """Bytes for every weight that torch's own Adam and its tensors take, counted after a step."""
    leaves = [w.float().requires_grad_() for w in weights]
    adam = torch.optim.Adam(leaves)
    for w in leaves:
        w.grad = torch.ones_like(w)
    adam.step()
    count = sum(w.numel() for w in leaves)
    states = [t for s in adam.state.values() for t in s.values() if t.numel() > 1]
    gradients = [w.grad for w in leaves if w.grad is not None]
    return sum(t.nbytes for t in (*leaves, *gradients, *states)) / count, count


def run(lab: Lab) -> Values:
    library = by_library()
    lab.step("bytes, by hand and by the library")
    lab.shows("before", by_hand=list(BY_HAND.values()))
    lab.shows("after", by_library=library)
    if lab.rank == 0:
        rows = [
            (what, f"{hand:,.0f}", f"{counted:,.0f}", f"{counted / GB:.1f}", f"{counted / GIB:.1f}")
            for (what, hand), counted in zip(BY_HAND.items(), library, strict=True)
        ]
        lab.table("bytes", ("what", "by hand", "by library", "GB", "GiB"), rows)
    lab.step("a real optimizer: fp32 weight, gradient and two states")
    weights = start(lab.size)
    lab.shows("before", weights=weights)
    each, count = adam_in_torch(weights)
    lab.shows("after", bytes_for_every_weight=each)
    # Every rank's share of the gradient of one process: what is counted is also what is needed.
    share = [g / lab.n for g in one_process(lab.size).gradients]
    for g in share:
        lab.group.all_reduce(g)
    return {"bytes": library, "adam": each, "weights": count, "gradients": share}


def check(results: Results, size: Size) -> Claims:
    by_hand = list(BY_HAND.values())
    yield from every(results, "bytes", "the library counts what was computed by hand", by_hand)
    yield from every(results, "adam", "torch's Adam in fp32 takes 16 bytes a weight", 16.0)
    count = size.layers * size.width**2
    yield from every(results, "weights", "weights counted", count)
    says = "n shares of the gradient are the gradient"
    yield from every(results, "gradients", says, one_process(size).gradients)
    yield Claim("67.6 GB are 63 GiB", round(2 * 126 * 65_536 * 4_096 / GB, 1) == 67.6)
    yield Claim("and exactly 63", 63 * GIB == 2 * 126 * 65_536 * 4_096)
