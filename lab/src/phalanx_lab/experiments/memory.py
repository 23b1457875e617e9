"""Memory: activations kept or recomputed, low-precision formats, and bytes counted by
hand."""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from phalanx_lab.lab import Lab
from phalanx_lab.mlp import (
    Kept,
    backward,
    batch,
    draw,
    forward,
    gradients_of,
    loss_of,
    one_process,
    start,
)

ROWS, FEATURES, DEPTHS, FEW = 256, 16, (4, 16, 36, 64), 4
UNIT = 8 * ROWS * FEATURES  # bytes of one activation
WAYS = (
    "everything",
    "input only",
    "4 checkpoints",
    "sqrt checkpoints",
    "usual, 4",
    "usual, sqrt",
)


def segments(way: str, depth: int) -> int:
    return {"everything": 1, "input only": 1}.get(
        way, isqrt(depth) if "sqrt" in way else FEW
    )


def by_hand(way: str, depth: int) -> tuple[int, int]:
    """Return the number of forwards and of activations kept. A layer keeps two for its
    backward: x and x @ w."""
    c = segments(way, depth)
    s = depth // c
    if way == "everything":
        return depth, 2 * depth
    if way.startswith("usual"):
        return 2 * depth, c + 2 * s
    return depth + c * s * (s + 1) // 2, c


class Chain:
    """A chain of layers that counts its forwards."""

    def __init__(self, depth: int) -> None:
        self.weights = [
            (2 / FEATURES) ** 0.5 * draw(i, FEATURES, FEATURES)
            for i in range(depth)
        ]
        self.gradients = [torch.zeros_like(w) for w in self.weights]
        self.forwards = 0

    def forward(
        self, x: Tensor, first: int, last: int, *, keep: bool = True
    ) -> tuple[Tensor, list[Kept]]:
        """Run layers first to last; return the output, and what their backward needs if
        `keep`."""
        kept = []
        for i in range(first, last):
            x, saved = forward(x, self.weights[i])
            kept += [saved] * keep
            del saved
        self.forwards += last - first
        return x, kept

    def step(self, x: Tensor, way: str) -> None:
        """Run forward and backward once."""
        depth = len(self.weights)
        length = depth // segments(way, depth)
        checkpoints, kept = [], list[Kept]()
        for first in range(0, depth, length):
            checkpoints.append(x)
            x, kept = self.forward(
                x, first, first + length, keep=way == "everything"
            )
        g = loss_of(x)[1]
        del x
        for first in reversed(range(0, depth, length)):
            start = checkpoints.pop()
            if way.startswith("usual"):
                _, kept = self.forward(start, first, first + length)
            for i in reversed(range(first, first + length)):
                if not kept:
                    x, _ = self.forward(start, first, i, keep=False)
                    kept = self.forward(x, i, i + 1)[1]
                    del x
                g, gradient = backward(g, kept.pop(), self.weights[i])
                self.gradients[i] += gradient
                del gradient


def recompute(lab: Lab) -> None:
    """Recomputation: keep fewer activations, compute forward again; what each choice costs, measured.

    Backward needs what forward computed. Either it is kept, or it is computed again. For N layers,
    forwards (time) and activations kept (memory) grow as

        keeps everything                 O(N)          O(N)
        keeps the input only             O(N^2)        O(1)       each layer from the start again
        C checkpoints                    O(N^2 / C)    O(C)       nothing kept inside a segment
        sqrt(N) checkpoints              O(N sqrt N)   O(sqrt N)
        usual: sqrt(N), segment kept     2 N           O(sqrt N)

    The usual form (Chen et al. 2016) recomputes a segment once and keeps it during its backward: never
    more than one extra forward. The gradients are the same in all of them.
    """
    # The ranks divide the cases among them; each is trained once, and its forwards and the bytes of
    # its tensors are counted.
    jobs = [(way, depth) for way in WAYS for depth in DEPTHS]
    lab.step(
        "forwards and memory: each rank measures some of the ways",
        ways=len(jobs),
    )
    counted = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for number in range(lab.rank, len(jobs), lab.n):
        way, depth = jobs[number]
        chain, x = Chain(depth), draw(1, ROWS, FEATURES)
        base = lab.memory.now - UNIT  # the input counts as kept
        lab.memory.most = lab.memory.now
        with lab.doing(f"{way}, {depth} layers"):
            chain.step(x, way)
        counted[number] = torch.tensor(
            [chain.forwards, (lab.memory.most - base) / UNIT]
        )
        weights, y = [w.requires_grad_() for w in Chain(depth).weights], x
        for w in weights:
            y = F.gelu(y @ w)
        (want,) = torch.autograd.grad(y.square().mean(), weights[:1])
        says = f"{way}, {depth} layers: the gradient is autograd's"
        lab.claim(says, chain.gradients[0], want)
    lab.group.all_reduce(counted)
    lab.after(forwards_and_activations=counted)

    # What was counted beside the formulas. What is being computed at the moment comes on top of
    # what is kept by hand, and must not grow with depth.
    hands = [by_hand(*job) for job in jobs]
    lab.claim("forwards", counted[:, 0], [forwards for forwards, _ in hands])
    extra = (counted[:, 1] - torch.tensor([kept for _, kept in hands])).view(
        len(WAYS), -1
    )
    for way, more in zip(WAYS, extra.tolist(), strict=True):
        says = f"{way}: activations kept are those by hand and the ones in use"
        fits = (
            min(more) >= 0 and max(more) <= 5.5 and max(more) - min(more) < 1.5
        )
        lab.claim(f"{says}, {min(more):.2f} to {max(more):.2f} more", fits)
    lab.group.barrier()
    if lab.rank == 0:
        rows = []
        for (way, depth), (forwards, kept), hand in zip(
            jobs, counted.tolist(), hands, strict=True
        ):
            ms = f"{1e3 * seconds(way, depth):.1f}"
            rows.append(
                (
                    way,
                    depth,
                    f"{forwards:.0f}",
                    hand[0],
                    f"{kept:.1f}",
                    hand[1],
                    ms,
                )
            )
        header = (
            "kept",
            "layers",
            "forwards",
            "by hand",
            "activations",
            "by hand",
            "ms",
        )
        lab.table("counted, by hand, and timed on rank 0 alone", header, rows)


