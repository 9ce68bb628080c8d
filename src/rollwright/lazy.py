"""Packages whose names are imported when they are first used.

A package's `__init__` says where each of its names is defined. Importing the package, or its light `settings` module,
then loads none of them: the command line reads a configuration without loading what plays it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package. `modules`: for each name, the module of the package that defines it."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
