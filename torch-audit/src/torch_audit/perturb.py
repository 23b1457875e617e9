"""A change of all weights by about one unit in the last place, from which tolerances are measured."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .sketch import mixed


def perturb(parameters: Iterable[Tensor], seed: int) -> None:
    """Multiplies every weight by 1 + eps or 1 - eps, as a hash of its index and the seed says.

    eps is that of the precision in which the model computes: autocast rounds weights to 16 bits, and
    would undo a change of a float32 weight.
    """
    for parameter in parameters:
        dtype = parameter.dtype
        kind = parameter.device.type
        if dtype == torch.float32 and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        weights = parameter.detach()
        indices = torch.arange(weights.numel(), device=weights.device)
        bits = (mixed(indices + (seed << 48)) >> 17) & 1
        sign = (1 - 2 * bits).reshape(weights.shape)
        # eps is the distance from 1 to the next number, so this is one to two
        # units in the last place.
        change = weights.double() * sign * torch.finfo(dtype).eps
        weights.copy_(weights.double() + change)
