"""docs/numbers.md: numbers of papers, from the commands that the page names."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main

ROOT = Path(__file__).parents[1]
Capture = pytest.CaptureFixture[str]


def _figures(capsys: Capture, *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize(
    ("schedule", "microbatches", "used"),
    [
        ("naive", 1, Fraction(1, 4)),
        ("gpipe", 4, Fraction(16, 28)),
        ("gpipe", 9, Fraction(3, 4)),
    ],
)
def test_stages_are_used_as_the_textbook_says(
    capsys: Capture, schedule: str, microbatches: int, used: Fraction
) -> None:
    words = ("--stages", "4", "--microbatches", str(microbatches))
    bubble = _figures(capsys, "draw", schedule, *words)["bubble_fraction"]
    assert 1 - bubble == pytest.approx(float(used))


@pytest.mark.parametrize(
    ("zero", "paper", "tolerance"),
    # Whole gradients of two layers in flight; and no shard in 16 bits, which is 2/16 less.
    [
        ("", 120.0, 1e-9),
        ("zero1", 31.40625, 1e-9),
        ("zero2", 16.64, 0.01),
        ("zero3", 1.875, 0.13),
    ],
)
def test_zero_shards_what_its_paper_says(
    capsys: Capture, zero: str, paper: float, tolerance: float
) -> None:
    model, layout = (
        str(ROOT / "examples" / "zero-paper.toml"),
        f"dp64 {zero} fp16",
    )
    words = (
        "--model",
        model,
        "--cluster",
        "h100x64",
        "--profile",
        "megatron-2021",
    )
    held = _figures(capsys, "plan", *words, "--explain", layout)[
        "memory_by_kind_gb"
    ]
    state = held["weights"] + held["gradients"] + held["optimizer"]
    assert state == pytest.approx(paper, rel=tolerance)


def test_bytes_by_hand_and_of_a_ring_are_what_the_lab_counts(
    capsys: Capture,
) -> None:
    assert main(["lab", "arithmetic", "--width", "64", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "8,000,000,000    8,000,000,000    8.0" in text
    assert "67.6 GB are exactly 63 GiB" in text
    assert 4096 * 126 * 4 * 16384 * 2 == 63 * 2**30
    assert main(["lab", "data-parallel", "--width", "64", "--verbose"]) == 0
    assert (
        "it sent 2(n-1)/n of the gradients in each step"
        in capsys.readouterr().out
    )


def test_a_trillion_weights_make_502_petaflops_nearly_held_out() -> None:
    # Its equation 3: 96 B s l h^2 (1 + s / 6h + V / 16lh), recomputation included.
    b, s, layers, h, v = 3072, 2048, 128, 25600, 51200
    flops = (
        96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    )
    table = (
        (ROOT / "benchmarks" / "published" / "scored.csv")
        .read_text()
        .splitlines()
    )
    row = next(line for line in table if "narayanan2021-0010" in line).split(
        ","
    )
    measured, held_out = float(row[2]), float(row[3])
    assert flops / measured / 1e15 == pytest.approx(502, rel=0.01)
    assert flops / held_out / 1e15 == pytest.approx(474.5, rel=0.005)


@pytest.mark.slow
def test_a_plan_of_that_run_is_near_it(capsys: Capture) -> None:
    words = [
        "--model",
        "1t-gpt",
        "--cluster",
        "a100-80x3072",
        "--seq",
        "2048",
        "--batch-tokens",
        "6291456",
    ]
    layout = "dp6 pp64 tp8 interleaved2:512 recompute:all fp16"
    found = _figures(
        capsys,
        "plan",
        *words,
        "--profile",
        "megatron-2021",
        "--explain",
        layout,
    )
    assert found["step_time_s"] == pytest.approx(102.6, rel=0.05)
    assert found["hfu"] * 312e12 * 3072 / 1e15 == pytest.approx(502, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "sequence", "layout", "published"),
    [
        (8192, 8192, "dp64 pp16 tp8 seq zero1 interleaved8:32", 430),
        (16384, 8192, "dp128 pp16 tp8 seq zero1 interleaved8:16", 400),
        (16384, 131072, "dp8 pp16 cp16 tp8 seq zero1 interleaved8:16", 380),
    ],
)
def test_the_phases_of_llama_3_are_predicted(
    capsys: Capture, devices: int, sequence: int, layout: str, published: int
) -> None:
    words = (
        "--model",
        "405b",
        "--cluster",
        f"h100x{devices}",
        "--seq",
        str(sequence),
    )
    stages = f"stages:0-{'1-' * 126}0"
    found = _figures(
        capsys, "plan", *words, "--batch-tokens", "16Mi", "--profile", "megatron-core",
        "--explain", f"{layout} {stages} bf16",
    )  # fmt: skip
    assert found["model_flops_per_s_per_device"] / 1e12 == pytest.approx(
        published, rel=0.065
    )
    weights = found["memory_by_kind_gb"]["weights"]
    assert weights == pytest.approx(2 * 405.9 / (16 * 8), rel=0.01)
