"""Makes a class of a user's own: with the arguments that a run names, and without memory for its weights."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..layout import LayoutError
from ..layout.choices import near_word

Made = Callable[[], Any]
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# The standard output and torch's own generator are one for all threads.
_CONSTRUCTING = threading.Lock()


def maker_with(
    kind: Callable[..., Any],
    arguments: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> Made:
    """A function that calls a class, or a function that returns a module, with these arguments.

    Arguments that it does not name itself are those of its configuration: a class that annotates its only
    other argument, or a dataclass among `beside`, the names in its file. A LayoutError names what cannot be
    resolved.
    """
    name = getattr(kind, "__name__", "the model")
    parameters = inspect.signature(kind).parameters
    # With **kwargs a constructor takes any name.
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Arguments of the constructor itself, and those for its configuration.
    own = {
        key: x
        for key, x in arguments.items()
        if key in parameters or open_ended
    }
    others = {key: x for key, x in arguments.items() if key not in own}
    missing = [
        p
        for key, p in parameters.items()
        if p.default is p.empty and p.kind not in _OPEN and key not in own
    ]
    # One required argument is left: it may be a configuration that takes the others.
    if len(missing) == 1 and (
        config := _config_of(missing[0], name, others, beside)
    ):
        made = _config_with(config, others)
        return lambda: kind(**own, **{missing[0].name: made()})
    if others:
        raise LayoutError(_unknown(min(others), name, [*parameters]))
    if missing:
        raise LayoutError(
            f"{name} needs {', '.join(p.name for p in missing)}, which nothing names. Write them as"
            f" FILE.py:{name}({missing[0].name}=...), or as keys of [model]."
        )
    return lambda: kind(**own)


def _config_of(
    parameter: inspect.Parameter,
    owner: str,
    arguments: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> Any:
    """The class of a model's configuration; None if there is none."""
    annotated = parameter.annotation
    # An annotation in quotes, or under `from __future__ import annotations`.
    if isinstance(annotated, str):
        annotated = beside.get(annotated)
    if isinstance(annotated, type) and annotated is not parameter.empty:
        return annotated if is_dataclass(annotated) else None
    # Without one: the dataclass of the model's name, or the only one that fits.
    classes = [
        x for x in beside.values() if isinstance(x, type) and is_dataclass(x)
    ]
    named = [
        x for x in classes if x.__name__.lower() == f"{owner}config".lower()
    ]
    fitting = [
        x for x in classes if arguments.keys() <= {f.name for f in fields(x)}
    ]
    if named or len(classes) == 1:
        return (named or classes)[0]
    return fitting[0] if len(fitting) == 1 else None


def _config_with(config: Any, arguments: Mapping[str, Any]) -> Made:
    """A function that makes a configuration."""
    known = {f.name: f for f in fields(config) if f.init}
    for name in arguments:
        if name not in known:
            raise LayoutError(_unknown(name, config.__name__, [*known]))
    for name, field in known.items():
        # A field without a default must be named.
        required = (
            field.default is MISSING and field.default_factory is MISSING
        )
        if required and name not in arguments:
            raise LayoutError(
                f"{config.__name__} needs {name}, which nothing names. Write it as a key of [model]:"
                f" {name} = ..."
            )
    return lambda: config(**arguments)


def _unknown(name: str, owner: str, known: list[str]) -> str:
    has = (
        f"It takes {', '.join(known)}." if known else "It takes no arguments."
    )
    return f"{owner} has no argument {name}. {has}{near_word(name, known)}"


@contextmanager
def constructing() -> Iterator[None]:
    """A constructor of somebody's runs here, one at a time. What it prints goes to the standard error, as the
    output may be JSON."""
    with _CONSTRUCTING, redirect_stdout(sys.stderr):
        yield


class _OnMeta(threading.local):
    """A flag of each thread: modules that it makes have parameters on the meta device."""

    active = False


_ON_META = _OnMeta()


def _to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
    # The hook is torch's for all threads; other threads' modules are none of ours.
    if parameter is None or parameter.is_meta or not _ON_META.active:
        return None
    like = torch.empty_like(parameter, device="meta")
    return nn.Parameter(like, requires_grad=parameter.requires_grad)


@cache
def _install_hook() -> None:
    # Never removed: torch walks its hooks without a lock, so another thread that makes
    # a module meanwhile would fail.
    register_module_parameter_registration_hook(_to_meta)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes have their parameters on the meta device, and real buffers: a mask or a
    table of angles has values that only the constructor knows."""
    with constructing():
        _install_hook()
        before, _ON_META.active = _ON_META.active, True
        try:
            yield
        finally:
            _ON_META.active = before


@dataclass(eq=False)
class OwnStart:
    """The weights that a class's own constructor draws, by the names of its Model. `names` maps these to the
    class's own. The values of one seed are kept until `forget`."""

    make: Made
    names: Mapping[str, str]
    seed: int | None = None
    values: Mapping[str, Tensor] | None = None

    def __call__(self, seed: int) -> Mapping[str, Tensor]:
        if self.values is None or self.seed != seed:
            # The constructor draws from torch's generator, which is restored behind it.
            with constructing(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                module = self.make()
            own = dict(module.named_parameters())
            self.seed = seed
            self.values = {
                n: own[theirs].detach() for n, theirs in self.names.items()
            }
        return self.values

    def forget(self) -> None:
        self.values = None
