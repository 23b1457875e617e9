"""Settings and code that a resumed run has otherwise than its checkpoint are told, each with both values."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from loop_worlds import records, small, trained
from test_own_model import STRANGER, own

from phalanx.layout import Layout, source
from phalanx.layout.run import Run
from phalanx.layout.source import imported_sources
from phalanx.training.agreement import flat
from phalanx.training.checkpoint_format import Progress
from phalanx.training.checkpoint_load import (
    REFUSED,
    TOLD,
    UNTOLD,
    changed_settings,
)

PLAIN = Run.parse(
    "", "run", ("model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}",)
)
KEYS = dict(flat(asdict(PLAIN) | {"model": "a table"}))


def progress(run: Run, layout: str = "") -> Progress:
    config = json.loads(json.dumps({"run": asdict(run)}))
    return Progress(1, 8, run.seed, "", layout, run.shape, config)


def told(
    before: Run, now: Run, layouts: tuple[str, str] = ("", "")
) -> list[str]:
    was, layout = layouts[0], Layout.parse(layouts[1])
    return changed_settings(progress(before, was), now, layout, now.shape)


@pytest.mark.parametrize("key", KEYS)
def test_of_every_key_of_a_run_it_is_decided_what_another_value_means(
    key: str,
) -> None:
    """A key that is added to Run and not put into one of the three tables fails here: decide."""
    names = {key, key.partition(".")[0]}
    assert (
        sum(bool(names & set(table)) for table in (REFUSED, TOLD, UNTOLD)) == 1
    )


@pytest.mark.parametrize("table", [REFUSED, TOLD, UNTOLD])
def test_no_table_names_a_key_that_no_run_has(table: Any) -> None:
    assert set(table) <= {
        part for key in KEYS for part in (key, key.partition(".")[0])
    }


OTHER: dict[str, object] = {
    "batch": 16, "sequence": 24, "optimizer.betas": (0.5, 0.6), "packing": "bfd",
    "optimizer.schedule": "linear", "optimizer.name": "muon", "optimizer.min_lr": 1e-5,
    "optimizer.momentum": 0.5, "loss": "dpo", "optimizer.adjust_lr": "original",
    "dropout": 0.5,
}  # fmt: skip


def _changed(run: Run, key: str) -> Run:
    """The run with another value of this key."""
    value = KEYS[key]
    if key in OTHER:
        new: Any = OTHER[key]
    elif isinstance(value, bool):
        new = not value
    else:
        new = value + 1
    table, _, inner = key.rpartition(".")
    if not table:
        return replace(run, **{key: new})
    return replace(
        run, **{table: replace(getattr(run, table), **{inner: new})}
    )


SETTINGS = [
    key for key in KEYS if key in TOLD or key.partition(".")[0] in TOLD
]


@pytest.mark.parametrize(
    "key", [key for key in SETTINGS if key != "precision"]
)
def test_every_setting_that_changes_what_is_trained_is_told(key: str) -> None:
    now = _changed(PLAIN, key)
    (text,) = told(PLAIN, now)
    assert re.fullmatch(
        rf"{re.escape(key)}: .+ in the checkpoint, .+ in the run", text
    )
    assert told(now, now) == []


@pytest.mark.parametrize(
    "layouts, expected",
    [
        (("dp2", "dp2 bf16"), ["precision: fp32 in the checkpoint, bf16 in the run"]),
        (("dp2 bf16", "tp2 fp16"), ["precision: bf16 in the checkpoint, fp16 in the run"]),
        (("fp32", "fp64"), ["precision: fp32 in the checkpoint, fp64 in the run"]),
        (("fp32", "tf32"), ["precision: fp32 in the checkpoint, tf32 in the run"]),
        (("bf16", "bf16 fp8"), ["matmul: in the precision in the checkpoint, fp8 in the run"]),
        (("bf16 mxfp8", "bf16"), ["matmul: mxfp8 in the checkpoint, in the precision in the run"]),
        (("dp2 bf16", "tp2 zero1 bf16"), []),
        (("", "fp32"), []),
        (("no layout of this version", "bf16"), []),
    ],
)  # fmt: skip
def test_another_precision_is_told_wherever_it_is_written(
    layouts: tuple[str, str], expected: list[str]
) -> None:
    assert told(PLAIN, PLAIN, layouts) == expected
    # The key is the layout's word.
    assert told(PLAIN, replace(PLAIN, precision="bf16"), layouts) == expected


def test_what_was_left_out_is_compared_as_what_it_meant() -> None:
    shape = PLAIN.shape
    written = replace(PLAIN, batch=shape.batch, sequence=shape.sequence)
    assert told(PLAIN, written) == told(written, PLAIN) == []
    model = {
        **PLAIN.model,
        "batch": shape.batch + 2,
        "sequence": shape.sequence + 3,
    }  # type: ignore[dict-item]
    assert told(PLAIN, replace(PLAIN, model=model)) == [
        f"batch: {shape.batch} in the checkpoint, {shape.batch + 2} in the run",
        f"sequence: {shape.sequence} in the checkpoint, {shape.sequence + 3} in the run",
    ]


@pytest.mark.parametrize(
    "config", [{}, {"run": 7}, {"run": {"optimizer": 3, "steps": []}}]
)
def test_a_checkpoint_that_knows_no_settings_is_compared_by_what_it_has(
    config: Any,
) -> None:
    before = replace(progress(PLAIN), config=config, shape=None)
    settings = changed_settings(before, PLAIN, Layout(), PLAIN.shape)
    expected = (
        ["steps: [] in the checkpoint, 100 in the run"]
        if "steps" in str(config)
        else []
    )
    assert settings == expected


def test_a_run_that_resumes_in_another_precision_says_so(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    for last, (keys, layout) in enumerate(
        [
            ((), ""),
            ((), "dp2 bf16"),
            (("precision=bf16",), "bf16"),
            ((), "fp16"),
        ],
        1,
    ):
        trained(small(out, f"steps={last}", *keys), layout)
    texts = [each["text"] for each in records(out, "settings")]
    assert [each for each in texts if not each.startswith("steps")] == [
        "precision: fp32 in the checkpoint, bf16 in the run",
        "precision: bf16 in the checkpoint, fp16 in the run",
    ]


# ---- code


IMPORTER = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\n"


def _model(folder: Path, imports: str) -> str:
    folder.mkdir()
    source = Path(STRANGER.rpartition(":")[0]).read_text()
    (folder / "mine.py").write_text(f"{source}\n{IMPORTER}{imports}\n")
    return f"{folder / 'mine.py'}:Stranger"


def test_a_changed_module_behind_a_model_s_file_is_told_by_name(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "code"
    model = _model(folder, "import first_part_a")
    (folder / "first_part_a.py").write_text(
        "from second_part_a import WIDTH\n"
    )
    (folder / "second_part_a.py").write_text(
        "WIDTH = 4\ndef f():\n    import third_part_a\n"
    )
    (folder / "third_part_a.py").write_text("")
    (folder / "unrelated.py").write_text("")
    out = tmp_path / "run"
    trained(own(out, "steps=1", model=model), "")
    (folder / "unrelated.py").write_text("# changed\n")
    trained(own(out, "steps=2", model=model), "")
    assert records(out, "model") == []
    for last, name in ((3, "second_part_a"), (4, "third_part_a")):
        with (folder / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        trained(own(out, f"steps={last}", model=model), "dp2")
        text = records(out, "model")[-1]["text"]
        assert (
            f"the module {name} of {folder}/mine.py has changed since the checkpoint"
            in text
        )
    assert len(records(out, "model")) == 2


def test_code_that_was_moved_is_the_same_code(tmp_path: Path) -> None:
    model = _model(tmp_path / "code", "import part_b")
    (tmp_path / "code" / "part_b.py").write_text("")
    out = tmp_path / "run"
    trained(own(out, "steps=1", model=model), "")
    (tmp_path / "code").rename(tmp_path / "moved")
    model = f"{tmp_path}/moved/mine.py:Stranger"
    trained(own(out, "steps=2", model=model), "")
    assert records(out, "model") == []


def _sources(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return imported_sources(folder / "main.py")


def test_the_user_s_own_modules_are_found_behind_a_file(
    tmp_path: Path,
) -> None:
    found = _sources(
        tmp_path,
        {
            "main.py": "import os, torch, phalanx\nimport pack.deep.er, loop_a\nfrom space.inner import x",
            "pack/__init__.py": "from . import beside\nfrom .deep import other as o",
            "pack/beside.py": "def f():\n    from ..above import no\n    import late",
            "pack/deep/__init__.py": "",
            "pack/deep/er.py": "from .. import beside\nfrom ..up import y",
            "pack/deep/other.py": "import missing_module",
            "pack/up.py": "",
            "pack/unused.py": "",
            "space/inner.py": "",
            "late.py": "def broken(:",
            "loop_a.py": "import loop_b",
            "loop_b.py": "import loop_a, main",
            "lib/python3.11/site-packages/inside.py": "",
        },
    )
    names = (
        "late", "loop_a", "loop_b", "pack", "pack.beside", "pack.deep", "pack.deep.er",
        "pack.deep.other", "pack.up", "space.inner",
    )  # fmt: skip
    assert tuple(found) == names
    assert found["pack.deep.er"] == tmp_path / "pack" / "deep" / "er.py"
    assert found["pack"] == tmp_path / "pack" / "__init__.py"


def test_modules_elsewhere_are_the_user_s_own_unless_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("mine", "venv/site-packages", "venv/dist-packages"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / f"of_{folder.name.replace('-', '_')}.py").write_text("")
        monkeypatch.syspath_prepend(str(folder))
    text = "import of_mine, of_site_packages, of_dist_packages, json, numpy, phalanx.layout"
    assert [*_sources(tmp_path / "model", {"main.py": text})] == ["of_mine"]
    # A model that is itself installed has the modules beside it.
    beside = tmp_path / "venv" / "site-packages" / "theirs"
    assert [
        *_sources(beside, {"main.py": "import near, of_mine", "near.py": ""})
    ] == [
        "near",
        "of_mine",
    ]
    root = tmp_path / "venv" / "site-packages"
    assert [
        *_sources(root, {"main.py": "import of_site_packages, of_mine"})
    ] == ["of_mine"]
    # Inside of a package, of which the rest is installed.
    package = {
        "main.py": "import large.sub.near, large.far",
        "near.py": "",
        "../__init__.py": "",
        "../far.py": "",
    }
    assert [*_sources(root / "large" / "sub", package)] == ["large.sub.near"]


def test_a_home_folder_with_a_whole_python_below_it_has_few_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / ".pyenv" / "lib" / "python3"
    library.mkdir(parents=True)
    (library / "of_the_library.py").write_text("")
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    uncached = source._code_of_others.__wrapped__
    monkeypatch.setattr(source, "_code_of_others", uncached)
    files = {"main.py": "import of_the_library, near", "near.py": ""}
    assert [*_sources(tmp_path, files)] == ["near"]
