"""Detect a blocked event loop, log the agent that blocks it, and requeue the other attempts before they time out.

Async agents of a process share one loop. An agent that computes or sleeps without `await` stops them all, and their
runner too: timeouts pass, no heartbeat is sent, and the store ends attempts that did nothing wrong. A thread beside the
loop checks that the loop still turns. While it does not, the thread

- logs the agent and the user's line, once a minute at most, and the stack at DEBUG. An agent is not at fault while it
  imports a module, waits for a CPU, or waits for Python's lock (the GIL).
- reports other attempts as interrupted (`Attempt.interrupted`) before the store ends them. Their rollouts are queued
  again, and the attempt does not count against `max_attempts`.
- withdraws claims that wait at a server, so that other runners get what is in the queue.

It knows attempts and their store, not what an agent is. It cannot stop an agent that blocks, because no thread can.
`execution/child.py` ends a runner's process, and calls `interrupt_siblings` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

from leyden._lib import ids
from leyden._lib.frames import current_frames, importing, users_frame
from leyden._lib.throttle import Throttle, first_on_this_machine
from leyden.errors import IllegalTransition, LeydenError, UnknownAttempt, UnknownRollout
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.25
"""Seconds between two checks of a loop that answers."""
_CHECK_SECONDS = 0.1
"""Seconds to wait for an answer, and between two checks of a loop that has not answered."""
_BLOCKED_SECONDS = 0.4
"""A step that computes or sleeps for this many seconds blocks its event loop. A step is a callback, or a task up to its
next `await`."""
_SHORTAGE_SECONDS = 2.0
"""A loop that gets no CPU for this many seconds is worth a warning."""
_WAKES_PER_SECOND = 25
"""A thread that waits for Python's lock wakes every 5 ms; one that sleeps wakes less often than this."""
_MARGIN_SECONDS = 0.5
"""An attempt is interrupted this long before its time is over, because the store's clock began earlier and a report
takes a while."""
_REPORT_SECONDS = 5.0
"""The seconds that a report to a store may take."""
_SHOWN_FRAMES = 20
"""The number of frames in a logged stack."""
_LOOP_FRAMES = {"Handle._run", "BaseEventLoop._run_once", "BaseEventLoop.run_forever"}
"""Functions of asyncio. A function that one of them calls is a step."""

Reason = Literal["blocked", "importing", "no_cpu", "no_lock"]
_Step = asyncio.Task[Any] | FrameType
"""The task that the loop runs, or the outermost frame of a callback."""
_SHORTAGES: dict[Reason, tuple[str, str]] = {
    "no_cpu": (
        "this machine is short of CPU",
        "Use fewer runners or a lower concurrency, or give the run more cores",
    ),
    "no_lock": (
        "other threads of this process use up its CPU time",
        "Python runs one thread at a time: let agents that compute work in processes (strategy='ipc')",
    ),
}
"""Reasons why an event loop gets no CPU time, each with its remedy."""
_ATTEMPT: ContextVar[InFlight | None] = ContextVar("leyden_attempt_in_flight", default=None)
warnings = Throttle()
"""Limits this process to one warning a minute for each reason."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class InFlight:
    """An attempt that this process works on. Times are those of `time.monotonic()`."""

    agent: str
    """The agent's name, for messages."""
    rollout: AttemptedRollout
    store: LightningStore
    claimed: float = field(default_factory=time.monotonic)
    task: asyncio.Task[Any] | None = None
    heard: float | None = None
    """The time at which the watchdog last reported to the store that the attempt is alive."""
    interrupted: bool = False

    def __str__(self) -> str:
        return f"agent {self.agent!r} (rollout {self.rollout.rollout_id}, attempt {self.rollout.attempt.attempt_id})"

    @property
    def deadline(self) -> float:
        """The time at which the store ends the attempt, by this process's monotonic clock."""
        config, heard, never = self.rollout.config, self.heard, float("inf")
        timeout, silence = config.timeout_seconds, config.unresponsive_seconds
        return min(
            never if timeout is None else self.claimed + timeout,
            never if silence is None or heard is None else heard + silence,
        )

    def report(self, **changes: Any) -> Coroutine[Any, Any, Any]:
        """Return the call that reports changes of the attempt to the store."""
        return self.store.update_attempt(self.rollout.rollout_id, self.rollout.attempt.attempt_id, **changes)

    def interrupt(self, reason: str) -> Coroutine[Any, Any, Any]:
        """Mark the attempt as interrupted, and return the call that reports this end to the store, which does not count
        against the rollout's attempts.
        """
        self.interrupted = True
        return self.report(status="failed", metadata={"reason_kind": "interrupted", "reason": reason})


