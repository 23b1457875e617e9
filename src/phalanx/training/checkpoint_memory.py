"""In-memory checkpoints on the hosts, for ranks that are restarted.

They have the format of other checkpoints and lie in a folder of /dev/shm on each host,
which outlives the ranks. Every rank writes its part there. With several hosts, a rank
of the next host keeps a copy, so that one host may be lost.

The folder belongs to the process that started the ranks (the command, or torchrun's
agent) and carries its pid. When that process ends, the host's watcher deletes the
folder. A host holds at most twice the parts of its own ranks and of the previous
host's: the newest checkpoint, and the one being written.
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
    """Return the folder of this host's in-memory checkpoints; None if they are off, or
    if nothing outlives the ranks."""
    started = (
        # Under torchrun or our own command a parent outlives the ranks.
        multiprocessing.parent_process() is not None
        or "TORCHELASTIC_RUN_ID" in os.environ
    )
    if not (run.train.in_memory and started and os.access(ROOT, os.W_OK)):
        return None
    owner = os.getppid()
    # With the owner's start, because pids are used again.
    return ROOT / f"{NAME}-{owner}-{started_at(owner)}-{_mark(run)}"


def _mark(run: Run) -> str:
    return hashlib.sha256(
        # One folder for each user and run.
        f"{os.getuid()} {Path(run.out).resolve()}".encode()
    ).hexdigest()[:16]


def newest_in_memory(run: Run) -> str:
    """Return the name of a run's newest checkpoint in this host's memory, or ""."""
    found = [
        p.name
        for folder in ROOT.glob(f"{NAME}-*-{_mark(run)}")
        for p in steps(folder)[:1]
    ]
    return max(found, default="")


def remove_left(root: Path = ROOT) -> None:
    """Delete in-memory checkpoints of runs whose watcher was killed."""
    for folder in root.glob(f"{NAME}-*-*-*"):
        with suppress(OSError, ValueError):
            # "phalanx-memory-PID-STARTED-MARK".
            _, _, pid, started, _ = folder.name.split("-")
            if folder.stat().st_uid == os.getuid() and not alive(
                int(pid), int(started)
            ):
                shutil.rmtree(folder)


class MemoryCheckpoints:
    """A run's in-memory checkpoints. Every rank has one, and its methods are
    collective.

    `host` identifies the memory that a rank uses; ranks of one host share `folder`.
    """

    def __init__(
        self, folder: Path, host: str, local: LocalModel, updates: Updates
    ) -> None:
        self.folder, self.local, self.updates = folder, local, updates
        self.group = local.groups.everyone
        self.saver = checkpoint.Saver(folder, local, updates)
        self.hosts: dict[str, list[int]] = {}
        for rank, each in enumerate(exchange(self.group, host)):
            self.hosts.setdefault(each, []).append(rank)
        self.host, self.ranks = host, self.hosts[host]
        self.first = self.ranks[0] == self.group.rank
        # Hosts in the order of their first ranks, the same everywhere.
        places = list(self.hosts.values())
        # keeper[rank]: the rank at the same position on the next host, which keeps a
        # copy of its part.
        self.keeper: dict[int, int] = {}
        for ranks, after in zip(places, [*places[1:], places[0]], strict=True):
            if len(places) > 1:
                self.keeper |= {
                    rank: after[n % len(after)] for n, rank in enumerate(ranks)
                }

    def close(self) -> None:
        """Free the memory."""
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, progress: stored.Progress) -> list[str]:
        """Save this step. Return the errors, the same on all ranks; if any, the
        previous checkpoint is intact."""
        hidden, group = (
            self.folder / f"{checkpoint.SAVING}{progress.step:08}",
            self.group,
        )
        manifest, tensors = self.saver.snapshot(progress)
        # Sizes are exchanged before anything is written, so that hosts can
        # refuse.
        own = sum(x.nbytes for x in tensors.values())
        sizes = [int(size) for size in exchange(group, str(own))]
        try:
            checkpoint.together(group, lambda: self._make_room(hidden, sizes))
            file = hidden / stored.file_of(group.rank)
            write = partial(checkpoint.write_own, file, manifest, tensors)
            report = checkpoint.together(group, write)
            reports = exchange(group, report)
            # Copies to the next host, before anything is published.
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
            # Old ones are deleted after all hosts have the new one: every host holds
            # some common step.
            rest = (self.folder, hidden, reports, 2)
            checkpoint.together(
                group, lambda: checkpoint.commit(*rest) if self.first else ""
            )
        except checkpoint.RanksFailed as failed:
            return failed.errors
        # Then only the newest is kept. A leftover does no harm.
        with suppress(OSError):
            if self.first:
                checkpoint.prune(
                    self.folder, self.folder / stored.name_of(progress.step), 1
                )
        return []

    def _make_room(self, hidden: Path, sizes: Sequence[int]) -> None:
        """Create the hidden folder of a save if its host has enough memory."""
        if not self.first:
            return
        remove_left(self.folder.parent)
        # What this host will hold: its ranks' parts, and those that it keeps
        # for others.
        kept = [
            *self.ranks,
            *(rank for rank, at in self.keeper.items() if at in self.ranks),
        ]
        needed = sum(sizes[rank] for rank in kept)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.stat().st_uid != os.getuid():
            raise CheckpointError(f"{self.folder} is another user's")
        stat = os.statvfs(self.folder)
        # The smaller of what the file system and the process's limits allow.
        if (
            free := min(stat.f_bavail * stat.f_frsize, available_memory())
        ) < needed:
            raise CheckpointError(
                f"{binary_text(needed)} are needed in {self.folder}, but only {binary_text(free)} are free"
            )
        checkpoint.make_hidden(hidden)

    def _move(
        self, folder: Path, files: Sequence[tuple[str, int, int, int]]
    ) -> None:
        """Copy files between hosts, one chunk of each at a time.

        Each file is given by name, size, source rank and target rank.
        """
        if not files:
            return
        me, world, error = self.group.rank, self.group.size, ""
        # One all-to-all moves a chunk of every file; all ranks take part in
        # each.
        for at in range(0, max(size for _, size, *_ in files), stored.CHUNK):
            sent, taken = [0] * world, [0] * world
            # An empty tensor, so that `cat` has at least one.
            own, writes = (
                [torch.empty(0, dtype=torch.uint8)],
                list[tuple[str, int]](),
            )
            # By source and target: both sides then agree on the order.
            for name, size, source, target in sorted(
                files, key=lambda each: each[2:]
            ):
                # A shorter file has nothing left to send in later rounds.
                count = max(0, min(stored.CHUNK, size - at))
                if source == me:
                    own.append(torch.zeros(count, dtype=torch.uint8))
                    sent[target] += count
                    try:
                        with (folder / name).open("rb") as file:
                            stored.read_into(file, at, own[-1])
                    # continue to the last call, as the others wait in it
                    except (CheckpointError, OSError) as wrong:
                        error = why(wrong)
                if target == me:
                    taken[source] += count
                    writes.append((name, count))
            out = torch.empty(
                # Received chunks, in the order of their sources.
                sum(taken),
                dtype=torch.uint8,
                device=self.group.device,
            )
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
        """Find the newest step >= `least` all of whose parts are in some host's memory,
        and bring its files to the ranks that need them.

        Returns None if a part is missing or damaged.
        """
        # Each rank reads the files of its host's memory, a share each.
        seen, texts = self._seen()
        tables = [
            json.loads(text) for text in exchange(self.group, json.dumps(seen))
        ]
        # By (step, manifest, number of files): the intact files of each host.
        have: dict[tuple[int, str, int], dict[str, set[int]]] = {}
        for host, ranks in self.hosts.items():
            for step, digest, count, sound in (
                each for rank in ranks for each in tables[rank]
            ):
                have.setdefault((step, digest, count), {}).setdefault(
                    host, set()
                ).update(sound)
        # Complete if every file is intact on some host.
        whole = [
            key
            for key, by in have.items()
            if len(set[int]().union(*by.values())) == key[2]
        ]
        step, digest, _ = newest = max(whole, default=(-1, "", 0))
        if step < least:
            return None
        path = self.folder / stored.name_of(step)
        # The first rank that has this manifest sends its text to all.
        root = next(
            n
            for n, table in enumerate(tables)
            if digest in {each[1] for each in table}
        )
        text = broadcast_text(self.group, texts.get(digest, ""), root)
        manifest = stored.Manifest.parse(text, path)
        # Files that a host needs and lacks come from one that has them.
        try:
            self._bring(path, text, manifest, have[newest])
        except checkpoint.RanksFailed:
            return None
        return path, manifest

    def _seen(
        self,
    ) -> tuple[list[tuple[int, str, int, list[int]]], dict[str, str]]:
        """List the checkpoints in this host's memory, with the intact files of this
        rank's share. Return them and the manifests by digest."""
        seen, texts = [], {}
        for path in steps(self.folder):
            with suppress(CheckpointError, OSError):
                text = stored.manifest_text(path)
                manifest, folder = (
                    stored.Manifest.parse(text, path),
                    Folder(path, CheckpointError),
                )
                # The position among the host's ranks, which divide its files.
                own = range(
                    self.ranks.index(self.group.rank),
                    len(manifest.files),
                    len(self.ranks),
                )
                sound = [
                    n for n in own if not stored.damage(folder, manifest, n)
                ]
                digest = hashlib.sha256(text.encode()).hexdigest()
                seen.append(
                    (manifest.step, digest, len(manifest.files), sound)
                )
                texts[digest] = text
        return seen, texts

    def _bring(
        self,
        path: Path,
        text: str,
        manifest: stored.Manifest,
        have: dict[str, set[int]],
    ) -> None:
        """Copy files to the hosts whose ranks need them and lack them."""
        needs = [
            json.loads(each)
            for each in exchange(self.group, json.dumps(self._needs(manifest)))
        ]

        # The manifest lets this host's folder be read like any other.
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
                # One rank of each host that lacks the file receives it.
                ranks[0]
                for host, ranks in self.hosts.items()
                if number not in have.get(host, ())
                and any(number in needs[r] for r in ranks)
            ]
            self._move(
                path,
                [(file.name, file.size, source, target) for target in lack],
            )
            if self.group.rank in lack:
                wrong.append(
                    stored.damage(
                        Folder(path, CheckpointError), manifest, number
                    )
                )
        if errors := errors_of(self.group, "; ".join(filter(None, wrong))):
            raise checkpoint.RanksFailed("", errors)

    def _needs(self, manifest: stored.Manifest) -> list[int]:
        """List the files that hold elements of this rank's tensors."""
        tensors: dict[str, list[int]] = {}
        for number, tensor in enumerate(manifest.tensors):
            tensors.setdefault(tensor.name, []).append(number)
        needs = set()
        # State of the matrices that this rank owns is read whole.
        owned = [
            name
            for update in self.updates.values()
            for name in update.owned_shapes
        ]
        for name in owned:
            for number in tensors.get(name, ()):
                shards = manifest.tensors[number].shards
                needs |= {shard.file for shard in shards}
        for unit in self.local.every_unit:
            for entry in unit.entries():
                box, row = (
                    checkpoint.box_of(entry),
                    math.prod(entry.weight.local[1:]),
                )
                # Whole rows are read.
                start, stop = (
                    entry.start // row * row,
                    -(-entry.stop // row) * row,
                )
                for number in tensors.get(entry.weight.name, ()):
                    for shard in manifest.tensors[number].shards:
                        # A part of another layout: any overlap of boxes needs
                        # it.
                        same = shard.box == box
                        if same and (
                            shard.stop <= start or shard.start >= stop
                        ):
                            continue
                        pairs = zip(shard.box, box, strict=True)
                        if all(
                            max(a, c) < min(b, d) for (a, b), (c, d) in pairs
                        ):
                            needs.add(shard.file)
        return sorted(needs)
