"""Training loops of plain PyTorch, each written as its documentation says, with its
best settings.

All train phalanx's `Decoder`, or a hand-written model without it, on phalanx's batches,
clip the norm at 1, update with a fused AdamW, and read the loss once a step. The C
library keeps freed memory, as in `phalanx train`. A loop is created once and then
called for each step.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)

import torch_shm
from hand_model import HandModel
from phalanx.layout import Run
from phalanx.models import Decoder
from phalanx.training.rank import batches_of, keep_freed_memory

__all__ = ["LOOPS", "Plain"]


class Plain:
    """One process, or several that do not communicate, which shows the cost of sharing
    the machine."""

    whole_batch = False  # every rank takes all rows

    def __init__(
        self,
        sizes: dict[str, int],
        keys: list[str],
        rank: int,
        accum: int,
        *,
        compiled: bool,
    ) -> None:
        keep_freed_memory(torch.device("cpu"))
        self.rank, self.accum, self.numbers = rank, accum, count()
        self.ranks = int(os.environ["WORLD_SIZE"])
        run = Run.parse("", "run", tuple(keys))
        self.batches = batches_of(run, run.shape)
        torch.manual_seed(0)
        self.model = self.made(sizes, run.shape.sequence)
        self.wrap()
        if compiled:
            self.compile()
        weights = list(self.weights())
        self.groups: list[dict[str, Any]] = [
            {
                "params": [w for w in weights if w.dim() > 1],
                "weight_decay": 0.1,
            },
            {
                "params": [w for w in weights if w.dim() < 2],
                "weight_decay": 0.0,
            },
        ]
        self.optimizer = torch.optim.AdamW(
            self.groups, lr=3e-4, betas=(0.9, 0.95), fused=True
        )

    def made(self, sizes: dict[str, int], sequence: int) -> Any:
        return Decoder(**sizes)  # type: ignore[arg-type]

    def compile(self) -> None:
        for piece in (*self.model.layers, self.model.head):
            piece.compile()

    def wrap(self) -> None:
        """Make the model parallel."""

    def weights(self) -> Any:
        return self.model.parameters()

    def loss(self, own: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(
            own["tokens"], own["targets"], positions=own["positions"]
        )
        return loss

    def around(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a microbatch's forward and backward."""
        return nullcontext()

    def step(self) -> float:
        mine = self.batches.batch(next(self.numbers))
        if not self.whole_batch:
            mine = {n: x.chunk(self.ranks)[self.rank] for n, x in mine.items()}
        total = self.gradients(mine, (mine["targets"] != -100).sum())
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)

    def gradients(self, mine: dict[str, Tensor], valid: Tensor) -> Tensor:
        """Accumulate the microbatches' gradients; return the loss."""
        total = torch.zeros(())
        for part in range(self.accum):
            with self.around(last=part == self.accum - 1):
                loss = (
                    self.loss(
                        {n: x.chunk(self.accum)[part] for n, x in mine.items()}
                    )
                    / valid
                )
                loss.backward()
            total = total + loss.detach()
        return total

    def clip(self) -> None:
        clip_grad_norm_(self.weights(), 1.0)


class Apart(Plain):
    """Processes that do not communicate."""


class Hand(Plain):
    """Hand-written model with torch's own norm, rotary table and loss, compiled as a
    whole."""

    def made(self, sizes: dict[str, int], sequence: int) -> Any:
        model = HandModel(**sizes, sequence=sequence)
        model.load_state_dict(Decoder(**sizes).state_dict())  # type: ignore[arg-type]
        return model

    def compile(self) -> None:
        self.model.compile()

    def loss(self, own: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(own["tokens"], own["targets"])
        return loss


class Ddp(Plain):
    """DistributedDataParallel with no_sync for all but the last microbatch."""

    def wrap(self) -> None:
        dist.init_process_group("gloo")
        self.ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True
        )

    def loss(self, own: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.ddp(
            own["tokens"], own["targets"], positions=own["positions"]
        )
        return loss

    def around(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.ddp.no_sync()


class Fsdp(Plain):
    """FSDP2 for each block, then the whole model. Gradients are reduced with the last
    microbatch."""

    reshard = True

    def wrap(self) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (self.ranks,))
        for part in (*self.model.layers, self.model):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard)

    def around(self, *, last: bool) -> AbstractContextManager[Any]:
        whole: Any = self.model
        whole.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self) -> None:
        clip_grad_norm_(self.weights(), 1.0).full_tensor()  # type: ignore[attr-defined]


class FsdpKept(Fsdp):
    """Keeps weights gathered between forward and backward."""

    reshard = False


class FsdpAccum(FsdpKept):
    """FSDP2's best form of gradient accumulation.

    Weights stay gathered over a step's microbatches, and gradients unsharded until the
    last.
    """

    def around(self, *, last: bool) -> AbstractContextManager[Any]:
        whole: Any = self.model
        whole.set_is_last_backward(last)
        whole.set_reshard_after_backward(last)
        whole.set_requires_gradient_sync(last)
        return nullcontext()


