"""Caches costs of pieces on disk, so that later plans start without torch.

JSON under `$XDG_CACHE_HOME/phalanx/costs`: one file for each model and sequence length,
with every cut that was asked for. The file's name is a hash of everything that a
piece's cost depends on, including the source of the code that costing runs. A damaged
file is rewritten. A file that cannot be written is skipped.

Costs of named sizes come with the package (`shipped.py`) and are taken from there first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, fields, replace
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layout import Layout, PieceRow, Shape, one_block_of_each, piece_layout
from ..layout.families import code_of
from ..layout.kinds import BlockPart
from ..layout.pieces import WeightRow
from ..layout.source import arguments_text, imported_sources
from ..program import (
    AttentionLoad,
    CostedPiece,
    Load,
    MessageLoad,
    PieceCost,
    PieceKinds,
    Product,
    at_rows,
)
from .shipped import shipped_costs

if TYPE_CHECKING:  # it needs torch
    from .pieces import Found

_LOG = logging.getLogger(__name__)
_FORMAT = 5
# Rows at which temporary bytes are costed in addition to 1 and 2. A microbatch is
# seldom larger.
_MORE_ROWS = (4, 8, 16)
_SOURCE = Path(__file__).parents[1]
_FILES = "comm/regions.py comm/tally.py layout/kinds.py layout/pieces.py layout/rules.py program/load.py"
_RUN = ("models/*.py", "parallel/*.py", "cost/*.py", *_FILES.split())


def cached_costs(
    model: Shape | str,
    layouts: Iterable[Layout],
    *,
    sequence: int = 0,
    target: str = "cuda",
    place: Path | None = None,
    shipped: bool = True,
) -> dict[Layout, PieceKinds]:
    """The costs of a model's pieces for each layout's cut, cached if possible.

    `model` is a shape, or `FILE.py:Class` for a custom model. The keys are
    `piece_layout(layout)`. Without `shipped`, costs that come with the package are not used.
    """
    # Layouts that differ in dp, pp or ZeRO alone have one cut.
    cuts = list(dict.fromkeys(map(piece_layout, layouts)))
    ours = {}
    if shipped and isinstance(model, Shape):
        sizes = cost_identity(model, sequence, target)
        ours = shipped_costs(model.name, sizes, code_digest())
    unknown = [cut for cut in cuts if str(cut) not in ours]
    known = dict(ours)
    if unknown:
        _LOG.debug("%d of %d cuts are not shipped", len(unknown), len(cuts))
        file = cost_file(model, sequence, target, place)
        known |= _completed(file, model, unknown, sequence, target)
    return {cut: _pieces(model, known[str(cut)]) for cut in cuts}


def cost_file(
    model: Shape | str, sequence: int, target: str, place: Path | None = None
) -> Path:
    """The cache file of a model, at a sequence length, for a target."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = place or Path(base, "phalanx", "costs")
    return folder / f"{_key(model, sequence, target)}.json"


def _completed(
    file: Path,
    model: Shape | str,
    cuts: Sequence[Layout],
    sequence: int,
    target: str,
) -> dict[str, Any]:
    """The contents of a cache file, after costing the cuts that it lacks."""
    # One file for all cuts of a model, so a search reads the disk once.
    known = _read(file)
    missing = [cut for cut in cuts if str(cut) not in known]
    _LOG.debug("%s lacks %d of %d cuts", file, len(missing), len(cuts))
    # What is missing is costed together: equal outputs are computed once.
    if missing:
        known |= costed_cuts(model, missing, sequence, target)
        _write(file, known)
    return known


# ---- the key of a file


def _key(model: Shape | str, sequence: int, target: str) -> str:
    """A hash of everything that the cuts in one file have in common."""
    key = cost_identity(model, sequence, target) | {"source": _source()}
    return hashlib.sha256(
        json.dumps(key, sort_keys=True).encode()
    ).hexdigest()[:32]


def cost_identity(
    model: Shape | str, sequence: int, target: str
) -> dict[str, Any]:
    """The facts that determine a model's costs, besides the code that computes them."""
    if isinstance(model, Shape):
        # Costs are of one block of each kind, so models of other depths share a file.
        sizes = asdict(
            replace(one_block_of_each(model)[0], name="", batch=1, source="")
        )
        if model.positions == "rope":
            # RoPE: the shape's sequence is only the default of the argument
            sizes["sequence"] = 0
        key = {"shape": sizes, "sequence": sequence or model.sequence}
    else:
        # A user's file, and every module that it imports.
        path, name = code_of(model)
        text = Path(path).read_text() if Path(path).is_file() else path
        called = f"{name}({arguments_text(model)})"
        key = {"file": text, "class": called, "sequence": sequence}
        for module, source in imported_sources(path).items():
            with suppress(OSError):
                key[f"module {module}"] = hashlib.sha256(
                    source.read_bytes()
                ).hexdigest()
    return key | {"target": target}


