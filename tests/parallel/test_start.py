"""How weights start, against a draw that is written here a second time: by seed and by name."""

from __future__ import annotations

import hashlib
import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.comm import AloneWorld, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Run, Shape
from phalanx.parallel import Entry, Precision, build_model, load_model, start
from phalanx.parallel.local import build_local
from phalanx.train.program import program_of
from phalanx.train.rank import Rank
from phalanx.verify import SHAPES

STRANGER = f"{Path(__file__).parents[2] / 'examples' / 'stranger.py'}:Stranger"
WIDE = Precision(torch.float64, torch.float64, torch.float64)


def normal(name: str, seed: int, size: torch.Size, spread: float) -> Tensor:
    """The generator is seeded by 63 bits of the SHA-256 of "seed:name"."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()
    generator = torch.Generator().manual_seed(int(digest[:16], 16) // 2)
    return torch.zeros(size, dtype=torch.float32).normal_(0.0, spread, generator=generator)


def drawn(name: str, seed: int, size: torch.Size, shape: Shape) -> Tensor:
    """As GPT-2 (Radford et al. 2019): a spread of 0.02, less by the root of the number of
    additions to the residual stream for what adds to it; biases 0, norms 1 (where they
    count from one, 0)."""
    if shape.kind == "mlp":
        return normal(name, seed, size, math.sqrt(2 / shape.hidden))
    last = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if name.endswith("bias"):
        return torch.zeros(size)
    if last == "norm" or last.endswith("_norm"):
        return torch.zeros(size) if shape.norm == "rms1" else torch.ones(size)
    into_residual = last in ("wo", "down")
    return normal(name, seed, size, 0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_starts_as_a_draw_by_seed_and_name(name: str, seed: int) -> None:
    model = build_model(SHAPES[name])
    for weight, parameter in model.weights.items():
        want = drawn(weight, seed, parameter.shape, SHAPES[name])
        assert torch.equal(start(model, weight, seed), want), weight
        # Drawn in float32 whatever it becomes.
        wide = start(model, weight, seed, torch.float64)
        assert torch.equal(wide, want.double()), weight


@pytest.mark.parametrize("name", SHAPES)
def test_no_two_weights_that_are_drawn_start_equal_nor_do_seeds(name: str) -> None:
    model = build_model(SHAPES[name])
    starts = {(w, s): start(model, w, s).flatten() for w in model.weights for s in (0, 1)}
    random = {k: x for k, x in starts.items() if x.unique().numel() > 2}
    assert len(random) >= 2 * SHAPES[name].layers
    for (a, x), (b, y) in combinations(random.items(), 2):
        n = min(x.numel(), y.numel())
        assert (x[:n] == y[:n]).double().mean() < 0.01, (a, b)


@pytest.mark.parametrize("seed", [0, 7])
def test_weights_of_a_user_s_own_model_start_so_too(seed: int) -> None:
    model = load_model(STRANGER)
    for weight, parameter in model.weights.items():
        want = torch.ones(parameter.shape)
        if parameter.dim() == 2:
            want = normal(weight, seed, parameter.shape, 0.02)
        elif weight.endswith("bias"):
            want = torch.zeros(parameter.shape)
        assert torch.equal(start(model, weight, seed), want), weight


def held(world: World, layout: Layout, shape: Shape, seed: int) -> list[tuple[Entry, Tensor]]:
    """What a rank begins with: of the weights as they are gathered, and of its part at home."""
    model = build_model(shape)
    local = build_local(
        world, layout, model, program_of(model, layout, agree=True), seed=seed, precision=WIDE
    )
    told = []
    for unit in local.units.values():
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            told.append((entry, unit.home[run].clone()))
        if unit.buffer is None:
            unit.gather().wait()
        for weight in unit.order:
            flat = unit.parameters[weight.name].detach().flatten().clone()
            told.append((Entry(weight, 0, flat.numel(), 0), flat))
    world.clear()
    return told


LAYOUTS = (
    "", "dp2", "dp2 zero1", "dp3 zero3", "tp2", "tp4 seq", "pp2 1f1b:2", "dp2 pp2 tp2 zero2 gpipe:2",
    "pp2 interleaved2:2", "cp2 tp2", "dp2x2 zero3",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("name", ["gqa", "gpt"])
def test_ranks_of_a_layout_begin_with_their_parts_of_that_draw(name: str, text: str) -> None:
    layout, shape = Layout.parse(text), SHAPES[name]
    found = set()
    for told in launch(held, layout.ranks, layout, shape, 3, backend="threads"):
        for (weight, start_, stop, _), numbers in told:
            whole = drawn(weight.name, 3, torch.Size(weight.shape), shape).double()
            want = torch.zeros(weight.local, dtype=torch.float64)
            part = whole[weight.box]
            want[tuple(map(slice, part.shape))] = part
            assert torch.equal(numbers, want.flatten()[start_:stop]), weight.name
            found.add(weight.name)
    assert found == set(build_model(shape).weights)


def test_a_run_s_seed_is_that_of_its_weights(tmp_path: Path) -> None:
    sizes = "model={layers=3,hidden=16,heads=2,ffn=24,vocab=256}"
    for seed in (0, 5):
        run = Run.parse("", "seeded", (sizes, f"out={tmp_path}", f"seed={seed}", "batch=2"))
        rank = Rank(AloneWorld("cpu"), run, Layout())
        for unit in rank.local.units.values():
            for name, parameter in unit.parameters.items():
                want = drawn(name, seed, parameter.shape, rank.shape)
                assert torch.equal(parameter.detach(), want), name
