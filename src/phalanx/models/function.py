"""The base class of autograd functions that are called often."""

from __future__ import annotations

from typing import Any

import torch


def is_transformed() -> bool:
    """True while torch compiles, or inside of one of torch.func's transforms."""
    transforms: Any = torch._C  # its stubs leave this function out
    return bool(
        torch.compiler.is_compiling()
        or transforms._are_functorch_transforms_active()
    )


class FrequentFunction(torch.autograd.Function):
    """An autograd function with two calls that are `apply` without its checks.

    The checks take a fifth of a call's time and serve torch.func's transforms.
    """

    @classmethod
    def call(cls, *args: Any) -> Any:
        """Call a function that no transform of torch.func and no compiler sees."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @classmethod
    def call_or_apply(cls, *args: Any) -> Any:
        """Call a function, by `apply` inside a transform or while compiling."""
        if is_transformed():
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        return cls.call(*args)
