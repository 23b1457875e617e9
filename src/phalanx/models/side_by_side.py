"""Linear layers with one input, such as the projections to queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules import module as _torch_modules

# Replaces the calls of the layers: returns their outputs for an input, or None if they
# must be called separately this time.
JointProduct = Callable[[Tensor], Sequence[Tensor] | None]


class SideBySide(nn.Module):
    """A module with linear layers that are called on one input, one after the other.

    Separate calls are separate nodes of autograd's graph, each with its host time. If
    all layers are plain, their piece sets `joint_product`, which makes one node for
    all. That node sums the input's gradient, so nothing else may read the input
    (`only_reader`): another reader would change the order of the sum.
    """

    side_by_side: ClassVar[tuple[str, ...]]  # the attributes of the layers
    reads_elsewhere = (
        False  # True if the module itself reads the input once more
    )
    only_reader = False  # True if nothing but these layers reads their input
    joint_product: JointProduct | None = None

    def products(self, x: Tensor) -> Sequence[Any]:
        """The outputs of the layers on x (B, T, hidden), in their order."""
        joint = self.joint_product
        found = None if joint is None else joint(x)
        if found is not None:
            return found
        layers: Any = self._modules
        return [layers[name](x) for name in self.side_by_side]


def has_hooks(module: nn.Module) -> bool:
    """True if calling a module also runs hooks, its own or global ones."""
    own = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    every: Any = _torch_modules._has_any_global_hook  # its module has no types
    return bool(own) or bool(every())
