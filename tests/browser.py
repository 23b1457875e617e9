"""Pages in a real browser, without a window."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(
        None,
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
    ),
    None,
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update"
)
_FLAGS = (
    _QUIET + " --enable-logging=stderr --dump-dom --virtual-time-budget=3000"
)


def opened(written: str, folder: Path) -> tuple[str, list[str]]:
    """Return the page's elements after its scripts have run, and its console
    messages."""
    page = folder / "page.html"
    page.write_text(written)
    done = subprocess.run(
        [
            str(CHROMIUM),
            *_FLAGS.split(),
            f"--user-data-dir={folder / 'profile'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


class Tab:
    """One open page, driven over the pipe of Chromium's developer tools."""

    def __init__(self, said: Any, heard: Any) -> None:
        self._said, self._heard, self._numbers = (
            said,
            heard,
            itertools.count(1),
        )
        self._session = ""
        self.console: list[str] = []
        # requests to any host, of pages, frames and workers
        self.outside: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")[
            "targetId"
        ]
        found = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )
        self._session = found["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")
        self._listen(self._session)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(self._session, method, params)
        while True:
            message = json.loads(self._read())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message.get("method"), message.get("params"))

    def _send(self, session: str, method: str, params: dict[str, Any]) -> int:
        number, of = (
            next(self._numbers),
            {"sessionId": session} if session else {},
        )
        text = json.dumps(
            {"id": number, "method": method, "params": params, **of}
        )
        self._said.write(text.encode() + b"\0")
        self._said.flush()
        return number

    def _listen(self, session: str) -> None:
        """Record the requests of a page, frame or worker, and attach to the workers
        that it starts."""
        self._send(session, "Network.enable", {})
        started = {
            "autoAttach": True,
            "waitForDebuggerOnStart": True,
            "flatten": True,
        }
        self._send(session, "Target.setAutoAttach", started)
        self._send(session, "Runtime.runIfWaitingForDebugger", {})

    def _note(self, method: str | None, params: Any) -> None:
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(params))
        elif method == "Target.attachedToTarget":
            self._listen(params["sessionId"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.outside.append(url)

    def _read(self) -> bytes:
        parts = bytearray()
        while (byte := self._heard.read(1)) != b"\0":
            assert byte, "the browser ended"
            parts += byte
        return bytes(parts)

    def open(
        self,
        url: str,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
    ) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if dark else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def js(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, (
                f"never true: {expression}; {self.console}"
            )
            time.sleep(0.05)
        return value

    def key(self, name: str) -> None:
        """Press a key, as a person would."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name,
                windowsVirtualKeyCode=codes[name],
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """Save a screenshot of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a Chromium of its own that resolves no host; yield a tab."""
    (take, said), (heard, give) = os.pipe(), os.pipe()

    # the browser reads from descriptor 3 and writes to descriptor 4
    def ends() -> None:
        kept = os.dup(take), os.dup(give)
        os.dup2(kept[0], 3)
        os.dup2(kept[1], 4)

    flags = [
        *_QUIET.split(),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--remote-debugging-pipe",
    ]
    flags.append(f"--user-data-dir={folder / 'profile'}")
    process = subprocess.Popen(
        [str(CHROMIUM), *flags], close_fds=False, preexec_fn=ends,
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


AXE = "4.14.1"


def axe_source(folder: Path) -> str:
    """Return the script of axe-core, an accessibility checker, from npm."""
    words = ["npm", "pack", "--silent", f"axe-core@{AXE}"]
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(
            "axe-core is not to be had from npm here, so that nothing can be said"
        )
    with tarfile.open(next(folder.glob("axe-core-*.tgz"))) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script
        return script.read().decode()


def barriers(tab: Tab, axe: str) -> list[str]:
    """Return axe-core's findings in the open page: WCAG 2.2 A and AA, and good
    practice."""
    tags = [
        "wcag2a",
        "wcag2aa",
        "wcag21a",
        "wcag21aa",
        "wcag22aa",
        "best-practice",
    ]
    tab.js(f"{axe}\n;true")
    found: list[str] = tab.js(
        f"axe.run(document, {{iframes: false, runOnly: {json.dumps(tags)}}}).then((r) => r.violations"
        ".flatMap((v) => v.nodes.map((n) => `${v.id}: ${n.target}: ${n.failureSummary}`)))"
    )
    return found
