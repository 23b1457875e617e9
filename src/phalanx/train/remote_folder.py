"""A run's folder of checkpoints at a URL, on any file system that fsspec knows.

A checkpoint there has the files that it has on the disk. Its manifest comes first under another name,
so that a folder says from the beginning whose it is, and is renamed when all files are there: what has
a manifest is whole, whenever an upload ends. A checkpoint that is removed loses its manifest first.
Only files whose manifest names this run are overwritten, renamed or removed.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ..layout.files import parse_json, sync_folder, write_text
from ..layout.url import Url
from . import checkpoint_format as stored
from .checkpoint import ASIDE, SAVING, make_hidden
from .checkpoint_format import CHUNK, MANIFEST, CheckpointError, Manifest, name_of
from .remote_task import Task, in_threads

FILES = 8  # that are moved at once, each with a chunk in memory
WRITING = f"{MANIFEST}.writing"  # of an upload that is under way, or was cut
REMOVED = f"{MANIFEST}.removed"  # of a checkpoint that is being removed
PARTS = 9000  # of a file, at most: object stores take 10,000

Owns = Callable[[str, int], bool]  # whether a step with this run id is the run's own
_ABSENT = (FileNotFoundError, NotADirectoryError)


class ForeignCheckpoint(CheckpointError):
    """Another run's checkpoint has the place of one that is to be uploaded."""


