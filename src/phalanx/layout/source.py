"""Python files of users, named as FILE.py:NAME: schedules and models.

An error in such a file is reported in one sentence with its file and line. The
traceback of our own code around it would hide that.
"""

import ast
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from .files import open_regular, reason

Refusal = Callable[[str], Exception]
OWN = r"[^;]+\.py:\w+"  # FILE.py:NAME; a `;` separates layouts
# FILE.py:NAME with arguments, as in model.py:GPT(n_layer=6).
_CALL = re.compile(r"([^;]+?\.py):(\w+)(?:\((.*)\))?", re.DOTALL)
LIMIT = 1 << 24  # bytes of a source file
MODULES = 1000  # the most that are searched from one file
_INSTALLED = {"site-packages", "dist-packages"}
# Python 3.11 counts a tree's depth for all threads at once: two that parse raise
# SystemError.
_PARSING = threading.Lock()
_TRIES = 20  # to parse a file while other threads import
_loads = count()


def split_name(text: str) -> tuple[str, str]:
    """Split FILE.py:NAME into FILE.py and NAME. Both are "" for any other text."""
    match = _CALL.fullmatch(text)
    return (match[1], match[2]) if match else ("", "")


def names_source(text: str) -> bool:
    """True if a text has the form FILE.py:NAME, or FILE.py:NAME(key=value)."""
    return _CALL.fullmatch(text) is not None


def arguments_text(text: str) -> str:
    """The text between the parentheses of FILE.py:NAME(key=value); "" without."""
    match = _CALL.fullmatch(text)
    return (match[3] or "") if match else ""


