"""Checkpoints in the memory of the hosts, for ranks that are started again.

They are checkpoints as others, in a folder of /dev/shm on each host, which outlives the ranks: every
rank writes its part there, and where there are several hosts a rank of the next one keeps a copy. So
a rank's part outlives the rank, and one host may be lost. The folder belongs to the process that has
started the ranks (the command, or torchrun's agent): its name says which, and when that process ends
the host's watcher removes it. A host holds at most twice what its ranks and those of the host before
own: the newest, and the one that is being written.
"""

import hashlib
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from rank_watch.processes import alive, started_at

from ..comm.agree import broadcast_text, errors_of, exchange
from ..layout.files import write_text
from ..layout.host import available_memory
from ..layout.numbers import binary_text
from ..layout.run import Run
from ..parallel.local import LocalModel
from . import checkpoint
from . import checkpoint_format as stored
from .checkpoint import Updates, steps, why
from .checkpoint_format import CheckpointError
from .folder import Folder

ROOT = Path("/dev/shm")
NAME = "phalanx-memory"


def memory_folder(run: Run) -> Path | None:
    """Folder of this host's in-memory checkpoints; None if they are off, or if nothing outlives the
    ranks."""
    started = (
        multiprocessing.parent_process() is not None
        or "TORCHELASTIC_RUN_ID" in os.environ
    )
    if not (run.train.in_memory and started and os.access(ROOT, os.W_OK)):
        return None
    owner = os.getppid()
    return ROOT / f"{NAME}-{owner}-{started_at(owner)}-{_mark(run)}"


def _mark(run: Run) -> str:
    return hashlib.sha256(
        f"{os.getuid()} {Path(run.out).resolve()}".encode()
    ).hexdigest()[:16]


def newest_in_memory(run: Run) -> str:
    """The newest that is in this host's memory for a run; empty when there is none."""
    found = [
        p.name
        for folder in ROOT.glob(f"{NAME}-*-{_mark(run)}")
        for p in steps(folder)[:1]
    ]
    return max(found, default="")


def remove_left(root: Path = ROOT) -> None:
    """Remove what runs have left whose watcher was killed."""
    for folder in root.glob(f"{NAME}-*-*-*"):
        with suppress(OSError, ValueError):
            _, _, pid, started, _ = folder.name.split("-")
            if folder.stat().st_uid == os.getuid() and not alive(
                int(pid), int(started)
            ):
                shutil.rmtree(folder)


