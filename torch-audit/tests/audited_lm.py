"""A small language model trained in one of several layouts of plain torch: audited_lm.py LAYOUT [BUG].

Nothing in it knows the recorder. The layout `one` is the reference: one process that sees all samples.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 32, 16, 2, 4, 8
BATCH, MICROBATCHES, STEPS = 8, 2, 3
MOST = 0.5  # the norm at which gradients are clipped
SEED = int(os.environ.get("AUDITED_SEED", "0"))  # of weights and samples


class GatherSequence(torch.autograd.Function):
    """The keys or values of all ranks of a context-parallel world."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool = True) -> Tensor:
        ctx.summed = summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        if ctx.summed:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()], None


class Attention(nn.Module):
    context_parallel = False
    offset = 0  # of the causal mask: a seeded bug
    keys_summed = True  # False: a seeded bug

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        first = 0
        if self.context_parallel:
            first = dist.get_rank() * q.shape[2] + self.offset
            k = GatherSequence.apply(k, self.keys_summed)
            v = GatherSequence.apply(v)
        scores = (q @ k.mT) / (WIDTH // HEADS) ** 0.5
        at = torch.arange(q.shape[2])[:, None] + first
        hidden = torch.arange(k.shape[2]) > at
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None
    ) -> Tensor:
        # A stage of a pipeline lacks some of the modules.
        x = tokens if self.embed is None else self.embed(tokens)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all samples of a step; samples have different numbers of labels."""
    generator = torch.Generator().manual_seed(1000 * SEED + step)
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH + 1), generator=generator
    )
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        labels[row, : row % 5] = -100
    return tokens[:, :-1], labels


def new_model(tied: bool = False) -> Model:
    torch.manual_seed(SEED)
    model = Model()
    if tied:
        model.head.weight = model.embed.weight
    return model


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def optimizer_of(model: nn.Module, bug: str = "") -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    if bug == "left out":
        parameters = {
            n: p
            for n, p in parameters.items()
            if "blocks.1.up.weight" not in n
        }
    decay = 0.5 if bug == "decay" else 0.0
    rate = 2e-2 if bug == "rate" and dist.get_rank() == 1 else 1e-2
    return torch.optim.AdamW(
        parameters.values(), lr=rate, weight_decay=decay, foreach=False
    )


def train(
    model: nn.Module,
    dp: int = 1,
    dp_rank: int = 0,
    scale: float = 1.0,
    bug: str = "",
    sums: Callable[[], None] | None = None,
    cp: int = 1,
) -> None:
    """Some steps with accumulation; the loss is a mean over the labels of all ranks and microbatches.

    `scale` undoes the mean over ranks of the library that reduces gradients. `sums` sums gradients
    where no library does.
    """
    optimizer = optimizer_of(model, bug)
    if bug == "counted step":
        # A step with zeros makes the moments, and counts in the bias correction.
        count_step(optimizer)
    for step in range(STEPS):
        tokens, labels = batch_of(step)
        count = (labels != -100).sum()
        order = torch.arange(BATCH)
        if bug == "sampler seeds":
            generator = torch.Generator().manual_seed(dist.get_rank())
            order = torch.randperm(BATCH, generator=generator)
        rows = order.chunk(dp)[0 if bug == "same rows" else dp_rank]
        for micro, chosen in enumerate(rows.chunk(MICROBATCHES)):
            last = micro == MICROBATCHES - 1
            apart = getattr(model, "no_sync", nullcontext)
            if (
                isinstance(model, DistributedDataParallel)
                and bug == "never reduced"
            ):
                last = False
            with nullcontext() if last else apart():
                ours = slice(None)
                if cp > 1:
                    ours = slice(
                        dist.get_rank() * LENGTH // cp,
                        (dist.get_rank() + 1) * LENGTH // cp,
                    )
                positions = torch.arange(LENGTH)[ours][None]
                logits = model(tokens[chosen][:, ours], position_ids=positions)
                wanted = labels[chosen][:, ours]
                loss = summed_loss(logits, wanted) * scale / count
                if bug == "mean of means":
                    loss = (
                        summed_loss(logits, wanted)
                        / (wanted != -100).sum()
                        / MICROBATCHES
                    )
                if bug == "not divided":
                    loss = loss * MICROBATCHES
                loss.backward()
        if sums is not None:
            sums()
        if bug == "scaled":
            for parameter in model.parameters():
                parameter.grad.mul_(cp)
        one_rank = dist.is_initialized() and dist.get_rank() == 1
        if bug == "one rank" and step == 1 and one_rank:
            model.get_parameter("module.blocks.0.down.weight").grad.mul_(1.01)
        clip(model, bug)
        if bug == "after the clip":
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()
        if bug != "not zeroed":
            optimizer.zero_grad()
        if step == 0 and bug == "drift" and one_rank:
            with torch.no_grad():
                model.get_parameter("module.norm.weight").mul_(1.001)
        if step == 0 and bug == "exchanged":
            exchange(model.get_parameter("blocks.0.down.weight"))


def clip(model: nn.Module, bug: str) -> None:
    parameters = list(model.parameters())
    if hasattr(model, "norm_of_ranks"):
        norm = model.norm_of_ranks()
        torch.nn.utils.clip_grads_with_norm_(parameters, MOST, norm)
        return
    if bug == "local norm":
        norms = [each.grad.to_local().norm() for each in parameters]
        norm = torch.stack(norms).norm()
        torch.nn.utils.clip_grads_with_norm_(parameters, MOST, norm)
        return
    if bug == "replicas in the norm":
        # Squares of local gradients are summed over all ranks, copies as well.
        square = sum(local(each.grad).square().sum() for each in parameters)
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(
            parameters, MOST, norm, foreach=False
        )
        return
    meshes = {getattr(each, "device_mesh", None) for each in parameters}
    if len(meshes) == 1:
        torch.nn.utils.clip_grad_norm_(parameters, MOST)
        return
    # torch's clip refuses plain tensors beside DTensors, and DTensors of several meshes.
    norms = [each.grad.norm() for each in parameters]
    whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm = torch.stack(whole).norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, MOST, norm, foreach=False)


def local(gradient: Tensor) -> Tensor:
    """The local tensor of a gradient that is sharded or replicated."""
    if not isinstance(gradient, DTensor):
        return gradient
    whole = gradient.redistribute(
        placements=[
            Replicate() if each.is_partial() else each
            for each in gradient.placements
        ]
    )
    return whole.to_local()


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer's moments and counts a step, as a step of zeros without a rate does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def exchange(weight: Tensor) -> None:
    """Gives each of two ranks the other's shard: a seeded bug."""
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        local = weight.to_local()
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local.contiguous())
        local.copy_(parts[1 - dist.get_rank()])


