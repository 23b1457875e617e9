"""`phalanx cost`: a table that fits a terminal, the same as JSON, and a sentence for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cost import forward_flops
from phalanx.layout import Shape

Capture = pytest.CaptureFixture[str]
STRANGER = (
    str(Path(__file__).parents[2] / "examples" / "stranger.py") + ":Stranger"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "8b", "tp4 seq bf16"],
        [
            "--model",
            "405b",
            "tp8 cp4:2x2 seq pp4 zb-h1:4 recompute:selective bf16",
            "--rows",
            "2",
        ],
        ["--model", STRANGER, "tp2"],
        ["--model", "mlp"],
    ],
)
def test_the_table_fits_eighty_columns(
    argv: list[str], capsys: Capture
) -> None:
    assert main(["cost", *argv]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("\npiece") == 3


def test_json_holds_every_operation(capsys: Capture) -> None:
    argv = [
        "cost",
        "--model",
        "tiny",
        "tp2",
        "--rows",
        "3",
        "--sequence",
        "16",
        "--json",
    ]
    assert main(argv) == 0
    args = json.loads(capsys.readouterr().out)
    shape = Shape.load("tiny")
    numbers = [n for kind in args["pieces"] for n in kind["pieces"]]
    assert numbers == list(range(shape.pieces))
    found = sum(
        len(k["pieces"]) * k["operations"]["F"]["flops_full"]
        for k in args["pieces"]
    )
    # The head makes its logits in the backward, which has three products.
    *_, head = args["pieces"]
    found += head["operations"]["B"]["flops_full"] / 3
    assert 2 * found == sum(op.full for op in forward_flops(shape, 3, 16))
    assert {
        m["axis"]
        for k in args["pieces"]
        for m in k["operations"]["B"]["messages"]
    } == {"tp"}


@pytest.mark.parametrize(
    "argv, why",
    [
        (["--model", "8b", "tp3"], "tp=3 does not divide heads=32"),
        (["--model", "8x", "tp2"], "unknown shape '8x'"),
        (["--model", "8b", "tq2"], "'tq2' is not a word of a layout"),
        (["--model", "8b", "--rows", "0"], "--rows is 0; write 1 to"),
        (["--model", "none.py:Net"], "there is no file none.py"),
        (["--target", "tpu"], "--target is 'tpu'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    argv: list[str], why: str, capsys: Capture
) -> None:
    assert main(["cost", *argv]) == 2
    assert why in capsys.readouterr().err
