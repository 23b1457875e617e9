"""Collectives as they are measured: every result checked, S and factors as told, wrong sums seen."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.bench import (
    OPERATIONS,
    Sample,
    Sweep,
    fit_all,
    measure_collectives,
)
from phalanx.bench.collectives import grouped
from phalanx.cli.bench import collectives_text
from phalanx.cli.bench_chart import curves_svg
from phalanx.comm import World, launch, workers
from phalanx.comm.threads import ThreadGroup

QUICK = partial(Sweep, repeats=1, limit=0.01)
EVERY = tuple(OPERATIONS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_operation_is_right_over_threads(ranks: int) -> None:
    found = launch(
        measure_collectives,
        ranks,
        QUICK(EVERY, (1, 6000), ((ranks, 1),)),
        backend="threads",
    )
    assert all(each == found[0] for each in found), (
        "every rank is told the same"
    )
    assert [s.op for s in found[0]] == [*EVERY, *EVERY]
    for s in found[0]:
        assert s.correct
        assert s.least <= s.seconds <= s.most
        assert s.bytes % (4 * ranks) == 0
        assert s.bus == pytest.approx(s.factor * s.bytes / s.seconds)
        assert bool(s.halves) == (s.op == "all_reduce")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_is_checked_exactly(dtype: str) -> None:
    ask = QUICK(EVERY, (4096,), ((4, 1),), dtype)
    assert all(
        s.correct
        for s in launch(measure_collectives, 4, ask, backend="threads")[0]
    )


def test_every_operation_is_right_over_gloo_and_in_groups() -> None:
    ask = QUICK(EVERY, (64, 4096), ((4, 1), (2, 1), (2, 2), (3, 1)))
    with workers(4, backend="gloo", threads_per_rank=1) as run:
        found: list[Sample] = run(measure_collectives, ask)[0]
    assert all(s.correct for s in found)
    assert {(s.ranks, s.apart) for s in found} == {
        (4, 1),
        (2, 1),
        (2, 2),
        (3, 1),
    }


def test_groups_part_the_world_and_who_is_left_is_alone() -> None:
    assert grouped(8, 2, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grouped(8, 4, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grouped(8, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grouped(5, 2, 1) == [[0, 1], [2, 3], [4]]


def broken(world: World, kind: str) -> list[Sample]:
    """Rank 1 spoils one number of whatever it receives in operations of a kind."""
    if world.rank == 1:
        begin = ThreadGroup._begin

        def spoiled(group: ThreadGroup, call: object) -> object:
            work = begin(group, call)  # type: ignore[arg-type]
            if group.rank == 1 and call.kind == kind:  # type: ignore[attr-defined]
                work.wait()
                into = call.x if call.out is None else call.out  # type: ignore[attr-defined]
                into.view(-1)[-1] += 1
            return work

        world.__dict__["_split_of"] = world._split

        def split(
            name: str, groups: list[tuple[int, ...]], flows: object
        ) -> object:
            group = world.__dict__["_split_of"](name, groups, flows)
            if name != "bench":
                group._begin = partial(spoiled, group)
            return group

        world._split = split  # type: ignore[method-assign, assignment]
    return measure_collectives(world, QUICK(EVERY, (4096,), ((2, 1),)))


@pytest.mark.parametrize(
    "kind, hit",
    [
        ("all_reduce", {"all_reduce"}),
        # the second half of an all-reduce
        ("all_gather", {"all_gather", "all_reduce"}),
        ("reduce_scatter", {"reduce_scatter", "all_reduce"}),
        ("all_to_all", {"all_to_all"}),
        ("broadcast", {"broadcast"}),
        ("scatter", {"scatter"}),
        ("receive", {"send"}),
    ],
)
def test_one_wrong_number_on_one_rank_is_seen_by_all(
    kind: str, hit: set[str]
) -> None:
    for found in launch(broken, 2, kind, backend="threads"):
        assert {s.op for s in found if not s.correct} == hit
    assert "WRONG" in collectives_text(found, "threads", ())


def test_no_larger_size_is_begun_once_the_time_is_over() -> None:
    ask = Sweep(("all_reduce",), (64, 128), ((2, 1),), total=0.0)
    assert launch(measure_collectives, 2, ask, backend="threads")[0] == []


def test_what_is_told_names_s_the_factor_and_both_bandwidths() -> None:
    sample = Sample(
        "all_reduce", 4, 1, 400 << 20, 0.00227, 0.0022, 0.0024, 7, True, 0.0025
    )
    text = collectives_text([sample], "nccl", ())
    # 400 MiB over four ranks in 2.27 ms: the factor of 2 (n-1)/n makes 277 GB/s of it.
    assert "1.500" in text
    assert "184.771 GB/s" in text
    assert "277.157" in text
    assert "the same values" in text
    assert "one group size cannot tell" in text
    assert sample.bus == pytest.approx(277.2e9, rel=1e-3)


def test_the_picture_is_well_formed_and_shows_every_point() -> None:
    import xml.etree.ElementTree as ET

    found = launch(
        measure_collectives,
        2,
        QUICK(("all_reduce", "send"), (64, 4096), ((2, 1),)),
        backend="threads",
    )[0]
    curves = fit_all(found, "threads")
    root = ET.fromstring(
        curves_svg(curves, samples=found, backend="threads <1 & 2>")
    )
    # A small chart each, with the other's curve faint behind it.
    assert len(root.findall(".//{*}polyline")) == 4
    shown = [tip.text or "" for tip in root.findall(".//{*}circle/{*}title")]
    assert len(shown) == 4
    for sample in found:
        # Two ranks: 2 (n-1)/n is 1, and so is what a message is multiplied by.
        rate = sample.bytes / sample.seconds / 1e9
        size = {64: "64 B", 4096: "4 KiB"}[sample.bytes]
        start = f"{sample.op} x 2: {size}: {rate:.4g} GB/s measured, "
        assert sum(words.startswith(start) for words in shown) == 1


def test_sums_of_patterns_are_exact_in_half_precision() -> None:
    from phalanx.bench.collectives import _sum, pattern

    like = torch.empty(0, dtype=torch.bfloat16)
    whole = sum(pattern(rank, 5, 3000, like).double() for rank in range(100))
    assert torch.equal(_sum(range(100), 5, 3000, like).double(), whole)
    assert not torch.equal(pattern(0, 0, 997, like), pattern(1, 0, 997, like))
