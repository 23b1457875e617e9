"""Verification wall: agreement of layouts with one process, and detection of seeded
faults.

    python site/wall.py            # measures everything into site/wall.json: an hour on two cores
    python site/wall.py shm        # one part of it: threads, bfloat16, transformers, shm, gloo, faults
                                   # or programs

It shows which layouts of which models agree, over which backends and how closely.
`build.py` makes a page of wall.json. Every number in it comes from a run; each part has
its date, commit and model sizes. The exit code is 1 if something on the wall is red.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.drawing import Html, paragraphs, table, tag
from phalanx.layout import Layout, Shape, legal, staged_pieces
from phalanx.layout.cases import SHAPES
from phalanx.layout.choices import COMPARED, DTYPES, FP64, GLOO, SHM, THREADS
from phalanx.program import Program, StepOptions, build, faults

HERE = Path(__file__).parent
FILE = HERE / "wall.json"
SOURCE = HERE.parent / "src"
Data = Mapping[str, Any]

LAYOUTS = Layout.parse_many(
    "dp2; dp2 zero1; dp2 zero2 accum:3; dp3 zero3; dp2x2 zero2; tp2; tp2 seq; tp4; cp2; cp2:ulysses; cp4:2x2;"
    " pp4 gpipe:3; pp2 1f1b:3; pp2 interleaved2:3; pp2 zb-h1:3; pp2 zb-h2:3; pp2 zb-v:3; pp2 dualpipe-v:3;"
    " ep2; dp2 ep2 overlap accum:3; dp2 recompute:all; tp2 recompute:selective; dp2 offload:activations;"
    " dp2 tp2 seq zero3; pp2 cp2 1f1b:3 recompute:all; pp2 ep2 1f1b:3; dp2 pp2 tp2 seq zero1 1f1b:3;"
    " dp2 cp2 tp2 zero3"
)
# The small models of `phalanx verify`, by the family whose style they have; none has
# its size.
MODELS = {
    "gqa": "Llama style", "gpt": "GPT-2 style", "qwen": "Qwen style", "gemma": "Gemma style",
    "olmo": "OLMo style", "experts": "with experts", "latent": "DeepSeek style",
    "sinks": "gpt-oss style", "odd": "odd widths", "mlp": "MLP",
}  # fmt: skip
# with processes, which take seconds to start
_FOUR = ("gqa", "gpt", "experts", "latent")
_BF16 = "bfloat16"
# Parts of the wall that compare layouts, with their backend, dtype and models.
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
    """Compare every layout that fits with one process, over a backend."""
    from phalanx.verification import verify

    backend, dtype, models = COMPARISONS[part]
    cells: dict[str, dict[str, Any]] = {str(layout): {} for layout in LAYOUTS}
    for model in models:
        shape = SHAPES[model]
        for layout in LAYOUTS:
            if broken := legal(layout, shape):
                cells[str(layout)][model] = {"none": broken[0].what}
        fit = [layout for layout in LAYOUTS if model not in cells[str(layout)]]
        chosen = [
            x if dtype == _BF16 else replace(x, precision=COMPARED[dtype])
            for x in fit
        ]
        rows = {
            str(x): str(layout) for x, layout in zip(chosen, fit, strict=True)
        }
        for verdict in verify(shape, chosen, backend=backend, dtype=dtype):
            cells[rows[verdict.layout]][model] = _cell(verdict)
        print(part, model, flush=True)
    sizes = {model: sizes_of(SHAPES[model]) for model in models}
    return _made() | {
        "backend": backend,
        "dtype": dtype,
        "models": sizes,
        "cells": cells,
    }


def sizes_of(shape: Shape) -> str:
    """Describe the sizes of a model."""
    words = [f"{shape.layers} layers of width {shape.hidden}"]
    if shape.kind == "decoder":
        words += [
            f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} of keys and values",
            f"MLPs of width {shape.ffn}",
            f"a vocabulary of {shape.vocab}",
        ]
    if shape.experts:
        words.append(
            f"{shape.experts} experts of width {shape.expert_ffn}, {shape.top_k} a token"
        )
    rows = f"{shape.batch} sequences of {shape.sequence} tokens"
    words.append(rows if shape.kind == "decoder" else f"{shape.batch} rows")
    return ", ".join(words)


def own_code() -> Data:
    """Compare decoders in transformers' own code, over threads."""
    import families
    from phalanx.parallel import fitting
    from phalanx.verification import verify

    rows = Layout.parse_many(families.FEW)
    cells: dict[str, dict[str, Any]] = {str(layout): {} for layout in rows}
    sizes = {}
    for name in families.FAMILIES:
        if not families.described(name)[0]:
            continue
        model = families.load(name)
        assert model.shape is not None
        shape = replace(model.shape, batch=7, sequence=12)
        sizes[name] = sizes_of(shape)
        fit = fitting(model, rows)
        for layout in rows:
            if layout not in fit:
                cells[str(layout)][name] = {"none": "refused for this family"}
        exact = {str(replace(x, precision=FP64)): str(x) for x in fit}
        found = verify(
            shape,
            map(Layout.parse, exact),
            steps=2,
            make=partial(families.load, name),
        )
        for verdict in found:
            cells[exact[verdict.layout]][name] = _cell(verdict)
        print(OWN_CODE, name, flush=True)
    dtype = DTYPES[FP64].torch
    return _made() | {
        "backend": THREADS,
        "dtype": dtype,
        "models": sizes,
        "cells": cells,
    }


