"""Pages in a real browser, without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update --enable-logging=stderr"
    " --dump-dom --virtual-time-budget=3000"
)


def opened(written: str, folder: Path) -> tuple[str, list[str]]:
    """The page's elements after its scripts ran, and what it wrote on the console."""
    page = folder / "page.html"
    page.write_text(written)
    done = subprocess.run(
        [str(CHROMIUM), *_FLAGS.split(), f"--user-data-dir={folder / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
