"""Takes a transformers model apart: finds its pieces by a run on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import LayoutError
from .frame import Key, StandIn, around_blocks, take_out
from .transformers_frame import TransformersFrame
from .transformers_refused import (
    error_line,
    refuse,
    refuse_attention,
    refuse_tables,
)

_RUN = 8  # tokens in a trial sequence


class TakenApart:
    """A transformers model's modules before its blocks, the blocks, those after them.

    `names` are the weights' names in their code, `files` those in files. `calls` holds
    the arguments with which each module of a block was called, and the shape of its
    output.
    """

    def __init__(self, causal: Any) -> None:
        self.causal, self.config = causal, causal.config
        self.names = {p: name for name, p in causal.named_parameters()}
        # Expert weights have three dims, and this path shards matrices alone.
        deep = [name for x, name in self.names.items() if x.dim() > 2][:1]
        refuse({f"it has experts or convolutions ({', '.join(deep)})": deep})
        self.files = stored_names(causal)
        self.path, layers = layers_of(causal)
        self.blocks: list[Any] = list(layers)
        self.frame = TransformersFrame(causal, self.path[-1])
        # Stand-ins replace the blocks and what is around them, before the trial run.
        self.outer = take_out(
            self.frame, self.path, layers, lambda owner, name: name
        )
        # Attention reads positions and documents from its module's frame.
        for block in self.blocks:
            for module in block.modules():
                module.__dict__["frame"] = self.frame
        self.calls: dict[nn.Module, tuple[Any, Any, torch.Size]] = {}
        # Only the run shows which modules attend, and with how many heads.
        around = around_blocks(self._order(), self.outer)
        self.before, self.after = around.before, around.after
        owners = [
            [m for m in block.modules() if "core" in m._modules]
            for block in self.blocks
        ]
        seen = {m.heads_seen for found in owners for m in found}
        refuse_attention(self.config, owners, seen)
        modules = (m for m in causal.modules() if not isinstance(m, StandIn))
        refuse_tables(self.blocks, self.path, modules)
        self.heads, self.kv, self.head_dim = seen.pop()

    def _order(self) -> list[Key]:
        """The modules in the order in which the forward calls them."""
        order: list[Key] = []

        # Noted as they are called; the modules themselves do the work.
        def noted(key: Key, module: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                order.append(key)
                y = module(*args, **kwargs)
                self.frame.tuples = (
                    isinstance(y, tuple) if key == 0 else self.frame.tuples
                )
                return y

            return run

        # Shapes alone: on meta a trial takes no memory, whatever the size of the model.
        tokens = torch.empty(2, _RUN, dtype=torch.int64, device="meta")
        every: dict[Key, Any] = {
            n: noted(n, each) for n, each in enumerate(self.blocks)
        }
        every.update(
            (name, noted(name, each)) for name, each in self.outer.items()
        )
        hooks = [
            module.register_forward_hook(self._called, with_kwargs=True)
            for block in self.blocks
            for module in block.modules()
        ]
        try:
            self.frame.run(
                every, torch.float32, tokens, tokens=tokens, whole=True
            )
        except LayoutError:
            raise
        except Exception as error:
            raise LayoutError(
                f"its forward cannot be run piece by piece: {error_line(error)}"
            ) from None
        finally:
            for hook in hooks:
                hook.remove()
        return order

    def _called(
        self, module: nn.Module, args: Any, kwargs: Any, y: Any
    ) -> None:
        y = y[0] if isinstance(y, tuple) else y
        if isinstance(y, Tensor):
            self.calls[module] = args, kwargs, y.shape


def stored_names(causal: Any) -> dict[str, str]:
    """The weights' names in files, which differ from those in the code for some models."""
    from transformers.core_model_loading import revert_weight_conversion

    every = dict(causal.named_parameters())
    files = {
        x: name for name, x in revert_weight_conversion(causal, every).items()
    }
    lost = [name for name, x in every.items() if x not in files]
    refuse({f"its files hold {', '.join(lost[:3])} in another form": lost})
    return {name: files[x] for name, x in every.items()}


def layers_of(causal: Any) -> tuple[list[Any], nn.ModuleList]:
    """The modules from the whole model down to the owner of the blocks, and the blocks."""
    count = getattr(causal.config, "num_hidden_layers", 0)
    for name, module in causal.named_modules():
        # By its length, as models name the list differently: layers, h, blocks.
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = name.split(".")[:-1]
            owners = [
                causal.get_submodule(".".join(names[:n]))
                for n in range(len(names) + 1)
            ]
            return owners, module
    raise LayoutError(f"it has no list of its {count} blocks")
