"""Parameters cut as Megatron-LM cuts them equal one process.

The fakes have the attributes of Megatron's parameters and the map of its distributed optimizer, and no
other part of it: a cell of docs/audited.md records the library itself. Ranks run one after the other; each
has its part of the whole gradient, as after the reductions.
"""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_audit.checks import check_run
from torch_audit.compare import EQUAL, NOT_COMPARABLE, REFUTED, compare
from torch_audit.recorder import Recorder
from torch_audit.runs import Run, load

TP, DP = 2, 2
# Axis and stride of each parameter that tensor parallelism cuts. A gated MLP has stride 2: each rank has
# rows of the gate and rows of the rest.
CUTS = {
    "up.weight": (0, 2),
    "up.bias": (0, 2),
    "down.weight": (1, 1),
    "expert.weight": (0, 1),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.expert = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.norm(self.down(torch.tanh(self.up(x)))))


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def gradients(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    parameters = list(model.parameters())
    return list(torch.autograd.grad(model(x).square().mean(), parameters))


def cut(whole: Tensor, name: str, rank: int) -> Tensor:
    """A rank's part as Megatron's `_initialize_affine_weight_cpu` makes it."""
    axis, stride = CUTS[name]
    size = whole.shape[axis] // TP // stride
    parts = torch.split(whole, size, dim=axis)[rank::TP]
    return torch.cat(parts, axis).clone()


def state_of(tp_rank: int) -> ModuleType:
    """Megatron's module of process groups. Experts have groups of their own."""
    state: Any = ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_rank = lambda: tp_rank
    state.get_tensor_model_parallel_world_size = lambda: TP
    state.get_expert_tensor_parallel_rank = lambda: 1 - tp_rank
    state.get_expert_tensor_parallel_world_size = lambda: TP
    return state


def on_rank(tp_rank: int) -> tuple[Model, list[Tensor]]:
    """This rank's parameters, with their attributes, and its part of the gradients."""
    model = new_model()
    own = []
    named = list(model.named_parameters())
    for (name, parameter), whole in zip(named, gradients(model), strict=True):
        fake: Any = parameter
        fake.tensor_model_parallel = name in CUTS
        fake.partition_dim, fake.partition_stride = CUTS.get(name, (-1, 1))
        # False for experts, whose gradients are not reduced with the others.
        fake.allreduce = name != "expert.weight"
        at = tp_rank if fake.allreduce else 1 - tp_rank
        if name in CUTS:
            fake.data = cut(parameter.data, name, at)
            own.append(cut(whole, name, at))
        else:
            own.append(whole)
    return model, own


def plain(model: Model, own: list[Tensor], dp_rank: int) -> list[Tensor]:
    """An optimizer of the model's own parameters."""
    for parameter, gradient in zip(model.parameters(), own, strict=True):
        parameter.grad = gradient
    return list(model.parameters())


class FakeDistributedOptimizer:
    """The map of Megatron's: a range of all parameters, one after the other, on each data-parallel rank."""

    def __init__(self, parameters: list[Any], dp_rank: int) -> None:
        sizes = [each.numel() for each in parameters]
        share = -(-sum(sizes) // DP)
        first, last = dp_rank * share, (dp_rank + 1) * share
        self.ranges = {}
        self.model_fp32_groups: list[list[Any]] = [[]]
        self.shard_fp32_groups: list[list[Any]] = [[]]
        self.model_float16_groups: list[list[Any]] = [[]]
        self.shard_fp32_from_float16_groups: list[list[Any]] = [[]]
        at = 0
        for index, parameter in enumerate(parameters):
            start = max(at, first) - at
            end = min(at + sizes[index], last) - at
            at += sizes[index]
            if start >= end:
                continue  # another rank has it
            self.ranges[id(parameter)] = SimpleNamespace(start=start, end=end)
            shard: Any = parameter.detach().view(-1)[start:end].clone()
            shard.tensor_model_parallel = parameter.tensor_model_parallel
            # As for parameters in 16 bits, which have a copy, and for others.
            both = [
                (self.model_fp32_groups, self.shard_fp32_groups),
                (
                    self.model_float16_groups,
                    self.shard_fp32_from_float16_groups,
                ),
            ]
            models, shards = both[index % 2]
            models[0].append(parameter)
            shards[0].append(shard.requires_grad_())

    def _get_model_param_range_map(self, parameter: Any) -> dict[str, Any]:
        return {"param": self.ranges[id(parameter)]}


KEPT: list[Any] = []  # an optimizer lives as long as its program


def sharded(model: Model, own: list[Tensor], dp_rank: int) -> list[Tensor]:
    parameters: list[Any] = list(model.parameters())
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.main_grad = gradient
    optimizer = FakeDistributedOptimizer(parameters, dp_rank)
    KEPT.append(optimizer)
    gradient_of = {id(x): y for x, y in zip(parameters, own, strict=True)}
    pairs = [
        *zip(optimizer.model_fp32_groups[0], optimizer.shard_fp32_groups[0], strict=True),
        *zip(optimizer.model_float16_groups[0], optimizer.shard_fp32_from_float16_groups[0], strict=True),
    ]  # fmt: skip
    for parameter, shard in pairs:
        part = optimizer.ranges[id(parameter)]
        flat = gradient_of[id(parameter)].reshape(-1)
        shard.grad = flat[part.start : part.end].clone()
    return [shard for _, shard in pairs]


def recorded(folder: Path, tensors: list[Tensor]) -> None:
    recorder = Recorder(folder, 1)
    recorder.install()
    torch.optim.SGD(tensors, lr=0.1).step()
    recorder.finish()


Optimizer = Callable[[Model, list[Tensor], int], list[Tensor]]


def run_of(
    folder: Path,
    optimizer: Optimizer,
    monkeypatch: pytest.MonkeyPatch,
    wrong_rank: int = -1,
) -> Run:
    folder.mkdir()
    monkeypatch.setenv("WORLD_SIZE", str(TP * DP))
    for dp_rank, tp_rank in product(range(DP), range(TP)):
        rank = dp_rank * TP + tp_rank
        monkeypatch.setenv("RANK", str(rank))
        state = state_of(tp_rank)
        monkeypatch.setitem(sys.modules, state.__name__, state)
        model, own = on_rank(tp_rank)
        tensors = optimizer(model, own, dp_rank)
        if rank == wrong_rank:
            tensors[0].grad[0] *= 1.01  # type: ignore[index]
        recorded(folder, tensors)
        KEPT.clear()
    return load(folder)


def one_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    folder.mkdir()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    model = new_model()
    recorded(folder, plain(model, gradients(model), 0))
    return load(folder)


@pytest.mark.parametrize("optimizer", [plain, sharded])
def test_what_megatron_cuts_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Optimizer
) -> None:
    one = one_of(tmp_path / "one", monkeypatch)
    run = run_of(tmp_path / "run", optimizer, monkeypatch)
    verdict = compare(one, run)
    assert (verdict.result, verdict.parameters) == (EQUAL, 6), verdict.text
    assert run.meshes == {"tp": TP}
    assert not [x for x in check_run(run) if x.fault]
    wrong = run_of(tmp_path / "wrong", optimizer, monkeypatch, wrong_rank=1)
    verdict = compare(one, wrong)
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    assert [each.name for each in verdict.different] == ["up.weight"]


def test_without_the_attributes_the_shards_are_declared_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CUTS, "up.weight", (0, 1))
    one = one_of(tmp_path / "one", monkeypatch)

    def forgotten(
        model: Model, own: list[Tensor], dp_rank: int
    ) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        return plain(model, own, dp_rank)

    verdict = compare(one, run_of(tmp_path / "run", forgotten, monkeypatch))
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "weights")
