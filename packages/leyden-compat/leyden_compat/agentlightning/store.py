# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportReturnType=false, reportIncompatibleVariableOverride=false
"""Agent Lightning's stores: they return nothing for an unknown id, take its arguments and show spans under its names.

`OldStore` is a mixin for Leyden's stores, which do the work. One difference remains: a final status stays final, where
Agent Lightning's store would change it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypedDict

from opentelemetry.sdk.trace import ReadableSpan

from leyden import store as native
from leyden import types as native_types
from leyden.errors import IllegalTransition, UnknownAttempt, UnknownResources, UnknownRollout, UnknownWorker
from leyden.store.base import LightningStore
from leyden.store.store_app import StoreApplication
from leyden.types import (
    UNSET,
    Attempt,
    EnqueueRolloutRequest,
    ResourcesUpdate,
    Rollout,
    Unset,
    Worker,
    semconv,
)
from leyden.types import Span as NativeSpan
from leyden_compat.agentlightning.interfaces import users_store
from leyden_compat.agentlightning.litellm import RAW_REQUEST, raw_request
from leyden_compat.agentlightning.resources import old_update
from leyden_compat.agentlightning.types import PaginatedResult, Span

QUEUED = ("queuing", "requeuing")
"""The statuses of rollouts that wait to be claimed."""
_EVERY_SPAN = {"limit": -1, "offset": 0, "sort_by": "sequence_id", "sort_order": "asc", "filter_logic": "and"}
"""The options of `query_spans` with which it returns every span; the others must be None."""


class LightningStoreCapabilities(TypedDict, total=False):
    """The capabilities of a store, under Agent Lightning's names."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class LightningStoreStatistics(TypedDict, total=False):
    """The number of rows in a store, by kind, under Agent Lightning's names."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float
    total_span_bytes: int
    eviction_threshold_bytes: int
    safe_threshold_bytes: int
    memory_capacity_bytes: int


class OldStore(LightningStore):
    """A mixin for Leyden's stores, whose methods then return what Agent Lightning's return."""

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """Return a rollout, or None for an unknown id."""
        try:
            return await super().get_rollout_by_id(rollout_id)
        except UnknownRollout:
            return None

    async def query_rollouts(
        self, *, status: Sequence[Any] | None = None, rollout_ids: Sequence[str] | None = None, **options: Any
    ) -> PaginatedResult[Rollout]:
        """Return the rollouts that match all given conditions.

        `status` and `rollout_ids` are the old names of `status_in` and `rollout_id_in`, which take precedence.
        """
        for new, old in (("status_in", status), ("rollout_id_in", rollout_ids)):
            if options.get(new) is None and old is not None:
                options[new] = old
        return await self._query(super().query_rollouts, **options)

    async def query_attempts(self, rollout_id: str, **options: Any) -> PaginatedResult[Attempt]:
        """Return a rollout's attempts; none for an unknown id."""
        try:
            return await self._query(super().query_attempts, rollout_id, **options)
        except UnknownRollout:
            return _nothing(options)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the latest attempt; None without one, and for an unknown id."""
        try:
            return await super().get_latest_attempt(rollout_id)
        except UnknownRollout:
            return None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """Wait for rollouts, and return those that have ended within `timeout` seconds. Unknown ids are left out."""
        try:
            return await super().wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)
        except UnknownRollout:
            known = {rollout.rollout_id for rollout in await super().query_rollouts(rollout_id_in=rollout_ids)}
            ids = [rollout_id for rollout_id in rollout_ids if rollout_id in known]
            return await super().wait_for_rollouts(rollout_ids=ids, timeout=timeout) if ids else []

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for a rollout, and return it when it has ended; None after `timeout` seconds, and for an unknown id."""
        ended = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return ended[0] if ended else None

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Sequence[Rollout]:
        """Enqueue rollouts, given as requests or as dicts of their fields, and return them."""
        requests = [
            EnqueueRolloutRequest.model_validate(request) if isinstance(request, Mapping) else request
            for request in rollouts
        ]
        return await super().enqueue_many_rollouts(requests)

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: Any = UNSET,
        resources_id: Any = UNSET,
        status: Any = UNSET,
        config: Any = UNSET,
        metadata: Any = UNSET,
        **options: Any,
    ) -> Rollout:
        """Change a rollout, and return it.

        A queued rollout that is set to `preparing`, `running`, `succeeded` or `failed` gets an attempt, as if it had
        been claimed. A status that a finished rollout can no longer take is ignored.
        """
        fields = {"input": input, "mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
        given = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
        if given or options:
            await super().update_rollout(rollout_id, **given, **options)
        if not isinstance(status, Unset):
            await self._set_status(rollout_id, status)
        return await super().get_rollout_by_id(rollout_id)

    async def _set_status(self, rollout_id: str, status: Any) -> None:
        """Set a rollout's status by transitions that Leyden's lifecycle allows.

        A queued rollout gets the attempt that the status needs. If the rollout itself cannot take the status, its
        latest attempt does, unless the rollout is finished.
        """
        rollout = await super().get_rollout_by_id(rollout_id)
        if rollout.status == status:
            return
        if rollout.status in QUEUED and status in ("preparing", "running", "succeeded", "failed"):
            await super().start_attempt(rollout_id)
            if status != "preparing":
                await super().update_attempt(rollout_id, "latest", status=status)
            return
        try:
            await super().update_rollout(rollout_id, status=status)
        except IllegalTransition:
            if not rollout.finished:
                await super().update_attempt(rollout_id, "latest", status=status)

    async def update_attempt(self, rollout_id: str, attempt_id: str, *args: Any, **options: Any) -> Attempt:
        """Change an attempt, and return it. A change of status after its end is ignored."""
        try:
            return await super().update_attempt(rollout_id, attempt_id, *args, **options)
        except IllegalTransition:
            if attempt_id == "latest":
                found = await super().get_latest_attempt(rollout_id)
                assert found is not None
                return found
            return await super().get_attempt_by_id(rollout_id, attempt_id)

    async def add_span(self, span: NativeSpan) -> NativeSpan | None:
        """Add a span and return it; None if a span with its id was stored before."""
        stored = await super().add_span(span)
        return None if stored is None else Span.of(stored)

    async def add_many_spans(self, spans: Sequence[NativeSpan]) -> Sequence[NativeSpan]:
        """Add spans and return those that were not stored before."""
        return [Span.of(span) for span in await super().add_many_spans(spans)]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> NativeSpan | None:
        """Record an ended OpenTelemetry span. Return the stored span, or None if a span with its id was stored
        before.
        """
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0)
        return await self.add_span(span)

    async def query_spans(
        self, rollout_id: str | None = None, attempt_id: str | None = None, **options: Any
    ) -> PaginatedResult[NativeSpan]:
        """Return spans under Agent Lightning's names; none for an unknown id.

        A call that the gateway recorded gets a second span, `raw_gen_ai_request`, if the query is for all spans or for
        this name.
        """
        only_raw = options.get("name") == RAW_REQUEST
        if only_raw:
            options["name"] = semconv.MODEL_CALL
        try:
            page = await self._query(super().query_spans, rollout_id, attempt_id, **options)
        except (UnknownRollout, UnknownAttempt):
            return _nothing(options)
        spans: list[NativeSpan] = [] if only_raw else [Span.of(span) for span in page]
        if only_raw or all(value == _EVERY_SPAN.get(name) for name, value in options.items()):
            raw = {span.span_id: made for span in page if (made := raw_request(span))}
            spans = (
                [*raw.values()]
                if only_raw
                else [each for span in spans for each in (span, raw.get(span.span_id)) if each]
            )
        return PaginatedResult(spans, page.limit, page.offset, page.total - len(page) + len(spans), page.exact)

    async def query_spans_of(self, rollout_ids: Sequence[str]) -> dict[str, list[NativeSpan]]:
        """Return the spans of each rollout's latest attempt, by rollout id."""
        found = await super().query_spans_of(rollout_ids)
        return {rollout_id: [Span.of(span) for span in spans] for rollout_id, spans in found.items()}

    def otlp_traces_endpoint(self) -> str:
        """Return the URL at which the store takes OTLP traces.

        Raise NotImplementedError for a store without a server.
        """
        if not self.url.startswith("http"):
            raise NotImplementedError(f"{self.url} takes no OTLP; serve it with LightningStoreServer")
        return f"{self.url.rstrip('/')}/v1/traces"

    async def get_resources_by_id(self, resources_id: str, **options: Any) -> ResourcesUpdate | None:
        """Return resources, or None for an unknown id."""
        try:
            return old_update(await super().get_resources_by_id(resources_id, **options))
        except UnknownResources:
            return None

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the latest resources, or None."""
        found = await super().get_latest_resources()
        return None if found is None else old_update(found)

    async def get_labelled_resources(self, label: str) -> ResourcesUpdate | None:
        """Return the resources that have a label, or None."""
        found = await super().get_labelled_resources(label)
        return None if found is None else old_update(found)

    async def add_resources(self, *args: Any, **options: Any) -> ResourcesUpdate:
        """Add resources under a new id, and return them."""
        return old_update(await super().add_resources(*args, **options))

    async def update_resources(self, *args: Any, **options: Any) -> ResourcesUpdate:
        """Add a version of resources, and return it."""
        return old_update(await super().update_resources(*args, **options))

    async def query_resources(self, **options: Any) -> PaginatedResult[ResourcesUpdate]:
        """Return the resources that match, each in its latest version."""
        page = await self._query(super().query_resources, **options)
        return PaginatedResult([old_update(each) for each in page], page.limit, page.offset, page.total, page.exact)

    async def query_workers(self, **options: Any) -> PaginatedResult[Worker]:
        """Return the workers that match."""
        return await self._query(super().query_workers, **options)

    async def _query(
        self, method: Callable[..., Awaitable[native_types.PaginatedResult[Any]]], *args: Any, **options: Any
    ) -> PaginatedResult[Any]:
        if options.get("limit") != 0:
            return PaginatedResult.of(await method(*args, **options))
        counted = await method(*args, **{**options, "limit": 1, "offset": 0})
        return PaginatedResult([], 0, options.get("offset", 0), counted.total, counted.exact)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return a worker, or None for an unknown id."""
        try:
            return await super().get_worker_by_id(worker_id)
        except UnknownWorker:
            return None

    async def statistics(self) -> Any:
        """Return the number of rows by kind, with `uptime` as the old name of `uptime_seconds`."""
        counts = await super().statistics()
        return {**counts, "uptime": counts["uptime_seconds"]}


