"""`phalanx launch`: what it prints is what Slurm, Kubernetes and the others accept."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from phalanx.cli.launch import run as launch
from phalanx.cli.usage import UsageError

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    (tmp_path / "small.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)

    def words(system: str, *more: str) -> str:
        assert launch([system, "small.toml", "--nodes", "2", *more]) == 0
        return capsys.readouterr().out

    return words


def _bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_a_batch_script_saves_before_its_limit_and_goes_on_after_it(printed: Any) -> None:
    text = printed("slurm", "--gpus", "2", "--time", "1:00:00", "optimizer.lr=1e-3")
    _bash(text)
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=1:00:00"} <= {*options}
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= {*options}
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
                    "volumeMounts": {"type": "array", "items": {"required": ["name", "mountPath"]}},
                    "env": {
                        "type": "array",
                        "items": {
                            "required": ["name"],
                            "properties": {"value": {"type": "string"}},
                            "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}],
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
                                "required": ["parallelism", "completions", "template"],
                                "properties": {
                                    "completionMode": {"enum": ["Indexed", "NonIndexed"]},
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
def test_manifests_of_kubernetes_are_what_their_types_ask_for(printed: Any, gpus: str) -> None:
    for system, kind, schema in (("k8s", "JobSet", JOB_SET), ("kubeflow", "TrainJob", TRAIN_JOB)):
        text = printed(system, "--gpus", gpus, "--image", "here/phalanx:1", "--volume", "team")
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
        printed("sky", "--gpus", "2", "--accelerator", "A100", 'optimizer.name="sgd"')
    )
    jsonschema.validate(task, SKY)
    assert task["resources"]["accelerators"] == "A100:2"
    _bash(task["run"])
    assert task["run"].startswith("phalanx train small.toml ")


def test_torchrun_may_begin_with_as_few_nodes_as_a_fallback_needs(printed: Any) -> None:
    text = printed("torchrun", "--gpus", "2", "--master", "node1")
    _bash(text)
    assert "--nnodes=1:2 --nproc-per-node=2 --max-restarts=2" in text
    assert "--nnodes=2 " in printed("torchrun", "--gpus", "2", "train.fallback=")


def test_a_script_for_ray_has_a_worker_for_each_rank(printed: Any) -> None:
    tree = ast.parse(printed("ray", "--gpus", "2"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    words = {k.arg: ast.unparse(k.value) for call in calls for k in call.keywords if k.arg}
    assert (words["num_workers"], words["use_gpu"], words["max_failures"]) == ("4", "True", "2")


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
    with pytest.raises(UsageError, match=r"is for 4 ranks; --nodes 2 with --gpus 8 are 16"):
        printed("slurm")
