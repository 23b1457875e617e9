"""All layouts that `verify` compares are counted by hand, axis by axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import combinations, product

import pytest

from phalanx.layout import Layout, Shape, legal
from phalanx.layout.cases import LARGER
from phalanx.verification import SHAPES, covering, every_layout

HEADS = 4  # of the shapes below; and two kv heads, which 4 ranks of tp copy
TOKENS = 12  # of a sequence
# How many model chunks a stage has, and whether the batch is cut into microbatches.
SCHEDULES = {
    "naive": (1, False), "gpipe": (1, True), "1f1b": (1, True), "interleaved2": (2, True),
    "zb-h1": (1, True), "zb-h2": (1, True), "zb-v": (2, True), "dualpipe-v": (2, True),
    "searched": (1, True),
}  # fmt: skip
BLOCKS = 4


def by_hand(
    dp: int, pp: int, cp: int, tp: int, ep: int, *, pipelines: bool
) -> int:
    """The number of layouts with these sizes of axes."""
    # ZeRO 0 has one way to lay dp out; 1, 2 and 3 shard over any divisor of it but 1.
    sharded_over = [n for n in range(2, dp + 1) if dp % n == 0] or [1]
    data = 1 + 3 * len(sharded_over)
    if tp not in (1, 2, 4):
        return 0
    sequence_parallel = 1 if tp == 1 else 2
    # each rank of cp has a part from the start and one from the end
    if cp > 1 and 2 * cp > TOKENS:
        return 0
    # A ring of cp / u ranks around Ulysses groups of u, which cut the heads of a rank of tp.
    context = sum(
        cp % u == 0 and (HEADS // tp) % u == 0 for u in range(1, cp + 1)
    )
    micro = [False, True] if pp == 1 else [
        cut for chunks, cut in SCHEDULES.values() if pp * chunks <= BLOCKS
    ]  # fmt: skip
    # Dispatch beside computing needs experts on several ranks, and two microbatches.
    orders = sum(2 if ep > 1 and cut else 1 for cut in micro)
    # None, all of it, or every second block; without pipelines none.
    recomputations = 3 if pipelines else 1
    return data * sequence_parallel * context * orders * recomputations


def counted(ranks: int, axes: str) -> dict[int, int]:
    free = [axis in axes.split() for axis in ("dp", "pp", "cp", "tp", "ep")]
    counts: Counter[int] = Counter()
    for sizes in product(
        *(range(1, ranks + 1) if each else (1,) for each in free)
    ):
        dp, pp, cp, tp, ep = sizes
        if (size := dp * pp * cp * tp * ep) <= ranks:
            counts[size] += by_hand(*sizes, pipelines="pp" in axes)
    return {size: count for size, count in counts.items() if count}


AXES = ("dp", "pp", "cp", "tp", "dp tp", "pp cp", "dp pp cp tp")


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *(("gqa", axes) for axes in AXES),
        ("experts", "ep"),
        ("experts", "dp ep pp"),
    ],
)
def test_every_layout_is_listed_that_a_count_by_hand_has(
    name: str, axes: str
) -> None:
    ranks = 4 if "pp cp" in axes else 6
    found = Counter(
        x.ranks for x in every_layout(SHAPES[name], ranks, axes=axes)
    )
    assert found == counted(ranks, axes)


def test_all_layouts_of_eight_ranks_are_as_many_as_a_count_by_hand() -> None:
    found = Counter(x.ranks for x in every_layout(SHAPES["gqa"], 8))
    assert found == counted(8, "dp pp cp tp")


def test_every_stage_axis_and_schedule_is_in_the_list() -> None:
    every = every_layout(SHAPES["experts"], 4)
    assert {x.zero for x in every} == {0, 1, 2, 3}
    assert (
        {x.seq for x in every} == {x.overlap for x in every} == {False, True}
    )
    assert {x.recompute for x in every} == {"none", "all", "every=2"}
    pipelined = {
        x.schedule + (str(x.chunks) if x.schedule == "interleaved" else "")
        for x in every
        if x.pp > 1
    }
    assert pipelined == set(SCHEDULES)
    axes = (
        "dp.replicate",
        "dp.shard",
        "pp",
        "cp.ring",
        "cp.ulysses",
        "tp",
        "ep",
    )
    most = {axis: max(x.mesh.of(axis) for x in every) for axis in axes}
    assert most == dict.fromkeys(axes, 4) | {"dp.replicate": 2}
    # Each stage of ZeRO with each axis.
    for zero, axis in product(range(4), axes[1:]):
        assert any(x.zero == zero and x.mesh.of(axis) > 1 for x in every), (
            zero,
            axis,
        )


BESIDE = (
    "recompute:selective", "offload:activations", "gather:step", "offload:weights", "recompute:sqrt",
    "reduce:micro", "prefetch:0", "prefetch:3", "gather:micro", "reduce:step",
)  # fmt: skip


def test_with_options_beside_there_are_as_many_and_each_option_is_met_by_each_stage() -> (
    None
):
    plain, more = (
        every_layout(SHAPES["gqa"], 4, besides=b) for b in (False, True)
    )
    assert len(set(more)) == len(more) > 0.9 * len(plain)
    for text, zero in product(BESIDE, range(4)):
        if text == "gather:micro" and zero != 3:
            continue  # weights that are not dropped are not gathered again
        option = Layout.written(text).items()
        stage = (x for x in more if x.zero == zero)
        assert any(
            all(getattr(x, k) == v for k, v in option) for x in stage
        ), (
            text,
            zero,
        )


def choices(x: Layout) -> dict[str, object]:
    """What is chosen in a layout over dp, pp and tp."""
    order = x.schedule, x.chunks, x.microbatches
    sizes = {axis: x.mesh.of(axis) for axis in ("dp.shard", "pp", "tp")}
    return {
        **sizes,
        "dp": x.dp,
        "zero": x.zero,
        "seq": x.seq,
        "how": x.recompute,
        "order": order,
    }


def pairs(layouts: tuple[Layout, ...]) -> set[tuple[object, object]]:
    return {
        pair for x in layouts for pair in combinations(choices(x).items(), 2)
    }


def test_a_covering_subset_has_every_two_choices_that_occur_together() -> None:
    every = every_layout(SHAPES["gqa"], 4, axes="dp pp tp")
    few = covering(every, 1)
    assert set(few) <= set(every)
    assert len(few) < len(every) / 10
    assert pairs(few) == pairs(every)


def test_a_covering_subset_is_filled_up_with_layouts_of_the_list() -> None:
    every = every_layout(SHAPES["gqa"], 4, axes="dp pp tp")
    more = covering(every, 200)
    assert len(more) == len(set(more)) == 200
    assert set(covering(every, 1)) <= set(more) <= set(every)
    assert not any(legal(x, SHAPES["gqa"]) for x in more)
    assert len(covering(every, 10**6)) == len(every)


def test_every_size_of_a_model_is_unlike_its_default_in_some_small_shape() -> (
    None
):
    """What never varies is never compared: neither it nor the code that reads it."""
    # keys of a run, which options of `verify` set
    beside = {"freeze", "lora_r", "lora_alpha", "lora_targets", "source"}
    beside |= {"dropout"}
    shapes = [*SHAPES.values(), *LARGER.values()]
    for field in fields(Shape):
        values = {getattr(shape, field.name) for shape in shapes}
        assert field.name in beside or values != {field.default}, field.name
