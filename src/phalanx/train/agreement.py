"""What all ranks of a run have in common, as facts that are compared before it begins.

Every key of the run is one of them, and its files by their contents: a model's source, its data, a
machine file, a schedule. Two keys are paths that may differ from host to host: `data` and `machine`,
where only what lies there counts. `out` and `checkpoint.dir` are compared as absolute paths: ranks
write one checkpoint together, so all need the same folder on a file system that they share.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.join import versions
from ..layout import Layout, Shape
from ..layout.families import code_of
from ..layout.run import Run
from ..layout.source import split_name
from ..parallel import Model
from ..program import Program
from .data.batches import Batches

BLOCK = 1 << 16
DIGITS = 16  # of a checksum that are compared and shown
BLOCKS = 1024  # of an array that are read at most, evenly over it: 64 MiB


def facts_of(
    run: Run, layout: Layout, shape: Shape, batches: Batches, model: Model, program: Program | None
) -> dict[str, str]:
    """Everything that the ranks of a run must have alike, by name."""
    table, sizes = asdict(run), asdict(shape)
    for name in ("model", "data", "machine"):
        del table[name]
    for name in ("batch", "sequence"):
        del sizes[name]
    table["out"] = os.path.abspath(run.out)
    if run.checkpoint.dir:
        table["checkpoint"]["dir"] = os.path.abspath(run.checkpoint.dir)
    keys = {name: str(value) for name, value in flat(table | {"model": sizes})}
    keys |= {"layout": str(layout), "batch": str(shape.batch), "sequence": str(run.tokens(shape))}
    weights = [f"{n} {list(w.shape)} {w.dtype}" for n, w in model.weights.items()]
    return {
        **keys,
        **versions(),
        "model file": _file(code_of(run.own)[0]),
        "model class": code_of(run.own)[1],
        "model's weights": _checksum("\n".join(weights)),
        "schedule file": _file(split_name(layout.schedule)[0]),
        "machine file": _file(run.machine),
        "data": _data_checksum(batches),
        # With recompute:fit ranks first settle how much memory there is.
        "program": _checksum(str(program)) if program else "",
    }


def _data_checksum(batches: Batches) -> str:
    """A checksum of the tokens and documents of all corpora. Of more than 64 MiB in one file it covers
    64 MiB in 1,024 blocks, evenly spread, so that terabytes do not delay a start."""
    marks = [f"{corpus.vocab} {corpus.fingerprint} {corpus.weight}" for corpus in batches.corpora]
    digest = hashlib.sha256(" ".join(marks).encode())
    for stream in (x for corpus in batches.corpora for x in (corpus.train, corpus.validation)):
        for array in (stream.tokens, stream.starts, stream.origins, stream.answers):
            if array is not None:
                digest.update(f"{array.dtype} {array.size}".encode())
                each = BLOCK // array.itemsize
                count = -(-array.size // each)
                for block in np.linspace(0, count - 1, min(count, BLOCKS)).astype(int):
                    digest.update(array[block * each : (block + 1) * each].tobytes())
    return digest.hexdigest()[:DIGITS]


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table and of those in it, by dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _file(path: str) -> str:
    return _checksum(Path(path).read_bytes()) if path else ""


def _checksum(content: str | bytes) -> str:
    raw = content.encode("utf-8", "replace") if isinstance(content, str) else content
    return hashlib.sha256(raw).hexdigest()[:DIGITS]
