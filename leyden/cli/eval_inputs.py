"""Read the inputs of `leyden eval` from the command line: an agent, tasks, models and resources."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from leyden._lib.json import unique_object
from leyden._lib.text import fault_reason
from leyden.agent import LitAgent
from leyden.cli.model_option import ModelOption
from leyden.errors import ConfigError
from leyden.trainer.fit_checks import imported_by
from leyden.training.runs import RecordedRun, list_runs, open_run
from leyden.training.runs.rollouts import latest_resources
from leyden.types import LLM, NamedResources, PromptTemplate

_OFFERED = 8
_TEMPERATURE = 1.0
"""The suggested temperature for a model that is loaded here, as in training. A run's own and
--temperature come first."""


def load_agent(spec: str) -> LitAgent[Any]:
    """Return the agent at `module:name` or `file.py:name`; for a class, an instance made without arguments.

    Modules are also looked for in the current folder. Raise ConfigError if the module or the name is missing, or if the
    object is no agent. An error inside the module is raised as it is.
    """
    source, colon, name = spec.rpartition(":")
    if not (source and colon and name):
        raise ConfigError(f"the agent is {spec!r}; give module:agent or file.py:agent, such as my_agent:agent")
    module = _module_of_file(Path(source)) if source.endswith(".py") else _module_named(source)
    try:
        found: Any = getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{source} has no {name!r}{_agents_in(module)}") from None
    if isinstance(found, type) and issubclass(cast("type[object]", found), LitAgent):
        found = found()
    if not isinstance(found, LitAgent):
        raise ConfigError(
            f"{spec} is a {type(cast(object, found)).__name__}, and no agent{_agents_in(module)}; decorate the function with "
            "@leyden.rollout, @leyden.llm_rollout or @leyden.prompt_rollout, or subclass leyden.LitAgent"
        )
    return cast("LitAgent[Any]", found)


def _module_named(name: str) -> Any:
    """Import a module, also from the current folder, as `python -m` does.

    Raise ConfigError if it, or a module that it imports, is missing.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importing = imported_by.set("leyden eval")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name} needs the module {error.name!r}, which is not installed") from error
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(f"there is no module {name!r}, neither installed nor as {file} in {Path.cwd()}") from None
    finally:
        imported_by.reset(importing)


def _module_of_file(path: Path) -> Any:
    """Import a Python file as the module of its name.

    Raise ConfigError if another module of that name is imported already or comes first.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    parent = str(path.resolve().parent)
    if parent not in sys.path:
        sys.path.insert(0, parent)  # so that the file finds its neighbours, as with `python file.py`
    module = _module_named(path.stem)
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != path.resolve():
        raise ConfigError(
            f"{path} has the name of the module {path.stem!r} that is in use ({file or 'built in'}); rename the file"
        )
    return module


def _agents_in(module: Any) -> str:
    names = [str(name) for name in dir(module) if isinstance(getattr(module, name, None), LitAgent)]
    return f"; agents there: {', '.join(names[:_OFFERED])}" if names else ""


# ---- tasks ---------------------------------------------------------------------------------------


def load_tasks(path: Path) -> list[Any]:
    """Return the tasks of a file: the lines of `.jsonl`, the items of the list in `.json`, or the rows of `.csv` as
    dicts.

    Raise ConfigError, with the file and the line, for a file that cannot be read.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    if path.suffix not in readers:
        raise ConfigError(f"--tasks {path}: its name must end in {', '.join(readers)}")
    try:
        tasks = readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"--tasks {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--tasks {path} is not UTF-8: {error}") from None
    if not tasks:
        raise ConfigError(f"--tasks {path} holds no tasks")
    return tasks


def _read_jsonl(path: Path) -> list[Any]:
    """Return the JSON value of each line; empty lines are skipped. Raise ConfigError for a wrong one."""
    tasks: list[Any] = []
    # Not splitlines(), which also breaks at characters that a JSON string may hold, such as U+2028.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            tasks.append(json.loads(line, object_pairs_hook=unique_object))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--tasks {path}, line {number} is not JSON: {error}") from None
    return tasks


def _read_json(path: Path) -> list[Any]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_object)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tasks {path} is not JSON: {error}") from None
    if not isinstance(content, list):
        raise ConfigError(f"--tasks {path} holds a {type(content).__name__}; it must be a list of tasks")
    return cast("list[Any]", content)


def _read_csv(path: Path) -> list[Any]:
    """Return the rows of a CSV file as dicts by column; all values are texts.

    Raise ConfigError for a row that is shorter or longer than the header.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        columns = list(reader.fieldnames or ())
        if len(columns) == 1 and (other := next((mark for mark in ";\t|" if mark in columns[0]), None)):
            raise ConfigError(f"--tasks {path} is separated by {other!r}; separate its columns by commas")
        named: dict[str, str] = {}
        for column in columns:
            if (before := named.get(column.strip().casefold())) is not None:
                raise ConfigError(
                    f"--tasks {path} has the columns {before!r} and {column!r}, one of which would hide the other; keep one"
                )
            named[column.strip().casefold()] = column
        tasks: list[Any] = []
        row: dict[Any, Any]
        for row in reader:
            if None in row or None in row.values():  # cells beyond the header, or a column without a cell
                n_cells = len(columns) + len(row.get(None, ())) - list(row.values()).count(None)
                raise ConfigError(
                    f"--tasks {path}, line {reader.line_num} has {n_cells} cells, and the header {len(columns)}; put quotes "
                    "around a cell that has a comma"
                )
            tasks.append(dict(row))
    return tasks


# ---- models and resources ------------------------------------------------------------------------


@dataclass(slots=True)
class Given:
    """The models and resources to evaluate with."""

    run_name: str | None = None
    """The run whose resources these are; None if `--resources` names no run."""
    resources: NamedResources = field(default_factory=dict[str, Any])
    """The resources that are not models, such as prompt templates, by name."""
    llms: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict[str, "tuple[str, dict[str, Any]]"])
    """For each resource that is a model, the model's name and suggested sampling parameters."""
    servers: dict[str, str] = field(default_factory=dict[str, str])
    """The base URL of each model that a server has, by model name."""
    folder: tuple[str, str] | None = None
    """Name and folder (or hub name) of the model to load in this process; None if there is none."""
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of the engine that loads `folder`."""


_LOADING = ("max_length", "device", "dtype", "tool_parser", "max_batch_rows", "deterministic")
"""Options of a run's engine that an evaluation takes over."""


