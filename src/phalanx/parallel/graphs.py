"""CUDA graphs of pieces: one launch for a piece's forward, and one for its backward.

A small kernel takes a GPU less time than the host needs to launch it. A graph is a
recorded list of kernels that the host launches at once. It reads and writes the
addresses that it was recorded with, so a piece has *slots*: the graphs of one microbatch
in flight, with their inputs, outputs and the activations kept in between. A slot serves
the next microbatch after its backward.

- Inputs and output gradients are copied into the slot, and what the piece returns is
  copied out of it, so that a message may still read it when the slot is used again.
- Weights stay in one place (`Unit.resident`), and so does the whole gradient, to which a
  backward's graph adds (`SteadyUnit`).
- Each forward has a memory pool of its own. Graphs of one pool may only be replayed in
  the order of their recording, but the next microbatch's forward may run between a
  forward and its backward. Backwards share a pool: nothing reads it after a replay.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..layout import LayoutError
from .batch import DOCUMENTS

Bundle = dict[str, Tensor]
Replay = Callable[[], None]
# Backwards of a shape that run without a graph first: torch compiles, and libraries
# allocate their workspaces and choose kernels, none of which a graph may record.
WARM_UP = 2
# Microbatches differ by at most one row. Other shapes, such as those of generated text,
# run without graphs: each would hold its activations for good.
SHAPES = 2
# Ranks that are threads of one process take turns.
_one_capture = threading.Lock()


class Capture(Protocol):
    """A recorder of the kernels that functions launch."""

    def __call__(self, run: Callable[[], None], *, kept: bool) -> Replay:
        """Record a function without running its kernels; return what runs them.

        With `kept`, no other graph may use memory that the function has used.
        """


class CudaCapture:
    """Records graphs on one GPU. Those whose memory is not kept share a pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        stream: Any = torch.cuda.Stream  # its stubs are not typed
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = stream(device)

    def __call__(self, run: Callable[[], None], *, kept: bool) -> Replay:
        graph: Any = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle() if kept else self.pool
        # Not `torch.cuda.graph`, which first waits for the whole device: two stages of a
        # pipeline would wait for messages that the other sends after its own recording.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # Other threads, such as NCCL's, may use the device meanwhile.
        mode = "thread_local"
        with _one_capture, torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            try:
                run()
            finally:
                graph.capture_end()
        replay: Replay = graph.replay
        return replay


def one_thread() -> AbstractContextManager[Any]:
    """A context in which a backward runs in the thread that calls it.

    Only the thread that records may launch kernels of a graph, and libraries choose and
    load kernels for each thread.
    """
    return torch.autograd.set_multithreading_enabled(False)


def capture_of(device: torch.device) -> Capture | None:
    """A recorder of graphs for a device, or None for a device without CUDA graphs."""
    return CudaCapture(device) if device.type == "cuda" else None


class PieceCalls(Protocol):
    """A piece's forward and backward, as a graph records them."""

    def run_forward(self, mine: Bundle, named: Bundle, into: Bundle) -> Bundle:
        """Run the piece on activations and entries of the batch.

        Gradients of the activations will go to `into`.
        """

    def run_backward(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        *,
        keep: bool = False,
    ) -> None:
        """Run autograd from the outputs; with `keep`, keep its graph."""


