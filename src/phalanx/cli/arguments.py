"""Hides the secrets of URLs from the command line that other users of the machine see
(`ps`)."""

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rank_watch.processes import stat_of

from ..layout.url import Url

# Fields of /proc/PID/stat, counted from the state: the address range of the arguments.
_BEGIN, _END = 45, 46


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments with references to variables instead of secrets, and set
    these variables.

    The arguments are for a program that replaces this process.
    """
    words = [Url(word) for word in argv]
    for word in words:
        # The references find the secrets in the environment of the program.
        os.environ.update(word.secrets)
    return [str(word) for word in words]


def hide_secrets(argv: Sequence[str]) -> None:
    """Overwrite the secrets that `ps` shows of this process and its forks, and those in
    `sys.argv`.

    Logging tools record `sys.argv`. Linux only.
    """
    if not any(Url(word).secrets for word in argv):
        return
    sys.argv[1:] = [str(Url(word)) for word in sys.argv[1:]]
    with suppress(OSError, ValueError, IndexError):
        fields = stat_of("/proc/self")
        begin, end = int(fields[_BEGIN]), int(fields[_END])
        shown = Path("/proc/self/cmdline").read_bytes()
        # The arguments follow one another in memory, each with a zero byte
        # behind it.
        hidden = b"\0".join(map(_starred, shown.split(b"\0")))
        # Nothing is written unless the memory is exactly as long as what `ps`
        # shows.
        if begin and len(shown) == len(hidden) == end - begin:
            ctypes.memmove(begin, hidden, len(hidden))


def _starred(word: bytes) -> bytes:
    """Return an argument with its secrets replaced by stars, in the same length."""
    for secret in Url(os.fsdecode(word)).secrets.values():
        raw = os.fsencode(secret)
        word = word.replace(raw, b"*" * len(raw))
    return word
