"""`control.jsonl` in a run's folder: what people asked of a run while it worked, and what the run answered.

Each request and each answer is one line of JSON. Lines are appended under a lock of the file and are on the disk when
the writer returns, so the file is the history of the run's control, in the order in which it happened. The module knows
no run that works: `steering.py` answers. A line that cannot be read is skipped, and named.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from leyden._lib.atomic import append_locked
from leyden._lib.json import json_line
from leyden.errors import ConfigError
from leyden.training.runs.folder import CONTROL, Manifest, read_manifest
from leyden.training.runs.start import how_to_continue, short_path

logger = logging.getLogger(__name__)

AFTER_STEP = "after-step"
"""The value of a `stop` that waits for the end of the step under way."""
_MAX_LINE = 100_000
"""Bytes of one line; a request with more is refused."""


@dataclass(frozen=True, slots=True)
class ControlLine:
    """A request, or the run's answer to it."""

    id: str
    """The request's id, which its answer repeats."""
    time: float
    by: str
    """The person who asked."""
    command: str
    """`stop`, `pause`, `resume`, `extend` or `set`."""
    state: Literal["asked", "done", "refused"] = "asked"
    path: str | None = None
    """The option that `set` and `extend` change."""
    value: Any = None
    before: Any = None
    """The value that the option had."""
    iteration: int | None = None
    """The number of finished steps when the answer took effect."""
    reason: str | None = None
    """Why the run refused."""

    def answer(self, state: Literal["done", "refused"], **changes: Any) -> ControlLine:
        """Return the run's answer to this request."""
        return replace(self, state=state, time=time.time(), **changes)


class ControlFile:
    """Reads a run's `control.jsonl` line by line as it grows. A missing file has no lines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CONTROL
        self._read_bytes = self._seen_bytes = self._n_lines = 0

    def has_grown(self) -> bool:
        """Return whether the file has another size than when it was read. Costs one system call."""
        try:
            return self.path.stat().st_size != self._seen_bytes
        except OSError:
            return False

    def read_new(self) -> list[ControlLine]:
        """Return the lines that were completed since the last call. Raise OSError if the file cannot be read."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        if len(content) < self._read_bytes:  # cut or replaced by someone; ids tell what is known
            self._read_bytes = self._n_lines = 0
        self._seen_bytes = len(content)
        new = content[self._read_bytes : content.rfind(b"\n") + 1]  # what follows is not written yet, or cut by a kill
        self._read_bytes += len(new)
        lines: list[ControlLine] = []
        for each in new.splitlines():
            self._n_lines += 1
            try:
                lines.append(_line_of(json.loads(each)))
            except (ValueError, TypeError, RecursionError) as error:
                logger.warning("line %d of %s is damaged and skipped: %s", self._n_lines, self.path, error)
        return lines

    def append(self, lines: Sequence[ControlLine], *, check: Callable[[], None] | None = None) -> None:
        """Append lines and wait until the disk has them. Raise OSError, and change nothing, if that is not possible.

        check: called while the file is locked, before it is changed; it may raise.
        """

        def written() -> str:
            if check is not None:
                check()
            return "".join(json_line(asdict(line)) for line in lines)

        append_locked(self.path, written)


def read_control(directory: Path) -> list[ControlLine]:
    """Return the history of a run's control; empty if there is none. Raise ConfigError if it cannot be read."""
    file = ControlFile(directory)
    try:
        return file.read_new()
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {error.strerror}") from error


def ask(directory: Path, command: str, *, by: str, path: str | None = None, value: Any = None) -> ControlLine:
    """Ask something of a run that works in this folder, on this machine. Return the request, which `answer_to` finds.

    by: the person who asks.
    Raise ConfigError for a run that has ended, for one on another machine, and for a file that cannot be written.
    """
    line = ControlLine(secrets.token_hex(6), time.time(), by, command, path=path, value=value)
    if len(json_line(asdict(line))) > _MAX_LINE:
        raise ConfigError(f"the value of {path} has more than {_MAX_LINE:,} bytes; give it in a file of a new run")
    file = ControlFile(directory)
    try:
        file.append([line], check=lambda: _require_working(directory, read_manifest(directory), command))
    except OSError as error:
        raise ConfigError(
            f"{file.path} cannot be written: {error.strerror}; nothing was asked of the run. Ask as the user who started it, and "
            "with room on the disk"
        ) from error
    return line