def _cell(verdict: Any) -> Data:
    cell = {"error": verdict.max_rel_error, "allowed": verdict.of_allowed}
    return (
        cell
        if verdict.passed
        else cell | {"differs": verdict.first_difference}
    )


def seeded_faults() -> Data:
    """Record, for each seeded fault, the findings of `verify` and `check --sums`, and
    the error of the loss."""
    from phalanx.parallel import build_model
    from phalanx.verification.placement import placement_faults
    from seeded import FAULTS, catch, refusal_of

    rows = []
    for fault in FAULTS:
        caught = catch(fault, fault.dtypes[0])
        with fault.patch():
            try:
                sums = placement_faults(
                    partial(build_model, SHAPES[fault.shape]), fault.layout
                )
            # raised by code that needs real numbers: counts as no finding
            except Exception as error:
                sums = (refusal_of(error),)
        rows.append(
            {
                "fault": fault.name, "model": fault.shape, "layout": str(fault.layout),
                "dtype": fault.dtypes[0],
                "verify": caught.first_difference if caught.caught else "",
                "sums": sums[0] if sums else "",
                "loss": [caught.first_loss_error, caught.loss_error],
            }
        )  # fmt: skip
        print(fault.name, flush=True)
    return _made() | {"rows": rows}


def changed_programs() -> Data:
    """Record the finding of `check` for each fault in a program's text."""
    rows = []
    for mistake in MISTAKES["program"]:
        text = program_text(mistake["model"], mistake["layout"])
        for old, new in mistake["edits"]:
            assert text.count(old) == 1, (mistake["fault"], old, text)
            text = text.replace(old, new)
        rows.append(
            mistake
            | {"check": faults(Program.parse(text, mistake["fault"]))[:1]}
        )
    return _made() | {"rows": rows}


def program_text(model: str, layout: str) -> str:
    where, shape = Layout.parse(layout), SHAPES.get(model) or Shape.load(model)
    return str(
        build(where, staged_pieces(where, shape), StepOptions(agree=False))
    )


def _made() -> dict[str, Any]:
    """Return the date, commit and machine of a measurement."""
    import time

    import torch

    commit = _git("log", "-1", "--format=%h")
    changed = _git("status", "--porcelain", "--", str(SOURCE))
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": f"{commit} with changes" if changed else commit,
        "on": f"{os.cpu_count()} cores of {platform.machine()}, torch {torch.__version__}",
    }  # fmt: skip


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commits_since(commit: str) -> int | None:
    """Count the commits that have changed the source since, or return None for an
    unknown commit."""
    try:
        return int(
            _git(
                "rev-list",
                "--count",
                f"{commit.split()[0]}..HEAD",
                "--",
                str(SOURCE),
            )
        )
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


# ---- shown

OLD = 14  # days after which a measurement is shown as old
NONE = "–"
TITLES = {
    THREADS: "Ranks are threads, float64",
    _BF16: "Ranks are threads, bfloat16: share of what is allowed",
    SHM: "Ranks are processes over shared memory, float64",
    GLOO: "Ranks are processes over gloo, float64",
    OWN_CODE: "Small decoders of Hugging Face in transformers' own code, float64",
}
# Returns the number of commits after this one.
Since = Callable[[str], int | None]


def page(data: Data, today: date, since: Since = commits_since) -> list[Html]:
    """Return the parts of the wall's page, as seen on `today`."""
    parts = [_verdict(data), paragraphs(_ABOUT)]
    for part, title in TITLES.items():
        shown = (
            _matrix(part, data[part], _age(data[part], today, since))
            if part in data
            else _GAP
        )
        parts += [tag("h2", title), shown]
    programs, faulty = data.get("programs"), data.get("faults")
    if programs and faulty:
        parts += [tag("h2", "Mistakes reported elsewhere"), *_reported(data)]
    parts += [tag("h2", "Mistakes in a step's list")]
    parts += (
        _programs(programs, _age(programs, today, since))
        if programs
        else [_GAP]
    )
    parts += [tag("h2", "Mistakes in the engine")]
    parts += _faults(faulty, _age(faulty, today, since)) if faulty else [_GAP]
    return parts


