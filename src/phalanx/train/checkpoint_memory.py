"""Checkpoints in the memory of the hosts, for ranks that are started again.

They are checkpoints as others, in a folder of /dev/shm on each host, which outlives the ranks: every
rank writes its part there, and where there are several hosts a rank of the next one keeps a copy. So
a rank's part outlives the rank, and one host may be lost. The folder belongs to the process that has
started the ranks (the command, or torchrun's agent): its name says which, and when that process ends
the host's watcher removes it. A host holds at most twice what its ranks and those of the host before
own: the newest, and the one that is being written.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..comm.agree import broadcast_text, errors_of, exchange
from ..hang.positions import alive, started_at
from ..layout.files import write_text
from ..layout.numbers import binary_text
from ..layout.run import Run
from ..parallel.local import LocalModel
from .checkpoint import SAVING, Saver, Updates, box_of, commit, make_hidden, prune, steps, why
from .checkpoint_format import (
    CHUNK,
    MANIFEST,
    CheckpointError,
    Manifest,
    Progress,
    damage,
    manifest_text,
    name_of,
    parse_manifest,
)
from .folder import Folder

ROOT = Path("/dev/shm")
NAME = "phalanx-memory"


def memory_folder(run: Run) -> Path | None:
    """Where this host keeps them; none where nothing outlives the ranks, or they are not wanted."""
    started = multiprocessing.parent_process() is not None or "TORCHELASTIC_RUN_ID" in os.environ
    if not (run.train.in_memory and started and os.access(ROOT, os.W_OK)):
        return None
    owner = os.getppid()
    return ROOT / f"{NAME}-{owner}-{started_at(owner)}-{_mark(run)}"


def _mark(run: Run) -> str:
    return hashlib.sha256(f"{os.getuid()} {Path(run.out).resolve()}".encode()).hexdigest()[:16]


def newest_in_memory(run: Run) -> str:
    """The newest that is in this host's memory for a run; empty when there is none."""
    found = [p.name for folder in ROOT.glob(f"{NAME}-*-{_mark(run)}") for p in steps(folder)[:1]]
    return max(found, default="")


def owned_by_nobody(folder: Path) -> bool:
    """Whether the process that a folder of memory belongs to has ended."""
    _, _, pid, started, _ = folder.name.split("-")
    return not alive(int(pid), int(started))


def remove_left(root: Path = ROOT) -> None:
    """Remove what runs have left whose watcher was killed."""
    for folder in root.glob(f"{NAME}-*-*-*"):
        with suppress(OSError, ValueError):
            if folder.stat().st_uid == os.getuid() and owned_by_nobody(folder):
                shutil.rmtree(folder)


