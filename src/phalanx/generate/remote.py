"""A model that ranks share, read from the process that started them.

Each rank waits at a connection of its own, and not in a collective: a user may think for
an hour before the next message. A request goes to all ranks, which read the same tokens
together, and the first rank answers with the logits.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ..comm import World, launch
from ..layout import Shape
from .generator import Generator

GRACE = 10.0  # seconds in which ranks may end by themselves
LONGEST = 70  # bytes of the name of a folder for sockets
# Opens a rank's part of a model.
Open = Callable[..., Generator]


class RemoteReader:
    """A model on the other side of the connections, one for each rank."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections
        # Ctrl-C may end a wait for logits. The request is still carried out to
        # its end by this thread, on all ranks, before the next one.
        self._requests = ThreadPoolExecutor(1)
        self.shape: Shape = connections[0].recv()

    def reset(self) -> None:
        self._ask("reset")

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        logits: Tensor = self._ask("logits", tokens, last)
        return logits

    def _ask(self, name: str, *args: Any) -> Any:
        """Call a method of every rank's reader, and return the first rank's result."""
        answer: Future[Any] = self._requests.submit(self._send, name, args)
        return answer.result()

    def _send(self, name: str, args: tuple[Any, ...]) -> Any:
        for connection in self._connections:
            connection.send((name, args))
        return self._connections[0].recv()

    def close(self) -> None:
        """Wait for the end of the current request."""
        self._requests.shutdown()


@contextlib.contextmanager
def open_over_ranks(
    opens: Open, ranks: int, *args: Any
) -> Iterator[Generator]:
    """A generator whose model is shared by new processes, until the context ends.

    Each rank calls `opens(world, *args)`, a function at the top level of a module.
    """
    key = secrets.token_bytes(16)
    failed: list[BaseException] = []
    connections: list[Connection] = []

    def start(address: str) -> None:
        try:
            launch(_serve, ranks, address, key, opens, args)
        except BaseException as error:  # raised again by the user's thread
            failed.append(error)
        # Ends the wait for ranks that died before they connected.
        with contextlib.suppress(OSError):
            Client(address, "AF_UNIX").close()

    with tempfile.TemporaryDirectory(
        prefix="phalanx-", dir=_place()
    ) as folder:
        address = str(Path(folder) / "socket")
        # Ctrl-C while a rank reads its weights does not wait for their end.
        starting = Thread(target=start, args=[address], daemon=True)
        try:
            with Listener(
                address, "AF_UNIX", backlog=ranks + 1, authkey=key
            ) as listener:
                starting.start()
                _accept(listener, ranks, connections)
                reader = RemoteReader(connections)
                with contextlib.closing(reader):
                    yield Generator(reader, reader.shape)
        # The end of a rank closes its connection; its own error says why.
        except (EOFError, ConnectionError) as lost:
            starting.join()
            raise failed[0] if failed else lost from None
        finally:
            # Ends the service of the ranks.
            for connection in connections:
                connection.close()
            if starting.ident is not None:
                starting.join(GRACE)


def _place() -> str | None:
    """A folder whose name leaves room: a socket's path has at most 107 bytes."""
    return None if len(tempfile.gettempdir()) < LONGEST else "/tmp"


def _accept(
    listener: Listener, ranks: int, connections: list[Connection]
) -> None:
    """Add the connections of all ranks, in their order."""
    numbers: dict[Connection, int] = {}
    while len(connections) < ranks:
        connection: Any = listener.accept()
        connections.append(connection)
        numbers[connection] = connection.recv()
    connections.sort(key=numbers.__getitem__)


def _serve(
    world: World, address: str, key: bytes, opens: Open, args: tuple[Any, ...]
) -> None:
    """Answer requests until the connection ends. Collective."""
    with Client(address, "AF_UNIX", authkey=key) as connection:
        connection.send(world.rank)
        generator = opens(world, *args)
        is_first = world.rank == 0
        if is_first:
            connection.send(generator.shape)
        with contextlib.suppress(EOFError):
            while True:
                name, terms = connection.recv()
                # No gradients: they would keep all activations.
                with torch.inference_mode():
                    result = getattr(generator.reader, name)(*terms)
                if is_first:
                    connection.send(result)
