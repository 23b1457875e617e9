"""Combined calls: a call with a follow-up, and several calls as one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..comm import Work


class ChainedWork(Work):
    """A call under way, and a function to run after it has been waited for."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self.work, self.finish = work, finish

    def wait(self) -> None:
        self.work.wait()
        self.finish()

    def done(self) -> bool:
        return self.work.done()


class WorkGroup(Work):
    """Several calls under way that form one operation."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def done(self) -> bool:
        return all(work.done() for work in self.works)
