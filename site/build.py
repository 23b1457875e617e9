"""Builder of the static site: playground, documentation, the lab as a lecture, and
verification wall.

    python site/build.py OUT [--costs COSTS.json]

The site needs no server and no network. Pyodide, which runs Python in a browser, comes
from npm in the version below and is verified; `formulas.py` computes the cost formulas,
which are cached beside OUT.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import wall
from markdown_it import MarkdownIt
from markdown_it.token import Token

from phalanx.drawing import Html, tag
from phalanx.drawing.page import frame

HERE = Path(__file__).parent
TREE = HERE.parent
SOURCE = TREE / "src" / "phalanx"
LAB = TREE / "lab" / "src" / "phalanx_lab"
PYODIDE = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
RUNTIME = (
    "pyodide.js",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
# Packages that need neither torch nor numpy, and the parts of `cost` that pages use.
PACKAGES = ("layout", "program", "drawing", "planner", "cost", "api")
# The section of README that is the index of the documents.
INDEX = "\n## Documentation\n"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'self' file: 'unsafe-inline' blob:"
    " 'wasm-unsafe-eval'; worker-src blob:; connect-src blob: data:;"
    " img-src 'self' file: data:; frame-src 'self' blob:"
)
# On a phone the links wrap into lines; each is at least 24 pixels high, as WCAG 2.2 asks.
_NAVIGATION = (
    "nav a { display: inline-block; padding: 4px 0; margin-right: 12px }"
)
_STYLE = (
    f"<style>{_NAVIGATION}"
    " img { max-width: 100%; height: auto }"
    " p { color: inherit; margin: 8px 0 } li { margin: 5px 0 }</style>"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--costs", type=Path, help="formulas that are there already"
    )
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def stage(text: str) -> None:
        print(f"{time.monotonic() - begun:4.0f} s  {text}", flush=True)

    stage("documents")
    documents(out)
    stage("lecture: runs every experiment of the lab")
    lecture(out / "lab.html")
    stage("verification wall")
    verification_wall(out)
    stage("cost formulas of the playground, if their sources have changed")
    costs = args.costs or formulas(out)
    stage("playground")
    playground(out, costs)
    stage("done")
    size = sum(
        path.stat().st_size for path in out.rglob("*") if path.is_file()
    )
    print(f"{out}/index.html: {size / 1e6:.1f} MB in all")


# ---- the playground


def formulas(out: Path) -> Path:
    """Return the cost formulas, computed again if their sources have changed."""
    sources = [HERE / "formulas.py", HERE / "formula.py"]
    for package in ("models", "parallel", "cost", "layout", "program"):
        sources += sorted((SOURCE / package).glob("*.py"))
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in sources)
    ).hexdigest()[:16]
    made = out.parent / f"costs-{digest}.json"
    if not made.exists():
        subprocess.run(
            [sys.executable, HERE / "formulas.py", made], check=True
        )
    return made


def playground(out: Path, costs: Path) -> None:
    """Write the playground, the exercises and, packed into scripts, every file that
    these pages need."""
    files = runtime() | {
        "phalanx.zip": package(),
        "costs.json": costs.read_bytes(),
        "worker.js": (HERE / "worker.js").read_bytes(),
    }
    scripts = out / "files"
    shutil.rmtree(scripts, ignore_errors=True)
    scripts.mkdir()
    for name, content in files.items():
        text = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
        (scripts / f"{name}.js").write_text(
            f'(self.FILES ??= {{}})["{name}"] = "{text}";\n'
        )
    loaded = "".join(
        f'<script src="files/{name}.js"></script>\n' for name in files
    )
    for name, title in {
        "playground": "phalanx playground",
        "exercises": "phalanx exercises",
    }.items():
        (out / f"{name}.html").write_text(
            _interactive(name, title, loaded), encoding="utf-8"
        )


def _interactive(name: str, title: str, loaded: str) -> str:
    """Return a page that runs Python: its HTML, the shared style, and its script."""
    scripts = "\n".join(
        (HERE / file).read_text() for file in ("python.js", f"{name}.js")
    )
    body = (
        f"<style>\n{_NAVIGATION}\n{(HERE / 'playground.css').read_text()}</style>",
        navigation(),
        (HERE / f"{name}.html").read_text(),
        origin("make site"),
        loaded,
        f"<script>\n{scripts}</script>",
    )
    page = frame(title, *body)
    policy = f'http-equiv="Content-Security-Policy" content="{_POLICY}"'
    page, count = re.subn(
        'http-equiv="Content-Security-Policy" content="[^"]*"', policy, page
    )
    assert count == 1
    return page


def package() -> bytes:
    """Return the part of phalanx that needs no torch, and the code that answers the
    page, as a zip file."""
    paths = {path: f"phalanx/{path.name}" for path in SOURCE.glob("*.py")}
    for name in PACKAGES:
        for path in sorted((SOURCE / name).rglob("*")):
            if path.is_file() and path.suffix in (
                ".py",
                ".toml",
                ".html",
                ".css",
                ".js",
            ):
                paths[path] = f"phalanx/{path.relative_to(SOURCE)}"
    for name in ("__init__.py", "exercises.py", "exercises.toml"):
        paths[LAB / name] = f"phalanx_lab/{name}"
    paths |= {HERE / name: name for name in ("formula.py", "play.py")}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for path, name in paths.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes())
    return made.getvalue()


def runtime() -> dict[str, bytes]:
    """Return Pyodide's files from npm, after checking their digest."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"], cwd=folder, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (packed,) = Path(folder).glob("*.tgz")
        content = packed.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise SystemExit(
            f"pyodide {PYODIDE} from npm is not the one this was written for"
        )
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        found = {
            name: archive.extractfile(f"package/{name}") for name in RUNTIME
        }
        return {name: file.read() for name, file in found.items() if file}


