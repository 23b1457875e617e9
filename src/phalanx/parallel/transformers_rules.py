"""The rule table of a transformers model, from its `base_model_tp_plan`.

Weights that the plan gets wrong, or does not name, stay whole, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..layout import Rules
from ..layout.rules import Cut
from .own_tp import failure_of, resized
from .transformers_apart import TakenApart


class CutRules:
    """Decides how each weight is sharded; `notes` tell which stay whole, and why."""

    def __init__(self, apart: TakenApart) -> None:
        self.apart, self.config = apart, apart.config
        self.heads, self.kv, self.head_dim = (
            apart.heads,
            apart.kv,
            apart.head_dim,
        )
        # A dict in place of an ordered set: blocks share most notes.
        self.notes: dict[str, None] = {}
        self._widths: dict[nn.Module, int] = {}
        self._planned: Mapping[str, str] = (
            getattr(self.config, "base_model_tp_plan", None) or {}
        )
        if not self._planned:
            self.notes[
                "there is no plan for tp: each rank of it has the blocks whole"
            ] = None
        # The plan for pp is not followed; what it leaves out is worth a note.
        stages = getattr(self.config, "base_model_pp_plan", None)
        named = [name for name, _ in apart.path[-1].named_children()]
        if stages and (
            missed := [
                n for n in named if n in apart.outer and n not in stages
            ]
        ):
            self.notes[
                f"the plan for pp does not name {', '.join(missed)}"
            ] = None

    def table(self, embed: nn.Module, head: nn.Module) -> tuple[Rules, bool]:
        """The rules of all weights, and True if positions are learned."""
        rules = {
            **self._outer_rules("embed", embed),
            **self._outer_rules("head", head),
        }
        for number, block in enumerate(self.apart.blocks):
            rules |= {
                f"layers.{number}.{n}": dims
                for n, dims in self._rules(block).items()
            }
        learned = any("position" in dims for dims in rules.values())
        # Lines that all blocks share become one pattern.
        lines = (f"{name} : {dims}" for name, dims in _joined(rules).items())
        return Rules.parse("\n".join(lines)), learned

    def _outer_rules(self, piece: str, module: nn.Module) -> dict[str, str]:
        """Rules that shard lookups and the head over the vocabulary, if torch's own."""
        rules = {}
        for path, child in module.named_modules():
            for key, weight in child.named_parameters(recurse=False):
                dims = (
                    "embed"
                    if weight.dim() == 1
                    else " ".join("-" * weight.dim())
                )
                rows, at_head = (
                    weight.shape[0],
                    isinstance(child, nn.Linear) and piece == "head",
                )
                # The vocabulary: shard a plain lookup, or the head's weight and bias.
                if (
                    rows == self.config.vocab_size
                    and weight not in self._special
                ):
                    lookup = type(child) is nn.Embedding and piece == "embed"
                    dims = (
                        "vocab embed"
                        if lookup or (at_head and key == "weight")
                        else dims
                    )
                    dims = "vocab" if at_head and key == "bias" else dims
                # A lookup of another size is the table of positions.
                elif type(child) is nn.Embedding and piece == "embed":
                    dims = "position embed"
                rules[f"{piece}.{path}.{key}"] = dims
        return rules

    @property
    def _special(self) -> set[nn.Parameter]:
        """Weights of the vocabulary that modules other than torch's own use."""
        # A subclass may scale the rows, or mask them: tp's replacement would not.
        plain = nn.Linear.forward, nn.Embedding.forward
        return {
            weight
            for outer in self.apart.outer.values()
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
            rules |= {
                f"{path}.{name}": dims
                for name, dims in self._owned(path, owner).items()
            }
        return rules

    def _owned(self, path: str, owner: nn.Module) -> dict[str, str]:
        """The rules of a module whose linears the plan shards on input and output.

        Empty if the module stays whole.
        """
        linears = {
            n: m for n, m in owner.named_children() if isinstance(m, nn.Linear)
        }
        styles = {
            name: self._style(linear) for name, linear in linears.items()
        }
        if not any(styles.values()):
            if linears and self._planned:
                self._note(
                    path or "the block",
                    "the plan does not name " + ", ".join(linears),
                )
            return {}
        others = sorted({*styles.values()} - {"colwise", "rowwise", ""})
        outs = [name for name, style in styles.items() if style == "colwise"]
        ins = [name for name, style in styles.items() if style == "rowwise"]
        # A pair needs column linears, row linears, and an owner whose input can fork.
        if others or not (outs and ins) or not path:
            why = (
                f"is planned as {', '.join(others)}"
                if others
                else "has no pair of cut linears"
            )
            self._note(
                path or "the block",
                why if path else "owns linears: the residual is cut, too",
            )
            return {}
        dims = {
            name: self._dim(owner, linears[name].out_features) for name in outs
        }
        dims |= {
            name: self._dim(owner, linears[name].in_features) for name in ins
        }
        # All sharded widths must be one dim; only KV heads may differ from it.
        if "" in dims.values() or len({*dims.values()} - {"kv"}) > 1:
            self._note(
                path,
                f"{', '.join(dims)} are no whole heads or of several widths",
            )
            return {}
        if why := self._fails(owner, dims, outs):
            self._note(path, f"as planned it does not run ({why})")
            return {}
        if missed := [name for name, style in styles.items() if not style]:
            self._note(
                path,
                f"the plan does not name {', '.join(missed)}; each rank has it whole",
            )
        rules = {}
        for name, weight in owner.named_parameters():
            linear, _, key = name.rpartition(".")
            if linear in outs:
                rules[name] = dims[linear] + " embed" * (key == "weight")
            elif linear in ins:
                rules[name] = (
                    f"embed {dims[linear]}" if key == "weight" else "embed"
                )
            # its copies see other heads or features, so their gradients are summed
            else:
                rules[name] = " ".join(["head", *"-" * (weight.dim() - 1)])
        return rules

    def _style(self, linear: nn.Linear) -> str:
        """The plan's style for a linear, or "" if it has none or stays whole."""
        prefix = self.apart.causal.base_model_prefix + "."
        name = (
            self.apart.names[linear.weight]
            .removeprefix(prefix)
            .removesuffix(".weight")
        )
        # The plan names a block by *, so numbers in a name become *.
        style = self._planned.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        return "" if style.startswith("replicated") else str(style)

    def _dim(self, owner: nn.Module, width: int) -> str:
        """Map a sharded width to our dimension name, or return ""."""
        # An MLP: the first sharded width is the ffn, and all others must equal it.
        if "core" not in owner._modules:
            return (
                "ffn" if width == self._widths.setdefault(owner, width) else ""
            )
        # Attention, by its numbers of heads. A fused q, k, v counts as heads where
        # there are as many KV heads.
        if width == self.heads * self.head_dim:
            return "heads"
        if width == self.kv * self.head_dim:
            return "kv"
        fused = (
            self.heads == self.kv and width % (self.heads * self.head_dim) == 0
        )
        return "heads" if fused else ""

    def _fails(
        self, owner: nn.Module, dims: Mapping[str, str], outs: list[str]
    ) -> str:
        """Explain why a module fails on meta with sharded linears, or return ""."""
        args, kwargs, shape = self.apart.calls[owner]
        # The fewest ranks that divide the query heads and fit the KV heads.
        parts = next(
            (
                n
                for n in range(2, self.heads + 1)
                if self.heads % n == 0
                and (self.kv % n == 0 or n % self.kv == 0)
            ),
            1,
        )
        counts = {"heads": self.heads, "kv": self.kv}
        sizes = {}
        for name, dim in dims.items():
            at = 0 if name in outs else 1
            linear: Any = owner.get_submodule(name)
            whole = linear.weight.shape[at]
            # In whole heads, as tp would cut it.
            unit = max(1, whole // counts.get(dim, whole))
            sizes[name] = at, Cut.of(whole, parts, 0, unit).length
        small = resized(owner, sizes, self.apart.frame)
        return failure_of(small, (args, kwargs, shape))

    def _note(self, where: str, what: str) -> None:
        self.notes[f"{where}: {what}"] = None


def _joined(rules: Mapping[str, str]) -> dict[str, str]:
    """Merge the lines of blocks that agree, longer names first (* matches dots)."""
    # The different dims of each pattern over all blocks: one if they agree.
    kinds: dict[str, set[str]] = {}
    for name, dims in rules.items():
        kinds.setdefault(re.sub(r"^layers\.\d+", "layers.*", name), set()).add(
            dims
        )
    lines = {}
    for name, dims in rules.items():
        pattern = re.sub(r"^layers\.\d+", "layers.*", name)
        lines[pattern if len(kinds[pattern]) == 1 else name] = dims
    return dict(sorted(lines.items(), key=lambda line: -line[0].count(".")))
