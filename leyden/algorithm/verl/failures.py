"""Explain why a run of verl's trainer has failed: find the process of Ray that failed, its reason, and the last lines
of its log.

The module knows Ray's errors and where Ray keeps the logs of its processes, no trainer and no configuration. For
another kind of Ray's errors, add a branch to `_process_of`.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from leyden._lib.text import describe_error, error_line
from leyden.errors import ConfigError, EngineError

_LAST_LINES = 20
"""How many lines of a log or a traceback a message shows."""
_PING_SECONDS = 5.0
"""How long a server may take to respond. One that takes longer is busy, not dead."""
_UNNAMED = "a process of Ray"
"""The name of a process in a message if Ray does not say which one it is."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"ray::(?P<name>\S+?)\(\) \(pid=(?P<pid>\d+), ip=(?P<ip>[^,)]+)")
"""The line that Ray puts before a remote traceback."""
_FACT = re.compile(r"^\s*(?P<fact>class_name|actor_id|pid|name|namespace|ip): (?P<value>.+)$", re.MULTILINE)
"""A line about an actor in Ray's message about its death."""


@dataclass(frozen=True, slots=True)
class _Process:
    """A process of Ray that failed."""

    name: str
    pid: int | None
    ip: str | None
    """The address of its machine; None if Ray does not say it."""
    reason: str
    """How it failed, as the end of a sentence about it."""
    traceback: Sequence[str] = ()
    """The lines of the traceback of an error that it raised; empty for a process that died."""


@contextmanager
def explained(
    logs: Path | None, servers: Callable[[], Sequence[Any]], step: Callable[[], int | None]
) -> Generator[None]:
    """Raise an EngineError, with the reason and the last lines of the log, if a process of Ray fails within the block.

    Another error leaves the block unchanged, unless a server has died meanwhile: then the EngineError names that death
    as its cause.

    logs: the folder in which Ray keeps the logs of this machine's processes; None if it is unknown.
    servers: returns the actors that sample.
    step: returns the trainer's step; None before the first one.
    """
    try:
        yield
    except ConfigError:
        raise
    except RayError as error:
        raise EngineError(f"verl failed{_in(step())}: {_describe(error, logs)}") from error
    except Exception as error:
        if (death := _first_death(servers())) is None:
            raise
        text = error_line(error)
        raise EngineError(f"verl failed{_in(step())}, because {_describe(death, logs)}\nIt led to {text}") from error


def _in(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def _first_death(servers: Sequence[Any]) -> RayActorError | None:
    for server in servers:
        try:
            ray.get(server.__ray_ready__.remote(), timeout=_PING_SECONDS)
        except RayActorError as error:
            return error
        except GetTimeoutError:
            continue
    return None


def _describe(error: RayError, logs: Path | None) -> str:
    process = _process_of(error)
    lines, source = (process.traceback, "traceback") if process.traceback else (_log_of(process, logs), "log")
    where = f" (pid {process.pid} on {process.ip})" if process.pid else ""
    last = "\n".join(lines[-_LAST_LINES:]) or (
        "(Ray does not say which process it was; look at the logs in Ray's session folder)"
        if process.pid is None
        else f"(none here; look for worker-*-{process.pid}.err in Ray's session folder on {process.ip})"
    )
    return f"{process.name}{where} {process.reason}; the last lines of its {source}:\n{last}"


def _process_of(error: RayError) -> _Process:
    """Name, pid and address are parsed from Ray's message, because the errors have no fields for them."""
    text = _COLOUR.sub("", describe_error(error))
    if isinstance(error, RayTaskError):
        return _raised(text, error_line(error.cause))
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return _raised(text, text.rstrip().rpartition("\n")[2])
    if isinstance(error, RayActorError):
        facts = {found["fact"]: found["value"] for found in _FACT.finditer(text)}
        reason = " ".join(_FACT.sub("", text).split())
        pid = int(facts["pid"]) if "pid" in facts else None
        return _Process(facts.get("class_name", _UNNAMED), pid, facts.get("ip"), f"died: {reason}")
    return _Process(_UNNAMED, None, None, f"failed: {type(error).__name__}: {text}")


def _raised(text: str, what: str) -> _Process:
    lines = text.splitlines()
    if (found := _RAISED.search(text)) is None:
        return _Process(_UNNAMED, None, None, f"raised {what}", lines)
    return _Process(found["name"], int(found["pid"]), found["ip"], f"raised {what}", lines)


def _log_of(process: _Process, logs: Path | None) -> list[str]:
    if logs is None or process.pid is None or process.ip != ray.util.get_node_ip_address():
        return []
    files = [file for end in ("out", "err") for file in sorted(logs.glob(f"worker-*-{process.pid}.{end}"))]
    lines = [line for file in files for line in _last_lines(file)]
    return [line for line in lines if line and not line.startswith(":")]  # Ray's own marks


def _last_lines(file: Path) -> list[str]:
    with file.open(errors="replace") as lines:
        return [_COLOUR.sub("", line).rstrip() for line in deque(lines, maxlen=2 * _LAST_LINES)]
