"""`Steering`: lets a run that works do what people ask of it in its `control.jsonl` (`leyden stop`, `pause`, `set`).

A run answers between two steps, when all of a step is in its checkpoint. An answer is on the disk before it takes
effect, with the number of finished steps, so a process that continues the run from an earlier checkpoint applies the
change again at the same step, and its result equals that of a run without a kill. Meanwhile the run's heartbeat calls
`look`, which costs one system call while nothing was asked: it stops the run at once, refuses what cannot be done, and
wakes a run that is paused.

The module knows no algorithm and no vessel. What may change is a `Steerable`.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, cast

from leyden._lib.json import is_object
from leyden._lib.logs import notice
from leyden._lib.options import check_number, nearest
from leyden.errors import ConfigError, LeydenError
from leyden.training import Callback, TrainLoop, Vessel
from leyden.training.callbacks import HookResult
from leyden.training.live_view import RunPause
from leyden.training.runs.control import AFTER_STEP, ControlFile, ControlLine, in_words, pause_in_force
from leyden.training.runs.folder import read_manifest

logger = logging.getLogger(__name__)

_WAIT: Final = object()
"""What a boundary yields while the run is paused."""
_COMMANDS = ("stop", "pause", "resume", "extend", "set")


class Steerable(Protocol):
    """Options of a run that may change while it works. A path names its section: `algorithm.optim.learning_rate`."""

    @property
    def steps_path(self) -> str:
        """The path of the number of steps, which is None if something else ends the run."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return the options that may change, and the number of steps, with their values now."""
        ...

    def full_path(self, path: str) -> str:
        """Return a path with its section."""
        ...

    def why_fixed(self, path: str) -> str | None:
        """Return why an option may not change; None if there is no such option."""
        ...

    def checked(self, path: str, value: Any) -> Any:
        """Return a value as the option has it, which a file of `leyden run` would give it. Raise ConfigError or another
        LeydenError for a value that it cannot have.
        """
        ...

    def change(self, path: str, value: Any, n_finished: int) -> HookResult:
        """Set an option to a value that was checked. The next step is number `n_finished`, counted from 0."""
        ...

    def reset(self) -> None:
        """Set all options back to the values with which the program made them."""
        ...


