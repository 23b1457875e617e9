"""A bit that changes in one rank's copy of a weight is noticed, and the rank is named."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_worlds import losses, records, small, trained, weights
from torch import Tensor

from phalanx.cli import train as train_verb
from phalanx.comm import RankFailed, World
from phalanx.comm.agree import exchange
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape
from phalanx.parallel import build_model, microbatches
from phalanx.parallel.block_parts import cut_blocks
from phalanx.parallel.local import build_local
from phalanx.program import StepOptions
from phalanx.training import loop
from phalanx.training.checkpoint import kept_of
from phalanx.training.copies import COLUMNS, Copies, checksum
from phalanx.training.executor import Executor
from phalanx.training.muon import Muon
from phalanx.training.optimizer import AdamW, Optimizer, Sgd
from phalanx.training.precision import LossScale, precision_of
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

SMALL = replace(SHAPES["gqa"], layers=2, batch=8, sequence=8, vocab=32)
TIED = replace(SMALL, tied=True, name="tied")
BIASES = replace(SHAPES["gpt"], layers=2, batch=8, sequence=8, vocab=32)
EXPERTS = replace(SHAPES["experts"], batch=8, sequence=8, vocab=32)
LORA = replace(SMALL, lora_r=2, name="lora")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ---- checksums


def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        count, generator=torch.Generator().manual_seed(count)
    ).to(dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.itemsize])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    x = _numbers(7, dtype)
    seen = {int(checksum(x))}
    for place, bit in itertools.product(range(7), range(8 * x.itemsize)):
        mask = torch.tensor(1, dtype=BITS[x.itemsize]) << bit
        _bits(x)[place] ^= mask
        seen.add(int(checksum(x)))
        _bits(x)[place] ^= mask
    assert len(seen) == 1 + 7 * 8 * x.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "count", [1, 5, COLUMNS - 1, COLUMNS, COLUMNS + 1, 5 * COLUMNS + 3]
)
def test_the_checksum_of_equal_bits_is_equal_wherever_they_lie(
    dtype: torch.dtype, count: int
) -> None:
    x = _numbers(count, dtype)
    apart = torch.zeros(count + 3, dtype=dtype)
    apart[3:] = x
    assert int(checksum(x)) == int(checksum(apart[3:]))
    _bits(x)[-1] ^= 1
    assert int(checksum(x)) != int(checksum(apart[3:]))


def test_a_large_tensor_is_taken_in_pieces_and_has_the_same_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = _numbers(70 * COLUMNS + 9, torch.float32)
    whole = int(checksum(x))
    monkeypatch.setattr("phalanx.training.copies.CHUNK", {"cpu": 3 * COLUMNS})
    assert int(checksum(x)) == whole
    last = x.clone()
    last[-10] += 1
    assert int(checksum(last)) != whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_that_a_plain_sum_would_not_see_change_the_checksum(
    dtype: torch.dtype,
) -> None:
    count = 3 * COLUMNS
    x = _numbers(count, dtype)
    x[:8] = torch.tensor(
        [0.0, -0.0, 1.0, 2.0, -1.0, float("nan"), float("inf"), 0.5],
        dtype=dtype,
    )
    x[COLUMNS : COLUMNS + 8] = x[:8]
    known = int(checksum(x))

    def changed(change: Any) -> int:
        y = x.clone()
        change(_bits(y))
        assert not torch.equal(_bits(y), _bits(x))
        return int(checksum(y))

    def swap(a: int, b: int) -> Any:
        def swapped(bits: Tensor) -> None:
            bits[[a, b]] = bits[[b, a]]

        return swapped

    def flipped(bit: int, *places: int) -> Any:
        def flip(bits: Tensor) -> None:
            bits[list(places)] ^= torch.tensor(1, dtype=bits.dtype) << bit

        return flip

    sign, low = 8 * x.itemsize - 1, 0
    changes = [swap(a, b) for a, b in itertools.combinations(range(8), 2)]
    changes += [
        swap(0, COLUMNS + 1),
        swap(2, COLUMNS + 3),
        swap(3, 2 * COLUMNS + 2),
    ]
    for bit in (sign, sign - 1, low):
        pairs = (
            (0, 1),
            (2, 3),
            (2, COLUMNS + 2),
            (0, COLUMNS),
            (9, 2 * COLUMNS + 11),
        )
        changes += [flipped(bit, *pair) for pair in pairs]
        # The corners of a rectangle of the table that the tensor is taken as.
        changes.append(flipped(bit, 2, 3, COLUMNS + 2, COLUMNS + 3))
    changes.append(lambda bits: bits.copy_(bits.roll(1)))
    changes.append(lambda bits: bits.copy_(bits.roll(COLUMNS)))
    changes.append(lambda bits: bits.copy_(bits.flip(0)))
    changes.append(flipped(2, 5))  # another NaN
    sums = [changed(change) for change in changes]
    assert known not in sums


# ---- copies of every kind


def held(
    world: World,
    layout: Layout,
    shape: Shape,
    optimizer: Optimizer,
    steps: int,
) -> Any:
    """A rank's copies after some steps, its model and its updates."""
    model = cut_blocks(build_model(shape), layout)
    program = program_of(
        model, layout, StepOptions(whole_matrices=optimizer.whole_matrices)
    )
    precision = precision_of(layout.precision or "fp32")
    local = build_local(world, layout, model, program, precision=precision)
    scaling = LossScale(1024.0) if layout.precision == "fp16" else None
    executor = Executor(
        local, program, world.rank, optimizer, clip=0.5, scaling=scaling
    )
    for step in range(steps):
        batch = batch_of(shape, step, dtype=precision.compute)
        own = microbatches(
            batch, layout, local.coordinates["data"], local.coordinates["cp"]
        )
        executor.step(own, 1e-2)
    names = [name for name, _ in model.pieces]
    return Copies(local, executor.updates, names), local, executor.updates


