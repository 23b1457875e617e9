"""A plan: its columns are those of its layouts, its picks are legal and the best of all, and every
kind of other layout has a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import pytest

from phalanx.cost import cut_of
from phalanx.layout import Layout, Shape, legal
from phalanx.plan.baselines import baselines
from phalanx.plan.candidates import Candidates, Cut, Space, candidates
from phalanx.plan.columns import Columns, columns_of
from phalanx.plan.hardware import Hardware, hardware_of
from phalanx.plan.link import cluster
from phalanx.plan.pipes import blocks_of, on_ranks, spread
from phalanx.plan.priced import Priced, pipeline, pipeline_costs
from phalanx.plan.profile import Profile, profile
from phalanx.plan.search import Choice, Plan, judge, search
from phalanx.program import AttentionLoad, Load, MessageLoad, PieceCost, Product, simulate

SHAPE = replace(Shape.load("8b"), layers=8, batch=32, sequence=4096)
SEQUENCE, BATCH = 4096, 32


@dataclass(frozen=True)
class Known:
    """Pieces in closed form, so that a search here needs neither torch nor a cache."""

    embed: Callable[[float], PieceCost]
    block: Callable[[float], PieceCost]
    head: Callable[[float], PieceCost]


def known(cut: Layout, sequence: int) -> Known:
    """A decoder's pieces, by hand: products, one message to each half block, activations."""

    def piece(kind: str, rows: float) -> PieceCost:
        tokens = rows * sequence / cut.cp
        h, f, v = SHAPE.hidden, SHAPE.ffn, SHAPE.vocab
        wide = {"embed": 0, "block": 4 * h + 3 * f, "head": v}[kind] / cut.tp
        product = Product(tokens, h, max(1.0, wide))
        several = replace(product, batch=2.0)
        core = AttentionLoad(rows, SHAPE.heads / cut.tp, 8, sequence / cut.cp, sequence, 128)
        own = (core,) * (kind == "block")
        lines = [MessageLoad("tp", "all_reduce", 2 * tokens * h)] * 2 if cut.tp > 1 else []
        lines += [MessageLoad("cp.ring", "send", tokens * h)] if cut.mesh.of("cp.ring") > 1 else []
        messages = tuple(lines)
        forward = Load((product,), own, 8 * tokens * h, 20, messages)
        back = Load((several,), own, 16 * tokens * h, 30, messages)
        half = Load((product,), own, 8 * tokens * h, 15, messages)
        selective = cut.recompute == "selective"
        keeps = (12 if selective else 34) * tokens * h / cut.tp
        return PieceCost(
            forward,
            half if cut.splits_backward else back,
            Load((product,), (), 8 * tokens * h, 15) if cut.splits_backward else Load(),
            Load(moved=8 * tokens * h, launches=4) if selective else forward,
            kept=keeps, kept_after_i=keeps, input=2 * tokens * h, temporary=4 * tokens * h,
            weights=wide * h, edge=2 * tokens * h,
        )  # fmt: skip

    return Known(
        *(lambda rows, kind=kind: piece(kind, rows) for kind in ("embed", "block", "head"))
    )


