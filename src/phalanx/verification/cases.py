"""The batches on which layouts are compared: ordinary ones, and some with few or no
targets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import Shape
from ..models import IGNORED, token_noise

VARIED = 3  # steps whose batches differ in kind; all later ones are ordinary


def trial_batch(
    shape: Shape,
    step: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    packed: bool = False,
    noisy: bool = False,
) -> Mapping[str, Tensor]:
    """Return the batch of a step of a comparison. It differs from `batch_of` in two
    steps.

    Step 1 has targets only in the last quarter of its rows, so that most ranks and
    microbatches have none. In float16 it has a single target, whose gradient overflows
    on the ranks that compute it. Step 2 has no targets at all. After a step that
    float16 skips it is an ordinary one instead, so that the update shows any trace of
    the skipped step.
    """
    batch = batch_of(
        shape, step, seed=seed, dtype=dtype, packed=packed, noisy=noisy
    )
    half = dtype == torch.float16
    # A model of inputs without targets, such as an MLP: values near float16's
    # largest, 65,504, overflow.
    if "targets" not in batch:
        overflows = half and step == 1
        return (
            {"inputs": torch.full_like(batch["inputs"], 6e4)}
            if overflows
            else batch
        )
    targets = batch["targets"].clone()
    rows = targets.shape[0]
    if step == 1 and half:
        # The row with most targets: its last token is one of them in every
        # case.
        row = int((targets != IGNORED).sum(1).argmax())
        only = targets[row, -1].clone()
        targets.fill_(IGNORED)
        targets[row, -1] = only
    elif step == 1:
        # Only the last quarter keeps its targets, rounded up, so at least one
        # row.
        targets[: rows - (rows + 3) // 4] = IGNORED
    elif step == 2 and not half:
        targets.fill_(IGNORED)
    return {**batch, "targets": targets}


def batch_of(
    shape: Shape,
    step: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    packed: bool = False,
    noisy: bool = False,
) -> Mapping[str, Tensor]:
    """Return the batch of a step, equal in every layout, with ignored targets spread
    unevenly.

    It contains every token of a small vocabulary, as some models treat one token
    specially.
    """
    # The seed is spread by a prime, so that steps of one seed are not those of
    # the next.
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    if shape.kind == "mlp":
        rows = torch.randn(
            shape.batch, shape.hidden, generator=draw, dtype=torch.float64
        )
        return {"inputs": rows.to(dtype)}
    # One token more than a sequence: targets are the inputs shifted by one.
    size = (shape.batch, shape.sequence + 1)
    tokens = torch.randint(0, shape.vocab, size, generator=draw)
    inputs = tokens[:, :-1]
    # Every token of the vocabulary, as far as the batch has room, at random
    # places.
    every = torch.arange(shape.vocab)[: inputs.numel()]
    somewhere = torch.randperm(inputs.numel(), generator=draw)[: every.numel()]
    inputs[somewhere // shape.sequence, somewhere % shape.sequence] = every
    targets = tokens[:, 1:].clone()
    for row in range(shape.batch):
        # Row 0 loses no target, row 1 one, and so on: every microbatch has
        # another count.
        targets[row, : row % shape.sequence] = IGNORED
    time = torch.arange(shape.sequence).expand(shape.batch, -1).contiguous()
    batch = {
        "tokens": inputs.contiguous(),
        "targets": targets,
        "positions": time,
    }
    if packed:
        batch |= _documents(batch, draw)
    if (
        noisy
    ):  # dropout's source of randomness: a key for every token of the step
        # Numbered over the whole batch, so that a layout cannot change a
        # token's noise.
        token = torch.arange(time.numel()).view(time.shape)
        batch["noise"] = token_noise(seed, step, token)
    return batch


def _documents(
    batch: Mapping[str, Tensor], draw: torch.Generator
) -> dict[str, Tensor]:
    """Cut sequences at random places; return each token's document, and its position in
    the document."""
    size = batch["tokens"].shape
    # A new document begins at a quarter of all tokens.
    starts = torch.rand(size, generator=draw) < 0.25
    starts[:, 0] = True
    time = batch["positions"]
    # The last start at or before each token.
    begun = torch.where(starts, time, 0).cummax(1).values
    return {"documents": starts.cumsum(1), "positions": time - begun}
