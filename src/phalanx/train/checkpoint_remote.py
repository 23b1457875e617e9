"""Checkpoints in object storage, or on any other file system that fsspec knows.

A checkpoint is made here first. A thread of rank 0 then uploads its files, compared with their
checksums as they are read, and when all are there its manifest, under another name that is renamed:
a manifest there is of a whole checkpoint, whenever the upload ends. What goes wrong is tried again.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..comm import Group
from ..comm.agree import broadcast_text
from ..layout.files import sync_folder, write_text
from ..layout.url import Url
from . import checkpoint_format as stored
from .checkpoint import ASIDE, SAVING, Saved, make_hidden, why
from .checkpoint_format import CHUNK, MANIFEST, CheckpointError, Manifest, name_of

TRIES = 6  # of each upload
WAIT = 1.0  # seconds after the first, twice as long after each further one
FILES = 8  # that are uploaded at once, each with a chunk in memory


class RemoteFolder:
    """A run's checkpoints at a URL."""

    def __init__(self, url: str) -> None:
        self.url = Url(url)
        address, options = self.url.connection()
        self.fs, root = importlib.import_module("fsspec").core.url_to_fs(address, **options)
        self.root = str(root).rstrip("/")

    def _path(self, step: int, name: str = "") -> str:
        return "/".join((self.root, name_of(step), name)).rstrip("/")

    def _children(self, path: str) -> dict[str, bool]:
        """The names directly in a folder, each with whether it is a folder itself.

        Stores without folders may list every file below a path. So a name counts if it is the first
        part of what follows the folder's own path, and is a folder if there are further parts.
        """
        try:
            entries = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names: dict[str, bool] = {}
        for entry in entries:
            whole = str(self.fs._strip_protocol(entry["name"]))
            if whole.rstrip("/") == path:  # the folder itself, which some stores list
                continue
            if not whole.startswith(f"{path}/"):  # taken for nothing, it would hide checkpoints
                raise CheckpointError(f"{self.url}: lists {whole[:200]!r}, which is not in it.")
            name, _, further = whole[len(path) + 1 :].partition("/")
            if name:
                folder = bool(further) or entry.get("type") == "directory"
                names[name] = names.get(name, False) or folder
        return names

    def _folders(self) -> dict[int, set[str]]:
        """The names of the files in the folder of each step, the newest first."""
        self.fs.invalidate_cache()
        steps = [
            stored.step_of(name)
            for name, is_folder in self._children(self.root).items()
            if is_folder
        ]
        return {
            step: {name for name, folder in self._children(self._path(step)).items() if not folder}
            for step in sorted(steps, reverse=True)
            if step >= 0
        }

    def steps(self) -> list[int]:
        """Those of which a whole checkpoint is there, the newest first."""
        return [step for step, names in self._folders().items() if MANIFEST in names]

    def upload(self, path: Path) -> None:
        """Make this checkpoint one there."""
        text = stored.manifest_text(path)
        manifest = Manifest.parse(text, path)
        there = partial(self._path, manifest.step)
        if self.fs.exists(there(MANIFEST)):
            if self.fs.cat_file(there(MANIFEST)) == text.encode():
                return
            self.fs.rm_file(there(MANIFEST))  # of another course of the run
        self.fs.makedirs(there(), exist_ok=True)
        with ThreadPoolExecutor(FILES) as threads:
            list(threads.map(lambda file: self._put(path, file, there(file.name)), manifest.files))
        self.fs.pipe_file(there(f"{MANIFEST}.writing"), text.encode())
        self.fs.mv(there(f"{MANIFEST}.writing"), there(MANIFEST))

    def _put(self, path: Path, file: stored.StoredFile, there: str) -> None:
        with (path / file.name).open("rb") as own, self.fs.open(there, "wb") as out:
            out.writelines(_sound(own, file, str(path)))
        if (size := self.fs.size(there)) != file.size:
            raise CheckpointError(f"{there}: has {size:,} bytes, {file.size:,} were uploaded.")

    def prune(self, newest: int, keep: int) -> None:
        """As here: later steps are of a course that was left, and set aside; `keep` stay."""
        folders = self._folders()
        whole = [step for step, names in folders.items() if MANIFEST in names]
        for step in (s for s in whole if s > newest):
            self.fs.mv(self._path(step, MANIFEST), self._path(step, f"{ASIDE}{MANIFEST}"))
        kept = [step for step in whole if step <= newest][:keep]
        for step, names in folders.items():
            if step < newest and step not in kept and f"{ASIDE}{MANIFEST}" not in names:
                if MANIFEST in names:  # first: what is half removed must not look like a checkpoint
                    self.fs.rm_file(self._path(step, MANIFEST))
                self.fs.rm(self._path(step), recursive=True)

    def download(self, step: int, folder: Path) -> None:
        """Make this checkpoint one here. One that has its name, and is damaged, is set aside."""
        where = f"{self.url}/{name_of(step)}"
        with self.fs.open(self._path(step, MANIFEST), "rb") as opened:
            raw = opened.read(stored.LIMIT + 1)
        if len(raw) > stored.LIMIT:
            raise CheckpointError(f"{where}: its manifest has more than {stored.LIMIT:,} bytes.")
        path, text = folder / name_of(step), raw.decode(errors="replace")
        manifest: Manifest = Manifest.parse(text, path)
        hidden = make_hidden(folder / f"{SAVING}{step:08}")
        for file in manifest.files:
            there = self.fs.open(self._path(step, file.name), "rb")
            with there, (hidden / file.name).open("xb") as own:
                own.writelines(_sound(there, file, where))
                own.flush()
                os.fsync(own.fileno())
        write_text(hidden / MANIFEST, text, durable=True)
        if path.exists():
            path.rename(_free(path.with_name(f"{ASIDE}{path.name}")))
        hidden.rename(path)
        sync_folder(folder)


