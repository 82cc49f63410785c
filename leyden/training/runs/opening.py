"""Begin a run in a folder, or continue one: find its folder, and check that the configuration fits the run."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from leyden._lib.atomic import private_directory
from leyden._lib.json import object_or_empty
from leyden.errors import ConfigError
from leyden.training.runs.folder import (
    CONTROL,
    MANIFEST,
    RUNS,
    Manifest,
    name_of,
    read_manifest,
    remove_if_nothing_started,
)
from leyden.training.runs.recorded_runs import list_runs
from leyden.training.runs.run_code import code_changes
from leyden.training.runs.run_description import NOT_DEFAULT
from leyden.types.run_record import RunRecord

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 80
_MAY_DIFFER = (
    *("strategy", "strategy_options", "adapter", "tracer", "n_runners", "concurrency", "max_rollouts"),
    *("versions", "git", "argv", "program", "command", "cwd", "store", "start", "spending", NOT_DEFAULT),
)
"""Parts of the configuration that may differ from one process of a run to the next without a warning."""
NEVER_STARTED = "never_started"
"""The entry in the configuration of a run that failed before its first rollout. A new run may take its folder."""
PAUSED_SECONDS = "paused_seconds"
"""The entry of a resumed run's configuration with the seconds in which no process worked on it."""
EARLIER_CODE = "earlier_code"
"""The entry of a resumed run's configuration with the digests of other code with which it began."""


def new_manifest(*, kind: str, name: str, config: dict[str, Any]) -> Manifest:
    """Return the manifest of a run that begins now."""
    record = RunRecord(run_id=secrets.token_hex(6), name=name, kind=kind, start_time=time.time(), config=config)
    return Manifest(record)


