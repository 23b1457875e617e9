"""The rules of the source: which package imports which, what is public, what is banned.

`public_names.txt` lists what each package offers. Running this file writes it anew: a change of what is
public is then a line in the diff.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from house_map import APART, LEVELS, SOURCE, package_table, sentence
from phalanx.layout.choices import (
    AUTO,
    BACKENDS,
    COMPARED,
    DTYPES,
    MATMULS,
    SCHEDULES,
    STORED,
)
from phalanx.program import KINDS

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).parent / "public_names.txt"
# Rooms that may import less than all that is below them.
ONLY: dict[str, set[str]] = {"models": set()}
WITHOUT_TORCH = [package for package, level in LEVELS.items() if level <= 2]

# Opening what comes from outside never runs code; the lab shows object collectives, and why not.
BANNED_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
}
BANNED_CALLS = {"eval", "exec"}
BANNED_NAMES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list",
}  # fmt: skip
EXCEPT = ROOT / "lab/src/phalanx_lab/experiments/objects.py"


def _files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def _imports(
    path: Path, *, types: bool = True
) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a file imports, with its full name, whether at its top or inside; without
    `types` those that only types need are left out."""
    package = ("phalanx", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(
        _at_run_time(_tree(path)) if not types else _tree(path)
    ):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package[: len(package) - node.level + 1])
                if node.level
                else ""
            )
            module = ".".join(
                part for part in (base, node.module or "") if part
            )
            yield node, module
            yield from (
                (node, f"{module}.{alias.name}") for alias in node.names
            )


