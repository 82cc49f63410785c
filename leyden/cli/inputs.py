"""Read what a command's user has written: agents and other objects of Python files, and files of tasks."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any, cast

from leyden._lib.json import unique_object
from leyden.agent import LitAgent
from leyden.errors import ConfigError
from leyden.trainer.fit_checks import imported_by

_OFFERED = 8


def load_agent(spec: str, *, command: str = "leyden eval") -> LitAgent[Any]:
    """Return the agent at `module:name` or `file.py:name`; for a class, an instance made without arguments.

    command: what imports it, for messages.
    Raise ConfigError as `load_object` does, and if the object is no agent.
    """
    source, colon, name = spec.rpartition(":")
    if not (source and colon and name):
        raise ConfigError(f"the agent is {spec!r}; give module:agent or file.py:agent, such as my_agent:agent")
    found = load_object(spec, command=command)
    if isinstance(found, type) and issubclass(cast("type[object]", found), LitAgent):
        found = found()
    if not isinstance(found, LitAgent):
        raise ConfigError(
            f"{spec} is a {type(cast(object, found)).__name__}, and no agent{_agents_in(_module(source, command))}; decorate "
            "the function with @leyden.rollout, @leyden.llm_rollout or @leyden.prompt_rollout, or subclass leyden.LitAgent"
        )
    return cast("LitAgent[Any]", found)


def load_object(spec: str, *, command: str) -> Any:
    """Return the object at `module:name` or `file.py:name`. The name may have dots.

    Modules are also looked for in the current folder. Raise ConfigError if the module or the name is missing. An error
    inside the module is raised as it is.
    """
    source, _, name = spec.rpartition(":")
    if not source.strip(".") or not name.strip("."):
        raise ConfigError(f"{spec!r} names no object of a module; write module:name or file.py:name")
    module = _module(source, command)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        offer = _agents_in(module) or "; define it there, or give another name"
        raise ConfigError(f"{source} has no {name!r}{offer}") from None


def _module(source: str, command: str) -> Any:
    if source.endswith(".py"):
        return _module_of_file(Path(source), command)
    return _module_named(source, command, Path.cwd())


def _module_named(name: str, command: str, folder: Path) -> Any:
    """Import a module, first of all from this folder, so that it also finds its neighbours there.

    Raise ConfigError if it, or a module that it imports, is missing.
    """
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    importing = imported_by.set(command)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name} needs the module {error.name!r}, which is not installed; install the package that has it, often "
                f"with pip install {(error.name or '').partition('.')[0]}"
            ) from error
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(f"there is no module {name!r}, neither installed nor as {file} in {Path.cwd()}") from None
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename}, line {error.lineno}: {error.msg}; correct the line, or one before it"
        ) from error
    finally:
        imported_by.reset(importing)


def _module_of_file(path: Path, command: str) -> Any:
    """Import a Python file as the module of its name.

    Raise ConfigError if another module of that name is imported already or comes first.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give the path of one")
    module = _module_named(path.stem, command, path.resolve().parent)
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != path.resolve():
        raise ConfigError(
            f"{path} has the name of the module {path.stem!r} that is in use ({file or 'built in'}); rename the file"
        )
    return module


def _agents_in(module: Any) -> str:
    names = [str(name) for name in dir(module) if isinstance(getattr(module, name, None), LitAgent)]
    return f"; there are agents: {', '.join(names[:_OFFERED])}" if names else ""


# ---- tasks ---------------------------------------------------------------------------------------


def load_tasks(path: Path, *, option: str = "--tasks ") -> list[Any]:
    """Return the tasks of a file: the lines of `.jsonl`, the items of the list in `.json`, or the rows of `.csv` as
    dicts.

    option: what names the file, for messages.
    Raise ConfigError, with the file and the line, for a file that cannot be read.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ConfigError(f"{option}{path} is no file of tasks; its name must end in {', '.join(readers)}")
    try:
        tasks = readers[path.suffix](path, option)
    except OSError as error:
        raise ConfigError(f"{option}{path} cannot be read: {error.strerror}; give a file of tasks") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}{path} is not UTF-8: {error}; save it as UTF-8") from None
    if not tasks:
        raise ConfigError(f"{option}{path} holds no tasks; write at least one")
    return tasks


def _read_jsonl(path: Path, option: str) -> list[Any]:
    """Return the JSON value of each line; empty lines are skipped. Raise ConfigError for a wrong one."""
    tasks: list[Any] = []
    # Not splitlines(), which also breaks at characters that a JSON string may hold, such as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(json.loads(line, object_pairs_hook=unique_object))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{option}{path}, line {number} is not JSON: {error}; write one JSON value on each line"
            ) from None
    return tasks


def _read_json(path: Path, option: str) -> list[Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_object)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option}{path} is not JSON: {error}") from None
    if not isinstance(content, list):
        raise ConfigError(f"{option}{path} holds a {type(content).__name__}; it must be a list of tasks")
    return cast("list[Any]", content)


def _read_csv(path: Path, option: str) -> list[Any]:
    """Return the rows of a CSV file as dicts by column; all values are texts.

    Raise ConfigError for a row that is shorter or longer than the header.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        columns = list(reader.fieldnames or ())
        if len(columns) == 1 and (other := next((mark for mark in ";\t|" if mark in columns[0]), None)):
            raise ConfigError(f"{option}{path} is separated by {other!r}; separate its columns by commas")
        named: dict[str, str] = {}
        for column in columns:
            if (before := named.get(column.strip().casefold())) is not None:
                raise ConfigError(
                    f"{option}{path} has the columns {before!r} and {column!r}, one of which would hide the other; keep one"
                )
            named[column.strip().casefold()] = column
        tasks: list[Any] = []
        row: dict[Any, Any]
        for row in reader:
            if None in row or None in row.values():  # cells beyond the header, or a column without a cell
                n_cells = len(columns) + len(row.get(None, ())) - list(row.values()).count(None)
                raise ConfigError(
                    f"{option}{path}, line {reader.line_num} has {n_cells} cells, and the header {len(columns)}; put quotes "
                    "around a cell that has a comma"
                )
            tasks.append(dict(row))
    return tasks
