"""Sums over ranks that are missing, made twice or made over the wrong axis, found without a step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx.verification.placement as placement
from phalanx.comm import Work, World, regions
from phalanx.layout import Layout, Shape
from phalanx.models import token_loss
from phalanx.parallel import build_model, groups, local, tensor
from phalanx.parallel.exchange import Choices
from phalanx.program import Op
from phalanx.training.executor import Executor
from phalanx.verification import SHAPES, covering, every_layout
from phalanx.verification.placement import placement_faults
from seeded.fault import FAULTS, swapped

# Of the seeded faults those that are an error of a sum over ranks, with words of what is said.
SUMS = {
    "column region: input gradients are not summed": "gradient of the input of head was not summed over tp",
    "row region: outputs are not summed": "0F0 (forward of embed, microbatch 0): the output of embed",
    "seq: a region's output is scattered but not summed": "the output of embed was not summed over tp",
    "seq: gathered input keeps only its own gradient": "takes its part of what was not summed over tp",
    "row bias is added on every rank": "counts what all its ranks have alike once for each",
    "seq: norm gradients are not summed over tp": "gradient of head.norm.weight was not summed over tp",
    "q and k norms: gradients of other heads are missing": "attn.q_norm.weight was not summed over tp",
    "norms are summed over tp although all ranks did the same work": "a sum over tp of what is the same",
    "replicated k and v: gradients of other heads are missing": "attn.wk.weight was not summed over tp",
    "replicas of a shard are not summed (HSDP)": "was not summed over dp.replicate",
    "each rank divides by its own token count": "the count of tokens was not summed over dp.shard",
    "the norm counts copied weights on every tp rank": "the norm counts layers.0.attn_norm.weight 2 times",
    "each rank clips by its own norm": "the norm was not summed over tp",
    "a tied weight's gradients are not summed over the stages": "embed.tokens.weight was not summed over pp",
    "gradients are summed over dp but not over cp": "was not summed over cp.ring",
    "seq: token counts are not summed over tp": "router.bias was not summed over tp",
    "tp: a gate's gradient covers only a part of each expert": "gradient of the input of layers.1",
    "experts: the norm excludes them": "the norm counts layers.1.mlp.router.weight 0 times",
    "ep: experts are summed over the dense group": "which ep cuts, is summed over it",
    "ep: gradients of experts are not summed over dp": "routed.gate was not summed over dp.shard",
    "experts:tp: gradients of experts are summed over tp": "which tp cuts, is summed over it",
    "experts:cp: experts are summed over cp": "which cp.ring cuts, is summed over it",
    "ep: the token count omits the ranks of ep": "the count of tokens was not summed over ep",
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_a_seeded_fault_that_is_an_error_of_a_sum_is_found_and_named(
    name: str,
) -> None:
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
    ("experts", "pp2 tp2 seq experts:tp dualpipe-v:3 overlap"), ("olmo", "tp4"),
    ("olmo", "dp2 tp4 seq zero1"),  # norms over heads of k that ranks share
]  # fmt: skip


@pytest.mark.parametrize("name, layout", MANY)
def test_nothing_is_found_in_layouts_that_equal_one_process(
    name: str, layout: str
) -> None:
    assert (
        placement_faults(
            partial(build_model, SHAPES[name]), Layout.parse(layout)
        )
        == ()
    )


def test_tokens_of_ranks_of_tp_that_do_not_reach_all_experts_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = groups.open_groups

    def opened(
        world: World, layout: Layout, *rest: object, **more: object
    ) -> groups.Groups:
        found = right(world, layout, *rest, **more)  # type: ignore[arg-type]
        alone = (
            world.split(name, layout.mesh.groups(["ep"]))
            for name in ("few", "fewer")
        )
        return replace(
            found, **dict(zip(("ep", "routes"), alone, strict=True))
        )

    monkeypatch.setattr(local, "open_groups", opened)
    layout = Layout.parse("ep2 tp2 seq experts:tp")
    found = placement_faults(partial(build_model, SHAPES["experts"]), layout)
    assert any(
        "the output of layers.1 was not summed over tp" in each
        for each in found
    ), found


def summed_forwards_only(self: tensor.CutRMSNorm, x: Tensor) -> Tensor:
    squares = self.group.share(x.square().sum(-1, keepdim=True), self.copies)
    squares = regions.reduce(squares, self.group)
    return x * torch.rsqrt(squares / self.width + self.eps) * self.weight


def counted_by_each(self: tensor.CutRMSNorm, x: Tensor) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    squares = regions.copy(regions.reduce(squares, self.group), self.group)
    return x * torch.rsqrt(squares / self.width + self.eps) * self.weight


def of_own_words(
    self: tensor.VocabularyCrossEntropy, logits: Tensor, targets: Tensor
) -> Tensor:
    return token_loss(logits, targets, self.words._replace(agree=None))


def with_sums_of_own_words(
    self: tensor.VocabularyCrossEntropy, logits: Tensor, targets: Tensor
) -> Tensor:
    """The largest logit is agreed on, and the sums are not."""

    def agree(x: Tensor, op: str) -> None:
        if op == "max":
            assert self.words.agree is not None
            self.words.agree(x, op)

    return token_loss(logits, targets, self.words._replace(agree=agree))


def on_every_rank(self: Executor, y: Tensor) -> None:
    self.loss += y


right_agree = Executor._agree


def of_every_replica(self: Executor, op: Op) -> Any:
    """The norm as if each replica were the first one."""
    groups = [unit.groups.replica for unit in self.local.units.values()]
    with placement._as_rank(0, groups):
        return right_agree(self, op)


def of_own_tokens(choices: Choices, groups: object) -> Work:
    return Work()


Mistake = tuple[Any, str, Any]
MISTAKES: dict[str, tuple[str, str, Mistake, str]] = {
    "wide norm: its sum is made forwards only": (
        "olmo", "tp2", (tensor.CutRMSNorm, "forward", summed_forwards_only),
        "the gradient of a sum was not summed over tp",
    ),
    "wide norm: so it is where ranks share heads": (
        "olmo", "dp2 tp4 zero1", (tensor.CutRMSNorm, "forward", summed_forwards_only),
        "the gradient of a sum was not summed over tp",
    ),
    "wide norm: features that ranks share are counted by each": (
        "olmo", "tp4", (tensor.CutRMSNorm, "forward", counted_by_each),
        "ranks that share a head of k and v of what is the same",
    ),
    "cross-entropy of a rank's own words": (
        "gqa", "tp2", (tensor.VocabularyCrossEntropy, "forward", of_own_words),
        "the loss was not summed over tp",
    ),
    "cross-entropy whose sums are of a rank's own words": (
        "gpt", "dp2 tp2 seq", (tensor.VocabularyCrossEntropy, "forward", with_sums_of_own_words),
        "the loss was not summed over tp",
    ),
    "the loss is counted on every rank of tp": (
        "gqa", "pp2 tp2", (Executor, "_add_loss", on_every_rank),
        "the loss is counted on every rank of tp",
    ),
    "the norm counts every replica": (
        "gqa", "dp2", (Executor, "_agree", of_every_replica),
        "the norm counts layers.0 on every replica along dp.shard",
    ),
    "the norm counts every replica of HSDP": (
        "gqa", "dp2x2 tp2 zero2", (Executor, "_agree", of_every_replica),
        "the norm counts head on every replica along dp.replicate",
    ),
    "a sequence's loss has the counts of a part of it": (
        "latent", "cp2", (Choices, "sum", of_own_tokens),
        "a router's counts of a sequence were not summed over cp.ring",
    ),
    "seq: a sequence's loss uses the counts of one rank": (
        "latent", "tp2 seq", (Choices, "sum", of_own_tokens),
        "a router's counts of a sequence were not summed over tp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_loss_a_norm_or_a_statistic_of_a_part_is_found_and_named(
    name: str,
) -> None:
    shape, text, mistake, words = MISTAKES[name]
    make, layout = partial(build_model, SHAPES[shape]), Layout.parse(text)
    assert placement_faults(make, layout) == ()
    with swapped(*mistake):
        found = placement_faults(make, layout)
    assert any(words in each for each in found), found


def test_counts_of_a_batch_over_some_of_its_ranks_are_found() -> None:
    shape = replace(SHAPES["latent"], sequence_loss=0.0, batch_loss=0.3)
    make = partial(build_model, shape)
    layout = Layout.parse("dp2 cp2 tp2 seq")
    assert placement_faults(make, layout) == ()
    with swapped(
        Choices,
        "sum",
        lambda self, groups: right_sum(self, replace(groups, batch=groups.tp)),
    ):
        found = placement_faults(make, layout)
    assert any(
        "a router's counts of the batch were not summed over" in each
        for each in found
    )


right_sum = Choices.sum


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
    for text in (
        "dp2 pp2 tp8 seq zero1 1f1b:4",
        "dp64 pp8 tp8 seq zero1 1f1b:64",
    ):
        counts.append(0)
        assert placement_faults(make, Layout.parse(text)) == ()
    assert counts[1] <= 4 * counts[0]