def _at_run_time(tree: ast.Module) -> ast.Module:
    """A file's tree without the blocks that only a type checker reads."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            node.body = [ast.Pass()]
    return tree


def _imported(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """The other packages that a file imports from."""
    own = path.relative_to(SOURCE).parts[0]
    for node, module in _imports(path):
        parts = module.split(".")
        if (
            parts[0] == "phalanx"
            and len(parts) > 1
            and parts[1] in LEVELS
            and parts[1] != own
        ):
            yield node, parts[1]


def _existing() -> list[str]:
    return [
        package
        for package in LEVELS
        if (SOURCE / package / "__init__.py").is_file()
    ]


def test_imports_go_down_only_and_packages_of_one_level_do_not_import_each_other() -> (
    None
):
    wrong = []
    for path in _files():
        own = path.relative_to(SOURCE).parts[0]
        if own in ("__main__.py", "__init__.py"):  # stand above all packages
            continue
        for node, package in _imported(path):
            allowed = ONLY.get(own)
            if LEVELS[package] >= LEVELS.get(own, -1) or (
                allowed is not None and package not in allowed
            ):
                wrong.append(f"{_where(path, node)}: {own} imports {package}")
    assert not wrong, "\n".join(sorted(set(wrong)))


# Circles that are left: a value with a method that asks for its readers when it is called.
CIRCLES = {
    "phalanx.layout.families": "phalanx.layout.shape",
    "phalanx.layout.shape": "phalanx.layout.families",
    "phalanx.drawing.picture": "phalanx.drawing.svg phalanx.drawing.text",
    "phalanx.drawing.svg": "phalanx.drawing.picture",
    "phalanx.drawing.text": "phalanx.drawing.picture",
}


def test_files_import_each_other_without_circles() -> None:
    names = {
        ".".join(
            ("phalanx", *path.relative_to(SOURCE).with_suffix("").parts)
        ): path
        for path in _files()
        if path.name != "__init__.py"
    }
    waits: dict[str, set[str]] = {}
    for name, path in names.items():
        modules = {module for _, module in _imports(path, types=False)}
        waits[name] = (modules & set(names)) - {name}
        waits[name] -= set(CIRCLES.get(name, "").split())
    # A file whose imports are all done is done; what is left waits for itself.
    done: set[str] = set()
    while ready := {name for name in waits if waits[name] <= done} - done:
        done |= ready
    left = sorted(set(waits) - done)
    assert not left, (
        "these import each other in a circle, or wait for ones that do"
    )


def test_every_package_has_its_level() -> None:
    found = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert found <= set(LEVELS), (
        f"give {', '.join(found - set(LEVELS))} a level in LEVELS"
    )
    assert _existing()


def _loaded(program: str) -> set[str]:
    """The top modules that a fresh interpreter has loaded after this program."""
    code = f"{program}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def _apart() -> list[Path]:
    return [
        path
        for folder in APART
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.mark.parametrize("folder", APART)
def test_a_package_of_its_own_imports_only_what_it_names(folder: str) -> None:
    allowed = {*sys.stdlib_module_names, *APART[folder]}
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(_tree(path)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, _where(
                path, node
            )


def test_experiments_of_the_lab_import_the_packages_of_groups_costs_pictures_and_plans_only() -> (
    None
):
    allowed = {"comm", "cost", "drawing", "planner"}
    for path in sorted(
        (ROOT / "lab/src/phalanx_lab/experiments").glob("*.py")
    ):
        modules = re.findall(r"from phalanx\.(\w+)", path.read_text())
        assert set(modules) <= allowed, path


def test_torch_shm_loads_nothing_of_phalanx() -> None:
    loaded = _loaded("import torch_shm")
    assert "torch" in loaded
    assert "phalanx" not in loaded


def test_rank_watch_loads_neither_torch_nor_phalanx() -> None:
    assert not {"torch", "phalanx"} & _loaded("import rank_watch.watcher")


def test_the_documented_table_of_packages_is_that_of_their_docstrings() -> (
    None
):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = "\n".join(package_table())
    assert table in text, f"docs/architecture.md needs this table:\n{table}"


def test_each_file_begins_with_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in [*sorted(SOURCE.rglob("*.py")), *_apart()]
        if not sentence(path)
    ]
    assert not silent


def test_the_lower_levels_never_load_torch() -> None:
    modules = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for package in WITHOUT_TORCH
        for path in sorted((SOURCE / package).rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    ]
    assert len(modules) > 15
    loaded = _loaded("\n".join(f"import {module}" for module in modules))
    assert "phalanx" in loaded
    assert "torch" not in loaded


@pytest.mark.skipif(
    not (SOURCE / "cli" / "main.py").is_file(), reason="no command line yet"
)
@pytest.mark.parametrize(
    "argv",
    [
        ["draw", "1f1b", "--stages", "2", "--microbatches", "2"],
        ["draw", "mesh", "dp2 pp2"],
        ["check", "dp2 tp3", "--model", "tiny"],
    ],
)
def test_drawing_and_refusing_never_load_torch(argv: list[str]) -> None:
    code = int(argv[0] == "check")
    loaded = _loaded(
        f"from phalanx.cli.main import main\nassert main({argv!r}) == {code}"
    )
    assert "torch" not in loaded


def test_code_of_the_users_own_is_named_in_one_place() -> None:
    """FILE.py:NAME once had six regular expressions, which did not agree."""
    marks = (r"\.py:", '".py:"', 'endswith(".py")')
    own = {
        p.name
        for p in _files()
        if any(mark in p.read_text() for mark in marks)
    }
    assert own == {"source.py"}


def _offences(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            yield from (
                (node, f"import {n}") for n in names if n in BANNED_MODULES
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in BANNED_MODULES:
                yield node, f"from {node.module} import"
            yield from (
                (node, a.name) for a in node.names if a.name in BANNED_NAMES
            )
            if node.module == "torch" and any(
                a.name == "load" for a in node.names
            ):
                yield node, "torch.load"
        elif isinstance(node, ast.Name) and node.id in BANNED_CALLS:
            yield node, node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in BANNED_NAMES or (owner, node.attr) in (
                ("torch", "load"),
                ("builtins", "eval"),
                ("builtins", "exec"),
            ):
                yield node, f"{owner}.{node.attr}"


def test_nothing_that_comes_from_outside_is_run() -> None:
    wrong = [
        f"{_where(path, node)}: {what}"
        for path in [*_files(), *_apart()]
        if path != EXCEPT
        for node, what in _offences(_tree(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import torch\ntorch.load('x')",
        "from torch import load", "eval('1')", "exec(text)", "run = eval",
        "import builtins\nbuiltins.exec('')",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])", "import marshal, json",
        "from torch.distributed import all_gather_object",
    ],
)  # fmt: skip
def test_the_ban_sees_each_way_of_writing_it(code: str) -> None:
    assert list(_offences(ast.parse(code)))
    assert not list(
        _offences(
            ast.parse(
                "model.eval(); spec.loader.exec_module(m); json.loads('1')"
            )
        )
    )


def _public() -> str:
    """What every package offers, a line a package."""
    packages = {
        package: importlib.import_module(f"phalanx.{package}")
        for package in _existing()
    }
    return "".join(
        f"{package}: {' '.join(sorted(getattr(module, '__all__', ())))}\n"
        for package, module in packages.items()
    )


def test_public_names_are_those_listed() -> None:
    listed = NAMES.read_text()
    assert _public() == listed, (
        f"run {Path(__file__).name} to list them, and say in CHANGELOG why"
    )
    for line in listed.splitlines():
        package, _, names = line.partition(": ")
        module = importlib.import_module(f"phalanx.{package}")
        assert not [
            name for name in names.split() if not hasattr(module, name)
        ]


def _kinds_written_out(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Strings of operation letters in a file that reads programs.

    What is no letter of an operation: a placeholder in help, a part of an f-string, the suffix of
    a number, text that is escaped, HFU, CPU, and the name of a file or a table.
    """
    modules = {module for _, module in _imports(path)}
    if path.parent != SOURCE / "program" and not any(
        "program" in m.split(".") for m in modules
    ):
        return
    tree = _tree(path)
    above = {
        child: node
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
    }
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value
        ):
            continue
        parent = above[node]
        if set(node.value) <= set(KINDS) and not (
            node.value in ("HFU", "STOP", "KINDS", "FAIL", "SCHEDULES", "CPU") or
            (isinstance(parent, ast.keyword) and parent.arg == "metavar")
            or isinstance(parent, ast.JoinedStr)
            or (isinstance(parent, ast.Tuple) and isinstance(parent.elts[0], ast.Constant)
                and isinstance(parent.elts[0].value, float))
            or (isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") == "replace")
        ):  # fmt: skip
            yield node, node.value


def test_no_file_but_the_table_names_a_kind_of_operation_by_its_letter() -> (
    None
):
    wrong = [
        f"{_where(path, node)}: {letters!r}; write its name from program/ops.py"
        for path in _files()
        if path != SOURCE / "program" / "ops.py"
        for node, letters in _kinds_written_out(path)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(list(_kinds_written_out(SOURCE / "program" / "ops.py"))) == len(
        KINDS
    )


# Which is put behind the others.
MATMUL_NAMES = {
    name
    for name in MATMULS
    if not {"e5m2", "experts"} & {*name.replace(",", ":").split(":")}
}
# Names of schedules, dtypes and backends; files may spell them for a reason.
SPELLED = {
    *SCHEDULES,
    *DTYPES,
    *MATMUL_NAMES,
    *COMPARED,
    *STORED,
    *BACKENDS,
} - {AUTO}
MAY_SPELL = {
    "layout/choices.py": "the table",
    "planner/table.py": "what others' tables write, and what it means",
}


def _spelled(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Strings that are the name of a schedule, a dtype or a backend; not parts of a sentence."""
    tree = _tree(path)
    parts = {
        id(x)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for x in node.values
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and node.value in SPELLED
            and id(node) not in parts
        ):
            yield node, str(node.value)


def test_no_file_but_the_table_spells_a_schedule_a_dtype_or_a_backend() -> (
    None
):
    wrong = []
    for path in _files():
        here = path.relative_to(SOURCE)
        if str(here) not in MAY_SPELL and here.parts[0] not in MAY_SPELL:
            wrong += [
                f"{_where(path, x)}: {name!r}" for x, name in _spelled(path)
            ]
    assert not wrong, "\n".join(wrong)
    assert len(list(_spelled(SOURCE / "layout" / "choices.py"))) >= len(
        SPELLED
    )


# Techniques: the words by which a file names one, with the number of files that do so,
# others and its own. A new file asks the technique's row instead. The numbers only fall.
TECHNIQUES = {
    "muon": (re.compile("muon", re.I), 3, 3),
    "soap": (re.compile("soap", re.I), 3, 3),
    # `kv_lora_rank` and `q_lora_rank` of Hugging Face are no adapters.
    "lora": (re.compile("(?<!kv[_-])(?<!q[_-])lora", re.I), 6, 4),
    "fp8": (re.compile("fp8|float8|e4m3|e5m2", re.I), 6, 0),
    # Most of these files still have code for experts alone.
    "experts": (re.compile("expert|router", re.I), 59, 6),
    "delta": (re.compile("(?<![a-z])delta|Delta"), 7, 5),
    "mtp": (re.compile("mtp", re.I), 8, 2),
}

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _code(path: Path) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file, without comments, docstrings and layout."""
    text = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and token.string.startswith(
            '"""'
        )
        if token.type not in _LAYOUT and not docstring:
            yield token


def _naming(name: str) -> dict[str, str]:
    """The files whose code names a technique: "new" if its own, else "changed"."""
    words = TECHNIQUES[name][0]
    found = {}
    for path in sorted(SOURCE.rglob("*")):
        if path.suffix == ".py":
            named = any(words.search(token.string) for token in _code(path))
        # Files of devices state rates of formats.
        elif path.suffix == ".toml" and path.parent.name != "machines":
            named = bool(words.search(path.read_text(encoding="utf-8")))
        else:
            continue
        if named:
            own = name in path.stem
            found[str(path.relative_to(SOURCE))] = "new" if own else "changed"
    return found


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_are_named_where_their_rows_are_entered(name: str) -> None:
    found = _naming(name)
    others = [path for path, how in found.items() if how == "changed"]
    counts = len(others), len(found) - len(others)
    assert counts == TECHNIQUES[name][1:], others


PAGE = ROOT / "docs" / "add-a-technique.md"


@pytest.mark.parametrize(
    "heading, name",
    [
        ("The files", "soap"),
        ("Adapters", "lora"),
        ("Formats of matmuls", "fp8"),
        ("A mixer", "delta"),
    ],
)
def test_the_page_on_a_technique_lists_every_file_of_its_example(
    heading: str, name: str
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    listed = re.findall(
        r"^\| `src/phalanx/(\S+)` \| (new|changed) ", section, re.M
    )
    assert dict(listed) == _naming(name)
    assert [how for _, how in listed].count("changed") <= 8


def test_the_row_on_the_page_is_that_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (quoted,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    row = SOURCE / "layout" / "soap.py"
    assert quoted in row.read_text(encoding="utf-8")


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in _files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(_where(path, node))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


# The most tokens a line of code holds on average in each package. Lines are not
# counted: a readable line costs nothing. The number only falls.
DENSITY = 9.0
PACKAGES = sorted(
    str(folder.relative_to(ROOT))
    for folder in (*SOURCE.iterdir(), *ROOT.glob("*/src/*_*"))
    if any(folder.glob("*.py"))
)


def _density(files: Iterable[Path]) -> float:
    """Tokens per line of code: comments and docstrings are not counted."""
    tokens = lines = 0
    for path in files:
        rows: set[int] = set()
        for token in _code(path):
            rows.add(token.start[0])
            tokens += 1
        lines += len(rows)
    return tokens / lines


@pytest.mark.parametrize("package", PACKAGES)
def test_lines_of_code_are_not_dense(package: str) -> None:
    assert _density((ROOT / package).rglob("*.py")) <= DENSITY


def test_few_lines_are_kept_from_the_formatter() -> None:
    assert (
        sum(path.read_text().count("# fmt: skip") for path in _files()) <= 40
    )


def test_files_of_tests_have_names_of_their_own() -> None:
    # pytest imports them by their last name: two of one name end the collection.
    folders = (
        ROOT / name / "tests"
        for name in (".", "torch-shm", "rank-watch", "torch-audit", "lab")
    )
    names = [
        path.name for folder in folders for path in folder.rglob("test_*.py")
    ]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_no_path_of_one_machine_is_in_the_tree() -> None:
    homes = [str(path) for path in (ROOT, Path.home()) if len(path.parts) > 2]
    pattern = re.compile(
        "|".join([*map(re.escape, homes), r"/(?:home|Users)/[a-z]\w*/"])
    )
    kept = (
        "src",
        "torch-shm",
        "rank-watch",
        "torch-audit",
        "lab",
        "tests",
        "docs",
        "benchmarks",
        ".ci",
    )
    files = [
        p for name in kept for p in (ROOT / name).rglob("*") if p.is_file()
    ]
    files += [p for p in ROOT.iterdir() if p.is_file()]
    wrong = []
    for path in files:
        if (
            path == Path(__file__)
            or path.suffix in (".pyc", ".so")
            or ".egg-info" in str(path)
        ):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{path.relative_to(ROOT)}: {found}"
            for found in pattern.findall(text)
        ]
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    NAMES.write_text(_public())
