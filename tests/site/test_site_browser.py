"""The site in a real browser, from a disk without a server: the playground, and every kind of page for
those who see little, use a keyboard, or have a phone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import build
import formulas
import pytest
from wrong_answers import WRONG, wrong_answer

from browser import Tab, axe_source, barriers, browser, needs_chromium
from phalanx.layout import Layout, piece_layout
from phalanx_lab.exercises import exercises

pytestmark = [pytest.mark.slow, needs_chromium]

PAGES = (
    "index.html", "docs/index.html", "docs/planning.html", "docs/glossary.html", "wall.html",
    "lab.html", "playground.html", "exercises.html", "step.html", "picture.html", "report.html",
)  # fmt: skip
ANSWERED = "document.getElementById('state').textContent.endsWith('ms')"
SHOWN = "document.getElementById('picture').srcdoc.includes('makespan')"


def phalanx(*words: object, folder: Path) -> None:
    command = [sys.executable, "-m", "phalanx", *map(str, words)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with formulas of one cut, and beside it a drawn step and a run's report."""
    out = tmp_path_factory.mktemp("site")
    cut = piece_layout(Layout.parse("bf16"))
    costs = out / "costs.json"
    costs.write_text(json.dumps(formulas.table_of([("llama", cut)])))
    build.documents(out)
    build.verification_wall(out)
    build.playground(out, costs)
    build.lecture(out / "lab.html")
    assert (
        sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        < 40e6
    )
    phalanx(
        "draw",
        "dp2 pp2 zero3 1f1b:4",
        "--model",
        "124m",
        "--out",
        "step.html",
        folder=out,
    )
    phalanx(
        "train", "steps=4", "layout=dp2", "sequence=32", "out=run", folder=out
    )
    phalanx("report", "run", "--out", "report.html", folder=out)
    return out