def attempt_in_flight() -> InFlight | None:
    """Return the attempt of the calling agent, in any of its tasks and threads; None outside an agent."""
    return _ATTEMPT.get()


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of the event loop's thread at one moment, in seconds. Only differences mean anything."""

    wall: float
    cpu: float
    """CPU time that the thread has used."""
    process: float
    """CPU time that all threads of the process have used."""
    wakes: int = 0
    """The number of times that the thread was given a core."""
    queued: float = 0.0
    """Time in which the thread was ready to run and had no core. 0.0 on systems other than Linux."""
    others_queued: Mapping[str, float] = field(default_factory=dict[str, float])
    """The time in which each other thread of the process was ready and had no core, by the kernel's id."""

    @classmethod
    def read(cls, native_id: int) -> Clocks:
        """Read the clocks of a thread of this process, given its `threading.get_native_id()`."""
        threads = dict[str, list[int]]()
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                threads[path.parent.name] = [int(figure) for figure in path.read_bytes().split()]
        wall, process = time.monotonic(), time.process_time()
        cpu, queued, wakes = threads.pop(str(native_id), (process * 1e9, 0, 0))
        return cls(wall, cpu / 1e9, process, wakes, queued / 1e9, {name: own[1] / 1e9 for name, own in threads.items()})


def stall_reason(then: Clocks, now: Clocks) -> Reason:
    """Return why an event loop is at `now` still in the step in which it was at `then`.

    Time in the queue for a core does not count. A thread that waits for Python's lock uses no CPU, like a sleeping one,
    and differs in two ways: other threads of the process use CPU or queue for it, and it wakes every 5 ms.
    """
    cpu, own = now.cpu - then.cpu, (now.wall - then.wall) - (now.queued - then.queued)
    if own < _BLOCKED_SECONDS:
        return "no_cpu"
    others = (now.process - then.process) - cpu
    others += sum(seconds - then.others_queued.get(name, 0.0) for name, seconds in now.others_queued.items())
    waits = now.wakes - then.wakes > _WAKES_PER_SECOND * own
    return "no_lock" if waits and cpu < own / 2 <= others else "blocked"


@dataclass(eq=False, slots=True)
class _Stall:
    """A time in which the event loop does not answer, from `asked` (`time.monotonic()`)."""

    asked: float = field(default_factory=time.monotonic)
    step: _Step | None = None
    """The step that the last check found."""
    since: Clocks | None = None
    """The clocks when that step was first found, or was last importing a module."""
    descriptions: dict[tuple[_Step, Reason], str] = field(default_factory=dict[tuple["_Step", Reason], str])
    """Why each step took too long, in words."""


