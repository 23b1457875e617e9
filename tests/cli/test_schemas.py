"""What commands print with --json is what their schemas say. Run as a program, it writes the schemas."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from phalanx.cli import main
from phalanx.cli.completion import parser_of
from phalanx.cli.main import VERBS
from phalanx.cli.schema import described, schema_of
from torch_audit.records import KINDS, ClipRecord, ParameterRecord, StepRecord

ROOT = Path(__file__).parents[2]
FILE = ROOT / "src" / "phalanx" / "cli" / "outputs.txt"
MODEL = "model={layers=2,hidden=16,heads=2,vocab=256}"

# The outputs of each schema, in an order in which later commands find what earlier ones have written.
QUICK: dict[str, list[list[str]]] = {
    "check": [["check", "dp2 zero1", "--model", "tiny", "--device", "h100"],
              ["check", "pp3 tp5", "--model", "tiny"], ["check", "dp2", "--model", "tiny"],
              ["check", "dp2 zero3 accum:2", "--model", "tiny", "--device", "h100"],
              ["check", "dp2", "--model", "tiny", "--optimizer", "muon"]],
    "check-from": [["check", "--from", "pretrain.sh", "--cluster", "h100x4"],
                   ["check", "--from", "pretrain.sh"], ["check", "--from", "pretrain.sh", "--ranks", "8"],
                   ["check", "--from", "ds.json", "--ranks", "8"]],
    "draw": [["draw", "1f1b", "--stages", "2", "--microbatches", "2"],
             ["draw", "dp2 zero3", "--model", "tiny", "--costs", "F=1,G=1", "--out", "step.txt"]],
    "check-program": [["check", "step.txt"]],
    "draw-mesh": [["draw", "mesh", "dp2 tp2"], ["draw", "mesh", "dp2 zero3", "--weight", "kv=64/32"]],
    "draw-recompute": [["draw", "recompute", "--layers", "4"]],
    "plan": [["plan", "--model", "tiny", "--cluster", "h100x2", "--top", "1"],
             ["plan", "--model", "long.toml", "--cluster", "h100x2", "--top", "1"]],
    "plan-for": [["plan", "--model", "tiny", "--cluster", "h100x2", "--for", "accelerate"],
                 ["plan", "--model", "tiny", "--cluster", "h100x2", "--for", "torchtitan",
                  "--layout", "tp2"]],
    "plan-explain": [["plan", "--model", "tiny", "--cluster", "h100x2", "--explain", "dp2"],
                     ["plan", "--model", "long.toml", "--cluster", "h100x2", "--explain", "dp2"]],
    "plan-cost": [["plan", "cost", "--model", "tiny", "--cluster", "h100x2", "--tokens", "1M",
                   "--price", "2", "--layout", "dp2"]],
    "cost": [["cost", "--model", "tiny", "tp2"],
             ["cost", "--model", "tiny", "--optimizer", "muon"]],
    "doctor-devices": [["doctor", "devices", "h100"]],
    "doctor-links": [["doctor", "links"]],
    "doctor-clusters": [["doctor", "clusters", "h100x64"]],
    "doctor-hierarchy": [["doctor", "hierarchy", "h100"]],
    "doctor-topology": [["doctor", "topology", str(ROOT / "tests/planner/recordings/4xpcie.txt")]],
    "lab-list": [["lab"]],
    "lab-exercises": [["lab", "exercise"]],
    "lab-exercise": [["lab", "exercise", "bubble"],
                     ["lab", "exercise", "bubble", "30"],
                     ["lab", "exercise", "bubble", "--solution"]],
    "lab": [["lab", "arithmetic", "--width", "16"]],
    "verify": [["verify", "--layouts", "dp2", "--steps", "1", "--record", "ran.json"]],
    "draw-run": [["draw", "run", "ran.json"]],
    "train": [["train", "steps=2", "batch=4", "sequence=8", MODEL, "layout=", "out=run"]],
    "top": [["top", "run", "--once"]],
    "sample": [["sample", "run", "--tokens", "4"]],
    "eval": [["eval", "run", "--data", "text.txt"]],
    "report": [["report", "run"], ["report", "run", "--svg", "pictures"]],
    "checkpoint-show": [["checkpoint", "show", "run"]],
    "checkpoint-verify": [["checkpoint", "verify", "run"]],
    "checkpoint-export": [["checkpoint", "export", "run", "--to", "hf"]],
    "checkpoint-import": [["checkpoint", "import", "hf", "--out", "again"]],
    "data-prepare": [["data", "prepare", "text.txt", "--out", "tokens"]],
    "data-show": [["data", "show", "tokens"]],
    "data-verify": [["data", "verify", "tokens"]],
    "audit-compare": [["audit", "compare", "one", "one", "twice"]],
    "launch": [["launch", "slurm", "run.toml", "--gpus", "2"]],
}  # fmt: skip
SLOW: dict[str, list[list[str]]] = {
    "doctor": [["doctor"]],
    "demo": [["demo", "--out", "demo"]],
    "bench-matmul": [["bench", "matmul", "--threads", "1", "--limit", "2"]],
    "bench-mfu": [["bench", "mfu", "--threads", "1", "--limit", "2"]],
    "bench-overlap": [["bench", "overlap", "--threads", "1", "--limit", "2"]],
    "bench-collectives": [
        [
            "bench",
            "collectives",
            "--ranks",
            "2",
            "--sizes",
            "4K",
            "--limit",
            "2",
        ]
    ],
}
# Commands with --json that have no schema, and why.
WITHOUT = {
    "audit-run": "runs a program of the user's",
    "doctor-hang": "needs a run that goes on; its figures are those of the journal's event `hang`",
    "plan-calibrate": "reads the user's own measured runs", "plan-score": "reads tables of others",
}  # fmt: skip


def _outputs(commands: Iterable[list[str]]) -> list[Any]:
    values = []
    for words in commands:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            code = main([*words, "--json"])
        assert code in (0, 1), (words, code)
        values.append(json.loads(written.getvalue()))
    return values


def _recorded(folder: Path, factor: float) -> None:
    """A step of one rank and one parameter, as the recorder of `audit run` writes it."""
    rows = {kind: {0: [16.0, *[1.0] * 16]} for kind in KINDS}
    rows["gradient"][0] = [factor * each for each in rows["gradient"][0]]
    parameter = ParameterRecord(
        ["w"], [4, 4], 16, 7, 7, "[:, :]", "float64", True, 0.1
    )
    clip = ClipRecord([0], 1.0, 2.0, 9.0)
    record = StepRecord(0, 0, 1, [parameter], clips=[clip], sketches=rows)
    folder.mkdir()
    record.write(folder)


def _files() -> None:
    Path("text.txt").write_text("some words for a corpus\n" * 400)
    flags = "--tensor-model-parallel-size 2 --nnodes 1 --nproc-per-node 4 --num-layers 2 --hidden-size 64"
    flags += " --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 8 --seq-length 128"
    Path("pretrain.sh").write_text(
        f"{flags} --recompute-granularity selective --fp16 --bf16"
    )
    Path("ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "train_batch_size": 9}'
    )
    Path("run.toml").write_text('steps = 2\nlayout = "dp2"\n')
    for folder, factor in (("one", 1.0), ("twice", 2.0)):
        _recorded(Path(folder), factor)
    # Of windows so much shorter than a sequence that no MFU with full attention is printed.
    sizes = "layers=1\nhidden=1024\nheads=8\nffn=64\nvocab=8\nsequence=32768\nwindows=[128]\n"
    Path("long.toml").write_text(sizes + "batch=2\n")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)]
)
def test_what_json_prints_is_what_its_schema_says(
    names: dict[str, list[list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _files()
    for name, commands in names.items():
        schema = schema_of(name, described()[name])
        jsonschema.Draft202012Validator.check_schema(schema)
        for value in _outputs(commands):
            jsonschema.validate(value, schema)


def test_every_kind_of_type_is_read() -> None:
    text = '{a: number | null, "b c"?: [[string]], d: {*: boolean}, e: []}'
    read = schema_of("some", text)
    assert read["required"] == ["a", "d", "e"]
    assert read["properties"] == {
        "a": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "b c": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "string"}},
        },
        "d": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "e": {"type": "array"},
    }


def test_a_key_that_is_missing_is_found() -> None:
    schema = schema_of("draw", described()["draw"])
    with pytest.raises(
        jsonschema.ValidationError, match="is a required property"
    ):
        jsonschema.validate({"title": "x"}, schema)


def test_every_command_with_json_has_a_schema_with_a_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = set(described())
    assert there == {*QUICK, *SLOW}
    wanted = set()
    for verb in VERBS:
        parser = parser_of([verb])
        assert parser is not None
        for word in ("", *parser.subverbs):
            named = parser_of([verb, word]) if word else parser
            if named is not None and "--json" in named.options:
                wanted.add(
                    named.prog.removeprefix("phalanx ").replace(" ", "-")
                )
    assert wanted - there == set(WITHOUT) & wanted
    assert main(["schema"]) == 0
    for name in capsys.readouterr().out.split():
        assert main(["schema", name]) == 0
        assert (
            json.loads(capsys.readouterr().out)["$id"] == f"phalanx/{name}/1"
        )


# ---- writing them


def _merged(values: list[Any], *, record: bool = True) -> dict[str, Any]:
    """The schema of all these values. An object in a list, or at the top, is a record; any other whose
    values are alike is a table with any keys."""
    kinds = []
    if objects := [v for v in values if isinstance(v, dict)]:
        keys = list(dict.fromkeys(key for v in objects for key in v))
        each = {
            key: _merged([v[key] for v in objects if key in v], record=False)
            for key in keys
        }
        alike = (
            len({json.dumps(s, sort_keys=True) for s in each.values()}) == 1
        )
        if alike and not record:
            kinds.append(
                {
                    "type": "object",
                    "additionalProperties": next(iter(each.values())),
                }
            )
        else:
            required = [key for key in keys if all(key in v for v in objects)]
            kinds.append(
                {"type": "object", "properties": each, "required": required}
            )
    if lists := [v for v in values if isinstance(v, list)]:
        inside = [x for v in lists for x in v]
        kinds.append(
            {"type": "array"} | ({"items": _merged(inside)} if inside else {})
        )
    scalars = {_TYPES[type(v)] for v in values if type(v) in _TYPES}
    if "number" in scalars:
        scalars.discard("integer")
    kinds += [{"type": name} for name in sorted(scalars)]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


_TYPES = {
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    type(None): "null",
}


def _text(schema: dict[str, Any]) -> str:
    """A schema as the text of a type."""
    if "anyOf" in schema:
        return " | ".join(map(_text, schema["anyOf"]))
    if schema["type"] == "array":
        return f"[{_text(schema['items'])}]" if "items" in schema else "[]"
    if schema["type"] != "object":
        return str(schema["type"])
    if "properties" not in schema:
        return "{*: " + _text(schema["additionalProperties"]) + "}"
    fields = []
    for name, each in schema["properties"].items():
        word = name if re.fullmatch(r"\w+", name) else json.dumps(name)
        fields.append(
            f"{word}{'' if name in schema['required'] else '?'}: {_text(each)}"
        )
    return "{" + ", ".join(fields) + "}"


def _paragraph(name: str, text: str) -> str:
    line = f"{name}: {text}"
    return textwrap.fill(
        line,
        88,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _write() -> None:
    commands = {**QUICK, **SLOW} if "--all" in sys.argv else QUICK
    texts = described()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _files()
        texts |= {
            name: _text(_merged(_outputs(each)))
            for name, each in commands.items()
        }
    paragraphs = [
        _paragraph(name, " ".join(text.split()))
        for name, text in sorted(texts.items())
    ]
    FILE.write_text("\n\n".join(paragraphs) + "\n")


if __name__ == "__main__":
    _write()
