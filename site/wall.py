"""The verification wall: which layouts of which models agree with one process, over which backends and
how closely; and mistakes put in on purpose, with what finds them.

    python site/wall.py            # measures everything anew into site/wall.json: minutes on two cores
    python site/wall.py shm        # one part of it: threads, bfloat16, transformers, shm, gloo, faults
                                   # or programs

`build.py` makes a page of wall.json. Every number in it comes from a run, with its date and commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.draw import Html, paragraphs, table, tag
from phalanx.layout import Layout, Shape, legal, staged_pieces
from phalanx.layout.cases import SHAPES
from phalanx.layout.choices import COMPARED, DTYPES, FP64, GLOO, SHM, THREADS
from phalanx.program import Program, StepOptions, build, faults

HERE = Path(__file__).parent
FILE = HERE / "wall.json"
Data = Mapping[str, Any]

LAYOUTS = Layout.parse_many(
    "dp2; dp2 zero1; dp2 zero2 accum:3; dp3 zero3; dp2x2 zero2; tp2; tp2 seq; tp4; cp2; cp2:ulysses; cp4:2x2;"
    " pp4 gpipe:3; pp2 1f1b:3; pp2 interleaved2:3; pp2 zb-h1:3; pp2 zb-h2:3; pp2 zb-v:3; pp2 dualpipe-v:3;"
    " ep2; dp2 ep2 overlap accum:3; dp2 recompute:all; tp2 recompute:selective; dp2 offload:activations;"
    " dp2 tp2 seq zero3; pp2 cp2 1f1b:3 recompute:all; pp2 ep2 1f1b:3; dp2 pp2 tp2 seq zero1 1f1b:3;"
    " dp2 cp2 tp2 zero3"
)
# The small models of `phalanx verify`, by the family whose parts they have.
MODELS = {
    "gqa": "Llama", "gpt": "GPT-2", "qwen": "Qwen 2 and 3", "gemma": "Gemma 2 and 3", "olmo": "OLMo 2",
    "experts": "experts", "latent": "DeepSeek-V3", "odd": "odd widths", "mlp": "MLP",
}  # fmt: skip
_FOUR = ("gqa", "gpt", "experts", "latent")  # over processes, which take seconds to start
_BF16 = "bfloat16"
# Parts of the wall that compare layouts: their backend, dtype and models.
COMPARISONS: dict[str, tuple[str, str, Iterable[str]]] = {
    THREADS: (THREADS, DTYPES[FP64].torch, MODELS),
    _BF16: (THREADS, _BF16, MODELS),
    SHM: (SHM, DTYPES[FP64].torch, _FOUR),
    GLOO: (GLOO, DTYPES[FP64].torch, _FOUR),
}
OWN_CODE = "transformers"

MISTAKES = tomllib.loads((HERE / "mistakes.toml").read_text(encoding="utf-8"))


# ---- measured


def compared(part: str) -> Data:
    """Every layout that fits against one process, over a backend."""
    from phalanx.verify import verify

    backend, dtype, models = COMPARISONS[part]
    cells: dict[str, dict[str, Any]] = {str(layout): {} for layout in LAYOUTS}
    for model in models:
        shape = SHAPES[model]
        for layout in LAYOUTS:
            if broken := legal(layout, shape):
                cells[str(layout)][model] = {"none": broken[0].what}
        fit = [layout for layout in LAYOUTS if model not in cells[str(layout)]]
        chosen = [x if dtype == _BF16 else replace(x, precision=COMPARED[dtype]) for x in fit]
        rows = {str(x): str(layout) for x, layout in zip(chosen, fit, strict=True)}
        for verdict in verify(shape, chosen, backend=backend, dtype=dtype):
            cells[rows[verdict.layout]][model] = _cell(verdict)
        print(part, model, flush=True)
    return _made() | {"backend": backend, "dtype": dtype, "models": [*models], "cells": cells}


def own_code() -> Data:
    """Decoders in transformers' own code, over threads."""
    import families
    from phalanx.parallel import fitting
    from phalanx.verify import verify

    rows = Layout.parse_many(families.FEW)
    cells: dict[str, dict[str, Any]] = {str(layout): {} for layout in rows}
    names = []
    for name in families.FAMILIES:
        if not families.described(name)[0]:
            continue
        names.append(name)
        model = families.load(name)
        assert model.shape is not None
        fit = fitting(model, rows)
        for layout in rows:
            if layout not in fit:
                cells[str(layout)][name] = {"none": "refused for this family"}
        exact = {str(replace(x, precision=FP64)): str(x) for x in fit}
        found = verify(
            replace(model.shape, batch=7, sequence=12), map(Layout.parse, exact), steps=2,
            make=partial(families.load, name),
        )  # fmt: skip
        for verdict in found:
            cells[exact[verdict.layout]][name] = _cell(verdict)
        print(OWN_CODE, name, flush=True)
    dtype = DTYPES[FP64].torch
    return _made() | {"backend": THREADS, "dtype": dtype, "models": names, "cells": cells}


