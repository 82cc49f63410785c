"""The lag watchdog: reports why an event loop stands still, and keeps innocent attempts from paying for it.

Async agents of a process share one loop. An agent that computes or sleeps without `await` stops them all, and their
runner too: timeouts pass, no heartbeat is sent, and the store ends attempts that did nothing wrong. A thread beside the
loop checks regularly that the loop still turns. While it does not, the thread

- logs the reason (`stall.py`): one line with the agent and its place in the code, at most once a
  minute; the stack at DEBUG. Imports and a shortage of CPU are no agent's fault.
- reports other attempts as interrupted (`Attempt.interrupted`) before the store ends them. Their
  rollouts are queued again, and the attempt does not count against `max_attempts`.
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
import weakref
from collections.abc import Coroutine, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

from leyden._lib import ids
from leyden._lib.frames import current_frames
from leyden.errors import IllegalTransition, LeydenError, UnknownAttempt, UnknownRollout
from leyden.execution.runner.stall import Position, Reason, ThreadTimes, is_worth_a_warning, place, reason
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout

logger = logging.getLogger(__name__)

_REST_SECONDS = 0.25
"""Seconds between two checks of a loop that answers."""
_LOOK_SECONDS = 0.25
"""Seconds to wait for an answer, and between two checks of a loop that has not answered. A step that two checks in a
row find running blocks the loop."""
_MARGIN_SECONDS = 0.5
"""An attempt is interrupted this long before its time is over, because the store's clock began earlier and a report
takes a while."""
_TELL_SECONDS = 5.0
"""The seconds that a report to a store may take."""
_LOOP_FRAMES = {"Handle._run", "BaseEventLoop._run_once", "BaseEventLoop.run_forever"}
"""Functions of asyncio. A function that one of them calls is a step."""
_SHORTAGES: dict[Reason, str] = {
    "no_cpu": "this machine is short of CPU",
    "no_lock": "other threads of this process use up its CPU time",
}
_REMEDIES: dict[Reason, str] = {
    "no_cpu": "Use fewer runners or a lower concurrency, or give the run more cores",
    "no_lock": "Python runs one thread at a time: let agents that compute work in processes (strategy='ipc')",
}
_ATTEMPT: ContextVar[InFlight | None] = ContextVar("leyden_attempt_in_flight", default=None)


@dataclass(eq=False, slots=True, weakref_slot=True)
class InFlight:
    """An attempt that this process works on."""

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
    def can_fall_silent(self) -> bool:
        """Whether the store ends the attempt if it receives no heartbeat."""
        return self.rollout.config.unresponsive_seconds is not None

    @property
    def time_is_over(self) -> float:
        """The time at which the store ends the attempt, by this process's monotonic clock."""
        config, limits = self.rollout.config, [float("inf")]
        if config.timeout_seconds is not None:
            limits.append(self.claimed + config.timeout_seconds)
        if config.unresponsive_seconds is not None and self.heard is not None:
            limits.append(self.heard + config.unresponsive_seconds)
        return min(limits)

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


@dataclass(eq=False, slots=True)
class _WaitingClaim:
    """A claim that a task of this loop waits for."""

    store: LightningStore
    task: asyncio.Task[Any] | None
    claim_id: str = field(default_factory=ids.claim_id)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    withdrawn: bool = False

    def withdraw(self) -> bool:
        """Mark the claim as withdrawn, so that it returns nothing. Return False if it is over already. Safe from any
        thread.
        """
        with self.lock:
            self.withdrawn = not self.over
            return self.withdrawn

    def end(self) -> bool:
        with self.lock:
            self.over = True
            return self.withdrawn

    def cancel(self) -> None:
        """Cancel the task that waits for the claim. Call it in the event loop's thread."""
        if not self.over and self.task is not None:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class _LoopStep:
    """The step of a task, or the callback, that the event loop is running."""

    what: asyncio.Task[Any] | FrameType
    position: Position
    times: ThreadTimes


@dataclass(eq=False, slots=True)
class _Stall:
    """A step that blocks the event loop."""

    owner: InFlight | None
    why: Reason = "blocked"
    seconds: float = 0.0
    """Seconds since the check that the loop has not answered."""
    noted: bool = False
    """Whether the attempt's record says that its agent blocks the loop."""
    warned: bool = False
    description: str = ""
    """The reason of the stall, in words, for the line that reports its end."""

    @property
    def is_agents_fault(self) -> bool:
        """Whether the step's agent blocks the loop. A shortage of CPU or of Python's lock is no agent's fault."""
        return self.why not in _SHORTAGES

    @property
    def culprit(self) -> str:
        return "something that belongs to no rollout" if self.owner is None else str(self.owner)

    @property
    def interruption(self) -> str:
        if self.is_agents_fault:
            return f"{self.owner or 'something'} has blocked the event loop"
        return f"{_SHORTAGES[self.why]}: the event loop has waited"


