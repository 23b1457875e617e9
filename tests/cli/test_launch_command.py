"""`phalanx launch`: what it prints is what Slurm, Kubernetes and the others accept."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.launch import (
    SYSTEMS,
    _python_text,
    _time_limit,
    _yaml_quoted,
    _yaml_text,
)
from phalanx.cli.launch import run as launch
from phalanx.cli.usage import UsageError
from phalanx.layout.run import Run

yaml: Any = pytest.importorskip("yaml")
RUN = """\
model = {layers = 2, hidden = 32, heads = 2, ffn = 48, vocab = 256}
batch = 8
sequence = 16
layout = "dp4 zero1"
train = {restarts = 2, fallback = "dp2 zero1"}
"""


@pytest.fixture
def printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    (tmp_path / "small.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    def words(system: str, *more: str) -> str:
        assert launch([system, "small.toml", "--nodes", "2", *more]) == 0
        return capsys.readouterr().out

    return words


def _bash(text: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=text, text=True, capture_output=True, timeout=20
    )
    assert done.returncode == 0, done.stderr


def test_a_batch_script_saves_before_its_limit_and_goes_on_after_it(
    printed: Any,
) -> None:
    text = printed(
        "slurm", "--gpus", "2", "--time", "1:00:00", "optimizer.lr=1e-3"
    )
    _bash(text)
    options = [
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {
        "--nodes=2",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--time=1:00:00",
    } <= {*options}
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= {
        *options
    }
    assert "srun --kill-on-bad-exit=1" in text
    assert "phalanx train small.toml optimizer.lr=1e-3" in text


# What a server would insist on, by its published types: a part that these texts use.
_POD = {
    "type": "object",
    "required": ["containers", "restartPolicy", "volumes"],
    "properties": {
        "containers": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "image", "resources"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "image": {"type": "string"},
                    "command": {"type": "array", "items": {"type": "string"}},
                    "args": {"type": "array", "items": {"type": "string"}},
                    "workingDir": {"type": "string"},
                    "resources": {"type": "object"},
                    "volumeMounts": {
                        "type": "array",
                        "items": {"required": ["name", "mountPath"]},
                    },
                    "env": {
                        "type": "array",
                        "items": {
                            "required": ["name"],
                            "properties": {"value": {"type": "string"}},
                            "oneOf": [
                                {"required": ["value"]},
                                {"required": ["valueFrom"]},
                            ],
                        },
                    },
                },
            },
        }
    },
}
JOB_SET = {
    "required": ["replicatedJobs"],
    "additionalProperties": False,
    "properties": {
        "failurePolicy": {"properties": {"maxRestarts": {"type": "integer"}}},
        "replicatedJobs": {
            "items": {
                "required": ["name", "template"],
                "properties": {
                    "template": {
                        "properties": {
                            "spec": {
                                "required": [
                                    "parallelism",
                                    "completions",
                                    "template",
                                ],
                                "properties": {
                                    "completionMode": {
                                        "enum": ["Indexed", "NonIndexed"]
                                    },
                                    "template": {"properties": {"spec": _POD}},
                                },
                            }
                        }
                    }
                },
            }
        },
    },
}
TRAIN_JOB = {
    "required": ["runtimeRef", "trainer"],
    "additionalProperties": False,
    "properties": {
        "runtimeRef": {"required": ["name"]},
        "trainer": {
            "additionalProperties": False,
            "properties": {
                "numNodes": {"type": "integer"},
                "numProcPerNode": {"type": ["integer", "string"]},
                "image": {"type": "string"},
                "command": {"type": "array"},
                "args": {"type": "array", "items": {"type": "string"}},
                "resourcesPerNode": {"type": "object"},
            },
        },
        "podTemplateOverrides": {"items": {"required": ["targetJobs"]}},
    },
}
SKY = {
    "required": ["run", "num_nodes", "resources"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "workdir": {"type": "string"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "resources": {"type": "object"},
    },
}


@pytest.mark.parametrize("gpus", ["2", "0"])
def test_manifests_of_kubernetes_are_what_their_types_ask_for(
    printed: Any, gpus: str
) -> None:
    for system, kind, schema in (
        ("k8s", "JobSet", JOB_SET),
        ("kubeflow", "TrainJob", TRAIN_JOB),
    ):
        text = printed(
            system,
            "--gpus",
            gpus,
            "--image",
            "here/phalanx:1",
            "--volume",
            "team",
        )
        settings, job = yaml.safe_load_all(text)
        assert settings["data"]["run.toml"] == RUN
        assert (job["kind"], job["metadata"]["name"]) == (kind, "small")
        jsonschema.validate(job["spec"], schema)


def test_nodes_of_a_job_set_find_the_first_of_them(printed: Any) -> None:
    _, job = yaml.safe_load_all(printed("k8s", "--gpus", "2"))
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["completions"] == 2
    assert env["PET_NNODES"] == "2"
    # <set>-<job>-<index of the job>-<index of the pod>.<subdomain, by default the set>
    assert env["PET_MASTER_ADDR"] == "small-node-0-0.small"
    assert container["args"][-1] == "out=/workspace/runs/small"


def test_a_task_of_skypilot_is_one_command_on_each_node(printed: Any) -> None:
    task = yaml.safe_load(
        printed(
            "sky",
            "--gpus",
            "2",
            "--accelerator",
            "A100",
            'optimizer.name="sgd"',
        )
    )
    jsonschema.validate(task, SKY)
    assert task["resources"]["accelerators"] == "A100:2"
    _bash(task["run"])
    assert task["run"].startswith("phalanx train small.toml ")


def test_torchrun_may_begin_with_as_few_nodes_as_a_fallback_needs(
    printed: Any,
) -> None:
    text = printed("torchrun", "--gpus", "2", "--master", "node1")
    _bash(text)
    assert "--nnodes=1:2 --nproc-per-node=2 --max-restarts=2" in text
    assert "--nnodes=2 " in printed(
        "torchrun", "--gpus", "2", "train.fallback="
    )


def test_a_script_for_ray_has_a_worker_for_each_rank(printed: Any) -> None:
    tree = ast.parse(printed("ray", "--gpus", "2"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = {
        k.arg: ast.unparse(k.value)
        for call in calls
        for k in call.keywords
        if k.arg
    }
    assert (words["num_workers"], words["use_gpu"], words["max_failures"]) == (
        "4",
        "True",
        "2",
    )


def test_what_is_submitted_is_what_is_printed(
    printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed("slurm", "--gpus", "2")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="sbatch is not installed"):
        printed("slurm", "--gpus", "2", "--submit")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    printed("slurm", "--gpus", "2", "--submit")
    assert (tmp_path / "submitted").read_text() == text


def test_a_layout_for_other_ranks_is_refused(printed: Any) -> None:
    with pytest.raises(
        UsageError, match=r"is for 4 ranks; --nodes 2 with --gpus 8 make 16"
    ):
        printed("slurm")


# ---- run files and words that a careless text would break


def _run_of(system: str, text: str) -> str:
    """The run file that a job's text carries, read as its system reads it."""
    if system in ("k8s", "kubeflow"):
        settings, _ = yaml.safe_load_all(text)
        return str(settings["data"]["run.toml"])
    (run,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "RUN"
    )
    return str(ast.literal_eval(run))


