"""Parameters in flat buffers, cut as DeepSpeed's ZeRO cuts them, equal one process.

The fakes have the attributes that ZeRO gives to parameters, and no other part of it. Two ranks run one
after the other; each has the whole gradient, as after a reduction.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_audit.checks import check_run
from torch_audit.compare import EQUAL, REFUTED, compare
from torch_audit.recorder import Recorder
from torch_audit.runs import Run, load

RANKS = 2


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7)).double()


def gradients(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    parameters = list(model.parameters())
    return list(torch.autograd.grad(model(x).square().mean(), parameters))


def address(start: int, numel: int) -> Any:
    return SimpleNamespace(start=start, numel=numel)


def cut_as_stage_2(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's half of all parameters in one buffer, and of their gradients."""
    parameters = list(model.parameters())
    flat = torch.cat([x.detach().reshape(-1) for x in parameters])
    whole = torch.cat([x.reshape(-1) for x in gradients(model)])
    size = -(-len(flat) // RANKS)
    padding = flat.new_zeros(size * RANKS - len(flat))
    first = rank * size
    buffer = torch.cat([flat, padding])[first : first + size].clone()
    own = torch.cat([whole, padding])[first : first + size].clone()
    at = 0
    for parameter in parameters:
        start = max(at, first)
        stop = min(at + parameter.numel(), first + size)
        fake: Any = parameter
        fake._hp_mapping = None
        if start < stop:
            fake._hp_mapping = SimpleNamespace(
                lp_fragment_address=address(start - at, stop - start),
                hp_fragment_address=address(start - first, stop - start),
                hp_fragment=buffer[start - first : stop - first],
            )
        at += parameter.numel()
    return buffer, own


def cut_as_stage_3(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """Each parameter in equal parts, the last one padded, one after the other in a buffer."""
    pieces: list[Tensor] = []
    own: list[Tensor] = []
    positions: dict[int, tuple[int, int, int]] = {}
    at = 0
    both = zip(model.parameters(), gradients(model), strict=True)
    for parameter, gradient in both:
        size = -(-parameter.numel() // RANKS)
        for values, parts in ((parameter.detach(), pieces), (gradient, own)):
            padded = values.new_zeros(size * RANKS)
            padded[: values.numel()] = values.reshape(-1)
            parts.append(padded[rank * size : (rank + 1) * size])
        positions[id(parameter)] = (0, at, size)
        at += size
    buffer = torch.cat(pieces)
    optimizer = SimpleNamespace(
        get_param_id=id,
        grad_position=positions,
        fp32_partitioned_groups_flat=[buffer],
    )
    for parameter in model.parameters():
        fake: Any = parameter
        fake._z3_optimizer = optimizer
        fake.ds_shape = parameter.shape
        fake.ds_process_group = SimpleNamespace(rank=lambda: rank)
        # Stage 3 leaves nothing of a parameter in its module.
        fake.data = torch.empty(0, dtype=torch.float64)
    return buffer, torch.cat(own)


def recorded(folder: Path, tensors: list[Tensor], grads: list[Tensor]) -> None:
    recorder = Recorder(folder, 1)
    recorder.install()
    for tensor, gradient in zip(tensors, grads, strict=True):
        tensor.requires_grad_().grad = gradient
    torch.optim.SGD(tensors, lr=0.1).step()
    recorder.finish()


def run_of(
    folder: Path,
    cut: Any,
    monkeypatch: pytest.MonkeyPatch,
    wrong_rank: int = -1,
) -> Run:
    folder.mkdir()
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        model = new_model()
        buffer, own = cut(model, rank)
        if rank == wrong_rank:
            own[3] *= 1.01
        recorded(folder, [buffer], [own])
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    return load(folder)


@pytest.mark.parametrize("cut", [cut_as_stage_2, cut_as_stage_3])
def test_flat_buffers_equal_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Any
) -> None:
    run = run_of(tmp_path / "run", cut, monkeypatch)
    model = new_model()
    (tmp_path / "one").mkdir()
    grads = gradients(model)
    recorded(tmp_path / "one", list(model.parameters()), grads)
    one = load(tmp_path / "one")
    verdict = compare(one, run)
    assert (verdict.result, verdict.parameters) == (EQUAL, 4), verdict.text
    assert not [x for x in check_run(run) if x.fault]
    wrong = run_of(tmp_path / "wrong", cut, monkeypatch, wrong_rank=1)
    verdict = compare(one, wrong)
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    assert len(verdict.different) == 1
    # Of a weight in two parts, either may be the wrong one.
    assert 1 in verdict.different[0].ranks