class LagWatchdog:
    """A thread that watches one event loop while runners work on it. All runners of a loop share one watchdog, which
    `beside_this_loop` yields.
    """

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LagWatchdog]] = weakref.WeakKeyDictionary()

    def __init__(self, *, looks: bool = True) -> None:
        """looks: whether to watch the loop from a thread; False for a loop that a debugger may stop."""
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._native_id = threading.get_native_id()
        self._users = 0
        self._in_flight: set[InFlight] = set()
        self._culprits: set[InFlight] = set()
        """Attempts whose agents block the loop now, or have blocked it since it last responded."""
        self._claims: set[_WaitingClaim] = set()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], InFlight] = weakref.WeakKeyDictionary()
        """The attempt of each task. An attempt has its own task and the tasks that its agent started."""
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._factory_before = self._loop.get_task_factory()
        self._factory = self._new_task
        self._loop.set_task_factory(self._factory)
        if looks:
            thread = threading.Thread(target=self._run, name="leyden-watchdog", daemon=True)
            contextvars.Context().run(thread.start)  # from an empty context: the thread belongs to no trace

    @classmethod
    @contextlib.contextmanager
    def beside_this_loop(cls, *, looks: bool = True) -> Generator[LagWatchdog]:
        """Yield the running loop's watchdog. The first caller starts it, and it ends with its last.

        looks: whether a new watchdog watches the loop; False under a debugger.
        """
        loop = asyncio.get_running_loop()
        watchdog = cls._by_loop.get(loop)
        if watchdog is None:
            watchdog = cls._by_loop[loop] = cls(looks=looks)
        watchdog._users += 1
        try:
            yield watchdog
        finally:
            watchdog._users -= 1
            if not watchdog._users:
                del cls._by_loop[loop]
                watchdog._close()

    def start(self, work: Coroutine[Any, Any, Any], in_flight: InFlight) -> asyncio.Task[Any]:
        """Return a task for an attempt, watched until it is done. It is cancelled if the attempt has to be
        interrupted.
        """
        context = contextvars.copy_context()
        context.run(_ATTEMPT.set, in_flight)
        task = self._loop.create_task(work, name=in_flight.rollout.rollout_id, context=context)
        in_flight.task = task
        self._owners[task] = in_flight
        self._in_flight.add(in_flight)
        self._wanted.set()
        task.add_done_callback(lambda _: self._forget(in_flight))
        return task

    async def claim(self, store: LightningStore, **options: Any) -> Sequence[AttemptedRollout]:
        """Claim rollouts by `store.dequeue_many_rollouts`, with its options.

        Return nothing if the loop was blocked meanwhile, because the claim was then withdrawn for the benefit of other
        runners.
        """
        claim = _WaitingClaim(store, asyncio.current_task())
        self._claims.add(claim)
        claimed: Sequence[AttemptedRollout] = ()
        try:
            claimed = await store.dequeue_many_rollouts(claim_id=claim.claim_id, **options)
        except asyncio.CancelledError:
            # `_WaitingClaim.cancel` counts as one cancellation; any more come from elsewhere.
            if claim.task is None or not claim.withdrawn or claim.task.uncancel():
                raise
        finally:
            self._claims.discard(claim)
            withdrawn = claim.end()
        if withdrawn and claimed:
            await store.undo_claim(claim.claim_id)
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
                _tell([each.interrupt(reason) for each in siblings if not each.interrupted])

    def _forget(self, in_flight: InFlight) -> None:
        self._in_flight.discard(in_flight)
        in_flight.task = None  # else the value in `_owners` would keep its own weak key alive for ever
        if not self._in_flight and not self._closing.is_set():
            self._wanted.clear()

    def _close(self) -> None:
        """Give the loop its task factory back, and end the watchdog's thread."""
        if self._loop.get_task_factory() is self._factory:
            self._loop.set_task_factory(self._factory_before)
        self._closing.set()
        self._wanted.set()

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
        """Schedule a callback in the event loop, again and again, and examine the loop when the callback does not run
        in time.

        Runs in the watchdog's thread, until `_close` or the end of the loop. Rests while no attempt is in flight.
        """
        while True:
            self._wanted.wait()
            if self._closing.is_set():
                return
            asked, answered = ThreadTimes.of(self._native_id), threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                return  # the loop has ended
            if answered.wait(_LOOK_SECONDS):
                self._closing.wait(_REST_SECONDS)
            else:
                self._see_through(answered, asked)

    def _see_through(self, answered: threading.Event, asked: ThreadTimes) -> None:
        """Log why the loop does not respond, and protect the other attempts, until it responds.

        answered: set by the loop when it responds.
        asked: the clocks when the response was requested.
        """
        stalls = dict[Any, _Stall]()
        first = self._step()
        since = asked  # for the first step found: the loop has not responded since then
        while not answered.wait(_LOOK_SECONDS):
            step = self._step()
            if step is None or first is None or step.what is not first.what:
                first = step
                since = step.times if step is not None else since
                continue
            try:
                if not stalls:
                    self._withdraw_claims()
                owner = self._owners.get(step.what) if isinstance(step.what, asyncio.Task) else None
                stall = stalls.setdefault(step.what, _Stall(owner))
                stall.why = reason(since, step.times, importing=step.position.imports is not None)
                stall.seconds = step.times.wall - asked.wall
                self._report(stall, step)
                self._culprits |= {stall.owner} if stall.is_agents_fault and stall.owner else set()
                self._save(stall, {each.owner for each in stalls.values() if each.is_agents_fault})
            except Exception:  # an error would end this thread without a report; the next look may succeed
                logger.exception("the lag watchdog failed at a look")
        self._culprits.clear()
        for stall in stalls.values():
            logger.debug("the event loop goes on after %.1f s; %s", time.monotonic() - asked.wall, stall.description)

    def _step(self) -> _LoopStep | None:
        """Return the step that the loop is running; None if it waits for events."""
        running = current_frames()
        frame, frames = running.get(self._thread_id), list[FrameType]()
        while frame is not None and frame.f_code.co_qualname not in _LOOP_FRAMES:
            frames.insert(0, frame)
            frame = frame.f_back
        if not frames or frames[0].f_globals.get("__name__") == "selectors":
            return None  # it is in `select`, where it waits for events
        what = asyncio.current_task(self._loop) or frames[0]
        return _LoopStep(what, Position.of(frames), ThreadTimes.of(self._native_id))

    def _report(self, stall: _Stall, step: _LoopStep) -> None:
        """Log the stall, and note in the attempt's record that its agent blocks the loop. Both happen once for each
        stall.
        """
        if stall.why == "importing":
            stall.description = f"importing {step.position.imports} took {stall.seconds:.1f} s"
        elif stall.why == "blocked" and not stall.noted:
            stall.noted = True
            stall.description = f"{stall.culprit} blocked it at {place(step.position.frames)}"
            logger.debug("%s blocks the event loop, at:\n%s", stall.culprit, step.position.stack)
            if stall.owner is not None:
                blocked = {"seconds": round(stall.seconds, 1), "stack": step.position.stack}
                _tell([stall.owner.report(metadata={"blocked_event_loop": blocked})])
        elif stall.why in _SHORTAGES:
            stall.description = _SHORTAGES[stall.why]
        if not stall.warned and is_worth_a_warning(stall.why, stall.seconds):
            stall.warned = True
            self._warn(stall, step)

    def _warn(self, stall: _Stall, step: _LoopStep) -> None:
        """Log a stall once: the agent's line that blocks the loop, or the resource that the loop lacks."""
        waiting = len(self._in_flight - ({stall.owner} if stall.is_agents_fault else set()))
        if stall.why == "blocked":
            logger.warning(
                "%s blocks the event loop at %s, for %.1f s now; %d other rollouts wait for it. Let it `await`, call what "
                "blocks with asyncio.to_thread, or make the agent a function without `async`.",
                stall.culprit,
                place(step.position.frames),
                stall.seconds,
                waiting,
            )
        else:
            logger.warning(
                "%s: the event loop of %d rollouts has waited for %.1f s. %s.",
                _SHORTAGES[stall.why],
                waiting,
                stall.seconds,
                _REMEDIES[stall.why],
            )

    def _withdraw_claims(self) -> None:
        """Give back the claims that wait at a server, so that other runners get the rollouts."""
        claims = [claim for claim in self._claims.copy() if claim.withdraw()]
        _tell([claim.store.undo_claim(claim.claim_id) for claim in claims])
        for claim in claims:
            self._loop.call_soon_threadsafe(claim.cancel)

    def _save(self, stall: _Stall, culprits: set[InFlight | None]) -> None:
        """Interrupt attempts whose time is about to run out, and send heartbeats for the others.

        culprits: the attempts whose agents block the loop, which get neither.
        """
        now, seconds = time.monotonic(), stall.seconds
        siblings = [each for each in self._in_flight.copy() - culprits if not each.interrupted]
        why = f"{stall.interruption} for {seconds:.1f} s, and this attempt's time ran out"
        reports: list[Coroutine[Any, Any, Any]] = []
        for each in siblings:
            if each.can_fall_silent and (each.heard is None or each.heard < now - seconds):
                each.heard = now  # the report is in the store's time, which may differ from ours: start plus elapsed
                reports.append(each.report(last_heartbeat_time=each.rollout.attempt.start_time + now - each.claimed))
            elif now >= each.time_is_over - _MARGIN_SECONDS:
                reports.append(each.interrupt(why))
        _tell(reports)
        for each in siblings:
            if each.interrupted and (task := each.task) is not None:
                self._loop.call_soon_threadsafe(task.cancel)


def _tell(news: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Await reports to stores from this thread, all at once.

    A report on an attempt that has ended is dropped. Any other error of a store is logged.
    """

    async def tell(call: Coroutine[Any, Any, Any]) -> None:
        """Await a call of the store. Log a failure, unless the attempt is over."""
        try:
            async with asyncio.timeout(_TELL_SECONDS):
                await call
        except (IllegalTransition, UnknownRollout, UnknownAttempt):
            pass  # it is over already
        except (LeydenError, TimeoutError) as error:
            logger.warning("a report on a blocked event loop did not reach the store: %s", error)

    async def tell_all() -> None:
        await asyncio.gather(*(tell(call) for call in news))

    if news:
        asyncio.run(tell_all())
