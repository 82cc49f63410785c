"""`TrainLoop`: the order of stages, hooks and counters, for every vessel, synchronous or not.

The loop trains a `Vessel` and does no I/O itself; callbacks and writers save, print and plot. Its order is written
once, as a generator that yields each result of a hook or of the vessel. `run` and `arun` drive this generator; `arun`
awaits results that are awaitable (as httpx does in `_auth.py`).

    on_fit_start
      [on_validate_start .. on_validate_end]   validate_first, or a validation that a stop left due
      on_iter_start
        on_train_start     vessel.step; count; write the row     on_train_end
        on_validate_start  vessel.validate; write the row        on_validate_end
                                                                 every val_every_n_iters
      on_iter_end                              Checkpoint saves here, after all others
    on_fit_end                                 on_exception instead, when anything raised

A step is *finished* when its checkpoint exists. Resuming from a checkpoint undoes everything that happened after the
checkpoint (a step, rows, a validation): counters, callbacks, writers and random states go back together.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from leyden._lib.options import NamedOptions, check_number, check_several
from leyden.errors import CheckpointError, ConfigError, InvalidMetrics, LeydenError
from leyden.training.callbacks import Callback, Progress
from leyden.training.metrics import Metrics, MetricsRow, MetricValue, Stage, clean_metrics
from leyden.training.rng import capture_rng, restore_rng
from leyden.training.writers import LogWriter

logger = logging.getLogger(__name__)

Flow: TypeAlias = Generator[object, Any, None]
"""A generator that yields results of hooks and vessel. The driver awaits a result if it must, and sends the value back,
or throws the error in."""

Stateful = TypeVar("Stateful", Callback, LogWriter)


class Vessel(Protocol):
    """A thing to train. Each method may be a coroutine function if `arun` drives the loop.

    To be saved, a vessel needs one of two pairs of methods:
    - `save(path)`, which writes all that the next step depends on into the empty directory `path`,
      and `load(path)`;
    - `state_dict()` and `load_state_dict(state)`, for a state as `state_files.py` describes.
    """

    def step(self, iteration: int, /) -> Any:
        """Do training step `iteration`, counted from 0. Return its metrics (`Metrics` or None)."""
        ...

    def validate(self, iteration: int, /) -> Any:
        """Measure the policy after `iteration` steps without changing it, and return the metrics."""
        ...


class Resumable(Protocol):
    """A checkpoint to continue from, such as `SavedCheckpoint` and `SavedFile`."""

    @property
    def state(self) -> dict[str, Any]:
        """The value that `TrainLoop.run_state` returned."""
        ...

    @property
    def callbacks_path(self) -> Path | None:
        """The directory of the files that callbacks saved. It may be missing."""
        ...

    def restore(self, vessel: Any, /) -> Any:
        """Restore the vessel's state. Return an awaitable if the vessel's `load` is async."""
        ...


class TrainLoop(NamedOptions):
    """One run of training. A TrainLoop runs once; its subclass `leyden.rl.Trainer` starts again with each fit.

    max_iters: iterations in all, including those before a resume, so a finished run continues if the number is larger
        than before. None: until `stop` is called.
    val_every_n_iters: validate after every n-th iteration; None: never.
    validate_first: also validate before the first step.
    callbacks: called in this order, except that those with a greater `runs_last` come later.
    writers: get a row for each stage.
    Raise ConfigError for a number out of range, an object that is no callback or writer, and two writers of one file.
    """

    def __init__(
        self,
        *,
        max_iters: int | None,
        val_every_n_iters: int | None = None,
        validate_first: bool = False,
        callbacks: Sequence[Callback] = (),
        writers: Sequence[LogWriter] = (),
    ) -> None:
        check_number("max_iters", max_iters, at_least=0, whole=True, or_none="a run that a callback ends")
        check_number("val_every_n_iters", val_every_n_iters, at_least=1, whole=True, or_none="no validation")
        check_several("callbacks", callbacks, Callback, wanted="instances of leyden.training.Callback")
        check_several("writers", writers, LogWriter, wanted="a LogWriter such as CsvWriter('metrics.csv')")
        paths = [Path(path).absolute() for writer in writers if (path := getattr(writer, "path", None)) is not None]
        if twice := [str(path) for path in paths if paths.count(path) > 1]:
            raise ConfigError(f"two writers write {twice[0]}; give each a file of its own")
        self.max_iters, self.val_every_n_iters, self.validate_first = max_iters, val_every_n_iters, validate_first
        self.validates_at_end = False
        """Whether to validate after the last iteration if no other one reaches `val_every_n_iters`. Set it for a
        validation set that nothing would use."""
        self.callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        self.writers = list(writers)
        self.initialize()

    def initialize(self) -> None:
        """Set every counter and flag to its value at the beginning of a run."""
        self.current_iter = 0
        """The number of finished steps: k during step k, counted from 0, and k + 1 after it."""
        self.current_stage: Stage = "train"
        """The current stage, or the last one."""
        self.validation_due = self.validate_first
        """Whether the current policy has still to be validated."""
        self.metrics: dict[str, MetricValue] = {}
        """The metrics of this iteration so far. Validation metrics are named `val/<name>`.

        A hook may add numbers, as `log` does: the rows of the run get them."""
        self._set_by_loop: dict[str, MetricValue] = {}
        """The metrics that rows have already; others in `metrics` are a hook's own."""
        self.last_row: MetricsRow | None = None
        """The row of the stage that ended last."""
        self.should_stop = False
        """Whether the loop ends after the current stage. `stop` sets it."""
        self.resumed_from: Path | None = None
        """The checkpoint that this run continues; None if it is new."""
        self._used = False
        """Whether the run has begun: a loop runs once."""
        self._seconds_before = 0.0
        """Seconds of the run before this process, up to the checkpoint."""
        self._started_at: float | None = None
        """When this process began to run (`time.monotonic()`); None while the loop does not run."""
        self._stage_started_at = time.monotonic()

    def initialize_iter(self) -> None:
        """Drop the metrics that rows have already, because a new iteration begins."""
        self.metrics, self._set_by_loop = self._own_metrics(), {}

    def log(self, name: str, value: Any) -> None:
        """Record a number of your own in the current iteration, from a hook of a callback.

        It is a metric like those of the vessel: in the run's files, store and loggers, and for `Checkpoint` and
        `EarlyStopping`. A number of a validation hook belongs to the validation's row, any other to the row of the
        step. Of two numbers of one name, the later one counts. A number that is set after its row was written comes as
        a further row of the same iteration and stage.

        value: a finite number of any library, or a text. Raise InvalidMetrics for anything else.
        """
        self.metrics.update(_own_values({name: value}, "log"))

    @property
    def validation_interval(self) -> int | None:
        """The number of iterations from one validation to the next; None: no validation."""
        every = self.val_every_n_iters
        if self.validates_at_end and self.max_iters:
            return self.max_iters if every is None else min(every, self.max_iters)
        return every

    @property
    def validates(self) -> bool:
        """Whether the options ask for validations before the end."""
        return self.validate_first or self.val_every_n_iters is not None

    @property
    def goes_on(self) -> bool:
        """Whether another iteration follows: the loop is not stopped and `max_iters` not reached."""
        return not self.should_stop and (self.max_iters is None or self.current_iter < self.max_iters)

    @property
    def total_seconds(self) -> float:
        """Seconds that this run has taken, in all its processes.

        Time after the checkpoint from which a run was resumed does not count.
        """
        running = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return self._seconds_before + running

    def check_validations(self, every: int | None) -> None:
        """Raise ConfigError if the callbacks of this run cannot go on with another `val_every_n_iters`."""
        before, self.val_every_n_iters = self.val_every_n_iters, every
        try:
            for callback in self.callbacks:
                callback.check_validations(self)
        finally:
            self.val_every_n_iters = before

    def stop(self) -> None:
        """End the run after the current stage. Its iteration counts, and is saved.

        May be called from any thread, hook or signal handler.
        """
        self.should_stop = True

    def progress(self, done: int, total: int, **counts: float) -> None:
        """Report that `done` of `total` pieces of the current stage are finished.

        The vessel may call it as often as it likes and from any thread.
        counts: further numbers counted since the stage began, by name.
        """
        seconds = time.monotonic() - self._stage_started_at
        event = Progress(done, total, seconds, counts)
        for callback in self.callbacks:
            callback.on_progress(self, event)

    # ---- drivers ---------------------------------------------------------------------------------

    def run(self, vessel: Vessel, *, resume: Resumable | None = None) -> None:
        """Train the vessel in this thread.

        resume: the checkpoint to continue from; None begins a new run.
        Raise ConfigError if the vessel or a hook is asynchronous, or if the loop has run already. Errors of the vessel
        and of hooks pass through.
        """
        self._drive(self._flow(vessel, resume))

    async def arun(self, vessel: Vessel, *, resume: Resumable | None = None) -> None:
        """Train the vessel on the running event loop.

        Hooks and vessel may be asynchronous. A synchronous one blocks the event loop while it runs.
        resume: the checkpoint to continue from; None begins a new run.
        Raise ConfigError if the loop has run already. Errors of the vessel and of hooks pass through.
        """
        await self._follow(self._flow(vessel, resume), may_wait=True)

    def _drive(self, flow: Flow) -> None:
        """Run a flow without an event loop. An awaitable raises ConfigError inside it, for its `finally`."""
        with contextlib.suppress(StopIteration):
            self._follow(flow, may_wait=False).send(None)  # it never waits, so it ends at once

    async def _follow(self, flow: Flow, *, may_wait: bool) -> None:
        """Run a flow to its end. Results and errors go back to where the flow yielded; if the flow may not wait, an
        awaitable is an error.
        """
        proceed: Callable[[], object] = partial(next, flow)
        while True:
            try:
                result = proceed()
            except StopIteration:
                return
            try:
                if inspect.isawaitable(result):
                    if not may_wait:
                        if inspect.iscoroutine(result):
                            result.close()
                        raise ConfigError(
                            "the vessel or a callback is asynchronous; drive it with `await loop.arun(vessel)`"
                        )
                    result = await result
                proceed = partial(flow.send, result)
            except BaseException as error:  # noqa: BLE001 -- raised again where the flow yielded
                proceed = partial(flow.throw, error)

    # ---- the order -------------------------------------------------------------------------------

    def _flow(self, vessel: Vessel, resume: Resumable | None) -> Flow:
        """Restore the checkpoint, open the writers, train. Raise ConfigError if the loop has run already."""
        if self._used:
            raise ConfigError("this TrainLoop has run already; make a new one, and give it resume= to continue")
        self._used = True
        if resume is not None:
            yield from self._restore(vessel, resume)
        yield from self._recording(vessel, self._fit(vessel))

    def _restore(self, vessel: Vessel, resume: Resumable) -> Flow:
        with _as_checkpoint_error():
            self.load_run_state(resume.state)
        with _as_checkpoint_error(f"of this {type(vessel).__name__}"):
            yield resume.restore(vessel)
        for key, callback in keyed(self.callbacks).items():
            path = resume.callbacks_path
            if path is not None and (folder := path / quote(key, safe="")).is_dir():
                callback.load(folder)
        with _as_checkpoint_error():
            restore_rng(resume.state["rng"])  # last: loading may have drawn from it
        self.resumed_from = getattr(resume, "path", None)

    def _recording(self, vessel: Vessel, stages: Flow) -> Flow:
        """Run `stages` while the writers are open. Notify the callbacks of an error."""
        self._started_at = time.monotonic()
        try:
            for writer in self.writers:
                writer.open()
            yield from stages
        except GeneratorExit:  # the generator was dropped: nothing may be yielded any more
            raise
        except BaseException as error:
            for callback in self.callbacks:
                try:
                    yield callback.on_exception(self, vessel, error)
                except Exception:  # the first error is the one to report
                    logger.exception("%s.on_exception failed", type(callback).__name__)
            raise
        finally:
            for writer in self.writers:
                writer.close()
            self._seconds_before, self._started_at = self.total_seconds, None

    def _fit(self, vessel: Vessel) -> Flow:
        """Yield the results of hooks and stages of a whole run, in their order."""
        if (every := self.validation_interval) != self.val_every_n_iters:
            logger.info(
                "the validation set is run once, after iteration %d; give a smaller interval to see it during training",
                every,
            )
        yield from self._call("on_fit_start", vessel)
        if self.validation_due and not self.should_stop:
            yield from self._validate(vessel)
        while self.goes_on:
            self.initialize_iter()
            yield from self._call("on_iter_start", vessel)
            yield from self._train(vessel)
            if self.validation_due and not self.should_stop:
                yield from self._validate(vessel)
            yield from self._call("on_iter_end", vessel)
        yield from self._call("on_fit_end", vessel)

    def _train(self, vessel: Vessel) -> Flow:
        self._begin("train")
        yield from self._call("on_train_start", vessel)
        metrics = yield self._do_train(vessel)
        self.current_iter += 1  # now, because the vessel has done the step even if writing its row fails
        every = self.validation_interval
        self.validation_due = every is not None and self.current_iter % every == 0
        self._write("train", metrics, f"{type(vessel).__name__}.step")
        yield from self._call("on_train_end", vessel)

    def _validate(self, vessel: Vessel) -> Flow:
        self._begin("val")
        yield from self._call("on_validate_start", vessel)
        metrics = yield self._do_validate(vessel)
        self.validation_due = False
        self._write("val", metrics, f"{type(vessel).__name__}.validate")
        yield from self._call("on_validate_end", vessel)

    def _do_train(self, vessel: Any) -> Any:
        return vessel.step(self.current_iter)

    def _do_validate(self, vessel: Any) -> Any:
        return vessel.validate(self.current_iter)

    def _begin(self, stage: Stage) -> None:
        self.current_stage = stage
        logger.debug("iteration %d: %s begins", self.current_iter + (stage == "train"), stage)
        self._stage_started_at = time.monotonic()
        for writer in self.writers:
            writer.on_stage_start(self.current_iter + (stage == "train"), stage)

    def _write(self, stage: Stage, metrics: object, source: str) -> None:
        """Check the metrics of a stage and give its row to the writers.

        source: who returned them.
        """
        cleaned = clean_metrics(metrics, source=source)
        own = self._own_metrics()
        mine = {name.removeprefix("val/"): value for name, value in own.items() if _stage_of(name, stage) == stage}
        self.last_row = MetricsRow(self.current_iter, stage, self.total_seconds, {**mine, **cleaned})
        logger.debug("iteration %d: %s done, %s", self.current_iter, stage, cleaned)
        self._set_by_loop.update({name: value for name, value in own.items() if _stage_of(name, stage) == stage})
        self._write_row(self.last_row)

    def _write_row(self, row: MetricsRow) -> None:
        self._set_metrics(row.stage, row.metrics)
        for writer in self.writers:
            if writer.row_kind == "stage":
                writer.write(row)

    def _set_metrics(self, stage: Stage, values: Metrics) -> None:
        named = {("val/" if stage == "val" else "") + name: value for name, value in values.items()}
        self.metrics.update(named)
        self._set_by_loop.update(named)

    def _own_metrics(self) -> dict[str, MetricValue]:
        known = self._set_by_loop
        return {name: value for name, value in self.metrics.items() if name not in known or known[name] is not value}

    def _call(self, hook: str, vessel: Vessel) -> Flow:
        for callback in self.callbacks:
            yield getattr(callback, hook)(self, vessel)
            if own := self._own_metrics():
                own = _own_values(own, f"{type(callback).__name__}.{hook}")
                self.metrics.update(own)
                if not hook.endswith("_start"):  # the row of a stage that begins is still to come
                    self._write_own(own, "train" if hook in ("on_iter_end", "on_fit_end") else self.current_stage)

    def _write_own(self, own: Mapping[str, MetricValue], stage: Stage) -> None:
        """Write numbers that a hook has set after the row of its stage was written, as a further row."""
        self._set_by_loop.update(own)
        for each in ("train", "val", "test"):
            values = {name.removeprefix("val/"): value for name, value in own.items() if _stage_of(name, stage) == each}
            if not values:
                continue
            last = self.last_row
            if last is not None and (last.iteration, last.stage) == (self.current_iter, each):
                self.last_row = replace(last, metrics={**last.metrics, **values})
            self._write_row(MetricsRow(self.current_iter, each, self.total_seconds, values))

    # ---- state -----------------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        """Return the state of loop, callbacks, writers and random generators, as JSON.

        The rows that the writers count in it are on the disk when this returns.
        """
        return {
            "current_iter": self.current_iter,
            "current_stage": self.current_stage,
            "should_stop": self.should_stop,
            "validation_due": self.validation_due,
            "total_seconds": self.total_seconds,
            "metrics": dict(self.metrics),
            "callbacks": _states(self.callbacks),
            "loggers": _states(self.writers),
            "rng": capture_rng(),
        }

    def save_callback_files(self, path: Path) -> None:
        """Call `save` of the callbacks that override it, each with its own directory in `path`.

        A callback's directory is removed again if it stays empty.
        """
        for key, callback in keyed(self.callbacks).items():
            if type(callback).save is not Callback.save:
                folder = path / quote(key, safe="")
                folder.mkdir(parents=True)
                callback.save(folder)
                if not any(folder.iterdir()):
                    folder.rmdir()

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Restore counters, metrics, callbacks and writers from a state that `run_state` returned.

        The random states are left for later: they are restored after the vessel. A callback or writer without a saved
        state starts fresh. A saved state without its callback or writer is named in a warning. `should_stop` keeps its
        value, because the caller decides whether a run continues.
        """
        self.current_iter = state["current_iter"]
        self.current_stage = state["current_stage"]
        self.validation_due = state["validation_due"]
        self._seconds_before = state["total_seconds"]
        self.metrics = dict(state["metrics"])
        self._set_by_loop = dict(self.metrics)
        _load_states("callback", keyed(self.callbacks), state["callbacks"])
        _load_states("writer", keyed(self.writers), state["loggers"])