class LagWatchdog:
    """A thread that watches one event loop while runners work on it. All runners of a loop share one watchdog, which
    `beside_this_loop` yields.
    """

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LagWatchdog]] = weakref.WeakKeyDictionary()

    def __init__(self, *, watches: bool = True) -> None:
        """watches: whether to watch the loop from a thread; False for a loop that a debugger may stop."""
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._native_id = threading.get_native_id()
        self._users = 0
        self._in_flight: set[InFlight] = set()
        self._culprits: set[InFlight] = set()
        """Attempts whose agents block the loop now, or have blocked it since it last responded."""
        self._claims: dict[str, tuple[LightningStore, asyncio.Timeout]] = {}
        """Claims that wait for work, by their ids. Whoever removes one decides whether it is withdrawn."""
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], InFlight] = weakref.WeakKeyDictionary()
        """The attempt of each task. An attempt has its own task and the tasks that its agent started."""
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._factory_before = self._loop.get_task_factory()
        self._factory = self._new_task
        self._loop.set_task_factory(self._factory)
        if watches:
            thread = threading.Thread(target=self._run, name="leyden-watchdog", daemon=True)
            contextvars.Context().run(thread.start)  # from an empty context: the thread belongs to no trace

    @classmethod
    @contextlib.contextmanager
    def beside_this_loop(cls, *, watches: bool = True) -> Generator[LagWatchdog]:
        """Yield the running loop's watchdog. The first caller starts it, and it ends with its last.

        watches: whether a new watchdog watches the loop; False under a debugger.
        """
        loop = asyncio.get_running_loop()
        watchdog = cls._by_loop.get(loop)
        if watchdog is None:
            watchdog = cls._by_loop[loop] = cls(watches=watches)
        watchdog._users += 1
        try:
            yield watchdog
        finally:
            watchdog._users -= 1
            if not watchdog._users:
                del cls._by_loop[loop]
                if loop.get_task_factory() is watchdog._factory:
                    loop.set_task_factory(watchdog._factory_before)
                watchdog._closing.set()
                watchdog._wanted.set()

    def start(self, work: Coroutine[Any, Any, Any], in_flight: InFlight) -> asyncio.Task[Any]:
        """Return a task for an attempt, watched until it is done, and cancelled if the attempt must be interrupted."""

        def prune(task: asyncio.Task[Any]) -> None:
            self._in_flight.discard(in_flight)
            in_flight.task = None  # else the value in `_owners` would keep its own weak key alive for ever
            if not self._in_flight and not self._closing.is_set():
                self._wanted.clear()

        context = contextvars.copy_context()
        context.run(_ATTEMPT.set, in_flight)
        task = self._loop.create_task(work, name=in_flight.rollout.rollout_id, context=context)
        in_flight.task = task
        self._owners[task] = in_flight
        self._in_flight.add(in_flight)
        self._wanted.set()
        task.add_done_callback(prune)
        return task

    async def claim(self, store: LightningStore, **options: Any) -> Sequence[AttemptedRollout]:
        """Claim rollouts by `store.dequeue_many_rollouts`, with its options. Return nothing if the loop was blocked
        meanwhile, because the claim was then withdrawn for the benefit of other runners.
        """
        claim_id, claimed = ids.claim_id(), ()
        withdrawal = asyncio.timeout(None)
        self._claims[claim_id] = store, withdrawal
        try:
            async with withdrawal:
                claimed = await store.dequeue_many_rollouts(claim_id=claim_id, **options)
        except TimeoutError:
            if not withdrawal.expired():
                raise
        finally:
            withdrawn = self._claims.pop(claim_id, None) is None
        if withdrawn and claimed:
            await store.undo_claim(claim_id)
        return () if withdrawn else claimed

    @classmethod
    def interrupt_siblings(cls, reason: str) -> None:
        """Report all attempts of this process as interrupted, because it is about to end, except those whose agents
        block their loop. A loop that no agent blocks is left alone.

        Safe from any thread; returns when the stores have the reports, or after 5 seconds.
        """
        for watchdog in [*cls._by_loop.values()]:
            if culprits := watchdog._culprits.copy():
                siblings = watchdog._in_flight.copy() - culprits
                _report([each.interrupt(reason) for each in siblings if not each.interrupted])

    def _new_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Create a task, as the loop's task factory, and remember which attempt it belongs to."""
        before: Any = self._factory_before
        task: asyncio.Task[Any] = (
            asyncio.Task(work, loop=loop, **options) if before is None else before(loop, work, **options)
        )
        if (owner := _ATTEMPT.get()) is not None:
            self._owners[task] = owner
        return task

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Schedule a callback in the event loop, again and again, and examine the loop while the callback is late. Runs
        until the last user has left or the loop ends. Rests while no attempt is in flight.
        """
        while self._wanted.wait() and not self._closing.is_set():
            stall, answered = _Stall(), threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # the loop has ended
            while not answered.wait(_CHECK_SECONDS):
                try:
                    self._examine(stall)
                except Exception:  # an error would end this thread without a report; the next check may succeed
                    logger.exception("the lag watchdog failed at a check")
            self._culprits.clear()
            for description in stall.descriptions.values():
                logger.debug("the event loop goes on after %.1f s; %s", time.monotonic() - stall.asked, description)
            self._closing.wait(_REST_SECONDS)

    def _examine(self, stall: _Stall) -> None:
        """Find the loop's step. If it has taken too long, log why, and protect the attempts that are not to blame."""
        frames, frame = list[FrameType](), current_frames().get(self._thread_id)
        while frame is not None and frame.f_code.co_qualname not in _LOOP_FRAMES:
            frames.insert(0, frame)
            frame = frame.f_back
        if not frames or frames[0].f_globals.get("__name__") == "selectors":
            stall.step = None  # the loop waits for events
            return
        now, step = Clocks.read(self._native_id), asyncio.current_task(self._loop) or frames[0]
        if stall.since is None or step is not stall.step:
            stall.step, stall.since = step, now
        if (module := importing(frames)) is not None:
            stall.since, reason = now, "importing"  # what follows the import is another step
        elif now.wall - stall.since.wall < _BLOCKED_SECONDS:
            return
        else:
            reason = stall_reason(stall.since, now)
        if not stall.descriptions:
            self._withdraw_claims()
        seconds, because = now.wall - stall.asked, "something has blocked the event loop"
        if reason == "importing":
            stall.descriptions[step, reason] = f"importing {module} took {seconds:.1f} s"
        elif reason == "blocked":
            because = f"{self._blame(stall, step, frames, seconds) or 'something'} has blocked the event loop"
        else:
            shortage, remedy = _SHORTAGES[reason]
            stall.descriptions[step, reason], because = shortage, f"{shortage}: the event loop has waited"
            is_due = seconds >= _SHORTAGE_SECONDS and warnings.admits(reason)
            if is_due and (reason == "no_lock" or first_on_this_machine("short-of-cpu", warnings.seconds)):
                line = "%s: the event loop of %d rollouts has waited for %.1f s. %s."
                logger.warning(line, shortage, len(self._in_flight), seconds, remedy)
        self._protect(seconds, because)

    def _blame(self, stall: _Stall, step: _Step, frames: Sequence[FrameType], seconds: float) -> InFlight | None:
        """Log the agent that blocks the loop, and the user's line. Return its attempt; None if no agent's code runs."""
        owner = self._owners.get(step) if isinstance(step, asyncio.Task) else None
        tasks = [task for task, each in [*self._owners.items()] if each is owner is not None]
        waiting = [frame for task in reversed(tasks) for frame in _suspended(task.get_coro())]
        line = users_frame([*waiting, *frames])  # a library's own task may have none of the user's frames
        culprit = owner if line is not None else None
        name = str(culprit or "something that belongs to no rollout")
        at = ""
        if line is not None:
            path, here = Path(line.f_code.co_filename), Path.cwd()
            shown_path = path.relative_to(here) if path.is_relative_to(here) else path
            at = f" at {shown_path}:{line.f_lineno} in {line.f_code.co_name}"
        if (step, "blocked") not in stall.descriptions:
            stall.descriptions[step, "blocked"] = f"{name} blocked it{at}"
            shown = ((frame, frame.f_lineno) for frame in frames[-_SHOWN_FRAMES:])
            stack = "".join(traceback.StackSummary.extract(shown).format())
            logger.debug("%s blocks the event loop, at:\n%s", name, stack)
            if culprit is not None:
                self._culprits.add(culprit)
                blocked = {"seconds": round(seconds, 1), "stack": stack}
                _report([culprit.report(metadata={"blocked_event_loop": blocked})])
        if warnings.admits("blocked"):
            logger.warning(
                "%s blocks the event loop%s, for %.1f s now; %d other rollouts wait for it. Let it `await`, call what "
                "blocks with asyncio.to_thread, or make the agent a function without `async`.",
                name,
                at,
                seconds,
                len(self._in_flight - {culprit}),
            )
        return culprit

    def _withdraw_claims(self) -> None:
        """Give back the claims that wait at a server, so that other runners get the rollouts."""

        def expire(withdrawal: asyncio.Timeout) -> None:
            with contextlib.suppress(RuntimeError):  # the claim is over
                withdrawal.reschedule(0.0)

        undoing: list[Coroutine[Any, Any, Any]] = []
        for claim_id in [*self._claims]:
            if (claim := self._claims.pop(claim_id, None)) is not None:  # else it has ended this moment
                store, withdrawal = claim
                undoing.append(store.undo_claim(claim_id))
                self._loop.call_soon_threadsafe(expire, withdrawal)
        _report(undoing)

    def _protect(self, seconds: float, because: str) -> None:
        """Interrupt attempts whose time is about to run out, and send heartbeats for the others. Attempts whose agents
        block the loop get neither.
        """
        now = time.monotonic()
        siblings = [each for each in self._in_flight.copy() - self._culprits if not each.interrupted]
        reports: list[Coroutine[Any, Any, Any]] = []
        for each in siblings:
            is_silent = each.heard is None or each.heard < now - seconds
            if each.rollout.config.unresponsive_seconds is not None and is_silent:
                each.heard = now  # the report is in the store's time, which may differ from ours: start plus elapsed
                reports.append(each.report(last_heartbeat_time=each.rollout.attempt.start_time + now - each.claimed))
            elif now >= each.deadline - _MARGIN_SECONDS:
                reports.append(each.interrupt(f"{because} for {seconds:.1f} s, and this attempt's time ran out"))
        _report(reports)
        for each in siblings:
            if each.interrupted and (task := each.task) is not None:
                self._loop.call_soon_threadsafe(task.cancel)


def _suspended(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine and of the coroutines that it awaits, the innermost last."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def _report(calls: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Await reports to stores from this thread, all at once. A report on an attempt that has ended is dropped. Any
    other error of a store is logged.
    """

    async def send(call: Coroutine[Any, Any, Any]) -> None:
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                await call
        except (IllegalTransition, UnknownRollout, UnknownAttempt):
            pass  # it is over already
        except (LeydenError, TimeoutError) as error:
            logger.warning("a report on a blocked event loop did not reach the store: %s", error)

    async def send_all() -> None:
        await asyncio.gather(*(send(call) for call in calls))

    if calls:
        asyncio.run(send_all())
