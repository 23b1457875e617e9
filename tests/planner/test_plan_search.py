"""A plan: bounds are below what is simulated, the picks are legal and the best of all, and every kind
of other layout has a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from phalanx.api.plan import request as api_request
from phalanx.api.request import request_for
from phalanx.layout import (
    ByKind,
    Layout,
    LayoutError,
    Shape,
    legal,
    piece_layout,
    staged_pieces,
)
from phalanx.layout.choices import DUALPIPE_V
from phalanx.planner import refused
from phalanx.planner.case import Case
from phalanx.planner.device import MachineError
from phalanx.planner.hardware import Hardware, hardware_of
from phalanx.planner.link import cluster
from phalanx.planner.piece_price import OpTime
from phalanx.planner.price import Priced
from phalanx.planner.profile import SoftwareProfile, profile
from phalanx.planner.routing import Routing
from phalanx.planner.search import (
    Plan,
    Queue,
    Screened,
    baselines,
    judge,
    search,
)
from phalanx.planner.space import Space, spread
from phalanx.planner.step import (
    Choice,
    Pricer,
    Request,
    choice,
    joint_lanes,
    longest,
    predicted,
)
from phalanx.program import (
    AttentionLoad,
    CostedPiece,
    Load,
    MessageLoad,
    Op,
    PieceCost,
    PieceKinds,
    Product,
    build,
    ops,
)
from phalanx.program.memory import peaks
from phalanx.program.simulate import compiled
from phalanx.program.simulate import times as event_times

SHAPE = replace(Shape.load("8b"), layers=8, batch=32, sequence=4096)
SEQUENCE, BATCH = 4096, 32


def known(cut: Layout, sequence: int, layers: int = 8) -> PieceKinds:
    """A decoder's pieces in closed form, so that a search here needs neither torch nor a cache: products,
    one message to each half block, activations."""

    def piece(kind: str, rows: float) -> PieceCost:
        tokens = rows * sequence / cut.cp
        h, f, v = SHAPE.hidden, SHAPE.ffn, SHAPE.vocab
        wide = {"embed": 0, "block": 4 * h + 3 * f, "head": v}[kind] / cut.tp
        product = Product(tokens, h, max(1.0, wide))
        several = replace(product, batch=2.0)
        core = AttentionLoad(
            rows, SHAPE.heads / cut.tp, 8, sequence / cut.cp, sequence, 128
        )
        own = (core,) * (kind == "block")
        lines = (
            [MessageLoad("tp", "all_reduce", 2 * tokens * h)] * 2
            if cut.tp > 1
            else []
        )
        lines += (
            [MessageLoad("cp.ring", "send", tokens * h)]
            if cut.mesh.of("cp.ring") > 1
            else []
        )
        messages = tuple(lines)
        forward = Load((product,), own, 8 * tokens * h, 20, messages)
        back = Load((several,), own, 16 * tokens * h, 30, messages)
        half = Load((product,), own, 8 * tokens * h, 15, messages)
        selective = cut.recompute == "selective"
        keeps = 34 * tokens * h / cut.tp
        return PieceCost(
            forward,
            half if cut.splits_backward else back,
            Load((product,), (), 8 * tokens * h, 15) if cut.splits_backward else Load(),
            Load(moved=8 * tokens * h, launches=4) if selective else forward,
            kept=keeps, kept_after_i=keeps, input=2 * tokens * h, temporary=4 * tokens * h,
            weights=wide * h, edge=2 * tokens * h, selected=12 * tokens * h / cut.tp * selective,
        )  # fmt: skip

    each = (
        CostedPiece((partial(piece, kind),))
        for kind in ("embed", "block", "head")
    )
    return PieceKinds.equal_blocks(*each, layers)


class Costing:
    """The function that a search is handed, and what it was asked for."""

    def __init__(self) -> None:
        self.requested: list[Layout] = []

    def __call__(
        self, model: Shape | str, layouts: Iterable[Layout], *, sequence: int
    ) -> Mapping[Layout, PieceKinds]:
        self.requested += list(layouts)
        assert isinstance(model, Shape)
        cuts = map(piece_layout, self.requested)
        return {cut: known(cut, sequence, model.layers) for cut in cuts}


def hardware(name: str = "h100x16") -> Hardware:
    return hardware_of(cluster(name))


def request(
    name: str = "h100x16", *, batch: int = BATCH, limit: float = 0.85, layers: int = 8,
    software: SoftwareProfile | None = None, **trained: object,
) -> Request:  # fmt: skip
    return Request(
        replace(SHAPE, layers=layers, **trained), hardware(name), software or profile("phalanx"), Costing(),
        SEQUENCE, batch, limit=limit,
    )  # fmt: skip


@cache
def plan() -> Plan:
    return search(request())


def judged(text: str, **what: object) -> Choice:
    (found,) = judge(request(**what), [Layout.parse(text)])  # type: ignore[arg-type]
    return found


# ---- one layout


LAYOUTS = (
    "dp16 accum:2", "dp16 zero1 accum:4", "dp2x8 zero3 accum:2", "dp16 zero3 accum:3 recompute:all",
    "dp16 zero2 accum:2 recompute:selective", "dp8 tp2 seq zero3 gather:step",
    "dp4 pp4 zero1 1f1b:8", "dp4 pp4 zero3 1f1b:8", "dp2 pp4 tp2 seq interleaved2:8",
    "dp4 pp4 zb-h1:9", "dp4 pp4 zb-h2:8", "dp4 pp4 zb-v:8 recompute:all", "dp2 pp8 zero1 gpipe:8",
    "pp4 dp2x2 zero3 1f1b:8 gather:micro recompute:every=2",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_step_is_the_makespan_of_the_whole_program_on_the_whole_mesh(
    text: str,
) -> None:
    """One rank along dp and tp stands for all, and full pipelines are not simulated to their end."""
    layout, asked = Layout.parse(f"{text} bf16"), request()
    priced = Pricer(asked).priced(layout)
    found = choice(priced)
    program = build(layout, staged_pieces(layout, SHAPE))
    made = compiled(program, joint=joint_lanes(layout, asked.hardware))
    _, ends = event_times(made, priced.costs())
    assert found.step == pytest.approx(max(ends), rel=1e-9)
    fullest = max(peak.total for peak in peaks(program, priced.sizes))
    bytes_ = asked.profile.context + asked.profile.reserve * fullest
    assert found.bytes == pytest.approx(bytes_, rel=1e-9)


@pytest.mark.parametrize(
    "text",
    ["dp2 zero3 accum:{}", "dp2 zero1 accum:{} recompute:all", "pp2 1f1b:{}", "pp3 zb-h1:{}",
     "pp2 zb-v:{}", "dp2 pp2 zero2 interleaved2:{}", "dp2 pp2 zero3 1f1b:{} gather:micro",
     "pp4 gpipe:{}", "pp2 zb-h2:{} recompute:all", "pp5 1f1b:{} recompute:every=2",
     "dp2 pp4 zero1 1f1b:{} recompute:all", "dp2 pp2 zero3 interleaved2:{} gather:micro",
     "dp2 zero3 accum:{} offload:optimizer,weights", "pp2 zb-v:{} recompute:selective"],
)  # fmt: skip
@pytest.mark.parametrize("count", [12, 24, 41, 64])
def test_further_microbatches_of_a_full_pipeline_take_what_the_whole_simulation_says(
    text: str, count: int
) -> None:
    layout = Layout.parse(text.format(count) + " bf16")
    asked = request(f"h100x{layout.ranks}", layers=5)
    priced = Pricer(replace(asked, batch=count * layout.dp)).priced(layout)
    found, whole = choice(priced), predicted(priced)
    assert found.step == pytest.approx(whole.makespan, rel=1e-9)
    program = build(layout, staged_pieces(layout, asked.shape))
    fullest = max(peak.total for peak in peaks(program, priced.sizes))
    bytes_ = asked.profile.context + asked.profile.reserve * fullest
    assert found.bytes == pytest.approx(bytes_, rel=1e-9)


@pytest.mark.parametrize(
    "software", ["phalanx", "deepspeed-zero3", "torchtitan", "paxml"]
)
@pytest.mark.parametrize("mesh", ["dp16", "dp2x8", "dp8 tp2 seq", "dp8 pp2"])
def test_zero3_that_sends_once_a_step_is_never_better_than_a_lower_stage(
    software: str, mesh: str
) -> None:
    """So a search needs no candidates for it: ZeRO-2 gathers once a step, ZeRO-1 also sums so."""
    schedule = "1f1b:4" if "pp" in mesh else "accum:4"
    pairs = [("zero3 gather:step reduce:step", "zero1")]
    pairs += [("zero3 gather:step", "zero2")] * ("pp" not in mesh)
    for words, lower in pairs:
        high, low = (
            judged(
                f"{mesh} {zero} {schedule} bf16",
                software=profile(software),
                batch=64,
            )
            for zero in (words, lower)
        )
        assert low.step <= 1.001 * high.step
        assert low.bytes <= 1.01 * high.bytes


def test_collectives_over_one_group_take_turns_and_replicas_have_links_of_their_own() -> (
    None
):
    """Messages of a step that computes next to nothing: all of them one after the other."""
    asked = request(
        "a100-80x16",
        software=replace(profile("phalanx"), speed=1e4, traffic=1e-4, host=0),
    )
    layout = Layout.parse("dp16 zero3 accum:4 bf16")
    priced = Pricer(asked).priced(layout)
    costs = priced.costs()
    pieces = range(SHAPE.pieces)
    sums = 4 * sum(costs.pieces[ops.REDUCE, n] for n in pieces)
    # Each microbatch gathers blocks twice; the head's weights stay from its forward to its backward.
    gathers = 4 * sum(
        costs.pieces[ops.GATHER, n] * (2 - (n == pieces[-1])) for n in pieces
    )
    found = choice(priced)
    assert found.step == pytest.approx(sums + gathers, rel=0.15)
    assert ops.KINDS[ops.REDUCE_REPLICAS].lane not in joint_lanes(
        Layout.parse("dp2x8 zero3"), asked.hardware
    )
    assert (
        len(joint_lanes(Layout.parse("dp2x16 zero3"), hardware("h100x32")))
        == 4
    )


def test_steps_that_roll_take_what_the_longest_stage_takes() -> None:
    """Of zb-h2 with parts of a backward as long as its forward, no stage ever waits (Qi et al. 2024,
    figure 3); 1F1B's first stage is at work from the beginning to the end."""
    asked = request(
        "h100x4",
        software=replace(profile("phalanx"), no_step_barrier=True),
        layers=4,
    )
    for text, no_step_barrier in (
        ("pp4 zb-h2:8 bf16", True),
        ("pp4 1f1b:8 bf16", False),
    ):
        layout = Layout.parse(text)
        case = Case(asked.shape, layout, 1.0, SEQUENCE)
        times = Pricer(asked).times(piece_layout(layout), 1.0, True)
        embed, block, head = (
            replace(
                t,
                forward=OpTime(s),
                input_gradient=OpTime(s),
                weight_gradient=OpTime(s),
            )
            for t, s in zip(times.values, (0.0, 1.0, 0.0), strict=True)
        )
        made = ByKind.equal_blocks(embed, block, head, asked.shape.layers)
        priced = Priced(case, made, asked.hardware, asked.profile)
        found, path, costs = choice(priced), longest(priced), priced.costs()
        assert found.step == pytest.approx(
            8 * 3 if no_step_barrier else 8 * 3 + 3 * 3, rel=0.01
        )
        assert sum(
            often * costs.of(op, rank) for (rank, op), often in path.items()
        ) == (pytest.approx(found.step))