def _stage_of(name: str, stage: Stage) -> Stage:
    return "val" if name.startswith("val/") else stage


def _own_values(metrics: Metrics, source: str) -> dict[str, MetricValue]:
    """Return a hook's numbers as plain ones. Raise InvalidMetrics for one that is not finite."""
    cleaned = clean_metrics(metrics, source=source)
    for name, value in cleaned.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidMetrics(f"{source}: metric {name!r} is {value}, which is no finite number; leave it out then")
    return cleaned


@contextlib.contextmanager
def _as_checkpoint_error(what: str = "what a run saved") -> Generator[None]:
    """Turn an error of the block into a CheckpointError.

    what: what the state should have been, for the message.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # RuntimeError: torch's, for tensors of another shape
        if isinstance(error, LeydenError):
            raise
        raise CheckpointError(
            f"the checkpoint's state is not {what} ({type(error).__name__}: {error}); resume from another one"
        ) from error


def keyed(parts: Sequence[Stateful]) -> dict[str, Stateful]:
    """Return callbacks or writers by `state_key`. A repeated key gets a number: `csvwriter2`."""
    keyed: dict[str, Stateful] = {}
    for part in parts:
        key, number = part.state_key, 2
        while key in keyed:
            key, number = f"{part.state_key}{number}", number + 1
        keyed[key] = part
    return keyed


def _states(parts: Sequence[Stateful]) -> dict[str, dict[str, Any]]:
    states = {key: part.state_dict() for key, part in keyed(parts).items()}
    return {key: state for key, state in states.items() if state}


def _load_states(noun: str, parts: dict[str, Stateful], states: dict[str, dict[str, Any]]) -> None:
    for key, part in parts.items():
        if key in states:
            part.load_state_dict(states[key])
    for key in states.keys() - parts.keys():
        logger.warning("the checkpoint holds the state of %s %r, which this run does not have", noun, key)
