"""Plans for tp in PyTorch's words: they equal the plain script, or are refused with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_gpt
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

import phalanx
from phalanx.comm import World, launch
from phalanx.layout import Layout, LayoutError

FILE = str(Path(plain_gpt.__file__))
GPT_PLAN = {
    "attn.c_attn": ColwiseParallel(),
    "transformer.h.*.attn.c_proj": RowwiseParallel(),
    "mlp.c_fc": ColwiseParallel(),
    "mlp.c_proj": RowwiseParallel(),
}
GROUPED_PLAN = {
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.norm": "replicated_with_grad_allreduce",
    "layers.*.attention.wo": "rowwise",
    "layers.*.mlp.gate_up": "colwise",
    "layers.*.mlp.down": "rowwise",
}
PLANS: dict[str, Any] = {"gpt": GPT_PLAN, "grouped": GROUPED_PLAN}


def made(name: str) -> nn.Module:
    if name == "grouped":
        model: nn.Module = plain_gpt.Grouped()
    else:
        config = plain_gpt.PlainConfig(vocab_size=37, n_layer=3, n_head=4)
        model = plain_gpt.Plain(config)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.double().parameters():
            weight.copy_(0.15 * torch.randn(weight.shape, generator=draw))
    return model


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(9)
    ids = [torch.randint(37, (6, 9), generator=draw) for _ in range(3)]
    return [
        {"tokens": x[:, :-1], "targets": x[:, 1:].contiguous()} for x in ids
    ]


def cross_entropy(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output[0] if isinstance(output, tuple) else output
    flat, targets = logits.flatten(0, -2), batch["targets"].flatten()
    return nn.functional.cross_entropy(flat, targets, reduction="sum")


def in_parts(
    world: World, name: str, layout: str, plan: Any
) -> tuple[list[float], dict[str, Tensor], int]:
    model, data = made(name), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    run = phalanx.prepare(
        model, optimizer, layout, loss=cross_entropy, example=data[0], tp_plan=plan,
        world=world,
    )  # fmt: skip
    held = sum(unit.numel for unit in run.part.local.every_unit)
    losses = [run.step(batch).loss for batch in run.shard(data)]
    return losses, run.state_dict(), held


def by_hand(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = made(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for batch in batches():
        takes = (batch["tokens"], batch["targets"])[
            : 2 if name == "gpt" else 1
        ]
        loss = cross_entropy(model(*takes), batch) / batch["targets"].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    "layout", ["tp2", "tp4", "dp2 tp2 zero3", "pp2 tp2 1f1b:2"]
)
@pytest.mark.parametrize("name", PLANS)
def test_a_module_sharded_by_a_plan_equals_its_plain_script(
    name: str, layout: str
) -> None:
    """Fused q, k and v, whose code splits them by numbers of its own; shared keys and values, which four
    ranks repeat; gate and up in one."""
    losses, weights = by_hand(name)
    ranks = Layout.parse(layout).ranks
    given = name, layout, PLANS[name]
    for mine, theirs, _ in launch(in_parts, ranks, *given, backend="threads"):
        assert mine == pytest.approx(losses, rel=1e-10)
        for key, weight in weights.items():
            torch.testing.assert_close(
                theirs[key], weight, rtol=1e-10, atol=1e-11
            )


def test_a_rank_holds_a_part_of_what_is_sharded() -> None:
    (_, _, whole), (_, _, part) = (
        launch(
            in_parts, n, "grouped", f"tp{n}", GROUPED_PLAN, backend="threads"
        )[0]
        for n in (1, 2)
    )
    # q, k, v and o of 24 x 24 and two of 24 x 12, and the MLP's row linear; fused gate and up are whole
    block = 24 * 24 * 2 + 24 * 12 * 2 + 20 * 24
    assert whole - part == 3 * block // 2


def test_verify_and_train_take_the_plan_of_a_class(tmp_path: Path) -> None:
    model = f"{FILE}:Planned(n_layer=3, n_head=4)"
    found = phalanx.verify(model, "tp2; dp2 tp2 zero1; pp2 tp2 1f1b:2")
    assert found.passed, found
    assert phalanx.check("tp2", model).shape.heads == 4


# ---- what is refused, with its place


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {"attn.c_attm": ColwiseParallel()},
            r"no linear .* is named attn\.c_attm",
        ),
        (
            {"mlp.c_fc": ColwiseParallel()},
            r"transformer\.h\.0\.mlp has no pair",
        ),
        ({"mlp": ColwiseParallel()}, r"transformer\.h\.0\.mlp is a Mlp"),
        ({"ln_1": SequenceParallel()}, r"ln_1 is planned as SequenceParallel"),
        ({}, "nothing says how this module is cut"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(
    plan: dict[str, Any], text: str
) -> None:
    with pytest.raises(phalanx.comm.RankFailed, match=text):
        launch(in_parts, 2, "gpt", "tp2", plan, backend="threads")


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    with pytest.raises(
        phalanx.comm.RankFailed, match="tp3 does not divide 4 heads"
    ):
        launch(in_parts, 3, "gpt", "tp3", GPT_PLAN, backend="threads")


def _mixing(world: World) -> None:
    model, data = plain_gpt.Grouped(over=True), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phalanx.prepare(
        model, optimizer, "tp2", loss=cross_entropy, example=data[0],
        tp_plan=GROUPED_PLAN, world=world,
    )  # fmt: skip


def test_a_plan_that_shards_what_its_module_mixes_is_found_by_a_trial() -> (
    None
):
    with pytest.raises(
        phalanx.comm.RankFailed, match="with this plan the loss"
    ):
        launch(_mixing, 2, backend="threads")


def test_check_tries_a_plan_too() -> None:
    with pytest.raises(LayoutError, match="with this plan the loss"):
        phalanx.check("tp2", f"{FILE}:GroupedPlanned(over=True)")
