"""Refuses layouts that would silently change a model, by name and before anything runs.

Weights become views of flat buffers, tensor parallelism replaces modules whose weights
it shards, and a ring replaces attention's core. Each replacement is right only for
plain torch modules: anything that a user added to one of them would be lost. `verify`
tests the rule table itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from ..layout import Layout, LayoutError
from ..layout.adapters import ADAPTER_NAMES
from ..layout.choices import GRAPHS
from ..layout.exact import (
    exact_word,
    no_subtree,
    split_heads,
    uncut_time,
    unequal_parts,
)
from ..layout.rules import AXIS_OF
from ..models import IGNORED, AdaptedLinear, Core
from ..models.adapters import ADAPTERS
from ..models.decoder import ENDS
from ..models.loss import CrossEntropy
from ..models.mixers import KINDS
from ..models.mlps import BLOCKS, PARTS, WITH_LOSSES
from ..models.routed import RoutedProducts
from .mixers import replaced_methods, spread_of
from .mixing import mixing
from .model import Model
from .preference import PreferenceLoss

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def refuse_unfit(model: Model, layout: Layout) -> None:
    """Raise a LayoutError with every part of the model that would be wrong."""
    if wrong := misfits(model, layout):
        raise LayoutError("\n".join(wrong))


def fitting(model: Model, layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    """The layouts that compute the model correctly."""
    known: dict[
        tuple[int | str, ...], bool
    ] = {}  # by everything that a misfit depends on
    chosen = []
    for layout in layouts:
        # Layouts with the same key differ in sizes alone, and no misfit depends on
        # sizes, except the number of parts in `exact`.
        cp = layout.mesh.of("cp.ring") > 1, layout.mesh.of("cp.ulysses") > 1
        parts = layout.exact, layout.time_parts
        words = layout.compile, *parts
        key = layout.tp > 1, layout.seq, *cp, *words
        if key not in known:
            known[key] = not misfits(model, layout) and not mixing(
                model, layout
            )
        if known[key]:
            chosen.append(layout)
    return tuple(chosen)


def misfits(model: Model, layout: Layout) -> tuple[str, ...]:
    """A sentence for every part of the model that this layout would compute wrongly."""
    wrong = [
        *_unnamed(model),
        *_untrainable(model),
        *_uncuttable(model, layout),
    ]
    wrong += _uneven(model, layout)
    if model.original and layout.compile:
        wrong.append(
            "transformers' own code cannot be compiled. Leave compile out."
        )
    if model.shape is None and layout.compile == GRAPHS:
        wrong.append(
            "compile:graphs covers the built-in models alone: a graph does not see"
            " what your own forward does on the host. Use compile."
        )
    # Attention and the loss are looked at only where the table itself is right.
    if layout.seq and layout.tp > 1 and not wrong:
        wrong += _uncut(model)
    if apart := no_subtree(layout):
        wrong.append(" ".join(apart))
    if layout.exact > 1 or layout.time_parts > 1:
        wrong += _without_parts(model, layout)
    noisy: list[str] = []
    for prefix, piece in model.pieces:
        for path, module in piece.named_modules():
            name = f"{prefix}.{path}".rstrip(".")
            if _draws_noise(module):
                noisy.append(name)
            wrong += _anywhere(name, module)
            if layout.tp > 1:
                wrong += _cut(model, name, piece, path, module)
            if path.rpartition(".")[2] != "core":
                continue
            if layout.cp > 1 and spread_of(module):
                wrong += _spread_core(name, module)
            elif layout.mesh.of("cp.ring") > 1:
                wrong += _core(model, name, module)
    wrong += _noise(list(dict.fromkeys(noisy)))
    # dict.fromkeys: a module used by several pieces is reported once.
    return tuple(dict.fromkeys(wrong))


def _without_parts(model: Model, layout: Layout) -> Iterator[str]:
    """Modules and sizes whose products have not been compared in parts."""
    covered = *ENDS, *BLOCKS, *WITH_LOSSES, *PARTS
    for name, piece in model.pieces:
        adapted = any(isinstance(m, AdaptedLinear) for m in piece.modules())
        kind = ADAPTER_NAMES if adapted else type(piece).__name__
        if adapted or type(piece) not in covered:
            yield (
                f"{exact_word(layout)} does not cover {kind} in {name} yet: its"
                " products have not been compared in parts. Use exact, without tp and cp."
            )
            return
    if model.shape is not None:
        for reason in (
            uncut_time(layout, model.shape),
            split_heads(layout, model.shape),
        ):
            if reason is not None:
                yield " ".join(reason)
        for what, way_out in unequal_parts(layout, model.shape):
            yield f"{what} {way_out}"


def _unnamed(model: Model) -> Iterator[str]:
    """Yield a sentence for every weight whose dims no rule names."""
    for name, parameter in model.weights.items():
        try:
            model.rules.dims(name, parameter.dim())
        except LayoutError as error:
            yield str(error)


def _untrainable(model: Model) -> Iterator[str]:
    """Yield a sentence per parameter with hooks, which units would not call."""
    for name, parameter in model.weights.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"{name} has hooks on its gradient, which would never be called. Remove them."


def _uncuttable(model: Model, layout: Layout) -> Iterator[str]:
    """The ways to cut a module that nothing describes, of which too little is known."""
    if not model.as_it_is:
        return
    cut = [axis for axis in ("cp", "ep") if layout.mesh.of(axis) > 1]
    dims = {dim for _, dims in model.rules.lines for dim in dims}
    # tp is possible where a plan has given some dim to it.
    if layout.tp > 1 and not any(AXIS_OF.get(dim) == "tp" for dim in dims):
        cut.append("tp")
    cut += ["seq"] * layout.seq
    if cut:
        # The plan's own reason, if it is tp alone that is refused.
        why = model.why_whole if cut == ["tp"] else ""
        yield (
            f"{' and '.join(cut)} of {layout}: {why or 'nothing says how this module is cut'}. Describe it"
            " (docs/bring-your-model.md), or use dp, ZeRO and pp."
        )


def _uneven(model: Model, layout: Layout) -> Iterator[str]:
    """The weights of a plan for tp that do not divide among the ranks."""
    for name, weight in model.weights.items() if model.as_it_is else ():
        dims = model.rules.dims(name, weight.dim())
        for dim, size in zip(dims, weight.shape, strict=True):
            units = model.counts.get(dim, size)
            # Fewer KV heads than ranks are repeated, if they divide the ranks.
            repeated = dim == "kv" and layout.tp % units == 0
            if AXIS_OF.get(dim) == "tp" and units % layout.tp and not repeated:
                yield f"{layout}: tp{layout.tp} does not divide {units} {dim} of {name}."
                return


# ---- in every layout


def _draws_noise(module: nn.Module) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0


def _noise(names: list[str]) -> Iterator[str]:
    """One sentence for all dropouts of torch: every block has some."""
    if not names:
        return
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    many = "are dropouts" if others else "is a dropout"
    yield (
        f"{names[0]}{others} {many} of torch: their masks come from torch's generator, so no two"
        " layouts would draw the same. Use phalanx.models.Dropout, or p=0."
    )


def _anywhere(name: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, nn.Embedding):
        yield from _embedding(name, module)
    # Meta buffers have no values, and nothing else could compute them.
    empty = [
        key
        for key, x in module._buffers.items()
        if x is not None and x.is_meta
    ]
    if empty and not callable(getattr(module, "reset_buffers", None)):
        yield (
            f"{name} has the buffer {', '.join(empty)} but no method reset_buffers() to fill it: a"
            " model is created on the meta device, where a buffer has no values. Add the method, or"
            " compute the values in the forward."
        )
    # torch's parametrizations replace the weight by a computed attribute.
    if type(module) is nn.Linear and "weight" not in module._parameters:
        yield (
            f"the weight of {name} is computed from other parameters by a hook (weight_norm,"
            " spectral_norm). Compute it in the forward of a class of your own."
        )


def _embedding(name: str, module: nn.Embedding) -> Iterator[str]:
    if module.max_norm is not None:
        yield (
            f"{name} has max_norm={module.max_norm}: its forward changes weights, and several ranks hold"
            " copies of these. Leave max_norm out; scale the rows that were looked up."
        )
    if module.scale_grad_by_freq:
        yield (
            f"{name} has scale_grad_by_freq=True: a rank sees a part of the batch and cannot know"
            " how often a token occurs in all of it. Leave it out."
        )
    if module.sparse:
        yield f"{name} has sparse=True, but gradients are dense here. Leave it out."


# ---- modules that tensor parallelism shards and replaces


def _cut(
    model: Model, name: str, piece: nn.Module, path: str, module: nn.Module
) -> Iterator[str]:
    for key, parameter in module._parameters.items():
        if parameter is None or parameter.dim() < 2:
            continue
        dims = model.rules.dims(f"{name}.{key}", parameter.dim())
        over_tp = [dim for dim in dims if AXIS_OF.get(dim) == "tp"]
        if not over_tp:
            continue
        # Cut in two dims, rank i would have block (i, i) alone.
        if len(over_tp) > 1:
            yield (
                f"{name}.{key} is sharded by tp in two dims ({' '.join(dims)}); a rank would hold one"
                " block of the diagonal. Name one of them '-'."
            )
        elif isinstance(module, (RoutedProducts, *KINDS)):
            continue  # sharded as a whole
        # A bare x @ weight cannot be joined: only what tp's replacements know can.
        elif key != "weight" or parameter.dim() != 2:
            yield (
                f"{name}.{key} is sharded by tp along {over_tp[0]!r}, but the shards can be joined only for"
                " the weight (two dims) of an nn.Linear or nn.Embedding. Use one of these, name its"
                f" dims '{' '.join('-' for _ in dims)}', or use no tp."
            )
        else:
            yield from _replaced(
                name, module, over_tp[0], cut_first=dims[0] == over_tp[0]
            )
            if over_tp[0] == "vocab" and isinstance(module, nn.Linear):
                yield from _loss(name, piece, path)


def _replaced(
    name: str, module: nn.Module, dim: str, *, cut_first: bool
) -> Iterator[str]:
    """Yield a sentence if a sharded module computes more than its replacement."""
    way_out = (
        f" Put what it adds into the module that owns it, name the dim {dim!r} of its weight '-',"
        " or use no tp."
    )
    linear, adapted = (
        isinstance(module, nn.Linear),
        isinstance(module, AdaptedLinear),
    )
    plain: type[nn.Module] = (
        AdaptedLinear if adapted else nn.Linear if linear else nn.Embedding
    )
    kind, owned = (
        type(module).__name__,
        {"weight", "bias"} if linear else {"weight"},
    )
    # Only what the replacement copies: weight, bias and an adapter.
    owned |= {*ADAPTERS} if adapted else set()
    if not isinstance(module, plain):
        if cut_first:
            yield (
                f"{name} is a {kind}: tp shards the first dim of its weight, {dim!r}, and knows only"
                f" how nn.Linear and nn.Embedding use it.{way_out}"
            )
            return
    # A class that overrides the forward computes something that tp would leave out.
    elif (
        type(module).forward is not plain.forward
        or type(module).__call__ is not plain.__call__
    ):
        yield f"{name} is a {kind}: tp computes nn.{plain.__name__}, without what it adds.{way_out}"
    elif (
        more := {*module._parameters, *module._buffers, *module._modules}
        - owned
    ):
        yield f"{name} has {', '.join(sorted(more))} besides what tp shards.{way_out}"
    if "forward" in vars(module):
        yield f"{name} has a forward of its own, set on the module.{way_out}"
    if any(getattr(module, hooks) for hooks in _HOOKS):
        yield f"{name} has hooks, which would see only a part of its features under tp.{way_out}"


def _loss(name: str, piece: nn.Module, path: str) -> Iterator[str]:
    """Yield a sentence if tp cannot replace the loss beside an output projection."""
    owner = piece.get_submodule(path.rpartition(".")[0])
    beside = name.rpartition(".")[0]
    loss = owner._modules.get("loss")
    if type(loss) is CrossEntropy:  # replaced with its z-loss
        return
    if isinstance(
        loss, PreferenceLoss
    ):  # which takes a part of the words itself
        return
    if loss is None:
        yield (
            f"{name} computes logits that tp shards over the vocabulary, but {beside} has no child named"
            " 'loss' to take them. Put the loss there, or name the vocabulary's dim '-'."
        )
        return
    # Seven logits for five tokens, one of them ignored, against torch's own sum.
    logits = (
        torch.linspace(-3, 4, 35, dtype=torch.float64).sin().view(1, 5, 7) * 3
    )
    targets = torch.tensor([[3, IGNORED, 0, 6, 3]])
    want = F.cross_entropy(
        logits[0], targets[0], ignore_index=IGNORED, reduction="sum"
    )
    if why := _differs(loss, (logits, targets), want):
        yield (
            f"{beside}.loss is a {type(loss).__name__}: tp replaces it by the summed cross-entropy, without"
            f" targets of {IGNORED}, and {why}. Compute only that in it,"
            " name the vocabulary's dim '-', or use no tp."
        )


def _uncut(model: Model) -> Iterator[str]:
    """Yield a sentence for attention or a loss that would see part of the time.

    Modules not sharded over features see a part of the time, which these two must not.
    """
    for prefix, piece in model.pieces:
        for path, module in piece.named_modules():
            if "core" in module._modules:
                own = f"{prefix}.{path}".rstrip(".")
                linears = [
                    n
                    for n, m in module.named_children()
                    if isinstance(m, nn.Linear)
                ]
                dims = [
                    dim
                    for n in linears
                    for dim in model.rules.dims(f"{own}.{n}.weight")
                ]
                # tp has no part in this attention, which would see T / tp tokens.
                if dims and not any(AXIS_OF.get(dim) == "tp" for dim in dims):
                    yield (
                        f"{prefix}.{path} attends with all of its heads on every rank of tp, but"
                        " under seq a rank has only a part of the time. Leave seq out."
                    )
    # The head: without a sharded vocabulary its loss would see T / tp tokens.
    prefix, head = model.pieces[-1]
    names = [name for name, x in head.named_parameters() if x.dim() == 2]
    if names and not any(
        "vocab" in model.rules.dims(f"{prefix}.{name}") for name in names
    ):
        yield (
            f"{prefix} has the whole vocabulary on every rank of tp, but under seq a rank has only a part"
            " of the time. Leave seq out."
        )


# ---- modules that a ring replaces


def _core(model: Model, name: str, core: nn.Module) -> Iterator[str]:
    plain = type(core) is Core
    if plain and not any(getattr(core, hooks) for hooks in _HOOKS):
        return  # our own: a trial would only take memory
    heads = model.counts.get("heads", 2)
    kv = model.counts.get("kv", heads)
    size = model.shape.head_dim if model.shape else 8
    length = min(model.shape.sequence if model.shape else 16, 1024)
    # A trial on random values against the core that would replace it.
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, length, n, size, generator=draw, dtype=torch.float64)
        for n in (heads, kv, kv)
    )
    positions = torch.arange(length).expand(1, -1)
    if why := _differs(
        core, (q, k, v, positions, None), Core()(q, k, v, positions, None)
    ):
        yield (
            f"{name} is a {type(core).__name__}: a ring replaces it by causal softmax attention,"
            f" and {why}. Use cp:ulysses, which keeps it, or no cp."
        )


def _spread_core(name: str, core: nn.Module) -> Iterator[str]:
    own = ", ".join(replaced_methods(core))
    has = f"methods of its own ({own})" if own else ""
    if any(getattr(core, hooks) for hooks in _HOOKS):
        has = "hooks"
    if has:
        yield (
            f"{name} is a {type(core).__name__}: cp replaces it by a core that keeps its tokens,"
            f" and it has {has}. Use no cp."
        )


def _differs(
    module: nn.Module, inputs: tuple[Tensor | None, ...], want: Tensor
) -> str:
    """Call a module and explain why it does not return `want`, or return ""."""
    # A module with hooks or weights does more than its values here can show.
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks"
    if next(module.parameters(), None) is not None:
        return "it has parameters"
    try:
        with torch.no_grad():
            got = module(*inputs)
    except Exception as error:
        return f"called on its own, it raises {type(error).__name__}: {error}"
    if not isinstance(got, Tensor) or got.shape != want.shape:
        return "it returns something else"
    apart = float((got - want).abs().max() / want.abs().max())
    return (
        ""
        if apart < 1e-4
        else f"it returns something else (relative error {apart:.1g})"
    )
