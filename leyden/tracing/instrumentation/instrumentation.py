"""The base of instrumentations: a library is changed while at least one block is open.

This module knows no library. To instrument one, write a module with a subclass of `Instrumentation` (of `Patches` if it
replaces methods), and add a line to `instruments.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

_lock = threading.RLock()
_users: dict[type[Instrumentation], int] = {}
_installed: dict[type[Instrumentation], Instrumentation] = {}


class Instrumentation(AbstractContextManager[None], ABC):
    """Changes a library inside `with`.

    Blocks may be nested and may overlap, in any threads: the first one installs, the last one removes. Where the
    library is not installed the block does nothing.
    """

    modules: ClassVar[tuple[str, ...]]
    """The modules that must be importable; the first is the library itself."""

    @classmethod
    def available(cls) -> bool:
        return all(_found(module) for module in cls.modules)

    @classmethod
    def imported(cls) -> bool:
        return cls.modules[0] in sys.modules

    @classmethod
    def installed(cls) -> bool:
        """Return whether a block is open, so that the library is changed."""
        return cls in _installed

    def __enter__(self) -> None:
        kind = type(self)
        with _lock:
            count = _users.get(kind, 0)
            if not count and self.available():
                self.install()
                _installed[kind] = self
            _users[kind] = count + 1

    def __exit__(self, *raised: object) -> None:
        kind = type(self)
        with _lock:
            _users[kind] -= 1
            if not _users[kind]:
                del _users[kind]
                if (installed := _installed.pop(kind, None)) is not None:
                    installed.remove()

    @abstractmethod
    def install(self) -> None:
        """Change the library; called once until `remove`."""

    @abstractmethod
    def remove(self) -> None:
        """Restore the library as it was before `install`."""


class Patch:
    """One method of a class or function of a module, replaced and put back. Not thread-safe: its owner calls `apply`
    and `undo` under a lock, and counts who needs the patch.

    owner, name: the class or module, and the name of its attribute that is replaced.
    replace: returns the replacement, given the original.
    """

    def __init__(self, owner: Any, name: str, replace: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._replace = owner, name, replace
        self._original: Any = None
        self._replacement: Any = None
        self._inherited = False

    def apply(self) -> None:
        """Replace the original. Safe to repeat."""
        if self._replacement is None:
            self._original = getattr(self._owner, self._name)
            self._inherited = self._name not in vars(self._owner)
            self._replacement = self._replace(self._original)
            setattr(self._owner, self._name, self._replacement)

    def undo(self) -> None:
        """Restore the original. Do nothing if another patch was put over this one since."""
        # The other patch calls this replacement, so it has to stay. The next `apply` uses it again.
        if self._replacement is None or getattr(self._owner, self._name) is not self._replacement:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        self._replacement = None


class Patches(Instrumentation):
    """An instrumentation that replaces methods."""

    _patches: ClassVar[dict[type[Patches], Sequence[Patch]]] = {}
    """The patches of each class. They are kept after `remove`, because a patch that another library's patch covers
    cannot be undone; applying it again would patch the method twice."""

    @abstractmethod
    def patches(self) -> Sequence[Patch]:
        """Return the patches to apply; called once in a process."""

    def install(self) -> None:
        kind = type(self)
        if kind not in self._patches:
            self._patches[kind] = self.patches()
        for patch in self._patches[kind]:
            patch.apply()

    def remove(self) -> None:
        for patch in reversed(self._patches[type(self)]):
            patch.undo()


@functools.cache
def _found(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or it was put into sys.modules by hand
        return False
