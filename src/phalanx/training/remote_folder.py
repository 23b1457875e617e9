"""A run's checkpoints at a URL, in any file system that fsspec supports.

A remote checkpoint has the same files as on the disk. Its manifest is uploaded first
under another name, so that the folder's owner is known from the beginning, and renamed
when all files are uploaded: a folder with a manifest is complete, whenever an upload is
interrupted. Deleting a checkpoint starts with its manifest. Only files whose manifest
names this run are overwritten, renamed or deleted.
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
from .checkpoint_format import (
    CHUNK,
    MANIFEST,
    CheckpointError,
    Manifest,
    name_of,
)
from .remote_task import Task, in_threads

FILES = 8  # files transferred at once, each with one chunk in memory
WRITING = (
    f"{MANIFEST}.writing"  # manifest of an upload in progress, or interrupted
)
REMOVED = (
    f"{MANIFEST}.removed"  # manifest of a checkpoint that is being deleted
)
PARTS = 9000  # maximum parts of a file: object stores accept 10,000

# True if a step with this run id belongs to the run.
Owns = Callable[[str, int], bool]
_ABSENT = (FileNotFoundError, NotADirectoryError)


class ForeignCheckpoint(CheckpointError):
    """Raised if another run's checkpoint occupies the place of one to be uploaded."""


