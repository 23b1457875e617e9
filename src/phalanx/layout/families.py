"""Hugging Face models: shapes from and to config.json, and the names of weights.

A family is data: a table of families.toml. A feature that they can express and we
cannot is refused by name and never ignored. Nothing that a folder names is run: from a
configuration only the keys of `_Config` are read.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import cycle
from operator import or_
from pathlib import Path
from typing import Any

from .codec import decode, key
from .files import parse_json, read_text
from .hub import config_folder
from .mesh import LayoutError
from .mixers import MIXERS, absent_sizes, mixer_of_block
from .shape import HUB, Shape
from .source import split_name

CONFIG = "config.json"
LIMIT = 64 << 20  # bytes of a configuration or an index

PACKED_4 = "mxfp4"  # 4-bit values: the only quantized weights that are read
BALANCES = "e_score_correction_bias"
_DATA = tomllib.loads(
    Path(__file__).with_name("families.toml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Family:
    """One of their model types.

    `shape` holds the keys of ours that make a decoder one of this family, where they
    differ from a shape's defaults; keys in `open` may have any value. `config` holds
    defaults of its configuration. `block` maps each module of a block to the modules of
    ours in it, stacked in order, and `outer` does so for the rest.
    """

    architecture: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    open: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    # Other names of a configuration's keys.
    keys: Mapping[str, str] = field(default_factory=dict)
    windows: str = ""  # "", or in "all" blocks alike, or in "some"
    pattern: int = 0  # every `pattern`-th block has no window
    # The last two dims of blocks' weights with this many dims are (in, out).
    transposed: int = 0
    alternating: bool = False  # the rows of two packed weights alternate
    # Packed tensors whose weights alternate by heads, with the key of their number.
    grouped: Mapping[str, str] = field(default_factory=dict)
    mixers: bool = False  # blocks may have mixers other than attention
    # The beginning of tensors that predict further tokens: they are not read.
    unread: str = ""
    # Blocks after the last one predict further tokens: they are written and not read.
    # Our names of a module's tensors, and theirs, relative to the block's name.
    further: Mapping[str, str] = field(default_factory=dict)
    # Their keys about experts and latent attention, and ours.
    experts: Mapping[str, str] = field(default_factory=dict)


def _family(row: dict[str, Any]) -> Family:
    # Rows that families share, by the name of their table; a family's own come
    # last.
    tables: dict[str, Any] = {
        "block": ["plain"],
        "outer": ["plain"],
        "keys": [],
    } | row
    chosen: dict[str, Any] = {
        name: reduce(or_, (_DATA[name][each] for each in tables[name]), {})
        for name in ("block", "outer", "keys")
    }
    return Family(**row | chosen)


FAMILIES = {name: _family(row) for name, row in _DATA["families"].items()}
# The beginnings of our names for modules that predict later tokens.
_FURTHER = {
    name.partition("{}")[0]
    for family in FAMILIES.values()
    for name in family.further
    if "{}" in name
}
# Any other family; only its sizes are known.
_OTHER = _family({"architecture": "", "keys": ["gpt2", "others"]})
# Token embeddings are multiplied by the square root of their width.
_SCALED = "gemma2", "gemma3_text"
# Keys of a shape that identify its family.
_TRAITS = (
    "kind norm norms positions gated activation bias qk_norm qk_norm_wide sinks softcap logit_softcap"
    " query_scalar rope_local_theta expert_ffn shared_experts dense_layers scores normalized"
    " routed_scale balance kv_latent q_latent rope_dim rope_pairs expert_groups top_groups"
    " mixers output_gate shared_gate"
)
_SIZES: Mapping[str, str] = _DATA["sizes"]
_ROPE: Mapping[str, Mapping[str, str]] = _DATA["rope"]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}


@dataclass(frozen=True)
class HubTensor:
    """The place of one of our weights in a Hugging Face checkpoint.

    The tensor's name, and our weights that it packs, in order. A name with a * means
    one tensor per expert.
    """

    name: str
    packed: tuple[str, ...]
    transposed: bool = False  # the last two dims
    alternating: bool = (
        False  # dim 1 interleaves the rows of the packed weights
    )
    # A key of the shape: rows come in so many groups, each with a run of every packed
    # weight's rows. "": one weight lies behind the other.
    groups: str = ""

    def names(self, experts: int) -> list[str]:
        """The names of the tensors: one, or one for each expert."""
        return [
            self.name.replace("*", str(e))
            for e in range(experts if "*" in self.name else 1)
        ]


def ahead_sources(
    family: Family, names: Mapping[str, int], layers: int, modules: int
) -> dict[str, HubTensor]:
    """Map weights of ours as `sources`, also those of modules that predict later tokens.

    A family without such modules has no names for them, and their weights are left out.
    """
    prefixes = [*_FURTHER]
    prefixes += [f"layers.{layers + module}." for module in range(modules)]
    plain = {
        name: dims
        for name, dims in names.items()
        if not name.startswith(tuple(prefixes))
    }
    found = sources(family, plain)
    if not family.further:
        return found
    for module in range(modules):
        block = f"layers.{layers + module}."
        own = {n: dims for n, dims in names.items() if n.startswith(block)}
        found |= sources(family, own)
        for ours, theirs in family.further.items():
            name = ours.format(module)
            place = f"{family.layers}.{layers + module}.{theirs}"
            # A tied output is the embedding.
            held = name if name in names else "embed.tokens.weight"
            found[place] = HubTensor(place, (held,))
    return found


def sources(family: Family, names: Mapping[str, int]) -> dict[str, HubTensor]:
    """Map weights of ours, given with their dim counts, to Hugging Face tensors."""
    found: dict[str, HubTensor] = {}
    for name, dims in names.items():
        # "layers.3.attn.wq.weight" -> block 3 and "attn.wq.weight".
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        inner = layer[2] if layer else name
        ours, theirs = (
            f"{x}.{layer[1]}." if layer else ""
            for x in ("layers", family.layers)
        )
        table = family.block if layer else family.outer
        # The last row wins: a family's own rows come after those it shares.
        places = {
            each: their for their in table for each in table[their].split()
        }
        path, _, last = inner.rpartition(".")
        # A row may name a whole tensor, or a module with its weight and bias.
        tensor, last = (
            (places[inner], "")
            if inner in places
            else (places[path], f".{last}")
        )
        packed = tuple(f"{ours}{each}{last}" for each in table[tensor].split())
        # GPT-2's Conv1D and gpt-oss's experts store (in, out), unlike a linear
        # layer's (out, in).
        transposed = bool(layer) and dims == family.transposed
        alternating = family.alternating and len(packed) > 1
        found[name] = HubTensor(
            f"{theirs}{tensor}{last}",
            packed,
            transposed,
            alternating,
            family.grouped.get(tensor, ""),
        )
    return found


# ---- from a config.json


@dataclass(frozen=True)
class _Config:
    """The keys read from a config.json. Most other keys belong to other models."""

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
    rope_local_base_freq: float | None = None
    tie_word_embeddings: bool | None = False
    rope_parameters: Mapping[str, Any] | None = None
    rope_scaling: Mapping[str, Any] | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: float | None = key(None, above=0)
    attn_logit_softcapping: float | None = key(None)
    final_logit_softcapping: float | None = key(None)
    sliding_window: int | None = key(None)
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    sliding_window_pattern: int | None = key(None, minimum=1)
    layer_types: tuple[str, ...] | None = None
    num_experts: int | None = key(None, minimum=1)
    num_experts_per_tok: int | None = key(None, minimum=1)
    moe_intermediate_size: int | None = key(None)
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] | None = None
    first_k_dense_replace: int = key(0)
    n_shared_experts: int = key(0)
    routed_scaling_factor: float = key(1.0, above=0)
    n_group: int = key(1, minimum=1)
    topk_group: int = key(1, minimum=1)
    kv_lora_rank: int = key(0)
    q_lora_rank: int | None = key(None)
    qk_rope_head_dim: int = key(0)
    qk_nope_head_dim: int = key(0)
    v_head_dim: int = key(0)
    rope_interleave: bool = False
    decoder_sparse_step: int | None = None
    attention_bias: bool | None = False
    quantization_config: Mapping[str, Any] | None = None
    partial_rotary_factor: float | None = key(None, above=0, maximum=1)
    full_attention_interval: int = key(4, minimum=1)
    linear_num_value_heads: int = key(0)
    linear_num_key_heads: int = key(0)
    linear_key_head_dim: int = key(0)
    linear_value_head_dim: int = key(0)
    linear_conv_kernel_dim: int = key(4, minimum=2)
    shared_expert_intermediate_size: int = key(0)


# Features that our decoder lacks: keys, the values it supports, and the meaning of any
# other.
_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("mlp_bias", (None, False), "it has biases in attention or feed-forward"),
    ("swiglu_limit", (7.0,), "its experts are clamped elsewhere"),
    ("swiglu_alpha", (1.702,), "its experts are clamped elsewhere"),
    (
        "use_bidirectional_attention",
        (None, False),
        "tokens attend to later ones",
    ),
    ("scale_attn_weights", (True,), "its scores are not scaled"),
    (
        "scale_attn_by_inverse_layer_idx",
        (None, False),
        "its scores are scaled by the layer",
    ),
    ("add_cross_attention", (None, False), "it has cross-attention"),
    ("router_jitter_noise", (None, 0), "its router is trained with noise"),
    ("moe_layer_freq", (None, 1), "its experts are not in every block"),
    (
        "scoring_func",
        (None, "sigmoid"),
        "its router's scores are not sigmoids",
    ),
    (
        "topk_method",
        (None, "noaux_tc"),
        "its experts are not chosen with a bias",
    ),
)
# The part of each head that Qwen3-Next's rope turns if its configuration has no key.
_TURNED = 0.25


def hub_config(folder: str) -> tuple[Mapping[str, Any], str]:
    """The config.json of a folder, and its path."""
    path = Path(config_folder(folder)) / CONFIG
    text = read_text(path, "configuration", LayoutError, LIMIT)
    return parse_json(text, str(path), LayoutError), str(path)


def hub_shape(folder: str) -> Shape:
    """The shape of the model in a folder, from its config.json."""
    return shape_of(*hub_config(folder))


def code_of(model: str) -> tuple[str, str]:
    """The file with a model's code, and its class; both "" if the code is ours.

    For FILE.py:Class, and for hf:FOLDER with a family that only transformers has.
    """
    if not model.startswith(HUB):
        return split_name(model)
    try:
        table, file = hub_config(model.removeprefix(HUB))
    except LayoutError:  # reported where the model is read
        return "", ""
    name = str(table.get("model_type"))
    return ("", "") if name in FAMILIES else (file, name)


def shape_of(table: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json describes; refuses unsupported features."""
    name = table.get("model_type")
    if not isinstance(name, str):
        raise LayoutError(
            f"{where}: 'model_type' is {str(name)[:40]!r}, and no name."
        )
    family = FAMILIES.get(name, _OTHER)
    # Defaults of the family first, then the file's own keys, renamed to the
    # common ones.
    table = {
        **family.config,
        **{family.keys.get(k, k): value for k, value in table.items()},
    }
    # These configurations leave out the MLP's width where it is 4 x hidden.
    wide = name == "gpt2" or family is _OTHER
    if (
        wide
        and table.get("intermediate_size") is None
        and type(table.get("hidden_size")) is int
    ):
        table["intermediate_size"] = 4 * table["hidden_size"]
    known = {each.name for each in fields(_Config)}
    config = decode(
        _Config,
        {k: x for k, x in table.items() if k in known},
        where,
        LayoutError,
    )
    # transformers' own code computes it and knows its other features.
    if family is _OTHER:
        return _shape(name, _sizes(config), where)
    # Rope's numbers, and separate ones for blocks with a window, if the family has
    # them.
    ropes = config.rope_parameters or config.rope_scaling or {}
    names = ("full_attention", "sliding_attention")
    both = (
        [ropes.get(each) for each in names]
        if names[0] in ropes
        else [ropes, {}]
    )
    rope, local = (each if isinstance(each, dict) else {} for each in both)
    theta: Any = rope.get("rope_theta", config.rope_theta or 10000.0)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    activation = config.hidden_activation or config.hidden_act or "silu"
    # transformers' default for Gemma 2 and 3, which do not read `hidden_act`.
    if name in _SCALED and not config.hidden_activation:
        activation = "gelu_pytorch_tanh"
    # Each sentence is a reason against the model if its value is true.
    reasons = _reasons(config, family) | {
        f"its activation is {activation[:40]!r}": activation
        not in _ACTIVATIONS,
        f"its rope is stretched by {kind[:20]!r}": kind != "default"
        and kind not in _ROPE,
        "rope of its windows is stretched": local.get("rope_type", "default")
        != "default",
        "rope turns a part of each head": not family.mixers
        and _turned_part(config, rope) not in (None, 1),
        "rope_theta is no number": type(theta) not in (int, float),
    }
    mixers = _mixers(config, family, reasons)
    # The blocks that are not attention have no window.
    windows = () if mixers else tuple(_windows(config, family, reasons))
    stretch = _stretch(config, rope, kind, reasons)
    # A key that is absent has the first of the supported values.
    wrong = [
        why for key, can, why in _ONLY if table.get(key, can[0]) not in can
    ]
    wrong += [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise LayoutError(
            f"{where}: {'; '.join(dict.fromkeys(wrong))}: this model cannot do that."
        )
    # An activation that follows from the gate is not written.
    plain = _ACTIVATIONS[activation] == (
        "silu" if family.shape.get("gated", True) else "gelu"
    )
    given = _sizes(config) | {"rope_theta": float(theta), "windows": windows}
    given["activation"] = "" if plain else _ACTIVATIONS[activation]
    given |= {**family.shape, **stretch}
    if family.experts:
        given["dense_layers"] = len(config.mlp_only_layers or ())
        for their, ours in family.experts.items():
            value = getattr(config, family.keys.get(their, their))
            given[ours] = 0 if value is None else value
    if name in _SCALED:
        given["softcap"] = config.attn_logit_softcapping or 0.0
        given["logit_softcap"] = config.final_logit_softcapping or 0.0
        given["embed_scale"] = math.sqrt(config.hidden_size)
        # Scores are divided by the square root of this; head_dim is the usual
        # value.
        scalar = float(config.query_pre_attn_scalar or given["head_dim"])
        given["query_scalar"] = 0.0 if scalar == given["head_dim"] else scalar
    if name == "gemma3_text":
        theta = local.get("rope_theta") or config.rope_local_base_freq
        given["rope_local_theta"] = float(theta or 0)
    if family.mixers:
        given |= {"mixers": mixers} | _beside_mixers(config, rope, where)
        # The file has the sizes of other mixers even if no block has one.
        given |= absent_sizes(mixers)
    if config.kv_lora_rank:
        # A head has features without positions and features that rope turns.
        given["head_dim"] = config.qk_nope_head_dim + config.qk_rope_head_dim
        given["rope_pairs"] = (
            "neighbours" if config.rope_interleave else "halves"
        )
        # Yarn multiplies scores by scale^2. They are divided by the root of
        # this number, so it falls by scale^4.
        if kind != "default" and rope.get("mscale_all_dim"):
            scale = 1 + 0.1 * float(rope["mscale_all_dim"]) * math.log(
                given["rope_factor"]
            )
            given["query_scalar"] = given["head_dim"] / scale**4
    return _shape(name, given, where)


def _shape(name: str, given: dict[str, Any], where: str) -> Shape:
    try:
        return Shape(name, **given)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def _reasons(config: _Config, family: Family) -> dict[str, Any]:
    """Features that our decoder lacks, each with a flag: whether the model uses it."""
    biased, dense = family.shape.get("sinks"), config.mlp_only_layers or ()
    quantized = (config.quantization_config or {}).get("quant_method")
    # gpt-oss alone: MXFP4 with alternating rows of gate and up.
    read = quantized == PACKED_4 and family.alternating
    return {
        "it has biases in attention or feed-forward": config.attention_bias
        and not biased,
        "its attention has no biases": biased and not config.attention_bias,
        "its weights are quantized": config.quantization_config and not read,
        "not all of its last blocks have experts": family.experts
        and (
            # Dense blocks must be the first ones, and all others have experts.
            config.decoder_sparse_step not in (None, 1)
            or sorted(dense) != [*range(len(dense))]
        ),
        "it does not say how many experts it has": family.experts
        and not (config.num_experts and config.num_experts_per_tok),
    }


def _sizes(config: _Config) -> dict[str, Any]:
    given = {ours: getattr(config, their) for their, ours in _SIZES.items()}
    heads = config.num_attention_heads
    return given | {
        "kv_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or config.hidden_size // heads,
        "sequence": config.max_position_embeddings or 2048,
        "rope_theta": config.rope_theta or 10000.0,
        "tied": config.tie_word_embeddings is True,
    }


def _windows(
    config: _Config, family: Family, reasons: dict[str, Any]
) -> Iterator[int]:
    """Yield the window of each block, over the shortest repeating pattern."""
    count, types = config.num_hidden_layers, config.layer_types
    # Configurations of Qwen list a window even where none is used.
    unsaid = (
        config.model_type.startswith("qwen")
        and config.use_sliding_window is None
    )
    lacks = not (family.windows and config.sliding_window)
    off = config.use_sliding_window is False or unsaid or lacks
    first = config.max_window_layers or 0
    pattern = config.sliding_window_pattern or family.pattern
    if types is None:
        # Without a window: Qwen's blocks before `first`, and every
        # `pattern`-th block of Gemma.
        local = (
            n >= first and (not pattern or (n + 1) % pattern > 0)
            for n in range(count)
        )
        windowed = [each and not off for each in local]
    else:
        windowed = [each == "sliding_attention" for each in types[:count]]
        known = {"full_attention", "sliding_attention"}
        others = ", ".join(sorted({each[:30] for each in types} - known))
        reasons[f"it has blocks of {others}"] = others
        reasons[f"layer_types names {len(types)} of {count} blocks"] = (
            len(types) != count
        )
        reasons["it attends within a sliding window"] = any(windowed) and lacks
    # The shortest period that gives all windows: alternating blocks need two
    # numbers.
    periods = range(1, count + 1) if any(windowed) else ()
    fits = (
        p
        for p in periods
        if all(x == windowed[n % p] for n, x in enumerate(windowed))
    )
    yield from (
        int(config.sliding_window or 0) * x for x in windowed[: next(fits, 0)]
    )


def _turned_part(config: _Config, rope: Mapping[str, Any]) -> Any:
    return rope.get("partial_rotary_factor", config.partial_rotary_factor)


def _mixers(
    config: _Config, family: Family, reasons: dict[str, Any]
) -> tuple[str, ...]:
    """The mixer of each block, over the shortest repeating pattern."""
    if not family.mixers:
        return ()
    count, types = config.num_hidden_layers, config.layer_types
    words = {row.hub_name: name for name, row in MIXERS.items()}
    if types is None:
        each = config.full_attention_interval
        types = tuple(
            "linear_attention" if number % each else "full_attention"
            for number in range(1, 1 + count)
        )
    others = ", ".join(sorted({each[:30] for each in types} - {*words}))
    reasons[f"layer_types has {others}"] = others
    reasons[f"layer_types names {len(types)} of {count} blocks"] = (
        len(types) != count
    )
    mixers = [words.get(name, name) for name in types]
    for period in range(1, count):
        if all(x == mixers[n % period] for n, x in enumerate(mixers)):
            return tuple(mixers[:period])
    return tuple(mixers)


def _beside_mixers(
    config: _Config, rope: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Qwen3-Next's other features: rope on a part of each head, and shared experts."""
    head = config.head_dim or 0
    part = _turned_part(config, rope)
    turned = int(head * (_TURNED if part is None else part))
    shared = config.shared_expert_intermediate_size
    width = config.moe_intermediate_size or 1
    if shared % width or not shared:
        raise LayoutError(
            f"{where}: shared_expert_intermediate_size is {shared}, which is no multiple of"
            f" moe_intermediate_size, {width}: this model cannot do that."
        )
    return {
        "rope_dim": 0 if turned == head else turned,
        "shared_experts": shared // width,
    }


def _stretch(
    config: _Config,
    rope: Mapping[str, Any],
    kind: str,
    reasons: dict[str, Any],
) -> dict[str, Any]:
    """The keys of a shape that describe the scaling of rope."""
    if kind not in _ROPE:
        return {}
    # They use the longest sequence if the first training's is not given.
    longest = config.max_position_embeddings
    # A null is a missing number, for which the next lines have defaults.
    rope = {k: x for k, x in rope.items() if x is not None}
    given = {"original_max_position_embeddings": longest, **rope}
    # The dynamic scaling starts from the configuration's own length.
    if kind == "dynamic":
        given["original_max_position_embeddings"] = longest
    # Defaults of transformers' `_compute_yarn_parameters`.
    if kind == "yarn":
        original = given["original_max_position_embeddings"]
        if type(original) is int and longest:
            given.setdefault("factor", longest / original)
        given = {"beta_fast": 32.0, "beta_slow": 1.0} | given
        given.setdefault("attention_factor", _attention_factor(given))
    # bool is excluded by `type`, as are texts.
    lost = [
        name
        for name in _ROPE[kind]
        if type(given.get(name)) not in (int, float)
    ]
    reasons[f"its {kind} rope has no number for {', '.join(lost)}"] = lost
    if lost:
        return {}
    keys: dict[str, Any] = {
        ours: float(given[name]) for name, ours in _ROPE[kind].items()
    }
    if kind == "yarn":
        keys["rope_truncated"] = given.get("truncate") is not False
    if "rope_original" in keys:
        keys["rope_original"] = int(keys["rope_original"])
    return keys | {"rope_scaling": kind}


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """yarn's default factor on cosine and sine, if the configuration gives none."""
    factor, up, down = (
        rope.get(name) for name in ("factor", "mscale", "mscale_all_dim")
    )
    if not isinstance(factor, int | float) or factor <= 1:
        return 1.0
    if (
        isinstance(up, int | float)
        and isinstance(down, int | float)
        and up
        and down
    ):
        # The quotient of both scales, each 0.1 m ln(factor) + 1 (Peng et al.
        # 2023).
        return (0.1 * up * math.log(factor) + 1) / (
            0.1 * down * math.log(factor) + 1
        )
    return 0.1 * math.log(factor) + 1


# ---- to a config.json


def family_of(shape: Shape, wanted: str = "") -> str:
    """The Hugging Face family of a shape; raises with the differences if none."""
    reasons = {name: list(_differences(shape, name)) for name in FAMILIES}
    # If several fit, the one with its name, otherwise the first.
    near = wanted or min(
        reasons, key=lambda name: (len(reasons[name]), name != shape.name)
    )
    if reasons[near]:
        what = (
            f"no {near}:"
            if wanted
            else f"none of {', '.join(FAMILIES)}; for {near}"
        )
        raise LayoutError(
            f"shape {shape.name!r} is {what} {'; '.join(reasons[near])}."
        )
    return near


def _differences(shape: Shape, name: str) -> Iterator[str]:
    family, plain = FAMILIES[name], {f.name: f.default for f in fields(Shape)}
    # A trait is a difference if the family fixes it to another value.
    for trait in _TRAITS.split():
        has, wants = (
            getattr(shape, trait),
            family.shape.get(trait, plain[trait]),
        )
        # "" follows from the gate, on both sides.
        if trait == "activation":
            has = has or ("silu" if shape.gated else "gelu")
            wants = wants or (
                "silu" if family.shape.get("gated", True) else "gelu"
            )
        if trait not in family.open and has != wants:
            yield f"{trait} would be {json.dumps(wants)}, not {json.dumps(has)}"
    if bool(shape.experts) != bool(family.experts):
        yield f"experts would be {'none' if shape.experts else 'there'}"
    if name == "deepseek_v3" and not (
        shape.kv_latent and shape.shared_experts
    ):
        yield "kv_latent and shared_experts would be there"
    # Its divisor of scores can only come from yarn's scale.
    if name == "deepseek_v3" and shape.query_scalar and shape.rope_factor == 1:
        yield f"query_scalar would be head_dim, {shape.head_dim}, not {shape.query_scalar:g}"
    if family.mixers and not shape.shared_experts:
        yield "shared_experts would be there"
    if family.mixers and shape.windows:
        yield "windows would be in no blocks"
    if name in ("mixtral", "gpt_oss") and shape.expert_ffn not in (
        0,
        shape.ffn,
    ):
        yield f"expert_ffn would be ffn, {shape.ffn}, not {shape.expert_ffn}"
    scale = math.sqrt(shape.hidden) if name in _SCALED else 1.0
    if not math.isclose(shape.embed_scale, scale):
        yield f"embed_scale would be {scale:g}, not {shape.embed_scale:g}"
    # The longest pattern of windows that this kind of family can write.
    most = {"": 0, "all": 1, "some": len(shape.windows)}[family.windows]
    if len(shape.windows) > most:
        yield f"windows would be in {'all' if family.windows else 'no'} blocks"
    if len({*shape.windows} - {0}) > 1:
        yield "windows would have one size"
    # GPT-2 has neither grouped keys nor a head size of its own.
    usual = (
        shape.kv_heads == shape.heads
        and shape.head_dim * shape.heads == shape.hidden
    )
    if name == "gpt2" and not usual:
        yield "heads would share no keys and be hidden / heads wide"


def config_of(shape: Shape, family: str, dtype: str) -> dict[str, Any]:
    """The config.json of a shape."""
    data = FAMILIES[family]
    config: dict[str, Any] = {
        "architectures": [data.architecture],
        "model_type": family,
    }
    config |= {name: getattr(shape, ours) for name, ours in _SIZES.items()}
    config["torch_dtype"] = dtype
    config |= {
        theirs: getattr(shape, ours) for theirs, ours in data.experts.items()
    }
    if shape.dense_layers and "dense_layers" not in data.experts.values():
        config["mlp_only_layers"] = [*range(shape.dense_layers)]
    if family == "gpt2":
        # GPT-2 has its own names for these keys: n_embd for hidden_size.
        back = {ours: theirs for theirs, ours in data.keys.items()}
        dropped = ("num_key_value_heads", "head_dim", "rope_theta")
        config = {
            back.get(k, k): x for k, x in config.items() if k not in dropped
        }
        return config | {"activation_function": "gelu_new"}
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": shape.rope_theta,
    }
    # Without stretching, the type stays "default".
    if shape.rope_factor != 1:
        rope["rope_type"] = shape.rope_scaling
        rope |= {
            k: getattr(shape, ours)
            for k, ours in _ROPE[shape.rope_scaling].items()
        }
        if shape.rope_scaling == "yarn":
            rope["truncate"] = shape.rope_truncated
        config["rope_scaling"] = {
            k: x for k, x in rope.items() if k != "rope_theta"
        }
    if shape.kv_latent:
        # Their head_dim is the rotated part, because transformers' rope reads
        # it.
        config |= {
            "q_lora_rank": shape.q_latent or None,
            "head_dim": shape.turned,
        }
        config |= {
            "v_head_dim": shape.valued,
            "qk_rope_head_dim": shape.turned,
        }
        config |= {
            "num_nextn_predict_layers": shape.predictors,
            "qk_nope_head_dim": shape.head_dim - shape.turned,
        }
        config["rope_interleave"] = shape.rope_pairs == "neighbours"
        # The inverse of reading: the scale that gives this divisor of scores.
        if shape.query_scalar:
            scale = (shape.head_dim / shape.query_scalar) ** 0.25
            rope["mscale_all_dim"] = round(
                (scale - 1) / (0.1 * math.log(shape.rope_factor)), 12
            )
            config["rope_scaling"]["mscale_all_dim"] = rope["mscale_all_dim"]
    if data.mixers:
        config |= _mixers_in(shape)
        rope["partial_rotary_factor"] = shape.turned / shape.head_dim
    # Dynamic scaling measures the sequence against this length.
    if shape.rope_scaling == "dynamic" and shape.rope_factor != 1:
        config["max_position_embeddings"] = shape.rope_original
    # Newer readers take rope from here, older ones from `rope_theta` and
    # `rope_scaling`.
    config["rope_parameters"] = rope
    plain = shape.activation in ("", "silu")
    config["hidden_act"] = "silu" if plain else "gelu_pytorch_tanh"
    # Qwen2 always has biases of q, k and v, and no key for them.
    if family != "qwen2":
        config["attention_bias"] = shape.bias == "all"
    # One window for each block, as the configuration lists them.
    repeated = cycle(shape.windows)
    windows = [n for _, n in zip(range(shape.layers), repeated, strict=False)]
    if data.windows:
        config["sliding_window"] = max(windows, default=0) or None
    if data.windows == "some":
        config["use_sliding_window"] = bool(windows)
        each = windows or [0] * shape.layers
        config["layer_types"] = [
            "sliding_attention" if n else "full_attention" for n in each
        ]
    if family in _SCALED:
        scalar = shape.query_scalar or shape.head_dim
        config |= {
            "hidden_activation": config["hidden_act"],
            # Their field is declared as an integer.
            "query_pre_attn_scalar": int(scalar)
            if scalar == int(scalar)
            else scalar,
            "attn_logit_softcapping": shape.softcap or None,
            "final_logit_softcapping": shape.logit_softcap or None,
        }
    # Blocks with a window have their own rope.
    if family == "gemma3_text":
        local = {
            "rope_type": "default",
            "rope_theta": shape.rope_local_theta or shape.rope_theta,
        }
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": local,
        }
        config["rope_local_base_freq"] = local["rope_theta"]
    return config


def _mixers_in(shape: Shape) -> dict[str, Any]:
    """Qwen3-Next's keys for the mixers of blocks and for shared experts."""
    blocks = (mixer_of_block(shape, number) for number in range(shape.layers))
    return {
        "layer_types": [row.hub_name for row in blocks],
        "shared_expert_intermediate_size": shape.shared_experts
        * shape.expert_ffn,
        "partial_rotary_factor": shape.turned / shape.head_dim,
    }