def arguments_of(text: str, error: Refusal) -> dict[str, Any]:
    """The arguments of FILE.py:NAME(key=value). They are literals: nothing is run."""
    written = arguments_text(text)
    wrong = error(
        f"{text[:100]!r} names arguments that cannot be read. Write them by name, with numbers, texts or"
        " lists: FILE.py:NAME(n_layer=6)."
    )
    try:
        # Parsed as a call of `_`, whose arguments are then read as literals.
        call = ast.parse(f"_({written})", mode="eval").body
        # A positional argument has no name to check.
        if not isinstance(call, ast.Call) or call.args:
            raise wrong
        return {str(each.arg): _literal(each) for each in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None


def _literal(keyword: ast.keyword) -> Any:
    if keyword.arg is None:  # **
        raise ValueError
    return ast.literal_eval(keyword.value)


def name_of_class(kind: type, error: Refusal) -> str:
    """FILE.py:Class of a class that stands in a file."""
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # of a notebook, or built in
        file = None
    if file is None or not Path(file).is_file() or "." in kind.__qualname__:
        raise error(
            f"the class {kind.__name__} stands in no file of its own. Write it into one and name it"
            f" 'FILE.py:{kind.__name__}'; phalanx.verify takes a class of a notebook."
        )
    return f"{file}:{kind.__name__}"


def with_arguments(text: str, arguments: Mapping[str, Any]) -> str:
    """FILE.py:NAME(...) with these arguments added to its own."""
    if not names_source(text):
        return text
    written = [f"{name}={value!r}" for name, value in arguments.items()]
    named = [arguments_text(text)] if arguments_text(text) else []
    # Arguments written in the text come before those of the table.
    file, name = split_name(text)
    return (
        f"{file}:{name}({', '.join([*named, *written])})" if written else text
    )


def load_source(
    path: str | Path, names: tuple[str, ...], error: Refusal
) -> tuple[Any, ...]:
    """The objects with these names in a user's file. Each call runs the file once."""
    module = load_module(path, names, error)
    return tuple(getattr(module, name) for name in names)


def load_module(
    path: str | Path, names: tuple[str, ...], error: Refusal
) -> ModuleType:
    """A user's file as a module that has these names. Each call runs the file once."""
    name = names[0]
    _refuse_unreadable(path, name, error)
    # A name of its own, as dataclasses and torch's compiler look modules up by name.
    known = f"{Path(path).stem}_{next(_loads)}"
    # Its own file by path, not a module of the same name elsewhere.
    spec = importlib.util.spec_from_file_location(known, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} is not a Python file. Write FILE.py:{name}.")
    # In `sys.modules` before it runs: dataclasses look their module up there.
    sys.modules[known] = module = importlib.util.module_from_spec(spec)
    with running(path, error):
        spec.loader.exec_module(module)
    for name in names:
        if not callable(getattr(module, name, None)):
            # Names that the file defines itself, for the message.
            own = [
                n
                for n, x in vars(module).items()
                if getattr(x, "__module__", "") == known
            ]
            has = (
                f"It has {', '.join(own[:8])}"
                if own
                else "It defines nothing that can be called"
            )
            raise error(f"{path} has no function or class {name!r}. {has}.")
    return module


def refuse_broken(text: str, error: Refusal) -> None:
    """Raise if the file of FILE.py:NAME is missing or not Python; it is not run."""
    path, name = split_name(text)
    _refuse_unreadable(path, name, error)
    if wrong := syntax_error(path):
        raise error(f"{wrong}. Fix it there.")


def _refuse_unreadable(path: str | Path, name: str, error: Refusal) -> None:
    try:
        with open_regular(Path(path)) as file:
            # One byte more than allowed shows that it is too long.
            large = len(file.read(LIMIT + 1)) > LIMIT
    except FileNotFoundError:
        raise error(
            f"there is no file {path} with {name!r}. Write FILE.py:{name}."
        ) from None
    except OSError as wrong:
        raise error(
            f"cannot read {path}: {reason(wrong)}. Name a file of Python code."
        ) from None
    if large:
        raise error(
            f"cannot read {path}: it has more than {LIMIT:,} bytes. Name a source file."
        )


def imported_sources(path: str | Path) -> dict[str, Path]:
    """The user's own modules that a source file imports, directly or not, with files.

    A module is the user's own if it lies below the file's folder, or neither in the
    standard library nor in site-packages. Imports inside functions count. A name that
    code computes is not seen.
    """
    first = Path(path).resolve()
    # The order of a search: the file's folder, by path and resolved, then
    # Python's own.
    roots = [Path(path).absolute().parent, first.parent, *map(Path, sys.path)]
    found: dict[str, Path] = {}
    # Third-party packages, whose modules are not searched.
    foreign: set[str] = set()
    waiting = deque([("", first)])
    # Breadth first, so that the limit leaves out the most distant modules.
    while waiting and len(found) < MODULES:
        name, file = waiting.popleft()
        # Sorted: a package comes before its modules.
        for imported in sorted(_imports_of(name, file)):
            package = imported.partition(".")[0]
            if imported in found or package in foreign:
                continue
            source = _source_of(imported, roots)
            if source is None or source == first:
                continue
            if _is_own(source, first.parent):
                found[imported] = source
                waiting.append((imported, source))
            # The user's folder may lie inside of an installed package.
            elif imported == package and source.parent not in first.parents:
                foreign.add(package)
    return dict(sorted(found.items()))


def _imports_of(name: str, file: Path) -> set[str]:
    """The full names that a module's imports may refer to, as modules or attributes."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    try:
        return _imports_in(_text_of(file), package)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # an extension, or a file that was never run


# Cached by text: every rank thread and every tried layout calls this.
@lru_cache(MODULES)
def _imports_in(text: bytes, package: str) -> set[str]:
    names = set()
    # Everywhere in the tree, including functions and branches.
    for node in ast.walk(_tree_of(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # "from ..a import b" in package p.q.r: two dots lead to p.q.
            above = package.split(".") if node.level and package else []
            above = above[: len(above) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    # "a.b.c" also runs a and a.b.
    parts = [each.split(".") for each in names if each]
    return {
        ".".join(each[:n]) for each in parts for n in range(1, len(each) + 1)
    }


def _source_of(name: str, roots: Sequence[Path]) -> Path | None:
    """The file of a module: where it was loaded from, or where it would be found."""
    # Loaded already: that is the file that runs.
    if (module := sys.modules.get(name)) is not None:
        file = getattr(module, "__file__", None)
        if not file:  # built into Python, or a folder without code
            return None
        if Path(file).is_file():
            return Path(file).resolve()
    package, _, last = name.rpartition(".")
    below = os.path.join(*name.split("."))
    folders: Iterable[str] = (os.path.join(root, below) for root in roots)
    # A loaded package has its own search path; a plain module has none.
    if (loaded := sys.modules.get(package)) is not None:
        paths = getattr(loaded, "__path__", ())
        folders = (os.path.join(path, last) for path in paths)
    for folder in folders:
        # A package takes precedence over a module of its name.
        for file in (os.path.join(folder, "__init__.py"), f"{folder}.py"):
            # Not `Path`: hundreds of names are looked for in dozens of folders.
            if os.path.isfile(file):
                return Path(file).resolve()
    return None


def _is_own(file: Path, folder: Path) -> bool:
    # The folder may itself be site-packages, whose code is not the user's own.
    below = file.is_relative_to(folder)
    if below and folder.name in _INSTALLED:
        return False
    # Below the folder only the parts inside count: a home may lie in such a
    # path.
    if _INSTALLED.intersection(
        file.relative_to(folder).parts if below else file.parts
    ):
        return False
    # The folder may contain all of them, as a home folder does.
    return not any(
        file.is_relative_to(root) and not folder.is_relative_to(root)
        for root in _code_of_others()
    )


@cache
def _code_of_others() -> tuple[Path, ...]:
    """The folders of Phalanx and of the standard library."""
    library = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    folders = (Path(__file__).parents[1], *map(Path, library))
    return tuple(each.resolve() for each in folders)


def syntax_error(path: str | Path) -> str:
    """The syntax error of a source file, or "". The file is not run."""
    try:
        _tree_of(_text_of(Path(path)), str(path))
    except (
        OSError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as wrong:
        return f"{_place(wrong, '')}: {_what(wrong)}".removeprefix(": ")
    return ""


def _text_of(file: Path) -> bytes:
    with open_regular(file) as opened:
        text: bytes = opened.read(LIMIT)
    return text


def _tree_of(text: bytes, name: str = "<unknown>") -> ast.Module:
    with _PARSING:
        # Python 3.11 counts the depth of a tree for all threads at once, and an import
        # in another thread parses without this lock: then try again.
        for _ in range(_TRIES):
            with suppress(SystemError):
                return ast.parse(text, name)
        return ast.parse(text, name)


@contextmanager
def running(path: str | Path, error: Refusal) -> Iterator[None]:
    """A context for a user's file: errors become a sentence with the file and line."""
    try:
        yield
    except (
        Exception,
        SystemExit,
    ) as wrong:  # a user's code may raise anything
        raise error(
            f"{_place(wrong, str(path))}: {_what(wrong)}. Fix it there."
        ) from wrong


@contextmanager
def running_modules(doing: str, error: Refusal) -> Iterator[None]:
    """A context for a user's modules anywhere: errors name the file and line.

    Errors of our own code pass unchanged. `doing` names the purpose.
    """
    try:
        yield
    except Exception as wrong:  # a user's code may raise anything
        place = _last_foreign_line(wrong)
        if not place:
            raise
        raise error(
            f"{place}: {_what(wrong)}, {doing}. Fix it there."
        ) from wrong


def _last_foreign_line(wrong: BaseException) -> str:
    """The last line that ran of a user's file or of transformers.

    "" if there is none, or if that line called code of ours that raised.
    """
    last = ""
    # From the outermost frame to the one that raised.
    at = wrong.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if _is_ours(file):
            # Our code was called last: the error may be ours.
            last = ""
        elif _is_foreign(file):
            last = f"{file}, line {at.tb_lineno}"
        at = at.tb_next
    return last


def _is_ours(file: str) -> bool:
    return Path(__file__).resolve().parents[1] in Path(file).resolve().parents


def _is_foreign(file: str) -> bool:
    """True for a file outside of Python and installed packages, or in transformers."""
    path = Path(file).resolve()
    folders = set(path.parts)
    if folders & _INSTALLED:
        return "transformers" in folders
    return Path(sysconfig.get_path("stdlib")).resolve() not in path.parents


def _place(wrong: BaseException, path: str) -> str:
    """The last line of a user's file that ran, or the position of a syntax error."""
    # A syntax error has its place itself; the file has no frame.
    if isinstance(wrong, SyntaxError) and wrong.filename and wrong.lineno:
        return f"{wrong.filename}, line {wrong.lineno}"
    at, line, own = wrong.__traceback__, 0, os.path.abspath(path)
    while at is not None:
        if os.path.abspath(at.tb_frame.f_code.co_filename) == own:
            line = at.tb_lineno
        at = at.tb_next
    return f"{path}, line {line}" if line else path


def _what(wrong: BaseException) -> str:
    text = wrong.msg if isinstance(wrong, SyntaxError) else str(wrong)
    text = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(wrong).__name__}: {text}".rstrip(": .")