def every_number(
    local: Any, updates: Any
) -> Iterator[tuple[str, str, Tensor]]:
    """All that a rank keeps: what it is called in a message, what its copies have in common, and it."""
    for unit in local.every_unit:
        for entry in unit.entries():
            name, place = (
                entry.weight.name,
                f"{entry.weight.box} {entry.start} {entry.stop}",
            )
            for kind, numbers in kept_of(unit, entry, updates):
                known = name if kind == "weight" else f"{name}[{kind}]"
                yield known, f"{kind} {name} {place}", numbers
            if (
                unit.buffer is not None
                and not unit.same
                and unit.groups.gather.size == 1
            ):
                numbers = unit.buffer[
                    entry.offset : entry.offset + entry.stop - entry.start
                ]
                yield (
                    f"{name}[compute copy]",
                    f"compute copy {name} {place}",
                    numbers,
                )


def ranks_in(text: str) -> list[int]:
    """The ranks of `rank 3` or `ranks 0-2, 5`."""
    ends = [part.split("-") for part in text.split(" ", 1)[1].split(", ")]
    return [
        rank
        for each in ends
        for rank in range(int(each[0]), int(each[-1]) + 1)
    ]


def flips(
    world: World,
    layout: Layout,
    shape: Shape,
    optimizer: Optimizer,
    every: int,
) -> tuple[int, int]:
    """Flips one bit of each number that several ranks keep, on one of them; asserts what is found.
    How many tensors have copies, and how many have none."""
    copies, local, updates = held(world, layout, shape, optimizer, 2)
    assert copies.differences() == ""
    own = {key: (name, x) for name, key, x in every_number(local, updates)}
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, keys in enumerate(
        exchange(local.groups.everyone, json.dumps([*own]))
    ):
        for key in json.loads(keys):
            holders[key].append(rank)
    several = [key for key, ranks in holders.items() if len(ranks) > 1]
    for i, key in enumerate(several[::every]):
        ranks = holders[key]
        flipped = ranks[i % len(ranks)]
        name, numbers = own.get(key, ("", torch.empty(0)))
        if world.rank == flipped:
            place, bit = 31 * i % len(numbers), 17 * i % (8 * numbers.itemsize)
            mask = torch.tensor(1, dtype=BITS[numbers.itemsize]) << bit
            numbers.view(BITS[numbers.itemsize])[place] ^= mask
        found = copies.differences()
        if world.rank == flipped:
            numbers.view(BITS[numbers.itemsize])[place] ^= mask
        assert found, f"{key} on rank {flipped} of {ranks}"
        if name:
            assert found.startswith(f"{name}: "), found
            assert found.count(":") == 1, found  # and nothing else
        others = [rank for rank in ranks if rank != flipped]
        if len(others) > 1:
            wrong, _, right = found.rpartition(": ")[2].partition(
                " has another copy than "
            )
            assert (ranks_in(wrong), ranks_in(right)) == ([flipped], others), (
                found
            )
        else:
            both = found.rpartition(": ")[2].removesuffix(
                " have copies that differ"
            )
            assert ranks_in(both) == sorted(ranks), found
        assert len({*exchange(local.groups.everyone, found)}) == 1
    assert copies.differences() == ""
    world.clear()
    return len(several), len(holders) - len(several)


