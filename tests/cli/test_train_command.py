"""`phalanx train` as somebody types it: flags, runs on real processes, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.api.request import request_for
from phalanx.api.sharding import sharding_text
from phalanx.cli import launch as launch_verb
from phalanx.cli import report as report_verb
from phalanx.cli import train as train_verb
from phalanx.cli.memory import auto, estimated
from phalanx.cli.usage import UsageError
from phalanx.comm import AloneWorld, CommError, RankFailed, Report
from phalanx.layout import Layout, Shape
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Checkpoints, Run, RunError
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster
from phalanx.training.loop import train
from phalanx.training.starts import DoneSteps

SMALL = [
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}", "batch=4", "sequence=12",
    "optimizer.lr=1e-2", "validation.batches=1",
]  # fmt: skip


def test_the_printed_file_reads_back_as_the_same_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        train_verb.run(["--print-config", "steps=7", "--layout", "dp2 zero1"])
        == 0
    )
    run = Run.parse(capsys.readouterr().out, "run.toml")
    assert (run.steps, run.layout) == (7, "dp2 zero1")


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_verb.run(["--schema"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["properties"]["steps"]["minimum"]
        == 1
    )


@pytest.mark.parametrize(
    "argv, args",
    [
        (["a.toml", "b.toml"], "name one run file"),
        (["--rank", "2"], "Did you mean --ranks?"),
        (["--ranks", "0"], "write 1 to"),
        (
            ["--ranks", "2", "--layout", "dp4"],
            "is for 4 ranks, but --ranks is 2",
        ),
        (["steps=1", "--ranks", "two"], "write a whole number"),
    ],
)
def test_wrong_usage_is_one_sentence(argv: list[str], args: str) -> None:
    with pytest.raises(UsageError, match=args):
        train_verb.run(argv)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_published_name_trains_no_random_weights_unasked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model={name}", "batch=2", "sequence=8", "steps=1", "layout="]
    Path("run.toml").write_text(f'model = "{name}"\n')
    launch = [launch_verb.run, ["torchrun", "run.toml", "--gpus", "1"]]
    for command, argv in ([train_verb.run, words], launch):
        with pytest.raises(RunError, match="names published weights"):
            command(argv)
    # In Python too, before anything is built, by each rank; and by ranks that find no checkpoint.
    run = Run(model=name, batch=2, sequence=8, steps=1, layout="", out="run")
    with pytest.raises(RunError, match="names published weights"):
        train(AloneWorld(), run, quiet=True)


def test_ranks_that_find_no_checkpoint_elsewhere_draw_no_weights_under_a_published_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = Shape(
        name="small",
        layers=1,
        hidden=16,
        heads=2,
        vocab=256,
        sequence=8,
        batch=2,
    )
    monkeypatch.setattr(Shape, "load", classmethod(lambda cls, name: small))
    remote = Checkpoints(remote=f"file://{tmp_path}/remote")
    run = Run(model="gpt2", steps=1, layout="", out="run", checkpoint=remote)
    with pytest.raises(RunError, match="names published weights"):
        train(AloneWorld(), run, quiet=True)
    asked = replace(run, weights="random", checkpoint=Checkpoints())
    assert train(AloneWorld(), asked, quiet=True).step == 1
    again = train(
        AloneWorld(), replace(asked, weights="", steps=2), quiet=True
    )
    assert again.step == 2  # its weights are the checkpoint's


def test_bytes_under_a_larger_vocabulary_are_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "layers=1,hidden=16,heads=2"
    for vocab, lines in ((50257, 1), (256, 0)):
        model = f"model={{{sizes},vocab={vocab}}}"
        words = [
            model,
            "batch=2",
            "sequence=8",
            "steps=1",
            "layout=",
            f"out=run-{vocab}",
        ]
        assert train_verb.run(words) == 0
        said = capsys.readouterr()
        text = "data: text of Python's library as bytes, 256 of the model's 50,257 tokens"
        assert (said.out + said.err).count(text) == lines


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(RunError, match=r"nowhere\.toml has a mistake"):
        train_verb.run(["nowhere.toml"])


def test_auto_on_more_ranks_than_sequences_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    # 7 ranks cannot share 2 heads, 2 layers and 2 sequences of 12 tokens in any way.
    with pytest.raises(ValueError, match=r"auto finds no layout.*fewer ranks"):
        train_verb.run([*SMALL, "batch=2", f"out={tmp_path}", "--ranks", "7"])


def test_a_run_on_one_process_ends_in_the_terminal_s_words_and_a_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        train_verb.run([*SMALL, f"out={out}", "steps=3", "--ranks", "1"]) == 0
    )
    args = capfd.readouterr().out
    for part in (
        "step 3/3  loss",
        "tokens/s  MFU",
        "HFU",
        "GiB  left 0:00",
        "validation loss",
        "saved",
    ):
        assert part in args
    assert report_verb.run([str(out)]) == 0
    assert "wrote" in capfd.readouterr().out
    assert (out / "report.html").stat().st_size > 5000
    # The same command again has nothing to do, and says where it is.
    assert (
        train_verb.run(
            [*SMALL, f"out={out}", "steps=3", "--ranks", "1", "--json"]
        )
        == 0
    )
    assert json.loads(capfd.readouterr().out)["step"] == 3


def test_a_run_begins_with_its_memory_and_refuses_what_a_rank_has_not(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = [*SMALL, f"out={tmp_path / 'run'}", "steps=1", "--ranks", "1"]
    # Two blocks of 4 x 16 x 16 and 3 x 16 x 24 with two norms, two tables of 256 x 16, a norm.
    numbers = 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 2 * 256 * 16 + 16
    assert train_verb.run(argv) == 0
    told = capfd.readouterr().out.partition("; each has ")[0]
    assert f"weights {4 * numbers / 1e3:.3g} kB" in told
    assert f"optimizer {8 * numbers / 1e3:.3g} kB" in told
    assert (
        train_verb.run(
            [*argv, f"out={tmp_path / 'sgd'}", "optimizer.name=sgd"]
        )
        == 0
    )
    assert (
        "optimizer" not in capfd.readouterr().out.partition("; each has ")[0]
    )
    monkeypatch.setattr(
        "phalanx.cli.memory.device_memory", lambda gpus, ranks: 4.0 * numbers
    )
    with pytest.raises(
        UsageError,
        match=r"on the fullest rank: .* Each of 1 ranks has .*--force",
    ):
        train_verb.run(argv)
    assert train_verb.run([*argv, "--force", "steps=2"]) == 0
    assert f"; each has {4 * numbers / 1e3:.3g} kB" in capfd.readouterr().out


def test_on_gpus_what_no_tensor_holds_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run.parse("", "run", (*SMALL[:3], "layout=dp2 bf16"))
    monkeypatch.setattr(
        "phalanx.cli.memory.device_memory", lambda gpus, ranks: 1.6e9
    )
    asked = (run, run.shape, Layout.parse("dp2 bf16"), 2)
    assert "other 1.5 GB; each has 1.6 GB" in estimated(*asked, force=False)
    monkeypatch.setattr(
        "phalanx.cli.memory.device_memory", lambda gpus, ranks: 1.5e9
    )
    with pytest.raises(
        UsageError, match=r"dp2 bf16 needs 1\.5 GB on the fullest rank"
    ):
        estimated(*asked, force=False)
    assert "each has 1.5 GB" in estimated(*asked, force=True)


def test_a_run_says_which_zero_stage_would_send_less_and_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run.parse("", "run", (*SMALL[:3], "layout=dp2 zero3 accum:2"))
    layout = Layout.parse("dp2 zero3 accum:2")
    enough = estimated(run, run.shape, layout, 0, force=False)
    assert (
        "\nfaster: dp2 zero1 accum:2 gathers weights and sums gradients once a step"
        in enough
    )
    held = float(run.shape.total)
    monkeypatch.setattr(
        "phalanx.cli.memory.device_memory", lambda gpus, ranks: held
    )
    assert "faster" not in estimated(run, run.shape, layout, 0, force=True)


def test_auto_says_which_zero_stage_it_chose_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape.load("8b")
    run = Run.parse("", "run", ("model='8b'", "batch=32", "layout=auto"))
    # bytes a parameter in float32, of which ZeRO-1 shards Adam's averages
    whole = 4 + 4 + 8 / 8
    for stage, part in (1, 1.001), (2, 0.999):
        memory = 2 * whole * shape.total * part
        monkeypatch.setattr(
            "phalanx.cli.memory.device_memory", lambda gpus, ranks, m=memory: m
        )
        layout, why = auto(run, replace(shape, batch=32), 8, 0)
        assert layout.zero == stage
        assert f"; zero{stage}: weights" in why


def test_a_plan_says_why_its_zero_stage_and_what_others_need() -> None:
    hardware = hardware_of(cluster("h100x64"), 64)
    request = request_for(Shape.load("8b"), hardware, batch=512)
    told = sharding_text(request, Layout.parse("dp64 zero3 accum:8 bf16"))
    assert (
        told
        == "zero3, as 73 GB may be used: zero1 needs 101 GB, zero2 needs 73.3 GB"
    )
    told = sharding_text(
        request, Layout.parse("dp64 zero3 accum:8 recompute:all bf16")
    )
    assert told.count("and is no faster") == 2
    assert sharding_text(request, Layout.parse("dp64 bf16")) == ""


def test_any_number_of_ranks_begins_with_its_memory() -> None:
    for ranks in range(1, 71):
        run = Run.parse(
            "",
            "run",
            (*SMALL[:3], f"batch={2 * ranks}", f"layout=dp{ranks} fp32"),
        )
        layout = Layout.parse(f"dp{ranks} fp32")
        assert "on the fullest rank" in estimated(
            run, run.shape, layout, 0, force=False
        )


def test_nine_ranks_train_on_a_cpu(tmp_path: Path) -> None:
    argv = [
        *SMALL,
        "batch=9",
        "layout=dp9",
        f"out={tmp_path / 'run'}",
        "steps=1",
    ]
    assert train_verb.run([*argv, "--backend", "threads", "--json"]) == 0


CODE = "import sys; from phalanx.cli.train import run; sys.exit(run(sys.argv[1:]))"


def _begun(out: Path, *argv: str) -> subprocess.Popen[str]:
    """A run of very many steps, once it has done one."""
    words = [
        *SMALL,
        f"out={out}",
        "steps=1000000",
        "checkpoint.every=100000",
        *argv,
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith("step 1/"):
            return process
    raise AssertionError("".join(before))


@pytest.mark.parametrize("whom", ["the command", "one rank"])
def test_sigterm_ends_the_step_saves_and_leaves_with_75(
    whom: str, tmp_path: Path
) -> None:
    process = _begun(tmp_path / "run", "--ranks", "2")
    told = (
        process.pid
        if whom == "the command"
        else max(_descendants(process.pid))
    )
    os.kill(told, signal.SIGTERM)
    args, _ = process.communicate(timeout=120)
    assert process.returncode == 75, args
    records = read_journal(tmp_path / "run" / "metrics.jsonl")
    last = [r for r in records if r["event"] == "step"][-1]["step"]
    assert records[-1]["event"] == "stop"
    assert (
        tmp_path / "run" / "checkpoints" / f"step-{last:08}" / "manifest.json"
    ).is_file()


def test_a_rank_that_is_killed_ends_the_run_with_1_and_its_name(
    tmp_path: Path,
) -> None:
    process = _begun(tmp_path / "run", "--ranks", "2")
    ranks = _descendants(process.pid)
    os.kill(max(ranks), signal.SIGKILL)
    args, _ = process.communicate(timeout=120)
    assert process.returncode == 1, args
    assert "was killed by signal 9" in args
    assert "Traceback" not in args.split("was killed by signal 9")[0]


def test_a_rank_that_fails_by_itself_gives_up_what_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of NCCL would keep its process alive. Here over gloo, as far as torch's own call."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    names = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in {**names, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    aborted = []

    def lost(world: Any, *args: object, **options: object) -> None:
        assert aborted == []
        world.native = True
        raise CommError("rank 1 is lost")

    monkeypatch.setattr("phalanx.training.loop.train", lost)
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_abort_process_group",
        lambda: aborted.append(1),
    )
    try:
        with pytest.raises(CommError, match="rank 1 is lost"):
            train_verb.run([*SMALL, f"out={tmp_path}", "layout=accum:2"])
    finally:
        dist.destroy_process_group()
    assert aborted == [1]


@pytest.mark.parametrize(
    "came, starts, why",
    [
        # Steps that each start does before it fails.
        ([8, 7, 7, 3, 9, 9, 2, 1, 1, 4], 10, ""),
        ([5, 7, 7, 7, 8], 4, "the last 3 starts all failed after step 7"),
        (
            [4, 0, 0, 0, 8],
            4,
            "the last 3 starts all failed before their first step was done",
        ),
    ],
)
def test_ranks_that_fail_at_one_step_three_times_are_not_started_again(
    came: list[int],
    starts: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    begun = []

    def fail(fn: object, ranks: int, *args: object, **terms: object) -> None:
        step = came[len(begun)]
        begun.append(ranks)
        if step:  # as rank 0 does after each step
            with closing(DoneSteps(tmp_path)) as done:
                done.write(step)
        raise RankFailed(
            [Report(1, "the process was killed by signal 9", "", False)]
        )

    monkeypatch.setattr("phalanx.comm.launch", fail)
    argv = [*SMALL, f"out={tmp_path}", "layout=dp2", "train.restarts=9"]
    assert train_verb.run(argv) == 1
    assert begun == [2] * starts
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "rank 1 failed: the process was killed by signal 9"
    assert "from the beginning; restarts left: 8" in said[1]
    assert ("not restarted" in said[-1]) == bool(why)
    assert why in said[-1]
    assert not list(tmp_path.glob(".run.steps"))


def test_tasks_of_a_slurm_step_find_each_other_and_train_as_one_run(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    plain = {
        name: x
        for name, x in os.environ.items()
        if not name.startswith(("SLURM", "MASTER"))
    }
    step = {
        "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [*SMALL, f"out={out}", "steps=2", "layout=dp2 zero3", "--json"]
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**plain, **step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(2)
    ]  # fmt: skip
    args = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], args
    assert json.loads(args[0][0])["step"] == 2
    assert args[1][0] == ""  # one speaks
    start = next(
        r for r in read_journal(out / "metrics.jsonl") if r["event"] == "start"
    )
    assert (start["ranks"], start["layout"]) == (2, "dp2 zero3")
    assert (
        out / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    ).is_file()


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = path.read_text().split(" (", 1)
            watches = (
                "rank_watch.watcher" in path.with_name("cmdline").read_text()
            )
        except OSError:
            continue
        if int(rest.rpartition(") ")[2].split()[1]) == pid and not watches:
            found += [int(number), *_descendants(int(number))]
    return found
