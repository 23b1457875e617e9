"""The record of trials that passed: a file for each, named by a hash.

The files are below `$XDG_CACHE_HOME/phalanx/verified`. The hash covers the source of
the user's modules and what they import, the weights and their rules, the layout, and
the versions of torch and phalanx.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import nn

from ..layout import Layout
from ..layout.source import imported_sources
from ..parallel import Model

_PACKAGE = Path(__file__).parents[1]
# the packages whose code decides what a trial computes
_CODE = (
    "comm",
    "layout",
    "models",
    "parallel",
    "program",
    "training",
    "verification",
)
_PLAIN = (bool, int, float, str, type(None))


def trial_key(
    model: Model, layout: Layout, code: Iterable[object] = ()
) -> str:
    """Return the hash of everything that a trial depends on; "" if it is not known."""
    classes = {
        kind
        # Base classes count as well: a method may be inherited.
        for _, piece in model.pieces
        for module in piece.modules()
        for kind in type(module).__mro__
        # torch's and our own code enter by version and by hash.
        if not _is_known_code(kind.__module__)
    }
    sources = _sources([*classes, *code])
    if sources is None:
        return ""
    # Names and shapes, but no values: the trial draws its own.
    weights = [
        f"{name} {list(x.shape)} {x.requires_grad}"
        for name, x in model.weights.items()
    ]
    key = {
        # Any change that could change the verdict changes the key.
        "torch": torch.__version__,
        "phalanx": _own_source(),
        "layout": str(layout),
        "weights": weights,
        "rules": str(model.rules),
        "counts": dict(model.counts),
        "modules": [*_modules(model)],
        "sources": sources,
    }
    # Sorted keys: equal trials have equal texts. 32 digits are 128 bits.
    text = json.dumps(key, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def is_known(key: str) -> bool:
    # Without a key, as of a class whose source is not known, the model is
    # tried each time.
    return bool(key) and os.path.isfile(_folder() / key)


def remember(key: str, layout: str) -> None:
    """Record that a trial has passed."""
    if not key:
        return
    # an unwritable place only means another trial
    with suppress(OSError):
        _folder().mkdir(0o700, parents=True, exist_ok=True)
        (_folder() / key).write_text(f"{layout}\n")


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "phalanx", "verified")


def _modules(model: Model) -> Iterator[str]:
    """Yield the path, the class and the plain attributes of every module."""
    for name, piece in model.pieces:
        for path, module in piece.named_modules():
            # Attributes such as `n_heads` or `eps`, on which a forward may
            # depend.
            plain = sorted(
                f"{key}={text}"
                for key, value in vars(module).items()
                if not key.startswith("_") and (text := _described(value))
            )
            kind = type(module).__qualname__
            yield f"{name}.{path} {kind} {' '.join(plain)}"


def _described(value: object) -> str:
    """An attribute in words that are the same in each process; "" for others."""
    if isinstance(value, (*_PLAIN, torch.dtype)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, dict):
        pairs = value.items()
        return (
            f"{{{', '.join(f'{key}: {_described(x)}' for key, x in pairs)}}}"
        )
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, nn.Module | torch.Tensor):
        return ""  # stand on their own in the key
    if hasattr(value, "__dict__"):
        # A configuration: a dataclass, a namespace or a class like transformers'.
        return f"{type(value).__qualname__} {_described(vars(value))}"
    return ""


def _is_known_code(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "phalanx")


def _sources(code: Iterable[object]) -> dict[str, str] | None:
    """Return hashes of files, of those of classes and functions, and of what these import.

    None if the source of one of them is not known, as in an interactive session.
    """
    found: dict[str, str] = {}
    for each in code:
        try:
            file = (
                str(each)
                if isinstance(each, Path)
                else inspect.getsourcefile(each)  # type: ignore[arg-type]
            )
        # A class of a notebook, or one that is built in.
        except (TypeError, OSError):
            file = None
        if file is None or not Path(file).is_file():
            return None
        # Several classes often share a file.
        if file in found:
            continue
        # Modules that the file imports from the user's own code.
        imported = imported_sources(file)
        for path in [Path(file), *imported.values()]:
            with suppress(OSError):
                content = path.read_bytes()
                found[str(path)] = hashlib.sha256(content).hexdigest()
    return found


# Once per process: it reads every file of seven packages.
@cache
def _own_source() -> str:
    digest = hashlib.sha256()
    for package in _CODE:
        for path in sorted((_PACKAGE / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
