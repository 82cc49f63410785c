"""`TaskQueue`: keeps the tasks, resources and reports of the protocol in a store.

| protocol | store |
|---|---|
| a queued task | a rollout that is retried whenever an attempt takes longer than the task timeout |
| a claimed task | an attempt; `num_claims` is its number |
| a report | a span of the attempt with the whole report, and a reward; the attempt succeeds |
| an empty report | the same, but the attempt fails, because the agent raised an error |
| published resources | resources, of which the newest are the latest |

Rollouts that other programs enqueue in the store are tasks too, and rollouts that other runners have finished have
reports. The module knows no HTTP.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast, get_args

from leyden._lib import ids
from leyden.adapter import TraceToTriplet
from leyden.errors import IllegalTransition, StoreError, UnknownResources, UnknownRollout
from leyden.execution.runner import AttemptRecorder
from leyden.legacy.reports import REPORT, REPORT_JSON, report_of
from leyden.legacy.types import RolloutLegacy, Task
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
    semconv,
)

logger = logging.getLogger(__name__)

WORKER: Final = "v0.1 client"
"""The worker that claims and reports, because clients of this protocol do not say who they are."""
_UNLIMITED_ATTEMPTS: Final = 1_000_000
"""The protocol does not limit the attempts of a task, and a store wants a number."""
_TRIES: Final = 5
"""How often recording a report is tried, if its attempt times out while it is recorded."""
_MODES: Final = get_args(get_args(Task.model_fields["mode"].annotation)[0])


class TaskQueue:
    """The server's operations, on any event loop.

    task_timeout_seconds: a task is queued again if no report has come this long after its claim.
    recorder: the gateway; each claimed task then has separate resources, in which a ProxyLLM becomes the LLM of that
        attempt.
    """

    def __init__(
        self, store: LightningStore, *, task_timeout_seconds: float, recorder: AttemptRecorder | None = None
    ) -> None:
        self.store = store
        self._recorder = recorder
        self._claimed: dict[str, AttemptedRollout] = {}
        """The claimed attempts, by the id of the resources that were made for each."""
        self._config = RolloutConfig(
            timeout_seconds=task_timeout_seconds, max_attempts=_UNLIMITED_ATTEMPTS, retry_condition=["timeout"]
        )
        self._unread: dict[str, None] = {}
        """Ids of tasks that were queued or reported here and whose reports were not returned yet, in that order."""
        self._read: set[str] = set()
        """Ids of tasks whose reports were returned."""

    async def add(
        self, sample: Any, mode: RolloutMode | None, resources_id: str | None, metadata: dict[str, Any] | None
    ) -> str:
        """Queue a task and return its id. Raise UnknownResources if the store lacks `resources_id`."""
        rollout = await self.store.enqueue_rollout(
            sample, mode, resources_id, self._config, metadata, rollout_id=f"rollout-{uuid.uuid4()}"
        )
        self._unread[rollout.rollout_id] = None
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
        """Return resources in the form of the protocol; None if the store lacks them.

        A ProxyLLM becomes an LLM. Resources that were made for a claimed attempt let the gateway record the calls for
        that attempt. With any others, the gateway cannot tell the attempt.
        resources_id: None for the latest.
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
        plain = {name: _without_proxy(each, attempted) for name, each in update.resources.items()}
        return update.model_copy(update={"resources": plain, "resources_id": asked or update.resources_id})

    async def report(self, report: RolloutLegacy) -> None:
        """Record a report and finish its task, whichever attempt the report comes from.

        The first report counts. A second one, from an attempt that had timed out, is dropped. A report on an unknown
        task is recorded too, as the original server does.
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
            except StoreError as error:  # the record of a model call could not be written
                reason = {"reason": f"the record of the attempt is incomplete: {error}", "reason_kind": "recording"}
                await self.store.update_attempt(*ids_, status="failed", metadata=reason)
            except IllegalTransition:  # the attempt timed out meanwhile
                continue
            self._claimed = {id_: each for id_, each in self._claimed.items() if each.rollout_id != report.rollout_id}
            if report.rollout_id not in self._read:
                self._unread[report.rollout_id] = None
            return
        logger.error(
            "the report on task %s is lost: %d attempts timed out while it was recorded; raise task_timeout_seconds",
            report.rollout_id,
            _TRIES,
        )

    async def refuse(self, rollout_id: str, reason: str) -> None:
        """End the attempt of a task whose report was refused, so that the task is not given out again and again."""
        with suppress(UnknownRollout, IllegalTransition):
            rollout = await self.store.get_rollout_by_id(rollout_id)
            if isinstance(rollout, AttemptedRollout) and not rollout.attempt.finished:
                metadata = {"reason": reason, "reason_kind": "invalid_report"}
                await self.store.update_attempt(
                    rollout_id, rollout.attempt.attempt_id, status="failed", metadata=metadata
                )

    async def take(self, rollout_id: str) -> RolloutLegacy | None:
        """Return the report on a finished task, once; None if it is unknown, unfinished or was returned before."""
        try:
            rollout = await self.store.get_rollout_by_id(rollout_id)
        except UnknownRollout:
            return None
        reports = await self._take([rollout]) if rollout.finished else []
        return reports[0] if reports else None

    async def take_all(self) -> list[RolloutLegacy]:
        """Return the reports on all finished tasks that were queued or reported here, each once."""
        finished = await self.store.query_rollouts(
            rollout_id_in=list(self._unread), status_in=["succeeded", "failed", "cancelled"]
        )
        return await self._take(finished)

    async def _take(self, finished: Sequence[Rollout]) -> list[RolloutLegacy]:
        """Return reports on finished rollouts, each once. If one cannot be read, none counts as returned."""
        rollouts = [rollout for rollout in finished if rollout.rollout_id not in self._read]
        taken = {rollout.rollout_id for rollout in rollouts}
        self._read |= taken  # at once, so that no other caller returns them meanwhile
        try:
            reports = [await self._report_on(rollout) for rollout in rollouts]
        except BaseException:
            self._read -= taken
            raise
        for rollout_id in taken:
            self._unread.pop(rollout_id, None)
        return reports

    async def _report_on(self, rollout: Rollout) -> RolloutLegacy:
        spans: Sequence[Span] = ()
        if isinstance(rollout, AttemptedRollout):
            spans = await self.store.query_spans(rollout.rollout_id, "latest")
        return report_of(rollout.rollout_id, spans, TraceToTriplet())

    async def _attempt_for(self, report: RolloutLegacy) -> AttemptedRollout | None:
        """Return the attempt to which the report is recorded; None if its task has finished. If the last attempt has
        ended, or the task is unknown, start a new one.
        """
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


def _without_proxy(resource: Any, attempted: AttemptedRollout | None) -> Any:
    """Return a resource that the protocol knows: a ProxyLLM becomes an LLM.

    attempted: the attempt that the LLM's address names, so that the gateway records the calls for it; None: the address
        names none.
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
