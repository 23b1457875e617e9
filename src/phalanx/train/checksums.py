"""Checksums of files by the names that are written down with them. They find accidents, not forgeries."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# SHA-256 is as slow as a disk. It stays for older files, and where nothing can be installed.
CHECKSUMS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
with suppress(ImportError):
    import xxhash

    CHECKSUMS["xxh3_128"] = xxhash.xxh3_128
FASTEST = list(CHECKSUMS)[-1]
