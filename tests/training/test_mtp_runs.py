"""A run with multi-token prediction: its log, its checkpoints, its texts and its export."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from phalanx.cli import main
from phalanx.comm import World, launch
from phalanx.generate import Sampling
from phalanx.layout import Layout, Shape
from phalanx.parallel.model import decoder_of
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.text import open_generator, open_shared_generator

# DeepSeek-V3's parts.
MODEL = (
    "model={layers=2,hidden=16,heads=2,kv_heads=2,ffn=32,vocab=256,head_dim=12,kv_latent=8,"
    "q_latent=6,rope_dim=4,value_dim=6,experts=4,top_k=2,expert_ffn=8,shared_experts=1,"
    "dense_layers=1,scores='sigmoid',balance='bias',eps=1e-6,routed_scale=1.5,expert_groups=2,"
    "top_groups=1,mtp=2}"
)
SIZES = ("batch=4", "sequence=16", "validation.batches=0")
PROMPT = [100, 101, 102, 32, 115]


def trained(out: Path, steps: int, layout: str, *more: str) -> None:
    words = [MODEL, *SIZES, f"steps={steps}", f"out={out}", *more]
    words += [f"layout={layout}", "--backend", "threads"]
    assert main(["train", *words]) == 0


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    path = run / "checkpoints" / f"step-{step:08}"
    with TensorReader(path, read_manifest(path)) as reader:
        return {
            name: reader.whole(each)
            for (kind, name), each in reader.tensors.items()
            if kind == "weight"
        }


def written(world: World, source: str, layout: Layout) -> list[int]:
    generator = open_shared_generator(world, source, layout)
    greedy = generator.generate(PROMPT, 8, Sampling(temperature=0))
    return [token for (token,) in greedy]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mtp") / "run"
    trained(out, 2, "dp2 pp2 zero1")
    return out


def test_a_run_logs_both_losses(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"step"' in line]
    both = [(x["loss"], x["mtp_loss"]) for x in steps if x["event"] == "step"]
    assert len(both) == 2
    # Untrained, each token costs log 256; fewer tokens have one to predict.
    for loss, ahead in both:
        assert loss == pytest.approx(5.545, rel=0.02)
        assert ahead == pytest.approx(5.545 * 14.5 / 16, rel=0.02)


def test_an_export_has_the_published_names_and_transformers_ignores_them(
    run: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    assert main(["checkpoint", "export", str(run), "--to", str(hub)]) == 0
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        hub, output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    config = json.loads((hub / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 2
    files = [load_file(path) for path in hub.glob("*.safetensors")]
    theirs = {name: x for file in files for name, x in file.items()}
    ours = weights_of(run, 2)
    # The blocks behind the last one belong to the modules.
    for module in range(2):
        block = f"model.layers.{2 + module}"
        names = {
            "eh_proj": f"mtp.{module}.proj",
            "enorm": f"mtp.{module}.token_norm",
            "hnorm": f"mtp.{module}.hidden_norm",
            "shared_head.norm": f"head.predicted.{module}.norm",
            "shared_head.head": "head.output",
            "embed_tokens": "embed.tokens",
            "self_attn.o_proj": f"layers.{2 + module}.attn.wo",
        }
        for name, own in names.items():
            assert theirs[f"{block}.{name}.weight"].equal(
                ours[f"{own}.weight"]
            )
    saved = str(run / "checkpoints" / "step-00000002")
    alone = open_generator(saved).generate(PROMPT, 8, Sampling(temperature=0))
    tokens = [token for (token,) in alone]
    found = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found[0, len(PROMPT) :].tolist() == tokens
    for text in ("tp2", "pp2"):
        layout = Layout.parse(text)
        every = launch(written, 2, saved, layout, backend="threads")
        assert every == [tokens] * 2


def test_a_module_of_transformers_computes_what_ours_does(
    run: Path, tmp_path: Path
) -> None:
    """transformers' own class loads the exported norms and gives our logits.

    It is given the state that ours takes: that of the last block, before its norm.
    """
    hub = tmp_path / "hub"
    assert main(["checkpoint", "export", str(run), "--to", str(hub)]) == 0
    whole: Any = AutoModelForCausalLM.from_pretrained(
        hub, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    # transformers looks for modules in block 61, as in the published model.
    whole._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]
    # It raises if a weight of a module is missing.
    theirs: Any = MtpModel.from_pretrained(whole).eval()
    ours = weights_of(run, 2)
    for module, layer in enumerate(theirs.layers):
        named = {
            "token_norm": layer.enorm,
            "hidden_norm": layer.hnorm,
            "proj": layer.eh_proj,
        }
        for name, own in named.items():
            assert own.weight.equal(
                ours[f"mtp.{module}.{name}.weight"].double()
            )
        last = ours[f"head.predicted.{module}.norm.weight"]
        assert layer.post_norm.weight.equal(last.double())
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (1, 13), generator=draw)
    known, later = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        model = decoder_of(Shape.of(tomllib.loads(MODEL)["model"])).double()
        # The modules share the embedding, which is stored once.
        loaded = model.load_state_dict(
            {n: x.double() for n, x in ours.items()}, strict=False
        )
        assert loaded.missing_keys == [
            f"mtp.{module}.tokens.weight" for module in range(2)
        ]
        assert not loaded.unexpected_keys
        x = model.embed(known, positions)
        for block in model.layers[:2]:
            x = block(x, positions=positions)
        joined: Any = model.mtp[0](x, later.unsqueeze(-1))
        y = model.layers[2](joined["x"], positions=positions)
        head: Any = model.head
        logits = head.output(head.predicted[0]["norm"](y))
        mask = torch.full((12, 12), -torch.inf, dtype=x.dtype).triu(1)
        found = theirs.layers[0](
            whole.model.embed_tokens(later),
            x,
            position_embeddings=whole.model.rotary_emb(x, positions),
            attention_mask=mask[None, None],
            position_ids=positions,
            past_key_values=None,
        )
        wanted = whole.lm_head(found)
    assert (logits - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(whole, 4, "dp2", "checkpoint.every=2")
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000004")
    trained(parts, 4, "pp2 dp2 zero1", "checkpoint.every=2")
    known, found = weights_of(whole, 4), weights_of(parts, 4)
    assert {*known} == {*found}
    for name, weight in known.items():
        # Adam's first steps turn rounding of float32 into parts of the rate.
        assert torch.allclose(found[name], weight, atol=1e-4), name