ADAMW = AdamW()
CLASSES = [
    # Copies of data parallelism: weights, masters and 16-bit copies, moments.
    ("dp2", SMALL, ADAMW, "all"),
    ("dp3", replace(SMALL, batch=9), ADAMW, "all"),
    ("dp2 bf16", SMALL, ADAMW, "all"),
    ("dp2 fp16", SMALL, ADAMW, "all"),
    ("dp2", SMALL, Sgd(momentum=0.9), "all"),
    ("dp2", SMALL, Muon(), "all"),
    ("dp2 recompute:all", EXPERTS, ADAMW, "all"),
    # Replicas of shards; shards alone have none.
    ("dp2 zero1", SMALL, ADAMW, "none"),
    ("dp2 zero2 bf16", SMALL, ADAMW, "none"),
    ("dp2 zero3", SMALL, ADAMW, "none"),
    ("dp2x2 zero1", SMALL, ADAMW, "all"),
    ("dp2x2 zero3", SMALL, ADAMW, "all"),
    ("dp2x2 zero3 bf16", SMALL, ADAMW, "all"),
    # Weights that tensor parallelism does not cut; key and value heads that two ranks have.
    ("tp2", SMALL, ADAMW, "some"),
    ("tp2 seq", SMALL, ADAMW, "some"),
    ("tp2", BIASES, ADAMW, "some"),
    ("tp4", SMALL, ADAMW, "some"),
    ("tp2 dp2", SMALL, ADAMW, "all"),
    ("tp2 dp2 zero3", SMALL, ADAMW, "some"),
    # A tied weight on two stages.
    ("pp2 1f1b:2", TIED, ADAMW, "some"),
    ("dp2 pp2 zero3 1f1b:2", TIED, ADAMW, "some"),
    ("pp2 tp2 1f1b:2 bf16", TIED, ADAMW, "some"),
    # Dense weights beside experts, and experts over the rest of data parallelism.
    ("dp2 ep2", EXPERTS, ADAMW, "all"),
    ("ep2", EXPERTS, ADAMW, "some"),
    ("dp1 ep2 tp2", EXPERTS, ADAMW, "some"),
    ("cp2", SMALL, ADAMW, "all"),
    ("cp2 dp2 zero2", SMALL, ADAMW, "none"),
    # Frozen weights, which ZeRO-1 leaves whole.
    ("dp2", LORA, ADAMW, "all"),
    ("dp2 zero1", LORA, ADAMW, "some"),
    ("tp2", LORA, ADAMW, "some"),
    # Weights and state on the host.
    ("dp2 offload:optimizer", SMALL, ADAMW, "all"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "shape", "optimizer", "copied"),
    CLASSES,
    ids=[
        f"{layout} {shape.name} {optimizer.name}"
        for layout, shape, optimizer, _ in CLASSES
    ],
)
def test_a_bit_that_differs_is_found_in_whatever_ranks_have_copies_of(
    layout: str, shape: Shape, optimizer: Optimizer, copied: str
) -> None:
    parsed = Layout.parse(layout)
    counts = launch(
        flips, parsed.ranks, parsed, shape, optimizer, 3, backend="threads"
    )
    assert len(set(counts)) == 1
    several, alone = counts[0]
    assert copied == ("all" if not alone else "some" if several else "none")


def compared(
    world: World, shape: Shape, names: list[str]
) -> tuple[str, str, str]:
    """What is found after a buffer was changed on all ranks, then on one, and after it was put back."""
    copies, local, _ = held(world, Layout.parse("dp2 pp1"), shape, ADAMW, 1)
    buffers = dict(local.pieces[1].module.named_buffers())
    buffer = buffers["piece"]
    buffer += 1
    everywhere = copies.differences()
    if world.rank == 1:
        buffer -= 1
    on_one = copies.differences()
    if world.rank == 0:
        buffer -= 1
    return everywhere, on_one, copies.differences()


def test_a_buffer_may_change_on_all_ranks_and_not_on_one_alone() -> None:
    first, second = launch(compared, 2, SMALL, [], backend="threads")
    assert (
        first
        == second
        == (
            "",
            "layers.0.piece[buffer]: ranks 0-1 have copies that differ",
            "",
        )
    )


