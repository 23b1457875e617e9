"""What the repros of docs/audited.md print, in the versions that it names.

The gradients of a repro are checked by hand or by autograd of one process, without the recorder. A test
that fails after an upgrade tells that a library has changed: then its rows of the table are to be made
again.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

REPROS = Path(__file__).parents[2] / "benchmarks" / "audited" / "repros"
pytestmark = pytest.mark.slow


def printed(repro: str, *words: object, ranks: int = 0) -> str:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command = [
        sys.executable,
        *(launcher if ranks else []),
        str(REPROS / repro),
        *map(str, words),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_repro_has_at_most_25_lines_of_code() -> None:
    for path in REPROS.glob("*.py"):
        code = path.read_text().split('"""')[2]
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 25, path.name


@pytest.mark.skipif(
    not version("torch").startswith("2.13"), reason="the table is of 2.13"
)
def test_fsdp2_divides_twice_on_a_shard_mesh_of_one_rank(
    tmp_path: Path,
) -> None:
    found = re.findall(
        r"torch\.(\w+) (.*) ([\d.]+)$",
        printed("divide_factor.py", tmp_path),
        re.M,
    )
    wrong = {
        (dtype, forced)
        for dtype, forced, value in found
        if float(value) != 0.5
    }
    assert len(found) == 8
    forced = {
        (dtype, "forced sum")
        for dtype in ("float64", "float32", "bfloat16", "float16")
    }
    assert wrong == {*forced, ("float64", ""), ("float16", "")}


@pytest.mark.skipif(
    version("transformers") != "5.23.0", reason="the table is of 5.23.0"
)
def test_norms_of_queries_grow_with_microbatches_under_tensor_parallelism(
    tmp_path: Path,
) -> None:
    text = printed("tp_norms.py", tmp_path, "float32", ranks=2)
    ratios = [
        float(ratio) for ratio in re.findall(r"microbatches: ([\d.]+)", text)
    ]
    assert ratios[0] == pytest.approx(1, abs=2e-3)
    assert ratios[1] > 1.1
    assert ratios[2] > 1.5


@pytest.mark.skipif(
    version("transformers") != "5.23.0", reason="the table is of 5.23.0"
)
def test_the_auxiliary_loss_grows_with_microbatches(tmp_path: Path) -> None:
    text = printed("auxiliary_loss.py", tmp_path)
    without, with_it = (
        [float(x) for x in found.split(",")]
        for found in re.findall(r": \[(.*)\]", text)
    )
    assert max(without) == pytest.approx(min(without), rel=1e-6)
    assert max(with_it) > min(with_it) * (1 + 1e-4)


@pytest.mark.skipif(
    version("transformers") != "5.23.0", reason="the table is of 5.23.0"
)
def test_ranks_keep_their_parts_of_an_activations_gradient(
    tmp_path: Path,
) -> None:
    """The parts of both ranks add up to the gradient of one process, and no rank has the sum."""
    text = printed("tp_activation.py", tmp_path, "float32", ranks=2)
    (one, _), (first, second) = (
        [
            float(x)
            for x in re.search(f"^{layout} (.*)$", text, re.M)[1].split()
        ]
        for layout in ("one", "tp 2")
    )
    assert first + second == pytest.approx(one, rel=2e-2)
    assert first != pytest.approx(one, rel=0.1)
    assert second != pytest.approx(one, rel=0.1)


@pytest.mark.skipif(
    version("transformers") != "5.23.0", reason="the table is of 5.23.0"
)
def test_the_loss_doubles_if_two_tp_ranks_do_not_average_tokens(
    tmp_path: Path,
) -> None:
    text = printed("tp_tokens.py", tmp_path, "float32", ranks=2)
    norms = re.search(r"gradient norms: (.*)", text)
    assert norms
    autograd, across, apart = map(float, norms[1].split())
    assert across == pytest.approx(autograd, rel=1e-3)
    assert apart == pytest.approx(2 * autograd, rel=1e-3)


@pytest.mark.skipif(
    version("transformers") != "5.23.0", reason="the table is of 5.23.0"
)
def test_fused_weights_are_split_after_they_are_sharded(
    tmp_path: Path,
) -> None:
    text = printed("fused_loading.py", tmp_path, "float32", ranks=2)
    found = re.findall(r"(.*): (\d+) wrong weights", text)
    counts = dict(found)
    # Queries, keys, values, gates, and both parts of the MLP, of two layers in two stacks.
    expected = {"whole": "0"}
    expected |= {"{'tp_size': 2}": "24", "{'fsdp_size': 2}": "24"}
    assert counts == expected
