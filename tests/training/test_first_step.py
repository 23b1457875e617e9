"""What a first step loads."""

import subprocess
import sys
from pathlib import Path

from phalanx.cli.main import main

CODE = """
import sys
from phalanx.cli.main import main
assert main(["train", "model=tiny", "layout=dp1", "steps=1", "out=" + sys.argv[1]]) == 0
loaded = [name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules]
assert not loaded, loaded
"""


def test_a_first_step_loads_neither_sympy_nor_torchs_compiler(
    tmp_path: Path,
) -> None:
    # They take 0.3 and 2 seconds of every rank's start. Only the memory estimate of a shape that
    # was never costed on this machine needs them, for torch's meta device: this start leaves its costs.
    assert (
        main(
            [
                "train",
                "model=tiny",
                "layout=dp1",
                "steps=1",
                f"out={tmp_path / 'before'}",
            ]
        )
        == 0
    )
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