class Costing:
    """The function that a search is handed, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[Layout] = []

    def __call__(
        self, model: Shape | str, layouts: Iterable[Layout], *, sequence: int
    ) -> Mapping[Layout, Known]:
        self.asked += list(layouts)
        return {cut: known(cut, sequence) for cut in map(cut_of, self.asked)}


def hardware(name: str = "h100x16") -> Hardware:
    return hardware_of(cluster(name))


def plan_of(
    place: Hardware | None = None, *, batch: int = BATCH, limit: float = 0.85, top: int = 10
) -> Plan:
    return search(
        SHAPE, place or hardware(), Costing(), profile=profile("phalanx"), sequence=SEQUENCE,
        batch=batch, limit=limit, top=top,
    )  # fmt: skip


@cache
def found() -> Candidates:
    return candidates(Space(SHAPE, hardware(), SEQUENCE, BATCH))


@cache
def plan() -> Plan:
    return plan_of()


def sample(count: int = 400) -> list[int]:
    return [int(i) for i in np.linspace(0, len(found()) - 1, count)]


def test_columns_are_those_of_the_layouts_they_stand_for() -> None:
    rows = sample()
    cases = [found().case(i) for i in rows]
    theirs = columns_of(cases, found().columns.key[rows].astype(int))
    ours = found().columns.take(np.array(rows))
    for f in fields(Columns):
        wrong = [
            (str(case.layout), a, b)
            for case, a, b in zip(
                cases, getattr(ours, f.name), getattr(theirs, f.name), strict=True
            )
            if a != pytest.approx(b)
        ]
        assert not wrong, f"{f.name}: {wrong[:3]}"


def test_every_candidate_is_legal_and_its_text_parses_back() -> None:
    for i in sample():
        layout = found().layout(i)
        assert not legal(layout, SHAPE, batch=BATCH, sequence=SEQUENCE), str(layout)
        assert Layout.parse(str(layout)) == layout
        assert layout.ranks == 16


def test_no_two_candidates_are_the_same_layout_with_other_blocks_aside() -> None:
    few = candidates(Space(SHAPE, hardware("h100x4"), SEQUENCE, 4))
    texts = [str(few.layout(i)) for i in range(len(few))]
    assert len(set(texts)) == len(texts)


def test_a_key_names_the_cut_under_which_the_layout_is_weighed() -> None:
    for i in sample(100):
        cut, rows = found().keys[int(found().columns.key[i])]
        assert cut.layout("bf16") == cut_of(found().layout(i))
        assert rows == found().case(i).rows


def test_the_best_is_the_best_of_all_when_all_are_weighed() -> None:
    """What is left uncosted cannot win: pricing every cut finds the same first layout."""
    place, own = hardware("h100x8"), profile("phalanx")
    space = Space(SHAPE, place, SEQUENCE, 16)
    every = candidates(space)
    priced = Priced(SHAPE, place, own, Costing(), sequence=SEQUENCE, precision="bf16")
    priced.piece_costs({cut for cut, _ in every.keys})
    from phalanx.plan.estimate import estimate

    times = estimate(every.columns, [priced.three(*key) for key in every.keys], place, own)
    fits = times.bytes <= 0.85 * place.memory
    best = float(times.step[fits].min())
    costing = Costing()
    from phalanx.plan.search import _screened

    lazy = Priced(SHAPE, place, own, costing, sequence=SEQUENCE, precision="bf16")
    _, screened, _ = _screened(space, lazy, own, 0.85 * place.memory)
    assert float(screened.step[screened.bytes <= 0.85 * place.memory].min()) >= best * 0.999
    assert lazy.cuts < priced.cuts


def test_picks_are_in_order_and_fit_in_the_limit() -> None:
    assert len(plan().layouts) == 10
    steps = [choice.step for choice in plan().layouts]
    assert steps == sorted(steps)
    assert all(choice.bytes <= plan().room for choice in plan().layouts)
    assert 0 < plan().fitting <= plan().considered <= len(found())
    assert all(choice.layout.precision == "bf16" for choice in plan().layouts)


def test_judging_a_pick_by_its_text_gives_what_the_search_found() -> None:
    for choice in plan().layouts:
        (judged,) = judge(
            [Layout.parse(str(choice.layout))], SHAPE, hardware(), Costing(),
            profile=profile("phalanx"), sequence=SEQUENCE, batch=BATCH,
        )  # fmt: skip
        assert judged.step == pytest.approx(choice.step)
        assert judged.bytes == pytest.approx(choice.bytes)


def judged(text: str) -> Choice:
    (choice,) = judge(
        [Layout.parse(text)], SHAPE, hardware(), Costing(),
        profile=profile("phalanx"), sequence=SEQUENCE, batch=BATCH,
    )  # fmt: skip
    return choice


def test_each_stage_keeps_as_many_forwards_as_its_program_has_open() -> None:
    choice = judged("dp4 pp4 1f1b:8 stages:2-2-2-2 bf16")
    pieces = known(Layout.parse("bf16"), SEQUENCE)
    rows = choice.case.rows
    kept = [2 * pieces.block(rows).kept] * 4
    kept[0] += pieces.embed(rows).kept
    kept[3] += pieces.head(rows).kept
    found = [stage["activations"] for stage in choice.stages]
    assert found == pytest.approx([n * each for n, each in zip((4, 3, 2, 1), kept, strict=True)])
    assert choice.bytes == max(sum(stage.values()) for stage in choice.stages)


def test_the_first_rank_of_a_v_holds_embedding_and_head() -> None:
    pieces = known(Layout.parse("bf16"), SEQUENCE)
    embed, block, head = (x(1.0).weights for x in (pieces.embed, pieces.block, pieces.head))
    two = profile("phalanx").weight_bytes
    straight, bent = judged("dp4 pp4 zb-h1:8 bf16"), judged("dp4 pp4 zb-v:8 bf16")
    blocks = on_ranks(blocks_of(bent.layout, SHAPE), 4, "zb-v")
    assert bent.stages[0]["weights"] == pytest.approx(two * (embed + head + blocks[0] * block))
    assert bent.stages[3]["weights"] == pytest.approx(two * blocks[3] * block)
    assert straight.stages[3]["weights"] > bent.stages[3]["weights"]


def test_an_update_on_the_host_takes_longer_and_leaves_the_rest() -> None:
    here, away = judged("dp16 zero1 bf16"), judged("dp16 zero1 offload:optimizer bf16")
    assert away.parts["update"] > 10 * here.parts["update"]
    assert {**away.parts, "update": 0.0} == {**here.parts, "update": 0.0}
    assert away.memory["optimizer"] == 0.0


def test_a_tighter_limit_never_gives_a_faster_plan() -> None:
    steps = [plan_of(limit=limit, top=1).layouts[0].step for limit in (1.0, 0.5, 0.2)]
    assert steps == sorted(steps)


def test_every_family_without_a_pick_has_its_reason() -> None:
    best = plan().layouts[0]
    refused = {r.family: r for r in plan().refused}
    for family in ("tp2", "tp4", "tp8", "pp2", "pp4", "cp2", "1f1b", "interleaved", "HSDP"):
        mine = {f"{a.name}{a.size}" for a in best.layout.mesh.axes} | {best.layout.schedule}
        assert family in refused or family in mine or best.layout.mesh.of("dp.replicate") > 1
    assert all(
        r.reason and r.kind in ("slower", "memory", "illegal", "pruned") for r in refused.values()
    )
    assert refused["pp16"].kind == "illegal"
    slower = [r for r in refused.values() if r.kind == "slower"]
    assert slower
    assert all(r.times >= 1 - 1e-6 for r in slower)


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    tight = plan_of(limit=0.3)
    large = [r for r in tight.refused if r.kind == "memory"]
    assert any(r.family == "data parallel alone" for r in large)
    assert all("GB" in r.reason for r in large)


def test_nothing_fits_in_no_memory_and_the_plan_says_so() -> None:
    none = plan_of(limit=0.001)
    assert none.layouts == ()
    assert none.fitting == 0
    assert float(none.points[1].min()) > none.room


def test_where_the_fast_ones_hold_more_than_was_said_the_emptiest_that_fits_is_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least = float(plan().points[1].min())
    room = 3 * least / hardware().memory

    def fuller(choice: Choice, priced: Priced) -> Choice:
        """Programs that hold four times what the closed form says, but for the emptiest."""
        more = 4.0 if choice.bytes > 1.2 * least else 1.0
        return replace(choice, memory={k: more * v for k, v in choice.memory.items()})

    usual = plan_of(limit=room, top=1).layouts[0]
    assert usual.bytes > 1.2 * least
    monkeypatch.setattr("phalanx.plan.search._staged", fuller)
    (only,) = plan_of(limit=room, top=1).layouts
    assert only.bytes <= room * hardware().memory
    assert only.step > usual.step


def test_the_optimizer_leaves_the_device_only_where_nothing_else_fits() -> None:
    least = float(plan_of(hardware("h100x1"), batch=1, limit=1e-4).points[1].min())
    small = hardware("h100x1")
    offloaded = plan_of(small, batch=1, limit=1.01 * least / small.memory, top=1)
    assert "optimizer" in offloaded.layouts[0].layout.offload
    assert not plan_of(small, batch=1, limit=1.0, top=1).layouts[0].layout.offload


@pytest.mark.parametrize(
    "schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2)]
)
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_few_microbatches_tell_the_bubble_of_many(schedule: str, chunks: int, more: int) -> None:
    place, own, pp = hardware(), profile("phalanx"), 4
    priced = Priced(SHAPE, place, own, Costing(), sequence=SEQUENCE, precision="bf16")
    cut = Cut(1, 1, 1, False, False, schedule.startswith("zb"))
    priced.piece_costs([cut])
    costs = pipeline_costs(priced.three(cut, 1.0), spread(8, pp * chunks), False)
    waits = []
    for count in ((2 if schedule == "zb-v" else 1) * pp + more, 8 * pp + more):
        drawn = simulate(pipeline(schedule, pp, count, chunks), costs)
        waits.append(drawn.makespan - drawn.ideal)
    assert waits[0] == pytest.approx(waits[1], rel=0.02)


def test_plain_rules_stand_beside_and_none_is_faster() -> None:
    beside = baselines(
        SHAPE, hardware(), Costing(), profile=profile("phalanx"), sequence=SEQUENCE, batch=BATCH,
        precision="bf16", room=plan().room,
    )  # fmt: skip
    assert len(beside) == 3
    for baseline in beside:
        assert baseline.choice is None or baseline.fits == (baseline.choice.bytes <= plan().room)
        if baseline.choice and baseline.fits:
            assert baseline.choice.step >= plan().layouts[0].step * 0.999


def test_a_stack_that_keeps_scores_is_planned_too() -> None:
    plain: Profile = dataclasses.replace(profile("phalanx"), fused_attention=False)
    found_ = search(
        SHAPE, hardware("h100x8"), Costing(), profile=plain, sequence=SEQUENCE, batch=16, top=3
    )
    fused = plan_of(hardware("h100x8"), batch=16, top=3)
    assert found_.layouts[0].step > fused.layouts[0].step