@cache
def code_digest() -> str:
    """A hash of our code that costing runs."""
    digest = hashlib.sha256(str(_FORMAT).encode())
    # A change to any of these files may change a cost.
    for pattern in _RUN:
        paths = sorted(_SOURCE.glob(pattern))
        assert paths, (
            f"{pattern} matches no file: changed code would read stale costs"
        )
        for path in paths:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _source() -> str:
    """A hash of the code that costing runs, ours and torch's."""
    digest = hashlib.sha256(code_digest().encode())
    with suppress(PackageNotFoundError):  # costs remain valid without torch
        digest.update(version("torch").encode())  # read, not imported
    return digest.hexdigest()


# ---- costing what is missing


def costed_cuts(
    model: Shape | str, cuts: Sequence[Layout], sequence: int, target: str
) -> dict[str, Any]:
    """The costs of these cuts as the file stores them.

    For each piece its kind. For each kind the costs of its parts with 1 row and 2 rows,
    and the temporary bytes with each of `_MORE_ROWS`.
    """
    from ..parallel import build_model, load_model
    from ..parallel.block_parts import cut_blocks
    from ..parallel.kinds import alike
    from ..parallel.rows import model_rows
    from .pieces import cost_kinds

    few = one_block_of_each(model)[0] if isinstance(model, Shape) else None
    made = build_model(few) if few else load_model(str(model))
    kinds = alike(made)
    found = _found(_key(model, sequence, target))
    entries = {}
    for cut in cuts:
        all_rows = cost_kinds(
            made,
            cut,
            (1, 2, *_MORE_ROWS),
            sequence=sequence,
            target=target,
            found=found,
        )
        costs = [
            [astuple(one), astuple(two), [each.temporary for each in more]]
            for one, two, *more in zip(*all_rows, strict=True)
        ]
        # A block may be three pieces here; `kinds` are those of whole blocks.
        rows = model_rows(made, cut)
        # the costs of the parts of each piece
        parts: dict[int, list[int]] = {}
        for row, cost in zip(rows, alike(cut_blocks(made, cut)), strict=True):
            parts.setdefault(row.piece, []).append(cost)
        of_kinds = [parts[kinds.index(kind)] for kind in range(max(kinds) + 1)]
        entries[str(cut)] = {"costs": costs, "parts": of_kinds, "kinds": kinds}
        if not few:
            entries[str(cut)] |= _written_rows(rows)
    return entries


@lru_cache(maxsize=1)  # a search costs many cuts of one model, call by call
def _found(key: str) -> Found:
    """The costs of pieces found in this process for the model of one cache file."""
    from .pieces import Found

    return Found()


def _pieces(model: Shape | str, entry: Mapping[str, Any]) -> PieceKinds:
    costs = [
        _at(cost_of_row(one), cost_of_row(two), tuple(map(float, more)))
        for one, two, more in entry["costs"]
    ]
    parts = (tuple(costs[cost] for cost in each) for each in entry["parts"])
    kinds: Sequence[int] = entry["kinds"]
    rows: tuple[PieceRow, ...] = ()
    if isinstance(model, Shape):
        # From one block of each kind to the pieces of the whole model.
        kinds = [kinds[piece] for piece in one_block_of_each(model)[1]]
    else:
        rows = _read_rows(entry)
    return PieceKinds(tuple(map(CostedPiece, parts)), tuple(kinds), rows)


def _at(
    one: PieceCost, two: PieceCost, more: tuple[float, ...]
) -> Callable[[float], PieceCost]:
    """The cost of a piece as a function of rows.

    All numbers are linear in rows except the temporary peak, which is read between the
    rows at which it was costed. It is the maximum of several lines, one for each
    moment, and a chord is never below it. In the head one of the lines ends at the rows
    that fill a chunk of logits; there a chord is too low by a part of one chunk.
    """
    line = at_rows(one, two)
    costed_at = (2, *_MORE_ROWS)
    temporary = (two.temporary, *more)

    @cache  # a search asks for few different numbers of rows, but often
    def costed(rows: float) -> PieceCost:
        cost = line(rows)
        if rows <= 2:
            return cost
        return replace(cost, temporary=_read_at(rows, costed_at, temporary))

    return costed


