"""`phalanx plan`: a table that fits a terminal, its JSON, files that others read, and sentences for
what is impossible."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.api.plan import PlanTerms, plan, request
from phalanx.cli import main
from phalanx.cli.usage import UsageError
from phalanx.cost import step_flops
from phalanx.layout import Layout, Run, Shape, legal
from phalanx.layout.run import refuse_random_by_name
from phalanx.planner.search import Plan, could_fit, search
from phalanx.planner.spend import interval, spending
from phalanx.planner.step import Choice, Pricer, Request

Capture = pytest.CaptureFixture[str]
SMALL = [
    "plan",
    "--model",
    "124m",
    "--cluster",
    "h100x8",
    "--batch-tokens",
    "65536",
]
STRANGER = (
    str(Path(__file__).parents[2] / "examples" / "stranger.py") + ":Stranger"
)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One cache of cached_costs for all, apart from that of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def args(capsys: Capture, *argv: str) -> dict[str, object]:
    assert main([*SMALL, "--json", *argv]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_fits_eighty_columns_and_names_rules_and_reasons(
    capsys: Capture,
) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Choices of simple rules:" in out
    assert "Why the others lost:" in out


def test_json_holds_legal_layouts_best_first_with_all_that_is_promised(
    capsys: Capture,
) -> None:
    found = args(capsys)
    shape, layouts = Shape.load("124m"), found["layouts"]
    assert isinstance(layouts, list)
    times = [one["step_time_s"] for one in layouts]
    assert times == sorted(times)
    for one in layouts:
        layout = Layout.parse(one["layout"])
        assert str(layout) == one["layout"]
        assert not legal(layout, shape, batch=64, sequence=1024)
        assert sum(one["breakdown"].values()) == pytest.approx(
            one["step_time_s"]
        )
        assert sum(one["memory_by_kind_gb"].values()) == pytest.approx(
            one["memory_gb"]
        )
        assert (
            one["error_range"][0] < one["step_time_s"] < one["error_range"][1]
        )
        assert one["tokens_per_s_per_device"] * one[
            "step_time_s"
        ] * 8 == pytest.approx(65536)
        assert 0 < one["mfu"] < one["mfu_attention_in_full"] < 1
        assert one["mfu"] <= one["hfu"] < 1
    assert found["refused"]
    assert all(r["reason"] and r["family"] for r in found["refused"])  # type: ignore[attr-defined]


def test_mfu_is_the_model_s_flops_over_time_and_peak(capsys: Capture) -> None:
    best = args(capsys, "--top", "1")["layouts"][0]  # type: ignore[index]
    flops = step_flops(Shape.load("124m"), 64, 1024).model
    assert best["mfu"] == pytest.approx(
        flops / best["step_time_s"] / 8 / 989.4e12, rel=1e-3
    )


def test_explaining_a_pick_gives_its_numbers_and_its_timeline(
    capsys: Capture,
) -> None:
    best = args(capsys, "--top", "1")["layouts"][0]  # type: ignore[index]
    again = args(capsys, "--explain", best["layout"])
    assert again["step_time_s"] == pytest.approx(best["step_time_s"])
    assert main([*SMALL, "--explain", "pp4 dp2 1f1b:8"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "stage 3" in out
    assert "the fullest rank holds" in out


def test_an_explained_layout_is_coloured_on_a_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([*SMALL, "--explain", "pp4 dp2 1f1b:8"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "\\x1b" not in out


def test_the_run_file_and_the_page_are_written(
    capsys: Capture, tmp_path: Path
) -> None:
    run, page = tmp_path / "run.toml", tmp_path / "plan.html"
    assert (
        main([*SMALL, "--json", "--out", str(run), "--page", str(page)]) == 0
    )
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    made = Run.load(str(run))
    assert (made.layout, made.batch, made.sequence) == (
        best["layout"],
        64,
        1024,
    )
    assert made.precision == "bf16"
    html = page.read_text()
    assert best["layout"] in html
    assert not re.search(
        r"""(src|href)="(?!data:,")|https?://(?!www\.w3\.org/2000/svg)""", html
    )


