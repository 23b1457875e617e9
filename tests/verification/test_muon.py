"""Muon in every layout makes the updates of torch's Muon on one process, whose matrices are named here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from phalanx.comm.late import late_worlds
from phalanx.layout import Layout, LayoutError, Rules
from phalanx.parallel import Model, build_model, cut_weights
from phalanx.parallel.matrices import matrices_of
from phalanx.program import (
    Costs,
    Op,
    Program,
    StepOptions,
    check,
    ops,
    simulate,
)
from phalanx.training.muon import MATRICES, Muon, orthogonalized
from phalanx.training.program import program_of
from phalanx.verification import (
    SHAPES,
    batch_of,
    covering,
    every_layout,
    verify,
)
from phalanx.verification.trial import Setting, join, program_in, train_layout
from phalanx.verification.verify import precision_named
from sampled import one_in
from seeded.matrices import in_parts

# By shape, over which axes, and how many layouts at the least.
COVERED = {
    "gqa": ("dp pp cp tp", 80),
    "experts": ("dp pp cp tp ep", 80),
    "gpt": ("dp pp tp", 40),
    "mlp": ("dp pp tp", 20),
}


def failures(name: str, layouts: Any, **more: Any) -> list[str]:
    verdicts = verify(SHAPES[name], layouts, optimizer="muon", **more)
    return [
        f"{v.layout}: {v.first_difference}" for v in verdicts if not v.passed
    ]


@pytest.mark.parametrize("name", one_in(2, ["experts", "gqa"]))
def test_layouts_agree_with_torchs_muon_on_one_process(name: str) -> None:
    texts = {
        "gqa": """dp2; dp3 zero1; dp2x2 zero3 accum:3; tp4 zero0; dp2 tp2 zero2 seq accum:3;
            dp2 cp2 zero3; dp2 pp2 tp2 zero1 zb-h1:3; offload:optimizer""",
        "experts": """ep3 tp2; pp2 ep2 zero2 1f1b:3; dp2 ep2 tp2 zero3; dp2 tp2 seq experts:tp zero2;
            ep2 cp2 experts:cp zero1""",
    }[name]
    layouts = Layout.parse_many(" ".join(texts.split()))
    assert (
        failures(
            name, [replace(x, precision="fp64") for x in layouts], steps=2
        )
        == []
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", COVERED)
def test_many_layouts_agree_with_torchs_muon_on_one_process(
    name: str, part: int
) -> None:
    axes, least = COVERED[name]
    layouts = covering(
        every_layout(SHAPES[name], 8, axes=axes, besides=True), least
    )
    assert len(layouts) >= least
    assert failures(name, layouts[part::4]) == []


# ---- which weights are matrices

ATTENTION = ("attn.wq", "attn.wk", "attn.wv", "attn.wo")
EXPERTS = ("routed.gate", "routed.up", "routed.down")


@pytest.mark.parametrize(
    ("shape", "one", "expected"),
    [
        ("gqa", 1, {f"{n}.weight" for n in (*ATTENTION, "mlp.gate", "mlp.up", "mlp.down")}),
        ("gpt", 0, {f"{n}.weight" for n in (*ATTENTION, "mlp.up", "mlp.down")}),
        ("experts", 2, {f"{n}.weight" for n in ATTENTION} | {f"mlp.{n}" for n in EXPERTS}
         | {f"mlp.shared.{n}.weight" for n in ("gate", "up", "down")}),
        ("mlp", 0, {"weight"}),
    ],
)  # fmt: skip
def test_matrices_are_the_weights_of_a_block_between_features(
    shape: str, one: int, expected: set[str]
) -> None:
    model = build_model(SHAPES[shape])
    found = {
        n
        for n, w in model.weights.items()
        if model.rules.matrices(n, tuple(w.shape))
    }
    block = f"layers.{one}."
    assert {
        n.removeprefix(block) for n in found if n.startswith(block)
    } == expected
    assert all(n.startswith("layers.") for n in found)


def test_a_rule_says_which_matrices_a_weight_joins() -> None:
    rules = Rules.parse(
        "qkv : features/8,4,4 embed\ngate_up : features/2 embed\nhead : heads/2 -"
    )
    whole = slice(0, 6)
    rows = [slice(0, 8), slice(8, 12), slice(12, 16)]
    assert rules.matrices("qkv", (16, 6)) == tuple((r, whole) for r in rows)
    assert rules.matrices("gate_up", (10, 6)) == (
        (slice(0, 5), whole),
        (slice(5, 10), whole),
    )
    assert rules.matrices("head", (8, 6)) == ()
    assert rules.dims("qkv", 2) == ("features", "embed")
    assert Rules.parse(str(rules)) == rules
    with pytest.raises(LayoutError, match="features/8,4,4' of a dim of 20"):
        rules.matrices("qkv", (20, 6))
    with pytest.raises(LayoutError, match="names dim 'features/0x'"):
        Rules.parse("qkv : features/0x embed")


class _Unrounded(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (
            args[0].clone()
            if func is torch.Tensor.bfloat16
            else func(*args, **(kwargs or {}))
        )


def fused() -> Model:
    plain = build_model(SHAPES["mlp"])
    return replace(
        plain, rules=Rules.parse("layers.*.weight : embed/10,6 ffn")
    )


@pytest.mark.parametrize("layout", ["", "dp3 zero2", "tp2"])
def test_matrices_that_share_a_weight_are_updated_each_by_itself(
    layout: str,
) -> None:
    """Against torch's Muon on two weights of each layer."""
    _compare_shared(layout)