def _free(path: Path) -> Path:
    """The path, or with a number behind it one that nothing has."""
    names = (path.with_name(f"{path.name}.{n}") if n else path for n in range(1 << 20))
    return next(each for each in names if not each.exists())


def _sound(file: BinaryIO, written: stored.StoredFile, where: str) -> Iterator[bytes]:
    """The chunks of a file, each compared with its checksum."""
    left = written.size
    for number, checksum in enumerate(written.chunks):
        block, size = b"", min(CHUNK, left)
        while len(block) < size and (more := file.read(size - len(block))):
            block += more
        left -= len(block)
        digest = stored.CHECKSUMS[written.checksum]()
        digest.update(block)
        if digest.hexdigest() != checksum:
            raise CheckpointError(
                f"{where}/{written.name}: its bytes from {number * CHUNK:,} on are not what was written."
            )
        yield block


def _tried(work: Callable[[], None], vain: Callable[[], bool] = lambda: False) -> str:
    """Do this, and again where it fails, unless that is in vain by now; what went wrong at last."""
    error = ""
    for number in range(TRIES):
        try:
            work()
            return ""
        except Exception as wrong:  # whatever a file system's library raises
            error = why(wrong)
        if vain():
            break
        if number + 1 < TRIES:
            time.sleep(WAIT * 2**number)
    return error


class Uploader:
    """Uploads a run's checkpoints, one after the other, in a thread of rank 0. While one is under way
    only the newest of those that come is kept waiting: a slow network holds up no step."""

    def __init__(self, url: str, keep: int) -> None:
        self.url, self.keep = url, keep
        self.work = threading.Condition()
        self.waiting: Path | None = None
        self.current: Path | None = None
        self.results: list[Saved] = []
        self.folder: RemoteFolder | None = None

    def offer(self, path: Path) -> None:
        """Upload this checkpoint next."""
        with self.work:
            self.waiting = path
            if self.current is None:
                self._next()

    def _next(self) -> None:
        self.current, self.waiting = self.waiting, None
        if self.current is not None:
            work = partial(self._upload, self.current)
            threading.Thread(target=work, name="upload", daemon=True).start()

    def _upload(self, path: Path) -> None:
        step = stored.step_of(path.name)

        def work() -> None:
            self.folder = self.folder or RemoteFolder(self.url)
            self.folder.upload(path)
            self.folder.prune(step, self.keep)

        # One that was removed, or has become old, is not tried again.
        error = _tried(work, lambda: self.waiting is not None or not path.exists())
        with self.work:
            self.results.append(Saved(step, path, Url(self.url).masked(error)))
            self._next()
            self.work.notify_all()

    def taken(self) -> list[Saved]:
        """What became of uploads since the last call."""
        with self.work:
            results, self.results = self.results, []
            return results

    def finish(self) -> None:
        """Wait until nothing is under way."""
        with self.work:
            self.work.wait_for(lambda: self.current is None)


def fetch_newer(url: str, folder: Path, at: int, known: set[int], group: Group) -> tuple[bool, str]:
    """Where a checkpoint beyond step `at` is there that was not tried before, get it; whether one was
    tried, and what went wrong. Every rank calls it, and rank 0 does it."""
    wanted, error = -1, ""
    if group.rank == 0:
        found = list[int]()
        error = _tried(lambda: found.extend(RemoteFolder(url).steps()))
        wanted = next((step for step in found if step > at and step not in known), -1)
        if wanted >= 0:
            known.add(wanted)
            folder.mkdir(parents=True, exist_ok=True)
            error = _tried(lambda: RemoteFolder(url).download(wanted, folder))
        error = error and f"{url}: {Url(url).masked(error)}"
    answer = broadcast_text(group, f"{wanted}\n{error}")
    return not answer.startswith("-1"), answer.partition("\n")[2]
