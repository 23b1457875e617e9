"""A training step on an accelerator that does not exist: no operation mixes devices, and nothing waits
for the device before the last operation.

Tensors are fake (they have a shape and a device and no numbers), and messages are sent nowhere. That
shows which operations are asked for, on which device, and where the host would wait: for a number that
it reads, or for a copy that blocks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm.tally import TallyWorld
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, build_model, local, microbatches, pieces
from phalanx.parallel.local import build_local
from phalanx.train import AdamW, Executor, Sgd
from phalanx.train.program import program_of
from phalanx.train.steps import Trainer
from phalanx.verify import batch_of

SHAPE = Shape(
    "fake", layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64, sequence=64, batch=8
)
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(torch.bfloat16, torch.float32, torch.float32),
    "fp16": Precision(torch.float16, torch.float32, torch.float32),
}
LAYOUTS = (
    "", "accum:4", "dp2 zero1", "dp2 zero2 accum:2", "dp2 zero3", "dp2x2 zero3", "tp2", "tp2 seq",
    "cp2", "cp2:ulysses", "pp2 1f1b:4", "pp2 interleaved2:4", "pp2 zb-h1:4", "pp2 zb-v:4",
    "accum:2 recompute:all", "accum:2 recompute:selective", "accum:2 offload:activations",
    "dp2 zero1 offload:optimizer", "dp2 pp2 tp2 seq zero3 1f1b:4 recompute:all",
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> torch.device:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("fake")
    module: Any = torch.fake  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return torch.device("fake:0")


class Watching(TorchDispatchMode):
    """Where the host waits for the device: as (what, the function of ours that asked)."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
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
            self._copied(args[1].device, args[0].device, kwargs.get("non_blocking") or args[2:])
            return args[0]
        if name == "_fused_sgd_":  # it has no fake form
            assert len({x.device for xs in args[:3] for x in xs}) == 1
            return None
        return func(*args, **kwargs)

    def _copied(self, start: torch.device, end: torch.device, beside: object) -> None:
        self.copies += 1
        if not beside:
            self._note(f"a copy from {start.type} to {end.type} blocks")

    def _note(self, what: str) -> None:
        ours = [f.name for f in traceback.extract_stack() if "/phalanx/" in f.filename]
        self.waits.append((what, ours[-1]))


class AtOnce:
    """A pool of threads that has none: what is fake on one thread is real on another."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(work())
        return done


@contextmanager
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pieces, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(local, "refuse_unfit", lambda *_: None)  # it computes, on the CPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch._C._set_only_lift_cpu_tensors(True)
        yield


def step(
    layout: Layout, device: torch.device, precision: str, executor: type[Executor], optimizer: Any
) -> Watching:
    """The waits of a step, the second, as some things are made in the first."""
    model = build_model(SHAPE)
    program = program_of(model, layout, agree=True)
    rank = layout.ranks - 1  # of the last stage, which has the loss
    mine = build_local(
        TallyWorld(rank, layout.ranks, device), layout, model, program,
        precision=PRECISIONS[precision],
    )  # fmt: skip
    trainer = executor(mine, program, rank, optimizer, clip=1.0)
    rows = {k: torch.empty_like(v, device=device) for k, v in batch_of(SHAPE, 0).items()}
    own = microbatches(rows, layout, mine.place["dp"], mine.place["cp"])
    for _ in range(2):
        watching = Watching()
        with watching:
            trainer.step(own, 1e-3)
    return watching


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_once_a_step_and_after_its_last_operation(
    layout: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faked(monkeypatch):
        watching = step(Layout.parse(layout), device, "bf16", Executor, AdamW())
    allowed = {("a number is read", "step")}  # once, as a tensor: fake ones are read by number
    if "offload:optimizer" in layout:
        # The update runs on the host, so it waits for the gradient and for what all agreed on.
        allowed |= {("a copy from fake to cpu blocks", name) for name in ("__call__", "on")}
        allowed |= {("a copy from fake to cpu blocks", "<genexpr>")}
    assert {*watching.waits} <= allowed
    assert (watching.copies > 0) == ("offload" in layout)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", [AdamW(), Sgd(momentum=0.9)])
def test_a_run_of_its_own_waits_no_more(
    precision: str, optimizer: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faked(monkeypatch):
        watching = step(Layout.parse("dp2 pp2 1f1b:4"), device, precision, Trainer, optimizer)
    assert {*watching.waits} == {("a number is read", "step")}


def test_a_read_and_a_mix_of_devices_would_be_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Executor, op: Any) -> None:
        right(self, op)
        float(self.loss)

    right = Executor._add_loss
    with faked(monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_add_loss", forward)
            watching = step(Layout.parse("accum:2"), device, "fp32", Executor, AdamW())
        assert watching.waits.count(("a number is read", "_forward")) == 2
        mixed = SimpleNamespace(a=torch.ones(2, device=device), b=torch.ones(2))
        with pytest.raises(RuntimeError, match=r"two different devices|on the same device"):
            mixed.a + mixed.b
