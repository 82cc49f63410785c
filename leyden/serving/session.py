"""`OnlineSession`: serves the users of a web application with released resources.

No request waits for the network. The released versions are in memory, and follow the store in the background
(`released`); so does the state of the gateway (`addresses`). Ids are made and signed here, and records are sent to the
store by the `outbox`. The module knows no HTTP server (`serving_app` does), and does not decide on releases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from leyden._lib import ids
from leyden._lib.clock import unix_time
from leyden._lib.event_loops import LoopThread
from leyden._lib.options import check_number
from leyden._lib.text import error_line, fault_reason, shown, storable
from leyden.errors import ConfigError, GatewayError, StoreError
from leyden.serving.addresses import ModelAddresses
from leyden.serving.assignment import NO_USER, Assignment, Users, user_hash
from leyden.serving.outbox import Outbox
from leyden.serving.released import ReleasedVersions
from leyden.store.base import LightningStore
from leyden.types import (
    LLM,
    Feedback,
    FeedbackKind,
    LiveClaim,
    LiveRollout,
    LiveStatus,
    NamedResources,
    VersionKey,
    read_claim,
    sign_claim,
)
from leyden.types.checks import check_id
from leyden.types.live import LIVE_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

_START_SECONDS = 5.0
"""The seconds that `start` waits for the store before it uses the versions in the session's folder."""


@dataclass(frozen=True)
class Served:
    """The resources that one request is served with, all of one version, and the ids of its rollout."""

    rollout_id: str
    attempt_id: str
    arm: str
    """`control`, or the label of the canary that serves the request."""
    version: VersionKey
    policy: str | None
    """The optimisation policy of the rule that applied."""
    resources: NamedResources
    """The resources of the version. Models have the gateway's address and a key for this rollout alone."""
    claim: str
    """The signed claim of the rollout. Another process can end the rollout with it, too."""
    recorded: bool = True
    """False if the gateway is unavailable and the models' own addresses are used."""
    began: float = field(default_factory=time.monotonic, repr=False)
    """When the request began, by this process's monotonic clock."""

    def llm(self) -> LLM:
        """Return the only model among the resources. Raise ConfigError if there is not exactly one."""
        models = [resource for resource in self.resources.values() if isinstance(resource, LLM)]
        if len(models) != 1:
            raise ConfigError(
                f"version {self.version} has {len(models)} models; choose one from `resources` by its name"
            )
        return models[0]


@dataclass(frozen=True)
class SessionStatus:
    """Status of a session: the versions that it serves, and whether the store, the gateway or records are missing."""

    labels: Mapping[str, VersionKey]
    """The version of each label, as the session serves it."""
    store_is_away: bool
    """Whether the store is unavailable or full, so that labels are not read or records not written."""
    store_error: str | None
    """Why labels are not read or records not written, such as a full disk; None if they are."""
    gateway_is_away: bool
    """Whether the gateway does not answer, or has another live key."""
    waiting: int
    """Records that are not in the store yet."""
    served: Mapping[str, int]
    """Requests since the start, by arm."""
    unrecorded: int
    """Requests whose calls go to the models' own addresses."""
    lost: int
    """Beginnings and ends of rollouts for which the spool had no room."""
    refused: int
    """Records that were dropped, such as feedback about rollouts that the store never knew; the log says why."""
    set_aside: int
    """Records that the store fails on or refuses. They wait in `outbox-aside` and are tried again."""