def seconds(way: str, depth: int) -> float:
    """Return the shortest of three timings, not recorded."""
    times = []
    chain, x = Chain(depth), draw(1, ROWS, FEATURES)
    with _disable_current_modes():
        for _ in range(3):
            begin = time.perf_counter()
            chain.step(x, way)
            times.append(time.perf_counter() - begin)
    return min(times)


# dtype, (sign, exponent, fraction) bits, where it breaks down
FORMATS = {
    "fp64": (torch.float64, (1, 11, 52), "nowhere here; it is the reference"),
    "fp32": (torch.float32, (1, 8, 23), "1 + 2^-24 is 1"),
    "tf32": (
        None,
        (1, 8, 10),
        "1 + 2^-11 is 1, only on the way into a matmul",
    ),
    "fp16": (torch.float16, (1, 5, 10), "70,000 is infinite, 1e-8 is 0"),
    "bf16": (
        torch.bfloat16,
        (1, 8, 7),
        "1 + 2^-8 is 1: a small update is lost",
    ),
}
# A mean over as many elements as a real batch has makes gradients smaller by this
# factor.
SMALL = 2.0**-16


def gradients_in(
    dtype: torch.dtype,
    weights: Sequence[Tensor],
    x: Tensor,
    scale: float = 1.0,
) -> list[Tensor]:
    """Return gradients of SMALL x loss, computed in `dtype` with a scaled loss and
    widened to float64."""

    def scaled(y: Tensor) -> tuple[Tensor, Tensor]:
        return y, (2 * y.double() / y.numel() * SMALL * scale).to(dtype)

    narrow = [w.to(dtype) for w in weights]
    gradients = gradients_of(narrow, x.to(dtype), loss=scaled)[1]
    return [gradient.double() / scale for gradient in gradients]


