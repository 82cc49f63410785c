"""Optional packages and names that are loaded when they are first used, and the error for a missing extra.

A package lists its public names once, in its `__init__.py` under `if TYPE_CHECKING`, and `lazy_package` loads each of
them from the module that stands there. `import leyden` therefore loads no torch, no web framework and no model library.
To add a public name, add its import there.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

from leyden.errors import MissingExtra

_PACKAGES = {
    "rl": ("gymnasium", "numpy", "safetensors", "torch"),
    "torch": ("safetensors", "torch", "transformers"),
    "verl": ("ray", "torch", "transfer_queue", "verl"),
}
"""The packages that Leyden's modules import at module level, by extra."""


def how_to_install(extra: str) -> str:
    """Return the end of an error message: how to install the packages of `extra`.

    pip takes an extra from the Leyden that is installed. A package index may have another package of that name.
    """
    from importlib.metadata import distributions

    if any(distributions(name="leyden")):
        return f"install the extra '{extra}': pip install 'leyden[{extra}]'"
    return f"install the extra '{extra}' (in a clone of Leyden: pip install -e '.[{extra}]')"


def extension(group: str, name: str, *, needed_by: str) -> Any:
    """Load the entry point `name` of the group `leyden.GROUP`, which leyden-compat declares. Raise MissingExtra if that
    distribution is not installed or cannot be imported.
    """
    from importlib.metadata import entry_points

    how = "in a clone of Leyden: pip install -e . -e packages/leyden-compat"
    for found in entry_points(group=f"leyden.{group}", name=name):
        try:
            return found.load()
        except (ImportError, AttributeError) as error:  # a clone that was moved, or the release of another Leyden
            raise MissingExtra(
                f"{needed_by} needs leyden-compat, which is installed and cannot be loaded ({error}); install it again ({how})"
            ) from error
    raise MissingExtra(f"{needed_by} needs leyden-compat, which is not installed ({how})")


def require_packages(*packages: str, extra: str, needed_by: str) -> None:
    """Raise MissingExtra, which names the extra to install, if one of the packages is missing.

    No package is imported.
    """
    if missing := [package for package in packages if find_spec(package) is None]:
        raise MissingExtra(f"{needed_by} needs {', '.join(missing)}; {how_to_install(extra)}")


def missing_extra(error: ImportError, *, extra: str, needed_by: str) -> ImportError:
    """Return a MissingExtra if a package of the extra caused the error, and otherwise `error` itself."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES[extra]:
        return error
    missing = MissingExtra(f"{needed_by} needs {package}, which is not installed; {how_to_install(extra)}")
    missing.name = package  # as Python's own ImportError has it, so that an outer call can read it
    return missing


def import_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package. Raise MissingExtra, which names the extra to install, if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{needed_by} needs {module.partition('.')[0]}, which cannot be imported ({error}); {how_to_install(extra)}"
        ) from error


def lazy_package(
    package: str, *, extra: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from its imports under `if TYPE_CHECKING`.

    package: `__name__` of the package, whose import is under way.
    extra: the extra that its modules need. A name whose module cannot be imported without it raises MissingExtra, which
        names the extra and how to install it.
    """
    homes = _public_modules(package)
    public = sorted(homes)

    def resolve(name: str) -> Any:
        if name not in public:
            hint = ""
            if not name.startswith("_"):  # tools look for such names in every module
                from difflib import get_close_matches

                close = get_close_matches(name, public, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{hint}",
                name=name,
                obj=None,  # or a traceback would add Python's own "Did you mean", a second time
            )
        try:
            value = getattr(importlib.import_module(homes[name]), name)
        except ImportError as error:
            if extra is None:
                raise
            raise missing_extra(error, extra=extra, needed_by=f"{package}.{name}") from None
        setattr(sys.modules[package], name, value)
        return value

    return resolve, lambda: public, public


def _public_modules(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports under `if TYPE_CHECKING`. The source comes from the
    package's loader, because it can be in a zip file.
    """
    spec = sys.modules[package].__spec__
    source = None if spec is None else cast(Any, spec.loader).get_source(package)
    if source is None:
        raise ImportError(
            f"{package} needs its own source, and only its bytecode is here; install it with its .py files"
        )
    body = ast.parse(source).body
    blocks = (node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names}
