"""Products in 8 bits: formats and scales by hand and by numpy, products by torch's own `_scaled_mm`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from phalanx.layout import LayoutError
from phalanx.layout.choices import MATMULS
from phalanx.parallel import low_precision
from phalanx.parallel.low_precision import (
    Rounded,
    matmul_named,
    product,
    refuse_without_kernels,
    rounded,
)

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def values(form: str) -> np.ndarray[Any, Any]:
    """All finite numbers of a format from zero up, from its bits: 1 of sign, 4 or 5 of exponent."""
    digits, bias, last = (3, 7, 126) if form == E4M3 else (2, 15, 123)
    found = []
    for bits in range(last + 1):
        exponent, fraction = bits >> digits, bits & ((1 << digits) - 1)
        whole = fraction / (1 << digits) + (exponent > 0)
        found.append(math.ldexp(whole, max(exponent, 1) - bias))
    return np.array(found)


def nearest(x: np.ndarray[Any, Any], form: str) -> np.ndarray[Any, Any]:
    """The nearest number of the format; of two the one whose last bit is 0."""
    known = values(form)
    size = np.minimum(np.abs(x), known[-1])
    above = np.searchsorted(known, size).clip(1, len(known) - 1)
    low, high = known[above - 1], known[above]
    up = (size - low > high - size) | (
        (size - low == high - size) & (above % 2 == 0)
    )
    return np.copysign(np.where(up, high, low), x)


def sample(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape[-1], generator=generator).exp2().square()
    return torch.randn(shape, generator=generator) * spread


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_rows_are_rounded_by_the_formula_of_torchao(form: str) -> None:
    x = sample(7, 50)
    x[3] = 0.0
    got, most = rounded(x, form), values(form)[-1]
    for row, numbers, scale in zip(
        x.numpy(), got.numbers, got.scales, strict=True
    ):
        # torchao, float8_utils.py: amax in float64, the scale in float32, saturated.
        factor = np.float32(most / max(np.float64(np.abs(row).max()), 1e-12))
        want = nearest(np.float32(row * factor), form)
        assert (numbers.double().numpy() == want).all()
        assert float(scale) == np.float32(1) / factor
    assert not got.restored(torch.float32)[3].any()


def test_bits_are_those_of_ml_dtypes() -> None:
    formats = pytest.importorskip("ml_dtypes")
    x = sample(5, 64)
    got = rounded(x, E4M3)
    scaled = x.numpy() * (
        448.0 / np.abs(x.numpy()).max(1, keepdims=True)
    ).astype(np.float32)
    want = (
        scaled.astype(np.float32).astype(formats.float8_e4m3fn).view(np.uint8)
    )
    assert (got.numbers.view(torch.uint8).numpy() == want).all()


@pytest.mark.parametrize("square", [False, True])
def test_tiles_have_scales_of_their_own(square: bool) -> None:
    x = sample(200, 300)
    got = rounded(x, E4M3, run=128, square=square)
    restored = got.restored(torch.float64)[:, :300].numpy()
    rows = (
        [slice(0, 128), slice(128, 200)]
        if square
        else [slice(n, n + 1) for n in range(200)]
    )
    for row in rows:
        for column in (slice(0, 128), slice(128, 256), slice(256, 300)):
            part = x[row, column].numpy()
            factor = np.float32(448 / np.float64(np.abs(part).max()))
            inverse = np.float64(np.float32(1) / factor)
            want = nearest(np.float32(part * factor), E4M3) * inverse
            assert (restored[row, column] == want).all()


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_microscaled_blocks_have_a_power_of_two(form: str) -> None:
    x = sample(6, 70)
    got = rounded(x, form, run=32, power=True)
    assert got.scales.dtype == torch.float8_e8m0fnu
    assert got.scales.shape == (6, 3)
    last = 8 if form == E4M3 else 15
    restored = got.restored(torch.float64)[:, :70].numpy()
    for row in range(6):
        for block in range(3):
            part = (
                x[row, 32 * block : 32 * block + 32].numpy().astype(np.float64)
            )
            # OCP Microscaling Formats 1.0, 6.3: floor(log2(largest)) less the format's last exponent.
            scale = 2.0 ** (math.floor(math.log2(np.abs(part).max())) - last)
            assert float(got.scales[row, block].float()) == scale
            want = nearest(part / scale, form) * scale
            assert (restored[row, 32 * block : 32 * block + 32] == want).all()


@pytest.mark.parametrize("word", ["fp8", "fp8:tile", "mxfp8"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_hidden(
    word: str, bad: float
) -> None:
    matmul = matmul_named(word)
    assert matmul is not None
    x, w = sample(2, 3, 64), sample(8, 64, seed=1)
    x[1, 2, 40] = bad
    finite = matmul.forward(x, w).isfinite()
    assert not finite[1, 2].any()
    assert finite.sum() == 5 * 8  # and the other tokens are as they were


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_a_product_of_rows_is_that_of_scaled_mm(form: str) -> None:
    a, b = (
        rounded(sample(24, 160), form),
        rounded(sample(48, 160, seed=1), E4M3),
    )
    scales = a.scales, b.scales.t().contiguous()
    kernel: Any = torch._scaled_mm
    want = kernel(a.numbers, b.numbers.t(), *scales, out_dtype=torch.float32)
    torch.testing.assert_close(
        product(a, b, torch.float32), want, rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("word", MATMULS)
def test_the_three_products_are_those_of_the_rounded_factors(
    word: str,
) -> None:
    matmul, traits = matmul_named(word), MATMULS[word]
    assert matmul is not None
    x, w, g = (
        sample(3, 40, 96),
        sample(80, 96, seed=1),
        sample(3, 40, 80, seed=2),
    )

    def wide(x: Tensor, form: str, *, weight: bool = False) -> Tensor:
        square = weight and traits.square
        return rounded(
            x, form, run=traits.run, square=square, power=traits.power
        ).restored(torch.float64)

    of_x, of_g = traits.forward, traits.gradient
    assert of_x == E4M3
    assert of_g == (E5M2 if "e5m2" in word else E4M3)
    forward = wide(x.flatten(0, 1), of_x) @ wide(w, of_x, weight=True).T
    into = wide(g.flatten(0, 1), of_g) @ wide(w.T, of_x, weight=True).T
    weight = sum(
        wide(a.T, of_g) @ wide(b.T, of_x).T for a, b in zip(g, x, strict=True)
    )
    for got, want in (
        (matmul.forward(x, w), forward.view(3, 40, 80)),
        (matmul.input_gradient(g, w), into.view(3, 40, 96)),
        (matmul.weight_gradient(x, g), weight),
    ):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max())
        )
    both = (
        matmul.forward(x.bfloat16(), w.bfloat16()),
        matmul.weight_gradient(*map(half, (x, g))),
    )
    assert [y.dtype for y in both] == [torch.bfloat16, torch.float32]


def half(x: Tensor) -> Tensor:
    return x.bfloat16()


# ---- what a GPU is asked for, by torch's own conditions


@pytest.mark.parametrize("word", ["fp8", "fp8:tile", "mxfp8"])
@pytest.mark.parametrize(
    "m, k, n", [(64, 256, 384), (200, 1152, 128), (128, 128, 256)]
)
def test_kernels_get_what_they_take(
    word: str, m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = low_precision._scaled_mm
    asked = []

    def on_fake_gpu(*args: Any, **named: Any) -> Tensor:
        """torch's meta kernel refuses sizes, strides and dtypes that a GPU's refuses."""

        def there(x: Any) -> Any:
            like = (x.shape, x.stride()) if isinstance(x, Tensor) else ()
            return (
                torch.empty_strided(*like, dtype=x.dtype, device="cuda")
                if like
                else x
            )

        with FakeTensorMode():
            y = kernel(*map(there, args), **named)
            asked.append(y.shape)
        return torch.zeros(y.shape, dtype=y.dtype)

    monkeypatch.setattr(low_precision, "_scaled_mm", on_fake_gpu)
    # torch 2.11 cannot compile a call of it: on an H100, fp8 with compile failed.
    monkeypatch.delattr(F, "scaled_mm")
    traits = MATMULS[word]
    options: dict[str, Any] = {"run": traits.run, "power": traits.power}
    a = rounded(sample(m, k), E4M3, **options)
    b = rounded(sample(n, k), E4M3, square=traits.square, **options)
    assert low_precision._takes(a, b)
    assert low_precision._on_device(a, b, torch.float32).dtype == torch.float32
    batch = [rounded(sample(2, rows, k), E4M3, **options) for rows in (m, n)]
    assert low_precision._on_device(
        batch[0], batch[1], torch.bfloat16
    ).shape == (m, n)
    assert asked == 3 * [(m, n)]
    # A last run that is short is padded; rows are as they are.
    odd = rounded(sample(n, k - 8), E4M3, **options)
    assert low_precision._takes(odd, odd) == (traits.run > 0)
    if traits.run:
        assert low_precision._on_device(odd, odd, torch.float32).shape == (
            n,
            n,
        )


@pytest.mark.parametrize("word", ["fp8", "fp8:tile", "mxfp8"])
def test_the_call_of_a_kernel_is_one_graph(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []

    def kernel(a: Tensor, b: Tensor, *scaled: Any) -> Tensor:
        kinds.extend(type(x) for x in scaled if not isinstance(x, Tensor))
        return a.to(torch.bfloat16) @ b.to(torch.bfloat16)

    monkeypatch.setattr(low_precision, "_scaled_mm", kernel)
    traits = MATMULS[word]
    options: dict[str, Any] = {"run": traits.run, "power": traits.power}
    a = rounded(sample(64, 256), E4M3, **options)
    b = rounded(sample(128, 256), E4M3, square=traits.square, **options)
    # A break in the graph is an error here. torch 2.11 breaks at a comparison of enums,
    # which later versions compile, so their absence is asserted as well.
    compiled: Any = torch.compile(
        low_precision._on_device, backend="eager", fullgraph=True
    )
    y = compiled(a, b, torch.float32)
    wanted = low_precision._on_device(a, b, torch.float32)
    assert torch.equal(y, wanted)
    assert set(kinds) == {int}


def test_scales_of_blocks_are_in_the_order_of_torch_s_own_tests() -> None:
    quantized = pytest.importorskip("torch.testing._internal.common_quantized")
    z = rounded(sample(200, 320), E4M3, run=32, power=True)
    want = quantized.to_blocked(z.scales).view(torch.uint8)
    assert torch.equal(low_precision._recipe(z)[0].view(torch.uint8), want)


def test_a_gpu_without_such_products_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    gpu = torch.device("cuda", 0)
    for has, words in (
        ((8, 0), "fp8 fp8:tile mxfp8"),
        ((9, 0), "mxfp8"),
        ((10, 0), "fp8:tile"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, x=has: x
        )
        for word in ("fp8", "fp8:tile", "mxfp8"):
            if word not in words.split():
                refuse_without_kernels(word, gpu)
                continue
            with pytest.raises(
                LayoutError, match=rf"A100 has {has[0]}\.{has[1]}"
            ):
                refuse_without_kernels(word, gpu)
    refuse_without_kernels("mxfp8", torch.device("cpu"))
    refuse_without_kernels("", gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("word", MATMULS)
def test_kernels_of_this_gpu_give_what_is_emulated(word: str) -> None:
    gpu = torch.device("cuda")
    try:
        refuse_without_kernels(word, gpu)
    except LayoutError as error:
        pytest.skip(str(error))
    matmul = matmul_named(word)
    assert matmul is not None
    x, w, g = (
        sample(*size).bfloat16()
        for size in ((2, 256, 512), (384, 512), (2, 256, 384))
    )
    for name, args in (
        ("forward", (x, w)), ("input_gradient", (g, w)), ("weight_gradient", (x, g)),
    ):  # fmt: skip
        want = getattr(matmul, name)(*args).float()
        got = getattr(matmul, name)(*(y.to(gpu) for y in args)).float().cpu()
        # The kernel's sums are rounded to bfloat16.
        torch.testing.assert_close(
            got, want, rtol=2e-2, atol=1e-2 * float(want.abs().max())
        )


def test_what_is_rounded_takes_a_byte_a_number() -> None:
    z: Rounded = rounded(torch.empty(64, 256, device="meta"), E4M3, run=128)
    assert z.numbers.element_size() == 1
    assert z.scales.shape == (64, 2)
    assert product(z, z, torch.float32).shape == (64, 64)
