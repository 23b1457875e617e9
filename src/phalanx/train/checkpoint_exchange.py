"""Weights to and from the layout of Hugging Face: `config.json` and sharded safetensors with an index.

Llama, Mistral, Qwen2 and Qwen3 are this model with other names: rope pairs features as theirs does.
What theirs can say and ours cannot (windows, rope stretched otherwise than by Llama 3) is refused and
never dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import Shape
from ..layout.choices import FAMILIES
from ..parallel import build_model
from .checkpoint import commit, steps
from .checkpoint_file import (
    DTYPES,
    NAMES,
    CheckpointError,
    Stored,
    read_header,
    read_into,
    write_file,
)
from .checkpoint_holding import Snapshot
from .checkpoint_manifest import WEIGHT, Logical, Progress
from .checkpoint_read import Reader, read_manifest
from .data.folder import Fields, Folder, write_text
from .lock import hold_run

__all__ = ["export_weights", "import_weights"]

INDEX, CONFIG, ONE = "model.safetensors.index.json", "config.json", "model.safetensors"
LIMIT = 64 << 20  # bytes of an index
SHARD = 4 << 30  # bytes of a file

_OUTER = {
    "embed.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head",
}  # fmt: skip
_INNER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def their_name(name: str) -> str:
    """What Hugging Face calls a weight of ours."""
    path, _, last = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", path)
    if layer is None:
        return f"{_OUTER[path]}.{last}"
    return f"model.layers.{layer[1]}.{_INNER[layer[2]]}.{last}"


def family_of(shape: Shape, wanted: str = "") -> str:
    """Which of their models this shape is; all reasons at once when it is none."""
    reasons = {
        "norm is not rms": shape.norm != "rms",
        "positions are not rope": shape.positions != "rope",
        "the feed-forward is not gated": not shape.gated,
        "kind is not decoder": shape.kind != "decoder",
        "all linears have biases": shape.bias == "all",
        "q and k have norms and biases": shape.qk_norm and shape.bias != "none",
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(
            f"shape {shape.name!r} is none of {', '.join(FAMILIES)}: {'; '.join(wrong)}."
        )
    found = "qwen3" if shape.qk_norm else "qwen2" if shape.bias == "qkv" else "llama"
    alike = {"llama", "mistral"}  # without a window Mistral is Llama
    if wanted and wanted != found and not {wanted, found} <= alike:
        raise CheckpointError(f"shape {shape.name!r} is a {found}, not a {wanted}.")
    return wanted or found


def export_weights(path: Path, out: Path, *, family: str = "", dtype: str = "") -> list[Path]:
    """Write a checkpoint's weights as Hugging Face reads them; the files."""
    manifest = read_manifest(path)
    shape = manifest.progress.shape
    if shape is None:
        raise CheckpointError(f"{path}: does not tell the model's shape, which config.json needs.")
    weights = [each for each in manifest.tensors if each.kind == WEIGHT]
    found = family_of(shape, family)
    _known(path, shape, weights)
    if dtype and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: choose {', '.join(DTYPES)}.")
    _empty(out)
    kept = DTYPES[dtype] if dtype else DTYPES[weights[0].dtype]
    shards = list(_shards(weights, kept))
    names = [f"model-{n:05}-of-{len(shards):05}{ONE[5:]}" for n in range(1, len(shards) + 1)]
    place: dict[str, str] = {}
    with Reader(path, manifest) as reader:
        for name, shard in zip(names, shards, strict=True):
            tensors = {their_name(t.name): reader.whole(t).to(kept) for t in shard}
            write_file(out / name, tensors, {"format": "pt"})
            place |= dict.fromkeys(tensors, name)
    size = sum(kept.itemsize * torch.Size(each.shape).numel() for each in weights)
    index = {"metadata": {"total_size": size}, "weight_map": place}
    write_text(out / INDEX, json.dumps(index, indent=2) + "\n")
    config = _config(shape, found, str(kept).removeprefix("torch."))
    write_text(out / CONFIG, json.dumps(config, indent=2) + "\n")
    return [*(out / name for name in names), out / INDEX, out / CONFIG]


