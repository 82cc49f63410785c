# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
"""`OwnStore`: a store that a program implements, as the rest of Leyden expects a store.

It calls only the methods of Agent Lightning's interface, with its parameters, and of these only the ones that the
program has written. What the interface lacks (runs, metrics, pins, labels) is kept beside it: by the program's store
itself if that is a subclass of one of Leyden's, otherwise in memory.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from leyden import store as native_store
from leyden.errors import UnknownAttempt, UnknownResources, UnknownRollout, UnknownWorker
from leyden.types import (
    GATEWAY_SCHEME,
    LLM,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    Unset,
    Worker,
    current_run_id,
)
from leyden_compat.agentlightning.interfaces import METHODS, LightningStore, implements
from leyden_compat.agentlightning.rest import NativeView, PassedOn
from leyden_compat.agentlightning.types import PaginatedResult, Span

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.01, 0.2
"""Seconds between two polls of a store that cannot be waited for; each wait is longer than the one before."""
_FIELDS: Final = ("input", "mode", "resources_id", "config", "metadata")
"""The fields of a new rollout that the interface has."""


def as_native(store: Any) -> Any:
    """Return a store as the rest of Leyden expects it: a store that the program has written, or whose methods it has
    overridden, in an `OwnStore`; any other as it is.
    """
    if isinstance(store, native_store.LightningStoreServer):  # which has the store's methods in its own process
        return as_native(store.store)
    if not isinstance(store, LightningStore) or isinstance(store, OwnStore):
        return store
    if isinstance(store, native_store.LightningStore) and not any(implements(type(store), name) for name in METHODS):
        return store
    return OwnStore(store)


class OwnStore(PassedOn):
    """A store of Leyden over a store that a program has written."""

    def __init__(self, original: Any) -> None:
        self.original = original
        is_native = isinstance(original, native_store.LightningStore)
        self.native: Any = NativeView(original) if is_native else native_store.InMemoryLightningStore()
        self._is_native = is_native
        self._ids: dict[str, str] = {}
        """The ids that the program's store gave to rollouts, by the ids that callers chose."""
        self._groups: dict[str, tuple[str | None, str | None]] = {}
        """The run and the group of rollouts, by the ids of the program's store."""
        self._run_id: str | None = None
        """The run under way."""
        self._earlier: set[str] = set()
        """The rollouts that the program's store had before that run."""
        self._claims: dict[str, asyncio.Future[list[AttemptedRollout]]] = {}
        self._endpoints: dict[str, tuple[str, str | None]] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    @property
    def url(self) -> str:
        """The address of the program's store, or a name made of its class."""
        return self.original.url if self._is_native else f"memory://{type(self.original).__name__}"

    @property
    def capabilities(self) -> Any:
        """What the program's store says of itself."""
        if self._is_native:
            return self.original.capabilities
        given = dict(self.original.capabilities)
        return {
            **dict.fromkeys(("thread_safe", "async_safe", "otlp_traces"), False),
            **given,
            "zero_copy": False,
            "swept": True,
            "durable": False,
        }

    @property
    def for_the_program(self) -> Any:
        """The program's own store."""
        return self.original

    def _has(self, *names: str) -> bool:
        return any(implements(type(self.original), name) for name in names) or not self._is_native

    async def _call(self, name: str, *args: Any, **options: Any) -> Any:
        given = {key: value for key, value in options.items() if value is not None and not isinstance(value, Unset)}
        return await getattr(self.original, name)(*args, **given)

    async def _call_if_it_can(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the program's store. Return NotImplemented if the program lacks it."""
        try:
            return await self._call(name, *args, **options)
        except NotImplementedError:
            return NotImplemented

    async def close(self) -> None:
        """Close the program's store, if it can be closed."""
        await self.native.close()
        if not self._is_native and hasattr(self.original, "close"):
            closing = self.original.close()
            if inspect.isawaitable(closing):
                await closing

    async def statistics(self) -> Any:
        """Return what the program's store counts, and the rollouts by status."""
        if not self._has("statistics"):
            return await self.native.statistics()
        by_status: dict[str, int] = {}
        for rollout in await self._rollouts(None):
            by_status[rollout.status] = by_status.get(rollout.status, 0) + 1
        rest = {
            "name": type(self.original).__name__,
            "time": time.time(),
            "uptime_seconds": 0.0,
            "total_rollouts": sum(by_status.values()),
        }
        zeros = dict.fromkeys(("total_attempts", "total_spans", "total_resources", "total_workers"), 0)
        return {**zeros, **rest, **await self._call("statistics"), "rollouts_by_status": by_status}

    # ---- the queue -------------------------------------------------------------------------------

    async def start_rollout(self, input: Any, mode: Any = None, *args: Any, **options: Any) -> Any:
        """Add a rollout that is claimed already."""
        if not self._has("start_rollout"):
            return await self.native.start_rollout(input, mode, *args, **options)
        options |= dict(zip(("resources_id", "config", "metadata", "worker_id"), args, strict=False))
        kept = {name: options.get(name) for name in ("resources_id", "config", "metadata", "worker_id")}
        rollout = await self._call("start_rollout", input=input, mode=mode, **kept)
        self._note(rollout.rollout_id, options.get("rollout_id"), options.get("run_id"), options.get("group_id"))
        return rollout

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue rollouts. Each keeps the id that its caller chose, for this object's callers."""
        if not self._has("enqueue_rollout", "enqueue_many_rollouts"):
            return await self.native.enqueue_many_rollouts(rollouts)
        return [await self._enqueue(request) for request in rollouts]

    async def _enqueue(self, request: EnqueueRolloutRequest) -> Rollout:
        if request.rollout_id in self._ids:
            return await self.get_rollout_by_id(request.rollout_id)
        fields = {name: getattr(request, name) for name in _FIELDS}
        if implements(type(self.original), "enqueue_rollout") or not implements(
            type(self.original), "enqueue_many_rollouts"
        ):
            rollout = await self._call("enqueue_rollout", **fields)
        else:
            [rollout] = await self.original.enqueue_many_rollouts([EnqueueRolloutRequest(**fields)])
        self._note(rollout.rollout_id, request.rollout_id, request.run_id, request.group_id)
        return _under(rollout, request.rollout_id)

    def _note(self, rollout_id: str, chosen: str | None, run_id: Any, group_id: str | None) -> None:
        """Remember the id that a caller chose for a rollout, and its run and group."""
        run = current_run_id.get() if run_id is None or isinstance(run_id, Unset) else run_id
        self._groups[rollout_id] = run, group_id
        if chosen is not None:
            self._ids[chosen] = rollout_id

    async def dequeue_many_rollouts(
        self,
        *,
        limit: int = 1,
        worker_id: str | None = None,
        timeout_seconds: float = 0.0,
        claim_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts. Look again until there is one or the time is over."""
        if not self._has("dequeue_rollout", "dequeue_many_rollouts"):
            return await self.native.dequeue_many_rollouts(
                limit=limit, worker_id=worker_id, timeout_seconds=timeout_seconds, claim_id=claim_id
            )

        async def claim() -> list[AttemptedRollout] | None:
            claiming = asyncio.ensure_future(self._claim(limit, worker_id))
            if claim_id is not None:
                self._claims[claim_id] = claiming
            return await asyncio.shield(claiming) or None

        claimed = await _until(claim, timeout_seconds)
        if claim_id is not None:
            self._claims.pop(claim_id, None)
        return claimed or []

    async def _claim(self, limit: int, worker_id: str | None) -> list[AttemptedRollout]:
        if not implements(type(self.original), "dequeue_rollout") and implements(
            type(self.original), "dequeue_many_rollouts"
        ):
            return list(await self._call("dequeue_many_rollouts", limit=limit, worker_id=worker_id))
        claimed: list[AttemptedRollout] = []
        while len(claimed) < limit and (rollout := await self._call("dequeue_rollout", worker_id=worker_id)):
            claimed.append(rollout)
        return claimed

    async def undo_claim(self, claim_id: str, *, unless_repeated: bool = False) -> None:
        """Put the rollouts of a claim whose caller was cancelled in the queue again."""
        claiming = self._claims.pop(claim_id, None)
        if claiming is not None:
            for rollout in await claiming:
                await self.original.update_rollout(rollout_id=rollout.rollout_id, status="requeuing")
        elif not self._has("dequeue_rollout", "dequeue_many_rollouts"):
            await self.native.undo_claim(claim_id, unless_repeated=unless_repeated)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None, **options: Any) -> AttemptedRollout:
        """Start another attempt by hand."""
        if not self._has("start_attempt"):
            return await self.native.start_attempt(self._id(rollout_id), worker_id, **options)
        return await self._call("start_attempt", self._id(rollout_id), worker_id=worker_id)

    async def release_claims(self, *, worker_ids: Sequence[str] | None = None) -> Sequence[str]:
        """Return nothing: the interface does not know who has claimed what."""
        return await self.native.release_claims(worker_ids=worker_ids) if self._is_native else []

    # ---- spans -----------------------------------------------------------------------------------

    async def add_many_spans(self, spans: Sequence[Any]) -> Sequence[Any]:
        """Add spans, numbered by the program's store, and return the new ones."""
        if not self._has("add_span", "add_many_spans"):
            return await self.native.add_many_spans(spans)
        given = [await self._numbered(Span.of(span)) for span in spans]
        if implements(type(self.original), "add_many_spans"):
            return [span for span in await self.original.add_many_spans(given) if span is not None]
        return [span for span in [await self.original.add_span(span) for span in given] if span is not None]

    async def _numbered(self, span: Span) -> Span:
        if span.sequence_id:
            return span
        [number] = await self.get_many_span_sequence_ids([(span.rollout_id, span.attempt_id)])
        return span.model_copy(update={"sequence_id": number})

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Draw numbers from the program's store; count here if it does not."""
        if not self._has("get_next_span_sequence_id", "get_many_span_sequence_ids"):
            return await self.native.get_many_span_sequence_ids(rollout_attempt_ids)
        if implements(type(self.original), "get_many_span_sequence_ids"):
            return list(await self.original.get_many_span_sequence_ids(rollout_attempt_ids))
        numbers: list[int] = []
        for ids in rollout_attempt_ids:
            number = await self._call_if_it_can("get_next_span_sequence_id", *ids)
            if number is NotImplemented:
                number = self._numbers[ids] = self._numbers.get(ids, 0) + 1
            numbers.append(number)
        return numbers

    async def query_spans(
        self, rollout_id: str | None = None, attempt_id: str | None = None, **options: Any
    ) -> PaginatedResult[Any]:
        """Return spans of the program's store."""
        known = None if rollout_id is None else self._id(rollout_id)
        if not self._has("query_spans"):
            return await self.native.query_spans(known, attempt_id, **options)
        return _page(await self._call("query_spans", known, attempt_id, **options))

    async def query_spans_of(self, rollout_ids: Sequence[str]) -> dict[str, list[Any]]:
        """Return the spans of each rollout's latest attempt, by rollout id."""
        return {each: list(await self.query_spans(each, "latest")) for each in rollout_ids}

    # ---- rollouts and attempts -------------------------------------------------------------------

    def _id(self, rollout_id: str) -> str:
        return self._ids.get(rollout_id, rollout_id)

    async def _rollouts(self, rollout_ids: Iterable[str] | None, **options: Any) -> list[Rollout]:
        """Return rollouts by the ids of the program's store; None for all that it finds."""
        ids = None if rollout_ids is None else list(rollout_ids)
        if ids == []:
            return []
        found = await self._call_if_it_can("query_rollouts", rollout_id_in=ids, **options)
        if found is NotImplemented:
            each = [await self._call_if_it_can("get_rollout_by_id", known) for known in ids or self._groups]
            found = [rollout for rollout in each if rollout is not None and rollout is not NotImplemented]
            statuses = options.get("status_in")
            found = [rollout for rollout in found if statuses is None or rollout.status in statuses]
        return list(found)

    async def query_rollouts(self, **options: Any) -> PaginatedResult[Any]:
        """Return rollouts that match. Runs and groups are those that callers of this object named."""
        if not self._has("query_rollouts", "get_rollout_by_id", "enqueue_rollout", "enqueue_many_rollouts"):
            return await self.native.query_rollouts(**options)
        limit, offset = options.pop("limit", -1), options.pop("offset", 0)
        run_id, group_id = options.pop("run_id", None), options.pop("group_id", None)
        asked = options.pop("rollout_id_in", None)
        ids = None if asked is None else {self._id(each): each for each in asked}
        if run_id is not None or group_id is not None:
            for rollout in await self._rollouts(None):
                if rollout.rollout_id not in self._earlier:
                    self._groups.setdefault(rollout.rollout_id, (self._run_id, None))
            there = {
                each
                for each, (run, group) in self._groups.items()
                if run_id in (None, run) and group_id in (None, group)
            }
            ids = {each: each for each in there} if ids is None else {k: v for k, v in ids.items() if k in there}
        found = await self._rollouts(ids, **options)
        end = None if limit < 0 else offset + limit
        items = [_under(each, None if ids is None else ids.get(each.rollout_id)) for each in found[offset:end]]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=len(found))

    async def start_run(self, run: Any) -> Any:
        """Start a run, to which the rollouts belong that the program adds from now on."""
        self._run_id, self._earlier = run.run_id, {rollout.rollout_id for rollout in await self._rollouts(None)}
        return await self.native.start_run(run)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout:
        """Return one rollout. Raise UnknownRollout if the program's store has none."""
        known = self._id(rollout_id)
        if not self._has("get_rollout_by_id"):
            return _under(await self.native.get_rollout_by_id(known), rollout_id)
        found = await self._call_if_it_can("get_rollout_by_id", known)
        if found is NotImplemented:
            found = next(iter(await self._rollouts([known])), None)
        if found is None:
            raise UnknownRollout(f"rollout {rollout_id!r} is not in {self.url}")
        return _under(found, rollout_id)

    async def query_attempts(self, rollout_id: str, **options: Any) -> PaginatedResult[Any]:
        """Return the attempts of a rollout."""
        if not self._has("query_attempts"):
            return await self.native.query_attempts(self._id(rollout_id), **options)
        return _page(await self._call("query_attempts", self._id(rollout_id), **options))

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the latest attempt; None if there is none."""
        if not self._has("get_latest_attempt"):
            return await self.native.get_latest_attempt(self._id(rollout_id))
        return await self._call("get_latest_attempt", self._id(rollout_id))

    async def get_attempt_by_id(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Return one attempt. Raise UnknownAttempt if the program's store has none."""
        for attempt in await self.query_attempts(rollout_id):
            if attempt.attempt_id == attempt_id:
                return attempt
        raise UnknownAttempt(f"attempt {attempt_id!r} of rollout {rollout_id!r} is not in {self.url}")

    async def update_rollout(self, rollout_id: str, **options: Any) -> Rollout:
        """Change the given fields of a rollout."""
        if not self._has("update_rollout"):
            return await self.native.update_rollout(self._id(rollout_id), **options)
        options.pop("priority", None)
        return _under(await self._call("update_rollout", self._id(rollout_id), **options), rollout_id)

    async def update_attempt(self, rollout_id: str, attempt_id: str, *args: Any, **options: Any) -> Attempt:
        """Change the given fields of an attempt."""
        if not self._has("update_attempt"):
            return await self.native.update_attempt(self._id(rollout_id), attempt_id, *args, **options)
        options |= dict(zip(("status", "worker_id", "last_heartbeat_time", "metadata"), args, strict=False))
        options["metadata"] = options.get("metadata") or None
        return await self._call("update_attempt", self._id(rollout_id), attempt_id, **options)

    async def update_many_attempts(self, updates: Sequence[Any]) -> Sequence[Attempt]:
        """Change several attempts, one after another."""
        if not self._has("update_attempt"):
            return await self.native.update_many_attempts(updates)
        fields = [update.model_dump(exclude_unset=True) for update in updates]
        return [await self.update_attempt(each.pop("rollout_id"), each.pop("attempt_id"), **each) for each in fields]

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Wait for all rollouts, and return the finished ones in the order given."""
        wanted = {self._id(each) for each in rollout_ids}

        async def all_finished() -> Sequence[Rollout] | None:
            found = await self._finished(rollout_ids)
            return found if {self._id(each.rollout_id) for each in found} == wanted else None

        finished = await _until(all_finished, timeout)
        return await self._finished(rollout_ids) if finished is None else finished

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        """Wait for one of the rollouts, and return all that are finished by then."""

        async def any_finished() -> Sequence[Rollout] | None:
            return await self._finished(rollout_ids) or None

        return await _until(any_finished, timeout) or []

    async def _finished(self, rollout_ids: Sequence[str]) -> Sequence[Rollout]:
        """Return those of the rollouts that are finished, under the ids that the caller uses."""
        ids = {self._id(each): each for each in rollout_ids}
        found: Any = NotImplemented
        if self._has("wait_for_rollouts"):
            found = await self._call_if_it_can("wait_for_rollouts", rollout_ids=list(ids), timeout=0.0)
        if found is NotImplemented:
            found = [rollout for rollout in await self._rollouts(ids) if rollout.finished]
        by_id = {rollout.rollout_id: rollout for rollout in found}
        return [_under(by_id[known], asked) for known, asked in ids.items() if known in by_id]

    async def pin(self, name: str, rollout_ids: Sequence[str]) -> None:
        """Pin rollouts where they can be pruned."""
        if self._is_native:
            await self.native.pin(name, [self._id(each) for each in rollout_ids])

    # ---- resources and workers -------------------------------------------------------------------

    async def add_resources(self, resources: Any, **options: Any) -> ResourcesUpdate:
        """Add resources under a new id."""
        if not self._has("add_resources"):
            return await self.native.add_resources(resources, **options)
        return await self.original.add_resources(resources)

    async def update_resources(self, resources_id: str, resources: Any, **options: Any) -> ResourcesUpdate:
        """Add a version of resources."""
        if not self._has("update_resources"):
            return await self.native.update_resources(resources_id, resources, **options)
        return await self.original.update_resources(resources_id, resources)

    async def get_resources_by_id(self, resources_id: str, *, version: int | None = None) -> ResourcesUpdate:
        """Return resources. Raise UnknownResources if the program's store has none."""
        if not self._has("get_resources_by_id"):
            return await self.native.get_resources_by_id(resources_id, version=version)
        found = await self.original.get_resources_by_id(resources_id)
        if found is None:
            raise UnknownResources(f"resources {resources_id!r} are not in {self.url}")
        return self._located(found)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the latest resources, or None."""
        if not self._has("get_latest_resources"):
            return await self.native.get_latest_resources()
        found = await self._call_if_it_can("get_latest_resources")
        return None if found is None or found is NotImplemented else self._located(found)

    async def query_resources(self, **options: Any) -> PaginatedResult[Any]:
        """Return resources that match."""
        if not self._has("query_resources"):
            return await self.native.query_resources(**options)
        return _page(await self._call("query_resources", **options))

    async def set_endpoint(self, name: str, base_url: str, *, api_key: str | None = None) -> None:
        """Remember the address of a model that resources name."""
        if self._is_native:
            await self.native.set_endpoint(name, base_url, api_key=api_key)
        self._endpoints[name] = base_url, api_key

    def _located(self, update: ResourcesUpdate) -> ResourcesUpdate:
        """Return resources with the addresses of models that they name."""
        located = dict(update.resources)
        for name, resource in update.resources.items():
            if isinstance(resource, LLM) and resource.endpoint.startswith(GATEWAY_SCHEME):
                address = self._endpoints.get(resource.endpoint.removeprefix(GATEWAY_SCHEME))
                if address is not None:
                    located[name] = resource.model_copy(update={"endpoint": address[0], "api_key": address[1]})
        return update.model_copy(update={"resources": located})

    async def query_workers(self, **options: Any) -> PaginatedResult[Any]:
        """Return workers that match."""
        if not self._has("query_workers"):
            return await self.native.query_workers(**options)
        return _page(await self._call("query_workers", **options))

    async def get_worker_by_id(self, worker_id: str) -> Worker:
        """Return one worker. Raise UnknownWorker if the program's store has none."""
        if not self._has("get_worker_by_id"):
            return await self.native.get_worker_by_id(worker_id)
        found = await self.original.get_worker_by_id(worker_id)
        if found is None:
            raise UnknownWorker(f"worker {worker_id!r} is not in {self.url}")
        return found

    async def update_worker(self, worker_id: str, heartbeat_stats: Any = None) -> Worker:
        """Report a worker's state. A store without workers takes none."""
        if not self._has("update_worker"):
            return await self.native.update_worker(worker_id, heartbeat_stats)
        found = await self._call_if_it_can("update_worker", worker_id, heartbeat_stats=heartbeat_stats)
        return found if isinstance(found, Worker) else Worker(worker_id=worker_id)


def _under(rollout: Rollout, rollout_id: str | None) -> Rollout:
    """Return a rollout under the id that its caller chose."""
    if rollout_id is None or rollout.rollout_id == rollout_id:
        return rollout
    return rollout.model_copy(update={"rollout_id": rollout_id})


def _page(items: Any) -> PaginatedResult[Any]:
    if isinstance(items, PaginatedResult):
        return items
    found = list(items)
    return PaginatedResult(items=found, limit=-1, offset=0, total=getattr(items, "total", len(found)))


async def _until(poll: Callable[[], Any], timeout: float | None) -> Any:
    """Call a function until it returns something, and return that; None when the time is over."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = _MIN_POLL_SECONDS
    while (found := await poll()) is None:
        left = pause if end is None else end - time.monotonic()
        if left <= 0:
            return None
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _MAX_POLL_SECONDS)
    return found