def _read_at(
    rows: float, known: Sequence[int], values: Sequence[float]
) -> float:
    """The value at some rows, on the line through the values on both sides.

    Beyond the last known rows it follows the last line.
    """
    last = len(known) - 1
    right = min(bisect_left(known, rows), last)
    left = right - 1
    slope = (values[right] - values[left]) / (known[right] - known[left])
    return values[right] + slope * (rows - known[right])


# ---- values as JSON


def _written_rows(rows: Sequence[PieceRow]) -> dict[str, Any]:
    """The rows of a program, with the weights of each kind of row stored once."""
    weights = {
        str(row.kind): [astuple(weight) for weight in row.weights]
        for row in rows
    }
    return {
        "rows": [astuple(replace(row, weights=())) for row in rows],
        "weights": weights,
    }


def _read_rows(entry: Mapping[str, Any]) -> tuple[PieceRow, ...]:
    weights = {
        kind: tuple(map(_weight, each))
        for kind, each in entry["weights"].items()
    }
    names = [each.name for each in fields(PieceRow)]

    def row(values: Sequence[Any]) -> PieceRow:
        given = dict(zip(names, values, strict=True))
        # JSON has lists where rows have tuples.
        lists = {
            name: tuple(given[name]) for name in ("uses", "takes", "gives")
        }
        part, tied = (
            BlockPart(given["part"]),
            tuple(map(_weight, given["tied"])),
        )
        own = weights[str(given["kind"])]
        return PieceRow(
            **given | lists | {"part": part, "tied": tied, "weights": own}
        )

    return tuple(map(row, entry["rows"]))


def _weight(row: Sequence[Any]) -> WeightRow:
    name, dims, shape, granule, trained, matrices, narrow = row
    sides = tuple((rows, columns) for rows, columns in matrices)
    return WeightRow(
        name, tuple(dims), tuple(shape), tuple(granule), trained, sides, narrow
    )


def cost_of_row(row: Sequence[Any]) -> PieceCost:
    """The cost from the list of its fields."""
    # The first four fields are loads, the others numbers.
    loads, numbers = row[:4], row[4:]
    forward, into_input, into_weights, recompute = map(_load, loads)
    return PieceCost(
        forward, into_input, into_weights, recompute, *map(float, numbers)
    )


def _load(row: Sequence[Any]) -> Load:
    products, attention, moved, launches, messages = row
    return Load(
        tuple(Product(*x) for x in products),
        tuple(AttentionLoad(*x) for x in attention),
        moved,
        launches,
        tuple(MessageLoad(*x) for x in messages),
    )


def _read(file: Path) -> dict[str, Any]:
    """The contents of a cache file; empty if it is missing or incomplete."""
    try:
        state = _state(file.stat())
        if file not in _SEEN or _SEEN[file][0] != state:
            _remember(file, state, _parsed(file))
        return dict(_SEEN[file][1])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


# A file's time and size in bytes: a file in another state is read again.
_State = tuple[int, int]
# Contents of the files read or written last. A search costs cut after cut, and each one
# is added to a file that grows.
_SEEN: dict[Path, tuple[_State, dict[str, Any]]] = {}
_MOST_SEEN = 4


def _state(found: os.stat_result) -> _State:
    return found.st_mtime_ns, found.st_size


def _remember(file: Path, state: _State, known: Mapping[str, Any]) -> None:
    _SEEN.pop(file, None)
    if len(_SEEN) == _MOST_SEEN:
        oldest = next(iter(_SEEN))
        del _SEEN[oldest]
    _SEEN[file] = state, dict(known)


def _parsed(file: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(file.read_bytes())
    # Converted once and thrown away: a damaged file shows here.
    for entry in known.values():
        for one, two, more in entry["costs"]:
            cost_of_row(one), cost_of_row(two), tuple(map(float, more))
        tuple(map(int, sum(entry["parts"], entry["kinds"])))
        if "rows" in entry:
            _read_rows(entry)
    return known


def _write(file: Path, known: Mapping[str, Any]) -> None:
    with suppress(OSError):  # an unwritable place only means costing again
        file.parent.mkdir(parents=True, exist_ok=True)
        # A temporary file and a rename: a reader never sees half a file.
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        # `json.dumps` encodes in C, `json.dump` in Python.
        text = json.dumps(known, separators=(",", ":"))
        with os.fdopen(handle, "w") as out:
            out.write(text)
            out.flush()
            state = _state(os.fstat(out.fileno()))
        os.replace(name, file)
        _remember(file, state, known)
