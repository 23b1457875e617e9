"""Compiled pieces do what plain torch does, with one graph for all blocks, and keep no more."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, LayoutError
from phalanx.parallel import Precision, build_model, load_model
from phalanx.parallel import compile as compiling
from phalanx.parallel.compile import graphs, refuse_uncompiled
from phalanx.parallel.local import build_local
from phalanx.parallel.pool import storage_of
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of, verify

WIDE = Precision(torch.float64, torch.float64, torch.float64)
made: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as torch traces and cuts them, run without making kernels, and counted."""
    import torch._dynamo
    from torch._dynamo.backends.common import aot_autograd

    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):

        def count(way: str, graph: Any, inputs: Any) -> Any:
            from functorch.compile import make_boxed_func

            made[way] += 1
            return make_boxed_func(graph.forward)

        from torch._functorch.partitioners import (
            min_cut_rematerialization_partition,
        )

        backend = aot_autograd(
            fw_compiler=partial(count, "forward"),
            bw_compiler=partial(count, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch._dynamo.register_backend(backend, name="counting")
    monkeypatch.setenv("PHALANX_COMPILE_BACKEND", "counting")
    torch._dynamo.reset()
    compiling._compiled.cache_clear()
    compiling._counts.clear()
    made.clear()


def step(world: World, layout: Layout, count: int = 1) -> Executor:
    """The executor of a layout after some steps of the four-block model."""
    shape = SHAPES["gqa"]
    model = build_model(shape)
    program = program_of(model, layout)
    local = build_local(world, layout, model, program, precision=WIDE)
    executor = Executor(local, program, world.rank, AdamW())
    whole = batch_of(shape, 0)
    # Microbatches of one size, so that every graph is of one shape.
    rows = {name: x[: 2 * layout.microbatches] for name, x in whole.items()}
    own = [
        {n: x[2 * m : 2 * m + 2] for n, x in rows.items()}
        for m in range(layout.microbatches)
    ]
    for _ in range(count):
        executor.step(own, 1e-3)
    return executor


def counted(world: World, layout: Layout) -> tuple[Any, ...]:
    step(world, layout, count=2)
    return graphs(), dict(made)


@pytest.mark.parametrize(
    "text", ["", "accum:2", "accum:2 recompute:selective"]
)
def test_equal_blocks_share_one_graph_forward_and_one_backward(
    text: str,
) -> None:
    assert SHAPES["gqa"].layers > 1
    (found,) = launch(
        counted, 1, Layout.parse(f"{text} compile fp64"), backend="threads"
    )
    # The blocks alone, in two steps. The embedding is a lookup, and the head's logits are made by its
    # loss, outside any graph. Where a gradient comes once, it is an output of the graph.
    assert found == ((1, 0), {"forward": 1, "backward": 1})


def test_recomputing_whole_pieces_needs_one_more_graph_of_each_without_gradients() -> (
    None
):
    layout = Layout.parse("accum:2 recompute:all compile fp64")
    (found,) = launch(counted, 1, layout, backend="threads")
    assert found[0].recompiles == 0
    assert found[1]["backward"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "dp2 zero3 accum:2 offload:weights,activations",
        "tp2 seq recompute:selective",
        "cp2 recompute:all",
        pytest.param(
            "pp2 zb-h1:3 recompute:selective", marks=pytest.mark.slow
        ),
        pytest.param(
            "pp2 cp2 zb-v:3 recompute:selective", marks=pytest.mark.slow
        ),
        pytest.param(
            "cp2:ulysses tp2 offload:activations", marks=pytest.mark.slow
        ),
    ],
)
def test_compiled_layouts_give_what_one_process_gives(text: str) -> None:
    packed = "cp2" in text or "accum" in text
    (verdict,) = verify(
        SHAPES["gqa"],
        [Layout.parse(f"{text} compile fp64")],
        steps=1,
        packed=packed,
        dropout=0.2,
    )
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["gpt", "qwen", "mlp"])
def test_every_kind_of_model_compiles(name: str) -> None:
    (verdict,) = verify(SHAPES[name], [Layout.parse("compile fp64")], steps=1)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # a router's losses, and experts that are not compiled beside what is
        ("latent", ""),
        pytest.param(
            "experts",
            "ep2 tp2 seq zero3 accum:2 overlap",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "experts", "recompute:selective accum:2", marks=pytest.mark.slow
        ),
        pytest.param(
            "latent", "ep2 pp2 zb-h1:3 recompute:all", marks=pytest.mark.slow
        ),
        pytest.param(
            "latent", "ep4 cp2 recompute:selective", marks=pytest.mark.slow
        ),
    ],
)
def test_blocks_with_experts_compile_around_these(
    name: str, text: str
) -> None:
    (verdict,) = verify(
        SHAPES[name], [Layout.parse(f"{text} compile fp64")], steps=1
    )
    assert verdict.passed, verdict
    assert graphs().compiled > 2


