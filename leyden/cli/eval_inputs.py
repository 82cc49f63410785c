"""Read the models and resources of `leyden eval` from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from leyden._lib.text import fault_reason
from leyden.cli.model_option import ModelOption, engine_options, newest_run, trained_model
from leyden.errors import ConfigError
from leyden.training.runs import RecordedRun, open_run
from leyden.training.runs.rollouts import latest_resources
from leyden.types import LLM, NamedResources, PromptTemplate

_TEMPERATURE = 1.0
"""The suggested temperature for a model that is loaded here, as in training. A run's own and
--temperature come first."""


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


def _loading(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: engine[name] for name in _LOADING if engine.get(name) is not None}


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
        given.folder, given.loading = (name, model.address), _loading(model.engine)
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
    newest = newest_run(with_model=not has_models) if source == "latest" else None
    return newest or open_run(source)


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
    given.folder = next(iter(llms.values())).model, str(trained_model(run))
    given.loading = _loading(engine_options(run))