def begin_run(
    directory: Path | None, *, resume: bool = False, kind: str = "fit", name: str | None = None, config: dict[str, Any]
) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a new run, or with `resume` of the run to continue.

    directory: None makes a new folder under `.leyden/`. With `resume` it takes the newest run there that this program
        started with this algorithm.
    kind: the kind of work, as in `RunRecord`.
    name: None takes the folder's name, or keeps the name of a run that is resumed.
    config: the configuration of this start.

    The folder of a new run exists afterwards; `run.json` is written when its recorder opens. If the data or the options
    of a resumed run have changed, the changes are logged. Raise ConfigError for a folder that holds a run already, for
    a run to resume that is missing, and for a run of another algorithm or model.
    """
    if resume:
        return _resumed(_newest(config, kind) if directory is None else directory, name, config)
    directory = directory or RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if (directory / MANIFEST).exists() and read_manifest(directory).record.config.get(NEVER_STARTED):
        remove_if_nothing_started(directory)
    if (directory / MANIFEST).exists():
        raise ConfigError(
            f"{directory} holds a run already; pass resume=True to continue it, or choose another run_dir"
        )
    if in_the_way := [name for name in ("model", "model-last", "best") if (directory / name).exists()]:
        raise ConfigError(
            f"{directory} has {' and '.join(in_the_way)}, over which the run would write; choose another run_dir, or "
            f"move {'it' if len(in_the_way) == 1 else 'them'} away"
        )
    try:
        private_directory(directory)
        (directory / CONTROL).unlink(missing_ok=True)  # of a run whose run.json was removed
    except OSError as error:
        raise ConfigError(f"cannot keep a run in {directory}: {error}; choose another run_dir") from error
    return directory, new_manifest(kind=kind, name=name or name_of(directory), config=config)


def _resumed(directory: Path, name: str | None, config: dict[str, Any]) -> tuple[Path, Manifest]:
    """Return the folder and the manifest of a run that goes on with this configuration."""
    if not (directory / MANIFEST).exists():
        raise ConfigError(
            f"{directory} holds no run to resume ({MANIFEST} is missing); leave out resume=True to begin one"
        )
    manifest = read_manifest(directory)
    before = manifest.record
    earlier = before.config.get(EARLIER_CODE, [])
    if _compare(directory, before.config, config):
        earlier = [*earlier, before.config["code"]["digest"]]
    last_worked = before.end_time or before.last_heartbeat_time or time.time()  # a killed run has no end
    paused = before.config.get(PAUSED_SECONDS, 0.0) + max(0.0, time.time() - last_worked)
    config = {**config, PAUSED_SECONDS: paused, **({EARLIER_CODE: earlier} if earlier else {})}
    record = before.model_copy(update={"config": config, "name": name or before.name})
    return directory, Manifest(record, manifest.options)


def _newest(config: Mapping[str, Any], kind: str) -> Path:
    """Return the folder of the newest run that this program started with this algorithm.

    A run of an earlier format names neither, and counts as one of them. Raise ConfigError if there is none.
    """
    runs = [run for run in list_runs() if run.record.kind == kind and not run.record.config.get(NEVER_STARTED)]
    if not runs:
        raise ConfigError(f"there is no run to resume in {RUNS.resolve()}; give run_dir=, or start one without resume")
    for run in runs:
        recorded = run.record.config
        if not recorded or (
            _same_algorithm(_algorithm(recorded), _algorithm(config))
            and recorded.get("program") == config.get("program")
        ):
            assert run.directory is not None
            return run.directory
    newest = runs[0].record.config
    raise ConfigError(
        f"the newest run, {runs[0].directory}, was started by {_program(newest)} with {_algorithm(newest)}, and no run in "
        f"{RUNS.resolve()} by {_program(config)} with {_algorithm(config)}; give run_dir= to continue a certain run"
    )


def _program(config: Mapping[str, Any]) -> str:
    return config.get("program") or "an interactive session"


def _algorithm(config: Mapping[str, Any]) -> str | None:
    return object_or_empty(config.get("algorithm")).get("name")


def _same_algorithm(one: str | None, other: str | None) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return "__main__" in (one.split(".")[0], other.split(".")[0]) and one.split(".")[-1] == other.split(".")[-1]


def _compare(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Raise ConfigError if a run is resumed with another algorithm or model. Log other differences. Return whether its
    code differs.
    """
    if not before:  # an earlier format
        return False
    recorded, given = _algorithm(before), _algorithm(now)
    if not _same_algorithm(recorded, given):
        raise ConfigError(
            f"the run in {directory} was started with the algorithm {recorded}, not with {given}; resume it with its own "
            "algorithm, or start a new run without resume"
        )
    model, other = before.get("model"), now.get("model")
    identity = "digest" if model and other and model.get("digest") and other.get("digest") else "name"
    if model and other and model[identity] != other[identity]:
        raise ConfigError(
            f"the run in {directory} trains the model {model['name']}{_digest(model)}, not {other['name']}{_digest(other)}; "
            "resume it with its own model, or start a new run without resume"
        )
    changes = differences(object_or_empty(before.get("data")), object_or_empty(now.get("data")))
    changes += differences(
        object_or_empty(before.get("algorithm")).get("options"), object_or_empty(now.get("algorithm")).get("options")
    )
    if changes:
        logger.warning("the run in %s goes on with other settings than before: %s", directory, "; ".join(changes))
    if edits := code_changes(before.get("code"), now.get("code")):
        logger.warning("the run in %s goes on with other code than before: %s", directory, ", ".join(edits))
    if others := [name for name in _MAY_DIFFER if before.get(name) != now.get(name)]:
        logger.info("the run in %s goes on with another %s than before", directory, ", ".join(others))
    return bool(edits)


def _digest(model: Mapping[str, Any]) -> str:
    return f" ({model['digest']})" if model.get("digest") else ""


def differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return one line for each difference of two JSON values, in the form `NAME BEFORE -> NOW`.

    prefix: the names of the mappings around the two values, each with a dot.
    """
    if before == now:
        return []
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", now)
        names = dict.fromkeys([*old, *new])
        return [change for each in names for change in differences(old.get(each), new.get(each), f"{prefix}{each}.")]
    return [f"{prefix.rstrip('.')} {_shown(before)} -> {_shown(now)}"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
