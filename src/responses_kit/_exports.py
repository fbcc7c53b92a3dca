"""Lazy exports of packages (PEP 562), so that optional dependencies load on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that imports names on first use.

    Args:
        package: The package's `__name__`.
        modules: The module of each name, relative to the package, such as `{"SqlStore": ".sql"}`.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807  # becomes the package's own
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807  # becomes the package's own
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__