class MemoryCheckpoints:
    """A run's checkpoints in memory; every rank has one and calls it alike. `host`: whose memory this
    rank's is; ranks with the same have the same `folder`."""

    def __init__(
        self, folder: Path, host: str, local: LocalModel, updates: Updates
    ) -> None:
        self.folder, self.local, self.group = folder, local, local.groups.everyone
        self.saver = checkpoint.Saver(folder, local, updates)
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
                self.keeper |= {
                    rank: after[n % len(after)] for n, rank in enumerate(ranks)
                }

    def close(self) -> None:
        """Give the memory back."""
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, progress: stored.Progress) -> list[str]:
        """Keep this step; what went wrong, on all ranks: then what was before is still there."""
        hidden, group = (
            self.folder / f"{checkpoint.SAVING}{progress.step:08}",
            self.group,
        )
        manifest, tensors = self.saver.snapshot(progress)
        own = sum(x.nbytes for x in tensors.values())
        sizes = [int(size) for size in exchange(group, str(own))]
        try:
            checkpoint.together(group, lambda: self._make_room(hidden, sizes))
            file = hidden / stored.file_of(group.rank)
            write = partial(checkpoint.write_own, file, manifest, tensors)
            report = checkpoint.together(group, write)
            reports = exchange(group, report)
            self._move(
                hidden,
                [
                    (file.name, file.size, rank, keeper)
                    for rank, keeper in self.keeper.items()
                    for file in stored.Manifest.decode(
                        reports[rank], f"rank {rank}"
                    ).files
                ],
            )
            # Old ones go when all hosts have the new one, so that all have one of the same step.
            rest = (self.folder, hidden, reports, 2)
            checkpoint.together(
                group, lambda: checkpoint.commit(*rest) if self.first else ""
            )
        except checkpoint.RanksFailed as failed:
            return failed.errors
        with suppress(OSError):
            if self.first:
                checkpoint.prune(
                    self.folder, self.folder / stored.name_of(progress.step), 1
                )
        return []

    def _make_room(self, hidden: Path, sizes: Sequence[int]) -> None:
        """Make the hidden folder of a save, if its host has room."""
        if not self.first:
            return
        remove_left(self.folder.parent)
        kept = [
            *self.ranks,
            *(rank for rank, at in self.keeper.items() if at in self.ranks),
        ]
        needed = sum(sizes[rank] for rank in kept)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise CheckpointError(f"{self.folder} is another user's")
        stat = os.statvfs(self.folder)
        if (free := min(stat.f_bavail * stat.f_frsize, available_memory())) < needed:
            raise CheckpointError(
                f"{binary_text(needed)} are needed in {self.folder}, {binary_text(free)} are free"
            )
        checkpoint.make_hidden(hidden)

    def _move(self, folder: Path, files: Sequence[tuple[str, int, int, int]]) -> None:
        """Move files of a folder between hosts, a chunk of each at a time: the name, the size, the rank
        that has it, and the one that writes it."""
        if not files:
            return
        me, world, error = self.group.rank, self.group.size, ""
        for at in range(0, max(size for _, size, *_ in files), stored.CHUNK):
            sent, taken = [0] * world, [0] * world
            own, writes = [torch.empty(0, dtype=torch.uint8)], list[tuple[str, int]]()
            for name, size, source, target in sorted(files, key=lambda each: each[2:]):
                count = max(0, min(stored.CHUNK, size - at))
                if source == me:
                    own.append(torch.zeros(count, dtype=torch.uint8))
                    sent[target] += count
                    try:
                        with (folder / name).open("rb") as file:
                            stored.read_into(file, at, own[-1])
                    # all ranks go on to the last call
                    except (CheckpointError, OSError) as wrong:
                        error = why(wrong)
                if target == me:
                    taken[source] += count
                    writes.append((name, count))
            out = torch.empty(sum(taken), dtype=torch.uint8, device=self.group.device)
            self.group.all_to_all(
                out, torch.cat(own).to(self.group.device), taken, sent
            )
            moved = out.cpu()
            try:
                for name, count in writes:
                    with (folder / name).open("ab" if at else "wb") as file:
                        file.write(moved[:count].numpy().data)
                    moved = moved[count:]
            except OSError as wrong:
                error = why(wrong)
        if errors := errors_of(self.group, error):
            raise checkpoint.RanksFailed("", errors)

    def find(self, least: int = 0) -> tuple[Path, stored.Manifest] | None:
        """The newest step, from `least` on, of which all parts are in the memory of some host, with
        what this host's ranks need brought to it. None when a part is nowhere, or not what was written."""
        seen, texts = self._seen()
        tables = [json.loads(text) for text in exchange(self.group, json.dumps(seen))]
        have: dict[tuple[int, str, int], dict[str, set[int]]] = {}
        for host, ranks in self.hosts.items():
            for step, digest, count, sound in (
                each for rank in ranks for each in tables[rank]
            ):
                have.setdefault((step, digest, count), {}).setdefault(
                    host, set()
                ).update(sound)
        whole = [
            key
            for key, by in have.items()
            if len(set[int]().union(*by.values())) == key[2]
        ]
        step, digest, _ = newest = max(whole, default=(-1, "", 0))
        if step < least:
            return None
        path = self.folder / stored.name_of(step)
        root = next(
            n for n, table in enumerate(tables) if digest in {each[1] for each in table}
        )
        text = broadcast_text(self.group, texts.get(digest, ""), root)
        manifest = stored.Manifest.parse(text, path)
        try:
            self._bring(path, text, manifest, have[newest])
        except checkpoint.RanksFailed:
            return None
        return path, manifest

    def _seen(self) -> tuple[list[tuple[int, str, int, list[int]]], dict[str, str]]:
        """Checkpoints in this host's memory: for each step the sound files of this rank's share;
        and the manifests by digest."""
        seen, texts = [], {}
        for path in steps(self.folder):
            with suppress(CheckpointError, OSError):
                text = stored.manifest_text(path)
                manifest, folder = (
                    stored.Manifest.parse(text, path),
                    Folder(path, CheckpointError),
                )
                own = range(
                    self.ranks.index(self.group.rank),
                    len(manifest.files),
                    len(self.ranks),
                )
                sound = [n for n in own if not stored.damage(folder, manifest, n)]
                digest = hashlib.sha256(text.encode()).hexdigest()
                seen.append((manifest.step, digest, len(manifest.files), sound))
                texts[digest] = text
        return seen, texts

    def _bring(
        self,
        path: Path,
        text: str,
        manifest: stored.Manifest,
        have: dict[str, set[int]],
    ) -> None:
        """Bring files to hosts whose ranks need them and that have them not."""
        needs = [
            json.loads(each)
            for each in exchange(self.group, json.dumps(self._needs(manifest)))
        ]

        def make() -> None:
            if self.first:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_text(path / stored.MANIFEST, text)

        checkpoint.together(self.group, make)
        wrong = []
        for number, file in enumerate(manifest.files):
            source = next(
                self.hosts[host][0]
                for host in self.hosts
                if number in have.get(host, ())
            )
            lack = [
                ranks[0]
                for host, ranks in self.hosts.items()
                if number not in have.get(host, ())
                and any(number in needs[r] for r in ranks)
            ]
            self._move(
                path, [(file.name, file.size, source, target) for target in lack]
            )
            if self.group.rank in lack:
                wrong.append(
                    stored.damage(Folder(path, CheckpointError), manifest, number)
                )
        if errors := errors_of(self.group, "; ".join(filter(None, wrong))):
            raise checkpoint.RanksFailed("", errors)

    def _needs(self, manifest: stored.Manifest) -> list[int]:
        """The files in which numbers of this rank are."""
        tensors: dict[str, list[int]] = {}
        for number, tensor in enumerate(manifest.tensors):
            tensors.setdefault(tensor.name, []).append(number)
        needs = set()
        for unit in self.local.every_unit:
            for entry in unit.entries():
                box, row = checkpoint.box_of(entry), math.prod(entry.weight.local[1:])
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
