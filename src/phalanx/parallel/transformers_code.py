"""Hugging Face models in transformers' own code: from a folder to pieces and rules.

`transformers_frame.py` runs their forward piece by piece, `transformers_apart.py` finds
the pieces, `transformers_rules.py` decides which weights are sharded, and
`transformers_refused.py` refuses the rest.

Not here: code that a folder names (`auto_map`). It is never run.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import LayoutError, Shape
from ..layout.families import hub_config, shape_of
from .model import Model, Original, Undrawn
from .transformers_apart import TakenApart, layers_of
from .transformers_frame import (
    ATTENTION,
    InFloat64,
    TransformersEmbed,
    TransformersHead,
    as_block,
    attend,
    make_tables,
)
from .transformers_refused import ATTENTION_OF_ITS_OWN, error_line, refuse
from .transformers_rules import CutRules
from .whole import TOKENS, Whole, parameter_places


def load_transformers(folder: str) -> Model:
    """Load the model in a Hugging Face folder, with transformers' own code, on meta."""
    table, where = hub_config(folder)
    shape, name = shape_of(table, where), str(table["model_type"])
    try:
        with Undrawn():
            apart = TakenApart(made_model(table, name))
            rules = CutRules(apart)
            model, names = _model_of(apart, rules, shape)
    except LayoutError as error:
        raise LayoutError(
            f"{where}: {str(error).rstrip('.')}: this model cannot be trained."
        ) from None
    files = {ours: apart.files[theirs] for ours, theirs in names.items()}
    whole = functools.partial(_their_whole, table, name, names, model.pieces)
    return replace(
        model, original=Original(files, tuple(rules.notes)), whole=whole
    )


def _their_whole(
    table: Mapping[str, Any],
    name: str,
    names: Mapping[str, str],
    pieces: Sequence[tuple[str, nn.Module]],
) -> Whole:
    """The whole transformers model with its eager attention; `names` maps weights."""
    # Their eager attention is the reference, instead of ours in their table.
    with Undrawn():
        made = made_model(table, name, "eager")
    ours = {theirs: name for name, theirs in names.items()}
    parameters = {x: ours[theirs] for theirs, x in made.named_parameters()}
    places, missing = parameter_places(made, parameters)
    _, blocks = layers_of(made)
    # The first block among the pieces; `theirs` is a block's own forward.
    first = next(
        n for n, (_, piece) in enumerate(pieces) if hasattr(piece, "theirs")
    )
    parts = {first + number: block for number, block in enumerate(blocks)}
    arguments = {"input_ids": TOKENS, "position_ids": "positions"}
    label = f"{type(made).__name__}.forward"
    return _TheirWhole(label, made, arguments, places, parts, missing)


class _TheirWhole(Whole):
    """A whole transformers model that computes at least in its weights' precision."""

    def bind(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().bind(weights)
        dtype = next(iter(weights.values())).dtype
        wide = torch.promote_types(dtype, torch.float32)
        # Tables such as rope's frequencies get values, by their own initialization.
        with self._widened(wide):
            for module in self.module.modules():
                make_tables(self.module, module, torch.device("cpu"), wide)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        with self._widened(next(self.module.parameters()).dtype):
            return super().loss(batch)

    @staticmethod
    def _widened(dtype: torch.dtype) -> AbstractContextManager[object]:
        return InFloat64() if dtype == torch.float64 else nullcontext()


def _model_of(
    apart: TakenApart, rules: CutRules, shape: Shape
) -> tuple[Model, dict[str, str]]:
    """Build the model, and map the names of its weights to those in transformers' code."""
    # Two pieces of their forward around the blocks, which become pieces themselves.
    embed = TransformersEmbed(apart.frame, apart.before)
    head = TransformersHead(apart.frame, apart.after, len(apart.blocks) - 1)
    table, learned = rules.table(embed, head)
    for number, block in enumerate(apart.blocks):
        as_block(block, number)
    blocks = tuple(
        (f"layers.{n}", block) for n, block in enumerate(apart.blocks)
    )
    pieces = (("embed", embed), *blocks, ("head", head))
    # What the trial run has shown counts, and not what the configuration says.
    sizes = replace(
        shape,
        layers=len(apart.blocks),
        heads=apart.heads,
        kv_heads=apart.kv,
        head_dim=apart.head_dim,
        positions="learned" if learned else "rope",
    )
    model = Model(
        pieces, table, {"heads": apart.heads, "kv": apart.kv}, shape=sizes
    )
    names = {name: apart.names[p] for name, p in model.weights.items()}
    return replace(model, shape=replace(sizes, tied=bool(model.tied))), names


def made_model(
    table: Mapping[str, Any],
    name: str,
    attention: str = ATTENTION,
    device: str = "meta",
) -> Any:
    """Build the transformers model of a configuration."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.auto import (
            CONFIG_MAPPING,
            MODEL_FOR_CAUSAL_LM_MAPPING,
        )
    except ImportError:
        raise LayoutError(
            f"'model_type' is {name[:40]!r}, which needs transformers 5 (pip install 'transformers>=5')"
        ) from None
    own = (
        " Code that it names (auto_map) is not run"
        if "auto_map" in table
        else ""
    )
    known = name in CONFIG_MAPPING
    refuse(
        {
            f"transformers has no code for 'model_type' {name[:40]!r}.{own}": not known
        }
    )
    # Keys that begin with _ select kernels, which transformers might download.
    dropped = ("auto_map", "model_type")
    plain = {
        k: x
        for k, x in table.items()
        if k not in dropped and not k.startswith("_")
    }
    kind = CONFIG_MAPPING[name]
    try:
        config = kind(**plain)
    except Exception as error:  # transformers checks types and sizes
        raise LayoutError(
            f"{kind.__name__} refuses it: {error_line(error)}"
        ) from None
    refuse(
        {
            f"{kind.__name__} is not for a decoder (AutoModelForCausalLM)": kind
            not in MODEL_FOR_CAUSAL_LM_MAPPING,
            "its weights are quantized": getattr(
                config, "quantization_config", None
            ),
        }
    )
    # Our attention must be in their table before a model asks for it by name.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    try:
        # On meta: no weight is allocated or drawn.
        with torch.device(device):
            auto: Any = AutoModelForCausalLM
            made = auto.from_config(config, attn_implementation=attention)
    except KeyError as error:
        # The model looks attention up in a table of its own, which lacks our name.
        refuse({ATTENTION_OF_ITS_OWN: error.args == (ATTENTION,)})
        raise LayoutError(
            f"its code cannot be made: {error_line(error)}"
        ) from None
    except Exception as error:
        raise LayoutError(
            f"its code cannot be made: {error_line(error)}"
        ) from None
    made = made.float().eval()  # with p=0 below: without its dropout
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made
