"""Topologies in the format that `nvidia-smi topo -m` documents, several machines, and garbage.

The texts in `recordings/` are written after that format, with the layouts of known machines.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.planner import Topology, TopologyError, parse_topology

FOLDER = Path(__file__).parent / "recordings"


def recorded(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def gpus(*numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU{n}" for n in numbers)


def test_eight_h100_are_one_group_of_nvlink_with_a_nic_each() -> None:
    found = parse_topology(recorded("8xh100"))
    assert found.devices == gpus(*range(8))
    assert found.kinds == ("NV18",)
    assert found.groups("NV18") == (gpus(*range(8)),)
    assert found.between("GPU0", "GPU7") == "NV18"
    assert found.between("GPU0", "NIC1") == "NODE"
    assert [found.nearest_nics(device) for device in found.devices] == [
        (f"mlx5_{i}",) for i in range(8)
    ]
    assert found.cpus[0] == (*range(48), *range(96, 144))
    assert found.cpus[7] == (*range(48, 96), *range(144, 192))
    assert found.numa == (0,) * 4 + (1,) * 4


def test_eight_a100_share_two_nics_by_pairs_over_four_numa_nodes() -> None:
    found = parse_topology(recorded("8xa100"))
    assert found.kinds == ("NV12",)
    assert found.groups("NV12") == (gpus(*range(8)),)
    assert (
        found.nearest_nics("GPU4")
        == found.nearest_nics("GPU5")
        == ("mlx5_4", "mlx5_5")
    )
    assert found.numa == (3, 3, 1, 1, 7, 7, 5, 5)
    assert found.cpus[2] == (*range(16, 32), *range(144, 160))


def test_a_pcie_box_falls_into_pairs_and_then_into_sockets() -> None:
    found = parse_topology(recorded("4xpcie"))
    assert found.kinds == ("PIX", "PHB", "SYS")
    assert found.groups("PIX") == (gpus(0, 1), gpus(2), gpus(3))
    assert found.groups("PHB") == (gpus(0, 1), gpus(2, 3))
    assert found.groups("SYS") == (gpus(0, 1, 2, 3),)
    assert found.nearest_nics("GPU2") == ("bnxt_re0",)
    told = "\n".join(found.lines())
    assert (
        "PHB (a PCIe host bridge, that is the CPU): GPU0 GPU1; GPU2 GPU3"
        in told
    )
    assert "GPU3: NIC bnxt_re0, CPUs 32-63, NUMA node 1" in told


def test_one_gpu_has_no_links_but_a_place() -> None:
    found = parse_topology(recorded("one"))
    assert found.devices == gpus(0)
    assert found.kinds == ()
    assert found.lines() == ["GPU0: CPUs 0-15, NUMA node 0"]


def test_no_gpu_is_an_empty_topology() -> None:
    assert parse_topology(recorded("none")) == Topology((), ())
    assert parse_topology(recorded("none")).lines() == ["no GPUs"]


@pytest.mark.parametrize("name", ["8xh100", "8xa100", "4xpcie", "one"])
def test_blanks_in_place_of_tabs_mean_the_same(name: str) -> None:
    text = recorded(name)
    assert parse_topology(
        text.expandtabs(8).replace(" X ", "  X  ")
    ) == parse_topology(text)


GARBAGE = {
    "": "no row of columns begins with GPU0. It begins ''",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.": "has failed",
    "\tGPU0\tGPU1\nGPU0\t X \tNV4\n": "ends before the row of GPU1",
    "\tGPU0\tGPU1\nGPU0\t X \tNV4\n\nGPU1\tNV4\t X \n": "line 3: nothing instead of the row of GPU1",
    "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU2\tNV4\t X \n": "line 3: 'GPU2' instead of the row of GPU1",
    "\tGPU0\tGPU1\nGPU0\t X \nGPU1\tNV4\t X \n": "line 2: GPU0 has 1 links instead of 2",
    "\tGPU0\tGPU1\nGPU0\t X \tNVL\nGPU1\tNVL\t X \n": "line 2: 'NVL' between GPU0 and GPU1",
    "\tGPU0\tGPU1\nGPU0\tSYS\tPIX\nGPU1\tPIX\t X \n": "line 2: 'SYS' between GPU0 and GPU0",
    "\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tSYS\t X \n": "GPU0 has PIX to GPU1, but GPU1 has SYS",
}


@pytest.mark.parametrize("text", GARBAGE, ids=list(GARBAGE.values()))
def test_garbage_is_refused_with_the_line(text: str) -> None:
    with pytest.raises(TopologyError) as told:
        parse_topology(text)
    assert GARBAGE[text] in str(told.value)
