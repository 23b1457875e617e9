"""Whether a checkpoint is of the model that a run trains: every size, and every weight by name.

Sizes that change no weight's shape change what a model computes all the same (heads, rope, eps), so
the shape is compared key by key. What is written into the manifest for this is `record`; the tensors
of the optimizer are compared in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..layout import Shape
from ..layout.source import split_name
from ..parallel import Model
from .checkpoint_manifest import WEIGHT, Manifest

# Keys of a shape that belong to a run or describe: they may change from start to start.
_FREE = {"name", "source", "batch"}
LINES = 5  # of weights that an error names; another model may differ in every one


@dataclass(frozen=True)
class Identity:
    """What makes a model the one that a checkpoint is of. Take it before the model is cut.

    `own` is FILE.py:Class of a user's model, else empty. Its file is hashed: a file that has changed
    is worth a notice, and only another structure is refused.
    """

    shape: Shape
    weights: Mapping[str, tuple[int, ...]]
    pieces: tuple[str, ...]
    tied: tuple[tuple[int, int], ...]
    counts: Mapping[str, int]
    own: str = ""
    source: str = ""

    @classmethod
    def of(cls, model: Model, shape: Shape, own: str = "") -> Identity:
        file = Path(split_name(own)[0])
        source = hashlib.sha256(file.read_bytes()).hexdigest() if own else ""
        return cls(
            shape,
            {name: tuple(weight.shape) for name, weight in model.weights.items()},
            tuple(name for name, _ in model.pieces),
            model.tied,
            dict(model.counts),
            own,
            source,
        )

    @property
    def record(self) -> dict[str, object]:
        """What the manifest keeps beside the shape and the tensors, as JSON gives it back."""
        keys = ("pieces", "tied", "counts", "own", "source")
        record: dict[str, object] = json.loads(json.dumps({k: getattr(self, k) for k in keys}))
        return record

    def differences(self, manifest: Manifest) -> list[str]:
        """Why a checkpoint is of another model: each key with both values, then weights by name.

        A manifest without a shape, or without a record, is compared by what it has: its weights.
        """
        kept = manifest.progress.shape
        wrong = [] if kept is None else differing_sizes(kept, self.shape)
        there, here = _record(manifest), self.record
        wrong += [
            f"{key}: {_short(there[key])} in the checkpoint, {_short(here[key])} in the run"
            for key in ("pieces", "tied", "counts")
            if key in there and there[key] != here[key] and not wrong
        ]
        if wrong:
            return wrong
        wrong = weight_differences(manifest, self.weights)
        wrong += [
            f"has a weight {each.name[:80]!r}, the model none"
            for each in manifest.tensors
            if each.kind == WEIGHT and each.name not in self.weights
        ]
        more = f"and {len(wrong) - LINES} weights more"
        return wrong if len(wrong) <= LINES else [*wrong[:LINES], more]

    def notices(self, manifest: Manifest) -> list[str]:
        """What is not known to be another model, and yet not known to be the same."""
        there = _record(manifest)
        own, source = own_model(manifest), str(there.get("source", ""))
        if manifest.progress.shape is None:
            return ["the checkpoint has no shape of its model: only weights were compared"]
        if there and own != self.own:
            was = repr(own[:200]) if own else "the built-in one"
            now = repr(self.own) if self.own else "the built-in one"
            return [
                f"the model is {now}, the checkpoint is of {was}: names and sizes are equal, the"
                " code is another"
            ]
        if self.own and source and source != self.source:
            return [
                f"{split_name(self.own)[0]} has changed since the checkpoint was made (sha256"
                f" {self.source[:12]}, was {source[:12]}): names and sizes are equal, see that it"
                " still computes the same"
            ]
        return []


def weight_differences(manifest: Manifest, weights: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Which of these weights a checkpoint does not have, or in another shape."""
    there = {each.name: each.shape for each in manifest.tensors if each.kind == WEIGHT}
    return [
        f"{name} is {list(there[name])}, the model's is {list(shape)}"
        if name in there
        else f"has no weight {name}"
        for name, shape in weights.items()
        if there.get(name) != shape
    ]


def differing_sizes(there: Shape, here: Shape) -> list[str]:
    """The keys of a shape in which a checkpoint's and a run's differ, each with both values."""
    free = set(_FREE)
    if "learned" not in (there.positions, here.positions):
        free.add("sequence")  # only learned positions are weights
    old, new = asdict(there), asdict(here)
    return [
        f"{key}: {old[key]} in the checkpoint, {new[key]} in the run"
        for key in old
        if key not in free and old[key] != new[key]
    ]


def table_of(shape: Shape) -> dict[str, Any]:
    """A shape as the table of sizes that a run file's `model` is, without what is by default."""
    plain = {f.name: f.default for f in fields(shape) if f.default is not MISSING}
    return {
        key: value
        for key, value in asdict(shape).items()
        if key not in plain or plain[key] != value
    }


def own_model(manifest: Manifest) -> str:
    """FILE.py:Class where a checkpoint is of a user's model, else empty."""
    return str(_record(manifest).get("own", ""))[:1000]


def _record(manifest: Manifest) -> Mapping[str, object]:
    record = manifest.progress.config.get("model")
    return record if isinstance(record, dict) else {}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
