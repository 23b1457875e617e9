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

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import one_process, start

GB, GIB = 1e9, 2**30
LAYERS, WIDTH, TOKENS, FFN = 126, 16_384, 4_096, 53_248  # Llama 3 405B
half, wide = torch.bfloat16, torch.float32


def nbytes(count: int, *dtypes: torch.dtype) -> int:
    """The bytes of a tensor of each dtype with that many numbers; nothing is allocated."""
    return sum(torch.empty(count, dtype=dtype, device="meta").nbytes for dtype in dtypes)


def ffn_hidden(ffn: int) -> int:
    """The bytes of the output of one layer's first matmul, times layers."""
    x = torch.empty(TOKENS, WIDTH, dtype=half, device="meta")
    w = torch.empty(WIDTH, ffn, dtype=half, device="meta")
    return LAYERS * (x @ w).nbytes


def by_hand_and_by_library() -> list[tuple[str, float, float]]:
    billion, four = 10**9, [half] * 4
    adam = half, half, wide, wide, wide
    return [
        ("1B weights, 4 numbers of 2 bytes", 8e9, nbytes(billion, *four)),
        ("10B weights", 80e9, nbytes(10 * billion, *four)),
        ("100B weights", 800e9, nbytes(100 * billion, *four)),
        ("100B weights, each of 80 devices", 10e9, nbytes(100 * billion, *four) / 80),
        ("1B weights, mixed-precision Adam", 16e9, nbytes(billion, *adam)),
        ("the same with gradients of 4 bytes", 18e9, nbytes(billion, half, wide, *adam[2:])),
        ("ffn hidden, 126 layers, ffn 4 x 16,384", 2 * 126 * 65_536 * 4_096, ffn_hidden(4 * WIDTH)),
        ("ffn hidden, 126 layers, ffn 53,248", 2 * 126 * 53_248 * 4_096, ffn_hidden(FFN)),
    ]


def adam_in_torch(weights: list[torch.Tensor]) -> float:
    """Bytes for every weight that torch's own Adam and its tensors take, counted after a step."""
    leaves = [w.float().requires_grad_() for w in weights]
    adam = torch.optim.Adam(leaves)
    for w in leaves:
        w.grad = torch.ones_like(w)
    adam.step()
    states = [t for s in adam.state.values() for t in s.values() if t.numel() > 1]
    gradients = [w.grad for w in leaves if w.grad is not None]
    counted: int = sum(t.nbytes for t in (*leaves, *gradients, *states))
    return counted / sum(w.numel() for w in leaves)


def run(lab: Lab) -> None:
    counts = by_hand_and_by_library()
    lab.step("bytes, by hand and by the library", by_hand=[hand for _, hand, _ in counts])
    lab.after(by_library=[counted for *_, counted in counts])
    for what, hand, counted in counts:
        lab.claim(f"the library counts what was computed by hand: {what}", counted, hand)
    hidden = counts[-2][1]
    lab.claim("67.6 GB are exactly 63 GiB", [round(hidden / GB, 1), hidden / GIB], [67.6, 63])
    if lab.rank == 0:
        rows = [
            (what, f"{hand:,.0f}", f"{count:,.0f}", f"{count / GB:.1f}", f"{count / GIB:.1f}")
            for what, hand, count in counts
        ]
        lab.table("bytes", ("what", "by hand", "by library", "GB", "GiB"), rows)
    weights = start(lab.size)
    lab.step("a real optimizer: fp32 weight, gradient and two states", weights=weights)
    each = adam_in_torch(weights)
    lab.after(bytes_for_every_weight=each)
    lab.claim("torch's Adam in fp32 takes 16 bytes a weight", each, 16.0)
    # Every rank's share of the gradient of one process: what is counted is also what is needed.
    want = one_process(lab.size).gradients
    share = [g / lab.n for g in want]
    for g in share:
        lab.group.all_reduce(g)
    lab.claim("n shares of the gradient are the gradient", share, want)