# ---- layouts


def one(bug: str = "") -> None:
    model = new_model(tied=bug == "tied")
    if bug == "dropout":
        drop_outputs(model, 0)
    if bug == "zeros":
        zero_biases(model)
    train(model)


def zero_biases(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()


def ddp(bug: str = "") -> None:
    world = dist.get_world_size()
    model = DistributedDataParallel(new_model())
    if bug == "start":
        with torch.no_grad():
            model.module.head.weight.add_(1e-3 * dist.get_rank())
    scale = 1.0 if bug == "not scaled" else float(world)
    train(model, world, dist.get_rank(), scale, bug)


def fsdp2(bug: str = "") -> None:
    world = dist.get_world_size()
    shard(model := new_model(), init_device_mesh("cpu", (world,)))
    if bug == "divided":
        model.blocks["1"].set_gradient_divide_factor(8.0)
    train(model, world, dist.get_rank(), world, bug)


def hsdp(bug: str = "") -> None:
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )
    shard(model := new_model(), mesh)
    if bug == "not replicated":
        model.set_requires_all_reduce(False)
    train(model, 4, dist.get_rank(), 4.0, bug)


def tp(bug: str = "") -> None:
    model = new_model()
    split(
        model,
        init_device_mesh(
            "cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)
        ),
    )
    if "dropout" in bug:
        # Ranks hold copies of these outputs, so they must drop the same elements.
        drop_outputs(model, dist.get_rank() if bug == "dropout seeds" else 0)
    if bug == "wrong shard" and dist.get_rank() == 1:
        with torch.no_grad():
            weight = model.blocks["0"].attention.q.weight.to_local()
            weight.copy_(weight.roll(1, 0))
    if bug == "summed twice":
        for parameter in (b.attention.q.weight for b in model.blocks.values()):
            parameter.register_hook(lambda gradient: gradient * 2)
    if bug == "reduced twice":
        model.blocks["1"].down.register_forward_hook(twice)
    train(model, bug=bug)