def _known(path: Path, shape: Shape, weights: Iterable[Logical]) -> None:
    """The weights are those of the built-in model: sizes alone do not say what a model does."""
    ours = {name: tuple(weight.shape) for name, weight in build_model(shape).weights.items()}
    for each in weights:
        if ours.get(each.name) != tuple(each.shape):
            raise CheckpointError(
                f"{path}: {each.name} is no weight of the built-in decoder but of a model of its own,"
                " which Hugging Face has no name for."
            )


def _empty(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose a new folder.")


def _shards(weights: Iterable[Logical], dtype: torch.dtype) -> Iterator[list[Logical]]:
    """Runs of weights of about `SHARD` bytes."""
    run, held = list[Logical](), 0
    for each in weights:
        size = torch.Size(each.shape).numel() * dtype.itemsize
        if run and held + size > SHARD:
            yield run
            run, held = [], 0
        run.append(each)
        held += size
    yield run


def _config(shape: Shape, family: str, dtype: str) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.sequence,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied,
        # Older readers know the first, newer ones the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta} | _rope_config(shape),
        "torch_dtype": dtype,
    }
    if shape.rope_factor != 1:
        config["rope_scaling"] = _rope_config(shape)  # what older readers know
    if family != "qwen2":
        config["attention_bias"] = False
    if family != "llama":
        config["sliding_window"] = None
    return config


def _rope_config(shape: Shape) -> dict[str, object]:
    if shape.rope_factor == 1:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3", "factor": shape.rope_factor, "low_freq_factor": shape.rope_low,
        "high_freq_factor": shape.rope_high,
        "original_max_position_embeddings": shape.rope_original,
    }  # fmt: skip


# ---- and back


def import_weights(source: Path, out: Path) -> Path:
    """Make a checkpoint of step 0 from a folder of theirs: weights, and no optimizer state."""
    folder = Folder(source, CheckpointError)
    shape = shape_of(folder.json(CONFIG, LIMIT))
    wanted = {n: tuple(p.shape) for n, p in build_model(shape).weights.items()}
    found = _found(folder)
    wrong = [
        f"{theirs} is {'missing' if theirs not in found else list(found[theirs][1].shape)},"
        f" {list(dims)} is wanted"
        for theirs, dims in ((their_name(name), dims) for name, dims in wanted.items())
        if theirs not in found or found[theirs][1].shape != dims
    ]
    known = {their_name(name) for name in wanted} | ({"lm_head.weight"} if shape.tied else set())
    wrong += [f"{name} has no place in the model" for name in sorted(set(found) - known)]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{source}: {'; '.join(wrong[:5])}{more}.")
    if steps(out):
        raise CheckpointError(f"{out} holds checkpoints; choose a new folder.")
    with hold_run(out):
        return _written(folder, found, list(wanted), out, shape)


Found = Mapping[str, tuple[str, Stored]]


def _found(folder: Folder) -> Found:
    """Every tensor by name: the file it is in, and where."""
    if (folder.path / INDEX).exists():
        place = folder.json(INDEX, LIMIT).object("weight_map")
        files = sorted({place.text(name) for name in place.said})
    elif (folder.path / ONE).exists():
        files = [ONE]
    else:
        raise CheckpointError(
            f"{folder.path}: has neither {INDEX} nor {ONE}; pickled weights (.bin, .pt) are not opened."
        )
    found: dict[str, tuple[str, Stored]] = {}
    for file in files:
        for name, stored in read_header(folder, file).items():
            if name in found:
                folder.refuse(file, f"holds {name[:80]!r}, which {found[name][0]} has already.")
            # Old writers kept this table; it is computed from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                found[name] = file, stored
    return found


def _written(folder: Folder, found: Found, names: list[str], out: Path, shape: Shape) -> Path:
    beside = out / ".saving-00000000"
    beside.mkdir(parents=True)
    reports, run, held = list[str](), list[str](), 0
    for name in names:
        stored = found[their_name(name)][1]
        run.append(name)
        held += stored.numel * DTYPES[stored.dtype].itemsize
        if held > SHARD or name == names[-1]:
            tensors = {f"{WEIGHT}/{n}": _read(folder, *found[their_name(n)]) for n in run}
            file = write_file(beside / f"rank-{len(reports):05}{ONE[5:]}", tensors)
            parts = tuple(_part(key, x) for key, x in tensors.items())
            reports.append(Snapshot(tensors, parts, "", ()).report(file))
            run, held = [], 0
    wrong, _ = commit(out, beside, Progress(0, shape=shape), reports, 1)
    if wrong:
        raise CheckpointError(f"{out}: {wrong}")
    return steps(out)[0]


