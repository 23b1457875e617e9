"""Pages in a real browser, without a window."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update"
)
_FLAGS = _QUIET + " --enable-logging=stderr --dump-dom --virtual-time-budget=3000"


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


class Tab:
    """One page that is open, driven over the pipe of Chromium's developer tools."""

    def __init__(self, said: Any, heard: Any) -> None:
        self._said, self._heard, self._numbers = said, heard, itertools.count(1)
        self._session = ""
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": number, "method": method, "params": params, **session})
        self._said.write(text.encode() + b"\0")
        self._said.flush()
        while True:
            message = json.loads(self._read())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.console.append(json.dumps(message["params"]))

    def _read(self) -> bytes:
        parts = bytearray()
        while (byte := self._heard.read(1)) != b"\0":
            assert byte, "the browser ended"
            parts += byte
        return bytes(parts)

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def js(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """Until it is true."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"never true: {expression}; {self.console}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A tab of a Chromium of its own."""
    (take, said), (heard, give) = os.pipe(), os.pipe()

    def ends() -> None:  # what the browser reads is its descriptor 3, what it writes 4
        kept = os.dup(take), os.dup(give)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    flags = [*_QUIET.split(), "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        [str(CHROMIUM), *flags], pass_fds=(3, 4, take, give), preexec_fn=ends,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(take)
    os.close(give)
    try:
        with os.fdopen(said, "wb") as out, os.fdopen(heard, "rb") as into:
            yield Tab(out, into)
    finally:
        process.kill()
        process.wait()
