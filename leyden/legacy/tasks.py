"""`TaskQueue`: what the tasks, resources and reports of the protocol are in a store.

| protocol | store |
|---|---|
| a queued task | a rollout that is retried whenever an attempt takes longer than the task timeout |
| a claimed task | an attempt; `num_claims` is its number |
| a report | a span of the attempt with the whole report, and a reward; the attempt succeeds |
| an empty report | the same, but the attempt fails, because the agent raised an error |
| published resources | resources, of which the newest are the latest |

Rollouts that others enqueue in the store are tasks too, and what other runners recorded is
reported. It knows no HTTP.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any, Final, cast, get_args

from leyden import semconv
from leyden.adapter import TraceToTriplet
from leyden.errors import IllegalTransition, StoreError, UnknownResources, UnknownRollout
from leyden.legacy.reports import REPORT, REPORT_JSON, report_of
from leyden.legacy.types import RolloutLegacy, Task
from leyden.runner import AttemptRecorder
from leyden.store.base import LightningStore
from leyden.types import (
    LLM,
    AttemptedRollout,
    Attributes,
    NamedResources,
    ProxyLLM,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    Span,
    reward_attributes,
)
from leyden.utils import ids

logger = logging.getLogger(__name__)

WORKER: Final = "v0.1 client"
"""The worker that claims and reports, because clients of this protocol do not say who they are."""
_ALWAYS_AGAIN: Final = 1_000_000
"""Attempts of a task, which the protocol does not limit."""
_TRIES: Final = 5
"""How often a report is applied whose attempt ends meanwhile."""
_MODES: Final = get_args(get_args(Task.model_fields["mode"].annotation)[0])


class TaskQueue:
    """The server's operations, on any event loop.

    task_timeout_seconds: a task without a report this long after its claim is queued again.
    recorder: the gateway; each claim has resources of its own then, in which a ProxyLLM is the
        LLM of that attempt.
    """

    def __init__(
        self, store: LightningStore, *, task_timeout_seconds: float, recorder: AttemptRecorder | None = None
    ) -> None:
        self.store = store
        self._recorder = recorder
        self._claimed: dict[str, AttemptedRollout] = {}
        """The attempts under way, by the resources id that only they have."""
        self._config = RolloutConfig(
            timeout_seconds=task_timeout_seconds, max_attempts=_ALWAYS_AGAIN, retry_condition=["timeout"]
        )
        self._open: dict[str, None] = {}
        """Tasks that were queued or reported here and not taken, in that order."""
        self._taken: set[str] = set()

    async def add(
        self, sample: Any, mode: RolloutMode | None, resources_id: str | None, metadata: dict[str, Any] | None
    ) -> str:
        """Queue a task and return its id. Raise UnknownResources if `resources_id` is not in the
        store.
        """
        rollout = await self.store.enqueue_rollout(
            sample, mode, resources_id, self._config, metadata, rollout_id=f"rollout-{uuid.uuid4()}"
        )
        self._open[rollout.rollout_id] = None
        return rollout.rollout_id

    async def claim(self) -> Task | None:
        """Return the next task; None if there is none now."""
        rollout = await self.store.dequeue_rollout(WORKER)
        if rollout is None:
            return None
        task = _task(rollout)
        if self._recorder is not None:
            task.resources_id = f"res-{rollout.attempt.attempt_id}"
            self._claimed[task.resources_id] = rollout
        return task

    async def publish(self, resources: NamedResources) -> str:
        """Make resources the latest and return their id."""
        return (await self.store.add_resources(resources, resources_id=f"res-{uuid.uuid4()}")).resources_id

    async def resources(self, resources_id: str | None) -> ResourcesUpdate | None:
        """Return resources, None for the latest; None if there are none.

        A ProxyLLM becomes an LLM. If the id belongs to a claim, its calls are recorded for
        that attempt. Otherwise the gateway cannot assign them to an attempt, because this
        protocol has none.
        """
        asked, attempted = resources_id, self._claimed.get(resources_id or "")
        if attempted is not None:
            resources_id = attempted.resources_id
        try:
            if resources_id is None:
                update = await self.store.get_latest_resources()
            else:
                update = await self.store.get_resources_by_id(resources_id)
        except UnknownResources:
            return None
        if update is None:
            return None
        plain = {name: _plain(each, attempted) for name, each in update.resources.items()}
        return update.model_copy(update={"resources": plain, "resources_id": asked or update.resources_id})

    async def report(self, report: RolloutLegacy) -> None:
        """Record a report and finish its task, whichever attempt it comes from.

        The first report counts; a second one, of an attempt that was taken for lost, is dropped.
        A report on an unknown task is recorded too, as the original server does it.
        """
        for _ in range(_TRIES):
            attempted = await self._attempt_for(report)
            if attempted is None:
                logger.info("a second report on task %s is dropped: the first one counts", report.rollout_id)
                return
            ids_ = attempted.rollout_id, attempted.attempt.attempt_id
            try:
                await self.store.add_many_spans(_spans(report, *ids_))
                if self._recorder is not None:
                    self._recorder.end_attempt(*ids_)
                    await self._recorder.flush(*ids_)
                if report.is_empty:
                    reason = {
                        "reason": "the worker reported no reward, no triplets and no trace",
                        "reason_kind": "empty_report",
                    }
                    await self.store.update_attempt(*ids_, status="failed", metadata=reason)
                else:
                    await self.store.update_attempt(*ids_, status="succeeded")
            except StoreError as error:  # a call could not be written
                reason = {"reason": f"the record of the attempt is incomplete: {error}", "reason_kind": "recording"}
                await self.store.update_attempt(*ids_, status="failed", metadata=reason)
            except IllegalTransition:  # the attempt timed out meanwhile
                continue
            self._claimed = {id_: each for id_, each in self._claimed.items() if each.rollout_id != report.rollout_id}
            if report.rollout_id not in self._taken:
                self._open[report.rollout_id] = None
            return
        logger.error("the report on task %s is lost: its attempts ended while it was recorded", report.rollout_id)

    async def take(self, rollout_id: str) -> RolloutLegacy | None:
        """Return the report on a finished task, once; None if it is not finished, taken or
        unknown.
        """
        try:
            rollout = await self.store.get_rollout_by_id(rollout_id)
        except UnknownRollout:
            return None
        return await self._take(rollout) if rollout.finished else None

    async def take_all(self) -> list[RolloutLegacy]:
        """Return the reports on all finished tasks that were queued or reported here, each once."""
        finished = await self.store.query_rollouts(
            rollout_id_in=list(self._open), status_in=["succeeded", "failed", "cancelled"]
        )
        reports = [await self._take(rollout) for rollout in finished]
        return [report for report in reports if report is not None]

    async def _take(self, rollout: Rollout) -> RolloutLegacy | None:
        if rollout.rollout_id in self._taken:
            return None
        self._taken.add(rollout.rollout_id)
        self._open.pop(rollout.rollout_id, None)
        spans: Sequence[Span] = ()
        if isinstance(rollout, AttemptedRollout):
            spans = await self.store.query_spans(rollout.rollout_id, "latest")
        return report_of(rollout.rollout_id, spans, TraceToTriplet())

    async def _attempt_for(self, report: RolloutLegacy) -> AttemptedRollout | None:
        """Return an open attempt for the report; None if its task has finished."""
        try:
            rollout = await self.store.get_rollout_by_id(report.rollout_id)
        except UnknownRollout:
            task = report.task
            return await self.store.start_rollout(
                None if task is None else task.input,
                None if task is None else task.mode,
                rollout_id=report.rollout_id,
                worker_id=WORKER,
            )
        if rollout.finished:
            return None
        if isinstance(rollout, AttemptedRollout) and not rollout.attempt.finished:
            return rollout
        return await self.store.start_attempt(report.rollout_id, WORKER)


def _task(rollout: AttemptedRollout) -> Task:
    """Return a claimed rollout as the task of Agent Lightning 0.1 that its runners expect."""
    mode = cast(Any, rollout.mode if rollout.mode in _MODES else None)
    return Task(
        rollout_id=rollout.rollout_id,
        input=rollout.input,
        mode=mode,
        resources_id=rollout.resources_id,
        create_time=rollout.start_time,
        last_claim_time=rollout.attempt.start_time,
        num_claims=rollout.attempt.sequence_id,
        metadata=rollout.metadata,
    )


def _plain(resource: Any, attempted: AttemptedRollout | None) -> Any:
    """Return a resource that the protocol of version 0.1 knows: a ProxyLLM becomes an LLM.

    attempted: the attempt whose calls its address records; None: the address without an attempt.
    """
    if not isinstance(resource, ProxyLLM):
        return resource
    if attempted is not None:
        return resource.with_attempted_rollout(attempted.rollout_id, attempted.attempt.attempt_id)
    return LLM(
        endpoint=resource.endpoint,
        model=resource.model,
        api_key=resource.api_key,
        sampling_parameters=resource.sampling_parameters,
    )


def _spans(report: RolloutLegacy, rollout_id: str, attempt_id: str) -> list[Span]:
    """Return the spans that stand for a runner's report: the report itself, and its reward if it
    has one.
    """
    spans = [(REPORT, cast(Attributes, {REPORT_JSON: report.model_dump_json()}))]
    if report.final_reward is not None:
        spans.append((semconv.REWARD, reward_attributes({semconv.PRIMARY_REWARD: report.final_reward})))
    trace_id = ids.trace_id()
    return [
        Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=0,
            trace_id=trace_id,
            span_id=ids.span_id(),
            name=name,
            attributes=attributes,
        )
        for name, attributes in spans
    ]
