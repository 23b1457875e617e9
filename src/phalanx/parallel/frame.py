"""Runs the forward of somebody's model piece by piece.

The forward runs as it is, once for each piece, with stand-ins where the modules of other pieces were. So
what it computes between modules (scaled vectors, angles of rope, a mask) stays its own. It is left by an
exception, `Reached`, when it has come past the piece: a forward that is not ours has no other exit, and
running on would compute what is between all other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .transformers_refused import refuse

# A module around the blocks by its name, a block by its number.
Key = str | int
Running = Mapping[Key, Callable[..., Any]]


class Reached(Exception):
    """The forward has come past the piece that runs: the rest is other pieces'."""

    def __init__(self, x: Any) -> None:
        super().__init__(
            "a forward ran on behind the piece that was asked for"
        )
        self.x = x


class StandIn(nn.Module):
    """Stands where a module was in somebody's model. It gives what the frame says, unless the piece that
    runs has something to do here."""

    def __init__(self, frame: Frame, key: Key, real: nn.Module) -> None:
        super().__init__()
        # A forward may read attributes of the module; its weights are a piece's and no child here.
        self.__dict__.update(frame=frame, key=key, real=real)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["frame"].attribute(self.__dict__["real"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The piece that runs has something to do here.
        if (run := self.frame.running.get(self.key)) is not None:
            return run(*args, **kwargs)
        return self.frame.passed_by(self.key, args, kwargs)


class Frame:
    """Somebody's model with a stand-in for every module that has weights, and the whole of what it
    computes around them. One thread uses it at a time."""

    def __init__(self) -> None:
        self.running: Running = {}

    def passed_by(self, key: Key, args: Any, kwargs: Any) -> Any:
        """The value that stands for what a module of another piece gives. Each kind of frame has its own."""
        raise NotImplementedError

    def attribute(self, real: nn.Module, name: str) -> Any:
        """The attribute that the forward reads of a module of another piece."""
        return getattr(real, name)

    def until_reached(self, running: Running, call: Callable[[], Any]) -> Any:
        """Runs the forward with these modules in it: the value that it was stopped with, else what it
        gives."""
        self.running = running
        try:
            return call()
        except Reached as end:
            return end.x
        # An empty table: nothing of a piece stays reachable after its run.
        finally:
            self.running = {}


def stop(x: Any, *args: Any, **kwargs: Any) -> None:
    """Stands where the first block was, for the modules before it."""
    raise Reached(x)


@dataclass(frozen=True)
class Around:
    """The modules with weights around the blocks: those that run before the first block, and those that
    run after the last one."""

    before: Mapping[str, nn.Module]
    after: Mapping[str, nn.Module]


def take_out(
    frame: Frame,
    path: Sequence[nn.Module],
    blocks: Any,
    named: Callable[..., str],
) -> dict[str, nn.Module]:
    """The modules with weights around the blocks, by name; stand-ins are where they and the blocks were.

    `path` are the modules from the whole down to the one that owns the blocks; `named(owner, child)` names
    a child of one of them.
    """
    outer: dict[str, nn.Module] = {}
    for owner in path:
        for child_name, child in list(owner.named_children()):
            # Modules without weights stay, and run again for each piece.
            if child is blocks or child in path or not [*child.parameters()]:
                continue
            name = named(owner, child_name)
            refuse({f"it has two modules called {name}": name in outer})
            outer[name] = child
            owner._modules[child_name] = StandIn(frame, name, child)
    for number, (child_name, block) in enumerate(
        list(blocks.named_children())
    ):
        blocks._modules[child_name] = StandIn(frame, number, block)
    return outer


def around_blocks(
    order: Sequence[Key], outer: Mapping[str, nn.Module]
) -> Around:
    """Sorts the modules around the blocks by the order in which a forward has called all of them."""
    # Blocks must be 0, 1, 2, ... with nothing between the first and the last.
    numbers = [key for key in order if isinstance(key, int)]
    count = 1 + max(numbers, default=-1)
    places = [place for place, key in enumerate(order) if isinstance(key, int)]
    refuse(
        {
            "its forward does not call each block once, in their order": numbers
            != [*range(count)],
            "its forward calls modules between its blocks": places
            and places[-1] - places[0] != count - 1,
        }
    )
    first = places[0]
    # A module called on both sides would need its weights in two pieces.
    parts = set(order[:first]), set(order[first:])
    unused = ", ".join(outer.keys() - set(order))
    refuse(
        {
            "it uses a module before and after its blocks": parts[0]
            & parts[1],
            f"its forward does not use {unused}": unused,
        }
    )
    before, after = (
        {k: outer[k] for k in outer if k in part} for part in parts
    )
    return Around(before, after)


class OuterModules(nn.Module):
    """Modules around the blocks; `name` in their model is the child's name here."""

    frame: Any

    def __init__(
        self, frame: Frame, children: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.__dict__["frame"] = frame  # no child: it holds the whole model
        for name, child in children.items():
            self.add_module(name, child)

    def running(self, block: int, act: Callable[..., Any]) -> Running:
        """The modules that run in the whole model: these, and `act` in place of a block."""
        return {**dict(self.named_children()), block: act}
