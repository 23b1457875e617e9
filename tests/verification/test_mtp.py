"""Multi-token prediction is that of the paper, in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from phalanx.comm import World
from phalanx.layout import Layout, Shape, legal, stage_pieces
from phalanx.layout.kinds import one_block_of_each
from phalanx.models.ahead import look_ahead
from phalanx.parallel import build_model
from phalanx.training.parallelize import parallelize
from phalanx.verification import SHAPES, Trace, batch_of, verify
from phalanx.verification.exact import verify_exact
from phalanx.verification.reference import draw
from phalanx.verification.trial import program_in
from phalanx.verification.verify import worlds_over
from seeded import trained
from seeded.catch import setting_of

STEPS = 4
SHAPE = replace(SHAPES["gqa"], layers=2, mtp=2, mtp_weight=0.7)
# ours, and theirs
NAMES = {
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}


class PaperModel(nn.Module):
    """Section 2.2 of the DeepSeek-V3 report, with transformers' Llama blocks."""

    def __init__(self, shape: Shape, modules: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers + modules,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            rms_norm_eps=shape.eps,
            attn_implementation="sdpa",
        )
        self.llama, self.trunk = LlamaForCausalLM(config), shape.layers
        norm = partial(nn.RMSNorm, shape.hidden, eps=shape.eps)
        self.of_tokens = nn.ModuleList(norm() for _ in range(modules))
        self.of_hidden = nn.ModuleList(norm() for _ in range(modules))
        self.last_norms = nn.ModuleList(norm() for _ in range(modules))
        width = shape.hidden
        self.project = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(modules)
        )
        self.head_dim = shape.head_dim
        # Their norms compute in float32.
        for parent in list(self.llama.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, LlamaRMSNorm):
                    setattr(parent, name, norm())
        self.double()

    def losses(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Summed cross-entropies: of the next token, then of each module's."""
        llama, tokens = self.llama.model, batch["tokens"]
        times = torch.arange(tokens.shape[1])
        documents = batch.get("documents", torch.zeros_like(tokens))
        seen = documents.unsqueeze(2) == documents.unsqueeze(1)
        seen = seen & (times.unsqueeze(1) >= times)
        mask = torch.zeros(seen.shape, dtype=torch.float64)
        mask = mask.masked_fill(~seen, float("-inf")).unsqueeze(1)
        embedded = llama.embed_tokens(tokens)
        angles = self._angles(batch["positions"])

        def block(number: int, x: Tensor) -> Tensor:
            found: Any = llama.layers[number](
                x, attention_mask=mask, position_embeddings=angles
            )
            return found if isinstance(found, Tensor) else found[0]

        h = embedded
        for number in range(self.trunk):
            h = block(number, h)
        found = [self._loss(llama.norm(h), batch["targets"])]
        for module, project in enumerate(self.project):
            k = module + 1
            # Token i needs token i + k, which the last k of a row do not have.
            shape = tokens.shape[0], k
            later = torch.cat((tokens[:, k:], tokens.new_zeros(shape)), 1)
            targets = batch["targets"][:, k:]
            same = documents[:, k:] == documents[:, :-k]
            targets = torch.where(same, targets, -100)
            none = targets.new_full(shape, -100)
            targets = torch.cat((targets, none), 1)
            e = self.of_tokens[module](llama.embed_tokens(later))
            both = torch.cat((e, self.of_hidden[module](h)), -1)
            h = block(self.trunk + module, project(both))
            found.append(self._loss(self.last_norms[module](h), targets))
        return found

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # As transformers' own, which are in float32.
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64)
        half = positions.unsqueeze(-1) / 10000 ** (pairs / self.head_dim)
        angle = torch.cat((half, half), -1)
        return angle.cos(), angle.sin()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.llama.lm_head(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    def by_our_names(self) -> dict[str, Tensor]:
        theirs = dict(self.llama.named_parameters())
        found = {ours: theirs[name] for ours, name in OUTSIDE.items()}
        for number in range(len(self.llama.model.layers)):
            for ours, name in NAMES.items():
                key = f"model.layers.{number}.{name}.weight"
                found[f"layers.{number}.{ours}.weight"] = theirs[key]
        for module, project in enumerate(self.project):
            join = f"mtp.{module}"
            found[f"{join}.token_norm.weight"] = self.of_tokens[module].weight
            found[f"{join}.hidden_norm.weight"] = self.of_hidden[module].weight
            found[f"{join}.proj.weight"] = project.weight
            last = f"head.predicted.{module}.norm.weight"
            found[last] = self.last_norms[module].weight
        return found


def by_the_paper(start: Trace, packed: bool) -> list[dict[str, Tensor]]:
    """The weights after each of four AdamW steps of one process."""
    model = PaperModel(SHAPE, SHAPE.mtp)
    ours = model.by_our_names()
    with torch.no_grad():
        for name, weight in ours.items():
            weight.copy_(start.start[name])
    setting = setting_of(SHAPE)
    of: Any = setting.optimizer
    groups = [
        {"params": [w for w in ours.values() if w.dim() > 1], "weight_decay": of.decay},
        {"params": [w for w in ours.values() if w.dim() < 2], "weight_decay": 0.0},
    ]  # fmt: skip
    update = torch.optim.AdamW(groups, betas=(of.beta1, of.beta2), eps=of.eps)
    weights = []
    for step in range(STEPS):
        batch = dict(batch_of(SHAPE, step, packed=packed))
        main, *others = model.losses(batch)
        whole = main + SHAPE.mtp_weight * torch.stack(others).mean()
        update.zero_grad()
        (whole / (batch["targets"] != -100).sum()).backward()
        limit = setting.clip(step) or float("inf")
        nn.utils.clip_grad_norm_(ours.values(), limit)
        for group in update.param_groups:
            group["lr"] = setting.rate(step)
        update.step()
        weights.append({n: w.detach().clone() for n, w in ours.items()})
    return weights


@pytest.mark.parametrize("packed", [False, True])
def test_four_steps_are_those_of_the_paper_with_transformers_blocks(
    packed: bool,
) -> None:
    setting = replace(
        setting_of(SHAPE, steps=STEPS),
        batches=partial(batch_of, SHAPE, packed=packed),
    )
    layout = Layout.parse("pp2 cp2:2x1 tp2 seq 1f1b:3 fp64")
    found = trained(layout, SHAPE, setting)
    assert {*found.start} == {*PaperModel(SHAPE, 2).by_our_names()}
    for step, known in zip(
        found.steps, by_the_paper(found, packed), strict=True
    ):
        for name, weight in known.items():
            torch.testing.assert_close(
                step.weights[name], weight, rtol=0, atol=1e-9, msg=name
            )


def test_a_step_logs_the_mean_loss_of_the_modules() -> None:
    """Beside that of the next token, and the validation has the latter alone."""
    layout = Layout.parse("dp2 tp2 accum:2 fp64")
    setting = replace(
        setting_of(SHAPE, steps=1), batches=partial(batch_of, SHAPE)
    )
    made = partial(build_model, SHAPE)
    program = program_in(layout, made, setting)
    batch = dict(batch_of(SHAPE, 0))

    def part(world: World) -> tuple[float, tuple[float, ...], float | None]:
        of = parallelize(
            world,
            layout,
            made(),
            program,
            setting.optimizer,
            precision=setting.precision,
            seed=0,
        )
        rows = of.rows_of(SHAPE.batch)
        own = of.microbatches({n: x[rows] for n, x in batch.items()})
        validation = of.validator.mean_loss([own])
        result = of.trainer.step(own, 0.0)
        return result.total, result.metrics, validation

    model = PaperModel(SHAPE, SHAPE.mtp)
    with torch.no_grad():
        for name, weight in model.by_our_names().items():
            weight.copy_(draw(made(), name, 0))
        losses = torch.stack(model.losses(batch))
        losses = losses / (batch["targets"] != -100).sum()
    with worlds_over("threads")(layout.ranks) as run:
        found = run(part)
    for total, metrics, validation in found:
        assert total == pytest.approx(float(losses[0]), rel=1e-12)
        assert validation == pytest.approx(float(losses[0]), rel=1e-12)
        assert metrics == pytest.approx([float(losses[1:].mean())], rel=1e-12)


def test_exact_has_the_bits_of_one_process_or_is_refused() -> None:
    shape = replace(SHAPE, vocab=40)
    text = "dp2 pp2 zero2 1f1b:2 exact; tp2 seq exact:2"
    layouts = Layout.parse_many(text)
    verdicts = verify_exact(shape, layouts, precisions=("fp32",))
    assert [v.first_difference for v in verdicts] == ["", ""]
    (why,) = legal(Layout.parse("cp2 exact:1x2"), shape, batch=4)
    assert "does not cover mtp yet" in why.what


@pytest.mark.slow
def test_more_layouts_of_tp_have_the_bits_of_one_process() -> None:
    shape = replace(SHAPE, vocab=40)
    text = (
        "tp4 exact:4; pp2 tp2 seq zb-h1:2 exact:2; dp2 tp2 zero3 seq exact:4"
    )
    verdicts = verify_exact(shape, Layout.parse_many(text))
    assert not [v.first_difference for v in verdicts if not v.passed]


def test_a_row_ends_and_so_does_a_document() -> None:
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5]]),
        "targets": torch.tensor([[2, 3, -100, 5, 6]]),
        "documents": torch.tensor([[0, 0, 0, 1, 1]]),
    }
    found = look_ahead(batch, 2)
    tokens, targets = found["ahead_tokens"], found["ahead_targets"]
    assert tokens[..., 0].tolist() == [[2, 3, 0, 5, 0]]
    assert targets[..., 0].tolist() == [[3, -100, -100, 6, -100]]
    assert tokens[..., 1].tolist() == [[3, 0, 0, 0, 0]]
    assert targets[..., 1].tolist() == [[-100] * 5]


