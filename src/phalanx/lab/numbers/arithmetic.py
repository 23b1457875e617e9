"""Arithmetic: what weights, states and activations weigh, by hand and as torch counts it.

Training at 2 bytes a number with four numbers for every weight (weight, gradient, Adam's two) takes
8 bytes a weight: 1B weights 8 GB, 10B fill a device of 80 GB, 100B take 800 GB, 10 GB each over 80
devices. That is the least; mixed-precision Adam as it is done takes 16 to 18: weight 2 and gradient
2 or 4 bytes, master weight 4, Adam's two 4 each. And activations: a model of 126 layers and width
16,384, on 4,096 tokens with an ffn of 4 x width, keeps 67.6 GB of hidden activations of its ffn
alone. By the library: the same tensors are made, on the meta device, and their bytes counted. GB is
1e9 bytes, GiB is 2^30.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import one_process, start
from phalanx.lab.note import Note, everyone

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
    """What torch says a tensor of each dtype and that many numbers takes; nothing is allocated."""
    return sum(torch.empty(count, dtype=dtype, device="meta").nbytes for dtype in dtypes)


def ffn_hidden(ffn: int) -> int:
    """The bytes that one layer's first matmul puts out, times layers."""
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta")
    w = torch.empty(WIDTH, ffn, dtype=torch.bfloat16, device="meta")
    return LAYERS * (x @ w).nbytes


def by_library() -> dict[str, float]:
    half, wide = torch.bfloat16, torch.float32
    four = [half] * 4
    adam = [half, half, wide, wide, wide]
    whole = nbytes(100 * 10**9, *four)
    found = [
        nbytes(10**9, *four),
        nbytes(10 * 10**9, *four),
        whole,
        whole / 80,
        nbytes(10**9, *adam),
        nbytes(10**9, wide, *adam[:1], *adam[2:]),
        ffn_hidden(4 * WIDTH),
        ffn_hidden(FFN),
    ]
    return dict(zip(BY_HAND, found, strict=True))


def adam_in_torch(weights: list[Tensor]) -> tuple[float, int]:
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


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    library = by_library()
    note.step("bytes, by hand and by the library")
    note.holds("before", **{"1B_weights_by_hand": BY_HAND["1B weights, 4 numbers of 2 bytes"]})
    note.holds("after", **{"1B_weights_by_library": library["1B weights, 4 numbers of 2 bytes"]})
    if rank == 0:
        rows = [
            (what, f"{hand:,.0f}", f"{found:,.0f}", f"{found / GB:.1f}", f"{found / GIB:.1f}")
            for (what, hand), found in zip(BY_HAND.items(), library.values(), strict=True)
        ]
        note.table("bytes", ("what", "by hand", "by library", "GB", "GiB"), rows)
    note.step("a real optimizer: fp32 weight, gradient and two states")
    weights = start(size)
    note.holds("before", weights=weights)
    each, count = adam_in_torch(weights)
    note.holds("after", bytes_for_every_weight=each)
    # Every rank's share of the gradient of one process, so that what is weighed is also right.
    share = [g / n for g in one_process(size).gradients]
    for g in share:
        wire.all_reduce(g)
    return {"bytes": list(library.values()), "adam": each, "weights": count, "gradients": share}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    for rank, held in enumerate(results):
        for (what, hand), found in zip(BY_HAND.items(), held["bytes"], strict=True):
            yield equal(f"rank {rank}: {what}", found, hand)
        yield equal(
            f"rank {rank}: torch's Adam in fp32 takes 16 bytes a weight", held["adam"], 16.0
        )
        count = size.layers * size.width**2
        yield equal(f"rank {rank}: weights counted", held["weights"], count)
        says = f"rank {rank}: n shares of the gradient are the gradient"
        yield equal(says, held["gradients"], one_process(size).gradients)
    yield Claim("67.6 GB are 63 GiB", round(2 * 126 * 65_536 * 4_096 / GB, 1) == 67.6)
    yield Claim("and exactly 63", 63 * GIB == 2 * 126 * 65_536 * 4_096)