class Slot:
    """The graphs of a piece for one microbatch in flight, and their tensors."""

    def __init__(
        self, piece: PieceCalls, capture: Capture, mine: Bundle, named: Bundle
    ) -> None:
        self.piece, self.capture = piece, capture
        self.key = key_of(mine, named)
        self.mine, self.named = _like(mine), _like(named)
        self.outputs: Bundle = {}
        # Hold what autograd has saved, also after the backward.
        self.roots: dict[str, GradientEdge] = {}
        self.gradients: Bundle = {}  # of the outputs
        self.into: Bundle = {}  # gradients of the inputs
        self._forward: Replay | None = None
        self._backward: Replay | None = None

    def forward(self, mine: Bundle, named: Bundle) -> Bundle:
        """The piece's outputs for these inputs."""
        _copy({**self.mine, **self.named}, {**mine, **named})
        if self._forward is None:
            self._forward = self.capture(self._record_forward, kept=True)
        self._forward()
        return _clones(self.outputs)

    def backward(self, gradients: Bundle) -> Bundle:
        """The inputs' gradients; those of weights are added to their units'."""
        if self._backward is None:
            self.gradients = _like(gradients)
        _copy(self.gradients, gradients)
        if self._backward is None:
            self._backward = self.capture(self._record_backward, kept=False)
        self._backward()
        return _clones(self.into)

    def _record_forward(self) -> None:
        with torch.enable_grad():
            out = self.piece.run_forward(self.mine, self.named, self.into)
        self.roots = {
            name: get_gradient_edge(y)
            for name, y in out.items()
            if y.requires_grad
        }
        self.outputs = {name: y.detach() for name, y in out.items()}

    def _record_backward(self) -> None:
        roots = [self.roots[name] for name in self.gradients]
        # A compiled backward may overwrite saved tensors, and torch then refuses to
        # keep its graph. Here each replay of the forward writes these tensors again.
        config: Any = torch._functorch.config
        with config.patch(donated_buffer=False), one_thread():
            self.piece.run_backward(
                roots, [*self.gradients.values()], keep=True
            )


Key = tuple[tuple[str, torch.Size, torch.dtype], ...]


def key_of(mine: Bundle, named: Bundle) -> Key:
    """The names, shapes and dtypes of a piece's inputs."""
    inputs = {**mine, **named}
    return tuple((name, x.shape, x.dtype) for name, x in inputs.items())


class PieceGraphs:
    """The slots of one piece, by the shapes of its inputs."""

    def __init__(self, piece: PieceCalls, capture: Capture) -> None:
        self.piece, self.capture = piece, capture
        self.free: defaultdict[Key, list[Slot]] = defaultdict(list)
        # Backwards that have run without a graph.
        self.seen: Counter[Key] = Counter()
        # Forwards without a graph whose backward has not run.
        self.eager = 0

    def slot(self, mine: Bundle, named: Bundle) -> Slot | None:
        """A slot for a forward with these inputs, or None: run it without a graph."""
        if DOCUMENTS in named:
            raise LayoutError(
                "compile:graphs for a batch that keeps documents apart: the shapes of its"
                " attention depend on the data. Leave documents out, or use compile."
            )
        key = key_of(mine, named)
        if free := self.free[key]:
            return free.pop()
        # Autograd adds to a weight on the stream of the first forward that is still in
        # flight. It has to be the stream that records.
        known = key in tuple(self.seen)[:SHAPES]
        if not known or self.seen[key] < WARM_UP or self.eager:
            self.eager += 1
            return None
        return Slot(self.piece, self.capture, mine, named)

    def warm_up(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        key: Key,
    ) -> None:
        """Run a backward without a graph."""
        with one_thread():
            self.piece.run_backward(roots, gradients)
        self.eager -= 1
        self.seen[key] += 1

    def release(self, slot: Slot) -> None:
        """Take back a slot after its backward."""
        self.free[slot.key].append(slot)


def _like(tensors: Mapping[str, Tensor]) -> Bundle:
    return {name: torch.empty_like(x) for name, x in tensors.items()}


@torch.no_grad()
def _copy(into: Bundle, tensors: Mapping[str, Tensor]) -> None:
    # One kernel copies all tensors of one dtype.
    torch._foreach_copy_(
        [*into.values()], [tensors[name].detach() for name in into]
    )


@torch.no_grad()
def _clones(tensors: Mapping[str, Tensor]) -> Bundle:
    return {name: x.clone() for name, x in tensors.items()}