def test_modules_are_costed_as_one_of_each_kind() -> None:
    """Their blocks as those of their kind, the others at their own places."""
    shape = replace(SHAPES["ahead"], layers=8, dense_layers=1)
    few, equal = one_block_of_each(shape)
    # Without experts; with experts and a window of 5, and of all tokens.
    assert few.layers == 4 - 1
    assert few.mtp == 2
    assert len(equal) == shape.pieces
    last = equal[shape.layers]
    assert last == few.layers
    assert equal[1 + shape.layers :] == (4, last, 6, last, 8)


def test_stages_keep_modules_with_the_head() -> None:
    """Whatever the stages are, no hidden state but the last crosses between them."""
    shape = SHAPES["ahead"]
    assert shape.pieces == 1 + 2 + 2 * 2 + 1
    stages = stage_pieces(Layout.parse("pp2 stages:1-1"), shape)
    assert stages == (range(2), range(2, 8))


def test_layouts_in_bfloat16_keep_the_bounds_of_rounding() -> None:
    layouts = Layout.parse_many("dp2 tp2 seq zero1; pp2 ep2 1f1b:3")
    verdicts = verify(SHAPES["ahead"], layouts, dtype="bfloat16", steps=1)
    assert [v.first_difference for v in verdicts if not v.passed] == []