def _read(folder: Folder, file: str, stored: Stored) -> Tensor:
    flat = torch.empty(stored.numel, dtype=DTYPES[stored.dtype])
    with folder.open(file) as opened:
        read_into(opened, stored.offset, flat)
    return flat.view(stored.shape)


def _part(key: str, x: Tensor) -> dict[str, object]:
    return {
        "kind": WEIGHT, "name": key.removeprefix(f"{WEIGHT}/"), "key": key, "dtype": NAMES[x.dtype],
        "shape": list(x.shape), "box": [[0, n] for n in x.shape], "local": list(x.shape),
        "start": 0, "stop": x.numel(),
    }  # fmt: skip


def shape_of(config: Fields) -> Shape:
    """The shape that a config.json of theirs tells; what we cannot do is refused by name."""
    family = config.text("model_type")
    if family not in FAMILIES:
        config.refuse(f"'model_type' is {family[:40]!r}; {', '.join(FAMILIES)} are read.")
    rope = config.said.get("rope_parameters") or config.said.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = config.said.get("rope_theta", rope.get("rope_theta", 10000.0))
    eps = config.said.get("rms_norm_eps", 1e-6)
    windowed = config.said.get("use_sliding_window", family == "mistral")
    reasons = {
        "hidden_act is not silu": config.said.get("hidden_act", "silu") != "silu",
        "it has biases in attention or feed-forward": bool(
            config.said.get("attention_bias") or config.said.get("mlp_bias")
        ),
        f"its rope is stretched by {str(kind)[:20]!r}": kind not in ("default", "llama3"),
        "rope turns a part of each head": rope.get("partial_rotary_factor") not in (None, 1),
        "it attends within a sliding window": bool(windowed and config.said.get("sliding_window"))
        or any(each != "full_attention" for each in _layer_types(config)),
        "rope_theta or rms_norm_eps is no number": not all(
            type(n) in (int, float) for n in (theta, eps)
        ),
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        config.refuse(f"{'; '.join(wrong)}: this model cannot do that.")
    heads = config.whole("num_attention_heads", 1)
    hidden = config.whole("hidden_size", 1)

    def optional(key: str, default: int) -> int:
        return default if config.said.get(key) is None else config.whole(key, 1)

    return Shape(
        family,
        layers=config.whole("num_hidden_layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=optional("num_key_value_heads", heads),
        head_dim=optional("head_dim", hidden // heads),
        ffn=config.whole("intermediate_size", 1),
        vocab=config.whole("vocab_size", 1),
        sequence=optional("max_position_embeddings", 2048),
        rope_theta=float(str(theta)),
        **_rope_of(config, rope if kind == "llama3" else None),
        eps=float(str(eps)),
        tied=config.said.get("tie_word_embeddings", False) is True,
        bias="qkv" if family == "qwen2" else "none",
        qk_norm=family == "qwen3",
    )


def _layer_types(config: Fields) -> list[object]:
    return config.list("layer_types") if config.said.get("layer_types") else []


# What `rope_scaling` of Llama 3.1 and later says, and the keys of a shape.
_ROPE = {
    "factor": "rope_factor", "low_freq_factor": "rope_low", "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original",
}  # fmt: skip


def _rope_of(config: Fields, rope: Mapping[str, object] | None) -> dict[str, Any]:
    if rope is None:
        return {}
    # Theirs takes the longest sequence where the first training's is not given.
    given = {"original_max_position_embeddings": config.said.get("max_position_embeddings"), **rope}
    wrong = [name for name in _ROPE if type(given.get(name)) not in (int, float)]
    if wrong:
        config.refuse(f"its llama3 rope has no number for {', '.join(wrong)}.")
    found: dict[str, Any] = {ours: float(str(given[theirs])) for theirs, ours in _ROPE.items()}
    return {**found, "rope_original": int(found["rope_original"])}