async def read_given(models: Sequence[str], source: str | None) -> Given:
    """Return the models and resources that `--model` and `--resources` name.

    models: the texts of `--model`.
    source: the text of `--resources`, a run or a `.json` file.
    Raise ConfigError for a model or a source that cannot be used, and for a model that the run's agents call and
    `--model` does not name.
    """
    given = Given()
    if source is not None and source.endswith(".json"):
        given.resources = _resources_of_file(Path(source))
    elif source is not None:
        run = _chosen(source, has_models=bool(models))
        given.run_name = run.record.name
        await _add_run(given, run, has_models=bool(models))
    for each in models:
        _add_model(given, each)
    served = {*given.servers, *([given.folder[0]] if given.folder else [])}
    for name, (model, _) in given.llms.items():
        if model not in served:
            raise ConfigError(
                f"the run's agents call the model {model!r} (resource {name!r}), and --model names "
                f"{', '.join(sorted(served))}; write --model {model}=..."
            )
    return given


def _add_model(given: Given, text: str) -> None:
    """Add the model of one `--model NAME=URL` or `NAME=FOLDER`.

    Raise ConfigError for another form, a name that is given twice, a missing folder and a second folder.
    """
    model = ModelOption.of(text)
    name = model.name
    if name in given.servers or (given.folder is not None and given.folder[0] == name):
        raise ConfigError(f"--model names {name!r} twice")
    if not model.is_folder:
        given.servers[name] = model.address
    elif given.folder is not None:
        raise ConfigError(
            f"--model {text}: {given.folder[1]} is loaded here already; one model can be, others need a URL"
        )
    else:
        given.folder = name, model.address
    if name not in {model for model, _ in given.llms.values()}:  # else it takes the place of the run's model
        given.llms[name] = name, {} if name in given.servers else {"temperature": _TEMPERATURE}


def _resources_of_file(path: Path) -> NamedResources:
    """Return the resources in a JSON file, in which a plain string is a prompt template.

    Raise ConfigError for a file that cannot be read and for a resource of another form.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--resources {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--resources {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f'--resources {path} must be an object of resources by name, such as {{"prompt": "Answer {{question}}"}}'
        )
    named = {
        name: PromptTemplate(template=value).model_dump() if isinstance(value, str) else value
        for name, value in cast("dict[str, Any]", content).items()
    }
    try:
        return TypeAdapter(NamedResources).validate_python(named)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--resources {path}: {where}: {fault_reason(first)}") from None


def _chosen(source: str, *, has_models: bool) -> RecordedRun:
    """Return the run that `--resources` names.

    "latest" is the newest run that has trained a model; with `--model`, the newest run that is neither an evaluation
    nor a replay.
    """
    if source == "latest":
        for run in list_runs():
            trained = run.directory is not None and (run.directory / "model").is_dir()
            if run.record.kind not in ("eval", "replay") and (trained or has_models):
                return run
    return open_run(source)


async def _add_run(given: Given, run: RecordedRun, *, has_models: bool) -> None:
    """Add a run's last resources to `given`, and its trained model unless `--model` names models.

    The model gets the name that the run's agents knew, and the options of the run's engine.
    """
    async with run.open_store() as store:
        latest = await latest_resources(run, store)
    if latest is None:
        raise ConfigError(
            f"run {run.record.name} has published no resources, so there is nothing to evaluate with; wait for its first "
            "step, or leave out --resources and name a model with --model"
        )
    llms = {name: each for name, each in latest.resources.items() if isinstance(each, LLM)}
    given.resources = {name: each for name, each in latest.resources.items() if not isinstance(each, LLM)}
    for name, llm in llms.items():
        given.llms[name] = llm.model, dict(llm.sampling_parameters)
    if has_models or not llms:
        return
    model = None if run.directory is None else run.directory / "model"
    if model is None or not model.is_dir():
        raise ConfigError(
            f"run {run.record.name} has no model/ folder ({run.state}): training writes it when it ends. Continue the run, "
            "or name a model with --model"
        )
    given.folder = next(iter(llms.values())).model, str(model)
    algorithm = cast("dict[str, Any]", run.record.config.get("algorithm") or {})
    backend: Any = cast("dict[str, Any]", algorithm.get("options") or {}).get("backend")
    if isinstance(backend, dict):
        options = cast("dict[str, Any]", backend)
        given.loading = {name: options[name] for name in _LOADING if options.get(name) is not None}
