"""Train one transformer over many devices: plan, check, verify, measure and draw it.

    import phalanx

    phalanx.check("dp2 pp4 tp2 1f1b:8", "8b", device="h100")
    phalanx.plan("8b", "h100x64", sequence=8192, batch_tokens="4Mi")
    phalanx.draw("dp2 pp2 zero3 1f1b:4", "124m")
    phalanx.train(phalanx.join(), phalanx.Run.load("run.toml"))
    phalanx.prepare(model, optimizer, "dp2 zero3", loss=my_loss)

`join()` is this process's rank: of a process group that is there already (Ray, Accelerate, a notebook),
of what torchrun or Slurm has started, or alone. Importing this package loads no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from .version import VERSION

if TYPE_CHECKING:
    from inspect import Signature

    from .api.check import check as check
    from .api.load import load as load
    from .api.own_loop import prepare as prepare
    from .api.plan import plan as plan
    from .api.step import draw as draw
    from .api.step import simulate as simulate
    from .api.train import train as train
    from .api.trainers import check_file as check_file
    from .api.verify import verify as verify
    from .comm import join as join
    from .comm import launch as launch
    from .layout import Layout as Layout
    from .layout import Run as Run
    from .layout import Shape as Shape

__version__ = VERSION

_NAMES = {
    "api.check": "check",
    "api.load": "load",
    "api.own_loop": "prepare",
    "api.plan": "plan",
    "api.step": "draw simulate",
    "api.train": "train",
    "api.trainers": "check_file",
    "api.verify": "verify",
    "comm": "join launch",
    "layout": "Layout Run Shape",
}
_HOMES = {
    name: home for home, names in _NAMES.items() for name in names.split()
}
# These are packages too: `phalanx.plan` is one, and `phalanx.plan("8b")` what people want of it.
_PACKAGES = ("draw", "plan", "train", "verify")
__all__ = [*_HOMES]


class _CallablePackage(ModuleType):
    # No docstring: `__doc__` is a property of the packages. Reading it loads the function's module.

    @property
    def _function(self) -> Callable[..., Any]:
        name = self.__name__.rpartition(".")[2]
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
        return cast(Callable[..., Any], getattr(home, name))

    def __call__(self, *args: Any, **terms: Any) -> Any:
        return self._function(*args, **terms)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # `launch(phalanx.train, ...)` sends the function to other processes by its name.
        return importlib.import_module, (self.__name__,)

    # `help(phalanx.plan)` and `phalanx.plan?` in Jupyter show the function, and then the package.

    @property
    def __signature__(self) -> Signature:
        from inspect import signature

        return signature(self._function)

    def _parameters(self) -> Iterator[str]:
        named = True
        for parameter in self.__signature__.parameters.values():
            if named and parameter.kind is parameter.KEYWORD_ONLY:
                named = False
                yield "*"
            yield str(parameter)

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # a module's own can be written
        from inspect import cleandoc

        summary, _, rest = cleandoc(self._function.__doc__ or "").partition(
            "\n\n"
        )
        parameters = "\n".join(f"    {line}," for line in self._parameters())
        call = f"{self.__name__}(\n{parameters}\n)"
        package = f"{self.__name__} is a package too: {vars(self)['__doc__']}"
        return "\n\n".join(filter(None, (summary, call, rest, package)))


class _Root(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import system puts a package here when it is first imported, from wherever.
        if name in _PACKAGES and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Root


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
