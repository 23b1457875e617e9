"""Runs on real launchers, on this machine: torchrun's agents on two hosts, and Ray with two nodes, give
the losses of local ranks to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hosts import ADDRESSES, TRAIN, Hosts, two_hosts, why_not
from loss_bits import losses

from phalanx.layout.journal import read_journal

pytestmark = pytest.mark.slow
STEPS = 30
SAME = [f"steps={STEPS}", "checkpoint.every=5"]


def _starts(out: Path) -> list[tuple[int, str]]:
    records = read_journal(out / "metrics.jsonl")
    return [(r["step"], r["layout"]) for r in records if r["event"] == "start"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of two local ranks over gloo."""
    out = tmp_path_factory.mktemp("local") / "run"
    words = [
        *TRAIN,
        *SAME,
        f"out={out}",
        "layout=dp2 zero1",
        "--backend",
        "gloo",
    ]
    subprocess.run(
        words,
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return losses(out)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := why_not():
        pytest.skip(why)
    with two_hosts() as made:
        yield made


def _wait(
    what: Callable[[], object], why: Callable[[], str], seconds: float = 240.0
) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


AGENT = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1",
    "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29400",
    "--rdzv-id=run", "--no-python",
]  # fmt: skip


def _agent(
    hosts: Hosts, host: int, out: Path, *words: str
) -> subprocess.Popen[bytes]:
    """One host's agent, as `phalanx launch torchrun` prints it."""
    command = [
        *AGENT,
        *TRAIN,
        *words,
        f"out={out}",
        "layout=dp2 zero1",
        "train.fallback=tp1",
    ]
    waits = (
        "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
    )
    command[3:3] = [
        f"--local-addr={ADDRESSES[host]}",
        f"--rdzv-conf=is_host={int(host == 0)},{waits}",
    ]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return hosts.start(host, *command, env=env, log=out.parent / f"{host}.log")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an agent and its ranks as if its host had lost power."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[3]) == process.pid:  # its session
                os.kill(int(path.parent.name), signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def test_two_hosts_give_the_losses_of_local_ranks(
    hosts: Hosts, local: dict[int, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    agents = [_agent(hosts, host, out, *SAME) for host in (0, 1)]
    codes = [agent.wait(timeout=300) for agent in agents]
    logs = [(tmp_path / f"{host}.log").read_text() for host in (0, 1)]
    assert codes == [0, 0], logs
    assert losses(out) == local


def test_a_lost_host_is_gone_on_without_and_with_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    """One of two hosts is lost; the other goes on in the fallback layout, and with a new host in the
    first layout again. In float64 the layouts' losses agree to rounding."""
    out = tmp_path / "run"
    # A low learning rate: rounding then grows little over hundreds of steps.
    more = [
        "steps=100000",
        "checkpoint.every=5",
        "precision=fp64",
        "optimizer.lr=1e-4",
    ]
    agents = [_agent(hosts, host, out, *more) for host in (0, 1)]

    def logs() -> str:
        return "".join(
            (tmp_path / f"{host}.log").read_text()[-6000:] for host in (0, 1)
        )

    try:
        _wait(
            lambda: (
                len(losses(out)) > 7
                if (out / "metrics.jsonl").exists()
                else False
            ),
            logs,
        )
        _end(agents[1])
        _wait(
            lambda: (
                len(_starts(out)) > 1
                and max(losses(out)) > _starts(out)[-1][0] + 7
            ),
            logs,
        )
        assert "fp64" in _starts(out)[-1][1]
        assert "dp2" not in _starts(out)[-1][1]
        agents[1] = _agent(hosts, 1, out, *more)
        _wait(lambda: "dp2" in _starts(out)[-1][1], logs)
        at = _starts(out)[-1][0]
        _wait(lambda: max(losses(out)) > at + 7, logs)
    finally:
        for agent in agents:
            _end(agent)
    kept = losses(out)
    alone = tmp_path / "alone"
    last = max(kept)
    words = [
        *TRAIN,
        *more,
        f"steps={last}",
        f"out={alone}",
        "layout=fp64",
        "--ranks",
        "1",
    ]
    subprocess.run(
        words,
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    want = {step: float.fromhex(x) for step, x in losses(alone).items()}
    got = {step: float.fromhex(x) for step, x in kept.items()}
    assert got == pytest.approx(want, rel=1e-8)


RAY = """
import subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
code = subprocess.run([sys.executable, sys.argv[1]], env={**__import__("os").environ,
    "RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""


def test_a_script_for_ray_gives_the_losses_of_local_ranks(
    local: dict[int, str], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    run = [word for word in TRAIN if "=" in word]
    (tmp_path / "ray.toml").write_text("layout = 'dp2 zero1'\n")
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "launch",
        "ray",
        "ray.toml",
        *run,
        *SAME,
    ]
    text = subprocess.run(
        [*command, "--nodes", "2", "--gpus", "0"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    ).stdout
    (tmp_path / "script.py").write_bytes(text)
    (tmp_path / "cluster.py").write_text(RAY)
    env: dict[str, Any] = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    done = subprocess.run(
        [sys.executable, "cluster.py", "script.py"],
        cwd=tmp_path, timeout=500, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert losses(tmp_path / "runs" / "ray") == local
