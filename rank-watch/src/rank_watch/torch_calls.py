"""Records a program's calls of torch.distributed, so that a hang names the call that a
rank is missing.

Only this file knows torch, and it imports it inside the context manager.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from .positions import Positions

# names that a torch version lacks are skipped
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
# with the arguments that name the peer
MESSAGES = {
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
}
# the first of these arguments that is present describes the data
_TENSORS = (
    "tensor",
    "input",
    "input_tensor",
    "input_list",
    "output",
    "tensor_list",
)


@contextmanager
def torch_calls(positions: Positions) -> Iterator[None]:
    """Record the calls of `torch.distributed` that Python makes in the block.

    Calls made by C++ directly, such as DistributedDataParallel's in backward, are not
    recorded: a rank in one of them is shown with its stack.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    recorder = _Recorder(positions, dist)
    before = {}
    # Both modules: `dist` holds copies of the names, and c10d calls its own.
    for name in filter(partial(hasattr, c10d), (*COLLECTIVES, *MESSAGES)):
        before[name] = getattr(c10d, name)
        recorded = recorder.recorded(name, before[name])
        setattr(c10d, name, recorded)
        setattr(dist, name, recorded)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(c10d, name, function)
            setattr(dist, name, function)


class _Recorder:
    """Numbers groups and texts, and wraps the functions of torch.distributed."""

    def __init__(self, positions: Positions, dist: Any) -> None:
        self.positions, self.dist = positions, dist
        self._groups: dict[Any, tuple[int, list[int]]] = {}
        self._thread = threading.local()

    def recorded(
        self, name: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Recorded before the call, which may never return.
            number = self._record(name, signature, args, kwargs)
            if number is None:
                return function(*args, **kwargs)
            # `send` calls `isend`: only the outer call counts.
            self._thread.inside = True
            try:
                # A synchronous call may return before its GPU is done; the
                # wait then shows elsewhere.
                with self.positions.waiting(number):
                    work = function(*args, **kwargs)
            finally:
                self._thread.inside = False
            # Asynchronous: the caller waits later, if at all.
            if work is not None and hasattr(work, "wait"):
                return _Waited(work, number, self.positions)
            return work

        return call

    def _record(
        self, name: str, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> int | None:
        """Record a call and return its number.

        Returns None within another call, and on ranks outside the group.
        """
        if getattr(self._thread, "inside", False):
            return None
        try:
            given = signature.bind(*args, **kwargs).arguments
        # A rank outside a group makes no call of it.
        except TypeError:  # torch reports the mistake better
            return None
        group = given.get("group") or self.dist.group.WORLD
        if group is self.dist.GroupMember.NON_GROUP_MEMBER or group is None:
            return None
        # Peers are recorded as indices in the group.
        number, ranks = self._group(group)
        peer = -1
        if name in MESSAGES:
            of_world, of_group = (
                given.get(argument) for argument in MESSAGES[name]
            )
            if of_group is not None:
                peer = of_group
            elif of_world in ranks:
                peer = ranks.index(of_world)
            else:  # a receive from any rank, or a mistake that torch reports
                return None
        text = self._text(name, given)
        return self.positions.call(
            number, text, peer, name in ("send", "isend")
        )

    def _group(self, group: Any) -> tuple[int, list[int]]:
        if group not in self._groups:
            ranks = self.dist.get_process_group_ranks(group)
            name = (
                "world" if group is self.dist.group.WORLD else group.group_name
            )
            self._groups[group] = self.positions.group(name, ranks), ranks
        return self._groups[group]

    def _text(self, name: str, given: dict[str, Any]) -> int:
        found = next(
            (given[each] for each in _TENSORS if given.get(each) is not None),
            (),
        )
        tensors = found if isinstance(found, list | tuple) else (found,)
        # Shape and dtype of the first tensor are enough to tell calls apart.
        what = [(tuple(each.shape), each.dtype) for each in tensors[:1]]
        key = name, *what
        if key not in self.positions.call_texts:
            sizes = "".join(f" {list(shape)} {dtype}" for shape, dtype in what)
            text = self.positions.texts(
                [f"{name}{sizes}".replace("torch.", "")]
            )
            self.positions.call_texts[key] = text
        return self.positions.call_texts[key]


class _Waited:
    """The work of an asynchronous call, which records that the rank waits for it."""

    def __init__(self, work: Any, number: int, positions: Positions) -> None:
        self._work, self._number, self._positions = work, number, positions

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._positions.waiting(self._number):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