def test_the_picture_of_a_search_names_each_layout_and_is_no_worse_than_it_is_simulated(
    capsys: Capture, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    assert main([*SMALL, "--json", "--page", str(page)]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"]
    drawn = page.read_text().partition('class="scroll phone"')[0]
    marks = re.findall(
        r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*?(class="large")? data-more="([^"]*)"><title>([^<]*)',
        drawn,
    )
    chosen = [m for m in marks if m[2] and m[4].startswith("best: number")]
    # the best are drawn last, on top of all others
    assert marks[-len(best) :] == chosen
    for one, (*_, more, words) in zip(best, chosen, strict=True):
        assert words.endswith(f": {one['layout']}")
        rate = 65536 / 8 / one["step_time_s"]
        assert f", {rate:,.0f} tokens/s, {one['memory_gb']:.3g} GB: " in words
        assert (
            f"compute {one['breakdown']['compute'] / one['step_time_s']:.1%}"
            in more
        )
    # An axis of doublings: where a mark stands is its number.
    numbers = [
        float(m[4].split(" tokens/s")[0].split()[-1].replace(",", ""))
        for m in marks
    ]
    low, high = (
        f(range(len(marks)), key=numbers.__getitem__) for f in (min, max)
    )
    wide = (float(marks[high][0]) - float(marks[low][0])) / math.log2(
        numbers[high] / numbers[low]
    )
    for mark, number in zip(marks, numbers, strict=True):
        right = float(marks[low][0]) + wide * math.log2(number / numbers[low])
        assert float(mark[0]) == pytest.approx(right, abs=1)
    bounds = [
        m[4] for m in marks if m[4].startswith(("fits: ", "does not fit: "))
    ]
    assert len(bounds) > 30
    for words in bounds:
        found = re.match(
            r"(fits|does not fit): (.*), at most [\d,]+ tokens/s, at least ([\d.]+)",
            words,
        )
        assert found
        assert not legal(
            Layout.parse(found[2]), Shape.load("124m"), batch=64, sequence=1024
        )
        assert (float(found[3]) <= 73.1) == (found[1] == "fits")


