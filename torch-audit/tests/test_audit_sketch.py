"""Sketches of shards add up to that of the whole, and places are where torch puts shards."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_audit.shards import flat_place, local_of, place_of, whole_place
from torch_audit.sketch import PRIME, coverage, norm_of, sketch


def whole_sketch(tensor: Tensor) -> Tensor:
    return sketch(tensor, whole_place(tuple(tensor.shape)).indices)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize(
    "shape", [(), (7,), (1, 9), (6, 10), (4, 6, 5), (2, 3, 4, 5)]
)
def test_shards_along_any_axis_add_up(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=generator(), dtype=torch.float64)
    expected = whole_sketch(whole)
    for axis, size in enumerate(shape):
        order = torch.randperm(size, generator=generator())
        total = torch.zeros(17, dtype=torch.float64)
        covered = 0
        for part in order.tensor_split(3):
            indices = list(whole_place(shape).indices)
            indices[axis] = part
            total += sketch(whole.index_select(axis, part), indices)
            covered += coverage(indices)
        assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)
        assert covered % PRIME == whole_place(shape).cover


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 2, 4), (2, 3, 2, 2)])
def test_ranges_of_a_flat_tensor_add_up(shape: tuple[int, ...]) -> None:
    """Flat buffers are cut anywhere: a range is a few boxes of the tensor."""
    whole = torch.randn(shape, generator=generator(), dtype=torch.float64)
    expected = whole_sketch(whole)
    indices = whole_place(shape).indices
    flat = whole.reshape(-1)
    for first in range(flat.numel() + 1):
        for second in range(first, flat.numel() + 1):
            total, covered = torch.zeros(17, dtype=torch.float64), 0
            bounds = (0, first, second, flat.numel())
            for start, stop in pairwise(bounds):
                place = flat_place(shape, indices, shape, start, stop)
                total += place.sketch(flat[start:stop])
                covered += place.cover
                assert place.count == stop - start
            assert covered % PRIME == whole_place(shape).cover
            assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)


def test_padding_of_a_flat_part_is_left_out() -> None:
    """Rows 4 and 5 of 6, and 3 of 4 columns, are held with padding behind them."""
    whole = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    indices = (torch.arange(4, 6), torch.arange(3))
    padded = torch.full((3, 4), 1e6, dtype=torch.float64)
    padded[:2, :3] = whole[4:]
    expected = sketch(whole[4:], indices)
    total, count = torch.zeros(17, dtype=torch.float64), 0
    for start, stop in ((0, 5), (5, 12)):
        place = flat_place((6, 3), indices, (3, 4), start, stop)
        total += place.sketch(padded.reshape(-1)[start:stop])
        count += place.count
    assert count == 6
    assert torch.allclose(total, expected)


def test_shards_that_overlap_or_leave_a_gap_do_not_cover() -> None:
    every = torch.arange(8)
    whole = whole_place((8, 8)).cover
    for parts in (
        [every[:4], every[3:]],
        [every[:4], every[5:]],
        [every[:4]] * 2,
    ):
        total = sum(coverage([part, every]) for part in parts)
        assert total % PRIME != whole


def test_one_wrong_element_changes_all_numbers_by_its_size() -> None:
    whole = torch.zeros(64, 64)
    whole[17, 23] = 3.0
    numbers = whole_sketch(whole)
    assert numbers[0] == 9.0
    assert set(numbers[1:].abs().tolist()) == {3.0}


@pytest.mark.parametrize(
    "form", ["dense", "row", "rank one", "vector", "experts"]
)
def test_a_norm_is_estimated_to_a_factor_of_five(form: str) -> None:
    random = generator()
    for _ in range(100):
        tensor = {
            "dense": lambda: torch.randn(32, 32, generator=random),
            "row": lambda: (
                torch.randn(1, 32, generator=random) * torch.eye(32)[:, 3:4]
            ),
            "rank one": lambda: (
                torch.randn(32, 1, generator=random)
                @ torch.randn(1, 32, generator=random)
            ),
            "vector": lambda: torch.randn(64, generator=random),
            "experts": lambda: torch.randn(4, 8, 16, generator=random),
        }[form]()
        numbers = whole_sketch(tensor).tolist()
        norm = tensor.double().norm().item()
        assert numbers[0] ** 0.5 == pytest.approx(norm, rel=1e-6)
        assert norm / 10 < norm_of(numbers[1:]) < 5 * norm


def test_transposed_and_exchanged_rows_differ() -> None:
    whole = torch.randn(8, 8, generator=generator(), dtype=torch.float64)
    for other in (whole.mT, whole.flip(0), whole.roll(4, 1)):
        apart = (whole_sketch(other) - whole_sketch(whole))[1:]
        assert norm_of(apart.tolist()) > 0.1 * (other - whole).norm().item()


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of four ranks of a world that sends nothing."""
    rank: int = request.param
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    yield rank
    dist.destroy_process_group()


def numbered(*shape: int) -> Tensor:
    """A tensor in which each element has a value of its own."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(
        shape
    )


def assert_placed(tensor: Tensor, whole: Tensor) -> None:
    """The indices of a place select the local tensor from the whole one."""
    place = place_of(tensor)
    selected = whole
    for axis, indices in enumerate(place.indices):
        selected = selected.index_select(axis, indices)
    local = local_of(tensor.detach())
    assert torch.equal(selected, local)
    assert place.shape == tuple(whole.shape)
    assert place.count == local.numel()


@pytest.mark.parametrize("shape", [(8, 4), (6, 5), (3, 4), (1, 9)])
def test_places_are_those_of_distributed_tensors(
    rank: int, shape: tuple[int, int]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = numbered(*shape)
    choices = [Replicate(), Shard(0), Shard(1)]
    for first in choices:
        for second in choices:
            tensor = distribute_tensor(
                whole, mesh, [first, second], src_data_rank=None
            )
            assert_placed(tensor, whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_places_of_strided_shards_are_those_of_torch(
    rank: int, axis: int
) -> None:
    """FSDP2 shards a tensor-parallel weight so, and packed weights are split so."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole = numbered(8, 8)
    for factor in (2, 4):
        strided = _StridedShard(axis, split_factor=factor)
        for placements in ([strided, Shard(axis)], [strided, Shard(1 - axis)]):
            tensor = distribute_tensor(
                whole, mesh, placements, src_data_rank=None
            )
            assert_placed(tensor, whole)
            assert local_of(tensor).numel() == 16