class RemoteFolder:
    """A run's checkpoints at a URL. Each call tells the `task` that progress was made. A `fresh` one
    shares no connection with those before, of which one may hang."""

    def __init__(
        self, url: str, task: Task | None = None, *, fresh: bool = False
    ) -> None:
        self.url = Url(url)
        self.task = task or Task(lambda task: "")
        address, options = self.url.connection()
        open_url = importlib.import_module("fsspec").core.url_to_fs
        words: dict[str, Any] = (
            {**options, "skip_instance_cache": True} if fresh else options
        )
        self.fs, root = open_url(address, **words)
        self.root = str(root).rstrip("/")

    def _do(self, name: str, *words: Any, **more: Any) -> Any:
        """A call of the file system."""
        self.task.check()
        result = getattr(self.fs, name)(*words, **more)
        self.task.moved()
        return result

    def _path(self, step: int, name: str = "") -> str:
        return "/".join((self.root, name_of(step), name)).rstrip("/")

    # ---- small files of the folder itself

    def read(self, name: str, limit: int, step: int | None = None) -> bytes | None:
        """A file's bytes, at most `limit` and one more; None if it is not there."""
        path = f"{self.root}/{name}" if step is None else self._path(step, name)
        try:
            raw: bytes = self._do("cat_file", path, start=0, end=limit + 1)
        except _ABSENT:
            return None
        return raw

    def make(self) -> None:
        """Make the folder if it is not there."""
        self._do("makedirs", self.root, exist_ok=True)

    def write(self, name: str, raw: bytes) -> None:
        """Write a file of the folder."""
        self._do("pipe_file", f"{self.root}/{name}", raw)

    def create(self, name: str, raw: bytes) -> bool:
        """Create a file if there is none. True: nobody else can have created it too, because the file
        system creates exclusively. False: it does not, and the file was written all the same.
        """
        try:
            with self._do("open", f"{self.root}/{name}", "xb") as file:
                file.write(raw)
        except FileExistsError:
            raise
        except Exception:  # each library has its own for a mode that it does not know
            if self.read(name, 0):
                raise FileExistsError(f"{self.url}/{name}") from None
            self._do("pipe_file", f"{self.root}/{name}", raw)
            return False
        return True

    def age(self, name: str, mark: str) -> float | None:
        """Seconds since a file was written, by the store's own clock: a file that is written now, with
        a name that ends in `mark`, is compared with it. None where the store tells no times."""
        probe = f"{self.root}/{name}.{mark}"
        self._do("pipe_file", probe, b"now")
        try:
            self._do("invalidate_cache")
            now, then = (
                self._do("modified", path) for path in (probe, f"{self.root}/{name}")
            )
            return float((now - then).total_seconds())
        except (NotImplementedError, AttributeError, KeyError, TypeError):
            return None
        finally:
            self._do("rm_file", probe)

    # ---- what is there

    def _children(self, path: str) -> dict[str, bool]:
        """The names directly in a folder, each with whether it is a folder itself.

        Stores without folders may list every file below a path. So a name counts if it is the first
        part of what follows the folder's own path, and is a folder if there are further parts.
        """
        try:
            entries = self._do("ls", path, detail=True)
        except _ABSENT:
            return {}
        names: dict[str, bool] = {}
        for entry in entries:
            whole = str(self.fs._strip_protocol(entry["name"]))
            if whole.rstrip("/") == path:  # the folder itself, which some stores list
                continue
            # taken for nothing, it would hide checkpoints
            if not whole.startswith(f"{path}/"):
                raise CheckpointError(
                    f"{self.url}: lists {whole[:200]!r}, which is not in it."
                )
            name, _, further = whole[len(path) + 1 :].partition("/")
            if name:
                folder = bool(further) or entry.get("type") == "directory"
                names[name] = names.get(name, False) or folder
        return names

    def _files(self, step: int) -> set[str]:
        return {
            name
            for name, folder in self._children(self._path(step)).items()
            if not folder
        }

    def _folders(self) -> dict[int, set[str]]:
        """The names of the files in the folder of each step, the newest first."""
        self._do("invalidate_cache")
        found = [
            stored.step_of(name)
            for name, folder in self._children(self.root).items()
            if folder
        ]
        return {
            step: self._files(step) for step in sorted(found, reverse=True) if step >= 0
        }

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, newest first."""
        return [step for step, names in self._folders().items() if MANIFEST in names]

    def body(self, step: int, name: str = MANIFEST) -> dict[str, Any] | None:
        """A manifest's body, of any version; None if there is none that can be read."""
        raw = self.read(name, stored.LIMIT, step)
        if raw is None or len(raw) > stored.LIMIT:
            return None
        try:
            text = raw.decode(errors="replace")
            body = parse_json(text, f"{self.url}/{name_of(step)}", CheckpointError).get(
                "body"
            )
        except CheckpointError:
            return None
        return body if isinstance(body, dict) else None

    def run_of(self, step: int, names: set[str]) -> str | None:
        """The run id of what lies in a step's folder; "" if it has none, None if nothing says it."""
        for name in (MANIFEST, WRITING, REMOVED):
            if name in names and (body := self.body(step, name)):
                return stored.run_id_of(body.get("config"))
        return None

    def _owned(self, step: int, names: set[str], owns: Owns) -> bool:
        run = self.run_of(step, names)
        return run is not None and owns(run, step)

    # ---- what changes it

    def upload(self, path: Path, owns: Owns, confirm: Callable[[], None]) -> None:
        """Make this checkpoint one there. `confirm` raises if the folder is no longer this start's."""
        text = stored.manifest_text(path)
        manifest: Manifest = Manifest.parse(text, path)
        step = manifest.step
        names = self._files(step)
        if (
            MANIFEST in names
            and self.read(MANIFEST, stored.LIMIT, step) == text.encode()
        ):
            return
        run = self.run_of(step, names)
        if run is not None and not owns(run, step):
            raise ForeignCheckpoint(
                f"{self.url}/{name_of(step)}: belongs to another run and is left untouched."
            )
        there = partial(self._path, step)
        if MANIFEST in names:  # of another course of the run
            self._do("mv", there(MANIFEST), there(REMOVED))
        self._do("makedirs", there(), exist_ok=True)
        self._do("pipe_file", there(WRITING), text.encode())
        work = partial(self._put, path, there)
        in_threads(work, manifest.files, FILES, self.task.check)
        confirm()
        self._do("mv", there(WRITING), there(MANIFEST))
        if REMOVED in self._files(step):
            self._do("rm_file", there(REMOVED))

    def _put(
        self, path: Path, there: Callable[[str], str], file: stored.StoredFile
    ) -> None:
        target = there(file.name)
        words: dict[str, int] = {}
        if getattr(self.fs, "default_block_size", 0) > CHUNK:
            # Each block that the library sends is progress, and a file has a limited number of them.
            words["block_size"] = CHUNK * -(-file.size // (CHUNK * PARTS))
        with (
            (path / file.name).open("rb") as own,
            self._do("open", target, "wb", **words) as out,
        ):
            for chunk in _sound(own, file, str(path)):
                out.write(chunk)
                self.task.moved()
        if (size := self._do("size", target)) != file.size:
            raise CheckpointError(
                f"{target}: has {size:,} bytes, {file.size:,} were uploaded."
            )

    def prune(self, newest: int, keep: int, owns: Owns) -> None:
        """Prunes as on the disk: later steps belong to an abandoned course and are set aside, and
        `keep` of the others stay. Checkpoints of other runs are untouched."""
        folders = self._folders()
        whole = [step for step, names in folders.items() if MANIFEST in names]
        for step in (s for s in whole if s > newest):
            if self._owned(step, {MANIFEST}, owns):
                aside = self._path(step, f"{ASIDE}{MANIFEST}")
                self._do("mv", self._path(step, MANIFEST), aside)
        older = [
            step
            for step in folders
            if step < newest and f"{ASIDE}{MANIFEST}" not in folders[step]
        ]
        kept = int(newest in whole)
        for step in older:
            if not self._owned(step, folders[step], owns):
                continue
            if MANIFEST in folders[step] and kept < keep:
                kept += 1
            else:
                self._remove(step, folders[step])

    def _remove(self, step: int, names: set[str]) -> None:
        """Remove a checkpoint, or what was uploaded of one: what says whose it is goes last."""
        if MANIFEST in names:  # what is half removed must not look like a checkpoint
            self._do("mv", self._path(step, MANIFEST), self._path(step, REMOVED))
        numbers = [
            self._path(step, name) for name in names if stored.is_file_name(name)
        ]
        in_threads(partial(self._do, "rm_file"), numbers, FILES, self.task.check)
        for name in (WRITING, REMOVED):
            if name in names or (name == REMOVED and MANIFEST in names):
                self._do("rm_file", self._path(step, name))
        self._do("invalidate_cache")
        # stores without folders have none, and an empty one does no harm
        with suppress(OSError):
            if not self._do("ls", self._path(step), detail=True):
                self._do("rmdir", self._path(step))

    def download(self, step: int, folder: Path) -> None:
        """Make this checkpoint one here. One that has its name, and is damaged, is set aside."""
        where = f"{self.url}/{name_of(step)}"
        raw = self.read(MANIFEST, stored.LIMIT, step)
        if raw is None:
            raise CheckpointError(f"{where}: its manifest is not there any more.")
        if len(raw) > stored.LIMIT:
            raise CheckpointError(
                f"{where}: its manifest has more than {stored.LIMIT:,} bytes."
            )
        path, text = folder / name_of(step), raw.decode(errors="replace")
        manifest: Manifest = Manifest.parse(text, path)
        hidden = make_hidden(folder / f"{SAVING}{step:08}")
        for file in manifest.files:
            there = self._do("open", self._path(step, file.name), "rb")
            with there, (hidden / file.name).open("xb") as own:
                for chunk in _sound(there, file, where):
                    own.write(chunk)
                    self.task.moved()
                own.flush()
                os.fsync(own.fileno())
        write_text(hidden / MANIFEST, text, durable=True)
        self.task.check()
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