# ---- runs


def flipping(
    monkeypatch: pytest.MonkeyPatch, rank: int, *steps: int, times: int = 1
) -> None:
    """One bit of one rank's weights changes as each of these steps begins, so often in all."""
    original, left = loop.Rank.batch, [times]

    def batch(self: loop.Rank, step: int) -> Any:
        if self.world.rank == rank and step in steps and left[0]:
            left[0] -= 1
            home = self.part.local.units[1].home
            home.view(torch.int32)[5] ^= 1 << 12
        return original(self, step)

    monkeypatch.setattr(loop.Rank, "batch", batch)


def test_a_run_whose_copies_differ_ends_before_the_next_save_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, 2, 3)
    run = small(
        tmp_path / "run",
        "checkpoint.every=2",
        "train.check_copies=100",
        "steps=8",
    )
    with pytest.raises(RankFailed) as failed:
        trained(run, "dp3")
    text = failed.value.refusal
    assert text.startswith(
        "CopiesDiffer: step 4: copies that were equal bit by bit differ."
    )
    assert "rank 2 has another copy than ranks 0-1" in text
    assert "The same command continues from" in text
    assert failed.value.restart_helps
    assert failed.value.exit_code == 1
    # Each other rank says the same, and the newest checkpoint is of before the change.
    assert len({report.error for report in failed.value.reports}) == 1
    assert [
        p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")
    ] == ["step-00000002"]
    (event,) = records(tmp_path / "run", "copies")
    assert event["step"] == 4
    # The same command goes on to the end that a run without the change has.
    trained(run, "dp3")
    trained(small(tmp_path / "whole", "steps=8"), "dp3")
    assert weights(tmp_path / "run", 8) == weights(tmp_path / "whole", 8)


def test_copies_are_compared_between_saves_too_and_not_where_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, 1, 1, times=9)
    with pytest.raises(
        RankFailed,
        match=r"step 3: copies .* ranks 0-1 have copies that differ",
    ):
        trained(
            small(tmp_path / "run", "train.check_copies=3", "steps=8"), "dp2"
        )
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    trained(small(tmp_path / "off", "train.check_copies=0", "steps=4"), "dp2")
    assert weights(tmp_path / "off", 4)


def test_a_save_in_the_background_that_was_begun_with_equal_copies_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, 1, 2)
    run = small(
        tmp_path / "run",
        "checkpoint.every=2",
        "checkpoint.async=true",
        "steps=6",
    )
    with pytest.raises(RankFailed, match="step 4: "):
        trained(run, "dp2 bf16")
    assert [
        p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")
    ] == ["step-00000002"]


@pytest.mark.parametrize(
    "layout",
    [
        "tp2 seq bf16",
        "dp2x2 zero3 fp16",
        pytest.param("dp2", marks=pytest.mark.slow),
        pytest.param("pp2 1f1b:3", marks=pytest.mark.slow),
    ],
)
def test_a_sound_run_that_compares_at_every_step_is_the_run_that_never_does(
    layout: str, tmp_path: Path
) -> None:
    more = "model.tied=true", "steps=6"
    trained(small(tmp_path / "every", *more, "train.check_copies=1"), layout)
    trained(small(tmp_path / "never", *more, "train.check_copies=0"), layout)
    assert losses(tmp_path / "every") == losses(tmp_path / "never")
    assert weights(tmp_path / "every", 6) == weights(tmp_path / "never", 6)
    spent = [r.get("spent", {}) for r in records(tmp_path / "every", "step")]
    assert any("comparing copies" in each for each in spent)


def test_local_ranks_are_started_again_after_their_copies_differed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    flipping(monkeypatch, 1, 3)
    words = ["checkpoint.every=2", "train.restarts=1", "steps=6", "layout=dp2"]
    sizes = "model={layers=3,hidden=16,heads=2,ffn=24,vocab=256}"
    argv = [sizes, "batch=6", "sequence=18", *words, f"out={tmp_path / 'run'}"]
    assert train_verb.run([*argv, "--backend", "threads"]) == 0
    told = capfd.readouterr().err
    assert "copies that were equal bit by bit differ" in told
    assert "The ranks are restarted from step-00000002" in told
    assert "Traceback" not in told
    assert [r["step"] for r in records(tmp_path / "run", "end")] == [6]
