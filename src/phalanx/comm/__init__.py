"""Groups of ranks and their collectives, over threads, gloo, NCCL and shared memory."""

import logging

import torch

from phalanx.comm.agree import PeerFailed, RanksDiffer, agreement
from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import (
    OPS,
    CommError,
    CommMisuse,
    Group,
    RankFailed,
    Report,
    Work,
    World,
)
from phalanx.comm.join import join
from phalanx.comm.launch import Runner, choose, launch, workers
from phalanx.comm.tally import Message, Tally, TallyWorld
from phalanx.layout.choices import BACKENDS

# The versions that pyproject.toml allows. An environment may have another.
TESTED = ((2, 11), (2, 13))


def warn_of_torch(version: str) -> None:
    """Log a warning if the tests were not run with this version of torch."""
    # "2.13.0+cpu" is (2, 13); a part that is no number is left out.
    numbers = tuple(
        int(part) for part in version.split(".")[:2] if part.isdigit()
    )
    if not TESTED[0] <= numbers <= TESTED[1]:
        logging.getLogger(__name__).warning(
            "torch %s: phalanx was tested with 2.11 to 2.13. pip install 'torch>=2.11,<2.14', or check"
            " its results: phalanx verify",
            version,
        )


warn_of_torch(torch.__version__)

__all__ = [
    "Group",
    "World",
    "Work",
    "OPS",
    "CommError",
    "CommMisuse",
    "RankFailed",
    "PeerFailed",
    "RanksDiffer",
    "Report",
    "launch",
    "workers",
    "join",
    "agreement",
    "choose",
    "BACKENDS",
    "Runner",
    "AloneWorld",
    "Tally",
    "TallyWorld",
    "Message",
]