class RemoteFolder:
    """A run's checkpoints at a URL. Each call reports progress to the `task`.

    A `fresh` folder shares no connection with earlier ones, which may hang.
    """

    def __init__(
        self, url: str, task: Task | None = None, *, fresh: bool = False
    ) -> None:
        self.url = Url(url)
        self.task = task or Task(lambda task: "")
        address, options = self.url.connection()
        open_url = importlib.import_module("fsspec").core.url_to_fs
        # fsspec caches file systems by their options, and with them a hanging
        # connection.
        words: dict[str, Any] = (
            {**options, "skip_instance_cache": True} if fresh else options
        )
        self.fs, root = open_url(address, **words)
        self.root = str(root).rstrip("/")

    def _do(self, name: str, *words: Any, **more: Any) -> Any:
        """Call a method of the file system."""
        # Before a call and after it: an abandoned thread ends, and progress is
        # counted.
        self.task.check()
        result = getattr(self.fs, name)(*words, **more)
        self.task.moved()
        return result

    def _path(self, step: int, name: str = "") -> str:
        return "/".join((self.root, name_of(step), name)).rstrip("/")

    # ---- small files of the folder itself

    def read(
        self, name: str, limit: int, step: int | None = None
    ) -> bytes | None:
        """Read at most `limit + 1` bytes of a file; None if it does not exist."""
        path = (
            f"{self.root}/{name}" if step is None else self._path(step, name)
        )
        try:
            # One byte more than allowed shows that a file is too long.
            raw: bytes = self._do("cat_file", path, start=0, end=limit + 1)
        except _ABSENT:
            return None
        return raw

    def make(self) -> None:
        """Create the folder if it does not exist."""
        self._do("makedirs", self.root, exist_ok=True)

    def write(self, name: str, raw: bytes) -> None:
        """Write a file in the folder."""
        self._do("pipe_file", f"{self.root}/{name}", raw)

    def create(self, name: str, raw: bytes) -> bool:
        """Create a file; raise FileExistsError if it exists.

        Returns True if the file system creates exclusively, so that nobody else can
        have created it too. Returns False if it cannot, and the file was written
        anyway.
        """
        try:
            # "x": exclusive creation, which not every store offers.
            with self._do("open", f"{self.root}/{name}", "xb") as file:
                file.write(raw)
        except FileExistsError:
            raise
        except (
            Exception
        ):  # libraries raise different errors for an unsupported mode
            # Read before writing: the next best, with a gap in between.
            if self.read(name, 0):
                raise FileExistsError(f"{self.url}/{name}") from None
            self._do("pipe_file", f"{self.root}/{name}", raw)
            return False
        return True

    def age(self, name: str, mark: str) -> float | None:
        """Return the seconds since a file was written, by the store's own clock; None
        if it has no times.

        A probe file, whose name ends in `mark`, is written now and compared.
        """
        probe = f"{self.root}/{name}.{mark}"
        self._do("pipe_file", probe, b"now")
        try:
            # Libraries cache listings with their times.
            self._do("invalidate_cache")
            now, then = (
                self._do("modified", path)
                for path in (probe, f"{self.root}/{name}")
            )
            return float((now - then).total_seconds())
        except (NotImplementedError, AttributeError, KeyError, TypeError):
            return None
        finally:
            self._do("rm_file", probe)

    # ---- contents

    def _children(self, path: str) -> dict[str, bool]:
        """Return the names directly in a folder, each with True if it is a folder
        itself.

        Stores without folders may list every file below a path. So the first part of
        what follows the folder's own path is a name, and it is a folder if further
        parts follow.
        """
        try:
            entries = self._do("ls", path, detail=True)
        except _ABSENT:
            return {}
        names: dict[str, bool] = {}
        for entry in entries:
            whole = str(self.fs._strip_protocol(entry["name"]))
            if whole.rstrip("/") == path:  # some stores list the folder itself
                continue
            # ignoring such an entry could hide checkpoints
            if not whole.startswith(f"{path}/"):
                raise CheckpointError(
                    f"{self.url}: lists {whole[:200]!r}, which is not in it."
                )
            name, _, further = whole[len(path) + 1 :].partition("/")
            if name:
                folder = bool(further) or entry.get("type") == "directory"
                # Listed as a file and as a prefix: then it is a folder.
                names[name] = names.get(name, False) or folder
        return names

    def _files(self, step: int) -> set[str]:
        return {
            name
            for name, folder in self._children(self._path(step)).items()
            if not folder
        }

    def _folders(self) -> dict[int, set[str]]:
        """Return the file names in each step's folder, newest step first."""
        # Names that other starts have written since are not in the cache.
        self._do("invalidate_cache")
        found = [
            stored.step_of(name)
            for name, folder in self._children(self.root).items()
            if folder
        ]
        return {
            step: self._files(step)
            for step in sorted(found, reverse=True)
            if step >= 0
        }

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, newest first."""
        return [
            step
            # Without a manifest it is an upload in progress, or interrupted.
            for step, names in self._folders().items()
            if MANIFEST in names
        ]

    def body(self, step: int, name: str = MANIFEST) -> dict[str, Any] | None:
        """Return a manifest's body, of any version; None if it is missing or
        unreadable."""
        raw = self.read(name, stored.LIMIT, step)
        if raw is None or len(raw) > stored.LIMIT:
            return None
        try:
            text = raw.decode(errors="replace")
            body = parse_json(
                text, f"{self.url}/{name_of(step)}", CheckpointError
            ).get("body")
        except CheckpointError:
            return None
        return body if isinstance(body, dict) else None

    def run_of(self, step: int, names: set[str]) -> str | None:
        """Return the run id of a step's folder; "" if its manifest has none, None
        without a manifest."""
        # Complete, in progress, or being deleted: each state has the manifest
        # somewhere.
        for name in (MANIFEST, WRITING, REMOVED):
            if name in names and (body := self.body(step, name)):
                return stored.run_id_of(body.get("config"))
        return None

    def _owned(self, step: int, names: set[str], owns: Owns) -> bool:
        run = self.run_of(step, names)
        return run is not None and owns(run, step)

    # ---- changes

    def upload(
        self, path: Path, owns: Owns, confirm: Callable[[], None]
    ) -> None:
        """Upload a checkpoint. `confirm` raises if the folder no longer belongs to this
        start."""
        text = stored.manifest_text(path)
        manifest: Manifest = Manifest.parse(text, path)
        step = manifest.step
        names = self._files(step)
        if (
            MANIFEST in names
            and self.read(MANIFEST, stored.LIMIT, step) == text.encode()
        ):
            return
        # The folder may be another run's: look before anything is changed.
        run = self.run_of(step, names)
        if run is not None and not owns(run, step):
            raise ForeignCheckpoint(
                f"{self.url}/{name_of(step)}: belongs to another run and is left untouched."
            )
        there = partial(self._path, step)
        if MANIFEST in names:  # from an abandoned course of the run
            self._do("mv", there(MANIFEST), there(REMOVED))
        self._do("makedirs", there(), exist_ok=True)
        # The owner is named before the first file is there.
        self._do("pipe_file", there(WRITING), text.encode())
        work = partial(self._put, path, there)
        in_threads(work, manifest.files, FILES, self.task.check)
        # Uploading takes time, in which the folder may have been taken over.
        confirm()
        # The rename publishes the checkpoint.
        self._do("mv", there(WRITING), there(MANIFEST))
        if REMOVED in self._files(step):
            self._do("rm_file", there(REMOVED))

    def _put(
        self, path: Path, there: Callable[[str], str], file: stored.StoredFile
    ) -> None:
        target = there(file.name)
        words: dict[str, int] = {}
        if getattr(self.fs, "default_block_size", 0) > CHUNK:
            # Each block that the library sends counts as progress, and the number of
            # blocks is limited.
            words["block_size"] = CHUNK * -(-file.size // (CHUNK * PARTS))
        with (
            (path / file.name).open("rb") as own,
            # Exact checksums of what is sent: a file may have been damaged
            # since its save.
            self._do("open", target, "wb", **words) as out,
        ):
            for chunk in _sound(own, file, str(path)):
                out.write(chunk)
                self.task.moved()
        # Some stores accept a write and keep less.
        if (size := self._do("size", target)) != file.size:
            raise CheckpointError(
                f"{target}: has {size:,} bytes, {file.size:,} were uploaded."
            )

    def prune(self, newest: int, keep: int, owns: Owns) -> None:
        """Delete old checkpoints as on the disk: later steps are set aside, and `keep`
        others are kept.

        Checkpoints of other runs are not touched.
        """
        folders = self._folders()
        whole = [step for step, names in folders.items() if MANIFEST in names]
        # Steps of an abandoned course of the run, which a resumption would
        # prefer.
        for step in (s for s in whole if s > newest):
            if self._owned(step, {MANIFEST}, owns):
                aside = self._path(step, f"{ASIDE}{MANIFEST}")
                self._do("mv", self._path(step, MANIFEST), aside)
        older = [
            step
            for step in folders
            if step < newest and f"{ASIDE}{MANIFEST}" not in folders[step]
        ]
        # The newest counts as kept, if it is complete.
        kept = int(newest in whole)
        for step in older:
            if not self._owned(step, folders[step], owns):
                continue
            # The newest complete ones are kept; incomplete uploads go.
            if MANIFEST in folders[step] and kept < keep:
                kept += 1
            else:
                self._remove(step, folders[step])

    def _remove(self, step: int, names: set[str]) -> None:
        """Delete a checkpoint, or an incomplete upload; the file that names its owner
        goes last."""
        # A half-deleted folder must not look like a checkpoint.
        if MANIFEST in names:
            self._do(
                "mv", self._path(step, MANIFEST), self._path(step, REMOVED)
            )
        numbers = [
            self._path(step, name)
            for name in names
            if stored.is_file_name(name)
        ]
        in_threads(
            partial(self._do, "rm_file"), numbers, FILES, self.task.check
        )
        for name in (WRITING, REMOVED):
            if name in names or (name == REMOVED and MANIFEST in names):
                self._do("rm_file", self._path(step, name))
        self._do("invalidate_cache")
        # Stores without folders have nothing to remove; an empty folder does no harm.
        with suppress(OSError):
            if not self._do("ls", self._path(step), detail=True):
                self._do("rmdir", self._path(step))

    def download(self, step: int, folder: Path) -> None:
        """Download a checkpoint. A damaged local one of the same name is set aside."""
        where = f"{self.url}/{name_of(step)}"
        raw = self.read(MANIFEST, stored.LIMIT, step)
        if raw is None:
            raise CheckpointError(
                f"{where}: its manifest is not there any more."
            )
        if len(raw) > stored.LIMIT:
            raise CheckpointError(
                f"{where}: its manifest has more than {stored.LIMIT:,} bytes."
            )
        path, text = folder / name_of(step), raw.decode(errors="replace")
        manifest: Manifest = Manifest.parse(text, path)
        # Downloaded beside, and renamed when complete, as a save is.
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
        # Abandoned meanwhile: leave the folder as it is.
        self.task.check()
        if path.exists():
            path.rename(_free(path.with_name(f"{ASIDE}{path.name}")))
        hidden.rename(path)
        sync_folder(folder)


def _free(path: Path) -> Path:
    """Return the path, with a number appended if it exists already."""
    names = (
        path.with_name(f"{path.name}.{n}") if n else path
        for n in range(1 << 20)
    )
    return next(each for each in names if not each.exists())


def _sound(
    file: BinaryIO, written: stored.StoredFile, where: str
) -> Iterator[bytes]:
    """Yield the chunks of a file after comparing each with its checksum."""
    left = written.size
    for number, checksum in enumerate(written.chunks):
        # The last chunk may be shorter.
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
