"""Imported by Python itself when a process starts with this folder on its path: emulates CUDA as soon
as torch is imported, and does nothing before."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Emulating(MetaPathFinder):
    """Loads the device before torch, and changes torch after its import."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        ctypes.CDLL(os.environ["EMULATED_CUDA"], ctypes.RTLD_GLOBAL)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = Changed(spec.loader)
        return spec


class Changed(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        import emulate

        emulate.emulate()


if "EMULATED_CUDA" in os.environ:
    sys.meta_path.insert(0, Emulating())
