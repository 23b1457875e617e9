"""No plan prints an MFU or an HFU above 100 %: every size on every kind of device at many lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product

import pytest

from phalanx.api.plan_text import choice_figures, choice_text, utilization
from phalanx.api.request import request_for
from phalanx.layout import Layout, Shape, legal
from phalanx.layout.choices import BF16, FP8, FP16
from phalanx.planner.device import devices
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster, clusters
from phalanx.planner.search import judge
from phalanx.planner.step import Choice, Request

RANKS = 8
LAYOUTS = (
    "dp8 zero3 recompute:all", "tp8 seq", "dp8 zero1 accum:2", "pp8 zb-h1:16", "cp8 recompute:selective",
)  # fmt: skip
# The fastest software of its time, and those that keep scores or are faster than what was measured.
PROFILES = ("phalanx", "nemo", "megatron-core", "paxml")
PERCENT = re.compile(r"(?:MFU|HFU) ([\d.]+)%|\(([\d.]+)% with full")


def _kinds() -> list[str]:
    """Eight devices of every kind and every family of clusters."""
    joined = clusters()
    return [
        name if name in joined and joined[name].size else f"{name}x{RANKS}"
        for name in (*joined, *devices())
    ]


def _request(size: str, kind: str, sequence: int, profile: str) -> Request:
    hardware = hardware_of(cluster(kind), RANKS)
    formats = [name for name in (BF16, FP16) if name in hardware.peak]
    shape = Shape.load(size)
    length = (
        min(sequence, shape.sequence)
        if shape.positions == "learned"
        else sequence
    )
    return request_for(
        shape,
        hardware,
        batch=2 * RANKS,
        sequence=length,
        precision=formats[0],
        profile=profile,
    )


def _choices(request: Request, texts: Sequence[str]) -> Iterator[Choice]:
    words = [""] + [FP8] * (FP8 in request.hardware.peak)
    for text, matmul in product(texts, words):
        layout = Layout.parse(f"{text} {request.precision} {matmul}")
        if not legal(
            layout,
            request.shape,
            batch=request.batch,
            sequence=request.sequence,
        ):
            yield from judge(request, [layout])


def _holds(
    size: str, kind: str, sequence: int, profile: str, texts: Sequence[str]
) -> int:
    request, count = _request(size, kind, sequence, profile), 0
    for choice in _choices(request, texts):
        text = " ".join(choice_text(request, choice))
        printed = [float(a or b) for a, b in PERCENT.findall(text)]
        assert len(printed) >= 2
        assert max(printed) <= 100.0, (size, kind, sequence, text)
        found = choice_figures(request, choice)
        for name in ("mfu", "hfu", "mfu_attention_in_full"):
            assert found[name] is None or 0 <= found[name] <= 1  # type: ignore[operator]
        count += 1
    return count


def test_no_kind_of_device_is_used_by_more_than_all_of_it() -> None:
    """A sample that is quick to cost: each kind with the next size, layout and software."""
    sizes, layouts = cycle([("25m", 2048), ("1b", 8192)]), cycle(LAYOUTS[:3])
    software, checked = cycle(PROFILES), 0
    for kind in _kinds():
        size, sequence = next(sizes)
        checked += _holds(
            size, kind, sequence, next(software), [next(layouts)]
        )
    assert checked >= len(_kinds())


@pytest.mark.slow
@pytest.mark.parametrize("size", Shape.names())
def test_no_size_on_any_device_at_any_length_is_used_by_more_than_all_of_it(
    size: str,
) -> None:
    turns, checked = cycle(PROFILES), 0
    lengths = (
        (1024, 8192, 65536, 262144)
        if Shape.load(size).vocab < 50_000
        else (1024, 16384)
    )
    for kind, sequence in product(_kinds(), lengths):
        checked += _holds(size, kind, sequence, next(turns), LAYOUTS[:3])
    assert checked > len(_kinds())


def _of(
    step: float, *, measured: bool = False, **sizes: object
) -> tuple[Request, Choice]:
    """A step of so many seconds, whatever it is priced at."""
    shape = replace(Shape.load("25m"), **sizes)  # type: ignore[arg-type]
    hardware = replace(hardware_of(cluster("h100x1")), measured=measured)
    request = request_for(shape, hardware, batch=1, sequence=512)
    (choice,) = judge(request, [Layout.parse("bf16")])
    return request, replace(choice, parts={"compute": step})


def test_full_attention_is_left_out_where_it_counts_more_than_the_peak_allows() -> (
    None
):
    request, slow = _of(1.0, windows=(8,))
    used = utilization(request, slow)
    assert used.mfu_full is not None
    assert not used.note
    # By hand: three times two for each pair and feature of a head, in every block and head.
    attention = 6 * 2 * 512 * 512 * 64 * 8 * 8
    full = used.flops_full * 1.0
    assert full > attention
    almost = full / request.hardware.peak[BF16]
    for times, there in ((1.01, True), (0.99, False)):
        found = utilization(
            request, replace(slow, parts={"compute": times * almost})
        )
        assert (found.mfu_full is not None) == there
        assert ("full attention is omitted" in found.note) != there
        assert found.mfu < 1


def test_matmuls_in_fp8_count_against_the_peak_of_fp8() -> None:
    request, choice = _of(1.0)
    narrow = replace(choice, layout=Layout.parse("bf16 fp8"))
    narrow = replace(narrow, case=replace(choice.case, layout=narrow.layout))
    peaks = request.hardware.peak
    ratio = utilization(request, choice).mfu / utilization(request, narrow).mfu
    assert ratio == pytest.approx(peaks[FP8] / peaks[BF16])
    assert math.isclose(ratio, 2, rel_tol=0.01)


def test_more_than_a_measured_peak_is_printed_as_all_of_it() -> None:
    request, choice = _of(1e-9, measured=True)
    found = utilization(request, choice)
    assert (found.mfu, found.hfu, found.mfu_full) == (1.0, 1.0, None)
    assert "of the peak in the machine file" in found.note