def test_a_schedule_of_ones_own_is_planned_as_its_program_runs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from phalanx.program.schedules import f1b\n"
        "def same(stages, microbatches, chunks=1):\n    return f1b(stages, microbatches)\n"
    )
    own, builtin = (
        judged(f"dp4 pp4 {file}:same:8 bf16"),
        judged("dp4 pp4 1f1b:8 bf16"),
    )
    assert own.step == pytest.approx(builtin.step)
    assert own.bytes == pytest.approx(builtin.bytes)


def test_each_stage_keeps_as_many_forwards_as_its_program_has_open() -> None:
    found = judged("dp4 pp4 1f1b:8 stages:2-2-2-2 bf16")
    pieces = known(Layout.parse("bf16"), SEQUENCE)
    rows = found.case.rows
    kept = [2 * pieces[1](rows).kept] * 4
    kept[0] += pieces.embed(rows).kept
    kept[3] += pieces.head(rows).kept
    held = [stage["activations"] for stage in found.stages]
    assert held[:3] == pytest.approx(
        [n * x for n, x in zip((4, 3, 2), kept[:3], strict=True)]
    )
    assert found.bytes == max(sum(stage.values()) for stage in found.stages)


def test_the_first_rank_of_a_v_holds_embedding_and_head() -> None:
    pieces = known(Layout.parse("bf16"), SEQUENCE)
    embed, block, head = (piece(1.0).weights for piece in pieces.values)
    two = profile("phalanx").weight_bytes
    bent = judged("dp4 pp4 zb-v:8 stages:1-1-1-1-1-1-1-1 bf16")
    straight = judged("dp4 pp4 zb-h1:8 stages:2-2-2-2 bf16")
    assert bent.stages[0]["weights"] == pytest.approx(
        two * (embed + head + 2 * block)
    )
    assert bent.stages[3]["weights"] == pytest.approx(two * 2 * block)
    assert straight.stages[3]["weights"] == pytest.approx(
        two * (head + 2 * block)
    )