_GAP = tag("p", "Not measured.", cls="bad")
_ABOUT = (
    "Each cell is a layout that trained three steps beside one process on the same weights and batches:"
    " the largest relative difference of any output, loss, gradient, norm or weight. In float64 1e-10 is"
    " allowed. In bfloat16 each tensor has a bound of its own, from what a unit in the last place"
    " changes; there the cell is the share of it that was used. A dash: the layout does not fit that"
    " model. Red: it differs from one process, or was not measured.",
    "The models are small, in the style of a family: they have its parts and not its size. Their sizes are"
    " below each table.",
)


def _verdict(data: Data) -> Html:
    """Describe the red cells and rows."""
    wrong = red(data)
    if not wrong:
        return tag("p", "Nothing on this wall is red.", cls="good")
    count = f"{len(wrong)} {'is' if len(wrong) == 1 else 'are'} red: "
    return tag("p", count + "; ".join(wrong[:20]), cls="bad")


def red(data: Data) -> list[str]:
    """Return the names of everything wrong or missing on the wall."""
    wrong = []
    for part in TITLES:
        if part not in data:
            wrong.append(f"{part} was not measured")
            continue
        for layout, row in data[part]["cells"].items():
            cells = [(model, row.get(model)) for model in data[part]["models"]]
            wrong += [
                f"{part} {model} {layout}"
                for model, cell in cells
                if is_red(cell)
            ]
    for part, key in (("faults", "verify"), ("programs", "check")):
        if part not in data:
            wrong.append(f"{part} was not measured")
            continue
        wrong += [
            f"{part} {row['fault']}"
            for row in data[part]["rows"]
            if not row[key]
        ]
    return wrong


def is_red(cell: Data | None) -> bool:
    """Return whether a layout differs from one process or was not measured."""
    return cell is None or (
        "none" not in cell and ("differs" in cell or cell["allowed"] > 1)
    )


def _age(data: Data, today: date, since: Since) -> Html:
    """Describe the time, commit and age of a part's measurement."""
    days = (today - date.fromisoformat(data["date"])).days
    later = since(data["commit"])
    ago = (
        "today"
        if days == 0
        else "a day ago"
        if days == 1
        else f"{days} days ago"
    )
    beyond = (
        ""
        if later is None
        else f"; {later} commits have changed the source since"
    )
    text = f"{data['date']} ({ago}), commit {data['commit']}{beyond}. {data['on']}."
    return tag("span", text, cls="bad" if days > OLD else "")


def command(part: str, data: Data, model: str, layouts: Iterable[str]) -> str:
    """Return the command that reproduces some cells of a column."""
    if part == OWN_CODE:
        return f"python benchmarks/families.py {model}"
    dtype = f" --dtype {data['dtype']}" if part == _BF16 else ""
    backend = (
        f" --backend {data['backend']}" if data["backend"] != THREADS else ""
    )
    return f'phalanx verify --model {model}{backend}{dtype} --layouts "{"; ".join(layouts)}"'


def _matrix(part: str, data: Data, age: Html) -> Html:
    sizes, cells = data["models"], data["cells"]
    head = [
        tag("span", MODELS.get(model, model), title=sizes[model])
        for model in sizes
    ]
    rows = []
    for layout, row in cells.items():
        shown = [
            _shown(part, data, layout, model, row.get(model))
            for model in sizes
        ]
        if any(cell != NONE for cell in shown):
            rows.append((tag("code", layout), *shown))
    ran = {
        m: [x for x, row in cells.items() if "error" in row.get(m, ())]
        for m in sizes
    }
    lines = "\n".join(
        command(part, data, m, layouts) for m, layouts in ran.items()
    )
    again = tag(
        "details",
        tag("summary", "Commands, one for each column"),
        tag("pre", lines),
    )
    listed = [
        (MODELS.get(model, model), tag("code", model), text)
        for model, text in sizes.items()
    ]
    shapes = table(("column", "model", "sizes"), listed, left=True)
    return Html(
        tag("p", age) + table(("layout", *head), rows) + shapes + again
    )