class Steering:
    """Answers the requests of one run, from `begin` to `end`.

    directory: the run's folder.
    target: what may change; a text is the reason why the run can only be stopped.
    stop: ends the run as Ctrl-C does. Called from any thread.
    is_async: whether the run's loop awaits hooks.
    """

    def __init__(
        self, directory: Path, target: Steerable | str, *, stop: Callable[[], None], is_async: bool = True
    ) -> None:
        self._file = ControlFile(directory)
        self._target, self._stop, self._is_async = target, stop, is_async
        self._lock = threading.RLock()
        """Held while requests are read and answered: by the boundary and by the heartbeat's thread."""
        self._pending: dict[str, ControlLine] = {}
        """Requests without an answer, by id."""
        self._answers: dict[str, ControlLine] = {}
        """By the request's id, in the order of the file."""
        self._due: list[ControlLine] = []
        """Changes that an earlier process of the run made at a step that this one has not reached."""
        self._paused: ControlLine | None = None
        self.pause = RunPause()
        """What views of the run show of a pause."""
        self._woken = threading.Event()
        self._wake_loop: Callable[[], object] = self._woken.set
        self._could_read = self._could_write = True
        self.stopped: str | None = None
        """Who has stopped the run; None if nobody has."""

    # ---- the run's beginning and end -------------------------------------------------------------

    def begin(self) -> None:
        """Read the history of an earlier process of the run. Requests that it did not answer stand, except a stop."""
        self._read()
        self._paused = pause_in_force([*self._answers.values()])
        if self._paused is not None:
            record = read_manifest(self._file.path.parent).record
            ended = record.end_time or record.last_heartbeat_time or self._paused.time
            self._paused = self._paused.answer("done", value=max(0.0, ended - self._paused.time))
            self._record(self._paused)
        for line in [each for each in self._pending.values() if each.command == "stop"]:
            self._record(line.answer("refused", reason="the process ended before it answered"))

    def restart(self) -> None:
        """Prepare for an algorithm that begins, at first or after a failure: its changes are due again."""
        if isinstance(self._target, str):
            return
        self._target.reset()
        self._due = []
        for line in self._answers.values():
            if line.state == "done" and line.command in ("set", "extend") and line.iteration is not None:
                # A later request was made with the earlier one in force or repeated, so it wins from its step on.
                keep = [each for each in self._due if each.path != line.path or (each.iteration or 0) < line.iteration]
                self._due = [*keep, line]
        now = self._target.settings()
        for path in dict.fromkeys(str(line.path) for line in self._due if line.command == "set"):
            first = next(line for line in self._answers.values() if line.path == path and line.state == "done")
            if path in now and now[path] != first.before:
                logger.warning(
                    "the program gives %s=%r, and the run's history has other values, which hold: `leyden show` lists them, and "
                    "`leyden set` changes them",
                    path,
                    now[path],
                )

    def end(self, status: str) -> None:
        """Refuse the requests that are left, and set the options back. The run's end is recorded already, so no new
        request comes after this.
        """
        with self._lock:
            self._read()
            for line in list(self._pending.values()):
                self._record(line.answer("refused", reason=f"the run has ended ({status})"))
        if not isinstance(self._target, str):
            self._target.reset()

    def wake(self) -> None:
        """Let a paused run look whether it was stopped. Safe in any thread and in a signal handler."""
        self._wake_loop()

    def look(self) -> None:
        """Read new requests. Answer those that need no boundary, and wake a paused run. Called by the heartbeat."""
        if not self._file.has_grown() and not (self._pending and self._paused):
            return
        with self._lock:
            self._read()
            for line in list(self._pending.values()):
                if line.command == "stop" and (line.value != AFTER_STEP or isinstance(self._target, str)):
                    self._stop_now(line, None)
                elif (reason := self._refusal(line)) is not None:
                    self._record(line.answer("refused", reason=reason))
        self.wake()

    # ---- between two steps -----------------------------------------------------------------------

    def boundary(self, n_finished: int, goes_on: Callable[[], bool]) -> HookResult:
        """Apply what is due and what was asked, and wait while the run is paused.

        n_finished: the number of finished steps.
        goes_on: returns whether another step follows.
        """
        work = self._answer_all(n_finished, goes_on)
        if self._is_async:
            return self._follow(work)
        for waits in work:
            if waits is _WAIT:
                self._woken.wait()
                self._woken.clear()
        return None

    async def _follow(self, work: Iterator[object]) -> None:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(woken.set)

        self._wake_loop = wake
        for each in work:
            if each is _WAIT:
                await woken.wait()
                woken.clear()
            elif each is not None:
                await cast("Any", each)
        if self.stopped is not None:
            await asyncio.Event().wait()  # the cancellation is on its way

    def _answer_all(self, n_finished: int, goes_on: Callable[[], bool]) -> Iterator[object]:
        """Yield the results of changes, and `_WAIT` while the run is paused."""
        target = self._target
        assert not isinstance(target, str)
        due = [line for line in self._due if (line.iteration or 0) <= n_finished]
        self._due = [line for line in self._due if line not in due]
        for line in due:
            logger.info("again: %s, which %s asked", in_words(line), line.by)
            yield target.change(str(line.path), self._again(target, line), n_finished)
        if self._paused is not None:
            self._say_paused(self._paused)
        while True:
            with self._lock:
                if self._file.has_grown():
                    self._read()
                # Extensions first, because they decide whether another step follows.
                requests = sorted(self._pending.values(), key=lambda line: line.command != "extend")
                results = [self._answer(target, line, n_finished, goes_on) for line in requests]
            yield from results
            if self._paused is None or self.stopped is not None or not goes_on():
                return
            yield _WAIT

    def _again(self, target: Steerable, line: ControlLine) -> Any:
        now = target.settings().get(str(line.path)) if line.command == "extend" else None
        return line.value if now is None else max(now, line.value)

    def _answer(self, target: Steerable, line: ControlLine, n_finished: int, goes_on: Callable[[], bool]) -> HookResult:
        if (reason := self._refusal(line)) is None and line.command in ("set", "pause") and not goes_on():
            reason = "the run has done its last step; `leyden extend` in time would have let it go on"
        if reason is not None:
            self._record(line.answer("refused", reason=reason))
        elif line.command == "stop":
            self._stop_now(line, n_finished)
        elif line.command == "pause":
            answer = line.answer("done", iteration=n_finished)
            if self._record(answer):
                self._paused = answer
                self._say_paused(answer)
        elif line.command == "resume":
            if self._record(line.answer("done", iteration=n_finished)):
                self._paused, self.pause.texts, self.pause.ended_at = None, (), time.monotonic()
        else:
            path, value, before = self._wanted(target, line)
            done = line.answer("done", path=path, value=value, before=before, iteration=n_finished)
            if self._record(done):
                self._due = [each for each in self._due if each.path != path or line.command == "extend"]
                return target.change(path, value, n_finished)
        return None

    def _wanted(self, target: Steerable, line: ControlLine) -> tuple[str, Any, Any]:
        """Return the path, the new value and the present one of a `set` or an `extend`. Raise LeydenError for a value
        that is not possible.
        """
        settings = target.settings()
        if line.command == "set":
            path = target.full_path(line.path or "")
            if path == target.steps_path:
                raise ConfigError(f"{path} is the run's length; `leyden extend RUN --to N` raises it")
            if path not in settings:
                short = {each.split(".", 1)[1]: each for each in settings if each != target.steps_path}
                why = target.why_fixed(path)
                hint = nearest(path.split(".", 1)[-1], short) if why is None else f"possible: {', '.join(short)}"
                raise ConfigError(
                    f"{line.path} {'is no option of this run' if why is None else f'cannot change while the run works: {why}'}; {hint}"
                )
            return path, target.checked(path, line.value), settings[path]
        path = target.steps_path
        now = settings.get(path)
        name, number = next(iter(line.value.items())) if is_object(line.value) and line.value else ("to", line.value)
        check_number(f"--{name}", number, at_least=1, whole=True)
        if now is None:
            raise ConfigError("the run has no number of steps to extend; something else ends it")
        length = max([now, *(each.value for each in self._due if each.command == "extend")])
        wanted = number if name == "to" else length + number
        if wanted <= length:
            raise ConfigError(f"{path} is {length:,} already, and an extension only raises it")
        return path, target.checked(path, wanted), now

    def _refusal(self, line: ControlLine) -> str | None:
        """Return why a request cannot be done, as far as that is known before the boundary."""
        if line.command not in _COMMANDS:
            return f"this version of Leyden does not know the command {line.command!r}"
        if line.command == "stop":
            return None
        if isinstance(self._target, str):
            return self._target
        if line.command in ("pause", "resume"):
            is_paused = self._paused is not None
            for each in self._pending.values():
                if each.id == line.id:
                    break
                is_paused = {"pause": True, "resume": False}.get(each.command, is_paused)
            if is_paused == (line.command == "pause"):
                return "the run is paused already" if is_paused else "the run is not paused"
        try:
            if line.command in ("set", "extend"):
                self._wanted(self._target, line)
        except LeydenError as error:
            return str(error)
        return None

    def _stop_now(self, line: ControlLine, n_finished: int | None) -> None:
        self._record(line.answer("done", iteration=n_finished))
        self._pending.pop(line.id, None)  # also on a full disk: the run has to end
        if self.stopped is None:
            self.stopped = f"stopped by {line.by}"
            self._stop()

    def _say_paused(self, paused: ControlLine) -> None:
        command = f"leyden resume {shlex.quote(str(self._file.path.parent))}"
        self.pause.texts = f"{in_words(paused)} by {paused.by}", command
        notice(
            logger, "the run is paused after step %s, by %s; `%s` continues it", paused.iteration, paused.by, command
        )

    def _read(self) -> None:
        try:
            lines = self._file.read_new()
        except OSError as error:
            if self._could_read:
                logger.error(
                    "%s cannot be read (%s), so nothing can be asked of the run", self._file.path, error.strerror
                )
            self._could_read = False
            return
        self._could_read = True
        for line in lines:
            if line.state != "asked":
                self._answers[line.id] = line
                self._pending.pop(line.id, None)
            elif line.id not in self._answers:
                self._pending.setdefault(line.id, line)

    def _record(self, answer: ControlLine) -> bool:
        """Write an answer. Return whether that was possible; else the request stands, and nothing may change."""
        try:
            self._file.append([answer])
        except OSError as error:
            if self._could_write:
                logger.error(
                    "%s cannot be written (%s), so the run does not do what %s asked (%s) until it can; is the disk full?",
                    self._file.path,
                    error.strerror,
                    answer.by,
                    answer.command,
                )
            self._could_write = False
            return False
        self._could_write = True
        self._answers[answer.id] = answer
        self._pending.pop(answer.id, None)
        if answer.state == "done" and answer.command not in ("pause", "stop"):
            notice(logger, "%s, by %s", in_words(answer), answer.by)
        elif answer.state == "refused":
            logger.info("%s (asked by %s)", in_words(answer), answer.by)
        return True


def steering_callbacks(steering: Steering) -> tuple[Callback, Callback]:
    """Return the callbacks that let a run's own `TrainLoop` answer."""
    return _Beginning(steering), _Boundary(steering)


class _Beginning(Callback):
    """Answers before the first step, when the loop's counters are restored and no other callback has begun."""

    runs_last: ClassVar[int] = -1

    def __init__(self, steering: Steering) -> None:
        self._steering = steering

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        return self._steering.boundary(loop.current_iter, lambda: loop.goes_on)


class _Boundary(Callback):
    """Answers after each step, when its checkpoint is saved."""

    runs_last: ClassVar[int] = 2

    def __init__(self, steering: Steering) -> None:
        self._steering = steering

    def on_iter_end(self, loop: TrainLoop, vessel: Vessel) -> HookResult:
        return self._steering.boundary(loop.current_iter, lambda: loop.goes_on)
