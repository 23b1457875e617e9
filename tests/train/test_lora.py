"""Frozen weights and low-rank adapters, against `peft` and `transformers` themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from test_families import VOCAB, saved, theirs, widened
from torch import Tensor, nn

from phalanx.comm import launch
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Run, RunError
from phalanx.parallel import build_model, start
from phalanx.parallel.model import is_lora
from phalanx.train.checkpoint_adapter import export_adapter
from phalanx.train.checkpoint_exchange import export_weights
from phalanx.train.checkpoint_format import CheckpointError, read_manifest
from phalanx.train.checkpoint_load import hash_tensors
from phalanx.train.loop import train
from phalanx.train.rank import batches_of

R, ALPHA = 3, 5.0
# Five sequences of 23 tokens: no axis divides either.
LAYOUTS = (
    "dp2 tp2 seq zero3 fp64",
    "pp2 cp2 zero1 1f1b:2 fp64",
    "dp2 cp2:ulysses zero2 accum:2 fp64",
    "tp4 fp64",
)
# peft's names of what has adapters, by family; of packed linears all parts have them.
TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
WHERE = {"llama": LAYOUTS[:3], "qwen2": LAYOUTS[3:]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tokens.bin"
    draw = torch.Generator().manual_seed(3)
    torch.randint(0, VOCAB, (4000,), generator=draw).numpy().astype("<u2").tofile(path)
    return path


def words(folder: Path, corpus: Path, *more: str) -> tuple[str, ...]:
    return (
        f"model=hf:{folder}", f"data={corpus}", "batch=5", "sequence=23", "steps=4", "seed=7",
        "document_masks=false", "optimizer.lr=1e-2", "optimizer.schedule=constant",
        "optimizer.eps=1e-3", "validation.batches=0", f"lora.r={R}", f"lora.alpha={ALPHA}", *more,
    )  # fmt: skip


def their_steps(model: Any, run: Run, targets: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the adapters at the end, of peft under torch's AdamW on one process."""
    batches, o, plain = batches_of(run, run.shape), run.optimizer, build_model(run.shape)
    starts = {name: start(plain, name, run.seed) for name in plain.weights if is_lora(name)}
    with widened():
        wide: Any = transformers.AutoModelForCausalLM.from_config(
            model.config, attn_implementation="eager"
        )
        wide.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
        config = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=targets, bias="none")
        wide = peft.get_peft_model(wide, config)
        weights = {n: p for n, p in wide.named_parameters() if p.requires_grad}
        ours = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
        with torch.no_grad():
            for name, weight in weights.items():
                _, *_, layer, _, module, which, _, _ = name.split(".")
                own = ours.get(module, module.removesuffix("_proj"))
                part = "attn" if own[0] == "w" else "mlp"
                path = f"layers.{layer}.{part}.{own}.lora.{which[-1].lower()}.weight"
                weight.copy_(starts[path])
        update = torch.optim.AdamW(
            weights.values(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
        )
        losses = []
        for step in range(run.steps):
            batch = batches.batch(step)
            scores = wide(batch["tokens"]).logits
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten())
            update.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights.values(), o.clip)
            update.step()
            losses.append(float(loss.detach()))
    return losses, {name.replace(".default", ""): x.detach() for name, x in weights.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_four_steps_in_every_layout_are_those_of_peft(
    name: str, tmp_path: Path, corpus: Path
) -> None:
    model, targets = theirs(name), TARGETS[name]
    folder, wanted = saved(model, tmp_path / "hub"), None
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    for number, layout in enumerate(WHERE[name]):
        chosen = f"lora.targets={json.dumps(targets)}"
        more = (chosen, f"layout={layout}", f"out={tmp_path}/{number}")
        run = Run.parse("", "run", words(folder, corpus, *more))
        losses, weights = wanted = wanted or their_steps(model, run, targets)
        outcomes = launch(train, 4, run, layout, True, backend="threads")
        assert outcomes[0].loss == pytest.approx(losses[-1], rel=1e-9)
        path = run.checkpoints / "step-00000004"
        adapter, merged = tmp_path / f"adapter-{number}", tmp_path / f"merged-{number}"
        export_adapter(path, adapter)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        tuned: Any = peft.PeftModel.from_pretrained(base, adapter)
        found = {n.replace(".default", ""): p for n, p in tuned.named_parameters() if "lora" in n}
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            error = (found[key] - weight).abs().max() / weight.abs().max()
            assert error < 1e-9, (layout, key, error)
            assert weight.abs().max() > 1e-3, "it was trained"
        export_weights(path, merged)
        again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
        with torch.no_grad():
            first, second = tuned(tokens).logits, again(tokens).logits
            plain = tuned.get_base_model()
            with tuned.disable_adapter():
                before = tuned(tokens).logits
        assert plain is base
        assert (first - second).abs().max() < 1e-9 * first.abs().max()
        assert (first - before).abs().max() > 1e-4, "the adapter does something"


@pytest.mark.parametrize(
    ("name", "targets"),
    [("phi3", ["wq", "wv", "up", "wo"]), ("gpt2", ["wk", "up", "down", "wo"])],
)
def test_an_adapter_of_packed_linears_gives_the_merged_logits(
    name: str, targets: list[str], tmp_path: Path, corpus: Path
) -> None:
    folder = saved(theirs(name), tmp_path / "hub")
    more = (f"lora.targets={json.dumps(targets)}", f"out={tmp_path}/run", "steps=2")
    run = Run.parse("", "run", words(folder, corpus, "layout=tp2", *more))
    launch(train, 2, run, "tp2", True, backend="threads")
    path = run.checkpoints / "step-00000002"
    export_weights(path, tmp_path / "merged")
    export_adapter(path, tmp_path / "adapter")
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        before = base(tokens).logits
        tuned: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        merged = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float64
        )
        first, second = tuned(tokens).logits, merged(tokens).logits
    assert (first - second).abs().max() < 2e-6 * first.abs().max()
    assert (first - before).abs().max() > 1e-3, "the adapter does something"
