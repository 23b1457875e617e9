"""Weights to and from Hugging Face, against `transformers` itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from checkpoint_worlds import hash_tensors, trained
from torch import Tensor, nn

from phalanx.cli.checkpoint import run as command
from phalanx.cli.train import run as train_command
from phalanx.cli.usage import UsageError
from phalanx.layout import Shape
from phalanx.layout.codec import toml_value
from phalanx.layout.families import FAMILIES, config_of, family_of, sources
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Run
from phalanx.models import Decoder, RopeScaling
from phalanx.parallel import build_model
from phalanx.training import checkpoint_exchange
from phalanx.training.checkpoint_exchange import export_weights, import_weights
from phalanx.training.checkpoint_format import (
    CheckpointError,
    read_manifest,
    verify_checkpoint,
    write_file,
)
from phalanx.training.checkpoint_load import TensorReader, table_of
from phalanx.training.rank import batches_of
from phalanx.verification import SHAPES

# Heads wider than hidden / heads, fewer key heads, an odd vocabulary.
BASE = Shape(
    "small", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=40, vocab=61, sequence=32,
    rope_theta=5000.0, eps=1e-6,
)  # fmt: skip
LIKE = {
    "llama": replace(BASE, tied=True),
    "mistral": BASE,
    "qwen2": replace(BASE, bias="qkv", head_dim=8),
    "qwen3": replace(BASE, qk_norm=True),
    # Of the eight frequencies some stay, some are blended, some slow down.
    "llama-3.2": replace(
        BASE,
        tied=True,
        rope_factor=8.0,
        rope_low=1.0,
        rope_high=4.0,
        rope_original=64,
    ),
}
FAMILY = {"llama-3.2": "llama"}
THEIRS = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "llama-3.2": "LlamaForCausalLM",
}  # fmt: skip
# What Hugging Face calls each weight of ours, written by hand.
PAIRS = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.wq.weight": "self_attn.q_proj.weight",
    "attn.wk.weight": "self_attn.k_proj.weight",
    "attn.wv.weight": "self_attn.v_proj.weight",
    "attn.wo.weight": "self_attn.o_proj.weight",
    "attn.wq.bias": "self_attn.q_proj.bias",
    "attn.wk.bias": "self_attn.k_proj.bias",
    "attn.wv.bias": "self_attn.v_proj.bias",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(checkpoint_exchange, "SHARD", 30_000)  # several files


def ours(path: Path, tokens: Tensor) -> Tensor:
    """The logits of a plain decoder with the weights of a checkpoint."""
    manifest = read_manifest(path)
    shape = manifest.shape
    assert shape is not None
    decoder = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, ffn=shape.ffn,
        rope_theta=shape.rope_theta,
        rope_scaling=None if shape.rope_factor == 1 else RopeScaling(
            shape.rope_factor, shape.rope_low, shape.rope_high, shape.rope_original
        ),
        gated=shape.gated, tied=shape.tied,
        bias=shape.bias, qk_norm=shape.qk_norm, eps=shape.eps,  # type: ignore[arg-type]
    )  # fmt: skip
    weights = dict(decoder.named_parameters())
    with TensorReader(path, manifest) as reader:
        for tensor in manifest.tensors:
            if tensor.kind == "weight":
                weights.pop(tensor.name).data = reader.whole(tensor).float()
    assert not weights
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        x = decoder.embed(tokens, positions)
        for block in decoder.layers:
            x = block(x, positions=positions)
        return decoder.head.logits(x)


def theirs(family: str) -> Any:
    """A small random model of theirs, every weight of it moved off its start."""
    shape = LIKE[family]
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_factor != 1:
        rope |= {
            "rope_type": "llama3", "factor": shape.rope_factor, "low_freq_factor": shape.rope_low,
            "high_freq_factor": shape.rope_high,
            "original_max_position_embeddings": shape.rope_original,
        }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        FAMILY.get(family, family), vocab_size=shape.vocab, hidden_size=shape.hidden,
        intermediate_size=shape.ffn, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.sequence, rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied, sliding_window=None,
        rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = (
        transformers.AutoModelForCausalLM.from_config(config).float().eval()
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("family", LIKE)
def test_imported_weights_give_the_logits_of_transformers(
    family: str, tmp_path: Path
) -> None:
    model = theirs(family)
    model.save_pretrained(tmp_path / "hub")
    path = import_weights(tmp_path / "hub", tmp_path / "run")
    assert verify_checkpoint(path) == []
    shape = read_manifest(path).shape
    assert shape == replace(LIKE[family], name=FAMILY.get(family, family))
    tokens = torch.randint(
        0, 61, (2, 20), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        wanted = model(tokens).logits
    found = ours(path, tokens)
    assert wanted.abs().max() > 1
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", LIKE)
def test_exported_weights_give_the_same_logits_in_transformers(
    family: str, tmp_path: Path
) -> None:
    shape = replace(LIKE[family], batch=6)
    trained(tmp_path / "run", "dp2 tp2 zero3", shape=shape)
    path = tmp_path / "run" / "step-00000002"
    export_weights(
        path, tmp_path / "hub", family=FAMILY.get(family, family), dtype="F32"
    )
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        .float()
        .eval()
    )
    assert type(model).__name__ == THEIRS[family]
    tokens = torch.randint(
        0, 61, (2, 20), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        wanted = model(tokens).logits
    found = ours(path, tokens)
    assert wanted.abs().max() > 0.01
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", LIKE)
def test_every_exported_tensor_is_the_one_of_that_name(
    family: str, tmp_path: Path
) -> None:
    """A swap in the table of names would survive export and import; here it does not."""
    shape = replace(LIKE[family], batch=6)
    trained(tmp_path / "run", "tp2", shape=shape)
    path = tmp_path / "run" / "step-00000002"
    export_weights(
        path, tmp_path / "hub", family=FAMILY.get(family, family), dtype="F32"
    )
    exported: dict[str, Tensor] = {}
    for file in (tmp_path / "hub").glob("*.safetensors"):
        exported |= safetensors.torch.load_file(file)
    manifest = read_manifest(path)
    with TensorReader(path, manifest) as reader:
        for tensor in manifest.tensors:
            if tensor.kind != "weight":
                continue
            layer, _, inner = tensor.name.removeprefix("layers.").partition(
                "."
            )
            name = (
                PAIRS.get(tensor.name)
                or f"model.layers.{layer}.{INNER[inner]}"
            )
            assert torch.equal(
                exported.pop(name), reader.whole(tensor).float()
            ), name
    assert not exported


@pytest.mark.parametrize("family", LIKE)
def test_what_is_exported_and_imported_is_the_same_to_the_bit(
    family: str, tmp_path: Path
) -> None:
    shape = replace(LIKE[family], batch=6)
    trained(tmp_path / "run", "pp2 tp2", shape=shape)
    path = tmp_path / "run" / "step-00000002"
    files = export_weights(
        path, tmp_path / "hub", family=FAMILY.get(family, family)
    )
    assert len(files) > 4, "several files and an index"
    back = import_weights(tmp_path / "hub", tmp_path / "back")
    weights = {
        k: v for k, v in hash_tensors(path).items() if k.startswith("weight/")
    }
    assert hash_tensors(back) == weights
    assert read_manifest(back).shape == replace(
        shape, name=FAMILY.get(family, family), batch=8
    )


def test_a_shape_that_is_none_of_theirs_is_refused_with_all_reasons() -> None:
    wrong = replace(SHAPES["gpt"], bias="none", qk_norm=True)
    with pytest.raises(
        ValueError,
        match=r'for gpt2 bias would be "all", not "none"; qk_norm would',
    ):
        family_of(wrong)
    with pytest.raises(
        ValueError, match=r"for qwen2 qk_norm would be false, not true"
    ):
        family_of(SHAPES["qwen"])
    with pytest.raises(
        ValueError, match=r"is no llama: qk_norm would be false, not true"
    ):
        family_of(LIKE["qwen3"], "llama")
    assert family_of(SHAPES["gpt"]) == "gpt2"
    assert family_of(SHAPES["olmo"]) == "olmo2"
    with pytest.raises(ValueError, match="windows would have one size"):
        family_of(SHAPES["gemma"])


def hub(folder: Path) -> Path:
    """A folder as theirs, of one file, without their library."""
    shape = replace(BASE, layers=1)
    ours = build_model(shape).weights
    where = sources(FAMILIES["llama"], ours)
    names = {
        where[name].name: torch.zeros(weight.shape)
        for name, weight in ours.items()
    }
    folder.mkdir()
    write_file(folder / "model.safetensors", names)
    config = config_of(shape, "llama", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps(said))

    return change


def index(name: str) -> Callable[[Path], None]:
    said = {"weight_map": {"model.norm.weight": name}}
    return lambda f: (
        (f / "model.safetensors.index.json").write_text(json.dumps(said))
        and None
    )


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another model": (config(model_type="nosuch"), "no code for 'model_type' 'nosuch'"),
    "a model with code": (
        config(model_type="own", auto_map={"AutoConfig": "hostile.Config"}),
        r"'own'\. Code that it names \(auto_map\) is not run",
    ),
    "quantized weights": (config(quantization_config={"bits": 4}), "its weights are quantized"),
    "stretched rope": (config(rope_parameters={"rope_type": "longrope"}), "stretched by 'longrope'"),
    "scaled rope": (
        config(rope_parameters=None, rope_scaling={"type": "linear"}), "linear rope has no number for f",
    ),
    "llama3 rope without numbers": (
        config(rope_parameters={"rope_type": "llama3"}), "no number for factor, low_freq_factor, hi",
    ),
    "rope on half of a head": (
        config(rope_parameters={"partial_rotary_factor": 0.5}), "turns a part of each head",
    ),
    "windowed layers": (config(layer_types=["sliding_attention"]), "sliding window"),
    "other layers": (config(layer_types=["chunked_attention"]), "has blocks of chunked_attention"),
    "too many layers": (config(layer_types=["full_attention"] * 2), "names 2 of 1 blocks"),
    "other windows": (config(model_type="gemma3_text", use_bidirectional_attention=True), "later"),
    "biases": (config(attention_bias=True), "biases in attention"),
    "another activation": (config(hidden_act="gelu"), "its activation is 'gelu'"),
    "no size": (config(hidden_size=None), "hidden_size = null is nothing"),
    "a text for a size": (config(vocab_size="61"), 'vocab_size = "61" is text'),
    "a text for a number": (config(rope_theta="x"), 'rope_theta = "x" is text'),
    "more layers": (config(num_hidden_layers=2), "layers.1.* is missing"),
    "fewer heads": (config(num_attention_heads=2), r"q_proj.weight is \[64, 32\], \[32, 32\] is"),
    "heads that do not divide": (config(num_key_value_heads=3), "does not divide"),
    "a name that climbs": (index("../model.safetensors"), "is not plain"),
    "an absolute name": (index("/etc/passwd"), "is not plain"),
    "a file that is not there": (index("other.safetensors"), "No such file"),
    "pickled weights": (pickled, "pickled weights .* are not opened"),
    "a link out": (linked, "link out of its folder"),
    "a truncated file": (lambda f: os.truncate(f / "model.safetensors", 9000), "its header describes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_imported_is_refused_and_nothing_is_left(
    kind: str, tmp_path: Path
) -> None:
    change, words = REFUSED[kind]
    folder = hub(tmp_path / "hub")
    change(folder)
    with pytest.raises(ValueError, match=words):
        import_weights(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_shows_verifies_exports_and_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = str(hub(tmp_path / "hub")), str(tmp_path / "run")
    assert command(["import", folder, "--out", run]) == 0
    assert "wrote" in capsys.readouterr().out
    assert command(["show", run]) == 0
    assert "parameters  " in capsys.readouterr().out
    assert command(["show", run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["shape"], told["parameters"]) == (
        0,
        "llama",
        BASE_ONE,
    )
    assert command(["verify", run]) == 0
    assert (
        command(
            ["export", run, "--to", str(tmp_path / "bf16"), "--dtype", "bf16"]
        )
        == 0
    )
    again = read_manifest(
        import_weights(tmp_path / "bf16", tmp_path / "again")
    )
    assert {tensor.dtype for tensor in again.tensors} == {"BF16"}
    file = next(
        (tmp_path / "run" / "checkpoints" / "step-00000000").glob("rank-*")
    )
    os.truncate(file, 900)
    capsys.readouterr()
    assert command(["verify", run]) == 1
    assert "has 900 bytes" in capsys.readouterr().out
    assert command(["export", run, "--to", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match=f"Write hf:{folder}"):
        command(["show", folder])
    with pytest.raises(UsageError, match="required: --out"):
        command(["import", folder])


BASE_ONE = replace(BASE, layers=1).total


# ---- what begins from an import: the help's own example


def test_a_run_begins_from_imported_weights_without_their_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.2's own form of config: tied, rope stretched, `rope_scaling` beside `rope_theta`."""
    hub, run = tmp_path / "hub", str(tmp_path / "run")
    shape = replace(LIKE["llama-3.2"], vocab=256)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=32,
        rms_norm_eps=shape.eps, tie_word_embeddings=True, rope_theta=shape.rope_theta,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(hub)
    said = json.loads((hub / "config.json").read_text())
    rope = said.pop("rope_parameters")
    said |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (hub / "config.json").write_text(json.dumps(said))
    assert command(["import", str(hub), "--out", run]) == 0
    words = [
        f"out={run}",
        "steps=1",
        "batch=2",
        "layout=fp32",
        "validation.batches=0",
    ]
    assert train_command([*words, "optimizer.lr=1e-9"]) == 0
    assert "model: 'llama' with 3 layers" in capsys.readouterr().out
    kept = read_manifest(Path(run, "checkpoints", "step-00000001")).shape
    assert kept is not None
    assert replace(kept, batch=8) == replace(shape, name="llama")
    # The loss of the first step is transformers' own on the same batch.
    (step,) = [
        r
        for r in read_journal(Path(run, "metrics.jsonl"))
        if r["event"] == "step"
    ]
    wanted = Run.parse(
        "",
        "run",
        ("model={layers=1,hidden=8,vocab=256,sequence=32}", "batch=2"),
    )
    batch = batches_of(wanted, wanted.shape).batch(0)
    counted = batch["targets"] >= 0
    documents = batch.get("documents", torch.zeros_like(batch["tokens"]))
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    mask = (
        torch.zeros(same.shape)
        .masked_fill(~same.tril(), -torch.inf)
        .unsqueeze(1)
    )
    with torch.no_grad():
        logits = model(
            batch["tokens"],
            attention_mask=mask,
            position_ids=batch["positions"],
        ).logits
    loss = torch.nn.functional.cross_entropy(
        logits[counted], batch["targets"][counted]
    )
    assert step["loss"] == pytest.approx(float(loss), rel=1e-5)
    # Sizes that are given must be those of the checkpoint.
    sizes = toml_value(table_of(replace(LIKE["llama"], vocab=256)))
    with pytest.raises(
        CheckpointError, match=r"rope_factor: 8\.0 in the checkpoint, 1\.0 in"
    ):
        train_command([*words, "steps=2", f"model={sizes}"])