def _shown(
    part: str, data: Data, layout: str, model: str, cell: Data | None
) -> Html | str:
    if cell is None:
        return tag("span", "missing", title="not measured", cls="bad")
    if "none" in cell:
        return NONE
    again = command(part, data, model, [layout])
    if is_red(cell):
        return tag(
            "span",
            "differs",
            title=f"{cell.get('differs', '')}\n{again}",
            cls="bad",
        )
    value = (
        f"{cell['allowed']:.2f}" if part == _BF16 else f"{cell['error']:.0e}"
    )
    return tag("span", value, title=f"{data['date']}: {again}")


def _reported(data: Data) -> Iterable[Html]:
    seeded = {row["fault"]: row for row in data["faults"]["rows"]}
    listed = {row["fault"]: row for row in data["programs"]["rows"]}
    rows: list[tuple[object, ...]] = []
    for mistake in MISTAKES["reported"]:
        kind = mistake["what"], mistake.get("by", "several")
        for number, name in enumerate(mistake.get("seeded", ())):
            first = ("", "") if number else kind
            says: tuple[object, object] = (_MISSING, _MISSING)
            if name in listed:
                says = "", _found(listed[name]["check"][:1])
            elif name in seeded:
                row = seeded[name]
                says = _found([row["verify"]]), _first(row["sums"])
            rows.append((*first, name, *says))
        if "why" in mistake:
            rows.append((*kind, mistake["why"], "nothing", "nothing"))
    yield paragraphs(
        [
            "Kinds of mistakes that other frameworks had or have, each seeded here in phalanx's own code;"
            " none is a copy of theirs. Numbers are those of their issues and pull requests."
        ]
    )
    head = (
        "mistake",
        "reported as",
        "seeded here as",
        "verify says",
        "check says",
    )
    yield table(head, rows, left=True)


def _programs(data: Data, age: Html) -> Iterable[Html]:
    yield tag("p", "The text of a step, changed as sed would. ", age)
    rows = []
    for row in data["rows"]:
        edits = " ".join(f"-e 's/{old}/{new}/'" for old, new in row["edits"])
        again = f'phalanx draw "{row["layout"]}" --model {row["model"]} --out step.txt'
        again += f"\nsed -i {edits} step.txt\nphalanx check step.txt"
        shown = tag("details", tag("summary", "commands"), tag("pre", again))
        rows.append((row["fault"], _found(row["check"][:1]), shown))
    yield table(("mistake", "check says", ""), rows, left=True)


_NOTHING = tag("b", "nothing", cls="bad")
_MISSING = tag("b", "not measured", cls="bad")


def _found(says: Iterable[str]) -> Html | str:
    """Return the first finding, or a red word without one."""
    return next((_first(text) for text in says if text), _NOTHING)


def _faults(data: Data, age: Html) -> Iterable[Html]:
    rows = []
    for row in data["rows"]:
        dtype = (
            "" if row["dtype"] == DTYPES[FP64].torch else f" {row['dtype']}"
        )
        found = _found([row["verify"]])
        layout = tag("code", row["layout"] + dtype)
        loss = f"{row['loss'][0]:.0e}, {row['loss'][1]:.0e}"
        rows.append(
            (row["fault"], layout, found, _first(row["sums"]) or NONE, loss)
        )
    caught, sums = (
        sum(bool(row[key]) for row in data["rows"])
        for key in ("verify", "sums")
    )
    blind = sum(max(row["loss"]) < 1e-3 for row in data["rows"])
    yield tag("p", age)
    yield paragraphs(
        [
            f"Each was put into the code, and its layout trained: verify finds {caught} of {len(rows)},"
            f" check --sums {sums} without running a step. With {blind} of them the losses of three"
            " steps agree with the right ones to 1e-3.",
            "PYTHONPATH=tests python -m seeded 'WORDS OF ITS NAME' reproduces one, make faults all.",
        ]
    )
    head = (
        "mistake",
        "layout",
        "verify says",
        "check --sums says",
        "loss off, 1 and 3 steps",
    )
    yield table(head, rows, left=True)


def _first(text: str) -> str:
    """Return the quantity that is wrong and its place, without the numbers."""
    return text.split(" is ")[0] if text.startswith("step ") else text


# Everything measured, by the name of its part.
PARTS: dict[str, Callable[[], Data]] = {
    **{name: partial(compared, name) for name in COMPARISONS},
    OWN_CODE: own_code,
    "faults": seeded_faults,
    "programs": changed_programs,
}


def main() -> int:
    sys.path += [
        str(HERE.parent / folder) for folder in ("tests", "benchmarks")
    ]
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in sys.argv[1:] or PARTS:
        data[name] = PARTS[name]()
        FILE.write_text(
            json.dumps(data, indent=0, separators=(",", ":")) + "\n"
        )
    wrong = red(data)
    print(*(f"red: {name}" for name in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