def mixed_precision(lab: Lab) -> None:
    """Mixed precision: fewer bits where they suffice, and where each format breaks.

    Products in 16 bits are up to twice as fast as in 32 and move half the bytes. In all formats the
    master weights are wide, and gradients are widened before ranks sum them.
    """
    # a CPU multiplies fp16 slowly
    size = replace(lab.size, width=min(lab.size.width, 256))
    weights, x = start(size), batch(size, 0)[lab.part("batch")]

    def finish(name: str, gradients: list[Tensor], within: float) -> None:
        lab.average(gradients)
        lab.after(gradients=gradients)
        says = (
            f"gradients in {name} are one process's in float64 to {within:.1g}"
        )
        lab.claim(
            says,
            [g / SMALL for g in gradients],
            one_process(size).gradients,
            within=within,
        )

    # bf16 has the range of fp32 with 7 bits of fraction: nothing vanishes, but 1 + 1/512 is 1, so
    # weights and sums stay in fp32.
    for name, within in {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2.0**-4}.items():
        dtype = FORMATS[name][0]
        assert dtype is not None
        lab.step(
            f"{name}: no scale needed", weights=[w.to(dtype) for w in weights]
        )
        with lab.doing(name):
            gradients = gradients_in(dtype, weights, x)
        finish(name, gradients, within)

    # fp16 has 10 bits of fraction and a narrow range: small gradients become 0.
    lab.step(
        "fp16 without a scale: small gradients",
        weights=[w.half() for w in weights],
    )
    halves, wide = (
        gradients_in(dtype, weights, x)
        for dtype in (torch.float16, torch.float64)
    )
    pairs = zip(halves, wide, strict=True)
    vanished = [(half == 0) & (full != 0) for half, full in pairs]
    lost = sum(int(each.sum()) for each in vanished)
    lab.after(
        gradients_that_became_zero=lost, of=sum(w.numel() for w in weights)
    )
    lab.claim(f"some gradients became zero: {lost}", lost > 0)

    # So the loss is multiplied by a scale, and gradients are divided by it; if one is not finite on
    # any rank, all skip the step and halve the scale. This one is too high on purpose: the first
    # gradient would be 2y x 2^16 or more, and fp16 ends at 65,504.
    first = scale = float(2 ** (16 + (x.numel() - 1).bit_length()) / SMALL)
    lab.step(
        "fp16 with a scale that halves until all ranks are finite", scale=scale
    )
    skipped = 0
    while True:
        gradients = gradients_in(torch.float16, weights, x, scale)
        whole = all(g.isfinite().all() for g in gradients)
        finite = torch.tensor([float(whole)])
        # A sum: one rank that overflows is enough.
        lab.group.all_reduce(finite)
        if finite.item() == lab.n:
            break
        scale, skipped = scale / 2, skipped + 1
    lab.shows("after", scale=scale, skipped=skipped)
    finish("fp16", gradients, 2.0**-7)
    lab.claim("the first scale was too high", skipped > 0)
    lab.claim("each skip halved the scale", scale, first / 2**skipped)

    # TF32 is fp32 that loses 13 bits of its fraction on the way into a GPU's matmul; torch leaves
    # it off by default. The table has all formats, by hand; torch's own numbers are the same.
    scales = lab.everyone(torch.tensor(scale))
    lab.claim("all have the same scale", scales, [scale] * lab.n)
    precision = torch.get_float32_matmul_precision()
    off = not torch.backends.cuda.matmul.allow_tf32 and precision == "highest"
    lab.claim("TF32 is off by default", off)
    if lab.rank == 0:
        formats(lab)


def formats(lab: Lab) -> None:
    """Compute range and resolution by hand, and check their consequences."""
    rows = []
    for name, (dtype, (sign, exponent, fraction), breaks) in FORMATS.items():
        # all exponents but the last, and all ones in the fraction
        largest = float(
            (2 - 2.0**-fraction) * 2.0 ** (2 ** (exponent - 1) - 1)
        )
        smallest, step = (
            float(2.0 ** (2 - 2 ** (exponent - 1))),
            2.0**-fraction,
        )
        numbers = [f"{x:.3g}" for x in (largest, smallest, step)]
        rows.append((name, f"{sign}+{exponent}+{fraction}", *numbers, breaks))
        if dtype is not None:
            info = torch.finfo(dtype)
            says = f"{name}: largest, smallest and step by hand are torch's"
            torchs = [info.max, info.smallest_normal, info.eps]
            lab.claim(says, torchs == [largest, smallest, step])
    header = (
        "format",
        "bits",
        "largest",
        "smallest normal",
        "step at 1",
        "where it breaks",
    )
    lab.table(
        "sign, exponent and fraction; range and resolution", header, rows
    )
    one, far = torch.tensor(1.0), torch.tensor([70_000.0, 1e-8])
    half, brain = far.half(), far.bfloat16()
    lab.claim(
        "fp16: 70,000 is infinite and 1e-8 is zero",
        bool(half[0].isinf() and half[1] == 0),
    )
    lab.claim(
        "bf16 can represent both", bool(brain[0].isfinite() and brain[1] != 0)
    )
    bf16 = (one + 2**-8).bfloat16()
    fp16 = (one + 2**-8).half()
    lab.claim(
        "bf16: 1 + 2^-8 is 1, in fp16 it is not", bool(bf16 == 1 and fp16 != 1)
    )
    tf32, more = to_tf32(one + 2**-12), to_tf32(one + 2**-10)
    lab.claim(
        "tf32: 1 + 2^-12 is 1, 1 + 2^-10 is not",
        bool(tf32 == 1 and more == 1 + 2**-10),
    )


