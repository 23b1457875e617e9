"""Mixed precision: fewer bits where they suffice, and where each format breaks.

fp16 has 10 bits of fraction and a narrow range: small gradients become 0 and a sum can become
infinite. So the loss is multiplied by a scale, gradients are divided by it; if one is not finite on
any rank, all skip the step and halve the scale. bf16 has the range of fp32 with 7 bits: nothing
vanishes, but 1 + 1/512 is 1, so weights and sums stay in fp32. TF32 is fp32 that loses 13 bits of
its fraction on the way into a GPU's matmul; torch leaves it off by default. In all of them the
master weights are wide, and gradients are widened before ranks sum them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import backward, batch, forward, one_process, start

# dtype, (sign, exponent, fraction) bits, where it breaks
FORMATS = {
    "fp64": (torch.float64, (1, 11, 52), "nowhere here; it is the reference"),
    "fp32": (torch.float32, (1, 8, 23), "1 + 2^-24 is 1"),
    "tf32": (None, (1, 8, 10), "1 + 2^-11 is 1, only on the way into a matmul"),
    "fp16": (torch.float16, (1, 5, 10), "70,000 is infinite, 1e-8 is 0"),
    "bf16": (torch.bfloat16, (1, 8, 7), "1 + 2^-8 is 1: a small update is lost"),
}
# A mean over as many numbers as a real batch has makes gradients this much smaller.
SMALL = 2.0**-16


def gradients_in(
    dtype: torch.dtype, weights: Sequence[Tensor], x: Tensor, scale: float = 1.0
) -> list[Tensor]:
    """Gradients of SMALL x loss, computed in `dtype` with the loss scaled, and widened to float64."""
    kept, halves = [], [w.to(dtype) for w in weights]
    y = x.to(dtype)
    for w in halves:
        y, saved = forward(y, w)
        kept.append(saved)
    g = (2 * y.double() / y.numel() * SMALL * scale).to(dtype)
    gradients: list[Tensor] = []
    for w in reversed(halves):
        g, gradient = backward(g, kept.pop(), w)
        gradients.insert(0, gradient.double() / scale)
    return gradients


def run(lab: Lab) -> None:
    size = replace(lab.size, width=min(lab.size.width, 256))  # a CPU multiplies fp16 slowly
    weights, x = start(size), batch(size, 0)[lab.part("batch")]

    def finish(name: str, gradients: list[Tensor], within: float) -> None:
        for g in gradients:
            lab.group.all_reduce(g, "average")
        lab.after(gradients=gradients)
        says = f"gradients in {name} are one process's in float64 to {within:.1g}"
        lab.claim(says, [g / SMALL for g in gradients], one_process(size).gradients, within=within)

    for name, within in {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2.0**-4}.items():
        dtype = FORMATS[name][0]
        assert dtype is not None
        lab.step(f"{name}: no scale needed", weights=[w.to(dtype) for w in weights])
        with lab.doing(name):
            gradients = gradients_in(dtype, weights, x)
        finish(name, gradients, within)

    lab.step("fp16 without a scale: small gradients", weights=[w.half() for w in weights])
    pairs = zip(
        gradients_in(torch.float16, weights, x),
        gradients_in(torch.float64, weights, x),
        strict=True,
    )
    lost = sum(int(((half == 0) & (full != 0)).sum()) for half, full in pairs)
    lab.after(gradients_that_became_zero=lost, of=sum(w.numel() for w in weights))
    lab.claim(f"some gradients became zero: {lost}", lost > 0)

    # Too high on purpose: the first gradient would be 2y x 2^16 or more, and fp16 ends at 65,504.
    first = scale = float(2 ** (16 + (x.numel() - 1).bit_length()) / SMALL)
    lab.step("fp16 with a scale that halves until all ranks are finite", scale=scale)
    skipped = 0
    while True:
        gradients = gradients_in(torch.float16, weights, x, scale)
        finite = torch.tensor([float(all(g.isfinite().all() for g in gradients))])
        lab.group.all_reduce(finite)  # a sum: one rank that overflows is enough
        if finite.item() == lab.n:
            break
        scale, skipped = scale / 2, skipped + 1
    lab.shows("after", scale=scale, skipped=skipped)
    finish("fp16", gradients, 2.0**-7)
    lab.claim("the first scale was too high", skipped > 0)
    lab.claim("each skip halved the scale", scale, first / 2**skipped)
    scales = lab.everyone(torch.tensor(scale))
    lab.claim("all have the same scale", scales, [scale] * lab.n)
    precision = torch.get_float32_matmul_precision()
    off = not torch.backends.cuda.matmul.allow_tf32 and precision == "highest"
    lab.claim("TF32 is off by default", off)
    if lab.rank == 0:
        formats(lab)


def formats(lab: Lab) -> None:
    """Range and resolution by hand, and what they mean."""
    rows = []
    for name, (dtype, (sign, exponent, fraction), breaks) in FORMATS.items():
        # All exponents but the last, all ones in the fraction.
        largest = float((2 - 2.0**-fraction) * 2.0 ** (2 ** (exponent - 1) - 1))
        smallest, step = float(2.0 ** (2 - 2 ** (exponent - 1))), 2.0**-fraction
        numbers = [f"{x:.3g}" for x in (largest, smallest, step)]
        rows.append((name, f"{sign}+{exponent}+{fraction}", *numbers, breaks))
        if dtype is not None:
            info = torch.finfo(dtype)
            says = f"{name}: largest, smallest and step by hand are torch's"
            torchs = [info.max, info.smallest_normal, info.eps]
            lab.claim(says, torchs == [largest, smallest, step])
    header = ("format", "bits", "largest", "smallest normal", "step at 1", "where it breaks")
    lab.table("sign, exponent and fraction; range and resolution", header, rows)
    one, far = torch.tensor(1.0), torch.tensor([70_000.0, 1e-8])
    half, brain = far.half(), far.bfloat16()
    lab.claim("fp16: 70,000 is infinite and 1e-8 is zero", bool(half[0].isinf() and half[1] == 0))
    lab.claim("bf16 can represent both", bool(brain[0].isfinite() and brain[1] != 0))
    bf16, fp16 = (one + 2**-8).bfloat16(), (one + 2**-8).half()
    lab.claim("bf16: 1 + 2^-8 is 1, in fp16 it is not", bool(bf16 == 1 and fp16 != 1))
    tf32, more = to_tf32(one + 2**-12), to_tf32(one + 2**-10)
    lab.claim("tf32: 1 + 2^-12 is 1, 1 + 2^-10 is not", bool(tf32 == 1 and more == 1 + 2**-10))


def to_tf32(x: Tensor) -> Tensor:
    """fp32 with the last 13 bits of its fraction rounded away, as a GPU's matmul reads it."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
