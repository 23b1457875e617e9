"""Starting a world of ranks on this machine, or joining the one that a launcher has started."""

from collections.abc import Callable
from typing import Any

from phalanx.wire.alone import AloneWorld
from phalanx.wire.base import WireMisuse
from phalanx.wire.threads import run_threads


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    wire: str = "auto",
    timeout: float = 60.0,
) -> list[Any]:
    """What `fn(world, *args)` returns on each of `ranks` ranks, in rank order."""
    if ranks == 1:
        return [fn(AloneWorld(), *args)]
    if wire != "threads":
        raise WireMisuse(f"no wire is named {wire!r}; there is threads.")
    return run_threads(fn, ranks, args, timeout, cuda=False)