def _cell(verdict: Any) -> Data:
    cell = {"error": verdict.max_rel_error, "allowed": verdict.of_allowed}
    return cell if verdict.passed else cell | {"differs": verdict.first_difference}


def seeded_faults() -> Data:
    """Each mistake in the engine: what `verify` says, what `check --sums` says, how far losses are off."""
    from phalanx.parallel import build_model
    from phalanx.verify.placement import placement_faults
    from seeded import FAULTS, catch

    rows = []
    for fault in FAULTS:
        caught = catch(fault, fault.dtypes[0])
        with fault.patch():
            try:
                sums = placement_faults(partial(build_model, SHAPES[fault.shape]), fault.layout)
            except (
                Exception
            ) as error:  # a mistake may end a rank's list half way: that is found, too
                sums = (f"{type(error).__name__}: {error}".partition("\n")[0],)
        rows.append(
            {
                "fault": fault.name, "model": fault.shape, "layout": str(fault.layout),
                "dtype": fault.dtypes[0], "verify": caught.first_difference,
                "sums": sums[0] if sums else "",
                "loss": [caught.first_loss_error, caught.loss_error],
            }
        )  # fmt: skip
        print(fault.name, flush=True)
    return _made() | {"rows": rows}


def changed_programs() -> Data:
    """Each mistake in a step's list: what `check` says."""
    rows = []
    for mistake in MISTAKES["program"]:
        text = program_text(mistake["model"], mistake["layout"])
        for old, new in mistake["edits"]:
            assert text.count(old) == 1, (mistake["fault"], old, text)
            text = text.replace(old, new)
        rows.append(mistake | {"check": faults(Program.parse(text, mistake["fault"]))[:1]})
    return _made() | {"rows": rows}


def program_text(model: str, layout: str) -> str:
    where, shape = Layout.parse(layout), SHAPES.get(model) or Shape.load(model)
    return str(build(where, staged_pieces(where, shape), StepOptions(agree=False)))


def _made() -> dict[str, Any]:
    """When, from what, and on what."""
    import time

    import torch

    log = ["git", "log", "-1", "--format=%h"]
    commit = subprocess.run(log, cwd=HERE, capture_output=True, text=True, check=True).stdout
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit.strip(),
        "on": f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}",
    }  # fmt: skip


# ---- shown


def page(data: Data) -> list[Html]:
    """The parts of the wall's page."""
    parts = [
        paragraphs(
            [
                "Each cell is a layout that trained three steps beside one process on the same weights"
                " and batches: the largest relative difference of any output, loss, gradient, norm or"
                " weight. In float64 1e-10 is allowed. In bfloat16 each tensor has a bound of its own,"
                " from what a unit in the last place changes; there the cell is the share of it that"
                " was used. A dash: the layout does not fit that model.",
            ]
        )
    ]
    for part, title in (
        (THREADS, "Ranks are threads, float64"),
        (_BF16, "Ranks are threads, bfloat16: share of what is allowed"),
        (SHM, "Ranks are processes over shared memory, float64"),
        (GLOO, "Ranks are processes over gloo, float64"),
        (OWN_CODE, "Decoders of Hugging Face in transformers' own code, float64"),
    ):
        parts += [tag("h2", title), _matrix(part, data[part])]
    parts += [tag("h2", "Mistakes reported elsewhere"), *_reported(data)]
    parts += [tag("h2", "Mistakes in a step's list"), *_programs(data["programs"])]
    parts += [tag("h2", "Mistakes in the engine"), *_faults(data["faults"])]
    return parts


def command(part: str, data: Data, model: str, layouts: Iterable[str]) -> str:
    """What reproduces some cells of a column."""
    if part == OWN_CODE:
        return f"python benchmarks/families.py {model}"
    dtype = f" --dtype {data['dtype']}" if part == _BF16 else ""
    backend = f" --backend {data['backend']}" if data["backend"] != THREADS else ""
    return f'phalanx verify --model {model}{backend}{dtype} --layouts "{"; ".join(layouts)}"'


