"""`phalanx check`: every reason at once, the nearest that fit, and what a legal layout's ranks hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.api.check import check
from phalanx.api.request import verdict
from phalanx.cli import main
from phalanx.layout import Layout, Shape, legal

Capture = pytest.CaptureFixture[str]


def test_all_reasons_and_the_nearest_that_fit_are_named(
    capsys: Capture,
) -> None:
    assert main(["check", "dp2 pp3 tp3 1f1b:80", "--model", "tiny"]) == 1
    out = capsys.readouterr().out
    for reason in (
        "tp=3 does not divide heads=4",
        "tp=3 does not divide ffn=128",
        "a batch of 16",
    ):
        assert reason in out
    near = out.rsplit("Nearest that fit: ", 1)[1].strip().rstrip(".")
    for layout in Layout.parse_many(near):
        assert layout.ranks == 18
        assert not legal(layout, Shape.load("tiny"))


def test_json_of_an_illegal_layout_lists_rules(capsys: Capture) -> None:
    assert main(["check", "tp3", "--model", "tiny", "--json"]) == 1
    args = json.loads(capsys.readouterr().out)
    assert args["legal"] is False
    assert [v["rule"] for v in args["violations"]] == ["heads", "ffn"]


def test_a_legal_layout_says_what_its_ranks_hold(capsys: Capture) -> None:
    assert (
        main(["check", "dp2 pp4 tp2 1f1b:8", "--model", "8b", "--json"]) == 0
    )
    args = json.loads(capsys.readouterr().out)
    shape = Shape.load("8b")
    assert (args["ranks"], args["parameters"]) == (16, shape.total)
    assert [s["held_microbatches"] for s in args["stages"]] == [4, 3, 2, 1]
    assert sum(s["parameters"] for s in args["stages"]) == shape.total
    assert sorted(p for s in args["stages"] for p in s["pieces"]) == list(
        range(shape.pieces)
    )
    assert sorted(r for s in args["stages"] for r in s["ranks"]) == list(
        range(16)
    )
    assert main(["check", "dp2 pp4 tp2 1f1b:8", "--model", "8b"]) == 0
    out = capsys.readouterr().out
    assert "its program is complete and cannot deadlock" in " ".join(
        out.split()
    )
    assert max(map(len, out.splitlines())) <= 80


def test_the_fullest_rank_holds_what_a_plan_says_and_what_adam_needs_of_its_weights(
    capsys: Capture,
) -> None:
    asked = ["--model", "8b", "--json", "--seq", "8192"]
    layout = "dp2 pp4 tp2 1f1b:8"
    assert (
        main(
            ["check", layout, *asked, "--batch", "16", "--cluster", "h100x64"]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    plan = [
        "plan",
        "--cluster",
        "h100x16",
        "--batch-tokens",
        str(16 * 8192),
        "--explain",
        layout,
    ]
    assert main([*plan, *asked]) == 0
    explained = json.loads(capsys.readouterr().out)
    for key in ("memory_gb", "memory_range_gb", "memory_by_kind_gb"):
        assert told[key] == explained[key]
    assert told["fits"]
    assert told["device_gb"] == 80 * 2**30 / 1e9
    assert (
        told["memory_range_gb"][0]
        < told["memory_gb"]
        < told["memory_range_gb"][1]
    )
    # Eight blocks and the embedding are on stage 0, cut over tp2; norms are on both of its ranks.
    kinds, shape = told["memory_by_kind_gb"], Shape.load("8b")
    cut = sum(shape.rows[piece].numel for piece in range(9)) / 2 / 1e9
    assert kinds["weights"] == pytest.approx(2 * cut, rel=1e-4)
    assert kinds["gradients"] == pytest.approx(4 * cut, rel=1e-4)
    assert kinds["optimizer"] == pytest.approx(12 * cut, rel=1e-4)


def test_a_layout_that_is_legal_may_not_fit_in_a_device(
    capsys: Capture,
) -> None:
    asked = ["check", "dp2 pp4 tp2 1f1b:8", "--model", "8b", "--batch", "16"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "it needs 50.5 GB on the fullest rank" in " ".join(told.split())
    assert "fit" not in told
    assert main([*asked, "--device", "h100"]) == 0
    assert (
        "It fits on h100-sxmx16, which has 85.9 GB: 48.7 to "
        in capsys.readouterr().out
    )
    assert main([*asked, "--device", "rtx-4090"]) == 1
    assert (
        "It does not fit on rtx-4090x16, which has 25.8 GB"
        in capsys.readouterr().out
    )
    assert main([*asked, "--device", "h100", "--cluster", "h100x16"]) == 2
    assert main([*asked, "--cluster", "h100x8"]) == 2
    assert (
        "16 ranks do not fit: h100x8 has 8 devices" in capsys.readouterr().err
    )


def test_zero3_over_several_microbatches_names_the_lower_stage_that_fits(
    capsys: Capture,
) -> None:
    """8b holds 2 bytes of weights for each parameter, so ZeRO-2 fits in 80 GiB; 4 of gradients, and
    ZeRO-1 does not."""
    asked = [
        "check",
        "dp64 zero3 accum:8 bf16",
        "--model",
        "8b",
        "--batch",
        "512",
    ]
    assert main([*asked, "--device", "h100"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "dp64 zero2 accum:8 bf16 gathers weights once a step, and needs 70.5 to 82 GB, which"
        in told
    )
    assert "zero1" not in told
    assert main([*asked, "--device", "h200", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    lower = figures["sends_less"]
    assert [Layout.parse(each["layout"]).zero for each in lower] == [1, 2]
    shape = Shape.load("8b")
    more = lower[0]["memory_gb"] - figures["memory_gb"]
    # Whole weights, of which two units were gathered, and whole gradients.
    assert 0.85 * 6 * shape.total / 1e9 < more < 1.05 * 6 * shape.total / 1e9
    assert all(each["fits"] for each in lower)
    assert "zero1" in figures["less_sent"]
    # A small device: neither fits. Nothing to say of a layout that sends once a step.
    for layout, device in (
        ("dp64 zero3 accum:8 bf16", "rtx-4090"),
        ("dp64 zero1 bf16", "h200"),
    ):
        main(
            [
                "check",
                layout,
                "--model",
                "8b",
                "--batch",
                "512",
                "--device",
                device,
                "--json",
            ]
        )
        assert not json.loads(capsys.readouterr().out).get("less_sent")


@pytest.mark.parametrize(
    ("memory", "words"),
    [(47e9, "does not fit"), (50e9, "may not fit"), (60e9, "fits")],
)
def test_only_what_no_allocator_could_hold_is_refused(
    memory: float, words: str
) -> None:
    assert verdict(48.8e9, 58.2e9, memory) == words


def test_a_tied_weight_is_counted_on_both_stages_that_hold_it(
    capsys: Capture,
) -> None:
    assert main(["check", "pp2 1f1b:2", "--model", "124m", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    shape = Shape.load("124m")
    assert shape.tied
    assert (
        sum(s["parameters"] for s in stages)
        == shape.total + shape.rows[0].numel
    )


def test_zero3_holds_few_gathered_units(capsys: Capture) -> None:
    assert main(["check", "dp4 zero3", "--model", "tiny", "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    assert stage["gathered_units"] == 2  # the one in use, and the next
    assert (
        main(["check", "dp4 zero3 prefetch:2", "--model", "tiny", "--json"])
        == 0
    )
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    assert stage["gathered_units"] == 3


def test_a_program_file_is_checked_too(
    capsys: Capture, tmp_path: Path
) -> None:
    place = tmp_path / "step.txt"
    assert (
        main(
            [
                "draw",
                "1f1b",
                "--stages",
                "2",
                "--microbatches",
                "2",
                "--out",
                str(place),
            ]
        )
        == 0
    )
    assert main(["check", str(place)]) == 0
    assert "is sound: 2 ranks" in capsys.readouterr().out
    place.write_text(place.read_text().replace(" 1F1<0", ""))
    assert main(["check", str(place), "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert "rank 1: 1F1 needs 1F1<0, which is missing." in faults
    assert main(["draw", "program", str(place)]) == 2
    assert "1F1<0" in capsys.readouterr().err


def test_any_number_of_ranks_is_estimated_where_nobody_named_a_cluster() -> (
    None
):
    for ranks in (*range(1, 71), 97, 127, 251):
        checked = check(f"dp{ranks}", "tiny", batch=2 * ranks)
        assert checked.figures["ranks"] == ranks
        assert checked.memory == pytest.approx(
            check("", "tiny", batch=2).memory, rel=0.01
        )
        named = check(f"dp{ranks}", "tiny", batch=2 * ranks, device="h100")
        assert named.figures["device"] == f"h100-sxmx{ranks}"


def test_a_cluster_that_was_named_and_has_no_such_size_is_refused(
    capsys: Capture,
) -> None:
    argv = [
        "check",
        "dp12",
        "--model",
        "tiny",
        "--batch",
        "24",
        "--cluster",
        "h100x12",
    ]
    assert main(argv) == 2
    assert "12 do not fill levels of 8" in capsys.readouterr().err


def test_memory_of_a_whole_batch_at_once_is_said_to_be_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "dp8 zero3", "--model", "8b", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    found = whole["one_sequence"]
    assert found["sequences"] == whole["batch"] // 8 == 64
    assert main(["check", found["layout"], "--model", "8b", "--json"]) == 0
    divided = json.loads(capsys.readouterr().out)
    assert divided["memory_gb"] == pytest.approx(found["memory_gb"])
    assert "one_sequence" not in divided
    assert whole["memory_gb"] > 20 * divided["memory_gb"]
    assert main(["check", "dp8 zero3", "--model", "8b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one microbatch of 64 sequences a rank" in said