@pytest.fixture(scope="module")
def tab(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One browser for all, which must never have asked anything of any host, nor complained."""
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.open(f"{(site / 'playground.html').as_uri()}#layout=dp2")
        opened.wait(SHOWN, 120)
        # The picture is a page of its own, in a frame that nothing can look into.
        shown = opened.js("document.getElementById('picture').srcdoc")
        (site / "picture.html").write_text(shown)
        yield opened
        assert opened.outside == []
        assert opened.console == []


def type_in(tab: Tab, field: str, text: str) -> None:
    tab.js(
        f"(() => {{ const e = document.getElementById('{field}'); e.value = {json.dumps(text)};"
        " e.dispatchEvent(new Event('input')); })()"
    )


def text_of(tab: Tab, field: str) -> str:
    return str(tab.js(f"document.getElementById('{field}').textContent"))


def show(tab: Tab, site: Path, name: str, **how: Any) -> None:
    tab.open(f"{(site / name).as_uri()}?{sorted(how.items())}", **how)
    if name == "playground.html":
        tab.wait(SHOWN, 120)
    if name == "exercises.html":
        tab.wait(READY, 120)


def test_a_request_of_a_page_or_its_worker_would_be_seen(
    tmp_path: Path,
) -> None:
    (tmp_path / "page.html").write_text(
        "<script>fetch('https://one.example/').catch(() => 0); new Worker(URL.createObjectURL(new Blob("
        "['fetch(\"https://two.example/\").catch(() => postMessage(1))']))).onmessage = () => done = 1;"
        "var done = 0</script>"
    )
    with browser(tmp_path) as tab:
        tab.open((tmp_path / "page.html").as_uri())
        tab.wait("done")
        assert sorted(tab.outside) == [
            "https://one.example/",
            "https://two.example/",
        ]


# ---- the playground


def test_a_layout_is_drawn_checked_edited_and_shared(
    site: Path, tab: Tab
) -> None:
    page = (site / "playground.html").as_uri()
    tab.open(f"{page}?a#layout=dp2+zero1+accum%3A2&model=8b")
    tab.wait(SHOWN, 120)
    assert "8.03B parameters" in text_of(tab, "summary")
    type_in(tab, "layout", "dp3x")
    tab.wait("document.getElementById('wrong').textContent.includes('dp3x')")
    type_in(tab, "layout", "pp2 1f1b:4")
    tab.wait(
        "document.getElementById('verdict').textContent.startsWith('check: every rank')"
    )
    operations = tab.js("document.getElementById('operations').value")
    assert "0F0" in operations
    type_in(tab, "operations", operations.replace(" 0F0 ", " ", 1))
    tab.wait("document.getElementById('verdict').className === 'bad'")
    said = text_of(tab, "verdict")
    assert "0F0" in said
    # The address restores all of it.
    hash_ = tab.js("location.hash")
    tab.open(f"{page}?b{hash_}")
    tab.wait("document.getElementById('verdict').className === 'bad'", 120)
    assert text_of(tab, "verdict") == said
    assert tab.js("document.getElementById('layout').value") == "pp2 1f1b:4"


HOSTILE = "<img src=x onerror=document.title='caught'></script><script>document.title='caught'</script>"


@pytest.mark.parametrize(
    "field",
    ["layout", "shape", "device", "batch", "sequence", "config", "operations"],
)
def test_text_in_a_link_is_shown_and_never_run(
    site: Path, tab: Tab, field: str
) -> None:
    words = (
        HOSTILE if field != "config" else json.dumps({"model_type": HOSTILE})
    )
    address = f"{(site / 'playground.html').as_uri()}?{field}#{field}="
    tab.open(address + "".join(f"%{byte:02x}" for byte in words.encode()))
    tab.wait(ANSWERED, 120)
    # Of which nothing is quoted.
    if field not in (
        "batch",
        "sequence",
        "config",
    ):
        assert "<" in text_of(tab, "wrong") or "<" in text_of(tab, "verdict")
    assert tab.js("document.images.length") == 0
    assert tab.js("document.title") == "phalanx playground"


# ---- the exercises

READY = "!document.getElementById('exercise').hidden"
# An answered exercise: the class of its verdict.
VERDICT = "document.getElementById('verdict')"
SAID = f"{VERDICT}.textContent && {VERDICT}.className"


def test_an_exercise_is_answered_and_its_link_restores_the_answer(
    site: Path, tab: Tab
) -> None:
    page = (site / "exercises.html").as_uri()
    tab.open(f"{page}?a#exercise=deadlock")
    tab.wait(READY, 120)
    assert "waits for the other" in text_of(tab, "task")
    check = "document.querySelector('#exercise button[type=submit]').click()"
    tab.js(check)
    tab.wait("document.getElementById('verdict').className === 'bad'")
    wrong = text_of(tab, "verdict")
    assert "rank 0 waits at 0B0" in wrong
    hash_ = tab.js("location.hash")
    type_in(tab, "answer", "rank 0: F0 F1 B0 B1\nrank 1: F0 F1 B0 B1")
    tab.js(check)
    tab.wait("document.getElementById('verdict').className === 'good'")
    tab.wait("!document.getElementById('picture').hidden")
    assert "\u2713 deadlock" in text_of(tab, "list")
    tab.open(f"{page}?b{hash_}")
    tab.wait("document.getElementById('verdict').className === 'bad'", 120)
    assert text_of(tab, "verdict") == wrong


@pytest.mark.parametrize("name", exercises())
def test_every_exercise_takes_a_right_answer_and_gives_a_hint_for_a_wrong_one(
    site: Path, tab: Tab, name: str
) -> None:
    """The page says what the terminal says."""
    page = (site / "exercises.html").as_uri()
    asked = exercises()[name]
    if "exercises.html" not in tab.js("location.href"):
        tab.open(f"{page}#exercise={name}")
        tab.wait(READY, 120)
    # The page answers whatever its address holds.
    tab.js(f"location.hash = 'exercise={name}'")
    tab.wait(
        f"document.querySelector('#list [aria-current=true]').textContent.endsWith({json.dumps(name)})"
    )
    check = "document.querySelector('#exercise button[type=submit]').click()"
    type_in(tab, "answer", wrong_answer(name))
    tab.js(check)
    tab.wait(f"({SAID}) === 'bad'")
    assert text_of(tab, "verdict") == asked.check(wrong_answer(name)).words
    assert WRONG[name][1] in text_of(tab, "verdict")
    type_in(tab, "answer", asked.answer)
    tab.js(check)
    tab.wait(f"({SAID}) === 'good'")
    assert text_of(tab, "verdict") == asked.check(asked.answer).words


# ---- every kind of page


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_a_page_without_scrolling_sideways(
    site: Path, tab: Tab, name: str
) -> None:
    for dark in (False, True):
        show(tab, site, name, width=400, height=800, dark=dark)
        assert tab.js("document.documentElement.scrollWidth") <= 400
        missing = tab.js(
            "Promise.all([...document.images].map((i) => i.decode().then(() => '', () => i.src)))"
        )
        assert not any(missing)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_barrier(
    site: Path, tab: Tab, axe: str, name: str
) -> None:
    for how in ({}, {"dark": True}, {"width": 400, "height": 800}):
        show(tab, site, name, **how)
        assert barriers(tab, axe) == [], how


FOCUS = """(() => {
  const e = document.activeElement, s = getComputedStyle(e);
  if (e === document.body) return document.hasFocus() ? ['on the way into a frame', true] : null;
  if (e.dataset.reached && e.tagName !== 'IFRAME') return null;
  e.dataset.reached = 1;
  const seen = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1;
  return [e.outerHTML.slice(0, 80), e.tagName === 'IFRAME' || seen];
})()"""
CONTROLS = 'a[href],button,input,select,textarea,summary,iframe,[tabindex="0"]'
MISSED = f"""[...document.querySelectorAll('{CONTROLS}')]
  .filter((e) => e.checkVisibility() && !e.disabled && !e.dataset.reached)
  .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("name", PAGES)
def test_the_tab_key_reaches_every_control_and_one_sees_where_it_is(
    site: Path, tab: Tab, name: str
) -> None:
    show(tab, site, name)
    hidden: list[str] = []
    for _ in range(3000):
        tab.key("Tab")
        at = tab.js(FOCUS)
        if at is None:
            break
        hidden += [] if at[1] else [at[0]]
    assert hidden == []
    assert tab.js(MISSED) == []
