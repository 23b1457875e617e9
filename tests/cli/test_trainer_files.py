"""`phalanx plan --for` and `phalanx check --from`: files of other trainers, written, read and priced."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import phalanx
from phalanx.api import UsageError
from phalanx.cli import main
from phalanx.layout import Layout

Capture = pytest.CaptureFixture[str]
PLAN = ["plan", "--model", "tiny", "--cluster", "h100x8"]
TRAINERS = ("megatron", "torchtitan", "deepspeed", "accelerate", "nemo")
SUFFIX = {"megatron": "sh", "torchtitan": "toml", "deepspeed": "json"}


def _plan(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main([*PLAN, *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_planned_file_holds_the_layout_that_was_planned(
    trainer: str, tmp_path: Path, capsys: Capture
) -> None:
    code, out, err = _plan(capsys, "--for", trainer)
    assert code == 0
    assert "cannot say" not in err
    path = tmp_path / f"file.{SUFFIX.get(trainer, 'yaml')}"
    path.write_text(out)
    code, text, _ = _plan(capsys, "--for", trainer, "--json")
    figures = json.loads(text)
    assert (code, figures["file"], figures["unsaid"]) == (0, out, [])
    planned = Layout.parse(figures["layout"])
    assert figures["layout"] in err
    words = ["--batch", "16", "--ranks", "8", "--json"]
    words += ["--model", "tiny"] * (trainer != "megatron")
    words += ["--microbatches", str(planned.microbatches)] * (
        trainer == "accelerate"
    )
    assert main(["check", "--from", str(path), *words]) == 0
    read = json.loads(capsys.readouterr().out)
    assert Layout.parse(read["layout"]) == planned
    assert read["faults"] == []


def test_a_search_for_a_trainer_takes_only_what_it_can_say() -> None:
    """Without a trainer the best layouts of this request have a pipeline, which DeepSpeed's file has
    not, or are ZeRO-1, which torchtitan's has not."""
    terms = {"sequence": 8192, "batch_tokens": "1Mi", "top": 5}
    free = phalanx.plan("1b", "h100x16", **terms)
    for trainer in ("deepspeed", "torchtitan"):
        bound = phalanx.plan(
            "1b", "h100x16", profile="phalanx", trainer=trainer, **terms
        )
        assert bound.layouts[0].step >= free.layouts[0].step
        for choice in bound.layouts:
            layout = choice.layout
            assert layout.pp == 1 or trainer != "deepspeed"
            assert layout.zero in (0, 2, 3) or trainer != "torchtitan"
        assert bound.file.whole
        assert bound.file.job.layout == bound.best


def test_what_a_trainer_cannot_say_of_a_named_layout_is_an_error(
    capsys: Capture,
) -> None:
    words = ["--for", "torchtitan", "--layout", "dp2 pp2 tp2 zb-h1:4"]
    code, out, err = _plan(capsys, *words)
    assert code == 1
    assert "tensor_parallel_degree = 2" in out
    for told in ("zb-h1", "no seq", "pp before dp"):
        assert told in err


SCRIPT = """torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512
--ffn-hidden-size 2048 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
--vocab-size 32000 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 64 --bf16
--tensor-model-parallel-size 8 --use-distributed-optimizer"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT.replace("\n", " "))
    return path


def test_a_script_is_priced_and_faster_layouts_are_named(
    script: Path, capsys: Capture
) -> None:
    words = ["check", "--from", str(script), "--cluster", "h100x16", "--json"]
    assert main(words) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["layout"] == "dp2 tp8 zero1 accum:32 bf16"
    # Embedding and head; blocks of 4 h^2 + 3 h f with two norms; and the last norm.
    block = 4 * 512**2 + 3 * 512 * 2048 + 2 * 512
    assert read["parameters"] == 2 * 32000 * 512 + 4 * block + 512
    assert read["profile"] == "megatron-core"
    low, high = read["error_range"]
    assert low < read["step_time_s"] < high
    assert read["faster"]
    for each in read["faster"]:
        assert each["step_time_s"] < 0.98 * read["step_time_s"]
        again = phalanx.Layout.parse(each["layout"])
        assert again.ranks == 16
    assert main(words[:-1]) == 0
    out = capsys.readouterr().out
    assert "Faster, and possible with the same trainer:" in out
    assert read["faster"][0]["layout"] in " ".join(out.split())


def test_faults_end_with_1_and_name_key_and_rule(
    script: Path, capsys: Capture
) -> None:
    script.write_text(script.read_text() + " --overlap-param-gather --fp16")
    assert main(["check", "--from", str(script)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "2 inconsistencies: - --bf16: does not go with --fp16" in out
    assert "- --overlap-param-gather: needs --overlap-grad-reduce" in out


def test_what_no_rank_could_compute_is_named_without_a_price(
    script: Path, capsys: Capture
) -> None:
    text = script.read_text().replace(
        "--num-attention-heads 8", "--num-attention-heads 4"
    )
    script.write_text(text)
    assert main(["check", "--from", str(script)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "tp=8 does not divide heads=4" in out
    assert "No memory and no time are predicted: the layout cannot run." in out


def test_a_cluster_of_another_size_is_a_fault(
    script: Path, capsys: Capture
) -> None:
    assert main(["check", "--from", str(script), "--cluster", "h100x32"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "--nnodes: starts 16 ranks, and the cluster has 32" in out


def test_python_reads_and_writes_files_too(script: Path) -> None:
    checked = phalanx.check_file(str(script))
    assert str(checked.layout) == "dp2 tp8 zero1 accum:32 bf16"
    assert checked.right
    assert checked.choice is not None
    assert checked.choice.bytes > 16 * 1e6
    flags = shlex.split(
        phalanx.plan("tiny", "h100x8", trainer="megatron").file.text
    )
    assert "--num-layers" in flags
    with pytest.raises(UsageError, match="Name whose file"):
        _ = phalanx.plan("tiny", "h100x8").file


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "--layout", "dp2"], "--layout goes with --for"),
        (["plan", "--for", "horovod"], "horovod"),
        (
            [*PLAN, "--for", "nemo", "--page", "a.html"],
            "--page does not go with --for",
        ),
        (
            [*PLAN, "--for", "nemo", "--explain", "dp8"],
            "--explain does not go",
        ),
        ([*PLAN, "--for", "nemo", "--layout", "dp2"], "is for 2 ranks"),
        (["check", "dp2", "--from", "x.sh"], "one too many"),
        (
            ["check", "--from", "x.sh", "--device", "h100"],
            "--device does not go with",
        ),
        (["check", "dp2", "--ranks", "2"], "--ranks goes with --from"),
        (["check"], "name a layout"),
        (["check", "--from", "missing.sh"], "cannot read"),
        (
            ["check", "--from", "a.json", "--trainer", "nemo"],
            "is configured by YAML",
        ),
    ],
)
def test_words_that_mean_nothing_are_refused(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("{}")
    assert main(words) == 2
    assert told in capsys.readouterr().err