@pytest.mark.parametrize("name", ["gpt2", "124m"])
def test_a_run_file_under_a_published_name_says_that_its_weights_are_random(
    capsys: Capture, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "run.toml"
    argv = [
        "plan",
        "--model",
        name,
        "--cluster",
        "h100x1",
        "--batch-tokens",
        "8Ki",
        "--top",
        "1",
    ]
    assert main([*argv, "--out", str(file)]) == 0
    capsys.readouterr()
    assert file.read_text().count("# - weights: random") == (name == "gpt2")
    made = Run.load(str(file))
    assert made.weights == ("random" if name == "gpt2" else "")
    refuse_random_by_name(made)
    assert (
        main(
            [
                *argv[:2],
                str(file),
                *argv[3:],
                "--out",
                str(tmp_path / "b.toml"),
            ]
        )
        == 0
    )
    refuse_random_by_name(Run.load(str(tmp_path / "b.toml")))


def test_a_run_of_so_many_tokens_is_whole_and_train_takes_it(
    capsys: Capture, tmp_path: Path
) -> None:
    run = str(tmp_path / "run.toml")
    assert main([*SMALL, "--json", "--out", run, "--tokens", "1B"]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert main(["train", run, "--print-config"]) == 0
    made = Run.parse(capsys.readouterr().out)
    assert made.steps == math.ceil(1e9 / (64 * 1024))
    # A second to save; one of 8 devices fails in 50,700 / 8 hours: Young's sqrt(2 x 1 x that).
    every = math.sqrt(2 * 3600 * 50_700 / 8) / best["step_time_s"]
    assert made.checkpoint.every == pytest.approx(
        min(made.steps, every), rel=0.01
    )
    assert main([*SMALL, "--tokens", "1B"]) == 2
    assert "add --out run.toml" in capsys.readouterr().err


def test_somebody_s_own_model_is_planned(capsys: Capture) -> None:
    argv = [
        "plan",
        "--model",
        STRANGER,
        "--cluster",
        "h100x2",
        "--json",
        "--top",
        "2",
    ]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["layouts"]


@pytest.mark.parametrize(
    ("tokens", "sequence", "batch"),
    [("512K", 1000, 512), ("512K", 1024, 500), ("512Ki", 1024, 512), ("512Ki", 8192, 64),
     ("4Mi", 8192, 512), ("4Mi", "8Ki", 512), (4194304, 8192, 512), ("1.5Mi", 4096, 384)],
)  # fmt: skip
def test_a_batch_in_tokens_means_the_same_number_at_every_length(
    tokens: str | int, sequence: str | int, batch: int
) -> None:
    asked = request("8b", "h100x8", batch_tokens=tokens, sequence=sequence)
    assert asked.batch == batch


@pytest.mark.parametrize("sequence", [256, 1000, 1024, 2048, 4096, 5000, 8192])
def test_a_letter_alone_is_decimal_whether_it_divides_or_not(
    sequence: int,
) -> None:
    for text, tokens in (
        ("512K", 512_000),
        ("4M", 4_000_000),
        ("512Ki", 2**19),
        ("4Mi", 2**22),
    ):
        if tokens % sequence:
            with pytest.raises(UsageError, match=f"is {tokens:,} tokens"):
                request("8b", "h100x8", batch_tokens=text, sequence=sequence)
        else:
            asked = request(
                "8b", "h100x8", batch_tokens=text, sequence=sequence
            )
            assert asked.batch * sequence == tokens


@pytest.mark.parametrize(
    "argv, why",
    [
        (["--model", "8c"], "unknown shape '8c'. Did you mean '8b'"),
        (["--cluster", "h10x64"], "Did you mean 'h100'"),
        (["--cluster", "h100x63"], "use a multiple of 8"),
        (["--batch-tokens", "100"], "is less than one sequence"),
        (
            ["--batch-tokens", "65000"],
            "63.48 sequences of 1,024. Write 64512 (63 sequences) or 65536 (64 sequences)",
        ),
        (
            ["--batch-tokens", "1M"],
            "Write 1Mi (1,024 sequences), 999424 (976 sequences)",
        ),
        (
            ["--batch-tokens", "1.5M"],
            "1464.84 sequences of 1,024. Write 1499136",
        ),
        (["--seq", "1k"], "--seq is '1k'; write 1000 or 1024 (1Ki)"),
        (["--batch-tokens", "lots"], "write a number such as 4M"),
        (["--seq", "4096"], "has learned 1024 positions"),
        (
            ["--limit", "85"],
            "--limit is 85; write a number above 0 and up to 1",
        ),
        (["--top", "0"], "--top is 0; write 1 to"),
        (["--profile", "megatron"], "unknown profile 'megatron'"),
        (["--precision", "int8"], "--precision is 'int8'"),
        (["--explain", "dp4"], "is for 4 ranks, h100x8 has 8"),
        (["--explain", "dp8 pp2x"], "'pp2x' is not an axis"),
        (["--cluster", "this"], "there is no machine file machine.toml"),
        (["--out", "run.json"], "the suffix selects the format; use .toml"),
        (["--tp", "2"], "unknown argument"),
    ],
)
def test_what_means_nothing_is_told_with_the_way_out(
    argv: list[str],
    why: str,
    capsys: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *argv]) == 2
    assert why in capsys.readouterr().err


def test_where_every_program_holds_more_than_was_said_the_plan_says_so(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Pricer.choose

    def full(pricer: Pricer, layout: Layout, _: float) -> Choice:
        choice = chosen(pricer, layout)
        return replace(
            choice,
            memory={kind: 1e3 * held for kind, held in choice.memory.items()},
        )

    monkeypatch.setattr(Pricer, "choose", full)
    monkeypatch.setattr("phalanx.planner.search._MISSES", 2_000)
    monkeypatch.setattr("phalanx.api.plan._MORE_DEVICES", ())
    monkeypatch.setattr("phalanx.api.plan._MORE_ROOM", ())
    monkeypatch.setattr("phalanx.planner.search._MORE", 2_000)
    monkeypatch.setattr("phalanx.planner.search._EMPTIEST", 3)
    assert main(SMALL) == 1
    out = capsys.readouterr().out
    # The bytes of the smallest program, beside those that are left.
    assert re.search(r"needs, by its program, [\d.,]+ \wB, more than", out)
    assert "--limit 0." not in out.partition("leaves of a device")[2]


def test_where_nothing_fits_the_nearest_that_does_is_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each number of devices has a search of its own, the largest the longest.
    monkeypatch.setattr("phalanx.api.plan._MORE_DEVICES", (2,))
    argv = [
        "plan",
        "--model",
        "124m",
        "--cluster",
        "h100x1",
        "--batch-tokens",
        "16384",
    ]
    assert main([*argv, "--limit", "0.03"]) == 1
    out = capsys.readouterr().out
    assert "No layout of 124m fits on h100x1" in out
    assert "It fits on h100x2: " in out
    found = re.search(r"It fits with --limit (\S+):", out + " ")
    assert found
    assert main([*argv, "--limit", found[1]]) == 0


def test_a_cluster_that_was_searched_in_vain_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of h100x4, the bound of its memory fits and no program does.
    monkeypatch.setattr("phalanx.api.plan._MORE_DEVICES", (4,))
    monkeypatch.setattr("phalanx.api.plan._FAR_MORE_DEVICES", ())
    terms = PlanTerms(batch_tokens=16384, limit=0.02)
    assert could_fit(request("124m", "h100x4", **terms))
    assert "h100x4" not in str(plan("124m", "h100x1", **terms))


def test_where_nothing_fits_clusters_that_cannot_hold_it_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def noted(asked: Request, *, top: int, explained: bool = True) -> Plan:
        searched.append(asked.cluster)
        return search(asked, top=top, explained=explained)

    monkeypatch.setattr("phalanx.api.plan.search", noted)
    monkeypatch.setattr("phalanx.api.plan._MORE_DEVICES", (2,))
    monkeypatch.setattr("phalanx.api.plan._FAR_MORE_DEVICES", (4,))
    found = plan("124m", "h100x1", batch_tokens=16384, limit=0.02)
    assert "on up to 2 times the devices" in str(found)
    assert "h100x4 could hold one" in str(found)
    assert {*searched} == {"h100x1"}
    # A search of the cluster in between finds nothing indeed.
    more = request("124m", "h100x2", batch_tokens=16384, limit=0.02)
    assert not search(more, top=1).layouts


def test_a_batch_of_fewer_sequences_than_devices_is_planned_without_that_much_data_parallel(
    capsys: Capture,
) -> None:
    best = args(capsys, "--batch-tokens", "4096")["layouts"]
    assert all(Layout.parse(one["layout"]).dp <= 4 for one in best)  # type: ignore[index, union-attr]


def test_a_plan_from_cached_costs_never_loads_torch(capsys: Capture) -> None:
    args(capsys)
    code = (
        "import sys; from phalanx.cli.main import main;"
        f" assert main({[*SMALL, '--json']!r}) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- money


def test_cost_is_hours_times_devices_times_price(capsys: Capture) -> None:
    argv = ["plan", "cost", *SMALL[1:], "--tokens", "10B", "--price", "2.5"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["money"] == pytest.approx(found["hours"] * 8 * 2.5)
    assert found["hours"] == pytest.approx(
        found["computing"] + found["lost"] + found["saving"]
    )
    assert found["computing"] * 3600 == pytest.approx(
        found["steps"] * found["step_time_s"]
    )
    assert main(argv) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main([*argv, "--mtbf", "0"]) == 2


@pytest.mark.parametrize(
    "saving, between", [(10.0, 3600.0), (60.0, 11000.0), (300.0, 7200.0)]
)
def test_the_interval_is_the_one_that_loses_least(
    saving: float, between: float
) -> None:
    """Against a fine search of Daly's complete model, M e^(R/M) (e^((t+d)/M) - 1) / t."""
    from math import exp

    def cost(every: float) -> float:
        return (exp((every + saving) / between) - 1) / every

    best = min(cost(k * between / 4000) for k in range(1, 8000))
    assert cost(interval(saving, between)) == pytest.approx(best, rel=2e-4)


def test_more_devices_fail_more_often_and_save_more_often() -> None:
    few, many = (
        spending(
            tokens=1e12,
            batch_tokens=4e6,
            step=5.0,
            devices=n,
            price=1.0,
            saving=30,
            restart=600,
        )
        for n in (64, 16384)
    )
    assert many.interval < few.interval
    assert many.failures / few.failures == pytest.approx(256, rel=0.3)
    assert many.goodput < few.goodput < 1
    # 419 interruptions in 54 days on 16,384 devices are the default.
    assert many.failures / (many.hours / 24) == pytest.approx(419 / 54)
