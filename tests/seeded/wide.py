"""Seeded faults of mixed precision smaller than the roundings around them.

Intermediate results in 16 bits that should have 32, and weights truncated instead of
rounded.
"""

from __future__ import annotations

import inspect
import textwrap
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch

from phalanx.comm import Work
from phalanx.models import experts, loss, norm, rope
from phalanx.parallel import Unit, context, tensor

from .fault import fault, swapped


def _rewritten(
    owner: Any, name: str, old: str, new: str
) -> AbstractContextManager[None]:
    """Replace one expression in the source of `owner.name`."""
    right = inspect.unwrap(getattr(owner, name))
    lines = textwrap.dedent(inspect.getsource(right)).splitlines()
    source = "\n".join(line for line in lines if not line.startswith("@"))
    assert source.count(old) == 1, f"{name} has not one {old!r}"
    whole = compile(source.replace(old, new), inspect.getfile(right), "exec")
    (code,) = (each for each in whole.co_consts if isinstance(each, CodeType))
    code = code.replace(co_qualname=right.__qualname__)
    made = FunctionType(code, right.__globals__, name, right.__defaults__)
    made.__kwdefaults__ = right.__kwdefaults__
    static = isinstance(owner.__dict__[name], staticmethod)
    return swapped(owner, name, staticmethod(made) if static else made)


def _enter(
    name: str,
    shape: str,
    layout: str,
    where: tuple[Any, str],
    old: str,
    new: str,
    names: str,
) -> None:
    patch = partial(_rewritten, *where, old, new)
    fault(name, shape, layout, names, dtypes=("bfloat16",))(patch)


WIDENED = "torch.promote_types(x.dtype, torch.float32)"
_enter(
    "a norm's mean square is in 16 bits",
    "gqa", "dp2", (norm._RootMeanSquare, "forward"), "dtype=wide", "dtype=x.dtype",
    "models/norm.py: _RootMeanSquare.forward computes linalg_vector_norm",
)  # fmt: skip
_enter(
    "a norm over features sharded by tp sums its squares in 16 bits",
    "olmo", "tp2", (tensor.CutRMSNorm, "forward"), f"x.to({WIDENED})", "x",
    "parallel/tensor.py: CutRMSNorm.forward computes pow",
)  # fmt: skip
_enter(
    "a router's scores are in 16 bits",
    "experts", "ep2", (experts.Router, "logits"), WIDENED, "x.dtype",
    "models/experts.py: Router.logits computes",
)  # fmt: skip
_enter(
    "experts' results are merged in 16 bits",
    "experts", "dp2", (experts.Merge, "weighted"),
    "gates.unsqueeze(-1)", "gates.to(y.dtype).unsqueeze(-1)",
    "models/experts.py: Merge.weighted computes mul",
)  # fmt: skip
_enter(
    "rope angles are in 16 bits",
    "gqa", "pp2 1f1b:3", (rope.SharedAngles, "__call__"),
    "torch.promote_types(dtype, torch.float32)", "dtype",
    "models/rope.py: Rope.frequencies computes",
)  # fmt: skip
_enter(
    "the loss of a token is in 16 bits",
    "gqa", "dp2 zero1", (loss, "_wide"),
    "torch.promote_types(x.dtype, torch.float32)", "x.dtype",
    "parallel/pieces.py: Piece.seed computes _to_copy",
)  # fmt: skip
_enter(
    "a ring merges partial results in 16 bits",
    "gqa", "cp2", (context, "ring_attention"), "out.to(wide)", "out",
    "parallel/context.py: _merge computes mul_",
)  # fmt: skip
_enter(
    "a ring sums the gradients of keys and values in 16 bits",
    "gqa", "cp2", (context, "ring_gradients"), "torch.zeros_like(kv, dtype=wide)",
    "torch.zeros_like(kv)", "parallel/context.py: ring_gradients computes add_",
)  # fmt: skip


@fault(
    "weights are truncated to 16 bits instead of rounded",
    "gqa",
    "dp2 zero3",
    "the weights of embed.tokens.weight that are computed with are not the rounded ones",
    dtypes=("bfloat16",),
)
def _() -> AbstractContextManager[None]:
    right = Unit.gather

    def gather(self: Unit) -> Work:
        home = self.home
        self.home = (home.view(torch.int32) & -65536).view(torch.float32)
        work = right(self)
        self.home = home
        return work

    return swapped(Unit, "gather", gather)
