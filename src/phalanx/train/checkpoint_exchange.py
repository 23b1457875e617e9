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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..layout import Shape
from ..layout.choices import FAMILIES
from ..layout.codec import key
from ..layout.files import write_text
from ..parallel import build_model
from .checkpoint import SAVING, Snapshot, commit, steps
from .checkpoint_format import (
    DTYPES,
    WEIGHT,
    CheckpointError,
    HeaderEntry,
    Manifest,
    StoredShard,
    StoredTensor,
    read_header,
    read_into,
    read_manifest,
    write_file,
)
from .checkpoint_load import TensorReader
from .folder import Folder, decoded
from .lock import hold_run

INDEX, CONFIG, ONE = "model.safetensors.index.json", "config.json", "model.safetensors"
T = TypeVar("T")
LIMIT = 64 << 20  # bytes of an index
SHARD = 4 << 30  # bytes of a file

_OUTER = {"embed.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
# Sizes by the names of theirs and of ours: those that are copied as they are, both ways.
_SIZES = {
    "vocab_size": "vocab", "hidden_size": "hidden", "intermediate_size": "ffn",
    "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "max_position_embeddings": "sequence", "rms_norm_eps": "eps", "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
}  # fmt: skip
# The same of the rope of Llama 3.1 and later.
_ROPE = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original",
}


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
    shape = manifest.shape
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
    with TensorReader(path, manifest) as reader:
        for name, shard in zip(names, shards, strict=True):
            tensors = {their_name(t.name): reader.whole(t).to(kind) for t in shard}
            write_file(out / name, tensors, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": files}
    config = config_of(shape, family, str(kind).removeprefix("torch."))
    for name, table in ((INDEX, index), (CONFIG, config)):
        write_text(out / name, json.dumps(table, indent=2) + "\n", durable=True)
    return [out / name for name in (*names, INDEX, CONFIG)]


def _refuse_unknown(path: Path, shape: Shape, weights: Iterable[StoredTensor]) -> None:
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


def config_of(shape: Shape, family: str, dtype: str) -> dict[str, object]:
    """Their config.json for a shape."""
    rope: dict[str, object] = {"rope_type": "default"}
    if shape.rope_factor != 1:
        rope = {"rope_type": "llama3"} | {k: getattr(shape, ours) for k, ours in _ROPE.items()}
    config: dict[str, object] = {"architectures": [FAMILIES[family]], "model_type": family}
    config |= {name: getattr(shape, ours) for name, ours in _SIZES.items()}
    # Newer readers take rope from here, older ones from `rope_theta` and `rope_scaling`.
    config |= {"rope_parameters": {"rope_theta": shape.rope_theta} | rope}
    config |= {"hidden_act": "silu", "torch_dtype": dtype}
    if shape.rope_factor != 1:
        config["rope_scaling"] = rope
    if family != "qwen2":
        config["attention_bias"] = False
    if family != "llama":
        config["sliding_window"] = None
    return config


# ---- and back


def import_weights(source: Path, out: Path) -> Path:
    """Make a checkpoint of step 0 from a folder of theirs: weights, and no optimizer state."""
    folder = Folder(source, CheckpointError)
    shape = shape_of(folder.json(CONFIG, LIMIT), str(source / CONFIG))
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


def _tensors(folder: Folder) -> dict[str, tuple[str, HeaderEntry, int]]:
    """Every tensor by name: the file it is in, what it is, and where it begins."""
    if (folder.path / INDEX).exists():
        index = folder.json(INDEX, LIMIT).get("weight_map")
        index = decoded(_Index, {"weight_map": index}, str(folder.path / INDEX), folder.error)
        files = sorted(set(index.weight_map.values()))
    elif (folder.path / ONE).exists():
        files = [ONE]
    else:
        raise CheckpointError(
            f"{folder.path}: has neither {INDEX} nor {ONE}; pickled weights (.bin, .pt) are not opened."
        )
    tensors: dict[str, tuple[str, HeaderEntry, int]] = {}
    for file in files:
        for name, (entry, offset) in read_header(folder, file).items():
            if name in tensors:
                folder.refuse(file, f"holds {name[:80]!r}, which {tensors[name][0]} has already.")
            # Old writers kept this table; it is computed from the config.
            if not name.endswith("rotary_emb.inv_freq"):
                tensors[name] = file, entry, offset
    return tensors


def _write(
    folder: Folder, sources: Mapping[str, tuple[str, HeaderEntry, int]], out: Path, shape: Shape
) -> Path:
    """Make a checkpoint as a run does, as if each file were that of a rank."""
    hidden = out / f"{SAVING}00000000"
    hidden.mkdir(parents=True)
    reports = []
    sizes = [entry.size for _, entry, _ in sources.values()]
    for number, names in enumerate(_shards(sources, sizes)):
        tensors, stored = {}, []
        for name in names:
            file, entry, offset = sources[name]
            flat = torch.empty(entry.numel, dtype=DTYPES[entry.dtype])
            with folder.open(file) as opened:
                read_into(opened, offset, flat)
            title, box = f"{WEIGHT}/{name}", tuple((0, n) for n in entry.shape)
            tensors[title] = flat.view(entry.shape)
            shard = StoredShard(title, box, entry.shape, 0, 0, 0, entry.numel)
            stored.append(StoredTensor(WEIGHT, name, entry.dtype, entry.shape, (shard,)))
        snapshot = Snapshot(Manifest(0, shape=shape, tensors=tuple(stored)), tensors)
        reports.append(snapshot.write(hidden / f"rank-{number:05}.safetensors"))
    wrong, _ = commit(out, hidden, reports, 1)
    if wrong:
        raise CheckpointError(f"{out}: {wrong}")
    return steps(out)[0]


@dataclass(frozen=True)
class _Index:
    weight_map: Mapping[str, str]


@dataclass(frozen=True)
class _Config:
    """What is read of a config.json of theirs. Most of its keys are for other models."""

    model_type: str
    vocab_size: int = key(minimum=1)
    hidden_size: int = key(minimum=1)
    intermediate_size: int = key(minimum=1)
    num_hidden_layers: int = key(minimum=1)
    num_attention_heads: int = key(minimum=1)
    num_key_value_heads: int | None = key(None, minimum=1)
    head_dim: int | None = key(None, minimum=1)
    max_position_embeddings: int | None = key(None, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    tie_word_embeddings: bool | None = False
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None
    # What ours cannot do.
    hidden_act: str = "silu"
    attention_bias: bool | None = False
    mlp_bias: bool | None = False
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None


def shape_of(table: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json of theirs describes; what we cannot do is refused by name."""
    family = table.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where}: 'model_type' is {str(family)[:40]!r}; {', '.join(FAMILIES)} are read."
        )
    read = {each.name for each in fields(_Config)}
    known = {name: value for name, value in table.items() if name in read}
    config = decoded(_Config, known, where, CheckpointError)
    rope = dict(config.rope_parameters or config.rope_scaling or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = config.rope_theta or rope.get("rope_theta", 10000.0)
    windowed = config.use_sliding_window
    windowed = family == "mistral" if windowed is None else windowed
    # Theirs takes the longest sequence where the first training's is not given.
    rope = {"original_max_position_embeddings": config.max_position_embeddings} | rope
    lost = [name for name in _ROPE if type(rope.get(name)) not in (int, float)]
    reasons = {
        "hidden_act is not silu": config.hidden_act != "silu",
        "it has biases in attention or feed-forward": config.attention_bias or config.mlp_bias,
        f"its rope is stretched by {str(kind)[:20]!r}": kind not in ("default", "llama3"),
        f"its llama3 rope has no number for {', '.join(lost)}": kind == "llama3" and lost,
        "rope turns a part of each head": rope.get("partial_rotary_factor") not in (None, 1),
        "it attends within a sliding window": (windowed and config.sliding_window)
        or any(each != "full_attention" for each in config.layer_types or ()),
        "rope_theta is no number": type(theta) not in (int, float),
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise CheckpointError(f"{where}: {'; '.join(wrong)}: this model cannot do that.")
    heads, hidden = config.num_attention_heads, config.hidden_size
    given = {ours: getattr(config, name) for name, ours in _SIZES.items()}
    given |= {
        "kv_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or hidden // heads,
        "sequence": config.max_position_embeddings or 2048,
        "rope_theta": float(theta),
        "tied": config.tie_word_embeddings is True,
        "bias": "qkv" if family == "qwen2" else "none",
        "qk_norm": family == "qwen3",
    }
    if kind == "llama3":
        given |= {ours: float(rope[name]) for name, ours in _ROPE.items()}
        given["rope_original"] = int(given["rope_original"])
    return Shape(family, **given)
