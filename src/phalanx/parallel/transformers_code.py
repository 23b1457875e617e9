"""Models of Hugging Face in transformers' own code: its pieces, and which of their weights are cut.

Their forward runs as it is, once for each piece, with stand-ins where the modules of other pieces
were. So what it computes between modules (scaled vectors, angles of rope, the scale of logits) stays
theirs. `base_model_tp_plan` says which weights are cut; what it gets wrong is left whole and named in
`Model.notes`. Attention comes through `ALL_ATTENTION_FUNCTIONS` into a child `core`, which context
parallelism replaces.

Not here: code that a folder names (`auto_map`). It is never run.
"""

import copy
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layout import LayoutError, Rules, Shape
from ..layout.families import hub_config, shape_of
from ..layout.rules import Cut
from ..models import Core
from ..models.loss import CrossEntropy
from .model import Model, Original, Undrawn
from .whole import TOKENS, Whole, parameter_places

ATTENTION = "phalanx"  # in their table of attention functions
_ATTENTION_OF_ITS_OWN = "its attention does not go through ALL_ATTENTION_FUNCTIONS"
# What they call attention with, beside what `_attend` reads, that changes nothing here: there is no
# cache, nothing is dropped, and who attends to whom follows from the documents.
_NOTHING = (
    "dropout is_causal position_ids use_cache cache_position position_embeddings output_attentions"
    " output_hidden_states return_dict layer_idx past_key_values"
)
_BY_LENGTH = {"dynamic", "longrope"}
_RUN = 8  # tokens of the sequences with which a model is tried on meta


class _Reached(Exception):
    """Their forward has come past the piece that runs: the rest is other pieces'."""

    def __init__(self, x: Tensor) -> None:
        super().__init__("a forward of transformers ran on behind the piece that was asked for")
        self.x = x


class _InFloat64(TorchFunctionMode):
    """Computes in float64 what transformers' code computes in float32 at least, such as norms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        named = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*(torch.float64 if x is torch.float32 else x for x in args), **named)


class _StandIn(nn.Module):
    """Stands where a module was in their model. It passes on what it is given, unless the piece that
    runs has something to do here."""

    def __init__(self, frame: "_Frame", key: str | int, real: nn.Module) -> None:
        super().__init__()
        # Their forward may read attributes of the module; its weights are a piece's and no child here.
        self.__dict__.update(frame=frame, key=key, real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (run := self.frame.running.get(self.key)) is not None:
            return run(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if not x.is_floating_point():
            return x.new_zeros((*x.shape, 1), dtype=self.frame.dtype)
        return (x,) if isinstance(self.key, int) and self.frame.tuples else x


class _Frame:
    """Their model with a stand-in for every module that has weights, and the whole of what it
    computes around them. One thread uses it at a time."""

    def __init__(self, causal: Any, base: Any) -> None:
        self.causal, self.base = causal, base
        self.running: Mapping[str | int, Callable[..., Any]] = {}
        self.dtype, self.made = torch.float32, (torch.device("meta"), torch.float32)
        self.shared: tuple[Tensor | None, Tensor | None] = None, None  # positions, documents
        self.tuples = False  # a block returns (x, ...)

    def run(
        self,
        running: Mapping[str | int, Callable[..., Any]],
        dtype: torch.dtype,
        positions: Tensor,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> Any:
        """Run their forward with these modules in it: the value that it was stopped with, else what
        it gives."""
        self.running, self.dtype, self.shared = running, dtype, (positions, documents)
        wide = torch.promote_types(dtype, torch.float32)
        with _InFloat64() if wide == torch.float64 else nullcontext():
            self._make_buffers(positions.device, wide)
            given = {"input_ids": tokens}
            if tokens is None:  # what is looked up is another piece's: its size and dtype are used
                given = {"inputs_embeds": positions.new_zeros((*positions.shape, 1), dtype=dtype)}
            try:
                model = self.causal if whole else self.base
                return model(**given, position_ids=positions, use_cache=False)
            except _Reached as end:
                return end.x
            finally:
                self.running, self.shared = {}, (None, None)

    def _make_buffers(self, device: torch.device, wide: torch.dtype) -> None:
        """Their tables, as rope's frequencies, which are not on meta and not in files."""
        if self.made == (device, wide):
            return
        self.made = device, wide
        for module in self.causal.modules():
            if not isinstance(module, _StandIn):
                _make_tables(self.causal, module, device, wide)