HARD = {
    "three quotes": f'# """ + exit() + """\n{RUN}',
    "three quotes at the end": f'{RUN}# """',
    "an indented first line": f"    # my run\n{RUN}",
    "a first line that is a tab": f"\t# my run\n{RUN}",
    "an empty first line": f"\n\n{RUN}",
    "backslashes": f"# C:\\new\\x00 \\\\ \\\n{RUN}",
    "a backslash at the end": f"{RUN}# ends in \\",
    "no newline at the end": RUN.rstrip(),
    "lines of spaces": f"{RUN}   \n# end\n",
    "tabs": RUN.replace("batch", "\tbatch"),
    "names of slots": f"# {{{{name}}}} {{{{jobs}}}} {{{{container.yaml}}}}\n{RUN}",
    "words of YAML": f"# --- : | > & * ! % @ ` ' \" {{}} []\n# ...\n{RUN}",
    "other line ends": f"# a\u2028b\u0085c\ufeffd\n{RUN}",
    "other scripts": f"# Überlänge 模型 🙂\n{RUN}",
    "carriage returns": RUN.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("system", ["k8s", "kubeflow", "ray"])
@pytest.mark.parametrize("what", HARD)
def test_a_text_carries_any_run_file_unchanged(
    what: str, system: str, printed: Any, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(
        HARD[what], encoding="utf-8", newline=""
    )
    carried = _run_of(system, printed(system, "--gpus", "2"))
    assert carried.rstrip("\n") == HARD[what].replace("\r\n", "\n").rstrip(
        "\n"
    )
    plain = Run.parse(
        (tmp_path / "small.toml").read_text(encoding="utf-8"), "small"
    )
    assert Run.parse(carried, "small") == plain


LINES = st.lists(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0")
    )
)


@given(LINES)
def test_lines_of_any_characters_are_the_same_in_yaml_and_python(
    lines: list[str],
) -> None:
    text = "\n".join([*lines, "end"]) + "\n"
    block = f"data:\n  run.toml: {_yaml_text(text, margin=4)}\nlast: 1\n"
    assert yaml.safe_load(block) == {"data": {"run.toml": text}, "last": 1}
    assert ast.literal_eval(_python_text(text)) == text
    flow = f"args: [{_yaml_quoted(text)}, {_yaml_quoted(text)}]"
    assert yaml.safe_load(flow) == {"args": [text, text]}


def test_a_plain_run_file_stays_readable(printed: Any) -> None:
    for system in ("k8s", "kubeflow", "ray"):
        text = printed(system, "--gpus", "2")
        assert all(
            line in map(str.strip, text.splitlines())
            for line in RUN.splitlines()
        )


WORDS = ["lora.targets=['wq', 'wk']", 'optimizer.name="sgd"', "lora.r=4"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_quotes_and_spaces_of_words_reach_the_command_whole(
    system: str, printed: Any
) -> None:
    text = printed(system, "--gpus", "2", *WORDS)
    if system in ("k8s", "kubeflow"):
        _, job = yaml.safe_load_all(text)
        trainer = job["spec"].get("trainer")
        if trainer is None:
            pod = job["spec"]["replicatedJobs"][0]["template"]["spec"][
                "template"
            ]["spec"]
            trainer = pod["containers"][0]
        assert trainer["args"][1:-1] == WORDS
    elif system == "ray":
        settings = next(
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.keyword)
            and node.arg == "train_loop_config"
        )
        assert isinstance(settings, ast.Dict)
        assert ast.literal_eval(settings.values[1])[:-1] == WORDS
    else:
        script = yaml.safe_load(text)["run"] if system == "sky" else text
        command = re.search("phalanx train .*", script)
        assert command is not None
        # The shell itself says which words it reads.
        listing = command[0].replace("phalanx train", "printf '%s\\n'")
        read = subprocess.run(
            ["bash", "-c", listing],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        assert read.stdout.splitlines() == ["small.toml", *WORDS]


@pytest.mark.parametrize(
    "name", ["no", "on", "123", "2024-01-01", "1e5", "0x1f", "---", "x" * 200]
)
def test_a_job_s_name_is_text_that_every_system_accepts(
    name: str, printed: Any
) -> None:
    settings, job = yaml.safe_load_all(
        printed("k8s", "--gpus", "2", f"--name={name}")
    )
    (made,) = {settings["metadata"]["name"], job["metadata"]["name"]}
    # A label of RFC 1035, with room for -node-0-16383 in 63 characters.
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", made)
    assert (
        yaml.safe_load(printed("sky", "--gpus", "2", f"--name={name}"))["name"]
        == made
    )


@pytest.mark.parametrize(
    "image", ["10.0.0.1:5000/phalanx", "12:30", "true", "here/x@sha256:0a"]
)
def test_an_image_that_looks_like_a_number_is_text(
    image: str, printed: Any
) -> None:
    _, job = yaml.safe_load_all(
        printed("kubeflow", "--gpus", "2", "--image", image)
    )
    assert job["spec"]["trainer"]["image"] == image


@pytest.mark.parametrize(
    "flag", ["--image", "--volume", "--accelerator", "--master"]
)
@pytest.mark.parametrize(
    "value", ["a b", "a;b", "$(id)", "a\nb", "", "{a", "a,b", "-x", "#"]
)
def test_an_option_that_would_be_read_as_more_than_a_word_is_refused(
    flag: str, value: str, printed: Any
) -> None:
    with pytest.raises(UsageError, match=f"{flag} is .*write letters, digits"):
        printed("k8s", "--gpus", "2", f"{flag}={value}")


def test_an_out_that_would_leave_its_comment_is_refused(printed: Any) -> None:
    with pytest.raises(
        UsageError, match="has a character that a job's text cannot contain"
    ):
        printed("torchrun", "--gpus", "2", "out='''a\nid\n'''")


@pytest.mark.parametrize(
    "limit",
    [
        "90",
        "30:00",
        "24:00:00",
        "7-0",
        "2-12:30",
        "1-00:00:00",
        "0",
        "UNLIMITED",
    ],
)
def test_a_time_limit_of_slurm_is_passed_on(limit: str, printed: Any) -> None:
    assert f"#SBATCH --time={limit}\n" in printed(
        "slurm", "--gpus", "2", "--time", limit
    )


@pytest.mark.parametrize(
    "limit",
    [
        "soon",
        "",
        "1h",
        "24:00:00:00",
        "-1",
        "1-",
        "1-2-3",
        "1.5",
        "1:00:00 --x",
        "10\n",
        "٣",
    ],
)
def test_a_time_limit_that_sbatch_would_refuse_is_refused(
    limit: str, printed: Any
) -> None:
    with pytest.raises(UsageError, match=r"--time is .*write minutes"):
        printed("slurm", "--gpus", "2", f"--time={limit}")


@pytest.mark.parametrize(
    "limit, seconds", [("2", 120), ("0:30", 30), ("0:01:30", 90), ("0-0", 0)]
)
def test_a_time_limit_without_time_to_train_is_refused(
    limit: str, seconds: int
) -> None:
    with pytest.raises(
        UsageError, match=rf"{seconds} s; a run is asked to save 120 s before"
    ):
        _time_limit(limit)
