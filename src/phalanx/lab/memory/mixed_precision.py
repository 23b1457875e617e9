"""Mixed precision: fewer bits where they suffice, and where each format breaks.

fp16 has 10 bits of fraction and a narrow range: small gradients become 0 and a sum can become
infinite. So the loss is multiplied by a scale, gradients divided by it again; if one is not finite
on any rank, all skip the step and halve the scale. bf16 has the range of fp32 with 7 bits: nothing
vanishes, but 1 + 1/512 is 1, so weights and sums stay in fp32. TF32 is fp32 that loses 13 bits of
its fraction on the way into a GPU's matmul; torch leaves it off unless asked. In all of them master
weights are kept wide, and gradients are widened before ranks sum them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import backward, batch, forward, one_process, start
from phalanx.lab.note import Note, everyone

# sign, exponent, fraction
FORMATS = {
    "fp64": (torch.float64, (1, 11, 52)),
    "fp32": (torch.float32, (1, 8, 23)),
    "tf32": (None, (1, 8, 10)),
    "fp16": (torch.float16, (1, 5, 10)),
    "bf16": (torch.bfloat16, (1, 8, 7)),
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


def run(world: World, size: Size, note: Note) -> Held:
    size = narrow(size)
    wire, rank, n = everyone(world), world.rank, world.size
    weights, x = start(size), batch(size, 0)[size.part("batch", rank, n)]
    held: Held = {}
    for name in ("fp64", "fp32", "bf16"):
        note.step(f"{name}: no scale needed")
        dtype = FORMATS[name][0]
        assert dtype is not None
        note.holds("before", weights=[w.to(dtype) for w in weights])
        with note.doing(name):
            gradients = gradients_in(dtype, weights, x, scale=1.0)
        for g in gradients:
            wire.all_reduce(g, "average")
        held[name] = [g / SMALL for g in gradients]
        note.holds("after", gradients=gradients)

    note.step("fp16 without a scale: what becomes of small gradients")
    note.holds("before", weights=[w.half() for w in weights])
    lost = vanished(weights, x)
    note.holds("after", gradients_that_became_zero=lost, of=sum(w.numel() for w in weights))

    note.step("fp16 with a scale that halves until all ranks are finite")
    scale, skipped = first_scale(x), 0
    note.holds("before", scale=scale)
    while True:
        gradients = gradients_in(torch.float16, weights, x, scale)
        finite = torch.tensor([float(all(g.isfinite().all() for g in gradients))])
        wire.all_reduce(finite)  # a sum: one rank that overflows is enough
        if finite.item() == n:
            break
        scale, skipped = scale / 2, skipped + 1
    for g in gradients:
        wire.all_reduce(g, "average")
    held["fp16"] = [g / SMALL for g in gradients]
    note.holds("after", gradients=gradients, scale=scale, skipped=skipped)
    if rank == 0:
        _draw(note)
    tf32 = (
        torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    )
    return held | {"lost": lost, "scale": scale, "skipped": skipped, "tf32 on": int(tf32)}


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


def _draw(note: Note) -> None:
    bars = {
        name: [("sign", s), ("exponent", e), ("fraction", f)]
        for name, (_, (s, e, f)) in FORMATS.items()
    }
    note.segments("bits of each format", bars)
    rows = [
        (name, f"{largest(e, f):.3g}", f"{smallest(e):.3g}", f"{2.0**-f:.3g}", f"{BREAKS[name]}")
        for name, (_, (_, e, f)) in FORMATS.items()
    ]
    header = ("format", "largest", "smallest normal", "step at 1", "where it breaks")
    note.table("what each can say", header, rows)


BREAKS = {
    "fp64": "nowhere here; it is the reference",
    "fp32": "1 + 2^-24 is 1",
    "tf32": "1 + 2^-11 is 1, only on the way into a matmul",
    "fp16": "70,000 is infinite, 1e-8 is 0",
    "bf16": "1 + 2^-8 is 1: a small update is lost",
}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    size = narrow(size)
    n, want = len(results), one_process(size).gradients
    bounds = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 2.0**-7, "bf16": 2.0**-4}
    for rank, held in enumerate(results):
        for name, within in bounds.items():
            says = f"rank {rank}: gradients in {name} are one process's in float64"
            yield equal(f"{says} to {within:.1g}", held[name], want, within=within)
        x = batch(size, 0)[size.part("batch", rank, n)]
        lost = vanished(start(size), x)
        yield equal(f"rank {rank}: gradients that fp16 lost unscaled", held["lost"], lost)
        yield holds(f"rank {rank}: some were lost", held["lost"] > 0, f"{held['lost']}")
        yield holds(f"rank {rank}: the first scale was too high", held["skipped"] > 0)
        by_hand = first_scale(x) / 2 ** held["skipped"]
        yield equal(f"rank {rank}: each skip halved the scale", held["scale"], by_hand)
        yield equal(f"rank {rank}: all agree on the scale", held["scale"], results[0]["scale"])
        yield holds(f"rank {rank}: TF32 is off by default", held["tf32 on"] == 0)
    for name, (dtype, (_, e, f)) in FORMATS.items():
        if dtype is not None:
            info = torch.finfo(dtype)
            by_hand = [largest(e, f), smallest(e), 2.0**-f]
            library = [info.max, info.smallest_normal, info.eps]
            says = f"{name}: largest, smallest and step by hand are torch's"
            yield Claim(says, by_hand == library, str(by_hand))
    yield from breaks()


def breaks() -> Iterator[Claim]:
    one = torch.tensor(1.0)
    yield holds("fp16: 70,000 is infinite and 1e-8 is zero", _is_extreme(torch.float16))
    yield holds("bf16 holds both", not _is_extreme(torch.bfloat16))
    bf16, fp16 = (one + 2**-8).bfloat16(), (one + 2**-8).half()
    yield holds("bf16: 1 + 2^-8 is 1, in fp16 it is not", bool(bf16 == 1 and fp16 != 1))
    tf32, more = to_tf32(one + 2**-12), to_tf32(one + 2**-10)
    yield holds("tf32: 1 + 2^-12 is 1, 1 + 2^-10 is not", bool(tf32 == 1 and more == 1 + 2**-10))


def _is_extreme(dtype: torch.dtype) -> bool:
    high, low = torch.tensor([70_000.0, 1e-8]).to(dtype)
    return bool(high.isinf() and low == 0)
