"""Names of a package that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a package's `__getattr__`, which imports a name from its module on first use.

    Args:
        package: the package's `__name__`.
        homes: the module of each name, within the package.

    >>> lazy_exports("collections", {"Mapping": "abc"})("Mapping")
    <class 'collections.abc.Mapping'>
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
