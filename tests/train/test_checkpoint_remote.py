"""Checkpoints that are uploaded: whole or not there, gone on from elsewhere, pruned as here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options
from loop_worlds import losses, records, small, trained, weights

from phalanx.cli.main import main
from phalanx.layout.run import Run, RunError
from phalanx.train import checkpoint_remote
from phalanx.train.checkpoint import steps
from phalanx.train.checkpoint_format import CheckpointError, verify_checkpoint
from phalanx.train.checkpoint_remote import RemoteFolder, Uploader

CONSTANT = "optimizer.schedule=constant"  # which does not depend on the number of steps


class Killed(BaseException):
    """Not an Exception: nothing goes on after it."""


class Faulty(LocalFileSystem):
    """A local file system, each of whose calls is counted, and of which one fails."""

    protocol = "faulty"
    cachable = False
    calls = 0
    fails: int | None = None
    how: type[BaseException] = OSError
    after: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def called(cls) -> None:
        cls.after()
        cls.calls += 1
        if cls.calls == cls.fails:
            raise cls.how("made to fail")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://"))

    def open(self, *args: Any, **words: Any) -> Any:
        self.called()
        file = super().open(*args, **words)
        plain = file.write

        def write(data: Any) -> Any:
            self.called()
            return plain(data)

        file.write = write
        return file


def _counted(name: str) -> Any:
    def call(self: Faulty, *args: Any, **words: Any) -> Any:
        self.called()
        return getattr(LocalFileSystem, name)(self, *args, **words)

    return call


for each in ("mv", "rm", "rm_file", "pipe_file", "size", "find", "exists", "cat_file", "makedirs"):
    setattr(Faulty, each, _counted(each))
fsspec.register_implementation("faulty", Faulty, clobber=True)


class Flat(MemoryFileSystem):
    """A store without folders: it lists every file below a path, and has none that is empty."""

    protocol = "flat"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("flat://"))

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        pass

    def ls(self, path: Any, detail: bool = True, **words: Any) -> Any:
        path = self._strip_protocol(path)
        found = [name for name in self.store if name == path or name.startswith(f"{path}/")]
        if not found:
            raise FileNotFoundError(path)
        infos = [{"name": n, "size": self.store[n].size, "type": "file"} for n in sorted(found)]
        return infos if detail else [info["name"] for info in infos]


fsspec.register_implementation("flat", Flat, clobber=True)


class Vault(LocalFileSystem):
    """A local file system that wants a password, and quotes it in the error of each seventh call."""

    protocol = "vault"
    cachable = False
    calls = 0
    broken = False

    def __init__(self, host: str, username: str, password: str, **words: Any) -> None:
        super().__init__(**words)
        if password != PASSWORD:
            raise PermissionError(f"{username} cannot log in with {password}")

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> Any:
        options = infer_storage_options(url)
        return {name: options[name] for name in ("host", "username", "password")}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return infer_storage_options(text)["path"] if text.startswith("vault") else text.rstrip("/")

    def refuse(self) -> None:
        Vault.calls += 1
        if Vault.broken or Vault.calls % 7 == 0:
            raise OSError(
                f"no answer of vault://runner:{PASSWORD}@host/x?token={PASSWORD}: {PASSWORD}"
            )

    def open(self, *args: Any, **words: Any) -> Any:
        self.refuse()
        return super().open(*args, **words)

    def ls(self, *args: Any, **words: Any) -> Any:
        self.refuse()
        return super().ls(*args, **words)


PASSWORD = "pass1word-of-the-vault"
fsspec.register_implementation("vault", Vault, clobber=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at each of five steps."""
    out = tmp_path_factory.mktemp("saved") / "run"
    trained(
        small(out, "checkpoint.every=1", "checkpoint.keep=5", "validation.batches=0"), "dp2 zero1"
    )
    return out


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go."""
    out = tmp_path_factory.mktemp("truth") / "run"
    trained(small(out, "steps=6", CONSTANT, "validation.batches=0"), "fp64")
    return out


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpoint_remote, "WAIT", 0.0)
    Faulty.calls, Faulty.fails, Faulty.how = 0, None, OSError
    Faulty.after = staticmethod(lambda: None)
    Vault.calls, Vault.broken = 0, False
    yield
    fsspec.filesystem("memory").rm("/", recursive=True)
    Flat.store.clear()


def sound_there(folder: Path) -> list[str]:
    """The checkpoints of a remote folder, of which every byte is right."""
    whole = [path for path in steps(folder) if (path / "manifest.json").exists()]
    assert not [fault for path in whole for fault in verify_checkpoint(path)]
    return [path.name for path in whole]


def no_part(folder: Path) -> None:
    """All files that a manifest names are there, with their sizes."""
    for path in folder.glob("step-*/manifest.json"):
        for file in json.loads(path.read_text())["body"]["files"]:
            assert (path.parent / file["name"]).stat().st_size == file["size"]


def uploaded(folder: Path, names: list[int], url: str) -> list[str]:
    """Upload these steps; what went wrong, for each."""
    uploader, errors = Uploader(url, 1), []
    for step in names:
        uploader.offer(folder / f"step-{step:08}")
        uploader.finish()
        errors += [each.error for each in uploader.taken()]
    return errors


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_run_goes_on_where_nothing_is_left_of_it(
    scheme: str, truth: Path, tmp_path: Path
) -> None:
    url = f"memory://bucket/{tmp_path.name}" if scheme == "memory" else f"file://{tmp_path}/there"
    words = (f"checkpoint.remote={url}", "checkpoint.every=1", CONSTANT)
    first, second = (tmp_path / name / "run" for name in ("first", "second"))
    for out in (first, second):
        out.parent.mkdir()
    trained(small(first, *words), "fp64")
    assert RemoteFolder(url).steps() == [5, 4]  # pruned as here
    assert [r["error"] for r in records(first, "upload")][-1] == ""
    shutil.rmtree(first)
    trained(small(second, "steps=6", *words), "fp64")
    assert "going on at step 5" in records(second, "resume")[0]["text"]
    assert losses(second)[6] == losses(truth)[6]
    assert weights(second, 6) == weights(truth, 6)


def test_what_is_damaged_here_is_fetched_and_what_is_damaged_there_passed_over(
    saved: Path, tmp_path: Path
) -> None:
    folder, there = tmp_path / "run" / "checkpoints", tmp_path / "there"
    shutil.copytree(saved / "checkpoints", folder)
    assert [RemoteFolder(f"file://{there}").upload(folder / f"step-0000000{n}") for n in (3, 4, 5)]
    for path in (folder / "step-00000005", there / "step-00000005", folder / "step-00000004"):
        file = path / "rank-00001.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    run = small(tmp_path / "run", f"checkpoint.remote=file://{there}", "validation.batches=0")
    trained(run, "dp2 zero1")
    assert "going on at step 4" in records(tmp_path / "run", "resume")[0]["text"]
    said = " ".join(r["text"] for r in records(tmp_path / "run", "damaged"))
    assert "are not what was written" in said
    assert (folder / "set-aside-step-00000004").is_dir()


def test_every_call_of_an_upload_fails_once_and_the_upload_is_made_again(
    saved: Path, tmp_path: Path
) -> None:
    folder = saved / "checkpoints"
    assert uploaded(folder, [1, 2], f"faulty://{tmp_path}/all") == ["", ""]
    count = Faulty.calls
    assert count > 20
    for n in range(1, count + 1):
        there = tmp_path / str(n)
        Faulty.calls, Faulty.fails = 0, n
        Faulty.after = staticmethod(partial(no_part, there))
        assert uploaded(folder, [1, 2], f"faulty://{there}") == ["", ""], n
        assert sound_there(there) == ["step-00000002"], n


def test_an_upload_that_ends_anywhere_leaves_no_manifest_without_its_files(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ended = saved / "checkpoints", set[str]()
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    for n in range(1, 30):
        there = tmp_path / str(n)
        Faulty.calls, Faulty.fails, Faulty.how = 0, n, Killed
        remote = RemoteFolder(f"faulty://{there}")
        with suppress(Killed):
            for step in (1, 3):
                remote.upload(folder / f"step-{step:08}")
                remote.prune(step, 1)
        ended.add(" ".join(sound_there(there)))
        Faulty.fails = None
        # The next start may take another course since step 1.
        assert uploaded(folder, [2], f"faulty://{there}") == [""]
        assert sound_there(there) == ["step-00000002"]
    assert ended == {"", "step-00000001", "step-00000003 step-00000001", "step-00000003"}


def test_an_upload_that_fails_for_good_is_told_at_the_end(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    run = small(tmp_path / "run", f"checkpoint.remote=file://{blocked}/x", "steps=1")
    outcomes = trained(run, "dp2")
    assert len(set(outcomes)) == 1
    assert f"it is not at file://{blocked}/x: rank 0: " in outcomes[0].unsaved
    assert records(tmp_path / "run", "upload")[0]["error"]


@pytest.mark.parametrize("scheme", ["memory", "file", "flat"])
def test_a_run_in_a_folder_below_or_above_does_not_count(
    scheme: str, saved: Path, tmp_path: Path
) -> None:
    top = f"file://{tmp_path}/team" if scheme == "file" else f"{scheme}://{tmp_path.name}/team"
    urls = [top, f"{top}/run1", f"{top}/run1/step-00000009", f"{top}/run10"]
    for step, url in enumerate(urls, 1):
        assert RemoteFolder(url).steps() == []
        RemoteFolder(url).upload(saved / "checkpoints" / f"step-{step:08}")
    for step, url in enumerate(urls, 1):
        assert RemoteFolder(url).steps() == [step]
        RemoteFolder(f"{url}/").prune(step, 1)
    assert [RemoteFolder(url).steps() for url in urls] == [[1], [2], [3], [4]]
    RemoteFolder(top).upload(saved / "checkpoints" / "step-00000005")
    RemoteFolder(top).prune(5, 1)
    assert [RemoteFolder(url).steps() for url in urls] == [[5], [2], [3], [4]]


@pytest.mark.parametrize("scheme", ["memory", "file", "flat"])
def test_a_new_run_begins_above_the_folder_of_another(
    scheme: str, saved: Path, tmp_path: Path
) -> None:
    top = f"file://{tmp_path}/team" if scheme == "file" else f"{scheme}://{tmp_path.name}/team"
    RemoteFolder(f"{top}/run1").upload(saved / "checkpoints" / "step-00000005")
    run = small(tmp_path / "run", f"checkpoint.remote={top}", "steps=1", "validation.batches=0")
    (outcome,) = trained(run, "")
    assert (outcome.step, outcome.unsaved) == (1, "")
    assert RemoteFolder(top).steps() == [1]
    assert RemoteFolder(f"{top}/run1").steps() == [5]


def test_a_listing_that_cannot_be_understood_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would begin anew beside its checkpoints."""
    monkeypatch.setattr(Flat, "ls", lambda *args, **words: [{"name": "/elsewhere/step-00000001"}])
    with pytest.raises(CheckpointError, match="'/elsewhere/step-00000001', which is not in it"):
        RemoteFolder("flat://bucket/run").steps()


