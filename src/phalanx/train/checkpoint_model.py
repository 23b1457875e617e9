"""Whether a checkpoint is of the model that a run trains: every size, and every weight by name.

Sizes that change no weight's shape change what a model computes all the same (heads, rope, eps), so
the shape is compared key by key. What is written into the manifest for this is `record`; the tensors
of the optimizer are compared in `checkpoint_holding.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..layout import Shape
from ..parallel import Model
from .checkpoint_manifest import WEIGHT, Manifest

__all__ = ["Identity", "differing_sizes", "own_model", "table_of"]

# Keys of a shape that belong to a run or describe: they may change from start to start.
_FREE = {"name", "source", "batch"}


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
        file = Path(own.rpartition(":")[0])
        source = hashlib.sha256(file.read_bytes()).hexdigest() if own else ""
        return cls(
            shape, {name: tuple(weight.shape) for name, weight in model.weights.items()},
            tuple(name for name, _ in model.pieces), model.tied, dict(model.counts), own, source,
        )  # fmt: skip

    @property
    def record(self) -> dict[str, object]:
        """What the manifest keeps beside the shape and the tensors, as JSON gives it back."""
        said = {
            "pieces": self.pieces, "tied": self.tied, "counts": self.counts,
            "own": self.own, "source": self.source,
        }  # fmt: skip
        found: dict[str, object] = json.loads(json.dumps(said))
        return found

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
        return wrong or self._weights(manifest)

    def _weights(self, manifest: Manifest) -> list[str]:
        there = {each.name: each.shape for each in manifest.tensors if each.kind == WEIGHT}
        wrong = [f"has no weight {name}" for name in self.weights if name not in there]
        wrong += [
            f"has a weight {name[:80]!r}, the model none"
            for name in there
            if name not in self.weights
        ]
        wrong += [
            f"{name} is {list(there[name])}, the model's is {list(shape)}"
            for name, shape in self.weights.items()
            if name in there and there[name] != shape
        ]
        more = f"and {len(wrong) - 5} weights more"
        return wrong if len(wrong) <= 5 else [*wrong[:5], more]

    def notices(self, manifest: Manifest) -> list[str]:
        """What is not known to be another model, and yet not known to be the same."""
        there = _record(manifest)
        own, source = own_model(manifest), str(there.get("source", ""))
        if manifest.progress.shape is None:
            return ["the checkpoint does not tell its model's shape: only weights were compared"]
        if there and own != self.own:
            was = repr(own[:200]) if own else "the built-in one"
            now = repr(self.own) if self.own else "the built-in one"
            return [
                f"the model is {now}, the checkpoint is of {was}: names and sizes are equal, the"
                " code is another"
            ]
        if self.own and source and source != self.source:
            return [
                f"{self.own.rpartition(':')[0]} has changed since the checkpoint was made (sha256"
                f" {self.source[:12]}, was {source[:12]}): names and sizes are equal, see that it"
                " still computes the same"
            ]
        return []


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
    said = asdict(shape)
    return {key: value for key, value in said.items() if key not in plain or plain[key] != value}


def own_model(manifest: Manifest) -> str:
    """FILE.py:Class where a checkpoint is of a user's model, else empty."""
    return str(_record(manifest).get("own", ""))[:1000]


def _record(manifest: Manifest) -> Mapping[str, object]:
    found = manifest.progress.config.get("model")
    return found if isinstance(found, dict) else {}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
