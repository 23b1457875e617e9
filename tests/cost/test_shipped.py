"""Costs that come with the package: they are today's, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.api.request import in_precision
from phalanx.cost.cache import (
    cached_costs,
    code_digest,
    cost_file,
    cost_identity,
    costed_cuts,
)
from phalanx.cost.shipped import (
    FOLDER,
    as_json,
    read_shipped,
    same_costs,
    shipped_costs,
)
from phalanx.layout import Layout, Shape
from phalanx.layout.choices import BF16

FILES = sorted(FOLDER.glob("*.json.gz"))
EIGHT = Shape.load("8b")
CUT = Layout.parse("tp8 seq bf16")


def named(file: Path) -> tuple[Shape, int]:
    """The shape and sequence length of a shipped file's name."""
    name, sequence = file.name.removesuffix(".json.gz").rsplit("-", 1)
    shape = Shape.load(name)
    if shape.positions != "learned":
        shape = replace(shape, sequence=int(sequence))
    return shape, int(sequence)


def assert_computed(file: Path, cuts: list[str]) -> None:
    """Asserts that the shipped costs of some cuts are those that the code computes."""
    shape, sequence = named(file)
    layouts = [Layout.parse(cut) for cut in cuts]
    computed = as_json(costed_cuts(shape, layouts, sequence, "cuda"))
    held = read_shipped(file)["cuts"]
    changed = [cut for cut in cuts if computed[cut] != held[cut]]
    assert not changed, (
        f"{file.name}: the costs of {changed[:3]} have changed;"
        " write the files anew: python benchmarks/ship_costs.py"
    )


def test_every_shipped_file_is_of_a_named_size_as_it_is_today() -> None:
    assert FILES
    for file in FILES:
        identity = cost_identity(*named(file), "cuda")
        held = read_shipped(file)["identity"]
        assert same_costs(held, as_json(identity)), file.name


def test_every_shipped_file_is_of_the_code_as_it_is_today() -> None:
    stale = [
        file.name
        for file in FILES
        if read_shipped(file)["code"] != code_digest()
    ]
    assert not stale, (
        f"the code that costed {stale} has changed: run `python benchmarks/ship_costs.py --stamp`,"
        " or without --stamp if a cost has changed"
    )


@pytest.mark.parametrize("seq", ["", "seq"])
@pytest.mark.parametrize("schedule", ["1f1b:8", "zb-h1:8"])
def test_a_check_of_a_named_size_in_a_pipeline_needs_no_costing(
    schedule: str, seq: str, tmp_path: Path
) -> None:
    # `check` plans in bf16 where the layout names no precision.
    words = f"dp2 pp4 tp8 {seq} zero1 {schedule}"
    layout = in_precision(words, BF16)
    cached_costs(EIGHT, [layout], sequence=EIGHT.sequence, place=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_shipped_costs_equal_computed_ones_in_a_cut_of_each_size() -> None:
    for file in FILES:
        # The last in this order has selective recomputation where any has.
        cuts = sorted(read_shipped(file)["cuts"])
        assert_computed(file, cuts[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shipped_costs_equal_computed_ones_in_all_cuts(file: Path) -> None:
    assert_computed(file, sorted(read_shipped(file)["cuts"]))


def test_a_shipped_size_needs_no_cache(tmp_path: Path) -> None:
    place = tmp_path / "costs"
    costs = cached_costs(EIGHT, [CUT], place=place)
    assert costs[CUT].blocks
    assert not place.exists()


def test_other_sizes_of_the_same_name_are_not_taken_for_ours() -> None:
    other = replace(EIGHT, ffn=EIGHT.ffn // 2)
    for shape, sequence, target in (
        (other, 8192, "cuda"),
        (EIGHT, 4096, "cuda"),
        (EIGHT, 8192, "cpu"),
    ):
        identity = cost_identity(shape, sequence, target)
        assert not shipped_costs("8b", identity, code_digest())
    identity = cost_identity(EIGHT, 8192, "cuda")
    assert shipped_costs("8b", identity, code_digest())


def test_costs_by_other_code_are_not_taken() -> None:
    identity = cost_identity(EIGHT, 8192, "cuda")
    assert not shipped_costs("8b", identity, "of other code")


def test_a_size_that_was_added_to_shapes_later_has_its_default() -> None:
    now = as_json(cost_identity(EIGHT, 8192, "cuda"))
    # A file that was written before shapes had dropout.
    sizes = {name: x for name, x in now["shape"].items() if name != "dropout"}
    before = {**now, "shape": sizes}
    assert same_costs(before, now)
    assert not same_costs(before, {**now, "shape": {**sizes, "dropout": 0.1}})
    assert not same_costs({**now, "shape": {**sizes, "ffn": 1}}, now)


def test_cuts_that_are_not_shipped_are_costed_and_cached(
    tmp_path: Path,
) -> None:
    small = replace(Shape.load("tiny"), name="8b")
    cut = Layout.parse("fp32")
    cached_costs(small, [cut], place=tmp_path)
    assert cost_file(small, 0, "cuda", tmp_path).is_file()
