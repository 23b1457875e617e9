"""Two hosts on one machine: network namespaces that a pair of virtual interfaces joins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def why_not() -> str:
    """Why there can be no namespaces here; empty when there can."""
    try:
        name = f"px{uuid.uuid4().hex[:6]}"
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespaces: {error}"
    return ""


class Hosts:
    """Two hosts. The name of each is 127.0.1.1 for itself, as on Debian, and unknown to the other."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names

    def start(
        self,
        host: int,
        *words: str,
        env: Mapping[str, str] | None = None,
        log: Path,
    ) -> subprocess.Popen[bytes]:
        """A command on a host; its output goes to a file."""
        name = self.names[host]
        inside = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {name}; exec "$@"',
            "sh",
        ]
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, *inside, *words],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )  # fmt: skip

    def disconnect(self) -> None:
        _ip("-n", self.names[0], "link", "set", "veth0", "down")

    def connect(self) -> None:
        _ip("-n", self.names[0], "link", "set", "veth0", "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    mark = uuid.uuid4().hex[:6]
    names = f"px{mark}a", f"px{mark}b"
    try:
        for name in names:
            _ip("netns", "add", name)
            own = Path("/etc/netns", name)  # `ip netns exec` lays it over /etc
            own.mkdir(parents=True)
            (own / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
            )
            _ip("-n", name, "link", "set", "lo", "up")
        pair = ["type", "veth", "peer", "veth0", "netns", names[1]]
        _ip("-n", names[0], "link", "add", "veth0", *pair)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "veth0", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, check=False
            )
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


TRAIN = [
    sys.executable, "-m", "phalanx", "train",
    "model={layers=2,hidden=32,heads=2,ffn=48,vocab=256}", "batch=4", "sequence=16",
    "optimizer.lr=1e-2", "optimizer.schedule=constant", "validation.batches=0",
]  # fmt: skip
