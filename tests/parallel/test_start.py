"""How weights start, against a draw that is written here a second time: by seed and by name."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.comm import AloneWorld, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Run, Shape
from phalanx.parallel import Entry, Precision, build_model, load_model, start
from phalanx.parallel.local import build_local
from phalanx.training.program import program_of
from phalanx.training.rank import Rank
from phalanx.verification import SHAPES

STRANGER = f"{Path(__file__).parents[2] / 'examples' / 'stranger.py'}:Stranger"
WIDE = Precision(torch.float64, torch.float64, torch.float64)


def seeded(name: str, seed: int) -> torch.Generator:
    """The generator is seeded by 63 bits of the SHA-256 of "seed:name"."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()
    return torch.Generator().manual_seed(int(digest[:16], 16) // 2)


def normal(name: str, seed: int, size: torch.Size, spread: float) -> Tensor:
    generator = seeded(name, seed)
    return torch.zeros(size, dtype=torch.float32).normal_(
        0.0, spread, generator=generator
    )


def drawn(name: str, seed: int, size: torch.Size, shape: Shape) -> Tensor:
    """As GPT-2 (Radford et al. 2019): a spread of 0.02, less by the root of the number of
    additions to the residual stream for what adds to it; biases 0, norms 1 (where they
    count from one, 0)."""
    if shape.kind == "mlp":
        return normal(name, seed, size, math.sqrt(2 / shape.hidden))
    last = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if name.endswith("bias"):
        return torch.zeros(size)
    # Delta layers: rates of decay from 0.01 to 16, and convolutions as torch's.
    if last in ("head_norm", "step"):
        return torch.ones(size)
    if last == "decay":
        rates = torch.zeros(size).uniform_(
            0.01, 16.0, generator=seeded(name, seed)
        )
        return rates.log()
    if last.startswith("taps_"):
        most = 1 / size[-1] ** 0.5
        return torch.zeros(size).uniform_(
            -most, most, generator=seeded(name, seed)
        )
    if last == "norm" or last.endswith("_norm"):
        return torch.zeros(size) if shape.norm == "rms1" else torch.ones(size)
    into_residual = last in ("wo", "out", "down")
    return normal(
        name,
        seed,
        size,
        0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02,
    )


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_starts_as_a_draw_by_seed_and_name(
    name: str, seed: int
) -> None:
    model = build_model(SHAPES[name])
    for weight, parameter in model.weights.items():
        want = drawn(weight, seed, parameter.shape, SHAPES[name])
        assert torch.equal(start(model, weight, seed), want), weight
        # Drawn in float32 whatever it becomes.
        wide = start(model, weight, seed, torch.float64)
        assert torch.equal(wide, want.double()), weight


@pytest.mark.parametrize("name", SHAPES)
def test_no_two_weights_that_are_drawn_start_equal_nor_do_seeds(
    name: str,
) -> None:
    model = build_model(SHAPES[name])
    starts = {
        (w, s): start(model, w, s).flatten()
        for w in model.weights
        for s in (0, 1)
    }
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


Parts = list[tuple[Entry, Tensor]]


def held(
    world: World, layout: Layout, shape: Shape, seed: int
) -> tuple[Parts, Parts]:
    """What a rank begins with: its part at home, and the weights as they are gathered."""
    model = build_model(shape)
    local = build_local(
        world,
        layout,
        model,
        program_of(model, layout),
        seed=seed,
        precision=WIDE,
    )
    homes, wholes = [], []
    for unit in local.units.values():
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            homes.append((entry, unit.home[run].clone()))
        if unit.buffer is None:
            unit.gather().wait()
        for weight in unit.order:
            flat = unit.parameters[weight.name].detach().flatten().clone()
            wholes.append((Entry(weight, 0, flat.numel(), 0), flat))
    world.clear()
    return homes, wholes


LAYOUTS = (
    "", "dp2", "dp2 zero1", "dp3 zero3", "tp2", "tp4 seq", "pp2 1f1b:2", "dp2 pp2 tp2 zero2 gpipe:2",
    "pp2 interleaved2:2", "cp2 tp2", "dp2x2 zero3",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("name", ["gqa", "gpt"])
def test_ranks_of_a_layout_begin_with_their_parts_of_that_draw(
    name: str, text: str
) -> None:
    layout, shape = Layout.parse(text), SHAPES[name]
    found = set()
    for homes, wholes in launch(
        held, layout.ranks, layout, shape, 3, backend="threads"
    ):
        for (weight, start_, stop, _), numbers in homes + wholes:
            whole = drawn(
                weight.name, 3, torch.Size(weight.shape), shape
            ).double()
            want = torch.zeros(weight.local, dtype=torch.float64)
            part = whole[weight.box]
            want[tuple(map(slice, part.shape))] = part
            assert torch.equal(numbers, want.flatten()[start_:stop]), (
                weight.name
            )
            found.add(weight.name)
    assert found == set(build_model(shape).weights)


BIG = Shape(
    "big",
    layers=2,
    hidden=320,
    heads=4,
    ffn=700,
    vocab=301,
    sequence=8,
    batch=4,
)
MIXED = replace(BIG, ffn=96, experts=4, top_k=2, expert_ffn=530)


def tiled(name: str, seed: int, shape: Shape, size: torch.Size) -> Tensor:
    """Of a matrix at most 256 columns and 65,536 numbers come from one seed; the second tile, to the
    right of the first, has that of "seed:name:1"."""
    if len(size) == 1:
        return drawn(name, seed, size, shape)
    flat = torch.full((size[:-1].numel(), size[-1]), math.nan)
    corners = [
        (i, j)
        for i in range(0, len(flat), 256)
        for j in range(0, size[-1], 256)
    ]
    for number, (i, j) in enumerate(corners):
        tile = flat[i : i + 256, j : j + 256]
        # By the end of a name is decided how it is drawn, so the tile's number stands in the seed's place.
        text = f"{name}:{number}" if number else name
        spread = (
            0.02 / 2
            if name.endswith(("wo.weight", "down.weight", "routed.down"))
            else 0.02
        )
        tile.copy_(normal(text, seed, tile.shape, spread))
    return flat.view(size)


class Drawn(TorchFunctionMode):
    """Counts the numbers that are drawn."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.normal_:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def held_and_drawn(
    world: World, layout: Layout, shape: Shape
) -> tuple[Any, int]:
    with Drawn() as mode:
        return held(world, layout, shape, 3), mode.count


@pytest.mark.parametrize(
    "text",
    ["", "dp4 zero3", "tp4 seq", "dp2 tp2 zero1", "pp2 1f1b:2", "ep2 tp2"],
)
@pytest.mark.parametrize("shape", [BIG, MIXED], ids=["dense", "experts"])
def test_parts_of_matrices_of_several_tiles_are_those_of_the_whole(
    shape: Shape, text: str
) -> None:
    if text.startswith("ep") and not shape.experts:
        pytest.skip("there are no experts to share")
    layout = Layout.parse(text)
    for homes, wholes in launch(
        held, layout.ranks, layout, shape, 3, backend="threads"
    ):
        for (weight, start_, stop, _), numbers in homes + wholes:
            whole = tiled(
                weight.name, 3, shape, torch.Size(weight.shape)
            ).double()
            want = torch.zeros(weight.local, dtype=torch.float64)
            part = whole[weight.box]
            want[tuple(map(slice, part.shape))] = part
            assert torch.equal(numbers, want.flatten()[start_:stop]), (
                weight.name
            )


@pytest.mark.parametrize(
    "text", ["", "tp2", "dp2 tp2", "pp2 1f1b:2", "dp4 zero3", "dp2 tp2 zero1"]
)
def test_a_rank_draws_no_more_than_the_tiles_that_it_has_a_part_of(
    text: str,
) -> None:
    layout = Layout.parse(text)
    shape = Shape(
        "even",
        layers=2,
        hidden=512,
        heads=4,
        ffn=1024,
        vocab=1024,
        sequence=8,
        batch=4,
    )
    for (homes, _), count in launch(
        held_and_drawn, layout.ranks, layout, shape, backend="threads"
    ):
        own = sum(
            numbers.numel() for (w, *_), numbers in homes if len(w.shape) > 1
        )
        # A shard may begin and end within a row of tiles: of four pieces, 256 rows of 1,024 at each end.
        more = 4 * 2 * 256 * 1024 if layout.zero else 0
        assert own <= count <= own + more, (text, own, count)


def test_a_run_s_seed_is_that_of_its_weights(tmp_path: Path) -> None:
    sizes = "model={layers=3,hidden=16,heads=2,ffn=24,vocab=256}"
    for seed in (0, 5):
        run = Run.parse(
            "", "seeded", (sizes, f"out={tmp_path}", f"seed={seed}", "batch=2")
        )
        rank = Rank(AloneWorld("cpu"), run, Layout())
        for unit in rank.part.local.units.values():
            for name, parameter in unit.parameters.items():
                want = drawn(name, seed, parameter.shape, rank.shape)
                assert torch.equal(parameter.detach(), want), name


def test_threads_that_draw_change_no_bit() -> None:
    """Tiles were drawn one after the other: 7 s of the start of a 1B model."""
    model = build_model(replace(SHAPES["gqa"], hidden=256, vocab=700))
    part = torch.arange(3, 600, 2), slice(5, 200)
    before = torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            whole = start(model, "embed.tokens.weight", 1)
            of_part = start(
                model, "embed.tokens.weight", 1, torch.float32, part
            )
            drawn.append((whole, of_part))
    finally:
        torch.set_num_threads(before)
    (one, one_part), (four, four_part) = drawn
    assert torch.equal(one, four)
    assert torch.equal(one_part, four_part)
    assert torch.equal(one_part, one[part[0]][:, part[1]])
