"""A program of plain torch with FSDP2 is watched, and a hang is explained by its calls."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "plain_program.py"
SIGKILL = -9


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def run_two(folder: Path, where: str) -> list[tuple[int, str]]:
    """The exit codes and outputs of two ranks."""
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    port = str(free_port())
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(PROGRAM), str(folder), where]
        ranks.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    ends = []
    for process in ranks:
        said, _ = process.communicate(timeout=240)
        ends.append((process.returncode, said))
    return ends


def test_a_program_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    ends = run_two(tmp_path / "run", "nowhere")
    assert [code for code, _ in ends] == [0, 0], ends
    assert not (tmp_path / "run" / "hang.txt").exists()


@pytest.mark.parametrize(
    ("where", "cause"),
    [
        (
            "loader",
            "rank 1 should be in reduce_scatter",
        ),  # of FSDP2's backward
        (
            "skipped",
            "all ranks wait for each other: they do not make the same calls",
        ),
        ("message", "rank 1 has not made recv [1] float32 from rank 1"),
    ],
)
def test_a_hang_is_explained_and_ended(
    tmp_path: Path, where: str, cause: str
) -> None:
    ends = run_two(tmp_path / "run", where)
    assert [code for code, _ in ends] == [SIGKILL, SIGKILL], ends
    told = (tmp_path / "run" / "hang.txt").read_text()
    assert cause in told
    assert "plain_program.py" in told  # a stack
    (record,) = (
        (tmp_path / "run" / "metrics.jsonl").read_text().split("\n")[1:-1]
    )
    assert json.loads(record)["event"] == "hang"