def to_tf32(x: Tensor) -> Tensor:
    """Round away the last 13 bits of fp32's fraction, as a GPU's matmul does on
    reading."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


GB, GIB = 1e9, 2**30
LAYERS, WIDTH, TOKENS, FFN = 126, 16_384, 4_096, 53_248  # Llama 3 405B
HALF, WIDE = torch.bfloat16, torch.float32


def nbytes(count: int, *dtypes: torch.dtype) -> int:
    """Return the bytes of one tensor of `count` elements for each dtype, without
    allocating them."""
    return sum(
        torch.empty(count, dtype=dtype, device="meta").nbytes
        for dtype in dtypes
    )


def ffn_hidden(ffn: int) -> int:
    """Return the bytes of the output of one layer's first matmul, times the number of
    layers."""
    x = torch.empty(TOKENS, WIDTH, dtype=HALF, device="meta")
    w = torch.empty(WIDTH, ffn, dtype=HALF, device="meta")
    return LAYERS * (x @ w).nbytes


def adam_in_torch(weights: list[Tensor]) -> float:
    """Return the bytes per weight of torch's own Adam with its tensors, measured after
    a step."""
    leaves = [w.float().requires_grad_() for w in weights]
    adam = torch.optim.Adam(leaves)
    for w in leaves:
        w.grad = torch.ones_like(w)
    adam.step()
    tensors = [t for state in adam.state.values() for t in state.values()]
    states = [t for t in tensors if t.numel() > 1]
    gradients = [w.grad for w in leaves if w.grad is not None]
    counted: int = sum(t.nbytes for t in (*leaves, *gradients, *states))
    return counted / sum(w.numel() for w in leaves)


def arithmetic(lab: Lab) -> None:
    """Arithmetic: the memory of weights, states and activations, by hand and as torch counts it.

    Training at 2 bytes a number with four numbers for every weight (weight, gradient, Adam's two)
    takes 8 bytes a weight: 1B weights 8 GB, 10B fill a device of 80 GB, 100B take 800 GB, 10 GB on
    each of 80 devices. That is the least; mixed-precision Adam in practice takes 16 to 18: weight 2
    and gradient 2 or 4 bytes, master weight 4, Adam's two 4 each.
    """

    # And activations: a model of 126 layers and width 16,384, on 4,096 tokens with an ffn of 4 x
    # width, keeps 67.6 GB of hidden activations of its ffn alone. By the library: the same tensors
    # are made on the meta device, and their bytes counted. GB is 1e9 bytes, GiB is 2^30.
    billion, four, adam = 10**9, [HALF] * 4, (HALF, HALF, WIDE, WIDE, WIDE)
    counts = [
        ("1B weights, 4 numbers of 2 bytes", 8e9, nbytes(billion, *four)),
        ("10B weights", 80e9, nbytes(10 * billion, *four)),
        ("100B weights", 800e9, nbytes(100 * billion, *four)),
        (
            "100B weights, each of 80 devices",
            10e9,
            nbytes(100 * billion, *four) / 80,
        ),
        ("1B weights, mixed-precision Adam", 16e9, nbytes(billion, *adam)),
        (
            "the same with gradients of 4 bytes",
            18e9,
            nbytes(billion, HALF, WIDE, *adam[2:]),
        ),
        (
            "ffn hidden, 126 layers, ffn 4 x 16,384",
            2 * 126 * 65_536 * 4_096,
            ffn_hidden(4 * WIDTH),
        ),
        (
            "ffn hidden, 126 layers, ffn 53,248",
            2 * 126 * 53_248 * 4_096,
            ffn_hidden(FFN),
        ),
    ]
    lab.step(
        "bytes, by hand and by the library",
        by_hand=[hand for _, hand, _ in counts],
    )
    lab.after(by_library=[counted for *_, counted in counts])
    for what, hand, counted in counts:
        lab.claim(
            f"the library counts what was computed by hand: {what}",
            counted,
            hand,
        )
    hidden = counts[-2][1]
    lab.claim(
        "67.6 GB are exactly 63 GiB",
        [round(hidden / GB, 1), hidden / GIB],
        [67.6, 63],
    )
    rows = [
        (
            what,
            f"{hand:,.0f}",
            f"{count:,.0f}",
            f"{count / GB:.1f}",
            f"{count / GIB:.1f}",
        )
        for what, hand, count in counts
    ]
    lab.table("bytes", ("what", "by hand", "by library", "GB", "GiB"), rows)
    # torch's own Adam, after a step, in fp32: four numbers of 4 bytes.
    weights = start(lab.size)
    lab.step(
        "a real optimizer: fp32 weight, gradient and two states",
        weights=weights,
    )
    each = adam_in_torch(weights)
    lab.after(bytes_for_every_weight=each)
    lab.claim("torch's Adam in fp32 takes 16 bytes a weight", each, 16.0)
    # Every rank's share of the gradient of one process: what is counted is also what is needed.
    want = one_process(lab.size).gradients
    share = [g / lab.n for g in want]
    for g in share:
        lab.group.all_reduce(g)
    lab.claim("n shares of the gradient are the gradient", share, want)