def _matrix(part: str, data: Data) -> Html:
    models, cells = data["models"], data["cells"]
    head = [tag("span", MODELS.get(m, m), title=m) for m in models]
    rows = []
    for layout, row in cells.items():
        shown = [_shown(part, data, layout, m, row[m]) for m in models]
        if any(cell != NONE for cell in shown):
            rows.append((tag("code", layout), *shown))
    made = f"{data['date']}, commit {data['commit']}, {data['on']}."
    ran = [(m, [x for x, row in cells.items() if "error" in row[m]]) for m in models]
    lines = "\n".join(command(part, data, m, layouts) for m, layouts in ran)
    again = tag("details", tag("summary", "Commands, one for each column"), tag("pre", lines))
    return Html(table(("layout", *head), rows, caption=made) + again)


NONE = "–"


def _shown(part: str, data: Data, layout: str, model: str, cell: Data) -> Html | str:
    if "none" in cell:
        return NONE
    again = command(part, data, model, [layout])
    if "differs" in cell:
        return tag("span", "differs", title=f"{cell['differs']}\n{again}", cls="bad")
    value = f"{cell['allowed']:.2f}" if part == _BF16 else f"{cell['error']:.0e}"
    return tag("span", value, title=f"{data['date']}: {again}")


def _reported(data: Data) -> Iterable[Html]:
    seeded = {row["fault"]: row for row in data["faults"]["rows"]}
    listed = {row["fault"]: row for row in data["programs"]["rows"]}
    rows = []
    for mistake in MISTAKES["reported"]:
        kind = mistake["what"], mistake.get("by", "several")
        for number, name in enumerate(mistake.get("seeded", ())):
            first = ("", "") if number else kind
            if name in listed:
                rows.append((*first, name, "", _first(listed[name]["check"][0])))
            else:
                row = seeded[name]
                rows.append((*first, name, _first(row["verify"]), _first(row["sums"])))
        if "why" in mistake:
            rows.append((*kind, mistake["why"], "nothing", "nothing"))
    yield paragraphs(
        [
            "Kinds of mistakes that other frameworks had or have, each seeded here in phalanx's own code;"
            " none is a copy of theirs. Numbers are those of their issues and pull requests."
        ]
    )
    head = ("mistake", "reported as", "seeded here as", "verify says", "check says")
    yield table(head, rows, left=True)


def _programs(data: Data) -> Iterable[Html]:
    yield paragraphs(
        [f"The text of a step, changed as sed would. {data['date']}, {data['commit']}."]
    )
    rows = []
    for row in data["rows"]:
        edits = " ".join(f"-e 's/{old}/{new}/'" for old, new in row["edits"])
        again = f'phalanx draw "{row["layout"]}" --model {row["model"]} --out step.txt'
        again += f"\nsed -i {edits} step.txt\nphalanx check step.txt"
        shown = tag("details", tag("summary", "commands"), tag("pre", again))
        rows.append((row["fault"], _first(row["check"][0]) if row["check"] else "nothing", shown))
    yield table(("mistake", "check says", ""), rows, left=True)


def _faults(data: Data) -> Iterable[Html]:
    rows = []
    for row in data["rows"]:
        dtype = "" if row["dtype"] == DTYPES[FP64].torch else f" {row['dtype']}"
        found = _first(row["verify"]) or tag("b", "nothing", cls="bad")
        layout = tag("code", row["layout"] + dtype)
        loss = f"{row['loss'][0]:.0e}, {row['loss'][1]:.0e}"
        rows.append((row["fault"], layout, found, _first(row["sums"]) or NONE, loss))
    caught, sums = (sum(bool(row[key]) for row in data["rows"]) for key in ("verify", "sums"))
    blind = sum(max(row["loss"]) < 1e-3 for row in data["rows"])
    yield paragraphs(
        [
            f"Each was put into the code, and its layout trained: verify finds {caught} of {len(rows)},"
            f" check --sums {sums} without running a step. With {blind} of them the losses of three"
            f" steps agree with the right ones to 1e-3. {data['date']}, {data['commit']}.",
            "PYTHONPATH=tests python -m seeded 'WORDS OF ITS NAME' reproduces one, make faults all.",
        ]
    )
    head = ("mistake", "layout", "verify says", "check --sums says", "loss off, 1 and 3 steps")
    yield table(head, rows, left=True)


def _first(text: str) -> str:
    """What is wrong where, without the numbers."""
    return text.split(" is ")[0] if text.startswith("step ") else text


def main() -> None:
    sys.path += [str(HERE.parent / folder) for folder in ("tests", "benchmarks")]
    parts: dict[str, Any] = {name: partial(compared, name) for name in COMPARISONS}
    parts |= {OWN_CODE: own_code, "faults": seeded_faults, "programs": changed_programs}
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or parts:
        data[name] = parts[name]()
        FILE.write_text(json.dumps(data, indent=0, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