class Dtensor(Plain):
    """parallelize_module, with every linear layer, the embedding and the head sharded;
    loss_parallel."""

    whole_batch = True

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.ranks,))

    def wrap(self) -> None:
        dist.init_process_group("gloo")
        mesh = self.mesh()
        columns = ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")
        for block in self.model.layers:
            plan: dict[str, Any] = {
                name: ColwiseParallel() for name in columns
            }
            plan |= {
                "attn.wo": RowwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
            parallelize_module(block, mesh, plan)
        ends: dict[str, Any] = {
            "embed.tokens": RowwiseParallel(input_layouts=Replicate()),
            "head.output": ColwiseParallel(
                output_layouts=Shard(-1), use_local_output=False
            ),
        }
        parallelize_module(self.model, mesh, ends)

    def loss(self, own: dict[str, Tensor]) -> Tensor:
        x = self.model.embed(own["tokens"], own["positions"])
        for block in self.model.layers:
            x = block(x, positions=own["positions"])
        logits = self.model.head.logits(x)
        return F.cross_entropy(
            logits.flatten(0, 1), own["targets"].flatten(), reduction="sum"
        )

    def around(self, *, last: bool) -> AbstractContextManager[Any]:
        return loss_parallel()  # type: ignore[no-any-return]

    def gradients(self, mine: dict[str, Tensor], valid: Tensor) -> Tensor:
        total: Any = super().gradients(mine, valid)
        whole: Tensor = total.full_tensor()
        return whole

    def clip(self) -> None:
        # Matrices are DTensors and the weights of norms are not; clip_grad_norm_
        # rejects a mix.
        both = [group["params"] for group in self.groups]
        cut: Any = get_total_norm([w.grad for w in both[0]])
        norm = torch.stack(
            [cut.full_tensor(), get_total_norm([w.grad for w in both[1]])]
        ).norm()
        for weights in both:
            clip_grads_with_norm_(weights, 1.0, norm)


class DtensorShm(Dtensor):
    """The same over phalanx's backend for processes of one machine."""

    def mesh(self) -> DeviceMesh:
        group = dist.new_group(backend=torch_shm.NAME)
        assert group is not None
        return DeviceMesh.from_group(group, "cpu")


class Stage(nn.Module):
    """Consecutive blocks, with the embedding or the head on the first or last stage."""

    def __init__(self, model: Decoder, index: int, stages: int) -> None:
        super().__init__()
        each = -(-len(model.layers) // stages)
        self.embed = model.embed if index == 0 else None
        self.blocks = model.layers[index * each : (index + 1) * each]
        self.head = model.head if index == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if self.embed is not None:
            x = self.embed(x, positions)
        for block in self.blocks:
            x = block(x, positions=positions)
        return x if self.head is None else self.head.logits(x)


class GPipe(Plain):
    """torch.distributed.pipelining with `accum` microbatches."""

    whole_batch = True
    schedule, chunks = "ScheduleGPipe", 1

    def wrap(self) -> None:
        dist.init_process_group("gloo")
        stages = self.ranks * self.chunks
        mine = [self.rank + self.ranks * chunk for chunk in range(self.chunks)]
        self.stages = [Stage(self.model, index, stages) for index in mine]
        parts = [
            PipelineStage(module, index, stages, torch.device("cpu"))
            for module, index in zip(self.stages, mine, strict=True)
        ]
        make = getattr(torch_schedules, self.schedule)
        self.order = make(
            parts if self.chunks > 1 else parts[0],
            self.accum,
            loss_fn=self.of,
            scale_grads=False,
        )

    def weights(self) -> Any:
        return [
            weight for stage in self.stages for weight in stage.parameters()
        ]

    def of(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        return (
            F.cross_entropy(flat, targets.flatten(), reduction="sum")
            / self.valid
        )

    def gradients(self, mine: dict[str, Tensor], valid: Tensor) -> Tensor:
        self.valid = valid
        losses: list[Tensor] = []
        if self.rank == 0:
            self.order.step(mine["tokens"])
        elif self.rank == self.ranks - 1:
            self.order.step(target=mine["targets"], losses=losses)
        else:
            self.order.step()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def clip(self) -> None:
        grads = [w.grad for w in self.weights()]
        square = get_total_norm(grads).square()  # type: ignore[arg-type]
        dist.all_reduce(square)
        clip_grads_with_norm_(self.weights(), 1.0, square.sqrt())


class OneFOneB(GPipe):
    schedule = "Schedule1F1B"


class Interleaved(GPipe):
    schedule, chunks = "ScheduleInterleaved1F1B", 2


class ZeroBubble(GPipe):
    schedule, chunks = "ScheduleInterleavedZeroBubble", 2


LOOPS: dict[str, type[Plain]] = {
    "plain": Plain, "hand": Hand, "apart": Apart, "ddp": Ddp, "fsdp": Fsdp, "fsdp-kept": FsdpKept,
    "fsdp-accum": FsdpAccum,
    "dtensor": Dtensor, "dtensor-shm": DtensorShm,
    "gpipe": GPipe, "1f1b": OneFOneB, "interleaved": Interleaved, "zero-bubble": ZeroBubble,
}  # fmt: skip
