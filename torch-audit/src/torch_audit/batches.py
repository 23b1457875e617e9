"""Hashes of the samples that a model is given: one for each row of the batch, and one for each token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .records import BatchRecord
from .shards import local_of
from .sketch import mixed

IGNORED = -100  # labels of torch's cross_entropy that do not count


@dataclass(frozen=True)
class Batch:
    """The samples of one call of a model."""

    record: BatchRecord
    hashes: Tensor  # of tokens and their positions: (samples, tokens)
    kept: Tensor  # 1 for a token, 0 for padding


def batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch | None:
    """The samples in the arguments of a model's call, or None if no tensor is among them.

    Token indices are hashed with their positions. Padding is left out if an attention mask says where
    it is, so the hash of a sample does not depend on the batch's other samples. The hash of a row is a
    sum over positions: parts of a sequence add up to the whole one.
    """
    named = dict(_tensors(args, kwargs))
    chosen = _chosen(named)
    if chosen is None:
        return None
    values = local_of(chosen)
    # A vector has one value for each sample.
    if values.ndim == 1:
        values = values[:, None]
    rows = values.flatten(1)  # also of no samples
    integers = not values.is_floating_point()
    # Floats by their bits, so that equal hashes mean equal values.
    bits = rows.long() if integers else rows.double().view(torch.int64)
    kept = like(named.get("attention_mask"), rows)
    # Without a mask every element counts.
    kept = torch.ones_like(bits) if kept is None else (kept != 0).long()
    positions = like(named.get("position_ids"), rows)
    # Positions count from the first token that is not padding, on whichever
    # side the padding is.
    if positions is None:
        positions = kept.cumsum(1) - 1
    # The inner hash makes equal tokens at other positions differ; sums wrap
    # modulo 2^64.
    hashes = mixed(bits + mixed(positions.long())) * kept
    labels = named.get("labels")
    counted = 0
    if labels is not None and not labels.is_floating_point():
        # As in torch's cross_entropy, -100 is not counted.
        counted = int((local_of(labels) != IGNORED).sum())
    samples = hashes.sum(1).tolist()
    record = BatchRecord(samples, int(kept.sum()), counted, integers)
    return Batch(record, hashes, kept)


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """All tensors among the arguments, also in lists and mappings, each with a name."""
    for index, value in enumerate(args):
        yield from tensors_in(str(index), value)
    for name, value in kwargs.items():
        yield from tensors_in(name, value)


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from tensors_in(f"{name}.{index}", inner)


def _chosen(named: Mapping[str, Tensor]) -> Tensor | None:
    """The tensor that holds the samples: token indices if there are any, else the first of all."""
    if "input_ids" in named:
        return named["input_ids"]
    tensors = [
        each
        for name, each in named.items()
        if each.ndim and each.dtype != torch.bool and name != "labels"
    ]
    # Token indices say more than activations, which depend on the weights.
    integers = [each for each in tensors if not each.is_floating_point()]
    return next(iter(integers or tensors), None)


def like(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    """A mask or positions in the shape of the rows; None if they have another form."""
    if tensor is None:
        return None
    # A program may keep its masks on the CPU.
    tensor = local_of(tensor).to(rows.device)
    # Masks of four dimensions hide pairs of tokens, not tokens.
    if tensor.ndim != 2 or tensor.shape[1] != rows.shape[1]:
        return None
    return (
        tensor.expand(rows.shape)
        if tensor.shape[0] in (1, len(rows))
        else None
    )
