"""Weights to and from Hugging Face, against `transformers` itself where it is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worlds import SHAPE, trained
from torch import Tensor, nn

from phalanx.cli.checkpoint import run as command
from phalanx.cli.usage import UsageError
from phalanx.layout import Shape
from phalanx.models import Decoder
from phalanx.train import checkpoint_exchange
from phalanx.train.checkpoint_exchange import export_weights, family_of, import_weights
from phalanx.train.checkpoint_file import CheckpointError, write_file
from phalanx.train.checkpoint_read import Reader, hash_tensors, read_manifest, verify_checkpoint
from phalanx.verify.cases import SHAPES

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
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(checkpoint_exchange, "SHARD", 30_000)  # several files


def ours(path: Path, tokens: Tensor) -> Tensor:
    """The logits of a plain decoder with the weights of a checkpoint."""
    manifest = read_manifest(path)
    shape = manifest.progress.shape
    assert shape is not None
    decoder = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, ffn=shape.ffn,
        rope_theta=shape.rope_theta, gated=shape.gated, tied=shape.tied,
        bias=shape.bias, qk_norm=shape.qk_norm, eps=shape.eps,  # type: ignore[arg-type]
    )  # fmt: skip
    weights = dict(decoder.named_parameters())
    with Reader(path, manifest) as reader:
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
    transformers = pytest.importorskip("transformers")
    shape = LIKE[family]
    config = transformers.AutoConfig.for_model(
        family, vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.sequence, rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("family", LIKE)
def test_imported_weights_give_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = theirs(family)
    model.save_pretrained(tmp_path / "hub")
    path = import_weights(tmp_path / "hub", tmp_path / "run")
    assert verify_checkpoint(path) == []
    shape = read_manifest(path).progress.shape
    assert shape == replace(LIKE[family], name=family)
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    found = ours(path, tokens)
    assert wanted.abs().max() > 1
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", LIKE)
def test_exported_weights_give_the_same_logits_in_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = replace(LIKE[family], batch=6)
    trained(tmp_path / "run", "dp2 tp2 zero3", shape=shape)
    path = tmp_path / "run" / "step-00000002"
    export_weights(path, tmp_path / "hub", family=family, dtype="F32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub").float().eval()
    assert type(model).__name__ == checkpoint_exchange.FAMILIES[family]
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    found = ours(path, tokens)
    assert wanted.abs().max() > 0.01
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", LIKE)
def test_what_is_exported_and_imported_is_the_same_to_the_bit(family: str, tmp_path: Path) -> None:
    shape = replace(LIKE[family], batch=6)
    trained(tmp_path / "run", "pp2 tp2", shape=shape)
    path = tmp_path / "run" / "step-00000002"
    files = export_weights(path, tmp_path / "hub", family=family)
    assert len(files) > 4, "several files and an index"
    back = import_weights(tmp_path / "hub", tmp_path / "back")
    weights = {k: v for k, v in hash_tensors(path).items() if k.startswith("weight/")}
    assert hash_tensors(back) == weights
    assert read_manifest(back).progress.shape == replace(shape, name=family, batch=8)


def test_a_shape_that_is_none_of_theirs_is_refused_with_all_reasons() -> None:
    with pytest.raises(CheckpointError, match=r"not rms; positions .* rope; .* not gated; all lin"):
        family_of(SHAPE)
    with pytest.raises(CheckpointError, match="norms and biases"):
        family_of(SHAPES["qwen"])
    with pytest.raises(CheckpointError, match="is a qwen3, not a llama"):
        family_of(LIKE["qwen3"], "llama")


def hub(folder: Path) -> Path:
    """A folder as theirs, of one file, without their library."""
    shape = replace(BASE, layers=1)
    names = {
        checkpoint_exchange.their_name(name): torch.zeros(weight.shape)
        for name, weight in checkpoint_exchange.build_model(shape).weights.items()
    }
    folder.mkdir()
    write_file(folder / "model.safetensors", names)
    config = checkpoint_exchange._config(shape, "llama", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps(said))

    return change


def index(name: str) -> Callable[[Path], None]:
    said = {"weight_map": {"model.norm.weight": name}}
    return lambda f: (f / "model.safetensors.index.json").write_text(json.dumps(said)) and None


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another model": (config(model_type="gpt2"), "'model_type' is 'gpt2'"),
    "stretched rope": (config(rope_parameters={"rope_type": "llama3"}), "rope is stretched"),
    "scaled rope": (config(rope_parameters=None, rope_scaling={"type": "linear"}), "stretched"),
    "a window": (config(model_type="mistral", sliding_window=8), "sliding window"),
    "biases": (config(attention_bias=True), "biases in attention"),
    "another activation": (config(hidden_act="gelu"), "hidden_act is not silu"),
    "no size": (config(hidden_size=None), "'hidden_size' is None"),
    "a text for a size": (config(vocab_size="61"), "'vocab_size' is '61'"),
    "a text for a number": (config(rope_theta="x"), "no number"),
    "more layers": (config(num_hidden_layers=2), "layers.1.* is missing"),
    "fewer heads": (config(num_attention_heads=2), r"q_proj.weight is \[64, 32\], \[32, 32\] is"),
    "heads that do not divide": (config(num_key_value_heads=3), "does not divide"),
    "a name that climbs": (index("../model.safetensors"), "is not plain"),
    "an absolute name": (index("/etc/passwd"), "is not plain"),
    "a file that is not there": (index("other.safetensors"), "No such file"),
    "pickled weights": (pickled, "pickled weights .* are not opened"),
    "a link out": (linked, "link out of its folder"),
    "a truncated file": (lambda f: os.truncate(f / "model.safetensors", 9000), "its header tells"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_imported_is_refused_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
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
    assert (told["step"], told["shape"], told["parameters"]) == (0, "llama", BASE_ONE)
    assert command(["verify", run]) == 0
    assert command(["export", run, "--out", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    again = read_manifest(import_weights(tmp_path / "bf16", tmp_path / "again"))
    assert {tensor.dtype for tensor in again.tensors} == {"BF16"}
    file = next((tmp_path / "run" / "checkpoints" / "step-00000000").glob("rank-*"))
    os.truncate(file, 900)
    capsys.readouterr()
    assert command(["verify", run]) == 1
    assert "has 900 bytes" in capsys.readouterr().out
    assert command(["export", run, "--out", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="holds no checkpoint"):
        command(["show", folder])
    with pytest.raises(UsageError, match="needs --out"):
        command(["import", folder])


BASE_ONE = replace(BASE, layers=1).total
