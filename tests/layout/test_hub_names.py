"""Names of the hub are found in a cache that is made by hand, without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch

import phalanx
from hub_models import saved, theirs
from phalanx.cli import main
from phalanx.layout import Shape, hub
from phalanx.layout.hub import (
    HubError,
    config_folder,
    data_folder,
    model_folder,
)

REVISION = "5f0c"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub, offline."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for found in (config_folder, model_folder, data_folder):
        found.cache_clear()
    return folder


def kept(cache: Path, kind: str, name: str, files: Path) -> None:
    """Puts files into the cache as huggingface_hub keeps them: links to blobs."""
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    for folder in ("refs", "blobs", f"snapshots/{REVISION}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for path in (each for each in files.rglob("*") if each.is_file()):
        inner = path.relative_to(files)
        blob = repository / "blobs" / str(inner).replace("/", "-")
        shutil.copy(path, blob)
        link = repository / "snapshots" / REVISION / inner
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def test_a_model_of_the_hub_is_trained_by_its_name(
    cache: Path, tmp_path: Path, capsys: Capture
) -> None:
    model = theirs("llama", vocab_size=256)
    kept(cache, "model", "Some/Tiny-0.5B", saved(model, tmp_path / "files"))
    tokens, text = tmp_path / "tokens", tmp_path / "text.txt"
    text.write_text("a text of some words\n" * 60)
    assert main(["data", "prepare", str(text), "--out", str(tokens)]) == 0
    rule = ["optimizer.name=sgd", "optimizer.lr=1e-9", "steps=1", "batch=2"]
    words = [
        *rule,
        "sequence=16",
        f"data={tokens}",
        "layout=",
        f"out={tmp_path}/run",
    ]
    assert main(["train", "model=hf:Some/Tiny-0.5B", *words]) == 0
    found = phalanx.load(tmp_path / "run")["layers.0.attn.wq.weight"]
    wanted = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_name_that_is_not_in_the_cache_is_one_sentence(
    cache: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["check", "dp2", "--model", "hf:Some/Other"]) == 2
    said = capsys.readouterr().err
    assert "hf:Some/Other is no folder here, is not in the cache" in said
    assert "hf download Some/Other" in said
    words = ["batch=2", "sequence=16", f"out={tmp_path}/run", "layout="]
    assert main(["train", "model=tiny", "data=hf:Some/Data", *words]) == 2
    assert (
        "hf download Some/Data --repo-type dataset" in capsys.readouterr().err
    )


def test_a_network_that_is_not_there_is_asked_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unreachable(name: str, file: str) -> str:
        asked.append(name)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    words = ["batch=2", "sequence=16", f"out={tmp_path}/run", "layout="]
    assert main(["train", "model=hf:Some/Far", *words]) == 2
    assert asked == ["Some/Far"]


def test_of_a_model_for_a_check_its_configuration_is_enough(
    cache: Path, tmp_path: Path
) -> None:
    files = saved(theirs("qwen3"), tmp_path / "files")
    for weights in files.glob("*.safetensors"):
        weights.unlink()
    kept(cache, "model", "Some/Config", files)
    assert Shape.load("hf:Some/Config").layers == 2
    with pytest.raises(HubError, match="hf:Some/Config"):
        model_folder("Some/Config")  # one of its files is missing


def test_data_of_the_hub_is_read_from_one_of_its_folders(
    cache: Path, tmp_path: Path, capsys: Capture
) -> None:
    files = tmp_path / "files"
    for folder in ("small", "large"):
        (files / folder).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            rows = [{"text": f"{folder} {split} {n}"} for n in range(30)]
            lines = "\n".join(map(json.dumps, rows))
            name = f"{split}-00000-of-00001.jsonl"
            (files / folder / name).write_text(lines)
    kept(cache, "dataset", "Some/Words", files)
    folder = Path(data_folder("Some/Words/small"))
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    model = "model={layers=1,hidden=16,heads=2,ffn=32,vocab=256}"
    words = [
        "steps=1",
        "batch=2",
        "sequence=16",
        "layout=",
        f"out={tmp_path}/run",
    ]
    assert main(["train", model, "data=hf:Some/Words/small", *words]) == 0
    capsys.readouterr()
    assert main(["data", "show", f"{tmp_path}/run/tokens", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    size = sum(len(f"small train {n}") for n in range(30))
    assert figures["train"]["tokens"] == size
    held = sum(len(f"small validation {n}") for n in range(30))
    assert figures["validation"]["tokens"] == held


class FakeApi:
    """The calls of huggingface_hub.HfApi that a push makes."""

    made: ClassVar[list[Any]] = []

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        self.made.append((name, private, exist_ok))
        return f"https://hub/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: str) -> None:
        names = sorted(path.name for path in Path(folder_path).iterdir())
        self.made.append((repo_id, names))


def test_an_export_is_pushed_as_a_private_model(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "model={layers=1,hidden=16,heads=2,ffn=32,vocab=256}"
    words = [
        "steps=1",
        "batch=2",
        "sequence=16",
        "layout=",
        f"out={tmp_path}/run",
    ]
    assert main(["train", model, *words]) == 0
    export = ["checkpoint", "export", f"{tmp_path}/run"]
    monkeypatch.setattr(hub, "_hub", lambda: SimpleNamespace(HfApi=FakeApi))
    assert main([*export, "--to", f"{tmp_path}/a", "--push", "me/tiny"]) == 0
    assert "pushed to https://hub/me/tiny" in capsys.readouterr().err
    (_, private, _), (name, files) = FakeApi.made
    assert private
    assert name == "me/tiny"
    assert {"config.json", "model.safetensors.index.json"} <= set(files)

    def refused() -> Any:
        raise OSError("401 Unauthorized")

    monkeypatch.setattr(hub, "_hub", lambda: SimpleNamespace(HfApi=refused))
    assert main([*export, "--to", f"{tmp_path}/b", "--push", "me/tiny"]) == 2
    said = capsys.readouterr().err
    assert (
        "is complete, and cannot be pushed to me/tiny: 401 Unauthorized."
        in said
    )
