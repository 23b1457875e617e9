"""The two verbs: what they print, what they write, what they refuse."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from phalanx.cli import bench, doctor
from phalanx.comm import CommMisuse
from phalanx.layout.numbers import NumberError
from phalanx.planner import Machine, MachineError

Capture = pytest.CaptureFixture[str]
RECORDED = (
    Path(__file__).parent.parent / "planner" / "recordings" / "4xpcie.txt"
)


def said(capsys: Capture, run: object, words: str) -> str:
    assert run(words.split()) == 0  # type: ignore[operator]
    return capsys.readouterr().out


def test_collectives_as_table_json_and_picture(
    capsys: Capture, tmp_path: Path
) -> None:
    picture = tmp_path / "c.svg"
    words = "collectives --ranks 2 --backend threads --sizes 1K:4K --limit 0.01 --repeats 1"
    out = said(
        capsys, bench.run, f"{words} --ops all_reduce,send --out {picture}"
    )
    assert out.count("right") == 4
    assert "fitted" in out
    ET.fromstring(picture.read_text())
    told = json.loads(
        said(capsys, bench.run, f"{words} --ops all_gather --json")
    )
    assert [s["op"] for s in told["samples"]] == ["all_gather"] * 2
    assert told["curves"][0]["op"] == "all_gather"


def test_products_steps_and_overlap(capsys: Capture, tmp_path: Path) -> None:
    words = "matmul --device cpu --sizes 16:32 --dtype fp32 --model tiny --tokens 8 --limit 5"
    picture = tmp_path / "m.svg"
    out = said(capsys, bench.run, f"{words} --out {picture}")
    assert out.count("square") == 2
    assert "unsynchronised" in out
    ET.fromstring(picture.read_text())
    assert (
        len(json.loads(said(capsys, bench.run, f"{words} --json"))["products"])
        == 8
    )
    words = "mfu --device cpu --layers 2 --width 16 --model tiny --seq 8 --limit 0.05"
    assert "forward x 3" in said(capsys, bench.run, words)
    assert (
        len(
            json.loads(said(capsys, bench.run, f"{words} --json"))[
                "iterations"
            ]
        )
        == 2
    )
    words = "overlap --device cpu --size 16 --copy 4K --backend threads --limit 0.05"
    assert "copying thread" in said(capsys, bench.run, words)
    assert (
        len(json.loads(said(capsys, bench.run, f"{words} --json"))["overlaps"])
        == 2
    )


def test_a_machine_file_is_written_and_read(
    capsys: Capture, tmp_path: Path
) -> None:
    place = tmp_path / "machine.toml"
    words = f"--device cpu --out {place} --limit 2 --ranks 4 --backend threads --model tiny"
    out = said(capsys, doctor.run, words)
    assert f"wrote {place}" in out
    machine = Machine.load(place)
    assert machine.name == "this"
    assert machine.host == ""
    assert machine.cores >= 1
    # Worlds of 2 and of 4, and in that of 4 also every other rank.
    assert {(c.ranks, c.apart) for c in machine.curves} == {
        (2, 1),
        (4, 1),
        (2, 2),
    }
    assert len(machine.curves) == 3 * 9
    assert {c.backend for c in machine.curves} == {"threads"}
    assert machine.memory_bandwidth > 0
    assert machine.best("fp32") is not None
    assert len(machine.hidden) == 3
    assert "all_reduce of 2 over threads" in out


def test_doctor_tells_this_machine_and_the_catalogue(
    capsys: Capture, tmp_path: Path
) -> None:
    assert "memory, copy" in said(capsys, doctor.run, "--device cpu")
    assert "PHB" in said(capsys, doctor.run, f"topology {RECORDED}")
    told = json.loads(said(capsys, doctor.run, f"topology {RECORDED} --json"))
    assert told["groups"]["PIX"][0] == ["GPU0", "GPU1"]
    assert "mi325x" in said(capsys, doctor.run, "devices")
    assert "132 x 4096 x 1.83 GHz = 989.4 TFLOP/s" in said(
        capsys, doctor.run, "devices h100"
    )
    assert "242 GB/s" in said(capsys, doctor.run, "links")
    llama = said(capsys, doctor.run, "clusters llama3")
    for number in (
        "24,576",
        "415M cores",
        "13M matrix cores",
        "1.875 PiB",
        "24.3 EFLOP/s",
    ):
        assert number in llama
    assert "h100: NVIDIA H100 SXM 80 GB, 8 x ..." in said(
        capsys, doctor.run, "clusters"
    )
    picture = tmp_path / "h.svg"
    out = said(capsys, doctor.run, f"hierarchy h100 --out {picture}")
    assert all(
        word in out
        for word in ("registers", "L1 / shared", "L2", "HBM3", "NVLink 4")
    )
    assert "3352 GB/s" in "".join(
        ET.fromstring(picture.read_text()).itertext()
    )


def test_everything_of_the_catalogue_is_also_json(capsys: Capture) -> None:
    for words in (
        "devices",
        "devices b200",
        "links",
        "clusters",
        "clusters h100x64",
        "hierarchy a100",
    ):
        assert json.loads(said(capsys, doctor.run, f"{words} --json"))


BAD = {
    "bench": "WHAT is one of collectives, matmul",
    "bench matmull": "Did you mean matmul?",
    "bench collectives --ranks 1": "--ranks is 1; write 2 to 256",
    "bench collectives --ops all_redcue": "--ops: unknown operation 'all_redcue'; choose from all_reduce",
    "bench collectives --sizes 1K:1X": "'1X' is not a size",
    "bench collectives --groups 8": "--groups '8'",
    "bench collectives --groups two": "write 4 for neighbours",
    "bench collectives --dtype int3": "is 'int3'; choose from",
    "bench collectives --repeats 0": "--repeats is 0; write 1 to",
    "bench collectives --backend smoke": "is 'smoke'; choose from",
    "bench matmul --device cpu --dtype tf32": "tf32 is a GPU format",
    "bench matmul --sizes big": "--sizes: 'big' is not a size",
    "bench matmul --threads 0": "--threads is 0",
    "bench mfu --width 0 --layers 0": "--width is 0",
    "bench overlap --copy 3Q": "'3Q' is not a size",
    "doctor --out machine.txt": "use .toml",
    "doctor --limit 0 --out m.toml": "--limit is 0; write a number above 0",
    "doctor devices h10 --out x": "unknown argument '--out'",
    "doctor devices h10": "no device 'h10'",
    "doctor clusters h10x8": "Did you mean 'h100'",
    "doctor hierarchy": "required: NAME",
    "doctor hierarchy h100 --out h.png": "use .svg",
    "doctor topology nowhere.txt": "cannot read the topology nowhere.txt",
    "doctor planets": "is 'planets'; choose from",
}


@pytest.mark.parametrize("words", BAD)
def test_what_means_nothing_is_refused_with_a_sentence(words: str) -> None:
    verb, *argv = words.split()
    from phalanx.cli.usage import UsageError

    with pytest.raises(
        (UsageError, NumberError, MachineError, CommMisuse)
    ) as told:
        {"bench": bench.run, "doctor": doctor.run}[verb](argv)
    assert BAD[words] in str(told.value)