def test_matrices_that_share_a_weight_and_are_updated_as_one_are_caught() -> (
    None
):
    with (
        in_parts(lambda w: [tuple(slice(0, n) for n in w.shape)]),
        pytest.raises(AssertionError),
    ):
        _compare_shared("")


def _compare_shared(layout: str) -> None:
    shape, muon = SHAPES["mlp"], Muon(0.8, rate=0.5, decay=0.2)
    setting = Setting(
        partial(batch_of, shape, dtype=torch.float64), optimizer=muon,
        precision=precision_named("float64"),
    )  # fmt: skip
    where = Layout.parse(f"{layout} fp64")
    program = program_in(where, fused, setting)
    with late_worlds(where.ranks) as run:
        got = join(
            run(train_layout, where, program, fused, setting), setting.steps
        )
    parts = {
        name: [nn.Parameter(x[:10].clone()), nn.Parameter(x[10:].clone())]
        for name, x in got.start.items()
    }
    every = [part for each in parts.values() for part in each]
    plain = torch.optim.Muon(
        every, momentum=0.8, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    for step, seen in enumerate(got.steps):
        batch = setting.batches(step)
        x, count = batch["inputs"], len(batch["inputs"])
        for each in parts.values():
            x = nn.functional.gelu(x @ torch.cat(each))
        plain.zero_grad()
        (x.square().mean(-1).sum() / count).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(every, setting.clip(step) or float("inf"))
        plain.param_groups[0]["lr"] = setting.rate(step) * 0.5
        with _Unrounded():
            plain.step()
        for name, each in parts.items():
            torch.testing.assert_close(
                seen.weights[name], torch.cat(each), rtol=1e-10, atol=1e-12
            )


def test_what_is_made_orthogonal_has_singular_values_near_one() -> None:
    """Jordan et al. 2024: between 0.7 and 1.2 after five steps, for those that are not tiny at first."""
    for shape in ((3, 24, 16), (2, 16, 24)):
        x = torch.randn(
            shape,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float64,
        )
        values = torch.linalg.svdvals(orthogonalized(x))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.25


# ---- owners, and the program


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_dearest_owner_has_at_most_a_matrix_more_than_its_share(
    ranks: int,
) -> None:
    """Graham 1969: so far is a list that is dealt out from even, and no farther."""
    weights = cut_weights(build_model(SHAPES["gqa"]), Layout(), {})
    order = [w for n, w in weights.items() if n.startswith("layers.1.")]
    ends = [*accumulate(torch.Size(w.local).numel() for w in order)]
    offsets = [0, *ends[:-1]]
    firsts = set()
    for number in range(4):
        unit: Any = SimpleNamespace(
            number=number,
            order=order,
            offsets=offsets,
            groups=SimpleNamespace(places=range(ranks)),
        )
        blocks = matrices_of(unit, MATRICES)
        assert len(blocks) == 7
        costs = [b.work for b in blocks]
        loads = [
            sum(b.work for b in blocks if b.owner == r) for r in range(ranks)
        ]
        assert max(loads) <= sum(costs) / ranks + max(costs)
        firsts.add(max(blocks, key=lambda b: b.work).owner)
    assert len(firsts) > 1 or ranks == 1


def test_the_cost_of_a_matrix_is_that_of_its_products() -> None:
    """Five steps: x x^T and p x have 2 r r c each with r <= c, the square of x x^T 2 r r r; in halves."""
    assert MATRICES.work(10, 4) == MATRICES.work(4, 10)
    assert MATRICES.work(4, 10) == 5 * (4 * 4 * 10 + 4 * 4 * 4 + 4 * 4 * 10)


def test_the_ways_to_and_from_owners_are_simulated_and_needed() -> None:
    layout = Layout.parse("dp2 zero1")
    program = program_of(
        build_model(SHAPES["gqa"]), layout, StepOptions(whole_matrices=True)
    )
    assert Program.parse(str(program)) == program
    (row,) = program.rows
    # Beside the update before it; neither the embedding nor the head has matrices.
    assert row.index(Op(ops.TO_OWNERS, 2)) < row.index(Op(ops.UPDATE, 1))
    assert {op.piece for op in row if op.kind == ops.TO_OWNERS} == {1, 2, 3, 4}
    costs = {"F": 1.0, "B": 2.0, "U": 1.0}
    slow = Costs({**costs, ops.TO_OWNERS: 5.0})
    assert (
        simulate(program, slow).makespan
        >= simulate(program, Costs(costs)).makespan + 4 * 5 - 3
    )
    plain = program_of(build_model(SHAPES["gqa"]), layout)
    assert not {ops.TO_OWNERS, ops.FROM_OWNERS} & {
        op.kind for op in plain.rows[0]
    }
    check(program)