def test_a_model_of_ones_own_compiles() -> None:
    path = Path(__file__).parents[2] / "examples" / "stranger.py"
    make = partial(load_model, f"{path}:Stranger")
    shape = make().shape
    assert shape is not None
    (verdict,) = verify(
        shape, [Layout.parse("compile fp64")], steps=1, make=make
    )
    assert verdict.passed, verdict


@pytest.mark.skipif(
    not shutil.which("g++"), reason="kernels for a CPU need a C++ compiler"
)
@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("gqa", marks=pytest.mark.slow)]
)
def test_kernels_made_for_this_machine_agree_too(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PHALANX_COMPILE_BACKEND", "inductor")
    (verdict,) = verify(
        SHAPES[name], [Layout.parse("accum:2 compile fp64")], steps=1
    )
    assert verdict.passed, verdict


def uses(world: World, text: str) -> tuple[int, int]:
    """How many hold a unit's weights before a block's forward, and after it."""
    layout = Layout.parse(text)
    model = build_model(SHAPES["gqa"])
    local = build_local(
        world, layout, model, program_of(model, layout), precision=WIDE
    )
    piece, unit = local.pieces[1], local.units[1]
    unit.gather().wait()
    assert unit.buffer is not None
    count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    before = count(storage_of(unit.buffer))
    x = torch.randn(2, 8, SHAPES["gqa"].hidden, dtype=torch.float64)
    piece.forward(
        0, {"x": x}, {"positions": torch.arange(8).expand(2, -1)}, keep=True
    )
    return before, count(storage_of(unit.buffer))


def test_a_compiled_forward_holds_no_weights_that_will_be_dropped() -> None:
    for before, after in launch(
        uses, 2, "dp2 zero3 compile fp64", backend="threads"
    ):
        assert before == after


def kept(world: World, text: str) -> int:
    """Bytes that a block's forward leaves for its backward."""
    layout = Layout.parse(text)
    model = build_model(SHAPES["gqa"])
    local = build_local(
        world, layout, model, program_of(model, layout), precision=WIDE
    )
    x = torch.randn(2, 8, SHAPES["gqa"].hidden, dtype=torch.float64)
    weights = {
        storage_of(p)
        for u in local.units.values()
        for p in u.parameters.values()
    }
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        traced = type(tensor) not in (Tensor, torch.nn.Parameter)
        if storage_of(tensor) not in weights and not traced:
            saved[storage_of(tensor)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        local.pieces[1].forward(
            0,
            {"x": x},
            {"positions": torch.arange(8).expand(2, -1)},
            keep=True,
        )
    return sum(saved.values())


def test_a_compiled_block_keeps_less_than_an_eager_one_and_selectively_still_less() -> (
    None
):
    bytes_of = {
        text: launch(kept, 1, f"{text} fp64", backend="threads")[0]
        for text in ("", "compile", "recompute:selective compile")
    }
    assert bytes_of["compile"] < bytes_of[""]
    assert 0 < bytes_of["recompute:selective compile"] < bytes_of["compile"]


def test_without_a_compiler_the_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_COMPILE_BACKEND", "inductor")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        LayoutError, match=r"needs a C\+\+ compiler.*\n?.*leave compile out"
    ):
        refuse_uncompiled(torch.device("cpu"))
