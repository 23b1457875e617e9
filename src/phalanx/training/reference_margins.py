"""Margins of DPO's reference model, the model before the run's first step, for all
pairs.

They are computed once, by the forward-only program of the run's layout, and stored in
the run's folder, because a resumed run has other weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..parallel.preference import preference_loss
from .log import RunLog
from .rank import Rank
from .step import TrainError

FILE = "reference.safetensors"
_MARGINS = "margins"


def give_reference(rank: Rank, log: RunLog, start: int) -> None:
    """Add the reference model's margins to the batches of a run with pairs.
    Collective."""
    if not rank.batches.pairs:
        return
    path = Path(rank.run.out, FILE)
    count = sum(rank.batches.pair_rows)
    # A resumed run has trained weights, so the first start's margins are read.
    margins = _kept(rank, path, count) if start else _computed(rank, count)
    if not start and not rank.world.rank:
        save_file({_MARGINS: margins}, path)
        log.event(
            "data", f"the reference model's margins of {count:,} pairs: {path}"
        )
    whole: NDArray[np.float64] = margins.numpy()
    rank.batches = replace(rank.batches, margins=whole)


@torch.no_grad()
def _computed(rank: Rank, count: int) -> Tensor:
    """Compute the margins of all pairs with the current weights."""
    part, batches = rank.part, rank.batches
    loss = preference_loss(
        [piece.module for piece in part.local.pieces.values()]
    )
    margins = torch.zeros(count, dtype=torch.float64)
    if loss is not None:
        # A list makes the loss record the margin of each pair.
        loss.seen = []
    for first in range(0, count, batches.size):
        rows = batches.pair_batch(first, rank.rows)
        # Forward only: the weights stay those of the reference.
        part.validator.step(part.microbatches(rows), 0.0)
    groups = part.local.groups
    if loss is not None:
        # Ranks of tp and cp have the same pairs; only one of them counts.
        if not (groups.tp.rank or groups.ring.rank or groups.ulysses.rank):
            for numbers, own in loss.seen or ():
                # Pairs count from 1; 0 marks rows without a pair.
                there = numbers.cpu() > 0
                margins[numbers.cpu()[there] - 1] = own.cpu().double()[there]
        loss.seen = None
    return _summed(rank, margins)


# Each rank has the margins of its own pairs, and 0 elsewhere.
def _summed(rank: Rank, margins: Tensor) -> Tensor:
    total = margins.to(rank.part.everyone.device)
    rank.part.everyone.all_reduce(total)
    with rank.part.everyone.reading():
        return total.cpu()


def _kept(rank: Rank, path: Path, count: int) -> Tensor:
    """Return the margins stored by the run's first start. Rank 0 reads them."""
    margins, wrong = torch.zeros(count, dtype=torch.float64), 0.0
    if not rank.world.rank:
        try:
            read = load_file(path)[_MARGINS]
            # A file of another data set has another number of pairs.
            fits = read.shape == margins.shape and read.dtype == margins.dtype
            margins, wrong = (read, 0.0) if fits else (margins, 1.0)
        except (OSError, KeyError, SafetensorError):
            wrong = 1.0
    # The flag travels with the margins: one message, and all ranks raise
    # together.
    both = _summed(rank, torch.cat((margins, torch.tensor([wrong]).double())))
    if both[-1]:
        raise TrainError(
            f"{path} lacks the reference model's margins for {count:,} pairs, which a resumed run"
            " cannot recompute. Restore the file, or start over with another `out`."
        )
    return both[:-1]
