"""The interface on which a rank talks to the others, and tests of the routes.

gloo uses the address of the host's own name, which on many hosts is 127.0.1.1. Here it
is the address from which the master is reached. Missing routes are found before the
backend starts: there, one end would wait for minutes and the other fail with an address
that is neither end's.
"""

import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phalanx.comm.base import CommError, CommMisuse
from phalanx.layout.environment import Rendezvous

REACHING = (
    8.0  # seconds in which one host must reach another that waits for it
)
WAYS_OUT = (
    "Name the interface that the hosts share: network.interface = 'eth0', MASTER_ADDR by its address"
    " there, and let firewalls pass its ports."
)
# in a network reserved for documentation: its route is the default route
_NOWHERE = "192.0.2.1"
_SIOCGIFADDR = 0x8915  # Linux: request for the address of an interface


@dataclass(frozen=True)
class Address:
    """The address at which this rank listens: one interface of this host."""

    address: str
    interface: str  # "" if unknown
    host: str

    @classmethod
    def choose(cls, at: Rendezvous, interface: str = "") -> "Address":
        """The address of a named interface, or of the one that reaches the master."""
        host = socket.gethostname()
        if interface:
            if not (address := addresses().get(interface, "")):
                known = ", ".join(
                    f"{name} ({each})" for name, each in addresses().items()
                )
                raise CommMisuse(
                    f"network.interface = {interface!r} is not an interface of {host} with an address;"
                    f" there are {known or 'none'}."
                )
            return cls(address, interface, host)
        address = _from_here(at.host, at.port)
        if address.startswith("127.") and not at.one_host:
            # Debian resolves a host's own name to 127.0.1.1 on the host itself, and to
            # another address elsewhere.
            others = [
                each
                for each in addresses().values()
                if not each.startswith("127.")
            ]
            default = _from_here(_NOWHERE, at.port)
            address = default or next(iter(others), address)
        # The interface of that address, for the variables of gloo and NCCL.
        names = {each: name for name, each in addresses().items()}
        return cls(address, names.get(address, ""), host)

    def use(self, environment: MutableMapping[str, str]) -> None:
        """Make gloo and NCCL use this interface, unless the environment names one."""
        if self.interface:
            environment.setdefault("GLOO_SOCKET_IFNAME", self.interface)
            # NCCL's "=" means this interface, not every one whose name begins so.
            if self.interface != "lo":
                environment.setdefault(
                    "NCCL_SOCKET_IFNAME", f"={self.interface}"
                )

    def __str__(self) -> str:
        return f"{self.address} ({self.interface or 'unknown interface'}) on {self.host}"


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface of this host; empty except on Linux."""
    found: dict[str, str] = {}
    if sys.platform != "linux":
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # struct ifreq: the name in 16 bytes; bytes 20 to 23 are the address.
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _from_here(host: str, port: int) -> str:
    """This host's address on the route to another, or ""; sends nothing."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
        # Connecting a UDP socket only looks up the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def check_routes(store: Any, at: Rendezvous, mine: Address) -> None:
    """Raise the same error on all ranks if a host cannot reach the next or the first.

    The first rank to arrive on each host listens, and connects to those of two other
    hosts. Other ranks need not: routes are the same for all ranks of a host. Rank 0
    collects the results and answers all.
    """
    here = f"{mine.host} {mine.address}"
    # 1. The first rank of each host listens and publishes its port.
    leads = store.add(f"host/{here}", 1) == 1
    with contextlib.ExitStack() as stack:
        if leads:
            listener = stack.enter_context(
                socket.create_server(
                    (mine.address, 0),
                    family=_family(mine.address),
                    backlog=1024,
                )
            )
            port = listener.getsockname()[1]
            store.append(
                "hosts",
                json.dumps([at.rank, mine.address, port, str(mine)]) + "\n",
            )
        # Every host has published its listener once all ranks are counted.
        if store.add("placed", 1) == at.size:
            store.set("all placed", "1")
        # 2. When all listen, each leader connects to the next host and the first.
        _wait(store, "all placed", at)
        hosts = sorted(
            map(json.loads, store.get("hosts").decode().splitlines())
        )
        if len(hosts) == 1:
            return
        if leads:
            own = [rank for rank, *_ in hosts].index(at.rank)
            others = {own: None, (own + 1) % len(hosts): None, 0: None}
            failed = [_reach(hosts[other]) for other in others if other != own]
            report = [
                f"rank {at.rank} at {mine} cannot reach {each}"
                for each in failed
                if each
            ]
            store.append("reached", json.dumps(report) + "\n")
            if store.add("reached by", 1) == len(hosts):
                store.set("all reached", "1")
        _wait(store, "all reached", at)
    # 3. When all have tried, every rank reads the same list of failures.
    failures = [
        each
        for line in store.get("reached").decode().splitlines()
        for each in json.loads(line)
    ]
    if failures:
        raise CommError("; ".join(sorted(failures)[:8]) + f". {WAYS_OUT}")


def _reach(other: tuple[int, str, int, str]) -> str:
    """Explain why another host is unreachable, or return ""."""
    rank, address, port, name = other
    try:
        socket.create_connection((address, port), REACHING).close()
    except OSError as error:
        return f"rank {rank} at {name}: {error.strerror or error}"
    return ""


def _wait(store: Any, name: str, at: Rendezvous) -> None:
    try:
        store.wait([name], timedelta(seconds=3 * REACHING))
    except RuntimeError as error:
        raise CommError(
            f"rank {at.rank}: not all hosts have answered ({name})."
        ) from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(at: Rendezvous) -> socket.socket:
    """Open the store's socket that the other ranks connect to.

    It listens on the address that the others are given, or on all addresses if this
    host resolves its own name to loopback and the others do not.
    """
    # What the other ranks are noted, resolved on this host.
    address = at.host
    with contextlib.suppress(OSError):
        address = str(
            socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)[0][
                4
            ][0]
        )
    if (
        address.startswith("127.")
        and not at.one_host
        and not at.host.startswith(("127.", "local"))
    ):
        address = ""
    try:
        return socket.create_server(
            (address, at.port), family=_family(address), backlog=4096
        )
    except OSError as error:
        raise CommMisuse(
            f"rank 0 cannot listen on {at.host}:{at.port} ({error.strerror}); choose another"
            " MASTER_PORT, or a MASTER_ADDR of this host."
        ) from None


def await_master(
    at: Rendezvous, mine: Address, seconds: float, notice: float
) -> str:
    """Try to connect to the store; returns "", or the reason after `seconds`.

    After `notice` seconds it prints a line, as the others may start much later.
    """
    begun, noted = time.monotonic(), False
    while True:
        try:
            # Only whether it answers; the store makes a connection of its own.
            socket.create_connection((at.host, at.port), 5.0).close()
            return ""
        except OSError as error:
            reason = f"{error.strerror or error}"
        waited = time.monotonic() - begun
        if waited > seconds:
            return reason
        if waited > notice and not noted:
            noted = True
            print(
                f"rank {at.rank} of {at.size} ({at.source}) at {mine} has not reached rank 0 at"
                f" {at.host}:{at.port} in {notice:g} s ({reason}) and keeps trying for {seconds:g} s."
                f" {WAYS_OUT}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(0.2)
