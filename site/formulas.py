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
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
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
EACH = 20  # cuts between two lines of progress
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


def fitted(job: tuple[str, Layout]) -> tuple[str, str, list[Any]]:
    """Return the formulas of the three pieces of a family under a cut."""
    family, cut = job
    facts, rng = FAMILIES[family], random.Random(f"{family} {cut}")
    rows, numbers, temporaries = [], [[], [], []], [[], [], []]
    templates: list[Any] = [None] * 3
    # Half as many models again as factors, because some moments do not occur in all of
    # them.
    count = len(features(dict.fromkeys("bsuhfagqkvdpct", 1.0), seq=cut.seq))
    for _ in range(3 * count // 2 + HELD_OUT):
        shape, one, batch = sample(facts, cut, rng)
        sizes = _chunk(shape, one, batch, rng)
        with (
            Moments() as runs,
            mock.patch.dict(loss.CHUNK, meta=sizes["chunk"]),
            mock.patch.dict(loss.NUMBERS, meta=sizes["tile"]),
        ):
            (costs,) = cost_kinds(
                build_model(shape), one, (batch,), target="cuda"
            )
        assert len(costs) == len(runs) == 3
        rows.append(
            features(
                local(shape, one, batch, shape.sequence, sizes), seq=cut.seq
            )
        )
        for n, (cost, moments) in enumerate(zip(costs, runs, strict=True)):
            out: list[float] = []
            template = flat(replace(cost, temporary=0.0), out)
            assert templates[n] in (None, template), (
                "one cut, two orders of operations"
            )
            templates[n] = template
            numbers[n].append(out)
            part = cut.recompute == "selective" and n == 1
            base = {
                "weight_gradient": cost.kept_after_i,
                "forward": cost.selected if part else cost.kept,
            }
            above = [now - base.get(on, cost.kept) for on, now in moments]
            assert max(above) == cost.temporary, (family, str(cut), n)
            temporaries[n].append(above)
    forms = []
    at = np.array(rows)
    many = np.array(list(_many(facts, cut, rng)))
    for n in range(3):
        formulas = iter(_solve(at, np.array(numbers[n])))
        row = filled(templates[n], formulas)
        row[TEMPORARY] = {
            "max": _highest(_solve(at, np.array(temporaries[n])), many)
        }
        forms.append(row)
    return structure(shape), cut_key(shape, cut), forms


def _chunk(
    shape: Shape, cut: Layout, rows: int, rng: random.Random
) -> dict[str, int]:
    """Return the logits that the loss makes at a time, of some tokens or of all, and
    those of a tile, whose softmax it computes at a time."""
    words, tokens = shape.vocab // cut.tp, rows * shape.sequence // cut.cp
    chunk = rng.randint(1, tokens)
    return {"chunk": chunk * words, "tile": rng.randint(1, chunk) * words}


def _solve(at: np.ndarray, wanted: np.ndarray) -> list[dict[str, Any]]:
    """Return a formula for each column that is exact on held-out rows."""
    fit = len(at) - HELD_OUT
    scale = np.maximum(np.abs(at[:fit]).max(axis=0), 1.0)
    found, *_ = np.linalg.lstsq(at[:fit] / scale, wanted[:fit], rcond=1e-11)
    factors = found / scale[:, None]
    factors = np.round(factors * 96) / 96
    error = np.abs(at @ factors - wanted).max(axis=0)
    assert error.max() < 1e-3, f"no formula for {np.flatnonzero(error > 1e-3)}"
    return [
        {"f": [[int(n), float(c[n])] for n in np.flatnonzero(c)]}
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
    jobs = [(family, cut) for family in families for cut in cuts(family)]
    table: dict[str, Any] = {
        "chunk": loss.LARGE_CHUNK,
        "tile": loss.LARGE,
    }
    with Pool(2) as pool:
        made = pool.imap_unordered(fitted, jobs)
        for number, (kind, cut, forms) in enumerate(made, 1):
            table.setdefault(kind, {})[cut] = forms
            if number % EACH == 0 or number == len(jobs):
                print(f"  {number} of {len(jobs)} cuts", flush=True)
    out.write_text(json.dumps(table, separators=(",", ":")))
    print(
        f"{out}: {len(jobs)} cuts of {len(families)} families, {out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