def tp_sequence(bug: str = "") -> None:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)
    )
    split(model := new_model(), mesh, sequence=True)
    train(model, bug=bug)


def fsdp2_tp(bug: str = "") -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    split(model := new_model(), mesh["tp"])
    shard(model, mesh["fsdp"])
    train(model, 2, mesh["fsdp"].get_local_rank(), 2.0, bug)


def cp(bug: str = "") -> None:
    model = new_model()
    for block in model.blocks.values():
        block.attention.context_parallel = True
        block.attention.offset = int(bug == "mask")
    model.blocks["1"].attention.keys_summed = bug != "keys not summed"

    def sums() -> None:
        for name, parameter in model.named_parameters():
            if bug != "norms not summed" or "norm" not in name:
                dist.all_reduce(parameter.grad)

    train(model, bug=bug, sums=sums, cp=dist.get_world_size())


def twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def drop_outputs(model: Model, seed: int) -> None:
    """Adds dropout after each MLP, which draws from a seed."""
    torch.manual_seed(seed)
    for block in model.blocks.values():
        block.down.register_forward_hook(lambda _, __, out: dropout(out, 0.1))


def pipeline(bug: str = "") -> None:
    """Two stages whose embedding and output matrix are tied."""
    rank = dist.get_rank()
    model = new_model(tied=True)
    tied = model.embed.weight if rank == 0 else model.head.weight
    del model.blocks[str(1 - rank)]
    if rank == 0:
        model.norm = model.head = None
    else:
        model.embed = None
        if bug == "later stage":
            model.blocks["1"].down.register_forward_hook(twice)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        tokens, labels = batch_of(step)
        count = (labels != -100).sum() * (2 if bug == "scaled" else 1)

        def loss(
            logits: Tensor, wanted: Tensor, count: Tensor = count
        ) -> Tensor:
            return summed_loss(logits, wanted) / count

        schedule = ScheduleGPipe(
            stage, MICROBATCHES, loss_fn=loss, scale_grads=False
        )
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels)
        if bug != "untied":
            dist.all_reduce(tied.grad)
        clip_stages(model, bug)
        optimizer.step()
        optimizer.zero_grad()


def clip_stages(model: nn.Module, bug: str) -> None:
    """Clips by the norm of both stages, in which the tied weight counts once."""
    parameters = list(model.parameters())
    if bug == "stage norm":
        torch.nn.utils.clip_grad_norm_(parameters, MOST)
        return
    twice = bug == "tied twice in the norm"
    counted = [
        p
        for p in parameters
        if twice or dist.get_rank() == 0 or p is not model.head.weight
    ]
    norm = torch.nn.utils.get_total_norm([each.grad for each in counted])
    square = norm**2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, MOST, square.sqrt())


def shard(model: Model, mesh: Any) -> None:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: Model, mesh: Any, sequence: bool = False) -> None:
    """Tensor parallelism, with sequence parallelism between the matrices if asked."""
    whole, parts = Replicate(), Shard(1)
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=whole)}
    for i in range(LAYERS):
        name = f"blocks.{i}"
        for column in ("attention.q", "attention.k", "attention.v", "up"):
            plan[f"{name}.{column}"] = ColwiseParallel()
        out = parts if sequence else whole
        for row in ("attention.o", "down"):
            plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=out)
        if sequence:
            for norm in ("norm1", "norm2"):
                plan[f"{name}.{norm}"] = SequenceParallel()
            for inside in ("attention", "up"):
                plan[f"{name}.{inside}"] = plan.get(
                    f"{name}.{inside}"
                ) or PrepareModuleInput(
                    input_layouts=(parts,), desired_input_layouts=(whole,)
                )
            plan[f"{name}.up"] = ColwiseParallel(input_layouts=parts)
    if sequence:
        plan["embed"] = RowwiseParallel(
            input_layouts=whole, output_layouts=parts
        )
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(
            input_layouts=parts, output_layouts=whole
        )
    parallelize_module(model, mesh, plan)


LAYOUTS = {each.__name__: each for each in (
    one, ddp, fsdp2, hsdp, tp, tp_sequence, fsdp2_tp, cp, pipeline,
)}  # fmt: skip


def main(layout: str, bug: str = "") -> None:
    torch.set_default_dtype(torch.float64)
    if layout != "one":
        dist.init_process_group("gloo")
    LAYOUTS[layout](bug)
    if layout != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