class MemoryCheckpoints:
    """A run's checkpoints in memory; every rank has one and calls it alike. `host`: whose memory this
    rank's is; ranks with the same have the same `folder`."""

    def __init__(self, folder: Path, host: str, local: LocalModel, updates: Updates) -> None:
        self.folder, self.local, self.group = folder, local, local.groups.everyone
        self.saver = Saver(folder, local, updates)
        self.hosts: dict[str, list[int]] = {}
        for rank, each in enumerate(exchange(self.group, host)):
            self.hosts.setdefault(each, []).append(rank)
        self.host, self.ranks = host, self.hosts[host]
        self.first = self.ranks[0] == self.group.rank
        places = list(self.hosts.values())
        # Whose part a rank also keeps: that of the rank in its place on the host before.
        self.keeper: dict[int, int] = {}
        for ranks, after in zip(places, [*places[1:], places[0]], strict=True):
            if len(places) > 1:
                self.keeper |= {rank: after[n % len(after)] for n, rank in enumerate(ranks)}

    def close(self) -> None:
        """Give the memory back."""
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- saving

    def save(self, progress: Progress) -> list[str]:
        """Keep this step; what went wrong, on all ranks: then what was before is still there."""
        hidden, group = self.folder / f"{SAVING}{progress.step:08}", self.group
        snapshot = self.saver.snapshot(progress)
        sizes = [
            int(n) for n in exchange(group, str(sum(x.nbytes for x in snapshot.tensors.values())))
        ]
        report, error = "", self._begun(hidden, sizes) if self.first else ""
        if errors := errors_of(group, error):
            return errors
        try:
            report = snapshot.write(hidden / _file(group.rank))
        except (CheckpointError, OSError) as wrong:
            error = why(wrong)
        if errors := errors_of(group, error):
            return errors
        reports = exchange(group, report)
        if errors := errors_of(group, self._pass_on(hidden, reports)):
            return errors
        # Old ones go when all hosts have the new one, so that all have one of the same step.
        if self.first:
            error, _ = commit(self.folder, hidden, reports, 2)
        if errors := errors_of(group, error):
            return errors
        with suppress(OSError):
            if self.first:
                prune(self.folder, self.folder / name_of(progress.step), 1)
        return []

    def _begun(self, hidden: Path, sizes: Sequence[int]) -> str:
        """Make the folder, if there is room; why not."""
        remove_left(self.folder.parent)
        kept = [*self.ranks, *(rank for rank, at in self.keeper.items() if at in self.ranks)]
        needed = sum(sizes[rank] for rank in kept)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid != os.getuid():
                return f"{self.folder} is another user's"
            stat = os.statvfs(self.folder)
        except OSError as error:
            return why(error)
        if (free := min(stat.f_bavail * stat.f_frsize, _available())) < needed:
            return (
                f"{binary_text(needed)} are needed in {self.folder}, {binary_text(free)} are free"
            )
        return make_hidden(hidden)

    def _pass_on(self, hidden: Path, reports: Sequence[str]) -> str:
        """Give this rank's file to the rank that keeps a copy, and take those that it keeps."""
        if not self.keeper:
            return ""
        files = [Manifest.decode(text, f"rank {n}").files for n, text in enumerate(reports)]
        sizes = [sum(file.size for file in each) for each in files]
        me, error = self.group.rank, ""
        for at in range(0, max(sizes), CHUNK):
            counts = [max(0, min(CHUNK, size - at)) for size in sizes]
            sent = [counts[me] * (to == self.keeper[me]) for to in range(self.group.size)]
            taken = [counts[rank] * (self.keeper[rank] == me) for rank in range(self.group.size)]
            own = torch.zeros(counts[me], dtype=torch.uint8)
            out = torch.empty(sum(taken), dtype=torch.uint8, device=self.group.device)
            try:
                _read(hidden / _file(me), at, own)
            except OSError as wrong:  # all ranks go on to the last call
                error = why(wrong)
            self.group.all_to_all(out, own.to(self.group.device), taken, sent)
            begins = [sum(taken[:rank]) for rank in range(self.group.size)]
            moved = out.cpu()
            try:
                for rank, begin in enumerate(begins):
                    _append(hidden / _file(rank), moved[begin : begin + taken[rank]], at)
            except OSError as wrong:
                error = why(wrong)
        return error

    # ---- going on

    def find(self, least: int = 0) -> tuple[Path, Manifest] | None:
        """The newest step, from `least` on, of which all parts are in the memory of some host, with
        what this host's ranks need brought to it. None when a part is nowhere, or not what was written."""
        tables = [json.loads(text) for text in exchange(self.group, json.dumps(self._seen()))]
        host_of = {rank: host for host, ranks in self.hosts.items() for rank in ranks}
        have: dict[tuple[int, str], dict[str, set[int]]] = {}
        counts: dict[tuple[int, str], int] = {}
        for rank, table in enumerate(tables):
            for step, digest, count, sound in table:
                where = have.setdefault((step, digest), {}).setdefault(host_of[rank], set())
                where |= set(sound)
                counts[step, digest] = count
        whole = [key for key, by in have.items() if len(set().union(*by.values())) == counts[key]]
        step, digest = max(whole, default=(-1, ""))
        if step < least:
            return None
        by_host = have[step, digest]
        holder = self.hosts[next(host for host in self.hosts if host in by_host)][0]
        path = self.folder / name_of(step)
        text = broadcast_text(
            self.group, _text_of(path) if self.group.rank == holder else "", holder
        )
        manifest = parse_manifest(text, path)
        if errors_of(self.group, self._bring(path, text, manifest, by_host)):
            return None
        return path, manifest

    def _seen(self) -> list[tuple[int, str, int, list[int]]]:
        """What is in this host's memory: of each step this rank's share of the files that are sound."""
        seen = []
        for path in steps(self.folder):
            with suppress(CheckpointError, OSError):
                text = manifest_text(path)
                manifest, folder = parse_manifest(text, path), Folder(path, CheckpointError)
                own = range(self.ranks.index(self.group.rank), len(manifest.files), len(self.ranks))
                sound = [n for n in own if not damage(folder, manifest, n)]
                digest = hashlib.sha256(text.encode()).hexdigest()
                seen.append((manifest.step, digest, len(manifest.files), sound))
        return seen

    def _bring(self, path: Path, text: str, manifest: Manifest, have: dict[str, set[int]]) -> str:
        """Bring files to hosts whose ranks need them and that have them not; what went wrong here."""
        wanted = [
            set(json.loads(each))
            for each in exchange(self.group, json.dumps(self._needs(manifest)))
        ]
        error = ""
        try:
            if self.first:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_text(path / MANIFEST, text)
        except OSError as wrong:
            error = why(wrong)
        for number, file in enumerate(manifest.files):
            lack = [
                host
                for host, ranks in self.hosts.items()
                if number not in have.get(host, ()) and any(number in wanted[r] for r in ranks)
            ]
            if not lack:
                continue
            source = next(host for host in self.hosts if number in have.get(host, ()))
            root, here = self.hosts[source][0], path / file.name
            for at in range(0, file.size, CHUNK):
                block = torch.zeros(min(CHUNK, file.size - at), dtype=torch.uint8)
                try:
                    if self.group.rank == root:
                        _read(here, at, block)
                    moved = block.to(self.group.device)
                    self.group.broadcast(moved, root)
                    if self.first and self.host in lack:
                        _append(here, moved.cpu(), at)
                except OSError as wrong:
                    error = why(wrong)
            if self.first and self.host in lack and not error:
                error = damage(Folder(path, CheckpointError), manifest, number)
        return error

    def _needs(self, manifest: Manifest) -> list[int]:
        """The files in which numbers of this rank are."""
        tensors: dict[str, list[int]] = {}
        for number, tensor in enumerate(manifest.tensors):
            tensors.setdefault(tensor.name, []).append(number)
        needs = set()
        for unit in self.local.every_unit:
            for entry in unit.entries():
                box, row = box_of(entry), math.prod(entry.weight.local[1:])
                # Rows are read whole.
                start, stop = entry.start // row * row, -(-entry.stop // row) * row
                for number in tensors.get(entry.weight.name, ()):
                    for shard in manifest.tensors[number].shards:
                        same = shard.box == box
                        if same and (shard.stop <= start or shard.start >= stop):
                            continue
                        pairs = zip(shard.box, box, strict=True)
                        if all(max(a, c) < min(b, d) for (a, b), (c, d) in pairs):
                            needs.add(shard.file)
        return sorted(needs)


def _file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


def _text_of(path: Path) -> str:
    with suppress(CheckpointError, OSError):
        return manifest_text(path)
    return ""


def _read(path: Path, at: int, out: Tensor) -> None:
    """Fill a tensor of bytes from this place of a file on."""
    if out.numel():
        with path.open("rb") as file:
            file.seek(at)
            if file.readinto(out.numpy().data) != out.numel():
                raise OSError(0, "ended early while it was read", str(path))


def _append(path: Path, block: Tensor, at: int) -> None:
    """Write bytes at the end of a file; at its beginning, a new one."""
    if block.numel():
        with path.open("wb" if at == 0 else "ab") as file:
            file.write(block.numpy().data)


def _available() -> int:
    """Bytes of memory that programs can still have."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
