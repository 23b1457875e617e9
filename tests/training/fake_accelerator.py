"""A training step on an accelerator that does not exist, run in a process of its own: torch's autograd
knows only the devices that were there before its first backward.

Tensors are fake (they have a shape and a device and no numbers), and messages are sent nowhere. That
shows which operations are asked for, on which device, and where the host would wait: for a number that
it reads, or for a copy that blocks. Prints as JSON what each case, `[layout, precision, executor,
optimizer]`, waited for.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
)

from phalanx.comm.tally import TallyWorld
from phalanx.layout import Layout, Shape
from phalanx.models import kernels
from phalanx.parallel import (
    Precision,
    build_model,
    context,
    local,
    microbatches,
    pieces,
)
from phalanx.parallel.local import build_local
from phalanx.program import StepOptions
from phalanx.training.executor import Executor
from phalanx.training.muon import Muon
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.training.program import program_of
from phalanx.verification import batch_of

SHAPE = Shape(
    "fake",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=64,
    sequence=64,
    batch=8,
)
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, torch.float32),
}


class Reading(Executor):
    """Reads its loss after each microbatch."""

    def _add_loss(self, y: torch.Tensor) -> None:
        super()._add_loss(y)
        float(self.loss)


class Mixing(Executor):
    """Adds what is on the host to what is on the device."""

    def _add_loss(self, y: torch.Tensor) -> None:
        self.loss = self.loss + torch.ones(1)


EXECUTORS = {each.__name__: each for each in (Executor, Reading, Mixing)}
OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamW(),
    "sgd": Sgd(momentum=0.9),
    "muon": Muon(),
}


# Documents of 24 tokens, each row cut elsewhere. With numbers: the host launches by them.
PACKED = (
    torch.arange(SHAPE.sequence) + 7 * torch.arange(SHAPE.batch)[:, None]
) // 24


def within(q: Any, k: Any, v: Any, _: Any, *more: Any) -> Any:
    return kernels.attend_own(q, k, v, PACKED, *more)


def gradients(g: Any, q: Any, k: Any, v: Any, _: Any, *more: Any) -> Any:
    return kernels.all_gradients(g, q, k, v, PACKED, *more)


WITHIN = {
    "phalanx::attention": within,
    "phalanx::attention_gradients": gradients,
}


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """What computes with numbers on the host, which is real here."""

    def called(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return called


class Watching(TorchDispatchMode):
    """Where the host waits for the device: as (what, the function of ours that asked)."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.copies = 0
        self.attention: set[str] = set()  # the kernels that are asked for
        self.products: set[str] = set()  # and the products of weight gradients

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if name in WITHIN:  # what it does, and not only what it puts out
            with self:
                return WITHIN[name](*args)
        # They have no fake form.
        if name in (
            "addmm.dtype_out",
            "mm.dtype_out",
        ):
            assert (
                kwargs["out"].dtype
                == torch.float32
                != args[0 if name[0] == "m" else 1].dtype
            )
            self.products.add(name)
            return kwargs["out"]
        if "attention" in name:
            self.attention.add(name)
        if name == "_local_scalar_dense":
            if args[0].device.type == "fake":
                self._note("a number is read")
            return 1.0 if args[0].is_floating_point() else 1
        if name == "_to_copy":
            to = torch.device(kwargs.get("device") or args[0].device)
            if to.type != args[0].device.type:
                self._copied(args[0].device, to, kwargs.get("non_blocking"))
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty_like(args[0], dtype=dtype, device=to)
        if name == "copy_" and args[0].device.type != args[1].device.type:
            self._copied(
                args[1].device,
                args[0].device,
                kwargs.get("non_blocking") or args[2:],
            )
            return args[0]
        if name == "_fused_sgd_":  # it has no fake form
            assert len({x.device for xs in args[:3] for x in xs}) == 1
            return None
        return func(*args, **kwargs)

    def _copied(
        self, start: torch.device, end: torch.device, beside: object
    ) -> None:
        self.copies += 1
        if not beside:
            self._note(f"a copy from {start.type} to {end.type} blocks")

    def _note(self, what: str) -> None:
        ours = [
            f.name
            for f in traceback.extract_stack()
            if "/phalanx/" in f.filename
        ]
        self.waits.append((what, ours[-1]))


class AtOnce:
    """A pool of threads that has none: what is fake on one thread is real on another."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(work())
        return done


def step(
    layout: Layout,
    device: torch.device,
    precision: str,
    executor: type[Executor],
    optimizer: Any,
    packed: bool,
) -> Watching:
    """The waits of a step, the second, as some things are made in the first."""
    # Four virtual stages need four blocks.
    model = build_model(SHAPE if layout.pp > 1 else replace(SHAPE, layers=2))
    program = program_of(
        model, layout, StepOptions(whole_matrices=optimizer.whole_matrices)
    )
    rank = layout.ranks - 1  # of the last stage, which has the loss
    mine = build_local(
        TallyWorld(rank, layout.ranks, device), layout, model, program,
        precision=PRECISIONS[precision], seed=None,
    )  # fmt: skip
    trainer = executor(mine, program, rank, optimizer, clip=1.0)
    rows = {
        k: torch.empty_like(v, device=device)
        for k, v in batch_of(SHAPE, 0).items()
    }
    own = microbatches(
        rows, layout, mine.coordinates["dp"], mine.coordinates["cp"]
    )
    for each in own if packed else ():
        each["documents"] = PACKED
    for _ in range(2):
        watching = Watching()
        with watching:
            trainer.step(own, 1e-3)
    return watching


def main() -> None:
    _setup_privateuseone_for_python_backend("fake")
    module: Any = torch.fake  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    pieces.ThreadPoolExecutor = AtOnce  # type: ignore[attr-defined]
    local.refuse_unfit = lambda *_: None  # type: ignore[attr-defined]  # it computes, on the CPU
    kernels._edges = on_the_host(kernels._edges)
    ids_of = context._ids_of
    context._ids_of = on_the_host(
        lambda _, group, rank: ids_of(PACKED, group, rank)
    )
    context.visiting_blocks = on_the_host(context.visiting_blocks)
    results: list[object] = []
    for layout, precision, executor, optimizer in json.loads(sys.argv[1]):
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch._C._set_only_lift_cpu_tensors(True)
            try:
                watching = step(
                    Layout.parse(layout), torch.device("fake:0"), precision,
                    EXECUTORS[executor.removeprefix("packed ")], OPTIMIZERS[optimizer],
                    executor.startswith("packed "),
                )  # fmt: skip
                results.append(
                    [
                        watching.waits,
                        watching.copies,
                        [*watching.attention],
                        [*watching.products],
                    ]
                )
            except RuntimeError as error:
                results.append(str(error))
    print(json.dumps(results), flush=True)
    # Ranks that failed may leave threads of autograd, which torch cannot always end: the
    # results are complete, so the process ends without its own shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