def _make_tables(causal: Any, module: nn.Module, device: torch.device, wide: torch.dtype) -> None:
    """Make the buffers of one of their modules anew, and fill them as their code does."""
    if not module._buffers:
        return
    for key, x in module._buffers.items():
        if x is not None:
            dtype = wide if x.is_floating_point() else x.dtype
            module._buffers[key] = torch.empty_like(x, dtype=dtype, device=device)
    with torch.no_grad():
        causal._init_weights(module)


class _Outer(nn.Module):
    """Modules of theirs around the blocks; `name` in their model is the child's name here."""

    frame: _Frame

    def __init__(self, frame: _Frame, children: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["frame"] = frame
        for name, child in children.items():
            self.add_module(name, child)

    def running(self, block: int, act: Callable[..., Any]) -> dict[str | int, Callable[..., Any]]:
        """Modules that run in the transformers model: these, and `act` in place of a block."""
        return {**dict(self.named_children()), block: act}


class TransformersEmbed(_Outer):
    """The part of the transformers forward before its first block."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        x: Tensor = self.frame.run(self.running(0, _stop), dtype, positions, tokens=tokens)
        return x


def _stop(x: Tensor, *args: Any, **kwargs: Any) -> None:
    raise _Reached(x)


class TransformersHead(_Outer):
    """The part of the transformers forward after its last block, and the loss as a sum."""

    def __init__(self, frame: _Frame, children: Mapping[str, nn.Module], last: int) -> None:
        super().__init__(frame, children)
        self.last, self.loss = last, CrossEntropy()

    def logits(self, x: Tensor, positions: Tensor) -> Tensor:
        def end(*args: Any, **kwargs: Any) -> Any:
            return (x,) if self.frame.tuples else x

        running = self.running(self.last, end)
        y: Tensor = self.frame.run(running, x.dtype, positions, whole=True).logits
        return y

    def forward(self, x: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.logits(x, positions), targets)
        return loss


def _forward(self: Any, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
    """A block of theirs as a piece: its own forward, with the arguments that their model makes."""

    def block(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("hidden_states", None)
        y = self.theirs(x, *args[1:], **kwargs)
        raise _Reached(y[0] if isinstance(y, tuple) else y)

    y: Tensor = self.frame.run({self._number: block}, x.dtype, positions, documents)
    return y


@functools.cache
def _block_class(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward, "theirs": kind.forward})


# ---- attention


def _attend(
    module: Any,
    query: Tensor,  # (batch, heads, time, head_dim)
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The entry in transformers' table of attention functions: calls the module's child `core`,
    which its first call makes."""
    if "core" not in module._modules:
        unknown = sorted(k for k, x in more.items() if k not in _NOTHING.split() and _is_set(x))
        _refuse(
            {
                f"its attention takes {', '.join(unknown)}": unknown,
                "its attention has a mask of its own": attention_mask is not None,
                "tokens attend to later ones": getattr(module, "is_causal", True) is False
                or more.get("is_causal") is False,
                "keys and values differ in width": key.shape[-1] != value.shape[-1],
            }
        )
        module.core = Core(sliding_window or 0, softcap or 0.0)
        plain = 1 / math.sqrt(query.shape[-1])
        module.query_scale = 1.0 if scaling is None else float(scaling) / plain
        module.heads_seen = query.shape[1], key.shape[1], query.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not math.isclose(module.query_scale, 1.0, rel_tol=1e-15):
        q = q * module.query_scale  # the core divides by the root of head_dim
    return module.core(q, k, v, *module.frame.shared), None


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _refuse(reasons: Mapping[str, Any]) -> None:
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        raise LayoutError("; ".join(wrong))


# ---- from a folder to a model


def load_transformers(folder: str) -> Model:
    """The model in a folder of Hugging Face as transformers' own code computes it, on meta."""
    table, where = hub_config(folder)
    shape, name = shape_of(table, where), str(table["model_type"])
    try:
        with Undrawn():
            described = _Described(_made(table, name), shape)
            model, names = described.model()
    except LayoutError as error:
        raise LayoutError(
            f"{where}: {str(error).rstrip('.')}: this model cannot be trained."
        ) from None
    files = {ours: described.files[theirs] for ours, theirs in names.items()}
    whole = functools.partial(_their_whole, table, name, names, model.pieces)
    return replace(model, original=Original(files, tuple(described.notes)), whole=whole)


def _their_whole(
    table: Mapping[str, Any],
    name: str,
    names: Mapping[str, str],
    pieces: Sequence[tuple[str, nn.Module]],
) -> Whole:
    """Their model as it is, with their plain attention. `names` maps weights of ours to theirs."""
    with Undrawn():
        made = _made(table, name, "eager")
    ours = {theirs: name for name, theirs in names.items()}
    parameters = {x: ours[theirs] for theirs, x in made.named_parameters()}
    places, missing = parameter_places(made, parameters)
    _, blocks = _layers(made)
    first = next(n for n, (_, piece) in enumerate(pieces) if hasattr(piece, "theirs"))
    parts = {first + number: block for number, block in enumerate(blocks)}
    arguments = {"input_ids": TOKENS, "position_ids": "positions"}
    label = f"{type(made).__name__}.forward"
    return _TheirWhole(label, made, arguments, places, parts, missing)


class _TheirWhole(Whole):
    """A model of transformers, which computes as widely as its weights are."""

    def bind(self, weights: Mapping[str, nn.Parameter]) -> None:
        super().bind(weights)
        dtype = next(iter(weights.values())).dtype
        wide = torch.promote_types(dtype, torch.float32)
        with self._widened(wide):
            for module in self.module.modules():
                _make_tables(self.module, module, torch.device("cpu"), wide)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        with self._widened(next(self.module.parameters()).dtype):
            return super().loss(batch)

    @staticmethod
    def _widened(dtype: torch.dtype) -> AbstractContextManager[object]:
        return _InFloat64() if dtype == torch.float64 else nullcontext()


def _made(
    table: Mapping[str, Any], name: str, attention: str = ATTENTION, device: str = "meta"
) -> Any:
    """Their model of a configuration."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError:
        raise LayoutError(
            f"'model_type' is {name[:40]!r}, which needs transformers 5 (pip install 'transformers>=5')"
        ) from None
    own = " Code that it names (auto_map) is not run" if "auto_map" in table else ""
    known = name in CONFIG_MAPPING
    _refuse({f"transformers has no code for 'model_type' {name[:40]!r}.{own}": not known})
    # Keys that begin with _ choose kernels, which may be fetched.
    dropped = ("auto_map", "model_type")
    plain = {k: x for k, x in table.items() if k not in dropped and not k.startswith("_")}
    kind = CONFIG_MAPPING[name]
    try:
        config = kind(**plain)
    except Exception as error:  # theirs checks types and sizes
        raise LayoutError(f"{kind.__name__} refuses it: {_line(error)}") from None
    _refuse(
        {
            f"{kind.__name__} is of no decoder (AutoModelForCausalLM)": kind
            not in MODEL_FOR_CAUSAL_LM_MAPPING,
            "its weights are quantized": getattr(config, "quantization_config", None),
        }
    )
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    try:
        with torch.device(device):
            auto: Any = AutoModelForCausalLM
            made = auto.from_config(config, attn_implementation=attention)
    except KeyError as error:
        _refuse({_ATTENTION_OF_ITS_OWN: error.args == (ATTENTION,)})
        raise LayoutError(f"its code cannot be made: {_line(error)}") from None
    except Exception as error:
        raise LayoutError(f"its code cannot be made: {_line(error)}") from None
    made = made.float().eval()  # without its dropout
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


class _Described:
    """Their model taken apart: its pieces, and the rules of its weights."""

    def __init__(self, causal: Any, shape: Shape) -> None:
        self.causal, self.shape, self.config = causal, shape, causal.config
        self.names = {p: name for name, p in causal.named_parameters()}
        deep = [name for x, name in self.names.items() if x.dim() > 2][:1]
        _refuse({f"it has experts or convolutions ({', '.join(deep)})": deep})
        self.files = _stored(causal)
        self.path, layers = _layers(causal)
        self.blocks: list[Any] = list(layers)
        self.frame = _Frame(causal, self.path[-1])
        self.outer = self._taken_out(layers)
        self.calls: dict[nn.Module, tuple[Any, Any, torch.Size]] = {}
        self.before, self.after = self._order()
        self.notes: dict[str, None] = {}
        self._widths: dict[nn.Module, int] = {}
        self._planned: Mapping[str, str] = getattr(self.config, "base_model_tp_plan", None) or {}
        if not self._planned:
            self.notes["there is no plan for tp: each rank of it has the blocks whole"] = None
        stages = getattr(self.config, "base_model_pp_plan", None)
        named = [name for name, _ in self.path[-1].named_children()]
        if stages and (missed := [n for n in named if n in self.outer and n not in stages]):
            self.notes[f"the plan for pp does not name {', '.join(missed)}"] = None
        owners = [[m for m in block.modules() if "core" in m._modules] for block in self.blocks]
        seen = {m.heads_seen for found in owners for m in found}
        tables = [n for block in self.blocks for n, _ in block.named_buffers()]
        bare = [n for m in self.path for n, _ in m.named_parameters(recurse=False)]
        _refuse(
            {
                _ATTENTION_OF_ITS_OWN: not seen,
                "it has blocks without attention, or with two": seen and {*map(len, owners)} != {1},
                "its blocks differ in heads": len(seen) > 1,
                f"its blocks have tables of their own ({', '.join(tables[:1])})": tables,
                f"it has weights outside of its modules ({', '.join(bare)})": bare,
                "its windows are not passed to its attention": seen and self._windows(owners),
                "its rope changes with the length of a sequence": self._stretched() & _BY_LENGTH,
            }
        )
        self.heads, self.kv, self.head_dim = seen.pop()

    def _windows(self, owners: list[list[Any]]) -> bool:
        """True if its configuration has windows, or chunks, with which attention was not called."""
        types = list(getattr(self.config, "layer_types", None) or ())
        kinds = [
            "sliding_attention" if m.core.window else "full_attention"
            for found in owners
            for m in found
        ]
        if types:
            return types != kinds
        size = getattr(self.config, "sliding_window", None)
        return bool(size) and "sliding_attention" not in kinds

    def _stretched(self) -> set[str]:
        found = set()
        for module in self.causal.modules():
            kind = getattr(module, "rope_type", "") if not isinstance(module, _StandIn) else ""
            found |= set(kind.values()) if isinstance(kind, dict) else {kind}
        return found

    def _taken_out(self, layers: nn.ModuleList) -> dict[str, nn.Module]:
        """The modules with weights around the blocks; stand-ins are where they and the blocks were."""
        outer: dict[str, nn.Module] = {}
        for owner in self.path:
            for name, child in list(owner.named_children()):
                if child is layers or child in self.path or not [*child.parameters()]:
                    continue
                _refuse({f"it has two modules called {name}": name in outer})
                outer[name] = child
                owner._modules[name] = _StandIn(self.frame, name, child)
        for number, block in enumerate(self.blocks):
            layers[number] = _StandIn(self.frame, number, block)
            for module in block.modules():
                module.__dict__["frame"] = self.frame
        return outer

    def _order(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """Modules that the forward calls before the blocks, and after them, found by running it
        whole on meta."""
        order: list[str | int] = []

        def noted(key: str | int, module: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                order.append(key)
                y = module(*args, **kwargs)
                self.frame.tuples = isinstance(y, tuple) if key == 0 else self.frame.tuples
                return y

            return run

        tokens = torch.empty(2, _RUN, dtype=torch.int64, device="meta")
        every: dict[str | int, Any] = {n: noted(n, each) for n, each in enumerate(self.blocks)}
        every.update((name, noted(name, each)) for name, each in self.outer.items())
        hooks = [
            module.register_forward_hook(self._called, with_kwargs=True)
            for block in self.blocks
            for module in block.modules()
        ]
        try:
            self.frame.run(every, torch.float32, tokens, tokens=tokens, whole=True)
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(f"its forward cannot be run piece by piece: {_line(error)}") from None
        finally:
            for hook in hooks:
                hook.remove()
        count = len(self.blocks)
        _refuse(
            {
                "its forward does not call each block once, in their order": [
                    key for key in order if isinstance(key, int)
                ]
                != [*range(count)],
                "its forward calls modules between its blocks": order.index(count - 1)
                - order.index(0)
                != count - 1,
            }
        )
        first = order.index(0)
        parts = set(order[:first]), set(order[first:])
        unused = ", ".join(self.outer.keys() - set(order))
        _refuse(
            {
                "it uses a module before and after its blocks": parts[0] & parts[1],
                f"its forward does not use {unused}": unused,
            }
        )
        before, after = ({k: self.outer[k] for k in self.outer if k in part} for part in parts)
        return before, after

    def _called(self, module: nn.Module, args: Any, kwargs: Any, y: Any) -> None:
        y = y[0] if isinstance(y, tuple) else y
        if isinstance(y, Tensor):
            self.calls[module] = args, kwargs, y.shape

    # ---- which weights are cut

    def model(self) -> tuple[Model, dict[str, str]]:
        """The model, with the rules that the plan gives where its parts can be cut, and what its
        weights are called in theirs."""
        embed = TransformersEmbed(self.frame, self.before)
        head = TransformersHead(self.frame, self.after, len(self.blocks) - 1)
        rules = {**self._outer_rules("embed", embed), **self._outer_rules("head", head)}
        for number, block in enumerate(self.blocks):
            rules |= {f"layers.{number}.{n}": dims for n, dims in self._rules(block).items()}
            _as_block(block, number)
        blocks = tuple((f"layers.{n}", block) for n, block in enumerate(self.blocks))
        pieces = (("embed", embed), *blocks, ("head", head))
        learned = any("position" in dims for dims in rules.values())
        model = Model(
            pieces,
            Rules.parse("\n".join(f"{name} : {dims}" for name, dims in _joined(rules).items())),
            {"heads": self.heads, "kv": self.kv},
            shape=replace(
                self.shape,
                layers=len(self.blocks),
                heads=self.heads,
                kv_heads=self.kv,
                head_dim=self.head_dim,
                positions="learned" if learned else "rope",
            ),
        )
        names = {name: self.names[p] for name, p in model.weights.items()}
        assert model.shape is not None
        return replace(model, shape=replace(model.shape, tied=bool(model.tied))), names

    def _outer_rules(self, piece: str, module: nn.Module) -> dict[str, str]:
        """Lookups and the head are cut over the vocabulary, where they are torch's own."""
        rules = {}
        for path, child in module.named_modules():
            for key, weight in child.named_parameters(recurse=False):
                dims = "embed" if weight.dim() == 1 else " ".join("-" * weight.dim())
                rows, at_head = weight.shape[0], isinstance(child, nn.Linear) and piece == "head"
                if rows == self.config.vocab_size and weight not in self._special:
                    lookup = type(child) is nn.Embedding and piece == "embed"
                    dims = "vocab embed" if lookup or (at_head and key == "weight") else dims
                    dims = "vocab" if at_head and key == "bias" else dims
                elif type(child) is nn.Embedding and piece == "embed":
                    dims = "position embed"
                rules[f"{piece}.{path}.{key}"] = dims
        return rules

    @property
    def _special(self) -> set[nn.Parameter]:
        """Weights of the vocabulary that something else than torch's own modules uses."""
        plain = nn.Linear.forward, nn.Embedding.forward
        return {
            weight
            for outer in self.outer.values()
            for module in outer.modules()
            for weight in module.parameters(recurse=False)
            if type(module).forward not in plain
        }

    def _rules(self, block: nn.Module) -> dict[str, str]:
        rules = {
            name: "embed" if x.dim() == 1 else " ".join("-" * x.dim())
            for name, x in block.named_parameters()
        }
        for path, owner in block.named_modules():
            rules |= {f"{path}.{name}": dims for name, dims in self._owned(path, owner).items()}
        return rules

    def _owned(self, path: str, owner: nn.Module) -> dict[str, str]:
        """The rules of a module whose linears the plan cuts, input and output: attention, or the MLP.
        None where it is left whole."""
        linears = {n: m for n, m in owner.named_children() if isinstance(m, nn.Linear)}
        styles = {name: self._style(linear) for name, linear in linears.items()}
        if not any(styles.values()):
            if linears and self._planned:
                self._note(path or "the block", "the plan does not name " + ", ".join(linears))
            return {}
        others = sorted({*styles.values()} - {"colwise", "rowwise", ""})
        outs = [name for name, style in styles.items() if style == "colwise"]
        ins = [name for name, style in styles.items() if style == "rowwise"]
        if others or not (outs and ins) or not path:
            why = f"is planned as {', '.join(others)}" if others else "has no pair of cut linears"
            self._note(
                path or "the block", why if path else "owns linears: the residual is cut, too"
            )
            return {}
        dims = {name: self._dim(owner, linears[name].out_features) for name in outs}
        dims |= {name: self._dim(owner, linears[name].in_features) for name in ins}
        if "" in dims.values() or len({*dims.values()} - {"kv"}) > 1:
            self._note(path, f"{', '.join(dims)} are no whole heads or of several widths")
            return {}
        if why := self._fails(owner, dims, outs):
            self._note(path, f"as planned it does not run ({why})")
            return {}
        if missed := [name for name, style in styles.items() if not style]:
            self._note(path, f"the plan does not name {', '.join(missed)}; each rank has it whole")
        rules = {}
        for name, weight in owner.named_parameters():
            linear, _, key = name.rpartition(".")
            if linear in outs:
                rules[name] = dims[linear] + " embed" * (key == "weight")
            elif linear in ins:
                rules[name] = f"embed {dims[linear]}" if key == "weight" else "embed"
            else:  # its copies see other heads or features: gradients are added up
                rules[name] = " ".join(["head", *"-" * (weight.dim() - 1)])
        return rules

    def _style(self, linear: nn.Linear) -> str:
        """The tp plan's style of a linear; empty if the plan does not name it, or keeps it whole."""
        prefix = self.causal.base_model_prefix + "."
        name = self.names[linear.weight].removeprefix(prefix).removesuffix(".weight")
        style = self._planned.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        return "" if style.startswith("replicated") else str(style)

    def _dim(self, owner: nn.Module, width: int) -> str:
        """Maps a sharded width to our dimension name, or returns ""."""
        if "core" not in owner._modules:
            return "ffn" if width == self._widths.setdefault(owner, width) else ""
        if width == self.heads * self.head_dim:
            return "heads"
        if width == self.kv * self.head_dim:
            return "kv"
        fused = self.heads == self.kv and width % (self.heads * self.head_dim) == 0
        return "heads" if fused else ""

    def _fails(self, owner: nn.Module, dims: Mapping[str, str], outs: list[str]) -> str:
        """Explains why a module does not run with sharded linears, by running it on meta, or returns ""."""
        args, kwargs, shape = self.calls[owner]
        parts = next(
            (
                n
                for n in range(2, self.heads + 1)
                if self.heads % n == 0 and (self.kv % n == 0 or n % self.kv == 0)
            ),
            1,
        )
        small = copy.deepcopy(owner, {id(self.frame): self.frame})
        counts = {"heads": self.heads, "kv": self.kv}
        for name, dim in dims.items():
            linear: Any = small.get_submodule(name)
            for key, weight in list(linear.named_parameters()):
                if key == "bias" and name not in outs:
                    continue
                size, at = list(weight.shape), 0 if name in outs else 1
                unit = max(1, size[at] // counts.get(dim, size[at]))
                size[at] = Cut.of(size[at], parts, 0, unit).length
                setattr(linear, key, nn.Parameter(torch.empty(size, device="meta")))
        try:
            y = small(*args, **kwargs)
        except Exception as error:
            return _line(error)
        y = y[0] if isinstance(y, tuple) else y
        return "" if y.shape == shape else "it gives another shape"

    def _note(self, where: str, what: str) -> None:
        self.notes[f"{where}: {what}"] = None


def _stored(causal: Any) -> dict[str, str]:
    """Names of the weights in files, which differ from those in the code for some models."""
    from transformers.core_model_loading import revert_weight_conversion

    every = dict(causal.named_parameters())
    files = {x: name for name, x in revert_weight_conversion(causal, every).items()}
    lost = [name for name, x in every.items() if x not in files]
    _refuse({f"its files hold {', '.join(lost[:3])} in another form": lost})
    return {name: files[x] for name, x in every.items()}


def _layers(causal: Any) -> tuple[list[Any], nn.ModuleList]:
    """The modules from the whole model down to the one that owns the blocks, and its blocks."""
    count = getattr(causal.config, "num_hidden_layers", 0)
    for name, module in causal.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = name.split(".")[:-1]
            owners = [causal.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
            return owners, module
    raise LayoutError(f"it has no list of its {count} blocks")


def _as_block(block: Any, number: int) -> None:
    """Another class and not another module: names and weights remain."""
    kind: Any = type(block)
    block.__class__ = _block_class(kind)
    block._number = number


def _joined(rules: Mapping[str, str]) -> dict[str, str]:
    """One line for all blocks where these are alike; longer names first, as a * has dots in it, too."""
    kinds: dict[str, set[str]] = {}
    for name, dims in rules.items():
        kinds.setdefault(re.sub(r"^layers\.\d+", "layers.*", name), set()).add(dims)
    lines = {}
    for name, dims in rules.items():
        pattern = re.sub(r"^layers\.\d+", "layers.*", name)
        lines[pattern if len(kinds[pattern]) == 1 else name] = dims
    return dict(sorted(lines.items(), key=lambda line: -line[0].count(".")))
