"""The catalogue against what makers print, and every number with its source."""

from __future__ import annotations

import pytest

from phalanx.planner import (
    MachineError,
    cluster,
    clusters,
    device,
    device_named,
    devices,
    hierarchy,
    link,
    links,
)
from phalanx.planner.table import device_of_row

# (device, dtype): TFLOP/s as datasheets print them, dense.
PRINTED = {
    ("h100-sxm", "bf16"): 989.4, ("h100-sxm", "fp32"): 66.9, ("h100-sxm", "fp8"): 1978.9,
    ("h100-sxm", "tf32"): 494.7, ("h100-pcie", "bf16"): 756.5, ("h100-pcie", "fp32"): 51.2,
    ("h200", "bf16"): 989.4, ("a100-40", "bf16"): 312, ("a100-80", "tf32"): 156,
    ("a100-80", "fp32"): 19.5, ("l40s", "fp32"): 91.6, ("rtx-4090", "fp32"): 82.6,
    ("rtx-4090", "bf16"): 165.2, ("mi250x", "bf16"): 383, ("mi250x", "fp64"): 95.7,
    ("mi300x", "bf16"): 1307.4, ("mi325x", "bf16"): 1300, ("mi300x", "fp8"): 2614.9,
    ("tpu-v5p", "bf16"): 459, ("tpu-v5e", "bf16"): 197, ("tpu-v6e", "bf16"): 918,
    ("trainium2", "bf16"): 667, ("gaudi-3", "bf16"): 1835, ("b200", "bf16"): 2250,
    ("gb200", "fp4"): 10000, ("h100-nvl", "bf16"): 835, ("a800", "bf16"): 312,
    ("h800", "fp8"): 1978.9, ("v100-16", "fp16"): 125, ("v100-32", "fp32"): 15.7,
    ("rtx-3090", "fp32"): 35.6, ("rtx-3090", "bf16"): 71,
    ("b300", "bf16"): 2250, ("b300", "fp8"): 4500, ("b300", "fp4"): 13500, ("gb300", "bf16"): 2500,
    ("gb300", "fp4"): 15000, ("mi350x", "bf16"): 2306.9, ("mi350x", "fp8"): 4613.7,
    ("mi355x", "bf16"): 2516.6, ("mi355x", "fp4"): 10066.3, ("mi355x", "fp64"): 78.6,
    ("gh200", "bf16"): 990, ("gh200", "fp8"): 1979, ("gh200", "fp32"): 67, ("h20", "bf16"): 148,
    ("h20", "fp8"): 296, ("l4", "bf16"): 121, ("l4", "fp32"): 30.3, ("l4", "fp8"): 242.5,
    ("a10g", "bf16"): 70, ("a10g", "fp32"): 35, ("t4", "fp16"): 65, ("t4", "fp32"): 8.1,
    ("rtx-5090", "fp32"): 104.8, ("rtx-5090", "bf16"): 209.5, ("rtx-5090", "fp4"): 1676,
}  # fmt: skip
# GB and GB/s as sold; HBM's GB are GiB.
MEMORY = {
    "h100-sxm": (80, 3352), "h100-pcie": (80, 2039), "h100-nvl": (94, 3938), "h200": (141, 4800),
    "h100-96": (96, 2447), "a100-40": (40, 1555), "a100-80": (80, 2039), "l40s": (48, 864),
    "rtx-4090": (24, 1008),
    "mi250x": (128, 3277), "mi300x": (192, 5325), "mi325x": (256, 6000), "tpu-v5e": (16, 819),
    "tpu-v5p": (96, 2765), "tpu-v6e": (32, 1640), "trainium2": (96, 2900), "gaudi-3": (128, 3700),
    "b200": (180, 7700), "gb200": (186, 8000), "a800": (80, 2039), "h800": (80, 3352),
    "b300": (268, 8000), "gb300": (277, 8000), "mi350x": (288, 8000), "mi355x": (288, 8000),
    "gh200": (96, 4000), "h20": (96, 4000), "l4": (24, 300), "a10g": (24, 600), "t4": (16, 320),
    "rtx-5090": (32, 1792),
    "v100-16": (16, 900), "v100-32": (32, 900), "rtx-3090": (24, 936),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", PRINTED)
def test_peaks_follow_from_units_and_clocks_as_datasheets_print_them(
    name: str, dtype: str
) -> None:
    assert device(name).peak(dtype) / 1e12 == pytest.approx(
        PRINTED[name, dtype], rel=6e-3
    )


def test_memory_is_as_sold() -> None:
    assert set(MEMORY) == set(devices())
    for name, (gib, speed) in MEMORY.items():
        memory = device(name).memory
        assert memory.bytes == gib * 2**30
        assert memory.bandwidth / 1e9 == pytest.approx(speed, rel=1e-3)


def test_every_number_has_a_source_and_every_source_a_number() -> None:
    for name, each in devices().items():
        stated = each.stated()
        assert len(stated) >= 3
        assert not [
            place for place in stated if len(each.source(place)) < 10
        ], name
        for key in each.sources:
            assert any(
                place == key or place.startswith(f"{key}.") for place in stated
            ), (name, key)
    assert all(
        len(x.source) > 5 for x in (*links().values(), *clusters().values())
    )


def test_h100_from_the_inside() -> None:
    chip = device("h100").chip
    assert chip is not None
    assert (chip.units_made, chip.units, chip.l2_mib, chip.l1_kib, chip.registers_kib) == (
        144, 132, 50, 256, 256,
    )  # fmt: skip
    assert chip.cores * 2 == chip.vector["fp32"] == 256
    assert chip.matrix_cores * 1024 == chip.matrix["bf16"] == 4096


def test_llama_3_s_cluster_adds_up() -> None:
    llama = cluster("llama3")
    assert [level.size for level in llama.levels] == [8, 2, 192, 8]
    totals = llama.totals()
    assert totals["devices"] == 24_576
    assert totals["cores"] / 1e6 == pytest.approx(415, abs=0.5)
    assert totals["matrix_cores"] / 1e6 == pytest.approx(13, abs=0.05)
    assert totals["memory"] / 2**50 == 1.875
    assert totals["flops"] / 1e18 == pytest.approx(24.3, abs=0.05)
    assert [round(level.bandwidth / 1e9) for level in llama.levels] == [
        450,
        50,
        50,
        7,
    ]


def test_links_are_as_sold() -> None:
    both = {
        "nvlink1": 160,
        "nvlink2": 300,
        "nvlink3": 600,
        "nvlink4": 900,
        "nvlink5": 1800,
    }
    for name, speed in both.items():
        assert link(name).both / 1e9 == speed
    one = {
        "pcie3": 15.75,
        "pcie4": 31.5,
        "pcie5": 63,
        "pcie6": 121,
        "pcie7": 242,
    }
    one |= {"infiniband-ndr": 50, "ethernet-classic": 0.2, "ici-v5p": 300}
    for name, speed in one.items():
        assert link(name).bandwidth / 1e9 == pytest.approx(speed, rel=1e-3)
    assert link("nvswitch-sharp").all_reduce_factor == 0.5
    assert link("nvlink4").bandwidth / link("infiniband-xdr").bandwidth == 4.5


def test_what_a_device_names_is_in_the_catalogue() -> None:
    for each in devices().values():
        assert all(name in links() for name in each.links)
    for each in clusters().values():
        assert each.kind.name == each.device
        assert all(level.link in links() for level in each.levels)


def test_a_cluster_is_the_first_devices_of_its_family() -> None:
    sizes = {
        "h100x64": [8, 8],
        "h100x8": [8],
        "h100x4": [4],
        "h100x1": [1],
        "gb200x144": [72, 2],
    }
    for name, levels in sizes.items():
        assert [level.size for level in cluster(name).levels] == levels
        assert cluster(name).name == name
    assert [x.size for x in cluster("a100-80x3072").levels] == [8, 384]
    assert [x.size for x in cluster("llama3x3072").levels] == [8, 2, 192]


def test_devices_without_a_cluster_are_joined_by_their_own_fastest_link() -> (
    None
):
    pair = cluster("rtx-4090x2")
    assert (pair.size, pair.kind.name, pair.name) == (
        2,
        "rtx-4090",
        "rtx-4090x2",
    )
    # PCIe 4 x16.
    assert pair.levels[0].bandwidth == pytest.approx(31.5e9, rel=1e-3)
    servers = cluster("rtx-4090x16")
    assert [level.size for level in servers.levels] == [8, 2]
    # Ethernet of 100 Gb/s for eight.
    assert servers.levels[1].bandwidth == pytest.approx(12.5e9 / 8)


def test_the_hierarchy_gets_slower_and_larger_outward() -> None:
    for name in ("h100", "a100-80"):
        places = hierarchy(device(name))
        assert len(places) == 6
        speeds = [place.bandwidth for place in places]
        assert speeds == sorted(speeds, reverse=True)
    h100 = {
        place.name.split(",")[0]: place for place in hierarchy(device("h100"))
    }
    assert h100["registers"].bytes == h100["L1 / shared"].bytes == 33 * 2**20
    assert h100["HBM3"].bandwidth == pytest.approx(3352e9, rel=1e-3)
    assert h100["server"].bandwidth == 900e9
    assert h100["network"].bandwidth == 100e9


def test_only_a_driver_s_own_name_finds_a_device() -> None:
    found = device_named("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found.name == "h100-sxm"
    for name in ("NVIDIA H100 80GB HBM4", "NVIDIA H100", "AMD EPYC", ""):
        assert device_named(name) is None
    names = [driver for each in devices().values() for driver in each.drivers]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name, said",
    [
        ("h10x64", "Did you mean 'h100'"),
        ("h100", "write h100x64"),
        ("h100x12", "use a multiple of 8"),
        ("llama3x49152", "24576 devices, not 49152"),
        ("", "unknown cluster ''"),
    ],
)
def test_a_cluster_that_is_none_is_refused_with_the_way_out(
    name: str, said: str
) -> None:
    with pytest.raises(MachineError, match=said):
        cluster(name)


def test_a_device_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(MachineError, match="Did you mean 'mi300x'"):
        device("mi300")
    with pytest.raises(MachineError, match="a100-40, a100-80"):
        device("abacus")


@pytest.mark.parametrize(
    "name, told",
    [
        ("gb300", "reached_tflops"),
        ("b300", "chip"),
        ("gb300", "chip"),
        ("h20", "chip"),
    ],
)
def test_a_number_that_no_maker_states_is_marked_as_assumed(
    name: str, told: str
) -> None:
    assert "assumed" in device(name).source(told)


def test_new_devices_are_known_by_the_hardware_of_a_table() -> None:
    names = {
        "GB300-NVL72": "gb300", "B300 SXM": "b300", "GB200-NVL72": "gb200", "H200 SXM": "h200",
        "NVIDIA H20": "h20", "8x L4": "l4", "L40S": "l40s", "A10G": "a10g", "Tesla T4": "t4",
        "AMD MI355X": "mi355x", "MI350X": "mi350x", "RTX 5090": "rtx-5090",
    }  # fmt: skip
    assert {text: device_of_row(text).name for text in names} == names
