"""Digests of a run's data files, and the records by which a checkpoint recognises its
data.

If all files together have at most `WHOLE` bytes, every byte is read. Of more data,
`BLOCKS` blocks are sampled, spread over all files by size (docs/data-format.md explains
what that can miss). Names, paths and times are not part of a digest: a moved folder is
the same data.

The digest of a large file is kept in the user's cache folder until the file changes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...layout.codec import decode
from ...layout.files import open_regular, write_text
from ..checksums import CHECKSUMS, FASTEST
from ..folder import count

BLOCK = 1 << 18  # bytes of a sampled block
BLOCKS = 1 << 16  # blocks sampled from all files together
WHOLE = BLOCK * BLOCKS  # 16 GiB
CHUNK = 4 << 20  # bytes of an unsampled file that a thread reads at a time
THREADS = 8  # reader threads: network storage answers many requests at once
KEPT = 64 << 20  # bytes; digests of smaller files are not cached
MOST = 4096  # maximum number of cached digests
# Seconds. A file written more recently could be written again within the same tick of
# its clock, so its digest is not cached.
SETTLED = 2.0
_DIGEST = re.compile(r"[a-z0-9_]{1,20}:[0-9a-f]{32,64}")


@dataclass(frozen=True)
class FileDigest:
    """A data file: its path, its role in its source, and the digest of its content.

    `blocks` is the number of sampled blocks; 0 means every byte was read. The digest is
    prefixed with the name of the checksum.
    """

    path: str
    role: str
    size: int = count()
    blocks: int = count(0)
    digest: str = ""


@dataclass(frozen=True)
class SourceRecord:
    """One source of a run's data, as a checkpoint records it.

    `reading` describes how tokens are decoded from the files; `train` and `validation`
    count the tokens of the two parts. `content` is the digest of a source without
    files. `weight` is the one in the run file.
    """

    name: str
    reading: str
    content: str = ""
    weight: int = count(0)
    train: int = count(0)
    validation: int = count(0)
    files: tuple[FileDigest, ...] = ()


# ---- the digest of a file


def blocks_of(sizes: Sequence[int]) -> list[int]:
    """Return the number of blocks to sample from each file; 0 means every byte."""
    total = sum(sizes)
    if total <= WHOLE:
        return [0] * len(sizes)
    # Blocks in proportion to the sizes, and at least one for each file.
    shares = [max(1, BLOCKS * size // total) for size in sizes]
    return [
        # If blocks would cover the whole file, every byte is read instead.
        0 if share * BLOCK >= size else share
        for share, size in zip(shares, sizes, strict=True)
    ]


def chance_missed(share: float, blocks: int) -> float:
    """Return the probability that sampling misses a change scattered over this share of
    all blocks.

    A contiguous change of at least two sampling intervals is always found.
    """
    # (1 - share)^blocks, computed by logarithms: a small share would vanish in
    # 1 - share.
    return math.exp(blocks * math.log1p(-share)) if share < 1 else 0.0


def digest_of(path: Path, blocks: int, checksum: str = FASTEST) -> str:
    """Return the digest of a file's size and content. Raises OSError."""
    with open_regular(path) as file, ThreadPoolExecutor(THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        # Size and number of blocks are part of the digest, so ways of reading
        # are not confused.
        whole = CHECKSUMS[checksum](f"{size} {blocks}".encode())
        # Ranges are hashed by threads, and their digests joined in order.
        for part in pool.map(
            partial(_part, file.fileno(), checksum), _ranges(size, blocks)
        ):
            whole.update(part)
    return f"{checksum}:{whole.hexdigest()}"


def _part(descriptor: int, checksum: str, span: tuple[int, int]) -> bytes:
    at, length = span
    # `pread` has no position to share, so threads read one descriptor.
    digest: bytes = CHECKSUMS[checksum](
        os.pread(descriptor, length, at)
    ).digest()
    return digest


def _ranges(size: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each range of a file to read."""
    if not blocks:
        yield from (
            (at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)
        )
        return
    # One block starts in each of `blocks` equal parts, at a position derived from the
    # size alone. The beginning of the file, where headers are, and its end are read
    # too.
    draw, part = random.Random(size), size / blocks
    starts = [int((number + draw.random()) * part) for number in range(blocks)]
    for at in (0, *starts, max(0, size - BLOCK)):
        yield at, min(BLOCK, size - at)


# ---- cached digests


def kept_digest(path: Path, blocks: int) -> str:
    """Return the digest of a file, from the cache if the file has not changed."""
    # The status before and after: a file written meanwhile has no valid
    # digest.
    before = path.stat()
    file = _kept_at(path, before, blocks)
    known = _known(file) if before.st_size >= KEPT else ""
    if known:
        return known
    digest, after = digest_of(path, blocks), path.stat()
    settled = time.time() - max(after.st_mtime, after.st_ctime) > SETTLED
    if (
        after.st_size >= KEPT
        and settled
        and _kept_at(path, after, blocks) == file
    ):
        _keep(file, digest)
    return digest


def identity_of(status: os.stat_result) -> list[int]:
    """Return the status fields of a file that change whenever it is written or
    replaced."""
    return [
        # The change time also rises where a tool sets back the modification
        # time.
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns,
    ]  # fmt: skip


def _kept_at(path: Path, status: os.stat_result, blocks: int) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # The status is part of the key, so a changed file has another name in the
    # cache.
    key = [os.path.abspath(path), *identity_of(status), blocks, FASTEST]
    name = hashlib.sha256(
        json.dumps(key).encode("utf-8", "replace")
    ).hexdigest()[:32]
    return Path(base, "phalanx", "digests", name)


def _known(file: Path) -> str:
    with suppress(OSError, ValueError), open_regular(file) as opened:
        # Anything else in the cache file counts as unknown.
        text = opened.read(200).decode()
        return text if _DIGEST.fullmatch(text) else ""
    return ""


def _keep(file: Path, digest: str) -> None:
    if not file.is_absolute():  # the user has no home folder
        return
    with suppress(OSError):  # a digest that cannot be cached is computed again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, digest)
        # The oldest digests go first.
        there = sorted(
            file.parent.iterdir(), key=lambda each: each.stat().st_mtime
        )
        for old in there[: max(0, len(there) - MOST)]:
            old.unlink()


# ---- all files of a run


def described(
    sources: Sequence[tuple[SourceRecord, Sequence[tuple[str, Path]]]],
) -> list[SourceRecord]:
    """Return the records with the digests of their files, each given as role and path.
    Raises OSError."""
    paths = [path for _, files in sources for _, path in files]
    # Blocks are shared out over the files of all sources together.
    sizes = [path.stat().st_size for path in paths]
    counts = iter(zip(sizes, blocks_of(sizes), strict=True))
    records = []
    for record, files in sources:
        digests = []
        for role, path in files:
            size, blocks = next(counts)
            digest = kept_digest(path, blocks)
            digests.append(FileDigest(str(path), role, size, blocks, digest))
        records.append(replace(record, files=tuple(digests)))
    return records


def fingerprint(records: Sequence[SourceRecord]) -> str:
    """Return one digest of the content, order and weights of all sources, independent
    of their paths."""
    rows = [
        # No paths, names or times: a moved folder is the same data.
        [
            record.reading, record.content, weight, record.train, record.validation,
            [[each.role, each.size, each.digest] for each in record.files],
        ]
        for record, weight in zip(records, _weights(records), strict=True)
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _weights(records: Sequence[SourceRecord]) -> list[int]:
    """Return the smallest integers with the same ratios."""
    # Weights 2 and 4 are the same mixture as 1 and 2.
    unit = math.gcd(*(record.weight for record in records)) or 1
    return [record.weight // unit for record in records]


# ---- what differs


def differences(
    there: Sequence[SourceRecord],
    here: Sequence[SourceRecord],
    digest: Callable[[Path, int, str], str] = digest_of,
) -> list[str]:
    """List differences between a run's data and its checkpoint's.

    A file whose digest was computed in another way is read again, by `digest`.
    """
    if len(there) != len(here):
        names = ", ".join(record.name for record in there)
        # Compare like with like: the earlier checksum and number of blocks.
        return [
            f"there are {len(here)} sources, and there were {len(there)}: {names}"
        ]
    here = [
        _in_the_way_of(*pair, digest) for pair in zip(there, here, strict=True)
    ]
    if fingerprint(there) == fingerprint(here):
        return []
    # Compare the content of the sources without their weights.
    was, now = (
        [fingerprint([replace(each, weight=0)]) for each in x]
        for x in (there, here)
    )
    wrong = []
    # The same sources in another order are a fault of their own.
    if was != now and sorted(was) == sorted(now):
        order = ", ".join(here[now.index(each)].name for each in was)
        wrong.append(
            f"the sources are in another order; the order was {order}"
        )
    elif was != now:
        for old, new in zip(there, here, strict=True):
            wrong += _changes(old, new)
    if _weights(there) != _weights(here):
        weights = [
            ", ".join(map(str, _weights(each))) for each in (here, there)
        ]
        wrong.append(
            "the weights of the sources are {}, and were {}".format(*weights)
        )
    return wrong


def _in_the_way_of(
    there: SourceRecord,
    here: SourceRecord,
    digest: Callable[[Path, int, str], str],
) -> SourceRecord:
    """Return a record whose digests are computed in the same way as another
    record's."""
    files = []
    for number, each in enumerate(here.files):
        old = there.files[number] if number < len(there.files) else each
        # "blake3:..." -> the name of the checksum.
        checksum = old.digest.partition(":")[0]
        same_way = (old.blocks, checksum) == (
            each.blocks,
            each.digest.partition(":")[0],
        )
        # Another size is a difference already, so nothing has to be read.
        if not same_way and old.size == each.size and checksum in CHECKSUMS:
            remade = digest(Path(each.path), old.blocks, checksum)
            each = replace(each, blocks=old.blocks, digest=remade)
        files.append(each)
    return replace(here, files=tuple(files))


def _changes(old: SourceRecord, new: SourceRecord) -> Iterator[str]:
    """Yield the changes of one source since the checkpoint."""
    roles = {each.role: each for each in old.files}
    # Other roles mean another kind of source.
    if [*roles] != [each.role for each in new.files]:
        yield f"{new.name} is read in place of {old.name}"
        return
    changed = False
    for each in new.files:
        was = roles[each.role]
        if (was.size, was.digest) == (each.size, each.digest):
            continue
        changed = True
        if (checksum := was.digest.partition(":")[0]) not in CHECKSUMS:
            yield f"{each.path} cannot be compared: {checksum[:20]!r} is not installed here"
            continue
        size = f"has {each.size:,} bytes, and had {was.size:,}"
        same = f"has other content in its {each.size:,} bytes"
        moved = f" (it was {was.path})" if was.path != each.path else ""
        yield f"{each.path} {size if each.size != was.size else same}{moved}"
    if old.content != new.content:
        changed = True
        yield f"{new.name} has other content"
    if old.reading != new.reading:
        yield f"{new.name} is read as {new.reading}, and was as {old.reading}"
    # With equal files, only another split can differ.
    elif not changed and (old.train, old.validation) != (
        new.train,
        new.validation,
    ):
        held = f"{new.validation:,} tokens of {new.name} are held out"
        yield f"{held}, and {old.validation:,} were"


# ---- records as JSON


@dataclass(frozen=True)
class DataRecord:
    """The data sources of a run, in order."""

    sources: tuple[SourceRecord, ...]


def table_of(records: Sequence[SourceRecord]) -> dict[str, Any]:
    """Convert the records to a JSON table."""
    return asdict(DataRecord(tuple(records)))


def records_of(
    table: Mapping[str, Any], where: str, error: type[ValueError]
) -> list[SourceRecord]:
    """Parse such a table into records, checking its types."""
    return [*decode(DataRecord, table, where, error).sources]
