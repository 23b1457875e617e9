"""Limits of a process (`ulimit`) that keep ranks from sharing memory. It was a traceback from every
rank, or an OSError from the launcher, also with `auto`, which could have taken gloo."""

import subprocess
import sys

import pytest

_RUN = """
import resource, sys
import torch
from phalanx.comm import launch

def total(world):
    x = torch.full((3,), world.rank + 1.0)
    world.split("all", [range(world.size)]).all_reduce(x)
    return type(world).__name__, x.tolist()

if __name__ == "__main__":
    kind = getattr(resource, sys.argv[1])
    resource.setrlimit(kind, (int(sys.argv[2]), resource.getrlimit(kind)[1]))
    try:
        print(launch(total, 2, backend=sys.argv[3]))
    except ValueError as error:
        print("refused:", error)
"""

# 60 GB of addresses are too few for 2 ranks and enough for torch.
LIMITS = [
    ("RLIMIT_AS", 60 * 10**9, "ulimit -v"),
    ("RLIMIT_FSIZE", 10**9, "ulimit -f"),
]


def run(folder, *args):
    file = folder / "limited.py"
    file.write_text(_RUN)
    command = [sys.executable, str(file), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the arena is a small file"
)
@pytest.mark.parametrize("limit, size, way_out", LIMITS)
def test_auto_takes_gloo_with_one_line_of_notice(
    tmp_path, limit, size, way_out
):
    end = run(tmp_path, limit, size, "auto")
    assert end.stdout == str([("ProcessWorld", [3.0] * 3)] * 2) + "\n", (
        end.stderr
    )
    (notice,) = (line for line in end.stderr.splitlines() if "gloo" in line)
    assert notice.startswith("ranks talk over gloo")
    assert way_out in notice
    assert "Traceback" not in end.stderr


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the arena is a small file"
)
@pytest.mark.parametrize("limit, size, way_out", LIMITS)
def test_shared_is_refused_with_one_sentence_and_a_way_out(
    tmp_path, limit, size, way_out
):
    end = run(tmp_path, limit, size, "shm")
    (line,) = end.stdout.splitlines()
    assert line.startswith("refused: shared memory needs ")
    assert way_out in line
    assert "Traceback" not in end.stderr
