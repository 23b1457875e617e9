"""Sums over ranks that are missing, made twice or made over the wrong axis, found without a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import phalanx.verify.placement as placement
from phalanx.comm import World
from phalanx.layout import Layout, Shape
from phalanx.parallel import build_model, groups, local
from phalanx.verify import SHAPES, covering, every_layout
from phalanx.verify.placement import placement_faults
from seeded.fault import FAULTS

# Of the seeded faults those that are an error of a sum over ranks, with words of what is said.
SUMS = {
    "column region: input gradients are not summed": "gradient of the input of head was not summed over tp",
    "row region: outputs are not summed": "0F0 (forward of embed, microbatch 0): the output of embed",
    "seq: a region's output is cut but not summed": "the output of embed was not summed over tp",
    "seq: gathered input keeps only its own gradient": "takes its part of what was not summed over tp",
    "row bias is added on every rank": "counts what all its ranks have alike once for each",
    "seq: norm gradients are not summed over tp": "gradient of head.norm.weight was not summed over tp",
    "q and k norms: gradients of other heads are missing": "attn.q_norm.weight was not summed over tp",
    "norms summed over tp though all did the same work": "a sum over tp of what is the same",
    "replicated k and v: gradients of other heads are missing": "attn.wk.weight was not summed over tp",
    "replicas of a shard are not summed (HSDP)": "was not summed over dp.replicate",
    "each rank divides by its own count of tokens": "the count of tokens was not summed over dp.shard",
    "the norm counts whole weights on every rank of tp": "the norm counts layers.0.attn_norm.weight 2 times",
    "clipping by each rank's own norm": "the norm was not summed over tp",
    "a tied weight's gradients are not summed over the stages": "embed.tokens.weight was not summed over pp",
    "gradients are summed over dp and not over cp": "was not summed over cp.ring",
    "seq: counts of the ranks of tp are not summed": "router.bias was not summed over tp",
    "tp: a gate has the gradient of a part of each expert": "gradient of the input of layers.1",
    "experts: the norm is without them": "the norm counts layers.1.mlp.router.weight 0 times",
    "ep: experts are summed over the dense group": "which ep cuts, is summed over it",
    "ep: gradients of experts are not summed over dp": "routed.gate was not summed over dp.shard",
    "experts:tp: gradients of experts are summed over tp": "which tp cuts, is summed over it",
    "experts:cp: experts are summed over cp": "which cp.ring cuts, is summed over it",
    "ep: the count of tokens is without the ranks of ep": "the count of tokens was not summed over ep",
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_seeded_fault_that_is_an_error_of_a_sum_is_found_and_named(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    make = partial(build_model, SHAPES[fault.shape])
    assert placement_faults(make, fault.layout) == ()
    with fault.patch():
        found = placement_faults(make, fault.layout)
    assert any(SUMS[name] in each for each in found), found


MANY = [
    ("gqa", "dp2x2 pp2 cp2 tp2 seq zero2 interleaved2:4"), ("gqa", "dp2 tp4 zero3 recompute:all"),
    ("gpt", "dp2 pp2 tp2 seq zero1 zb-h1:4"), ("qwen", "cp4:2x2 tp2 accum:2"), ("mlp", "dp2 tp2"),
    ("experts", "dp2 ep2 cp2 tp2 seq zero2"), ("gpt", "tp4 zero3"), ("odd", "dp3 tp2 zero1"),
    ("experts", "pp2 ep2 dualpipe-v:3 overlap"), ("experts", "tp4 ep2 accum:2"),
    ("experts", "tp2 seq recompute:selective"), ("experts", "dp2 ep2 tp2 seq experts:tp zero3"),
    ("latent", "cp2 tp2 seq experts:tp,cp"), ("sinks", "ep2 cp2 experts:cp accum:2"),
    ("experts", "pp2 tp2 seq experts:tp dualpipe-v:3 overlap"),
]  # fmt: skip


@pytest.mark.parametrize("name, layout", MANY)
def test_nothing_is_found_in_layouts_that_equal_one_process(name: str, layout: str) -> None:
    assert placement_faults(partial(build_model, SHAPES[name]), Layout.parse(layout)) == ()


def test_tokens_of_ranks_of_tp_that_do_not_reach_all_experts_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = groups.open_groups

    def opened(world: World, layout: Layout, *rest: object, **more: object) -> groups.Groups:
        found = right(world, layout, *rest, **more)  # type: ignore[arg-type]
        alone = (world.split(name, layout.mesh.groups(["ep"])) for name in ("few", "fewer"))
        return replace(found, **dict(zip(("ep", "routes"), alone, strict=True)))

    monkeypatch.setattr(local, "open_groups", opened)
    layout = Layout.parse("ep2 tp2 seq experts:tp")
    found = placement_faults(partial(build_model, SHAPES["experts"]), layout)
    assert any("the output of layers.1 was not summed over tp" in each for each in found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_found_in_layouts_that_cover_the_choices(name: str) -> None:
    shape = SHAPES[name]
    make = partial(build_model, shape)
    every = every_layout(shape, 8 if shape.experts else 4, besides=True)
    found = {str(x): placement_faults(make, x) for x in covering(every, 1)}
    assert not {layout: faults for layout, faults in found.items() if faults}


def test_thousands_of_ranks_take_no_more_operations_than_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    plain = placement._after

    def counted(*given: object) -> placement.Places:
        counts[-1] += 1
        return plain(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "_after", counted)
    make = partial(build_model, Shape.load("8b"))
    for text in ("dp2 pp2 tp8 seq zero1 1f1b:4", "dp64 pp8 tp8 seq zero1 1f1b:64"):
        counts.append(0)
        assert placement_faults(make, Layout.parse(text)) == ()
    assert counts[1] <= 4 * counts[0]
