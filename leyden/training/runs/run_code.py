"""The code that a run is made of: the user's files behind its agent and its components, with what they import.

Two runs with equal options differ if a file was edited between them, so a run records a digest of each file. The
standard library, installed packages and Leyden do not count, because `versions` has them. Not found are a module that
is imported by a computed name, the values in memory, and what a program reads.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Final, cast

from leyden._lib.components import arguments_of
from leyden._lib.json import is_object

_MAX_FILES = 2000
_MAX_ITEMS = 100
"""Of a longer list of components, and of a mapping, so many items are looked at."""
_MAX_DEPTH = 6
_MAX_PATH = 1000
"""Characters; a longer text names no file."""
_MAX_BYTES = 1_000_000
"""A larger file that an option names is data."""
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n;]*)|import[ \t]+([^\n;]+))", re.M)
_FOREIGN: Final = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "scripts")), Path(__file__).parents[2])
)


def describe_code(*parts: object) -> dict[str, Any]:
    """Return the files of the parts' code with a digest each, and a digest of all, as JSON.

    A part is an agent, an algorithm or another component. Its functions and classes count, those among the arguments
    that it remembers, and the text files that these name. A file is named as it is imported, by its module's
    path, so that a project has the same digest in another folder. The digest is None if no file of the user's was
    found.
    """
    found, waiting, seen = dict[str, str](), list[tuple[str, Path]](), set[Path]()
    for code in _code_of(parts, "", Path(), set(), 0):
        if isinstance(code, Path):
            waiting.append(("", code))
            continue
        module = sys.modules.get(code.__module__)
        spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        if file is not None:
            waiting.append(("" if spec is None else spec.name, Path(file)))
        elif code.__module__ == "__main__":  # an interactive session
            with suppress(OSError, TypeError):
                found[f"{code.__module__}.{code.__qualname__}"] = _digest(inspect.getsource(code).encode())
    while waiting and len(found) < _MAX_FILES:
        module_name, path = waiting.pop()
        path = path.resolve()
        if path in seen or _is_foreign(path):
            continue
        seen.add(path)
        try:
            stat = path.stat()
            digest, imported = _read(path, stat.st_mtime_ns, stat.st_size)
        except OSError:  # of a module in an archive, or gone since it was imported
            continue
        is_package = path.name == "__init__.py"
        name = str(Path(*path.parts[-1 - is_package - module_name.count(".") :]))
        found[str(path) if name in found else name] = digest
        for each in imported:
            with suppress(ImportError):  # a relative import outside a package
                package = module_name if is_package else module_name.rpartition(".")[0]
                waiting += _located(resolve_name(each, package), path.parent)
    files = dict(sorted(found.items()))
    return {"digest": _digest(repr(files).encode()) if files else None, "files": files}


def code_changes(before: Any, now: Any) -> list[str]:
    """Return which files differ between two results of `describe_code`, each with what has become of it; none if one of
    them is missing or damaged.
    """
    old, new = (each.get("files") if is_object(each) else None for each in (before, now))
    if not is_object(old) or not is_object(new):
        return []
    changed = [f"{each} (edited)" for each in old if each in new and old[each] != new[each]]
    changed += [f"{each} (not used any more)" for each in old if each not in new]
    return [*changed, *(f"{each} (not used before)" for each in new if each not in old)]


def _code_of(value: Any, name: str, base: Path, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the functions and classes that a value is made of, and the text files that it names.

    name: that of the argument that the value is, or is in.
    base: the folder that relative paths mean.
    """
    if value is None or isinstance(value, bool | int | float | bytes) or depth > _MAX_DEPTH:
        return
    if isinstance(value, str | Path):
        path = base / value
        if len(str(value)) < _MAX_PATH and os.path.isfile(path) and _is_text(path):  # noqa: PTH113 -- False for no path
            yield path
        elif name == "folder":  # of which each attempt gets a copy
            inside = itertools.islice(path.rglob("*"), _MAX_FILES)
            yield from (each for each in inside if each.is_file() and _is_text(each))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    given: Mapping[Any, Any]
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value)
    elif isinstance(value, list | tuple | set | frozenset):
        given = dict(enumerate(itertools.islice(cast("list[Any]", value), _MAX_ITEMS)))
    elif isinstance(value, functools.partial):
        partial = cast("functools.partial[Any]", value)
        given = {"func": partial.func, "args": partial.args, **partial.keywords}
    else:
        with suppress(ValueError):  # wrapped by itself
            value = inspect.unwrap(value)
        code = cast(Any, value if inspect.isroutine(value) or inspect.isclass(value) else type(value))
        if getattr(code, "__module__", None) not in (None, "builtins"):
            yield code
        given = arguments_of(value)
        if is_dataclass(value) and not isinstance(value, type):
            given = {each.name: getattr(value, each.name, None) for each in fields(value)}
        if isinstance(folder := given.get("cwd"), str | Path):
            base = base / folder
    for key, each in itertools.islice(given.items(), _MAX_ITEMS):
        yield from _code_of(each, key if isinstance(key, str) else name, base, seen, depth + 1)


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.stat().st_size <= _MAX_BYTES and b"\0" not in file.read(1000)
    except OSError:
        return False


def _is_foreign(path: Path) -> bool:
    return str(path).startswith(_FOREIGN) or "site-packages" in path.parts or "dist-packages" in path.parts


@functools.lru_cache(maxsize=_MAX_FILES)
def _read(path: Path, _modified: int, _size: int) -> tuple[str, tuple[str, ...]]:
    """Return a file's digest, and what it imports: modules, and names that may be modules."""
    content = path.read_bytes()
    names = list[str]()
    if path.suffix == ".py":
        text = content.decode("utf-8", "replace").replace("\\\n", " ")
        for source, imported, plain in _IMPORT.findall(text):
            listed = [each.split()[0] for each in re.sub(r"#.*|[()]", "", imported or plain).split(",") if each.split()]
            dot = "" if source.endswith(".") else "."
            names += [source, *(f"{source}{dot}{each}" for each in listed)] if source else listed
    return _digest(content), tuple(names)


def _located(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of a module, and of the packages around it, which are not imported.

    folder: that of the file that imports it, which may be a script.
    """
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names:
        return
    places: Any = [str(folder), *sys.path]
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        spec = getattr(sys.modules.get(full), "__spec__", None) or PathFinder.find_spec(full, places)
        if spec is None:  # a name within the module
            return
        if spec.origin is not None:
            yield full, Path(spec.origin)
        if (places := spec.submodule_search_locations) is None:
            return


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
