"""Serve modules of another package from tables that give a replacement for each name of a module.

A table maps the full name of a foreign module to a `ForeignModule`. `TABLES` lists the tables; each is loaded with the
first import from its package. An object is loaded when its name is first used, so that `import agentlightning` loads no
torch and no web framework.

Child processes that import the main script again find the foreign packages through the folder `shadow/`, which
`install` appends to `sys.path` and to PYTHONPATH: its modules call `install`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from leyden.errors import ConfigError, LeydenError

TABLES: Mapping[str, str] = MappingProxyType(
    {
        "agentlightning": "leyden_compat.agentlightning.table:MODULES",
        "qlib": "leyden_compat.qlib.table:MODULES",
    }
)
"""The import path of each foreign package's table, which maps full module names to `ForeignModule`."""
_BESIDE: Mapping[str, str] = MappingProxyType({"tianshou": "leyden_compat.qlib.table:TIANSHOU"})
"""Packages that a foreign package needs. If one is not installed, a few of its names are served."""

SHADOW = Path(__file__).parent / "shadow"
"""A folder for `sys.path`: importing a foreign package from it installs the finder."""


class ForeignNameError(LeydenError, ImportError):
    """Leyden has nothing under a name of another package; the message says what to write instead."""


@dataclass(frozen=True)
class MissingName:
    """Stands for a name that Leyden does not have. Using the name raises ForeignNameError."""

    instead: str
    """One sentence that says what to write instead."""
    module: str | None = None
    """The module to use instead, if it is installed."""
    needs: str | None = None
    """The package that must be installed for `module`. None: the module's own."""


@dataclass(frozen=True)
class ForeignModule:
    """A module of another package: its names, and Leyden's replacement for each."""

    names: Mapping[str, str | MissingName] = field(default_factory=dict[str, "str | MissingName"])
    """The replacement of each name: "leyden.module:attribute", "leyden.module" for a whole module,
    or a `MissingName`."""
    public: Sequence[str] | None = None
    """The names that `from module import *` binds. None: every name that has no `MissingName`."""
    instead: str | None = None
    """Importing the module raises ForeignNameError with this sentence. None: it can be imported."""
    only_if_missing: bool = False
    """Use an installed module of this name if there is one, such as the real `qlib`, whose submodule `qlib.rl` is
    served by Leyden."""
    only_for: str | None = None
    """The module is served only where this installed module needs it. None: always."""


