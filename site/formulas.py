"""Cost formulas of pieces, with which a browser without torch prices any model of a
known kind.

A piece is costed for random small sizes, like in `phalanx plan`. Each number of a cost
is a sum of a few products of sizes, found by least squares, rounded to fractions, and
checked against held-out costings. The exception is the temporary bytes, a maximum over
many moments: each moment is fitted, and those that are the maximum for some sizes are
kept.

    python site/formulas.py OUT.json [FAMILY ...]
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from phalanx.cost.live import Live
from phalanx.cost.pieces import cost_kinds
from phalanx.cost.scales import Scales
from phalanx.layout import Layout, Shape, piece_layout
from phalanx.models import loss
from phalanx.parallel import build_model
from phalanx.parallel.kinds import signatures
from phalanx.program import PieceCost

sys.path.insert(0, str(Path(__file__).parent))
from formula import cut_key, features, local, structure

# Settings shared by a family's shapes that differ from a llama's; sizes are random.
_GPT = {
    "norm": "layer", "positions": "learned", "gated": False, "bias": "all", "activation": "gelu",
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tied": True},
    "qwen2": {"bias": "qkv"},
    "qwen2, tied": {"bias": "qkv", "tied": True},
    "qwen3": {"qk_norm": True},
    "qwen3, tied": {"qk_norm": True, "tied": True},
    "olmo2": {"norms": "post", "qk_norm": True, "qk_norm_wide": True},
    "gpt2": _GPT | {"tied": True},
    "gpt": _GPT,
}
CONTEXTS = ("cp2", "cp4", "cp8")  # for llamas only
HELD_OUT, MOST = 8, 400
EACH = 10  # jobs between two lines of progress
# The sizes of `features`; those that each piece's costs depend on: embedding, block, head.
SIZES = "bsuhfagqkvpdct"
LETTERS = ("bsuhvp", "bsuhfagqkd", "bsuhvct")
BLOCK = 1
TEMPORARY = [each.name for each in fields(PieceCost)].index("temporary")


def cuts(family: str) -> Iterator[Layout]:
    """Yield every cut of a piece that the page supports."""
    for schedule in ("accum:1", "pp2 zb-h1:2"):
        for part in ("", "recompute:selective"):
            for context in ("", *(CONTEXTS if family == "llama" else ())):
                for tp in ("", "tp2", "tp2 seq"):
                    words = f"{schedule} {part} {context} {tp} bf16"
                    yield piece_layout(Layout.parse(" ".join(words.split())))


def sample(
    facts: Mapping[str, Any], cut: Layout, rng: random.Random
) -> tuple[Shape, Layout, int]:
    """Return a random shape, cut and number of rows."""
    tp = rng.choice((2, 3, 4)) if cut.tp > 1 else 1
    if tp > 1:
        axes = tuple(
            replace(a, parts=(tp,)) if a.name == "tp" else a
            for a in cut.mesh.axes
        )
        cut = replace(cut, mesh=replace(cut.mesh, axes=axes))
    groups = rng.randint(1, 3) * tp
    sequence = tp * cut.cp * 2 * rng.randint(5, 14)
    shape = Shape(
        "random", 1, hidden=2 * rng.randint(20, 120), heads=groups * rng.randint(2 if cut.cp > 1 else 1, 4),
        kv_heads=groups, head_dim=2 * rng.randint(4, 30), ffn=tp * rng.randint(20, 150),
        vocab=tp * rng.randint(30, 300), sequence=sequence, **facts,
    )  # fmt: skip
    return shape, cut, rng.randint(1, 5)


class Moments:
    """Records the live bytes at each allocation, in the order of a piece's run."""

    def __init__(self) -> None:
        self.now: list[tuple[str, float]] = []

    def __enter__(self) -> list[list[tuple[str, float]]]:
        self.count, runs = Live.count, []
        original = self.count

        def count(live: Live, size: int) -> None:
            original(live, size)
            if not isinstance(live, Scales):
                return
            if not hasattr(live, "moments"):
                live.moments = []  # type: ignore[attr-defined]
                runs.append(live.moments)  # type: ignore[attr-defined]
            if size > 0:
                on = next(
                    (
                        name
                        for name, page in live.pages.items()
                        if page is live.page
                    ),
                    "",
                )
                live.moments.append((on, float(live.now)))  # type: ignore[attr-defined]

        Live.count = count  # type: ignore[method-assign]
        return runs

    def __exit__(self, *_: object) -> None:
        Live.count = self.count  # type: ignore[method-assign]