def test_a_password_is_in_no_file_and_in_no_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "there", tmp_path / "run"
    words = [
        f"checkpoint.remote=vault://runner:{PASSWORD}@host{there}", f"out={out}", "layout=", "batch=6",
        "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}", "sequence=18", "validation.batches=0",
    ]  # fmt: skip
    assert main(["train", *words, "steps=2", "checkpoint.every=1"]) == 0
    assert steps(there)
    shutil.rmtree(out / "checkpoints")  # the same command goes on from there
    assert main(["train", *words, "steps=3"]) == 0
    assert "going on at step 2" in records(out, "resume")[0]["text"]
    Vault.broken = True
    assert main(["train", *words, "steps=4"]) == 1
    shutil.rmtree(out / "checkpoints")
    assert main(["train", *words, "steps=4"]) != 0
    assert main(["train", *[w.replace(PASSWORD, "guess1ed") for w in words], "steps=4"]) != 0
    assert main(["report", str(out)]) == 0
    said = "".join(capfd.readouterr())
    assert "no answer of vault://runner:***@host/x?token=*** ***" in said
    texts = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("run.toml", "metrics.jsonl", "report.html", "manifest.json", "rank-0.log"):
        assert [path for path in texts if path.name == name], name
    for secret in (PASSWORD, "guess1ed"):
        assert secret not in said
        assert not [path for path, raw in texts.items() if secret.encode() in raw]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("checkpoint.remote=bucket/run", "is no URL"),
        ("checkpoint.remote=nope://bucket", "nope"),
        ("out=s3://bucket/run", "Write checkpoint.remote"),
    ],
)
def test_what_cannot_be_uploaded_to_is_refused_at_once(words: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        Run.parse("", "run", (words,))


def test_without_fsspec_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "fsspec" else find(name))
    with pytest.raises(RunError, match=r"pip install 'phalanx\[remote\]'"):
        Run.parse("", "run", ("checkpoint.remote=s3://bucket/run",))