# ---- documents


def navigation(up: str = "") -> Html:
    links = {
        "index.html": "phalanx", "playground.html": "playground", "docs/index.html": "documentation",
        "lab.html": "lecture", "exercises.html": "exercises", "wall.html": "verification wall",
        "docs/audited.html": "audited trainers", "docs/scored.html": "planner's errors",
    }  # fmt: skip
    items = [tag("a", name, href=f"{up}{to}") for to, name in links.items()]
    return tag(
        "nav",
        *(part for item in items for part in (item, " ")),
        aria_label="Pages",
    )


def origin(command: str, *files: Path) -> Html:
    """Return a line with the commit, its date and the command that made a page.

    The commit is the last one that has changed `files`; without files it is the
    newest of all.
    """
    words = ["git", "log", "-1", "--format=%h of %cs", "--", *map(str, files)]
    done = subprocess.run(
        words, cwd=TREE, capture_output=True, text=True, check=False
    )
    commit = done.stdout.strip() or "unknown, outside a git clone"
    text = f"Commit {commit}. Made by "
    return tag("footer", tag("p", text, tag("code", command), "."))


def documents(out: Path) -> None:
    """Convert README and every page of docs from Markdown."""
    render = MarkdownIt("commonmark", {"html": False}).enable("table")
    pages = {TREE / "README.md": "index.html"}
    pages |= {
        path: f"docs/{path.stem}.html"
        for path in sorted((TREE / "docs").glob("*.md"))
    }
    pages[TREE / "benchmarks" / "README.md"] = "docs/benchmarks.html"
    pages[TREE / "torch-shm" / "README.md"] = "docs/torch-shm.html"
    pages[TREE / "rank-watch" / "README.md"] = "docs/rank-watch.html"
    pages[TREE / "torch-audit" / "README.md"] = "docs/torch-audit.html"
    (out / "docs").mkdir(exist_ok=True)
    shutil.copytree(
        TREE / "docs" / "pictures",
        out / "docs" / "pictures",
        dirs_exist_ok=True,
    )
    for path, name in pages.items():
        text = path.read_text(encoding="utf-8")
        made = origin("make site", path)
        page = _document(render, text, path, pages, name, made)
        (out / name).write_text(page, encoding="utf-8")
    readme = TREE / "README.md"
    _, _, listed = readme.read_text(encoding="utf-8").partition(INDEX)
    listed, _, _ = listed.partition("\n## ")
    name = "docs/index.html"
    made = origin("make site", readme)
    text = f"# Documentation\n{listed}"
    indexed = _document(render, text, readme, pages, name, made)
    (out / name).write_text(indexed, encoding="utf-8")


def _document(
    render: MarkdownIt,
    text: str,
    path: Path,
    pages: Mapping[Path, str],
    name: str,
    made: Html,
) -> str:
    """Return the page `name` of a Markdown text of the file `path`."""
    title = re.match(r"# (.+)", text)
    assert title, f"{path.name} has no title in its first line"
    tokens = render.parse(text.removeprefix(title[0]))
    _name_headings(tokens)
    body = render.renderer.render(tokens, render.options, {})
    body = _linked(body, path, pages, Path(name).parent)
    # Columns are to the left, unless the text aligns them to the right.
    body = body.replace("<table>", '<div class="scroll left wrap"><table>')
    body = body.replace("</table>", "</table></div>").replace(
        "<th></th>", "<td></td>"
    )
    up = "../" * name.count("/")
    page = frame(title[1], _STYLE, navigation(up), body, made)
    return page.replace("img-src data:", "img-src 'self' file: data:")


def _name_headings(tokens: list[Token]) -> None:
    """Give headings the ids that they have on GitHub."""
    known: Counter[str] = Counter()
    for heading, words in pairwise(tokens):
        if heading.type == "heading_open":
            name = re.sub(r"[^\w\- ]", "", words.content.lower()).replace(
                " ", "-"
            )
            heading.attrSet(
                "id", f"{name}-{known[name]}" if known[name] else name
            )
            known[name] += 1


def _linked(
    html: str, path: Path, pages: Mapping[Path, str], here: Path
) -> str:
    """Replace links to Markdown files by links to pages, seen from the folder `here`,
    and links to other files by their names."""

    def link(match: re.Match[str]) -> str:
        to, hash_, anchor = match[1].partition("#")
        target = (path.parent / to).resolve() if to else path
        if "://" in to or target not in pages:
            return match[0] if "://" in to or not to else f"<code>{to}</code>"
        return f'href="{os.path.relpath(pages[target], here)}{hash_}{anchor}"'

    html = re.sub(r'href="([^"]*)"', link, html)
    # A file without a page is named but not linked.
    return re.sub(
        r"<a <code>(.*?)</code>>(.*?)</a>", r"\2 (<code>\1</code>)", html
    )


def lecture(path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "phalanx", "lab", "all", "--width", "128", "--html", path],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    made = origin("phalanx lab all --width 128 --html lab.html")
    page = path.read_text(encoding="utf-8")
    page = page.replace("<h1>", f"{_STYLE}{navigation()}<h1>", 1)
    path.write_text(
        page.replace("</main>", f"{made}</main>", 1), encoding="utf-8"
    )


def verification_wall(out: Path) -> None:
    """Write the page of `wall.py`'s measurements, with their age on the day of the
    build."""
    today = datetime.now(UTC).date()
    parts = wall.page(json.loads(wall.FILE.read_text()), today)
    page = frame(
        "Verification wall",
        _STYLE,
        navigation(),
        *parts,
        origin("python site/wall.py", wall.FILE),
        narrow=False,
    )
    (out / "wall.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