def flat(value: Any, out: list[float]) -> Any:
    """Return a cost with None for every number; the numbers are appended to `out`."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | int):
        out.append(float(value))
        return None
    if isinstance(value, tuple | list):
        return [flat(each, out) for each in value]
    return [
        flat(getattr(value, name), out) for name in value.__dataclass_fields__
    ]


def filled(template: Any, values: Iterator[Any]) -> Any:
    if isinstance(template, list):
        return [filled(each, values) for each in template]
    return next(values) if template is None else template


def table_of(
    wanted: Sequence[tuple[str, Layout]], run: Callable[..., Any] = map
) -> dict[str, Any]:
    """Return the formulas of families under cuts, with the sizes of the loss's chunks.

    Families share pieces: tied weights change no block, and recomputation inside a
    block changes neither the embedding nor the head. A piece is costed once. `run` is
    `map`, or that of a pool of processes.
    """
    signed = {
        family: signatures(build_model(example(family)))
        for family in dict.fromkeys(family for family, _ in wanted)
    }
    jobs: dict[tuple[str, Layout], list[int]] = {}
    owners: dict[Any, tuple[str, Layout, int]] = {}
    owner_of: dict[tuple[str, Layout, int], tuple[str, Layout, int]] = {}
    for family, cut in wanted:
        plain = replace(cut, recompute="none")
        for n, signature in enumerate(signed[family]):
            piece = (family, cut, n)
            key = signature, cut if n == BLOCK else plain
            owner_of[piece] = owners.setdefault(key, piece)
            if owner_of[piece] == piece:
                jobs.setdefault((family, cut), []).append(n)
    forms = _forms(jobs, run)
    table: dict[str, Any] = {"chunk": loss.LARGE_CHUNK, "tile": loss.LARGE}
    for family, cut in wanted:
        shape = example(family)
        three = [forms[owner_of[family, cut, n]] for n in range(len(LETTERS))]
        table.setdefault(structure(shape), {})[cut_key(shape, cut)] = three
    return table


def _forms(
    jobs: Mapping[tuple[str, Layout], list[int]], run: Callable[..., Any]
) -> dict[tuple[str, Layout, int], Any]:
    """Run the jobs, with a line of progress now and then; return forms by piece."""
    forms: dict[tuple[str, Layout, int], Any] = {}
    # Jobs with a block take longest: first, so that all processes end together.
    ordered = sorted(jobs.items(), key=lambda job: BLOCK not in job[1])
    for done, (job, found) in enumerate(run(fitted, ordered), 1):
        forms |= {(*job, n): form for n, form in found.items()}
        if done % EACH == 0 or done == len(ordered):
            print(f"  {done} of {len(ordered)} jobs", flush=True)
    return forms


def example(family: str) -> Shape:
    """Return a small shape of a family, for what does not depend on sizes."""
    return Shape(
        "example", 1, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=64,
        sequence=32, **FAMILIES[family],
    )  # fmt: skip


def fitted(
    job: tuple[tuple[str, Layout], list[int]],
) -> tuple[tuple[str, Layout], dict[int, Any]]:
    """Return the formulas of some pieces of a family under a cut."""
    (family, cut), pieces = job
    facts, rng = FAMILIES[family], random.Random(f"{family} {cut}")
    used = {n: _used(LETTERS[n], seq=cut.seq) for n in pieces}
    rows: list[list[float]] = []
    numbers: dict[int, list[Any]] = {n: [] for n in pieces}
    temporaries: dict[int, list[Any]] = {n: [] for n in pieces}
    templates: dict[int, Any] = {}
    # Half as many costings again as factors, because some moments do not occur in all
    # of them.
    costings = {n: 3 * used[n].size // 2 + HELD_OUT for n in pieces}
    while len(rows) < max(costings.values()):
        kinds = [n for n in pieces if len(rows) < costings[n]]
        shape, one, batch = sample(facts, cut, rng)
        sizes = _chunk(shape, one, batch, rng)
        with (
            Moments() as runs,
            mock.patch.dict(loss.CHUNK, meta=sizes["chunk"]),
            mock.patch.dict(loss.NUMBERS, meta=sizes["tile"]),
        ):
            (costs,) = cost_kinds(
                build_model(shape), one, (batch,), target="cuda", kinds=kinds
            )
        x = local(shape, one, batch, shape.sequence, sizes)
        rows.append(features(x, seq=cut.seq))
        for n, cost, moments in zip(kinds, costs, runs, strict=True):
            out: list[float] = []
            template = flat(replace(cost, temporary=0.0), out)
            assert templates.setdefault(n, template) == template, (
                "one cut, two orders of operations"
            )
            numbers[n].append(out)
            above = _above(cost, moments, cut.recompute, n)
            assert max(above) == cost.temporary, (family, str(cut), n)
            temporaries[n].append(above)
    many = np.array(list(_many(facts, cut, rng)))
    forms = {}
    for n in pieces:
        at = np.array(rows[: len(numbers[n])])
        where = f"piece {n} of {family} as {cut}"
        values = _solve(at, np.array(numbers[n]), used[n], where)
        row = filled(templates[n], iter(values))
        peaks = _solve(at, np.array(temporaries[n]), used[n], where)
        row[TEMPORARY] = {"max": _highest(peaks, many)}
        forms[n] = row
    return (family, cut), forms


def _above(
    cost: PieceCost, moments: Sequence[tuple[str, float]], mode: str, n: int
) -> list[float]:
    """Return the live bytes of each moment above what the piece keeps there."""
    part = mode == "selective" and n == BLOCK
    base = {
        "weight_gradient": cost.kept_after_i,
        "forward": cost.selected if part else cost.kept,
    }
    return [now - base.get(on, cost.kept) for on, now in moments]


def _used(letters: str, *, seq: bool) -> np.ndarray:
    """Return the numbers of the features that consist of these sizes."""
    sizes = {name: 1.0 if name in letters else math.nan for name in SIZES}
    return np.flatnonzero(np.isfinite(features(sizes, seq=seq)))


def _chunk(
    shape: Shape, cut: Layout, rows: int, rng: random.Random
) -> dict[str, int]:
    """Return the logits that the loss makes at a time, of some tokens or of all, and
    those of a tile, whose softmax it computes at a time."""
    words, tokens = shape.vocab // cut.tp, rows * shape.sequence // cut.cp
    chunk = rng.randint(1, tokens)
    return {"chunk": chunk * words, "tile": rng.randint(1, chunk) * words}


def _solve(
    at: np.ndarray, wanted: np.ndarray, used: np.ndarray, where: str
) -> list[dict[str, Any]]:
    """Return a formula for each column, of the used features, that is exact on held-out
    rows."""
    at, fit = at[:, used], len(at) - HELD_OUT
    scale = np.maximum(np.abs(at[:fit]).max(axis=0), 1.0)
    found, *_ = np.linalg.lstsq(at[:fit] / scale, wanted[:fit], rcond=1e-11)
    factors = found / scale[:, None]
    factors = np.round(factors * 96) / 96
    error = np.abs(at @ factors - wanted).max(axis=0)
    wrong = np.flatnonzero(error > 1e-3)
    assert not wrong.size, f"{where}: no formula for {wrong}"
    return [
        {"f": [[int(used[n]), float(c[n])] for n in np.flatnonzero(c)]}
        for c in factors.T
    ]


def _many(
    facts: Mapping[str, Any], cut: Layout, rng: random.Random
) -> Iterator[list[float]]:
    """Yield the sizes of many models, small and large."""
    for _ in range(MOST):
        x = {"b": float(rng.choice((1, 2, 4, 8)))}
        x["s"] = float(2 ** rng.randint(7, 17))
        tp = float(2 ** rng.randint(0, 4)) if cut.tp > 1 else 1.0
        x["h"], x["d"] = (
            float(2 ** rng.randint(6, 14)),
            float(rng.choice((64, 128))),
        )
        x["u"], x["f"] = x["s"] / tp, x["h"] * rng.choice((2.0, 3.5, 4.0)) / tp
        x["q"] = max(x["d"], x["h"] / tp)
        x["a"] = x["q"] / x["d"]
        x["g"] = max(1.0, x["a"] // rng.choice((1, 4, 8)))
        x["k"], x["v"], x["p"] = (
            x["g"] * x["d"],
            float(2 ** rng.randint(8, 18)) / tp,
            x["s"] * cut.cp,
        )
        tokens = x["b"] * x["s"]
        x["c"] = min(tokens, max(1.0, loss.LARGE_CHUNK // x["v"]))
        x["t"] = min(x["c"], max(1.0, loss.LARGE // x["v"]))
        yield features(x, seq=cut.seq)


def _highest(
    moments: Sequence[dict[str, Any]], many: np.ndarray
) -> list[dict[str, Any]]:
    """Return the moments that are the maximum for any of these sizes."""
    factors = np.zeros((many.shape[1], len(moments)))
    for column, moment in enumerate(moments):
        for n, factor in moment["f"]:
            factors[n, column] = factor
    return [moments[n] for n in sorted(set(np.argmax(many @ factors, axis=1)))]


def main() -> None:
    out, families = Path(sys.argv[1]), sys.argv[2:] or list(FAMILIES)
    wanted = [(family, cut) for family in families for cut in cuts(family)]
    with Pool(2) as pool:
        table = table_of(wanted, pool.imap_unordered)
    out.write_text(json.dumps(table, separators=(",", ":")))
    print(
        f"{out}: {len(wanted)} cuts of {len(families)} families, {out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
