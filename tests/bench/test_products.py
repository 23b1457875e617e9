"""Products, steps and overlap: what is counted, what is told of it. No time is asserted."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.bench import (
    Iteration,
    LocalDevice,
    MatrixProduct,
    Overlap,
    WideMlp,
    decoder_products,
    local_device,
    measure_block,
    measure_copies,
    measure_messages,
    measure_mlp,
    measure_products,
    measure_stores,
    square_products,
)
from phalanx.cli.bench import (
    iterations_text,
    of_peak,
    overlaps_text,
    product_line,
    products_summary,
)
from phalanx.comm import launch
from phalanx.layout import Shape
from phalanx.parallel.model import decoder_of
from phalanx.planner import MachineError, device

CPU = local_device("cpu")
H100 = LocalDevice(
    "NVIDIA H100 80GB HBM3",
    "cuda",
    1,
    16,
    80 << 30,
    80 << 30,
    device("h100"),
    ("nccl",),
)


def test_every_product_that_fits_is_measured_and_told() -> None:
    wanted = square_products(["fp32", "fp64"], [16, 64])
    done = list(measure_products(CPU, wanted, limit=20.0, repeats=1))
    assert [(p.dtype, p.n) for p in done] == [
        ("fp32", 16),
        ("fp64", 16),
        ("fp32", 64),
        ("fp64", 64),
    ]
    for p in done:
        assert p.flops == 2 * p.n**3
        assert p.rate == pytest.approx(p.flops / p.seconds)
        assert p.claimed > 0
        assert f"{p.n} x {p.n} x {p.n}" in product_line(p, CPU, done)


def test_what_memory_or_time_does_not_allow_is_left_out_and_said() -> None:
    huge = [MatrixProduct("square", "fp32", 1 << 20, 1 << 20, 1 << 20)]
    assert list(measure_products(CPU, huge)) == []
    assert (
        list(measure_products(CPU, square_products(["fp32"], [16]), limit=0.0))
        == []
    )
    assert "1 of 1 matmuls were skipped" in products_summary([], CPU, 1)


def test_the_products_of_a_decoder_are_its_weights() -> None:
    shape = Shape.load("8b")
    wide = {p.name: p.n * p.k for p in decoder_products(shape, 10, ["bf16"])}
    a_block = wide["8b q"] + 2 * wide["8b k, v"] + wide["8b attention out"]
    a_block += 2 * wide["8b gate, up"] + wide["8b down"]
    # Without its two norms.
    assert a_block == shape.rows[1].numel - 2 * shape.hidden


def test_more_than_all_of_a_peak_shows_that_the_peak_is_wrong() -> None:
    fast = MatrixProduct(
        "square", "bf16", 8192, 8192, 8192, seconds=1e-3, claimed=1e-5
    )
    assert (
        "111% of the catalogue's peak (above 100 %: the catalogue's peak is wrong)"
        in products_summary([fast], H100, 1)
    )
    assert of_peak(500e12, 1000e12) == "50% of the catalogue's peak"
    step = Iteration("step", "bf16", 1e15, 1e15, 0.5, 0.1, 3)
    assert "the peak is wrong" in iterations_text([step], H100, 800e12)


def test_an_unknown_device_is_called_unknown_and_its_peak_is_not_guessed() -> (
    None
):
    unknown = LocalDevice(
        "Abacus 9000", "cuda", 1, 16, 1 << 30, 1 << 30, None, ()
    )
    assert unknown.peak("bf16") == 0.0
    assert "Abacus 9000 is not in the catalogue" in unknown.known()
    product = MatrixProduct(
        "square", "bf16", 64, 64, 64, seconds=1e-3, claimed=1e-5
    )
    assert "unknown" in product_line(product, unknown, [product])
    assert "peak unknown" in products_summary([product], unknown, 1)
    step = Iteration("step", "bf16", 1e12, 1e12, 0.5, 0.1, 3)
    told = iterations_text([step], unknown, 1e13)
    assert "of the best measured rate 20.0%" in told
    assert "  MFU" not in told


def test_the_published_reference_reads_as_published() -> None:
    # 8 layers of 8192 x 8192 on 8192 rows: 26.4 TFLOP need 26.7 ms at the peak of an H100.
    mlp = WideMlp()
    assert mlp.flops == 3 * 2 * 8 * 8192**3
    step = Iteration("MLP", "bf16", mlp.flops, mlp.flops, 54.4e-3, 15e-3, 5)
    assert step.share(H100.peak("bf16")) == pytest.approx(0.49, abs=0.005)


def test_a_block_s_flops_are_those_torch_counts() -> None:
    shape = Shape(
        "small", 1, 64, heads=4, kv_heads=2, ffn=96, vocab=8, sequence=32
    )
    found = measure_block(CPU, shape, 2, 32, "fp32", limit=0.01)
    x = torch.randn(2, 32, 64)
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as counter:
        decoder_of(shape, layers=1).layers[0](
            x, positions=torch.arange(32).expand(2, -1)
        )
    assert found.flops_full == 3 * counter.get_total_flops()
    attention = 3 * 2 * 2 * (2 * 32 * 32 * 64)
    assert found.flops_full - found.flops == attention / 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whole_iterations_run_in_every_precision(dtype: str) -> None:
    found = measure_mlp(CPU, WideMlp(2, 32, 8), dtype, limit=0.01)
    assert found.seconds > 0
    assert found.flops == 3 * 2 * 2 * 8 * 32**2
    assert math.isfinite(found.forward)


def test_overlap_tells_the_part_of_the_shorter_that_is_hidden() -> None:
    assert Overlap("", 10.0, 4.0, 14.0, 10.0, 1).hidden == 1.0
    assert Overlap("", 10.0, 4.0, 14.0, 14.0, 1).hidden == 0.0
    assert Overlap("", 10.0, 4.0, 14.0, 16.0, 1).hidden == -0.5
    assert "  -50%" in overlaps_text([Overlap("x", 10.0, 4.0, 14.0, 16.0, 1)])


def test_copies_and_messages_are_measured_beside_products() -> None:
    (copy,) = measure_copies(
        CPU, size=32, copied=1 << 16, dtype="fp32", limit=0.05
    )
    (message,) = launch(
        measure_messages, 2, 32, 1 << 12, "fp32", 0.05, backend="threads"
    )[0]
    for x in (copy, message):
        assert min(x.first, x.second, x.after, x.together) > 0
        assert x.as_hidden().part == pytest.approx(
            min(1.0, x.hidden), abs=1e-4
        )


def test_memory_is_read_and_written() -> None:
    stores = {
        s.name: s.bandwidth
        for s in measure_stores(CPU, size=1 << 20, limit=0.05)
    }
    assert list(stores) == ["copy", "read", "write"]
    assert min(stores.values()) > 0


def test_a_precision_or_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(MachineError, match="tf32 is a GPU format"):
        list(measure_products(CPU, square_products(["tf32"], [16])))
    with pytest.raises(MachineError, match="unknown precision 'int3'"):
        list(measure_products(CPU, square_products(["int3"], [16])))
    with pytest.raises(MachineError, match="unknown kind of device 'tpu'"):
        local_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="sees no GPU"):
            local_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_measured_alike() -> None:
    gpu = local_device("cuda")
    products = square_products(["bf16", "fp16", "tf32", "fp32"], [256])
    assert len(list(measure_products(gpu, products, repeats=1))) == 4
    assert (
        len(
            measure_copies(
                gpu, size=256, copied=1 << 20, dtype="bf16", limit=1.0
            )
        )
        == 2
    )
    assert len(measure_stores(gpu, size=1 << 20, limit=1.0)) == 6
    assert (
        measure_mlp(gpu, WideMlp(2, 256, 256), "bf16", limit=1.0).seconds > 0
    )