class Finder(MetaPathFinder, Loader):
    """The import finder and loader for foreign modules (`agentlightning`, `qlib.rl`), which it makes from their tables
    of names in Leyden.
    """

    def __init__(self, tables: Mapping[str, str] = TABLES) -> None:
        self._tables = {**_BESIDE, **tables}
        self._loaded: dict[str, Mapping[str, ForeignModule]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a foreign module that Leyden serves; None for any other module. Raise ForeignNameError for
        a foreign module without a counterpart.
        """
        foreign = self.module(fullname)
        if foreign is None:
            return None
        if foreign.only_for is not None and _installed(foreign.only_for) is None:
            return None
        if foreign.only_if_missing and (installed := _installed(fullname)) is not None:
            return installed
        if foreign.instead is not None:
            raise ForeignNameError(f"{fullname} has no counterpart in Leyden: {foreign.instead}")
        return ModuleSpec(fullname, self, origin="leyden.compat", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        foreign = self.module(spec.name)
        assert foreign is not None
        return _Module(spec.name, foreign, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are loaded when they are used."""

    def module(self, fullname: str) -> ForeignModule | None:
        """Return the table's entry of a foreign module, or None if no table has it."""
        return self.table(fullname.partition(".")[0]).get(fullname)

    def table(self, package: str) -> Mapping[str, ForeignModule]:
        """Return the table of a foreign package, empty if there is none."""
        if package not in self._tables:
            return {}
        if package not in self._loaded:
            module, _, name = self._tables[package].partition(":")
            self._loaded[package] = {}  # an import of the table may ask for this package; it has no names yet
            try:
                self._loaded[package] = getattr(importlib.import_module(module), name)
            except BaseException:
                del self._loaded[package]
                raise
        return self._loaded[package]


class _Module(ModuleType):
    """A foreign module, whose names are loaded from its entry when they are first used."""

    def __init__(self, name: str, foreign: ForeignModule, finder: Finder) -> None:
        super().__init__(name, f"{name}, served by Leyden (see leyden.compat).")
        self._leyden_entry = foreign
        self._leyden_finder = finder
        names = [name for name, target in foreign.names.items() if isinstance(target, str)]
        self.__all__ = names if foreign.public is None else [n for n in foreign.public if n in names]

    def __getattr__(self, name: str) -> Any:
        """Load a name of the foreign module at its first use. Raise ForeignNameError, with the remedy, for a name that
        Leyden does not have.
        """
        target = self._leyden_entry.names.get(name)
        if isinstance(target, MissingName) and target.module and _installed(target.needs or target.module):
            value = getattr(importlib.import_module(target.module), name)
        elif isinstance(target, MissingName):
            raise ForeignNameError(f"{self.__name__}.{name} has no counterpart in Leyden: {target.instead}")
        elif target is not None:
            value = load(target)
        elif self._leyden_finder.module(f"{self.__name__}.{name}") is not None:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(
                f"module {self.__name__!r} (served by leyden.compat) has no attribute {name!r}{self._hint(name)}",
                name=name,
                obj=None,  # or a traceback would add Python's own "Did you mean", a second time
            )
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module as its name, because an agent of the main script holds its modules."""
        return importlib.import_module, (self.__name__,)

    def _hint(self, name: str) -> str:
        """Return the end of the message for an unknown name: the nearest name, if one is near."""
        close = [] if name.startswith("_") else difflib.get_close_matches(name, self._leyden_entry.names, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""


def load(target: str) -> Any:
    """Return the object that a target names: "module:attribute", or "module" for the module itself."""
    module, _, name = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split(".") if name else ():
        value = getattr(value, part)
    return value


def install() -> Finder:
    """Serve the foreign packages from now on, in this process and in the Python processes that it starts.

    Return the finder; a repeated call returns the same one. Raise ConfigError if the real package is already imported,
    because its objects and Leyden's would mix.
    """
    for finder in sys.meta_path:
        if isinstance(finder, Finder):
            return finder
    module = sys.modules.get("agentlightning")
    file = getattr(module, "__file__", None)
    if module is not None and (file is None or SHADOW not in Path(file).parents):
        where = getattr(module, "__file__", "an unknown place")
        raise ConfigError(
            f"the real agentlightning is already imported (from {where}), so leyden.compat cannot stand for it; "
            "put `import leyden.compat` above the first import of agentlightning, or run `python -m leyden.compat SCRIPT`"
        )
    finder = Finder()
    sys.meta_path.insert(0, finder)
    shadow = str(SHADOW)
    if shadow not in sys.path:
        sys.path.append(shadow)
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if shadow not in inherited:  # at the front, before an installed agentlightning
        os.environ["PYTHONPATH"] = os.pathsep.join([shadow, *inherited])
    return finder


def take_over(package: str) -> None:
    """Replace a stub of the folder `shadow/`, which is being imported, by the foreign package."""
    install()
    del sys.modules[package]
    importlib.import_module(package)


def _installed(fullname: str) -> ModuleSpec | None:
    """Return the spec of an installed module, without importing anything; None if it is not installed. Stubs in
    `shadow/` do not count.
    """
    folders, name = [folder for folder in sys.path if Path(folder) != SHADOW], ""
    spec: ModuleSpec | None = None
    for part in fullname.split("."):
        name = f"{name}.{part}" if name else part
        if (spec := PathFinder.find_spec(name, folders)) is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec
