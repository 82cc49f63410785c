"""Execute a file as the module `__main__` of this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path


def run_as_main(path: Path, arguments: Sequence[str], spec: ModuleSpec | None = None) -> None:
    """Execute a file as the module `__main__`, so that its functions pickle by name and child processes find it.

    arguments: the program's `sys.argv`.
    spec: the spec of the module, if the program was named as a module.
    Errors of the program are raised as they are.
    """
    namespace = sys.modules["__main__"].__dict__
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    sys.argv = list(arguments)
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __file__=str(path),
        __spec__=spec,
        __package__=None if spec is None else spec.parent,
        __doc__=None,
        __loader__=None if spec is None else spec.loader,
    )
    exec(code, namespace)
