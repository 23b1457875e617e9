"""The floating dtypes in which a model computes, and perturbed casts to lower ones."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .shards import local_of
from .sketch import mixed


def operations_of(roots: Iterable[Tensor]) -> dict[str, int]:
    """Operations of a backward graph, counted by the floating dtype of their results.

    Constants that need no gradient, such as rotary angles, are not in the graph: they are equal in
    all layouts.
    """
    counts: Counter[str] = Counter()
    # Depth first, without recursion: graphs are thousands of nodes deep.
    waiting: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        # Edges lead from the loss to the parameters.
        waiting += [following for following, _ in node.next_functions]
        if node.name().endswith("AccumulateGrad"):
            continue  # a parameter
        # Metadata of a node's gradient inputs, which have the dtype of its
        # forward results.
        for result in node._input_metadata:
            if result.dtype.is_floating_point:
                counts[str(result.dtype).removeprefix("torch.")] += 1
    return dict(counts)


class CastsPerturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies float64 tensors that a program casts down by 1 + eps or 1 - eps of the lower dtype.

    Weights moved by one unit of float64 do not show the rounding of parts in float32: a cast undoes
    the change.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.casts = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # `_to_copy` is what `.to()`, `.float()` and autocast call.
        if func is not torch.ops.aten._to_copy.default:
            return result
        lower = result.dtype.is_floating_point and result.dtype.itemsize < 8
        if args[0].dtype == torch.float64 and lower:
            self.casts += 1
            # In place: views and autograd keep the tensor that the program
            # gets.
            self._move(local_of(result))
        return result

    def _move(self, values: Tensor) -> None:
        # Another stretch of hashes for each seed and each cast.
        start = (self.seed << 48) + (self.casts << 24)
        indices = torch.arange(values.numel(), device=values.device)
        # Bit 17 of a good hash is as random as any.
        bits = (mixed(indices + start) >> 17) & 1
        sign = (1 - 2 * bits).reshape(values.shape)
        eps = torch.finfo(values.dtype).eps
        moved = values.double() * (1 + eps * sign)
        values.copy_(moved)
