"""Costs of named model sizes that come with the package.

A first plan of such a size needs neither torch nor a cache. Each file holds the cuts
that searches on usual clusters ask for, the sizes they were costed for, and a digest of the
code that costed them. Other sizes under the same name, sequence lengths and cuts are costed
as usual; so is everything after a change of this code.
`benchmarks/ship_costs.py` writes the files, and `tests/cost/test_shipped.py` compares them
with costs computed anew.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..layout import Shape

FOLDER = Path(__file__).parent / "named"


def shipped_file(name: str, sequence: int) -> Path:
    """The file of a named size at a sequence length."""
    return FOLDER / f"{name}-{sequence}.json.gz"


def shipped_costs(
    name: str, identity: Mapping[str, Any], code: str
) -> dict[str, Any]:
    """The shipped entries of a size, by cut; none if it was costed with other sizes or by other code."""
    sequence = identity["sequence"]
    # A name that is a path is not one of ours.
    if not name or Path(name).name != name:
        return {}
    file = shipped_file(name, sequence)
    if not file.is_file():
        return {}
    held = read_shipped(file)
    if held.get("code") != code:
        return {}
    cuts: dict[str, Any] = held["cuts"]
    # A user's shape may have the name of one of ours.
    same = same_costs(held["identity"], as_json(identity))
    return cuts if same else {}


def same_costs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two identities, as JSON, differ in no size.

    A size that was added to `Shape` since a file was written has its default there.
    """
    return _beside_defaults(one) == _beside_defaults(other)


def _beside_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without the sizes that have their default."""
    defaults = {
        each.name: as_json(each.default)
        for each in fields(Shape)
        if each.default is not MISSING
    }
    sizes = {
        name: value
        for name, value in identity["shape"].items()
        if name not in defaults or value != defaults[name]
    }
    return {**identity, "shape": sizes}


@lru_cache(maxsize=4)  # a search asks for many cuts, one after the other
def read_shipped(file: Path) -> dict[str, Any]:
    """The contents of a shipped file: `identity`, `code`, and the entry of each cut in `cuts`."""
    held: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return held


def as_json(value: Any) -> Any:
    """A value as it is read back from JSON: tuples become lists."""
    return json.loads(json.dumps(value, sort_keys=True))


def write_shipped(
    name: str,
    identity: Mapping[str, Any],
    code: str,
    cuts: Mapping[str, Any],
) -> Path:
    """Write a size's entries. The same costs by the same code give the same bytes."""
    file = shipped_file(name, identity["sequence"])
    held = {
        "identity": as_json(identity),
        "code": code,
        "cuts": dict(cuts),
    }
    text = json.dumps(held, sort_keys=True, separators=(",", ":"))
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), mtime=0))
    return file