def answer_to(request: ControlLine, lines: Sequence[ControlLine]) -> ControlLine | None:
    """Return the answer to a request; None if there is none yet."""
    return next((line for line in lines if line.id == request.id and line.state != "asked"), None)


def in_words(line: ControlLine) -> str:
    """Return what a line says, such as `optim.learning_rate 0.0001 -> 0.0003 from step 13`."""
    path = short_path(line.path or "")
    if line.state == "asked":
        given = "" if line.command != "set" else f" {path} = {shown(line.value)}"
        return f"{line.command}{given}, asked and not answered yet"
    if line.state == "refused":
        return f"{line.command}{f' {path}' if path else ''} refused: {line.reason}"
    at = line.iteration or 0
    if line.command == "set":
        return f"{path} {shown(line.before)} -> {shown(line.value)} from step {at + 1:,}"
    if line.command == "extend":
        return f"{path} {shown(line.before)} -> {shown(line.value)}"
    if line.command == "pause":
        return f"{'' if line.value is None else 'still '}paused after step {at:,}"
    if line.command == "resume":
        return f"resumed with step {at + 1:,}"
    return "stopped" if line.iteration is None else f"stopped after step {at:,}"


def shown(value: Any) -> str:
    """Return a value as JSON, with all of its digits."""
    return json.dumps(value, ensure_ascii=False, default=str)


def pause_in_force(lines: Sequence[ControlLine]) -> ControlLine | None:
    """Return the answered `pause` that no later `resume` or `stop` has ended; None if the run is not paused."""
    last = None
    for line in lines:
        if line.state == "done" and line.command in ("pause", "resume", "stop"):
            last = line
    return last if last is not None and last.command == "pause" else None


def paused_seconds(lines: Sequence[ControlLine], until: float) -> float:
    """Return how long the run was paused in all.

    until: the time at which a pause that is in force is counted, in Unix seconds.
    """
    total, since = 0.0, None
    for line in lines:
        if line.state != "done" or line.command not in ("pause", "resume", "stop"):
            continue
        if line.command == "pause":  # its value: the seconds in a process before
            since, total = line.time, total + (line.value if isinstance(line.value, int | float) else 0.0)
        elif since is not None:
            total, since = total + max(0.0, line.time - since), None
    return total + (0.0 if since is None else max(0.0, until - since))


def _line_of(read: Any) -> ControlLine:
    if not isinstance(read, dict):
        raise TypeError("it is no JSON object")
    content = cast("dict[str, Any]", read)
    line = ControlLine(**{each.name: content[each.name] for each in fields(ControlLine) if each.name in content})
    texts = (line.id, line.by, line.command)
    if not all(isinstance(each, str) for each in texts) or line.state not in ("asked", "done", "refused"):
        raise TypeError("id, by, command or state is missing or has a wrong type")
    if type(line.time) not in (int, float) or not isinstance(line.path, str | None):
        raise TypeError("time or path has a wrong type")
    if line.iteration is not None and type(line.iteration) is not int:
        raise TypeError("iteration is no whole number")
    return line


def _require_working(directory: Path, manifest: Manifest, command: str) -> None:
    """Raise ConfigError unless a process of this machine works on the run."""
    name, state = manifest.record.name, manifest.state
    again = f"Continue it with {how_to_continue(manifest.record.config.get('start'), directory)}"
    if state == "crashed":
        raise ConfigError(f"the process of run {name!r} is gone, so nothing can be asked of it. {again}")
    if state != "running":
        rest = "" if command == "stop" or state == "succeeded" else f". {again}"
        if command == "set":
            rest = f"; for a new run with this option, leyden run --from {directory} --set ..."
        raise ConfigError(f"run {name!r} has ended ({state}); {command} is for a run that works{rest}")
    if manifest.host != socket.gethostname():
        raise ConfigError(
            f"run {name!r} works on {manifest.host}, and this is {socket.gethostname()}; give the command there, because a lock "
            "of the folder does not hold across machines"
        )