def _nothing(options: Mapping[str, Any]) -> PaginatedResult[Any]:
    return PaginatedResult([], options.get("limit", -1), options.get("offset", 0), 0)


class InMemoryLightningStore(OldStore, native.InMemoryLightningStore):
    """A store in this process's memory.

    The arguments are accepted and have no effect: the store is safe in threads, evicts nothing, and checks health on a
    schedule.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = False,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: Any = None,
        tracker: Any = None,
        scan_debounce_seconds: float = 10.0,
    ) -> None:
        native.InMemoryLightningStore.__init__(self)


class LightningStoreClient(OldStore, native.LightningStoreClient):
    """A client of the store that a server serves at `server_address`.

    The arguments about retries and time-outs have no effect; a request is repeated for a minute.
    """

    def __init__(
        self,
        server_address: str,
        *,
        retry_delays: Sequence[float] = (1.0, 2.0, 5.0),
        health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
        **options: Any,
    ) -> None:
        native.LightningStoreClient.__init__(self, server_address, **options)
        self.server_address_root = server_address.rstrip("/")
        self.server_address = f"{self.server_address_root}/v1/agl"

    def __reduce__(self) -> Any:
        """Pickle the address."""
        return LightningStoreClient, (self.url,)


class LightningStoreServer(native.LightningStoreServer):
    """Serves a store to clients of Leyden and of Agent Lightning 0.3. In the server's own process it also has the
    methods of the store.

    host, port, launcher_args: the address; by default port 4747 of this machine. With `0.0.0.0`, any client is admitted
        unless there is a token.
    cors_allow_origins: the origins whose web pages may call the server; `*` for every page.
    launch_mode, n_workers, tracker: of no effect; the metrics are at `/metrics`.
    """

    def __init__(
        self,
        store: LightningStore,
        host: str | None = None,
        port: int | None = None,
        cors_allow_origins: Any = None,
        launch_mode: str = "thread",
        launcher_args: Any = None,
        n_workers: int = 1,
        tracker: Any = None,
        **options: Any,
    ) -> None:
        if launcher_args is not None:
            if port is not None or host is not None:
                raise ValueError(f"port={port!r} and host={host!r} beside launcher_args: give launcher_args alone")
            host, port = launcher_args.host, launcher_args.port
        from leyden.monitor.prometheus import metrics
        from leyden_compat.agentlightning.own_store import as_native

        given = [cors_allow_origins] if isinstance(cors_allow_origins, str) else cors_allow_origins or ()
        self._origins = [origin.strip() for origin in given if origin.strip()]
        store = as_native(store)
        pages = metrics(store)
        options.setdefault("views", {**pages, "/v1/prometheus": next(iter(pages.values()))})
        address = "127.0.0.1" if host in (None, "localhost") else host
        insecure = options.pop("insecure", address == "0.0.0.0" and "token" not in options)
        super().__init__(store, address, 4747 if port is None else port, insecure=insecure, **options)

    def _make_app(self, **options: Any) -> StoreApplication:
        from leyden_compat.agentlightning.rest import AllowsPages, EitherApp

        app = EitherApp(self.store, **options)
        return AllowsPages(app, self._origins) if self._origins else app

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "store":
            raise AttributeError(name)
        return getattr(users_store(self.store), name)


def threaded(store: LightningStore) -> LightningStore:
    """Return the store itself instead of `LightningStoreThreaded(store)`: any store may be used from any
    thread.
    """
    return store


def is_queuing(rollout: Rollout) -> bool:
    """Return whether a rollout waits to be claimed."""
    return rollout.status in QUEUED


def is_running(rollout: Rollout) -> bool:
    """Return whether an attempt at the rollout is under way."""
    return rollout.status in ("preparing", "running")


def is_finished(rollout: Rollout) -> bool:
    """Return whether the rollout's status is final."""
    return rollout.finished
