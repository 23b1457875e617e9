"""Weights to and from the layout of Hugging Face: `config.json` and sharded safetensors with an index.

Llama, Mistral, Qwen2 and Qwen3 are this model with other names: rope pairs features as theirs does.
What theirs can express and ours cannot (windows, rope stretched otherwise than by Llama 3) is refused and
never dropped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..layout import Shape
from ..layout.choices import FAMILIES
from ..layout.files import write_text
from ..parallel import build_model
from .checkpoint import SAVING, Snapshot, commit, steps
from .checkpoint_file import (
    DTYPES,
    CheckpointError,
    Stored,
    read_header,
    read_into,
    write_file,
)
from .checkpoint_manifest import WEIGHT, Logical, Piece, Progress, Reader, read_manifest
from .folder import Fields, Folder
from .lock import hold_run

INDEX, CONFIG, ONE = "model.safetensors.index.json", "config.json", "model.safetensors"
T = TypeVar("T")
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
    family = "qwen3" if shape.qk_norm else "qwen2" if shape.bias == "qkv" else "llama"
    alike = {"llama", "mistral"}  # without a window Mistral is Llama
    if wanted and wanted != family and not {wanted, family} <= alike:
        raise CheckpointError(f"shape {shape.name!r} is a {family}, not a {wanted}.")
    return wanted or family


def export_weights(path: Path, out: Path, *, family: str = "", dtype: str = "") -> list[Path]:
    """Write a checkpoint's weights as Hugging Face reads them; the files."""
    manifest = read_manifest(path)
    shape = manifest.progress.shape
    if shape is None:
        raise CheckpointError(f"{path}: has no shape of its model, which config.json needs.")
    weights = [each for each in manifest.tensors if each.kind == WEIGHT]
    family = family_of(shape, family)
    _refuse_unknown(path, shape, weights)
    if dtype and dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: choose {', '.join(DTYPES)}.")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; choose a new folder.")
    kind = DTYPES[dtype or weights[0].dtype]
    sizes = [math.prod(each.shape) * kind.itemsize for each in weights]
    shards = list(_shards(weights, sizes))
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    files: dict[str, str] = {}
    with Reader(path, manifest) as reader:
        for name, shard in zip(names, shards, strict=True):
            tensors = {their_name(t.name): reader.whole(t).to(kind) for t in shard}
            write_file(out / name, tensors, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
    write_text(out / INDEX, json.dumps(index, indent=2) + "\n", durable=True)
    config = _config(shape, family, str(kind).removeprefix("torch."))
    write_text(out / CONFIG, json.dumps(config, indent=2) + "\n", durable=True)
    return [*(out / name for name in names), out / INDEX, out / CONFIG]


def _refuse_unknown(path: Path, shape: Shape, weights: Iterable[Logical]) -> None:
    """The weights are those of the built-in model: sizes alone do not say what a model does."""
    ours = {name: tuple(weight.shape) for name, weight in build_model(shape).weights.items()}
    for each in weights:
        if ours.get(each.name) != tuple(each.shape):
            raise CheckpointError(
                f"{path}: {each.name} is no weight of the built-in decoder but of a model of its own,"
                " which Hugging Face has no name for."
            )


def _shards(items: Iterable[T], sizes: Iterable[int]) -> Iterator[list[T]]:
    """Runs of items of about `SHARD` bytes."""
    run, total = list[T](), 0
    for item, size in zip(items, sizes, strict=True):
        if run and total + size > SHARD:
            yield run
            run, total = [], 0
        run.append(item)
        total += size
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
    theirs = {their_name(name): dims for name, dims in wanted.items()}
    tensors = _tensors(folder)
    wrong = [
        f"{name} is {list(tensors[name][1].shape) if name in tensors else 'missing'},"
        f" {list(dims)} is wanted"
        for name, dims in theirs.items()
        if name not in tensors or tensors[name][1].shape != dims
    ]
    known = set(theirs) | ({"lm_head.weight"} if shape.tied else set())
    wrong += [f"the model has no {name}" for name in sorted(set(tensors) - known)]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{source}: {'; '.join(wrong[:5])}{more}.")
    if steps(out):
        raise CheckpointError(f"{out} holds checkpoints; choose a new folder.")
    with hold_run(out):
        return _write(folder, {name: tensors[their_name(name)] for name in wanted}, out, shape)


def _tensors(folder: Folder) -> dict[str, tuple[str, Stored]]:
    """Every tensor by name: the file it is in, and where."""
    if (folder.path / INDEX).exists():
        names = folder.json(INDEX, LIMIT).object("weight_map")
        files = sorted({names.text(name) for name in names.values})
    elif (folder.path / ONE).exists():
        files = [ONE]
    else:
        raise CheckpointError(
            f"{folder.path}: has neither {INDEX} nor {ONE}; pickled weights (.bin, .pt) are not opened."
        )
    tensors: dict[str, tuple[str, Stored]] = {}
    for file in files:
        for name, stored in read_header(folder, file).items():
            if name in tensors:
                folder.refuse(file, f"holds {name[:80]!r}, which {tensors[name][0]} has already.")
            # Old writers kept this table; it is computed from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                tensors[name] = file, stored
    return tensors


def _write(
    folder: Folder, sources: Mapping[str, tuple[str, Stored]], out: Path, shape: Shape
) -> Path:
    """Make a checkpoint as a run does, as if each file were that of a rank."""
    hidden = out / f"{SAVING}00000000"
    hidden.mkdir(parents=True)
    reports = []
    for number, names in enumerate(_shards(sources, [s.size for _, s in sources.values()])):
        tensors, described = {}, []
        for name in names:
            file, stored = sources[name]
            logical = Logical(WEIGHT, name, stored.dtype, stored.shape, ())
            piece = Piece(0, logical.title, 0, logical.whole, stored.shape, 0, stored.numel)
            flat = torch.empty(stored.numel, dtype=DTYPES[stored.dtype])
            with folder.open(file) as opened:
                read_into(opened, stored.offset, flat)
            tensors[logical.title] = flat.view(stored.shape)
            described.append(replace(logical, pieces=(piece,)))
        snapshot = Snapshot(tensors, tuple(described))
        reports.append(snapshot.write(hidden / f"rank-{number:05}.safetensors"))
    wrong, _ = commit(out, hidden, Progress(0, shape=shape), reports, 1)
    if wrong:
        raise CheckpointError(f"{out}: {wrong}")
    return steps(out)[0]


def shape_of(config: Fields) -> Shape:
    """The shape that a config.json of theirs describes; what we cannot do is refused by name."""
    family = config.text("model_type")
    if family not in FAMILIES:
        config.refuse(f"'model_type' is {family[:40]!r}; {', '.join(FAMILIES)} are read.")
    rope = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    rope = rope if isinstance(rope, dict) else {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = config.values.get("rope_theta", rope.get("rope_theta", 10000.0))
    eps = config.values.get("rms_norm_eps", 1e-6)
    windowed = config.values.get("use_sliding_window", family == "mistral")
    reasons = {
        "hidden_act is not silu": config.values.get("hidden_act", "silu") != "silu",
        "it has biases in attention or feed-forward": bool(
            config.values.get("attention_bias") or config.values.get("mlp_bias")
        ),
        f"its rope is stretched by {str(kind)[:20]!r}": kind not in ("default", "llama3"),
        "rope turns a part of each head": rope.get("partial_rotary_factor") not in (None, 1),
        "it attends within a sliding window": bool(windowed and config.values.get("sliding_window"))
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
        return default if config.values.get(key) is None else config.whole(key, 1)

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
        rope_theta=float(theta),
        **_rope_of(config, rope if kind == "llama3" else None),
        eps=float(eps),
        tied=config.values.get("tie_word_embeddings", False) is True,
        bias="qkv" if family == "qwen2" else "none",
        qk_norm=family == "qwen3",
    )


def _layer_types(config: Fields) -> list[object]:
    return config.list("layer_types") if config.values.get("layer_types") else []


# Keys of `rope_scaling` of Llama 3.1 and later, and those of a shape.
_ROPE = {
    "factor": "rope_factor", "low_freq_factor": "rope_low", "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original",
}  # fmt: skip


def _rope_of(config: Fields, rope: Mapping[str, object] | None) -> dict[str, Any]:
    if rope is None:
        return {}
    # Theirs takes the longest sequence where the first training's is not given.
    given: dict[str, Any] = {
        "original_max_position_embeddings": config.values.get("max_position_embeddings"),
        **rope,
    }
    wrong = [name for name in _ROPE if type(given.get(name)) not in (int, float)]
    if wrong:
        config.refuse(f"its llama3 rope has no number for {', '.join(wrong)}.")
    sizes: dict[str, Any] = {ours: float(given[theirs]) for theirs, ours in _ROPE.items()}
    return {**sizes, "rope_original": int(sizes["rope_original"])}
