"""Starts the recorder in an audited program: Python imports this file when it starts.

`launch` puts this folder into PYTHONPATH, which all processes of the program inherit. Nothing happens
in a process that does not import torch.
"""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


class AfterTorch(MetaPathFinder):
    """A finder that starts the recorder as soon as `import torch` has finished."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        # It stays in place: libraries look for torch with `find_spec` long before they import it.
        for finder in sys.meta_path:
            spec = None
            if finder is not self:
                spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Following(spec.loader, self)
                return spec
        return None


class _Following(Loader):
    def __init__(self, loader: Loader, finder: MetaPathFinder) -> None:
        self.loader = loader
        self.finder = finder

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        sys.meta_path.remove(self.finder)
        self.loader.exec_module(module)
        module.__spec__.loader = self.loader
        _package().start.start_recorder(os.environ)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _package() -> Any:
    """torch_audit, loaded from the folder around this file, whatever is installed in this Python."""
    if "torch_audit" not in sys.modules:
        folder = _HERE.parent
        spec = importlib.util.spec_from_file_location(
            "torch_audit",
            folder / "__init__.py",
            submodule_search_locations=[str(folder)],
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["torch_audit"] = module
        spec.loader.exec_module(module)
    importlib.import_module("torch_audit.start")
    return sys.modules["torch_audit"]


def _run_next() -> None:
    """Runs the sitecustomize that this one hides, such as a distribution's or an environment's."""
    others = [
        path for path in sys.path if Path(path or ".").resolve() != _HERE
    ]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "TORCH_AUDIT_OUT" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
_run_next()
