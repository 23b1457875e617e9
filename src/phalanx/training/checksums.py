"""Checksum algorithms by the names that are stored with the sums. They detect
accidents, not forgery."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# SHA-256 limits the speed to that of a disk. It is for older files, and where xxhash is
# missing.
CHECKSUMS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
with suppress(ImportError):
    import xxhash

    CHECKSUMS["xxh3_128"] = xxhash.xxh3_128
FASTEST = list(CHECKSUMS)[-1]
