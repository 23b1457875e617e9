"""Stores that fail, refuse, hang or have no folders, and uploads to them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

from phalanx.layout.url import Url
from phalanx.training import remote_owner, remote_task
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import verify_checkpoint
from phalanx.training.checkpoint_load import newest
from phalanx.training.checkpoint_remote import Remote, Uploader
from phalanx.training.remote_folder import RemoteFolder
from phalanx.training.remote_owner import Ownership


class Killed(BaseException):
    """Not an Exception: nothing goes on after it."""


def kill(text: str) -> BaseException:
    """The end of this process, as `kill -9` makes it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(text)


class Faulty(LocalFileSystem):
    """A local file system, each of whose calls is counted, and of which one fails. `before` is called
    with the name of each call and its first word."""

    protocol = "faulty"
    cachable = False
    calls = 0
    fails: int | None = None
    how: Callable[[str], BaseException] = OSError
    before: Callable[[str, str], object] = staticmethod(
        lambda name, path: None
    )

    @classmethod
    def called(cls, name: str, path: Any = "") -> None:
        cls.before(name, str(path))
        cls.calls += 1
        if cls.calls == cls.fails:
            raise cls.how("made to fail")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(
            str(path).removeprefix("faulty://")
        )

    def open(
        self, path: Any, mode: str = "rb", *args: Any, **words: Any
    ) -> Any:
        self.called("open", path)
        file = super().open(path, mode, *args, **words)
        plain = file.write

        def write(data: Any) -> Any:
            self.called("write", path)
            return plain(data)

        file.write = write
        return file


def _counted(name: str) -> Any:
    def call(self: Faulty, *args: Any, **words: Any) -> Any:
        self.called(name, *args[:1])
        return getattr(LocalFileSystem, name)(self, *args, **words)

    return call


CALLS = (
    "mv",
    "rmdir",
    "rm_file",
    "pipe_file",
    "size",
    "ls",
    "modified",
    "cat_file",
    "makedirs",
)
for each in CALLS:
    setattr(Faulty, each, _counted(each))
fsspec.register_implementation("faulty", Faulty, clobber=True)


class Flat(MemoryFileSystem):
    """A store without folders and without exclusive creation: it lists every file below a path."""

    protocol = "flat"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: Callable[[], object] = staticmethod(lambda: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(
            str(path).removeprefix("flat://")
        )

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        pass

    def ls(self, path: Any, detail: bool = True, **words: Any) -> Any:
        Flat.before()
        path = self._strip_protocol(path)
        found = [
            name
            for name in self.store
            if name == path or name.startswith(f"{path}/")
        ]
        if not found:
            raise FileNotFoundError(path)
        infos = [
            {"name": n, "size": self.store[n].size, "type": "file"}
            for n in sorted(found)
        ]
        return infos if detail else [info["name"] for info in infos]

    def open(
        self, path: Any, mode: str = "rb", *args: Any, **words: Any
    ) -> Any:
        if "x" in mode:
            raise NotImplementedError(mode)
        return super().open(path, mode, *args, **words)

    def cat_file(self, path: Any, *args: Any, **words: Any) -> Any:
        Flat.before()
        return super().cat_file(path, *args, **words)

    def pipe_file(
        self, path: Any, value: Any, *args: Any, **words: Any
    ) -> Any:
        Flat.before()
        return super().pipe_file(path, value, *args, **words)


fsspec.register_implementation("flat", Flat, clobber=True)


class Vault(LocalFileSystem):
    """A local file system that wants a password, and quotes it in the error of each seventh call."""

    protocol = "vault"
    cachable = False
    calls = 0
    broken = False

    def __init__(
        self, host: str, username: str, password: str, **words: Any
    ) -> None:
        super().__init__(**words)
        if password != PASSWORD:
            raise PermissionError(f"{username} cannot log in with {password}")

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> Any:
        options = infer_storage_options(url)
        return {
            name: options[name] for name in ("host", "username", "password")
        }

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return (
            infer_storage_options(text)["path"]
            if text.startswith("vault")
            else text.rstrip("/")
        )

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


@contextmanager
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing waits, and every store is empty and sound."""
    monkeypatch.setattr(remote_task, "WAIT", 0.0)
    monkeypatch.setattr(remote_owner, "SETTLE", 0.0)
    monkeypatch.setattr(remote_owner, "POLL", 0.0)
    Faulty.calls, Faulty.fails, Faulty.how = 0, None, OSError
    Faulty.before = staticmethod(lambda name, path: None)
    Flat.before = staticmethod(lambda: None)
    Vault.calls, Vault.broken = 0, False
    yield
    fsspec.filesystem("memory").rm("/", recursive=True)
    Flat.store.clear()


def url_in(scheme: str, path: Path) -> str:
    """A folder of a test's own in a store."""
    return (
        f"{scheme}://{path}"
        if scheme in ("file", "faulty")
        else f"{scheme}://bucket{path}"
    )


def listing(url: str) -> dict[str, bytes]:
    """Every file of a remote folder with its bytes, but for heartbeats."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    names = [
        name for name in fs.find(root) if not name.endswith("/owner.json")
    ]
    return {name: fs.cat_file(name) for name in sorted(names)}


def sound_there(folder: Path) -> list[str]:
    """The checkpoints of a remote folder, of which every byte is right."""
    whole = [
        path for path in steps(folder) if (path / "manifest.json").exists()
    ]
    assert not [fault for path in whole for fault in verify_checkpoint(path)]
    return [path.name for path in whole]


def no_part(folder: Path) -> None:
    """All files that a manifest names are there, with their sizes."""
    for path in folder.glob("step-*/manifest.json"):
        for file in json.loads(path.read_text())["body"]["files"]:
            assert (path.parent / file["name"]).stat().st_size == file["size"]


def remote_of(url: str, out: Path, timeout: float = 60.0) -> Remote:
    """A remote folder, for the run in a folder of the disk."""
    found = newest(out / "checkpoints")
    return Remote(
        Url(url), timeout, Ownership(url, out, found[1] if found else None)
    )


def uploaded(out: Path, names: list[int], url: str) -> list[str]:
    """Upload these steps of a run; what went wrong, for each."""
    uploader, errors = Uploader(remote_of(url, out), 1), []
    for step in names:
        uploader.offer(out / "checkpoints" / f"step-{step:08}")
        while uploader.under_way(60.0):
            pass
        errors += [each.error + each.notice for each in uploader.taken()]
    uploader.release().finished.wait(60.0)
    return errors


def own(run: str, step: int) -> bool:
    """Every checkpoint is this run's."""
    return True


def put(url: str, path: Path) -> None:
    """Upload a checkpoint to a folder that nobody else uses."""
    RemoteFolder(url).upload(path, own, lambda: None)