def test_an_update_on_the_host_takes_longer_and_leaves_the_rest() -> None:
    here, away = (
        judged("dp16 zero1 bf16"),
        judged("dp16 zero1 offload:optimizer bf16"),
    )
    assert away.parts["update"] > 5 * here.parts["update"]
    assert away.parts["compute"] == pytest.approx(here.parts["compute"])
    # updated weights come back to be gathered
    assert away.parts["data"] > here.parts["data"]
    assert away.memory["optimizer"] == 0.0


# ---- bounds


WORLDS = [
    ("h100x4", 8, 4, 0.85),
    ("h100x8", 16, 4, 0.85),
    ("a100-80x8", 8, 4, 0.2),
]


def _screened(
    name: str, batch: int, layers: int, limit: float, **trained: object
) -> Screened:
    asked = request(name, batch=batch, layers=layers, limit=limit, **trained)
    return Screened(Space(asked), Pricer(asked))


@pytest.mark.parametrize(
    "frozen", [("embed", "layers.0-1"), ("head", "layers")]
)
def test_bounds_hold_where_pieces_are_frozen(frozen: tuple[str, ...]) -> None:
    screened = _screened("h100x4", 8, 4, 0.85, freeze=frozen)
    whole, less = _screened("h100x4", 8, 4, 0.85), 0
    for i in range(0, len(screened), max(1, len(screened) // 150)):
        layout = screened.layout(i)
        found, all_ = (
            screened.pricer.choose(layout),
            whole.pricer.choose(layout),
        )
        assert screened.step[i] <= found.step * (1 + 1e-9), layout
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), layout
        # Not where a rank that freezes nothing is the fullest.
        less += found.bytes < 0.9 * all_.bytes
    assert less


def test_layouts_that_share_experts_are_searched_and_their_bounds_hold() -> (
    None
):
    shape = Shape.of({
        "layers": 2, "hidden": 512, "heads": 4, "vocab": 1000, "ffn": 512, "experts": 6, "top_k": 2,
        "expert_ffn": 8192, "sequence": 512,
    })  # fmt: skip
    asked = request_for(shape, hardware("h100x4"), batch=8)
    space, pricer = Space(asked, recomputes=("none",)), Pricer(asked)
    screened = Screened(space, pricer)
    shared = [i for i in range(len(screened)) if screened.at(i)[1].grid.ep > 1]
    # 4 do not divide 6.
    assert {screened.at(i)[1].grid.ep for i in shared} == {2}
    for i in shared[::3]:
        layout = screened.layout(i)
        assert not legal(layout, shape, batch=8)
        found = pricer.choose(layout)
        assert screened.step[i] <= found.step * (1 + 1e-9), layout
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), layout
    assert not any(
        screened.layout(i).overlap
        for i in range(len(screened))
        if i not in shared
    )
    # Three of the experts on each rank, which are nearly all of the model.
    whole = judge(asked, [Layout.parse("dp4 bf16")])[0].memory["weights"]
    assert (
        0.5 * whole
        < judge(asked, [Layout.parse("dp2 ep2 bf16")])[0].memory["weights"]
        < 0.55 * whole
    )