class OnlineSession:
    """Serves requests with released resources, between `start` and `close` (or in `with` or `async with`).

    All methods may be called from any thread. Those that serve requests may be called from coroutines, too, because
    they do not wait for the network; `start`, `close` and `refresh` do.
    """

    def __init__(
        self,
        store: LightningStore,
        *,
        gateway: str,
        live_key: str,
        assignment: Assignment | None = None,
        folder: str | Path | None = None,
        spool_bytes: int = 64 * 2**20,
        refresh_seconds: float = 0.5,
        fallback: bool = False,
        models: Mapping[str, LLM] | None = None,
        timeout_seconds: float = LIVE_TIMEOUT_SECONDS,
    ) -> None:
        """store: where rollouts and feedback are recorded, and whose labels are served.
        gateway: the address of a gateway that has the same `live_key`, such as http://127.0.0.1:4748.
        live_key: the secret that signs rollouts, and the key of the hash that assigns users.
        assignment: the share of users for a canary without a release, and the rules; None: the label `production`, and
            the canaries of releases.
        folder: where records wait while the store is unavailable, and where the last released versions are kept for a
            start without the store. One process uses a folder at a time. None: both are lost with this process.
        spool_bytes: the largest size of the file of waiting records.
        refresh_seconds: seconds between two checks whether the gateway answers, and whether a store that was
            unavailable is back. Promotions and rollbacks arrive by the store's news.
        fallback: whether requests get the models' own addresses (`models`) while the gateway is unavailable. Their
            calls are not recorded; `status` counts the requests.
        models: each model's own address and key, by the model's name, for `fallback`.
        timeout_seconds: how long the store waits for the end of a rollout before it counts as `timeout`. Choose more
            than the time for which the store may be unavailable, because ends wait for it.
        Raise ConfigError for an option that is out of its range.
        """
        if not live_key:
            raise ConfigError("live_key is empty; give the secret that the gateway has as live_key (LEYDEN_LIVE_KEY)")
        if fallback and not models:
            raise ConfigError("fallback=True needs models=: the models' own addresses, by their names")
        if models and not fallback:
            raise ConfigError("models= is only used with fallback=True; give both, or leave models out")
        if not gateway.startswith(("http://", "https://")):
            raise ConfigError(f"gateway is {gateway!r}; give its address, such as http://127.0.0.1:4748")
        check_number("spool_bytes", spool_bytes, at_least=0, whole=True)
        check_number("refresh_seconds", refresh_seconds, above=0)
        check_number("timeout_seconds", timeout_seconds, above=0)
        self._store = store
        check = sign_claim(live_key, LiveClaim("check", "check", "check", 0, "check", 0.0))
        self._addresses = ModelAddresses(gateway, dict(models or {}) if fallback else None, claim=check)
        self._key = live_key
        self._assignment = assignment or Assignment()
        self._folder = None if folder is None else Path(folder)
        self._spool_bytes = spool_bytes
        self._refresh_seconds = refresh_seconds
        self._timeout_seconds = timeout_seconds
        self._released = ReleasedVersions(store, None if self._folder is None else self._folder / "released.json")
        self._users = Users()
        self._served: Counter[str] = Counter()
        self._unrecorded = self._lost = 0
        self._outbox: Outbox | None = None
        self._thread: LoopThread | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))

    def start(self) -> None:
        """Load the released versions, and start to send records to the store.

        Calling it again does nothing. Blocks for up to some seconds. If the store is unavailable, the session begins
        with the versions in its folder. Raise StoreError if there are none, ConfigError for a folder that another
        process uses.
        """
        if self._thread is not None:
            return
        path = None if self._folder is None else self._folder / "outbox"
        self._outbox = Outbox(self._store, path, max_bytes=self._spool_bytes)
        self._thread = LoopThread("leyden-serving")
        try:
            self._thread.run(self._begin(self._outbox))
        except BaseException:
            self.close()
            raise

    def close(self, *, within_seconds: float = 5.0) -> None:
        """Wait at most `within_seconds` until all records are delivered, and stop.

        Records that are left stay in the folder; without a folder they are lost, which is logged.
        """
        if self._thread is None or self._outbox is None:
            return
        if self._tasks:
            self._outbox.wait_until_empty(within_seconds)
        self._thread.stop()
        self._thread, self._tasks = None, []
        if left := len(self._outbox) + len(self._outbox.dead_letters):
            where = "in this session's folder" if self._folder is not None else "in no file, and are lost"
            logger.warning("%d records have not reached %s; they are %s", left, self._store.url, where)
        self._outbox.close()

    # ---- requests --------------------------------------------------------------------------------

    def begin(
        self,
        input: Any,
        *,
        user: str | None,
        task_type: str | None = None,
        quality: float | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Served:
        """Assign one request to a version, record that the request began, and return the resources to serve it with.

        input: the request, a JSON value.
        user: any id of the user, which decides on the arm; a user keeps the arm. Only its keyed hash is recorded, as
            `metadata["user_hash"]`. None for a request without a user: it gets the version in production, and counts
            for no canary. So does a text that names nobody, such as "", "null" or "anonymous", because all such
            requests would have the same arm.
        task_type, quality: the kind of the request and the quality that it requires, by which `Assignment.rules`
            choose.
        metadata: recorded with the rollout.
        Raise ConfigError if no version is released for the request, and for arguments that the store would refuse or
        that are larger than an eighth of `spool_bytes`. Raise GatewayError if the gateway is unavailable and `fallback`
        is not set.
        """
        outbox = self._running()
        check_id("task_type", task_type)
        check_number("quality", quality, or_none="no required quality")
        person = self._users.identify(user)
        released, now = self._released.current, unix_time()
        chosen = self._assignment.assign(
            self._key, person, released.labels, shares=released.shares, now=now, task_type=task_type, quality=quality
        )
        claim = LiveClaim(ids.rollout_id(), ids.attempt_id(), *chosen.version, chosen.arm, now)
        signed = sign_claim(self._key, claim)
        given, recorded = self._addresses.resources(released.resources[chosen.version], chosen.version, signed)
        served = Served(
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt_id,
            arm=chosen.arm,
            version=chosen.version,
            policy=chosen.policy,
            resources=given,
            claim=signed,
            recorded=recorded,
        )
        hashed = None if person is None else user_hash(self._key, person)
        known = {"task_type": task_type, "policy": chosen.policy, "user_hash": hashed, NO_USER: person is None or None}
        known |= {"unrecorded": not recorded or None, "labels_are_old": self._released.are_old or None}
        extra = {name: value for name, value in known.items() if value is not None}
        metadata = {} if metadata is None else metadata
        self._put(
            outbox,
            claim,
            input=input,
            timeout_seconds=self._timeout_seconds,
            metadata={**metadata, **extra} if isinstance(metadata, Mapping) else metadata,
        )
        self._served[chosen.arm] += 1
        self._unrecorded += not recorded
        return served

    def end(self, served: Served | str, status: LiveStatus = "succeeded", *, reason: str | None = None) -> None:
        """Record the end of a rollout. A second end changes nothing.

        served: the result of `begin`, or its `claim`, also from another process.
        reason: why the rollout failed; None if it did not. The middle of a long one is left out.
        Raise ConfigError for a claim that was not signed with this key, or another status.
        """
        claim = read_claim(self._key, served if isinstance(served, str) else served.claim)
        if claim is None:
            raise ConfigError(
                "the claim was not signed with this session's live_key; give the `claim` that begin returned"
            )
        seconds = (
            max(0.0, unix_time() - claim.start_time) if isinstance(served, str) else time.monotonic() - served.began
        )
        reason = storable(reason) if isinstance(reason, str) else reason
        self._put(self._running(), claim, status=status, reason=reason, seconds=seconds)

    @contextmanager
    def serve(self, input: Any, *, user: str | None, **options: Any) -> Generator[Served]:
        """Yield the result of `begin`, and call `end` after the block. If the block raises, the rollout has failed,
        with the error as its reason.

        options: further arguments of `begin`.
        """
        served = self.begin(input, user=user, **options)
        try:
            yield served
        except BaseException as error:
            self.end(served, "failed", reason=error_line(error))
            raise
        self.end(served)

    def feedback(
        self,
        rollout: Served | str,
        *,
        source: str,
        reward: float | None = None,
        label: str | None = None,
        correction: Any = None,
        feedback_id: str | None = None,
    ) -> Feedback:
        """Record one piece of feedback about a rollout.

        If the session has a folder, the feedback is on the disk when this returns.

        rollout: the result of `begin`, its claim, or the rollout's id. The rollout may have ended long ago.
        source: who gives the feedback, such as "user". The last one of each source and kind counts.
        reward, label, correction: exactly one of them: a number, a word such as "thumbs_up", or a better answer as
            JSON.
        feedback_id: an id of the caller's choice, so that a repeated call is counted once.
        Raise ConfigError for what the store would refuse, and for more than an eighth of `spool_bytes`. Raise
        StoreError if the feedback cannot wait for the store, because the spool or the disk is full, or a quarter of the
        spool holds feedback about rollouts that are named by id. A claim proves its rollout, so give it where you have
        it.
        """
        given: dict[FeedbackKind, Any] = {"reward": reward, "label": label, "correction": correction}
        values: list[tuple[FeedbackKind, Any]] = [(kind, value) for kind, value in given.items() if value is not None]
        if len(values) != 1:
            raise ConfigError(f"give exactly one of reward=, label= and correction=, got {len(values)}")
        kind, value = values[0]
        if not isinstance(rollout, str | Served):
            raise ConfigError(f"rollout is {shown(rollout)}; give what begin returned, its claim or the rollout's id")
        fields: dict[str, Any] = {"rollout_id": rollout if isinstance(rollout, str) else rollout.rollout_id}
        text = rollout if isinstance(rollout, str) else rollout.claim
        if (claim := read_claim(self._key, text)) is not None:
            fields = {
                "rollout_id": claim.rollout_id,
                "resources_id": claim.resources_id,
                "version": claim.version,
                "arm": claim.arm,
            }
        if feedback_id is not None:
            fields["feedback_id"] = feedback_id
        try:
            feedback = Feedback(source=source, kind=kind, value=value, given_time=unix_time(), **fields)
        except ValidationError as error:
            raise ConfigError(f"feedback about rollout {fields['rollout_id']!r}: {_first_fault(error)}") from None
        try:
            self._running().put(feedback)
        except GatewayError as error:
            raise StoreError(f"feedback about rollout {feedback.rollout_id!r} is not recorded: {error}") from error
        return feedback

    def status(self) -> SessionStatus:
        outbox = self._outbox
        store_error = (None if outbox is None else outbox.store_error) or self._released.store_error
        return SessionStatus(
            labels=dict(self._released.current.labels),
            store_is_away=store_error is not None,
            store_error=store_error,
            gateway_is_away=self._addresses.gateway_is_away,
            waiting=0 if outbox is None else len(outbox),
            served=dict(self._served),
            unrecorded=self._unrecorded,
            lost=self._lost,
            refused=0 if outbox is None else outbox.refused,
            set_aside=0 if outbox is None else len(outbox.dead_letters),
        )

    def refresh(self) -> None:
        """Read the released versions from the store now, without waiting for its news. Blocks until the store answers.
        Raise StoreError if the store is unavailable.
        """
        self._running()
        assert self._thread is not None
        self._thread.run(self._released.read())

    # ---- behind the requests ---------------------------------------------------------------------

    async def _begin(self, outbox: Outbox) -> None:
        """Load the released versions, check the gateway, and start the background tasks."""
        await self._released.begin(_START_SECONDS)
        await self._addresses.check()
        pause_seconds = self._refresh_seconds
        background = (
            outbox.deliver(),
            outbox.dead_letters.run(),
            outbox.unknown.run(),
            self._released.follow(pause_seconds),
            self._addresses.watch(pause_seconds),
        )
        self._tasks = [asyncio.create_task(work) for work in background]

    def _put(self, outbox: Outbox, claim: LiveClaim, **fields: Any) -> None:
        """Put the beginning or the end of a rollout into the outbox. If the outbox is full, only the record is lost and
        counted, because the user's request must not fail.

        Raise ConfigError for fields that the store would refuse.
        """
        try:
            outbox.put(LiveRollout(**claim._asdict(), **fields))
        except ValidationError as error:
            raise ConfigError(f"rollout {claim.rollout_id!r}: {_first_fault(error)}") from None
        except (StoreError, GatewayError):
            self._lost += 1

    def _running(self) -> Outbox:
        if self._outbox is None or self._thread is None:
            raise ConfigError("the session is not running; call start() or use `with OnlineSession(...) as session:`")
        return self._outbox


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"{field}: {fault_reason(first)}" if field else fault_reason(first)
