"""Read `--model NAME=URL`, `--model NAME=FOLDER` and `--model NAME=RUN`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from leyden.errors import ConfigError

if TYPE_CHECKING:
    from leyden.training.runs import RecordedRun

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelOption:
    """A model of the command line: its name, and where it is."""

    name: str
    address: str
    """The base URL of the model's server, or the model's folder or hub name."""
    is_folder: bool
    """Whether the command is to load the model itself."""
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The options of the engine that trained the model, if a run did."""

    @classmethod
    def of(cls, text: str) -> ModelOption:
        """Return the model that one `--model` names. Raise ConfigError for another form, a missing folder, and a run
        without a model.

        A name without a slash is a run under `.leyden/` if there is one, else a model of the hub that was downloaded
        before.
        """
        from leyden.engine.source import why_not_loadable  # `leyden --help` does not load the engine

        name, equals, address = text.partition("=")
        if not (name and equals and address):
            raise ConfigError(
                f"--model is {text!r}; it must be NAME=URL, NAME=FOLDER or NAME=RUN, such as policy=http://127.0.0.1:8000/v1"
            )
        engine: Mapping[str, Any] = {}
        if "://" not in address and (run := _run_of(address)) is not None:
            engine = engine_options(run)
            if not Path(address).is_dir() or Path(address).samefile(run.directory or "."):
                address = str(trained_model(run))
        if "://" not in address and (reason := why_not_loadable(address)):
            raise ConfigError(f"--model {text}: {reason}")
        is_bare = re.fullmatch(r"[\w.-]+", address) and not Path(address).exists()
        if is_bare and not _is_downloaded(address):
            raise ConfigError(
                f"--model {text}: {_no_run(address)}. A model of the hub is ORG/NAME, and a folder ./NAME"
            )
        is_path = address.startswith((".", "/", "~")) or ("://" not in address and address.count("/") > 1)
        is_gguf = address.lower().endswith(".gguf") and Path(address).is_file()
        if is_path and not is_gguf and not Path(address).is_dir():
            raise ConfigError(f"--model {text}: there is no folder {address}")
        is_folder = is_path or is_gguf or Path(address).is_dir() or _HUB_NAME.fullmatch(address) is not None
        return cls(name, address, is_folder, engine)


def _is_downloaded(name: str) -> bool:
    """Return whether the hub's cache on this machine has a model of this name."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or Path(home, "hub")
    return Path(cache, f"models--{name}").is_dir()


def _no_run(name: str) -> str:
    from leyden.training.runs import open_run

    try:
        return f"run {open_run(name).record.name} has no trained model"
    except ConfigError as error:
        return str(error)


def trained_model(run: RecordedRun) -> Path:
    """Return the folder with a run's trained model. Raise ConfigError if there is none."""
    folder = None if run.directory is None else run.directory / "model"
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"run {run.record.name} has no model/ folder ({run.state}): a run that trains a model writes it when it ends. "
            "Continue the run, or give another one"
        )
    return folder


def engine_options(run: RecordedRun) -> dict[str, Any]:
    """Return the options of the engine that a run trained with."""
    algorithm = cast("dict[str, Any]", run.record.config.get("algorithm") or {})
    backend: Any = cast("dict[str, Any]", algorithm.get("options") or {}).get("backend")
    return cast("dict[str, Any]", backend) if isinstance(backend, dict) else {}


def newest_run(*, with_model: bool = True) -> RecordedRun | None:
    """Return the run under `.leyden/` that was started last and is neither an evaluation nor a replay.

    with_model: leave out runs without a trained model.
    """
    from leyden.training.runs import list_runs

    for run in list_runs():
        has_model = run.directory is not None and (run.directory / "model").is_dir()
        if run.record.kind not in ("eval", "replay") and (has_model or not with_model):
            return run
    return None


def _run_of(address: str) -> RecordedRun | None:
    """Return the run that a path or name stands for, or whose trained model it is; None for any other.

    Raise ConfigError for the beginning of a run's name, which could as well be a name of the hub.
    """
    from leyden.training.runs import list_runs, open_run
    from leyden.training.runs.folder import MANIFEST, RUNS
    from leyden.training.runs.recorded_runs import names_of

    path = Path(address)
    if path.is_dir():
        folder = next((each for each in (path, path.absolute().parent) if (each / MANIFEST).is_file()), None)
        return None if folder is None else open_run(folder)
    if path.name != address or path.is_file():
        return None
    if address == "latest":
        return newest_run() or open_run(address)
    names = [name for run in list_runs() for name in names_of(run) if name.startswith(address)]
    if address in names or (RUNS / address / MANIFEST).is_file():
        return open_run(address)
    if names:
        raise ConfigError(
            f"{address!r} is no run, and the beginning of {names[0]!r}; write the whole name, or a folder"
        )
    return None