ROUTED = Shape.of({
    "layers": 4, "hidden": 2048, "heads": 16, "vocab": 1000, "ffn": 2048, "experts": 4, "top_k": 2,
    "expert_ffn": 2048, "sequence": 2048,
})  # fmt: skip


def test_bounds_count_the_exchanges_that_a_rank_waits_for() -> None:
    shape = replace(ROUTED, experts=16)
    asked = request_for(shape, hardware("h100x16"), batch=64)
    space, pricer = Space(asked, recomputes=("none",)), Pricer(asked)
    screened = Screened(space, pricer)
    text = "ep16 zero1 accum:2 bf16"
    i = next(
        i for i in range(len(screened)) if str(screened.layout(i)) == text
    )
    screened.costs(i)
    costs = pricer.costs(screened.layout(i))
    # Four blocks, two microbatches, two exchanges each in forward and backward.
    experts = 2
    exchanged = costs.of(Op(ops.EXCHANGE, experts), 0)
    found = pricer.choose(screened.layout(i))
    assert 4 * 2 * 4 * exchanged > 0.1 * found.step
    assert 0.98 * found.step < screened.step[i] <= found.step


def test_bounds_hold_where_tokens_travel_beside_computing() -> None:
    """Of every schedule, and of the one in which a forward always stands beside a backward."""
    asked = request_for(ROUTED, hardware("h100x4"), batch=16)
    space, pricer = Space(asked, recomputes=("none", "all")), Pricer(asked)
    screened = Screened(space, pricer)
    routed = [i for i in range(len(screened)) if screened.at(i)[1].grid.ep > 1]
    beside = {
        i: x
        for i in routed
        if (x := screened.layout(i)).overlap or x.schedule == DUALPIPE_V
    }
    assert {x.schedule for x in beside.values()} >= {
        "accum",
        "1f1b",
        "interleaved",
        DUALPIPE_V,
    }
    for i in [*beside][:: max(1, len(beside) // 200)]:
        layout, found = beside[i], pricer.choose(beside[i])
        assert (
            screened.step[i] <= screened.follow(i) <= found.step * (1 + 1e-9)
        ), layout
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), layout
    assert not any(
        x.overlap or x.schedule == DUALPIPE_V
        for x in map(screened.layout, range(len(screened)))
        if x.ep == 1
    )


@pytest.mark.parametrize("count", [2, 8])
def test_overlap_hides_what_travels_beside_the_backward_of_another_microbatch(
    count: int,
) -> None:
    """Each block of each microbatch sends tokens there and back, and so their gradients: four times.
    Where a microbatch's forward stands beside the backward of the one before, all that is hidden but of
    the first forward and of the last backward. That ranks tell each other how many come is not: what
    is to be sent depends on it."""
    asked = request_for(ROUTED, hardware("h100x2"), batch=2 * count)
    texts = (f"ep2{words} accum:{count} bf16" for words in ("", " overlap"))
    apart, beside = judge(asked, [Layout.parse(text) for text in texts])
    network, tokens = hardware("h100x2").network, ROUTED.sequence
    # Bytes of one microbatch.
    sent = 2.0 * tokens * ROUTED.top_k * ROUTED.hidden
    exchange = network.seconds("all_to_all", sent, 2, 1)
    hidden = 4 * (count - 1) * ROUTED.layers * exchange
    assert apart.step - beside.step == pytest.approx(hidden, rel=1e-6)
    assert search(asked, top=1).fastest.step <= beside.step


def test_overlap_is_not_chosen_where_a_rank_has_nothing_beside_which_tokens_travel() -> (
    None
):
    """One sequence of each rank is one microbatch; and a model without experts sends no tokens."""
    asked = request_for(ROUTED, hardware("h100x4"), batch=4)
    plan = search(asked, top=10)
    assert any(x.layout.ep > 1 for x in plan.layouts)
    assert not any(
        x.layout.overlap for x in plan.layouts if x.layout.microbatches == 1
    )
    dense = Space(request())
    assert not any(
        p.overlap or p.schedule == DUALPIPE_V
        for x in dense.options
        for p in x.pipelines
    )


def test_products_in_8_bits_are_tried_where_they_are_asked_for() -> None:
    """Where products are large they take half the time, and are chosen; where they are small, rounding
    takes longer than they save. A device without such products is refused."""
    dense = replace(ROUTED, experts=0, top_k=1, expert_ffn=0)
    large = request_for(
        replace(dense, hidden=8192, ffn=32768), hardware("h100x2"), batch=4
    )
    small = request_for(
        replace(dense, hidden=64, head_dim=4, ffn=64),
        hardware("h100x2"),
        batch=4,
    )
    for asked, chosen in ((large, "fp8"), (small, "")):
        plain, both = (
            search(asked, top=1),
            search(replace(asked, matmul="fp8"), top=10),
        )
        assert both.layouts[0].layout.matmul == chosen
        assert not plain.layouts[0].layout.matmul
        (again,) = judge(asked, [Layout.parse(str(both.layouts[0].layout))])
        assert again.step == pytest.approx(both.layouts[0].step)
        assert ("fp8" if not chosen else "without fp8") in {
            r.family for r in both.refused
        }
    with pytest.raises(MachineError, match="no rate of fp8"):
        search(replace(large, hardware=hardware("a100-80x2"), matmul="fp8"))


def test_the_busiest_rank_is_that_with_the_most_tokens(tmp_path: Path) -> None:
    shape = Shape.of(
        {"layers": 1, "hidden": 8, "vocab": 9, "experts": 4, "top_k": 2}
    )
    file = tmp_path / "counts.json"
    for counts, ep, times in (
        ([5, 5, 5, 5], 2, 1.0), ([0, 0, 7, 0], 2, 2.0), ([0, 0, 7, 0], 4, 4.0), ([1, 2, 3, 4], 2, 1.4),
        ([1, 2, 3, 4], 3, 2.1), ([9, 0, 0, 0], 1, 1.0),
    ):  # fmt: skip
        file.write_text(str(counts))
        assert Routing.parse(str(file), shape).busiest(ep) == pytest.approx(
            times
        )
    # Of 1, 1/2, 1/3 and 1/4 the first two have 18 parts of 25.
    assert Routing.parse("zipf:1", shape).busiest(2) == pytest.approx(
        2 * 18 / 25
    )
    assert Routing.parse("balanced", shape).busiest(4) == 1.0
    for text, words in (
        ("[1, 2]", "not a list of 4 counts"),
        ("[0, 0, 0, 0]", "not a list of 4"),
    ):
        file.write_text(text)
        with pytest.raises(LayoutError, match=words):
            Routing.parse(str(file), shape)
    with pytest.raises(LayoutError, match=r"write balanced, zipf:1\.0"):
        Routing.parse("pareto", shape)
    with pytest.raises(LayoutError, match="has no experts"):
        Routing.parse("zipf:1", SHAPE)


def test_experts_with_all_tokens_take_as_long_as_with_twice_the_experts_of_a_token() -> (
    None
):
    """Two ranks share experts. The one that has all tokens has twice the mean."""
    shape = Shape.of({
        "layers": 2, "hidden": 512, "heads": 4, "vocab": 64, "ffn": 512, "experts": 8, "top_k": 2,
        "expert_ffn": 4096, "sequence": 512,
    })  # fmt: skip
    one, layout = (
        Routing("all to one", ((1.0, *[0.0] * 7),)),
        Layout.parse("ep2 bf16"),
    )
    even = request_for(shape, hardware("h100x2"), batch=8)
    busy, twice = (
        replace(even, routing=one),
        replace(even, shape=replace(shape, top_k=4)),
    )
    found, wanted = (
        Pricer(asked).times(piece_layout(layout), 4.0, False)[1].parts[1]
        for asked in (busy, twice)
    )
    sizes = [
        [x.forward.total, x.backward, x.cost.kept, x.cost.edge, x.cost.weights]
        for x in (found, wanted)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-6)
    least, middle, most = (
        judge(asked, [layout])[0] for asked in (even, busy, twice)
    )
    assert 1.01 * least.step < middle.step <= most.step
    assert 1.1 * least.memory["activations"] < middle.memory["activations"]
    whole = [Layout.parse("dp2 bf16")]
    assert judge(busy, whole) == judge(even, whole)


@pytest.mark.parametrize(("name", "batch", "layers", "limit"), WORLDS)
def test_a_bound_never_exceeds_what_is_simulated_and_screening_never_loses_the_best(
    name: str, batch: int, layers: int, limit: float
) -> None:
    screened = _screened(name, batch, layers, limit)
    asked, least, held = (
        screened.space.request,
        screened.step.copy(),
        screened.bytes.copy(),
    )
    step = {}
    for i in range(0, len(screened), max(1, len(screened) // 400)):
        layout = screened.layout(i)
        found = screened.pricer.choose(layout)
        assert least[i] <= found.step * (1 + 1e-9), layout
        assert held[i] <= found.bytes * (1 + 1e-9), layout
        if found.bytes <= asked.room:
            step[str(layout)] = found.step
    plan = search(asked, top=1)
    if step:  # one that could be faster by no more than 0.2 % is not looked at
        assert plan.fastest.step <= min(step.values()) / 0.998


@pytest.mark.parametrize(
    ("name", "batch", "layers", "limit"),
    [*WORLDS[:2], ("h100x4", 16, 8, 0.85)],
)
def test_bounds_hold_when_every_piece_is_costed_too(
    name: str, batch: int, layers: int, limit: float
) -> None:
    first = _screened(name, batch, layers, limit)
    space, pricer = first.space, first.pricer
    pricer.cost({
        space.cut(x.grid, inner, split=split)
        for x in space.options for inner in x.inners for split in (False, True)
    })  # fmt: skip
    screened = Screened(space, pricer)
    assert (screened.step >= first.step * (1 - 1e-9)).all()
    nearer = 0
    for i in range(0, len(screened), max(1, len(screened) // 150)):
        found = pricer.choose(screened.layout(i))
        assert screened.step[i] <= found.step * (1 + 1e-9), screened.layout(i)
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), screened.layout(
            i
        )
        # a bound that says nothing screens nothing
        assert screened.step[i] > 0.5 * found.step
        before = screened.step[i]
        assert before <= screened.follow(i) <= found.step * (1 + 1e-9), (
            screened.layout(i)
        )
        nearer += screened.step[i] > before * (1 + 1e-9)
    assert nearer > 10  # a schedule by itself says more than its parts


def test_a_followed_schedule_counts_sums_over_replicas_that_share_the_lane() -> (
    None
):
    # Shards of eight, one in each server: both sums of a unit leave the server.
    asked = api_request("8b", "h100x512", batch_tokens=512 * 8192)
    screened = Screened(Space(asked), Pricer(asked))
    wanted = "dp16x8 pp4 zero1 zb-h1:2 bf16"
    found = next(
        i for i in range(len(screened)) if str(screened.layout(i)) == wanted
    )
    screened.costs(found)
    bound, step = screened.follow(found), screened.simulate(found).step
    # Without the replicas' sums of all units but the last it was 0.967 of the step.
    assert 0.985 * step < bound <= step


@pytest.mark.slow
@pytest.mark.parametrize("cluster_name", ["h100x8", "h100x64"])
def test_the_first_ten_layouts_are_the_same_without_following_schedules(
    cluster_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = api_request("8b", cluster_name)
    quick = Screened(Space(asked), Pricer(asked))
    first = [
        (str(quick.layout(i)), quick.choices[i].step)
        for i in quick.best(10, asked.room)
    ]
    assert len(first) == 10
    # Nothing is left out by its schedule: everything near the tenth is simulated.
    monkeypatch.setattr("phalanx.planner.search.followed", lambda *_: 0.0)
    thorough = Screened(Space(asked), Pricer(asked))
    again = [
        (str(thorough.layout(i)), thorough.choices[i].step)
        for i in thorough.best(10, asked.room)
    ]
    assert len(thorough.choices) > len(quick.choices)
    for (text, step), (other, longer) in zip(first, again, strict=True):
        assert text == other or step == pytest.approx(longer, rel=0.002)


def test_candidates_come_in_the_order_of_bounds_that_grow_meanwhile() -> None:
    step = np.array([3.0, 1.0, 2.0, 4.0, 1.5])
    held = np.array([1.0, 1.0, 1.0, 1.0, 9.0])
    queue = Queue(step, held, least=5.0)
    assert queue.next() == 1  # 4 may hold too much
    step[1] = 3.5
    assert queue.later(1)
    step[2], held[0] = 2.5, 6.0  # of others whose turn has not come
    assert queue.next() == 2
    assert not queue.later(2)
    assert queue.next() == 1  # and 0 may hold too much by now
    step[3] = 6.0
    assert not queue.later(1)
    assert [queue.next(), queue.next()] == [3, -1]


def test_candidates_are_legal_and_their_texts_parse_back_and_are_different() -> (
    None
):
    screened = _screened("h100x4", 4, 8, 0.85)
    layouts = [screened.layout(i) for i in range(len(screened))]
    assert len({str(x) for x in layouts}) == len(layouts)
    for layout in layouts[:: max(1, len(layouts) // 300)]:
        assert not legal(layout, SHAPE, batch=4, sequence=SEQUENCE), str(
            layout
        )
        assert Layout.parse(str(layout)) == layout
        assert layout.ranks == 4


# ---- the plan


def test_picks_are_in_order_and_fit_in_the_limit() -> None:
    assert len(plan().layouts) == 10
    steps = [found.step for found in plan().layouts]
    assert steps == sorted(steps)
    assert all(found.bytes <= plan().room for found in plan().layouts)
    assert 0 < plan().fitting <= plan().considered
    assert plan().simulated < plan().considered / 10
    assert all(found.layout.precision == "bf16" for found in plan().layouts)


def test_judging_a_pick_by_its_text_gives_what_the_search_found() -> None:
    for found in plan().layouts:
        again = judged(str(found.layout))
        assert again.step == pytest.approx(found.step)
        assert again.bytes == pytest.approx(found.bytes)


def test_a_tighter_limit_never_gives_a_faster_plan() -> None:
    steps = [
        search(request("h100x8", limit=limit), top=1).fastest.step
        for limit in (1.0, 0.5, 0.25)
    ]
    assert steps == sorted(steps)


def test_the_simplest_within_two_percent_of_the_fastest_is_advised() -> None:
    asked = request("h100x64", batch=64)
    advised, *others = search(asked, top=10).layouts
    fastest = min(choice.step for choice in (advised, *others))
    assert advised.step <= 1.02 * fastest

    def axes(choice: Choice) -> int:
        return sum(axis.size > 1 for axis in choice.layout.mesh.axes)

    near = [choice for choice in others if choice.step <= 1.02 * fastest]
    assert near
    assert all(axes(advised) <= axes(choice) for choice in near)
    assert [choice.step for choice in others] == sorted(x.step for x in others)
    (alone,) = search(asked, top=1).layouts
    assert alone.layout == advised.layout


def test_every_family_without_a_pick_has_its_reason() -> None:
    best = plan().layouts[0]
    lost = {r.family: r for r in plan().refused}
    for family in (
        "tp2",
        "tp4",
        "tp8",
        "pp2",
        "pp4",
        "cp2",
        "1f1b",
        "interleaved",
        "HSDP",
    ):
        mine = {f"{a.name}{a.size}" for a in best.layout.mesh.axes} | {
            best.layout.schedule
        }
        assert (
            family in lost
            or family in mine
            or best.layout.mesh.of("dp.replicate") > 1
        )
    kinds = ("slower", "memory", "illegal", "pruned")
    assert all(r.reason and r.kind in kinds for r in lost.values())
    assert lost["pp16"].kind == "illegal"
    slower = [r for r in lost.values() if r.kind == "slower"]
    assert slower
    assert all(r.times >= 1 - 1e-6 for r in slower)


def test_families_are_told_by_bounds_of_all_that_is_costed() -> None:
    screened = _screened("h100x64", 64, 8, 0.85)
    room = screened.space.request.room
    best = screened.best(2, room)
    told = refused.refusals(screened, best, room, budget=0)
    # All grids are bounded anew, with what is costed by now.
    anew = Screened(screened.space, screened.pricer)
    anew.choices = screened.choices
    for candidate, seconds in screened.followed.items():
        anew.step[candidate] = max(anew.step[candidate], seconds)
    assert refused.refusals(anew, best, room, budget=0) == told


def test_a_grid_is_bounded_again_only_if_a_cut_of_its_own_was_costed() -> None:
    screened = _screened("h100x8", 16, 4, 0.85)
    grids = [screened.at(i)[1].grid for i in range(len(screened))]
    alone = next(i for i, x in enumerate(grids) if x.dp == 8)
    ring = [i for i, x in enumerate(grids) if (x.ring, x.tp) == (2, 1)]
    first = ring[0]
    same = next(i for i in ring if grids[i] != grids[first])
    before = screened.found[screened.at(alone)[0]]
    screened.costs(first)
    assert not screened.refresh(alone)
    assert screened.found[screened.at(alone)[0]] is before
    # A grid that shares the costed cut.
    assert screened.refresh(same)


def test_a_family_with_very_long_steps_is_told_by_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is simulated then for a reason: only what the search itself has seen is.
    whole = search(request(), top=1)
    monkeypatch.setattr(refused, "_LONG", 0)
    short = search(request(), top=1)
    assert short.simulated < whole.simulated
    slower = [r for r in short.refused if r.kind == "slower"]
    assert any(
        r.reason.startswith("at least") and " ms more for " in r.reason
        for r in slower
    )


def test_what_a_rank_computes_is_known_without_a_simulation() -> None:
    screened = _screened("h100x8", 16, 8, 0.85)
    known = np.flatnonzero(screened.known())
    for i in known[:: max(1, len(known) // 40)].tolist():
        least, found = (
            refused._least(screened, i),
            screened.pricer.choose(screened.layout(i)),
        )
        # What messages beside take is not in it, and the block before the head is not computed again,
        # which is a fourth of the work of one of a rank's blocks.
        assert (
            0.9 * found.parts["compute"]
            < least["compute"]
            < 1.07 * found.parts["compute"]
        )
        assert sum(least.values()) == pytest.approx(screened.step[i])


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    for limit in (0.3, 0.2, 0.12):
        asked = request(limit=limit)
        large = [r for r in search(asked, top=1).refused if r.kind == "memory"]
        assert any(r.family == "data parallel alone" for r in large)
        for each in judge(asked, [Layout.parse(r.layout) for r in large]):
            assert each.bytes > asked.room, each.layout
        assert all("GB" in r.reason for r in large)


def test_nothing_fits_in_no_memory_and_the_plan_says_so() -> None:
    none = search(request(limit=0.001))
    assert none.layouts == ()
    assert none.fitting == 0
    assert float(none.points[1].min()) > none.room


def test_the_optimizer_leaves_the_device_only_where_nothing_else_fits() -> (
    None
):
    least = float(
        search(request("h100x1", batch=1, limit=1e-4)).points[1].min()
    )
    tight = 1.3 * least / hardware("h100x1").memory
    offloaded = search(request("h100x1", batch=1, limit=tight), top=1)
    assert "optimizer" in offloaded.layouts[0].layout.offload
    plain = search(request("h100x1", batch=1, limit=1.0), top=1)
    assert not plain.layouts[0].layout.offload


def test_plain_rules_stand_beside_and_none_is_faster() -> None:
    beside = baselines(request())
    assert len(beside) == 3
    for baseline in beside:
        found = baseline.choice
        assert found is None or baseline.fits == (found.bytes <= plan().room)
        if found and baseline.fits:
            assert found.step >= plan().fastest.step * 0.999


def test_a_profile_that_keeps_scores_is_planned_too() -> None:
    plain = replace(profile("phalanx"), attention="scores")
    kept = search(request("h100x8", batch=16, software=plain), top=1)
    fused = search(request("h100x8", batch=16), top=1)
    assert kept.fastest.step > fused.fastest.step


def test_blocks_are_spread_as_even_as_can_be_with_more_in_the_middle() -> None:
    assert spread(6, 3) == (2, 2, 2)
    assert spread(7, 3) == (2, 3, 2)
    assert spread(8, 3) == (3, 3, 2)
    assert spread(10, 4) == (2, 3, 3, 2)
    assert spread(126, 32) == (3, *[4] * 30, 3)


def test_whole_experts_shared_over_tp_are_searched_and_their_bounds_hold() -> (
    None
):
    asked = request_for(ROUTED, hardware("h100x4"), batch=16)
    space, pricer = Space(asked, recomputes=("none",)), Pricer(asked)
    screened = Screened(space, pricer)
    whole = {
        i: x for i in range(len(screened)) if (x := screened.layout(i)).experts
    }
    assert {(x.ep, x.tp, x.seq) for x in whole.values()} == {
        (1, 2, True), (1, 4, True), (2, 2, True),
    }  # fmt: skip
    for i in [*whole][::5]:
        assert not legal(whole[i], ROUTED, batch=16)
        found = pricer.choose(whole[i])
        assert (
            screened.step[i] <= screened.follow(i) <= found.step * (1 + 1e-9)
        ), whole[i]
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), whole[i]


@pytest.mark.parametrize(
    "text, ranks", [("tp2 seq", 2), ("ep2 tp2 seq", 4), ("cp2", 2)]
)
def test_ranks_that_share_experts_send_their_own_tokens_to_all_of_them(
    text: str, ranks: int
) -> None:
    """Half of a sequence, or of two, each token as often as it has experts, in 16 bits; and where tp cuts
    each expert a rank has all tokens and four experts times half their width, as many numbers."""
    apart = Layout.parse(f"{text} bf16")
    layout = replace(apart, experts=("tp" if apart.seq else "cp",))
    asked = request_for(ROUTED, hardware(f"h100x{ranks}"), batch=layout.data)
    costs, sizes = (
        Pricer(asked).costs(layout),
        Pricer(asked).priced(layout).sizes,
    )
    sent = 2.0 * ROUTED.sequence / 2 * ROUTED.top_k * ROUTED.hidden
    exchange = asked.hardware.network.seconds("all_to_all", sent, ranks, 1)
    assert costs.pieces[ops.EXCHANGE, 2] == pytest.approx(exchange)
    cut = Pricer(asked).priced(apart).sizes
    copies = 2 if apart.cp > 1 else 1  # ranks of cp had all experts each
    numbers = ROUTED.experts * 3 * ROUTED.hidden * ROUTED.expert_ffn
    assert sum(cut.home) - sum(sizes.home) == pytest.approx(
        (1 - 1 / copies)
        * ROUTED.layers
        * numbers
        * asked.profile.weight_bytes,
        rel=1e-3,
    )


@pytest.mark.parametrize("kind, numbers", [("sequence", 4), ("batch", 1)])
def test_choices_of_experts_are_summed_over_the_ranks_that_share_a_loss(
    kind: str, numbers: int
) -> None:
    """Four sequences on a rank: a count of 4 bytes for each expert, of each of them or of all."""
    shape = replace(ROUTED, **{f"{kind}_loss": 0.1})
    asked = request_for(shape, hardware("h100x4"), batch=8)
    costs = Pricer(asked).costs(Layout.parse("dp2 cp2 bf16")).pieces
    ranks = 2 if kind == "sequence" else 4
    size = 4.0 * shape.experts * numbers
    assert costs[ops.SUM_CHOICES, 1] == asked.hardware.network.seconds(
        "all_reduce", size, ranks, 1
    )
    alone = Pricer(asked).costs(Layout.parse("dp4 bf16")).pieces
    assert ((ops.SUM_CHOICES, 1) in alone) == (kind == "batch")
