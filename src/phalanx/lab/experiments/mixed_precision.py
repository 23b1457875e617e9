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

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, every
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


def first_scale(x: Tensor) -> float:
    """Too high on purpose: the first gradient would be 2y x 2^16 or more, and fp16 ends at 65,504."""
    return float(2 ** (16 + (x.numel() - 1).bit_length()) / SMALL)


def gradients_in(
    dtype: torch.dtype, weights: Sequence[Tensor], x: Tensor, scale: float
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


def narrow(size: Size) -> Size:
    """At most 256 wide: a CPU multiplies fp16 slowly."""
    return replace(size, width=min(size.width, 256))


def run(lab: Lab) -> Values:
    size = narrow(lab.size)
    weights, x = start(size), batch(size, 0)[lab.part("batch")]
    values: Values = {}
    for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        lab.step(f"{name}: no scale needed")
        lab.shows("before", weights=[w.to(dtype) for w in weights])
        with lab.doing(name):
            gradients = gradients_in(dtype, weights, x, scale=1.0)
        for g in gradients:
            lab.group.all_reduce(g, "average")
        values[name] = [g / SMALL for g in gradients]
        lab.shows("after", gradients=gradients)

    lab.step("fp16 without a scale: what becomes of small gradients")
    lab.shows("before", weights=[w.half() for w in weights])
    lost = vanished(weights, x)
    lab.shows("after", gradients_that_became_zero=lost, of=sum(w.numel() for w in weights))

    lab.step("fp16 with a scale that halves until all ranks are finite")
    scale, skipped = first_scale(x), 0
    lab.shows("before", scale=scale)
    while True:
        gradients = gradients_in(torch.float16, weights, x, scale)
        finite = torch.tensor([float(all(g.isfinite().all() for g in gradients))])
        lab.group.all_reduce(finite)  # a sum: one rank that overflows is enough
        if finite.item() == lab.n:
            break
        scale, skipped = scale / 2, skipped + 1
    for g in gradients:
        lab.group.all_reduce(g, "average")
    values["fp16"] = [g / SMALL for g in gradients]
    lab.shows("after", gradients=gradients, scale=scale, skipped=skipped)
    if lab.rank == 0:
        show(lab)
    precision = torch.get_float32_matmul_precision()
    tf32 = torch.backends.cuda.matmul.allow_tf32 or precision != "highest"
    return values | {"lost": lost, "scale": scale, "skipped": skipped, "tf32 on": int(tf32)}


def vanished(weights: Sequence[Tensor], x: Tensor) -> int:
    """How many gradients fp16 makes zero that are not."""
    fp16 = gradients_in(torch.float16, weights, x, scale=1.0)
    fp64 = gradients_in(torch.float64, weights, x, scale=1.0)
    return sum(int(((a == 0) & (b != 0)).sum()) for a, b in zip(fp16, fp64, strict=True))


def to_tf32(x: Tensor) -> Tensor:
    """fp32 with the last 13 bits of its fraction rounded away, as a GPU's matmul reads it."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def largest(exponent: int, fraction: int) -> float:
    """By hand: all exponents but the last, all ones in the fraction."""
    return float((2 - 2.0**-fraction) * 2.0 ** (2 ** (exponent - 1) - 1))


def smallest(exponent: int) -> float:
    """By hand: the smallest number with a full fraction."""
    return float(2.0 ** (2 - 2 ** (exponent - 1)))


def show(lab: Lab) -> None:
    names = ("sign", "exponent", "fraction")
    bits = {
        name: [(part, n, str(n)) for part, n in zip(names, parts, strict=True)]
        for name, (_, parts, _) in FORMATS.items()
    }
    lab.bars("bits of each format: sign, exponent, fraction", bits)
    rows = [
        (name, f"{largest(e, f):.3g}", f"{smallest(e):.3g}", f"{2.0**-f:.3g}", breaks)
        for name, (_, (_, e, f), breaks) in FORMATS.items()
    ]
    header = ("format", "largest", "smallest normal", "step at 1", "where it breaks")
    lab.table("range and resolution of each format", header, rows)


def check(results: Results, size: Size) -> Claims:
    size = narrow(size)
    n, want = len(results), one_process(size).gradients
    for name, within in {"fp64": 1e-10, "fp32": 1e-5, "fp16": 2.0**-7, "bf16": 2.0**-4}.items():
        says = f"gradients in {name} are one process's in float64 to {within:.1g}"
        yield from every(results, name, says, want, within=within)
    rows = [batch(size, 0)[size.part("batch", rank, n)] for rank in range(n)]
    lost = [vanished(start(size), x) for x in rows]
    says = "gradients that fp16 lost without a scale"
    yield from every(results, "lost", says, lost.__getitem__)
    for rank, values in enumerate(results):
        yield Claim(f"rank {rank}: some were lost", values["lost"] > 0, f"{values['lost']}")
        yield Claim(f"rank {rank}: the first scale was too high", values["skipped"] > 0)
    halved = [
        first_scale(x) / 2 ** values["skipped"] for x, values in zip(rows, results, strict=True)
    ]
    yield from every(results, "scale", "each skip halved the scale", halved.__getitem__)
    yield from every(results, "scale", "all have the same scale", results[0]["scale"])
    yield from every(results, "tf32 on", "TF32 is off by default", 0)
    for name, (dtype, (_, e, f), _) in FORMATS.items():
        if dtype is not None:
            info = torch.finfo(dtype)
            by_hand = [largest(e, f), smallest(e), 2.0**-f]
            library = [info.max, info.smallest_normal, info.eps]
            says = f"{name}: largest, smallest and step by hand are torch's"
            yield Claim(says, by_hand == library, str(by_hand))
    yield from breaks()


def breaks() -> Claims:
    one = torch.tensor(1.0)
    yield Claim("fp16: 70,000 is infinite and 1e-8 is zero", too_narrow(torch.float16))
    yield Claim("bf16 can represent both", not too_narrow(torch.bfloat16))
    bf16, fp16 = (one + 2**-8).bfloat16(), (one + 2**-8).half()
    yield Claim("bf16: 1 + 2^-8 is 1, in fp16 it is not", bool(bf16 == 1 and fp16 != 1))
    tf32, more = to_tf32(one + 2**-12), to_tf32(one + 2**-10)
    yield Claim("tf32: 1 + 2^-12 is 1, 1 + 2^-10 is not", bool(tf32 == 1 and more == 1 + 2**-10))


def too_narrow(dtype: torch.dtype) -> bool:
    high, low = torch.tensor([70_000.0, 1e-8]).to(dtype)
    return bool(high.isinf() and low == 0)
