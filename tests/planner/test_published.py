"""Tables, predictions of them, fits and scores: on made-up runs whose answer is known."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from by_hand import piece_kinds

from phalanx.cli import plan_calibrate, plan_score
from phalanx.cli.usage import UsageError
from phalanx.cost import cached_costs
from phalanx.layout import Layout, Shape
from phalanx.planner import MachineError
from phalanx.planner.calibrate import fit
from phalanx.planner.profile import FITTED, profile, profile_named
from phalanx.planner.published import logged, runs_of
from phalanx.planner.score import held_out, score, scored_row
from phalanx.planner.table import CellError, _meaning, read_table
from phalanx.program import PieceKinds

COLUMNS = """source row_id hardware gpus gpus_per_node intra_link inter_link model params layers hidden
ffn glu heads kv_heads head_dim vocab tied seq global_batch micro_batch tp sp pp vpp cp dp zero hsdp_shard
ep act_ckpt precision schedule offload framework tok_s_gpu step_time_s tflops_gpu mfu_pct hfu_pct
peak_mem_gb mem_unit status mfu_formula inferred notes url lora_rank""".split()  # noqa: SIM905
USUAL = {
    "source": "made-up", "hardware": "H100-SXM-80GB", "gpus_per_node": "8", "model": "M",
    "layers": "16", "hidden": "2048", "ffn": "8192", "glu": "1", "heads": "16", "kv_heads": "16",
    "vocab": "32000", "tied": "0", "seq": "4096", "global_batch": "64", "cp": "1", "zero": "1",
    "precision": "bf16", "status": "ok", "framework": "nanotron",
}  # fmt: skip


def piece_costs(
    model: Shape, layouts: Iterable[Layout], *, sequence: int
) -> dict[Layout, PieceKinds]:
    return {cut: piece_kinds(model, cut, sequence) for cut in layouts}


def table(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(
                {
                    **USUAL,
                    "row_id": str(number),
                    **{k: str(v) for k, v in row.items()},
                }
            )
    return path


def layouts() -> list[dict[str, object]]:
    return [
        {"gpus": 16, "tp": tp, "pp": pp, "dp": 16 // tp // pp, "micro_batch": rows,
         "sp": int(tp > 1), "schedule": "1f1b" if pp > 1 else "none"}
        for tp in (1, 2, 4, 8)
        for pp in (1, 2)
        for rows in (1, 2, 4)
    ]  # fmt: skip


def measured_by(path: Path, truth, *, noise: float = 0.0) -> Path:
    """The table with the step times that a profile would have."""
    plain = table(path, [{**row, "step_time_s": 1} for row in layouts()])
    rows = read_table(plain, truth)
    runs, refused = runs_of(rows, piece_costs)
    assert not refused
    steps = [run.choice(run.row.profile).step for run in runs]
    rng = np.random.default_rng(0)
    said = [
        {**row, "step_time_s": steps[i] * (1 + noise * rng.standard_normal())}
        for i, row in enumerate(layouts())
    ]
    return table(path, said)


def test_a_profile_that_made_the_times_is_found_again(tmp_path: Path) -> None:
    truth = replace(profile("default"), speed=0.7)
    rows = read_table(
        measured_by(tmp_path / "t.csv", truth), replace(truth, speed=0.9)
    )
    runs, _ = runs_of(rows, piece_costs)
    found = fit(runs[0].row.profile, runs)
    off = [abs(np.log(run.choice(found).step / run.measured)) for run in runs]
    assert np.median(off) < 0.03
    assert all(
        low <= getattr(found, n) <= high for n, (low, high) in FITTED.items()
    )


def test_traffic_that_runs_of_many_kinds_are_fitted_with_is_held_where_it_is_costed(
    tmp_path: Path,
) -> None:
    truth = replace(profile("default"), traffic=2.0)
    rows = read_table(
        measured_by(tmp_path / "t.csv", truth), profile("default")
    )
    runs, _ = runs_of(rows, piece_costs)
    free, held = (
        fit(profile("default"), runs, physics=much).traffic
        for much in (0.0, 10.0)
    )
    assert abs(held - 1) < 0.1 < free - 1


def test_true_predictions_score_perfectly_and_wrong_ones_do_not(
    tmp_path: Path,
) -> None:
    truth = profile("default")
    path = measured_by(tmp_path / "t.csv", truth)
    perfect = _score(path, truth)
    assert perfect["median_error"] == pytest.approx(0, abs=1e-3)
    assert perfect["tau"] == 1.0
    assert perfect["regret_top1"] == pytest.approx(0, abs=1e-3)
    slow = _score(path, replace(truth, speed=truth.speed / 2))
    assert slow["median_error"] > 0.2
    assert slow["after_one_scalar"]["median"] < slow["median_error"]


def _score(path: Path, by) -> dict:
    rows = read_table(path, by)
    runs, refused = runs_of(rows, piece_costs)
    return score(runs, refused, rows)[0].plain()


def test_a_first_pick_that_ran_out_of_memory_is_a_miss_and_the_next_that_ran_is_judged(
    tmp_path: Path,
) -> None:
    truth = profile("default")
    path = measured_by(tmp_path / "t.csv", truth)
    with open(path, newline="") as file:
        said = list(csv.DictReader(file))
    best, second, *_ = sorted(said, key=lambda row: float(row["step_time_s"]))
    best["status"] = "oom"
    # by a cause that is not predicted
    second["step_time_s"] = 3 * float(second["step_time_s"])
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(said)
    found = _score(path, truth)
    assert found["misses"] == 1
    assert 1.0 < found["regret_top1"] < 2.1
    assert found["regret_top3"] == pytest.approx(0)
    assert found["oom_recall"] == 0.0


def test_pairs_that_repeats_of_one_layout_do_not_tell_apart_have_no_order(
    tmp_path: Path,
) -> None:
    truth = profile("default")
    path = measured_by(tmp_path / "t.csv", truth)
    with open(path, newline="") as file:
        said = list(csv.DictReader(file))
    swapped = [row for row in said if row["pp"] == "2"]
    for row in swapped:  # 4 % off, half of them up
        row["step_time_s"] = float(row["step_time_s"]) * (
            1.04 if row["tp"] < "4" else 0.96
        )
    alone = _score(table(tmp_path / "u.csv", said), truth)
    # Repeats that differ by 30 % say that none of this is an order.
    again = [
        {**row, "step_time_s": 1.3 * float(row["step_time_s"])} for row in said
    ]
    both = _score(table(tmp_path / "v.csv", [*said, *again]), truth)
    assert alone["tau"] < 1.0
    assert both["tau"] > alone["tau"]


def test_a_layout_that_leaves_an_allocator_no_room_is_picked_last(
    tmp_path: Path,
) -> None:
    """The fastest by prediction holds 96 % of a device: a search, which uses 85 %, never names it."""
    rows = [
        {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": n, "global_batch": 64, "step_time_s": time}
        for n, time in ((1, 2.0), (2, 2.1), (8, 9.0))
    ]  # fmt: skip
    read = read_table(table(tmp_path / "t.csv", rows), profile("default"))
    runs, _ = runs_of(read, piece_costs)
    scored = [scored_row(run, None) for run in runs]
    steps = [1.1, 1.0, 0.5]
    most = [0.3, 0.5, 0.96]
    made = [
        replace(x, step=step, memory=part * x.row.hardware.memory)
        for x, step, part in zip(scored, steps, most, strict=True)
    ]
    assert [x.picked for x in made] == [True, True, False]
    assert all(x.fits for x in made)
    family = score(runs, {}, read, each=lambda _, *__: made)[0]
    assert family.regret
    assert family.regret[1] == pytest.approx(0.05)


def test_out_of_memory_is_told_where_it_is_far_away(tmp_path: Path) -> None:
    rows = [
        {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": 1, "global_batch": 64, "step_time_s": 1},
        {"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "micro_batch": 64, "global_batch": 512,
         "status": "oom"},
    ]  # fmt: skip
    found = _score(table(tmp_path / "t.csv", rows), profile("default"))
    assert (
        found["oom_precision"],
        found["oom_recall"],
        found["oom_accuracy"],
    ) == (
        1.0,
        1.0,
        1.0,
    )


def test_memory_is_compared_as_the_software_tells_it(tmp_path: Path) -> None:
    pipeline = {"gpus": 8, "tp": 1, "pp": 2, "dp": 4, "micro_batch": 1, "global_batch": 4,
                "schedule": "1f1b", "vocab": "256000", "step_time_s": 1, "mem_unit": "GB"}  # fmt: skip
    plain = profile("default")
    first = replace(plain, logs_first_rank=True)
    # One microbatch: the last rank has the head and as many forwards, the first is the emptier.
    rows = read_table(
        table(tmp_path / "t.csv", [{**pipeline, "peak_mem_gb": 10}]), first
    )
    runs, _ = runs_of(rows, piece_costs)
    found = runs[0].choice(first)
    own = logged(found, first)
    assert own < 0.9 * found.bytes
    # torch's statistics have no context, nvidia-smi's numbers have.
    smi = logged(found, replace(first, logs_context=True))
    assert smi - own == first.context > 0
    told = table(tmp_path / "u.csv", [{**pipeline, "peak_mem_gb": own / 1e9}])
    assert _score(told, first)["memory_error"] == pytest.approx(0, abs=1e-9)
    assert _score(told, plain)["memory_error"] > 0.1
    gib = table(tmp_path / "v.csv", [{**pipeline, "peak_mem_gb": own / 2**30}])
    assert _score(gib, replace(first, logs_gib=True))[
        "memory_error"
    ] == pytest.approx(0, abs=1e-9)


def test_a_row_without_the_sizes_of_its_model_says_so(tmp_path: Path) -> None:
    (row,) = read_table(
        table(tmp_path / "runs.csv", [{**layouts()[0], "layers": ""}])
    )
    assert "layers or width" in row.why


def test_a_row_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    rows = [{"gpus": 8, "tp": 1, "pp": 1, "dp": 8, "hardware": "Abacus", "step_time_s": 1},
            {"gpus": 8, "step_time_s": 1, "tp": "", "pp": "", "dp": ""}]  # fmt: skip
    found = _score(table(tmp_path / "t.csv", rows), profile("default"))
    assert found["median_error"] is None
    assert sum(found["left_out"].values()) == 2
    assert any("Abacus" in why for why in found["left_out"])


def test_each_run_is_listed_with_its_error_and_the_parts_of_its_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_score, "cached_costs", piece_costs)
    rows = [{**row, "step_time_s": 2.0} for row in layouts()[:3]]
    words = [str(table(tmp_path / "runs.csv", rows)), "--each"]
    assert plan_score.run([*words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]["made"]
    assert [run["measured_s"] for run in runs] == [2.0] * 3
    assert all(
        sum(run["parts"].values()) == pytest.approx(run["held_out_s"])
        for run in runs
    )
    assert plan_score.run(words) == 0
    told = capsys.readouterr().out
    for run in runs:
        assert f"{100 * (run['predicted_s'] / 2.0 - 1):+.1f}%" in told
        assert run["layout"] in told


def test_a_table_is_scored_with_numbers_that_were_not_fitted_on_it_and_after_some_of_its_rows(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_score, "cached_costs", piece_costs)
    monkeypatch.setattr(plan_calibrate, "cached_costs", piece_costs)
    # Software of the default numbers, on a machine whose computing is slower by a quarter.
    default = profile("default")
    slower = replace(
        default, speed=0.8 * default.speed, traffic=1.25 * default.traffic
    )
    path = measured_by(tmp_path / "t.csv", slower)
    words = [str(path), "--rows", "5", "--profile", "default", "--json"]
    assert plan_score.run(words) == 0
    (found,) = json.loads(capsys.readouterr().out)["families"]
    assert found["held_out"]["median"] > 0.1
    assert found["after_five"]["median"] < 0.04
    assert (
        plan_calibrate.run([*words, "--out", str(tmp_path / "profile.toml")])
        == 0
    )
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert sum(run["used"] for run in runs) == 5
    assert len(runs) == len(layouts())
    assert np.median([abs(run["after"]) for run in runs]) < 0.04
    assert profile(str(tmp_path / "profile.toml")).slower == pytest.approx(
        1.25, rel=0.1
    )
    with pytest.raises(UsageError, match="not both"):
        plan_calibrate.run([str(path), str(tmp_path)])


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(MachineError, match="lacks"):
        read_table(tmp_path / "x.csv")
    with pytest.raises(MachineError, match="cannot read"):
        read_table(tmp_path / "none.csv")


GOOD: dict[str, object] = {
    "gpus": 16,
    "tp": 2,
    "pp": 2,
    "dp": 4,
    "micro_batch": 1,
    "step_time_s": 2,
}


def test_words_in_other_case_and_spelling_mean_what_a_person_reads(
    tmp_path: Path,
) -> None:
    said: list[dict[str, object]] = [
        {"precision": "FP8", "status": "OK", "sp": "True", "act_ckpt": "Full"},
        {
            "precision": "MXFP8",
            "status": "",
            "zero": "ZeRO-3",
            "act_ckpt": "Selective (op)",
        },
        {
            "schedule": "1F1B (flexible)",
            "precision": "BF16",
            "zero": "none",
            "tp": "2.0",
        },
        {
            "schedule": "Interleaved 1F1B",
            "vpp": 2,
            "global_batch": "1,024",
            "step_time_s": 40,
        },
        {"schedule": "ZB-V", "precision": "FP8 (rowwise)", "offload": "None"},
        {"pp": 1, "dp": 8, "schedule": "whatever"},
    ]
    rows = read_table(
        table(tmp_path / "t.csv", [{**GOOD, **each} for each in said])
    )
    assert [row.why for row in rows] == [""] * 6
    cases = [row.case for row in rows if row.case]
    assert [case.dtype for case in cases] == ["fp8", "fp8", "", "", "", ""]
    assert [case.layout.schedule for case in cases[2:5]] == [
        "1f1b",
        "interleaved",
        "zb-v",
    ]
    assert [case.layout.recompute for case in cases[:3]] == [
        "all",
        "selective",
        "none",
    ]
    assert [case.layout.zero for case in cases[:3]] == [1, 3, 0]
    assert [case.layout.seq for case in cases[:2]] == [True, False]
    assert rows[3].batch == 1024
    assert [row.step for row in rows] == [2.0, 2.0, 2.0, 40.0, 2.0, 2.0]


def test_a_run_out_of_memory_says_so_in_any_case_or_in_place_of_its_time(
    tmp_path: Path,
) -> None:
    said = ({"status": "OOM", "step_time_s": ""}, {"status": "CUDA out of memory"},
            {"status": "", "step_time_s": "OOM"}, {"status": "crashed", "step_time_s": ""})  # fmt: skip
    rows = read_table(
        table(tmp_path / "t.csv", [{**GOOD, **each} for each in said])
    )
    assert [row.out_of_memory for row in rows] == [True, True, True, False]
    assert [(row.step, row.why) for row in rows] == [(0.0, "")] * 4
    assert all(row.case for row in rows)


def test_words_of_mixed_precision_and_of_offload_mean_the_same_in_any_order(
    tmp_path: Path,
) -> None:
    said = (
        "fp16/bf16",
        "bf16/fp16",
        "BF16 / FP8",
        "fp8+bf16",
        "fp32/bf16",
        "bf16-mixed",
    )
    rows = read_table(
        table(
            tmp_path / "t.csv", [{**GOOD, "precision": each} for each in said]
        )
    )
    assert [row.why for row in rows] == [""] * len(said)
    cases = [row.case for row in rows if row.case]
    formats = [case.dtype or case.layout.precision for case in cases]
    assert formats == ["fp16", "fp16", "fp8", "fp8", "bf16", "bf16"]
    said = ("optimizer->CPU", "optimizer -> cpu", "Optimizer states to host", "optimizer → CPU",
            "CPU optimizer")  # fmt: skip
    rows = read_table(
        table(tmp_path / "u.csv", [{**GOOD, "offload": each} for each in said])
    )
    assert [row.case and row.case.layout.offload for row in rows] == [
        ("optimizer",)
    ] * len(said)


def test_a_format_without_a_price_leaves_its_row_out_and_the_others_are_scored(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_score, "cached_costs", piece_costs)
    said = ({}, {"precision": "NVFP4", "hardware": "B200"}, {"precision": "", "hardware": "V100-32GB"},
            {"precision": "MXFP8"}, {"precision": "fp8/nvfp4"})  # fmt: skip
    path = table(tmp_path / "t.csv", [{**GOOD, **each} for each in said])
    assert plan_score.run([str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["families"]
    assert found["predicted"] == 3
    assert sorted(found["left_out"]) == [
        "line 4, precision: '' is not supported by v100-32",
        "line 6, precision: 'fp8/nvfp4' is not supported by h100-sxm",
    ]


_SPELLED = {
    "precision": (
        "bf16/fp16 = fp16",
        "NVFP4 = fp4",
        "FP8 E4M3 128x128 = fp8",
        "bf16 params, fp32 grads = bf16",
    ),
    "schedule": (
        "Interleaved 1F1B (v=2) = interleaved",
        "DualPipe = dualpipe-v",
        "zero bubble = zb-h1",
    ),
    "zero": ("HSDP = 3", "distributed optimizer = 1", "_HYBRID_SHARD = 3"),
    "act_ckpt": (
        "mla_up_proj, moe_act = selective",
        "layernorm moe_act = selective",
        "every 2 = every=2",
        "gradient checkpointing = all",
    ),
    "offload": (
        "states of the optimizer on CPU = optimizer",
        "optimizer + weights = weights,optimizer",
    ),
}


def test_words_are_read_in_the_spellings_of_their_sources() -> None:
    for column, words in _SPELLED.items():
        for word in words:
            text, _, meaning = word.partition(" = ")
            assert _meaning({column: text}, column) == meaning, text


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("precision", "bf16, no fp8"),
        ("precision", "bf16 not fp8"),
        ("precision", "fp8 attention unsupported, bf16"),
        ("offload", "optimizer without weights"),
        ("offload", "optimizer + activation"),
    ],
)
def test_words_that_deny_or_do_not_fit_together_have_no_meaning(
    column: str, text: str
) -> None:
    with pytest.raises(CellError, match="is not known"):
        _meaning({column: text}, column)


def test_a_note_that_denies_lora_is_no_row_of_lora(tmp_path: Path) -> None:
    notes = "full fine-tune, not LoRA", "LoRA, not QLoRA", "QLoRA in NF4"
    rows = [{**GOOD, "notes": text} for text in notes]
    full, adapted, narrow = read_table(table(tmp_path / "t.csv", rows))
    assert full.case is not None
    assert adapted.case is not None
    assert full.case.shape.lora_r == 0
    assert adapted.case.shape.lora_r == 16
    assert narrow.case is None
    assert "4 bits" in narrow.why


def test_a_row_of_lora_trains_its_adapters_alone(tmp_path: Path) -> None:
    said = ({}, {"notes": "LoRA finetuning"}, {"lora_rank": "64"})
    large = {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}
    columns = {**GOOD, **large, "step_time_s": 20, "framework": "NeMo"}
    path = table(tmp_path / "t.csv", [{**columns, **each} for each in said])
    whole, usual, wide = (row.case for row in read_table(path))
    assert whole is not None
    assert usual is not None
    assert wide is not None
    assert [x.shape.lora_r for x in (whole, usual, wide)] == [0, 16, 64]
    full, adapted, _ = (
        run.choice(run.row.profile)
        for run in runs_of(read_table(path), cached_costs)[0]
    )
    # Of three matmuls for each weight, one is its gradient.
    assert 0.6 < adapted.step / full.step < 0.85
    assert adapted.memory["optimizer"] < 0.05 * full.memory["optimizer"]


def test_a_row_of_nvidias_recipes_has_their_facts(tmp_path: Path) -> None:
    """`seq` beside tp, LoRA on query, key and value, and tokens that travel beside computing
    where experts leave a server and stages have several chunks."""
    split = {"sp": ""}
    lora = {"notes": "LoRA finetuning", "step_time_s": 20}
    said = [split, {**split, "sp": 0}, lora]
    rows = [{**GOOD, **each, "framework": "NeMo"} for each in said]
    found = [row.case for row in read_table(table(tmp_path / "t.csv", rows))]
    usual, plain, adapted = (case for case in found if case is not None)
    assert (usual.layout.seq, plain.layout.seq) == (True, False)
    assert adapted.shape.lora_targets == ("wq", "wk", "wv")

    deep = {
        **EXPERTS,
        "model": "DeepSeek-V3",
        "framework": "NeMo",
        "global_batch": 512,
    }
    apart = {
        "gpus": 128,
        "dp": 32,
        "pp": 4,
        "ep": 32,
        "vpp": 4,
        "micro_batch": 1,
    }
    inside = {**apart, "ep": 8}
    rows = [{**deep, **each} for each in (apart, inside, {**apart, "vpp": ""})]
    cases = [row.case for row in read_table(table(tmp_path / "u.csv", rows))]
    assert [case and case.layout.overlap for case in cases] == [
        True,
        False,
        False,
    ]


def test_a_row_without_zero_has_that_of_its_software(tmp_path: Path) -> None:
    said = ("", "NeMo"), ("0", "NeMo"), ("", "torchtitan"), ("", "nanotron")
    rows = [{**GOOD, "zero": a, "framework": b} for a, b in said]
    cases = [row.case for row in read_table(table(tmp_path / "t.csv", rows))]
    assert [case and case.layout.zero for case in cases] == [1, 0, 3, 0]


def test_norms_of_plain_operations_keep_a_wide_copy_and_a_narrow_result(
    tmp_path: Path,
) -> None:
    software = "somebody's", "somebody's + RMS kernel"
    row = {**GOOD, "tp": 1, "dp": 8}
    path = table(
        tmp_path / "t.csv", [{**row, "framework": x} for x in software]
    )
    plain, kernel = (
        run.parts.values[1].cost.kept
        for run in runs_of(read_table(path), cached_costs)[0]
    )
    # Two norms of 2,048 features, each with 4 + 2 bytes more; the fused software keeps
    # nothing between gate and product either (8,192 features in 2 bytes).
    assert plain - kernel == 4096 * (2 * 2048 * 6 + 8192 * 2)


def test_a_microbatch_that_is_the_whole_batch_is_that_of_all_ranks(
    tmp_path: Path,
) -> None:
    said = {"dp": 8, "gpus": 8, "global_batch": 32, "micro_batch": 32}
    path = table(tmp_path / "t.csv", [{**GOOD, **said, "tp": 1, "pp": 1}])
    (row,) = read_table(path)
    assert row.case is not None
    assert (row.case.rows, row.case.layout.microbatches) == (4, 1)


# What a cell may have in it. The first ones leave a number out or make it absurd.
_ABSURD = (
    "",
    "nan",
    "-1",
    "0",
    "0.5",
    "1e-300",
    "1e18",
    "word",
    "nvfp4",
    "1/2",
    "(",
)


@pytest.mark.parametrize("more", [{}, {"dp": 1, "pp": 8, "schedule": "zb-v",
    "framework": "Megatron-LM zero-bubble"}], ids=["plain", "zero-bubble"])  # fmt: skip
def test_no_cell_ends_the_scoring_of_a_table(
    tmp_path: Path, more: dict[str, object]
) -> None:
    base = {**GOOD, "global_batch": 4, "layers": 8, **more}
    mutated = [
        {**base, column: text} for column in COLUMNS for text in _ABSURD
    ]
    rows = read_table(table(tmp_path / "t.csv", mutated))
    runs, refused = runs_of(rows, piece_costs)
    families = defaultdict(list)
    for run in runs:
        families[run.row.family].append(run)
    held = {
        name: held_out(profile("default"), own, 5)
        for name, own in families.items()
    }
    scores = score(runs, refused, rows, held=held)
    assert sum(each.predicted for each in scores) > len(mutated) / 4
    assert sum(each.rows for each in scores) == len(mutated)
    json.dumps([each.plain() for each in scores], allow_nan=False)
    assert plan_score.score_text(scores, each_run=True)
    for run in (run for each in scores for run in each.runs):
        assert 0 < run.step <= 86_400
        assert run.memory > 0


def test_a_stage_without_a_block_is_predicted_where_steps_roll(
    tmp_path: Path,
) -> None:
    empty = {
        **GOOD,
        "layers": 1,
        "pp": 8,
        "tp": 1,
        "dp": 2,
        "framework": "Megatron-LM zero-bubble",
    }
    rows = read_table(table(tmp_path / "t.csv", [empty]))
    runs, refused = runs_of(rows, piece_costs)
    assert not refused
    assert runs[0].choice(rows[0].profile).step > 0


@pytest.mark.parametrize(
    ("cells", "column", "why"),
    [
        ({"micro_batch": "one"}, "micro_batch", "'one' is not a number"),
        ({"step_time_s": "nan"}, "step_time_s", "'nan' is not finite"),
        ({"peak_mem_gb": "inf"}, "peak_mem_gb", "is not finite"),
        ({"hidden": "-2048"}, "hidden", "below 0"),
        ({"gpus": ""}, "gpus", "not a whole number above 0"),
        ({"tp": "0"}, "tp", "not a whole number above 0"),
        ({"tp": "1.5"}, "tp", "not a whole number above 0"),
        ({"tp": "3", "gpus": 24}, "tp", "does not divide heads=16"),
        ({"dp": "8"}, "gpus", "dp x tp x pp x cp = 8 x 2 x 2 x 1 = 32"),
        ({"dp": "", "gpus": 18}, "gpus", "4 x 2 x 2 x 1 = 16"),
        ({"precision": "int3"}, "precision", "not known: write one of"),
        (
            {"precision": "FP8", "hardware": "A100-SXM-80GB"},
            "precision",
            "not supported by a100-80",
        ),
        ({"schedule": "magic"}, "schedule", "interleaved"),
        ({"zero": "4"}, "zero", "not known"),
        ({"status": "perhaps"}, "status", "oom"),
        ({"hardware": "Abacus"}, "hardware", "not in the catalogue"),
        (
            {"micro_batch": "3"},
            "micro_batch",
            "'3' x dp=4 is not a part of 64",
        ),
        ({"micro_batch": "1e9"}, "micro_batch", "is not a part of 64"),
        (
            {"zero": "1", "hsdp_shard": "3"},
            "hsdp_shard",
            "does not divide dp=4",
        ),
        (
            {"step_time_s": "0.002"},
            "step_time_s",
            "is faster than the peak of 16 x h100-sxm",
        ),
        (
            {"step_time_s": "", "tok_s_gpu": "1e7"},
            "tok_s_gpu",
            "is faster than",
        ),
    ],
)
def test_a_bad_cell_is_told_by_line_and_column_and_the_rest_is_read(
    tmp_path: Path, cells: dict[str, object], column: str, why: str
) -> None:
    rows = read_table(
        table(tmp_path / "t.csv", [GOOD, {**GOOD, **cells}, GOOD])
    )
    assert [row.case is None for row in rows] == [False, True, False]
    assert rows[1].why.startswith(f"line 3, {column}: ")
    assert why in rows[1].why


def test_what_no_layout_or_shape_may_be_is_told_by_its_line_in_one_line(
    tmp_path: Path,
) -> None:
    said = [
        {"vocab": "1e9"},
        {"vpp": "1000", "schedule": "interleaved"},
        {"micro_batch": "1e-6"},
    ]
    for row in read_table(
        table(tmp_path / "t.csv", [{**GOOD, **each} for each in said])
    ):
        assert re.match(r"line \d: .*(vocab|chunks|microbatches)", row.why)
        assert "\n" not in row.why


def test_a_byte_that_is_no_text_spoils_its_own_cell(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.csv", [{**GOOD, "notes": "?"}, {**GOOD, "tp": "?"}, GOOD]
    )
    path.write_bytes(path.read_bytes().replace(b"?", b"\xb5"))
    assert [row.why[:11] for row in read_table(path)] == [
        "",
        "line 3, tp:",
        "",
    ]


def test_servers_and_networks_are_as_a_row_tells(tmp_path: Path) -> None:
    said: list[dict[str, object]] = [
        {},
        # 16 in four servers, of which ranks of dp that are 4 apart share none
        {"gpus_per_node": 4},
        {"inter_link": "4x HDR InfiniBand"},
        {"inter_link": "3.2 Tb/s per node"},
        {"inter_link": "200 Gbps per GPU"},
        {"hardware": "RTX 4090", "inter_link": "8 x 100 Gb/s", "precision": "bf16"},
        {"hardware": "RTX 4090", "gpus": 4, "dp": 1},
        {"hardware": "NVIDIA A800-SXM4-80GB"},
        {"hardware": "Tesla V100-SXM2-32GB", "precision": "fp16", "gpus_per_node": 8},
    ]  # fmt: skip
    rows = read_table(
        table(
            tmp_path / "t.csv",
            [{**GOOD, "step_time_s": 9, **each} for each in said],
        )
    )
    assert [row.why for row in rows] == [""] * len(said)
    hardware = [row.hardware for row in rows if row.hardware]
    assert [h.node for h in hardware] == [8, 4, 8, 8, 8, 8, 4, 8, 8]
    # Seconds of a long message to another server: by the port of a device.
    rates = [1e9 / h.network.seconds("send", 1e9, 2, h.node) for h in hardware]
    ports = [50, 50, 12.5, 50, 25, 12.5, 31.5, 25, 6.25]  # GB/s
    assert [rate / 1e9 for rate in rates] == pytest.approx(
        [0.8 * port for port in ports], rel=0.03
    )


def test_software_is_known_by_a_name_that_a_cell_has_in_it() -> None:
    named = {
        "NVIDIA NeMo 24.07": "nemo", "BigScience Megatron-DeepSpeed": "megatron-deepspeed",
        "GPT-NeoX": "megatron-deepspeed", "PyTorch FSDP + torch.compile": "compiled",
        "torchtitan FSDP2 +compile": "torchtitan", "Hugging Face": "default", "": "default",
    }  # fmt: skip
    assert {each: profile_named(each).name for each in named} == named


EXPERTS: dict[str, object] = {
    **GOOD, "layers": "", "hidden": "", "heads": "", "kv_heads": "", "head_dim": "", "ffn": "", "vocab": "",
    "tp": 1, "pp": 1, "dp": 16, "ep": 8, "step_time_s": 9,
}  # fmt: skip


def _with_columns(
    path: Path, rows: list[dict[str, object]], *names: str
) -> Path:
    """A table with columns beside the usual ones."""
    plain = [
        {key: x for key, x in row.items() if key not in names} for row in rows
    ]
    head, *lines = table(path, plain).read_text().splitlines()
    more = [",".join(str(row.get(name, "")) for name in names) for row in rows]
    joined = [
        f"{line},{cells}" for line, cells in zip(lines, more, strict=True)
    ]
    path.write_text("\n".join([f"{head},{','.join(names)}", *joined]) + "\n")
    return path


def test_rows_with_experts_are_the_published_model_that_they_name_in_any_spelling(
    tmp_path: Path,
) -> None:
    names = {
        "DeepSeekV3": (61, 256), "DeepSeek-V3 (w/o MTP)": (61, 256), "Mixtral 8x7B": (32, 8),
        "mixtral_8x7b": (32, 8), "Qwen3_30B_a3B": (48, 128), "GPT OSS 120B": (36, 128),
    }  # fmt: skip
    path = table(
        tmp_path / "t.csv", [{**EXPERTS, "model": name} for name in names]
    )
    for row, (layers, experts) in zip(
        read_table(path), names.values(), strict=True
    ):
        assert row.why == ""
        assert row.case is not None
        assert (row.case.shape.layers, row.case.shape.experts) == (
            layers,
            experts,
        )
        # The ranks that share experts are among those that have batches of their own.
        layout = row.case.layout
        assert (layout.ep, layout.dp, layout.ranks, layout.data) == (
            8,
            2,
            16,
            16,
        )
        assert (row.case.rows, layout.microbatches) == (1, 4)


def test_experts_of_other_models_are_read_from_columns(tmp_path: Path) -> None:
    own = {
        **GOOD,
        "model": "Own-MoE",
        "tp": 1,
        "dp": 16,
        "ep": 4,
        "global_batch": 16,
        "pp": 1,
    }
    own |= {"experts": 16, "top_k": 2, "expert_ffn": 512, "step_time_s": 9}
    said = [own, {**own, "dp": 4}, {**own, "top_k": ""}]
    rows = read_table(
        _with_columns(
            tmp_path / "t.csv", said, "experts", "top_k", "expert_ffn"
        )
    )
    shapes = [row.case.shape for row in rows if row.case]
    assert [(s.experts, s.top_k, s.expert_ffn) for s in shapes] == [
        (16, 2, 512)
    ] * 2
    assert rows[0].case == rows[1].case  # dp with and without the ranks of ep
    assert "top_k" in rows[2].why


def test_rows_whose_experts_are_unknown_are_left_out_with_what_to_write(
    tmp_path: Path,
) -> None:
    said: list[dict[str, object]] = [
        {}, {"ep": 8}, {"model": "Nemotron-A3B"}, {"ep": 1}, {"model": "Mixtral 8x7B"},
    ]  # fmt: skip
    rows = read_table(
        table(tmp_path / "t.csv", [{**GOOD, **each} for each in said])
    )
    assert [row.case is None for row in rows] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert "columns experts, top_k and expert_ffn" in rows[1].why
    assert "differs from the 32 of 8x7b" in rows[4].why
    (bad,) = read_table(
        table(
            tmp_path / "u.csv", [{**EXPERTS, "model": "DeepSeek-V3", "ep": 6}]
        )
    )
    assert "ep: '6'" in bad.why


def test_a_row_with_experts_is_costed_and_predicted(tmp_path: Path) -> None:
    wanted = {
        **EXPERTS,
        "model": "Mixtral 8x7B",
        "gpus": 64,
        "dp": 64,
        "global_batch": 512,
    }
    (run,), refused = runs_of(
        read_table(table(tmp_path / "t.csv", [wanted])),
        partial(cached_costs, place=tmp_path),
    )
    assert not refused
    shape, tokens = Shape.load("8x7b"), 512 * 4096
    # the active parameters alone, at the peak
    least = 6 * shape.active * tokens / (64 * 989.4e12)
    assert 1.2 * least < run.choice(run.row.profile).step < 10 * least


def test_words_of_a_cell_are_known_in_any_order_and_with_any_sign_between_them(
    tmp_path: Path,
) -> None:
    precisions = {"bf16/fp16": "fp16", "fp16/bf16": "fp16", "BF16 mixed precision": "bf16",
                  "mixed fp16": "fp16", "fp16 + bf16": "fp16"}  # fmt: skip
    said: list[dict[str, object]] = [
        {"precision": word} for word in precisions
    ]
    places = (
        "optimizer->CPU",
        "CPU optimizer",
        "optimizer states to CPU",
        "CPU <- optimizer",
    )
    said += [{"offload": word} for word in places]
    said += [
        {"zero": word}
        for word in ("ZeRO stage 3", "stage-3 zero", "full shard FSDP")
    ]
    said += [
        {"schedule": word}
        for word in ("1F1B interleaved", "interleaved 1F1B (vpp)")
    ]
    said += [{"act_ckpt": word} for word in ("full recompute", "uniform full")]
    rows = read_table(
        table(
            tmp_path / "t.csv", [{**GOOD, "step_time_s": 9, **x} for x in said]
        )
    )
    assert [row.why for row in rows] == [""] * len(said)
    layouts = [row.case.layout for row in rows if row.case]
    assert [x.precision for x in layouts[:5]] == list(precisions.values())
    assert [x.offload for x in layouts[5:9]] == [("optimizer",)] * 4
    assert [x.zero for x in layouts[9:12]] == [3] * 3
    assert [x.schedule for x in layouts[12:14]] == ["interleaved"] * 2
    assert [x.recompute for x in layouts[14:]] == ["all"] * 2
    # Words that say nothing are not guessed.
    for column, word in (
        ("precision", "mixed"),
        ("offload", "CPU"),
        ("schedule", "schedule"),
    ):
        (row,) = read_table(
            table(tmp_path / "u.csv", [{**GOOD, column: word}])
        )
        assert row.why.startswith(f"line 2, {column}: ")


def test_a_rate_that_counts_causal_attention_is_a_shorter_step(
    tmp_path: Path,
) -> None:
    said = {**GOOD, "step_time_s": "", "tflops_gpu": 10, "seq": 65536}
    formulas = (
        "6N + 12*L*h*s, full attention",
        "CAUSAL attention: 6*s^2*d*h*L",
    )
    full, causal = read_table(
        table(
            tmp_path / "t.csv",
            [{**said, "mfu_formula": each} for each in formulas],
        )
    )
    case = full.case
    assert case is not None
    shape = case.shape
    halves = 6 * shape.layers * shape.hidden * 65536 * case.tokens
    assert full.step - causal.step == pytest.approx(
        halves / (10e12 * full.ranks)
    )


def test_kernels_that_a_framework_names_are_those_of_its_profile() -> None:
    named = {
        "Own / flash_attention2": ("default", "flash-2"), "Own (flash-attn v1)": ("default", "flash-1"),
        "DeepSpeed 0.19 + FA3/FA4": ("deepspeed", "flash-3"), "Own, cuDNN": ("default", "flash-3"),
        "DeepSpeed": ("deepspeed", "flash-2"), "DeepSpeed ZeRO-3": ("deepspeed-zero3", "scores"),
        "Megatron-Core": ("megatron-core", "flash-3"),
    }  # fmt: skip
    found = {each: profile_named(each) for each in named}
    assert {each: (x.name, x.attention) for each, x in found.items()} == named
    assert profile_named("Own + Liger").fused
    assert not profile_named("Own").fused
    # Liger's loss never has all logits.
    losses = [profile_named(each).loss for each in ("Own + Liger", "Own")]
    assert losses == ["chunks", "wide"]


def test_a_byte_order_mark_and_columns_in_capitals_are_read(
    tmp_path: Path,
) -> None:
    path = table(tmp_path / "t.csv", [GOOD])
    head, rest = path.read_text().split("\n", 1)
    path.write_text(head.upper() + "\n" + rest, encoding="utf-8-sig")
    (row,) = read_table(path)
    assert (row.source, row.step, row.why) == ("made-up", 2.0, "")


def test_a_row_with_a_cell_too_many_is_not_read_shifted(
    tmp_path: Path,
) -> None:
    path = table(tmp_path / "t.csv", [GOOD, GOOD])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2] + ",x"]) + "\n")
    assert [row.why[:13] for row in read_table(path)] == ["", "line 3, cells"]
