"""`OnlineSession`: what a web application uses to serve users with released resources.

No method waits for the network. What is released is in memory and follows the store behind the
requests (`released`), as does whether the gateway is there (`addresses`); ids are made and
signed here; records leave through the `outbox`. It knows no HTTP server (`app`) and does not
decide on releases.
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

from leyden.errors import ConfigError, GatewayError, StoreError
from leyden.options import check_number
from leyden.serving.addresses import ModelAddresses
from leyden.serving.assignment import Assignment, user_hash
from leyden.serving.loop_thread import LoopThread
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
from leyden.types.live import LIVE_TIMEOUT_SECONDS
from leyden.utils import ids

logger = logging.getLogger(__name__)

_START_SECONDS = 5.0
"""The seconds that `start` waits for the store before it begins with what was released last."""


@dataclass(frozen=True)
class Served:
    """The resources that one request is served with, all of one version, and the ids of its
    rollout.
    """

    rollout_id: str
    attempt_id: str
    arm: str
    version: VersionKey
    policy: str | None
    """The optimisation policy that the rule named."""
    resources: NamedResources
    """The resources of the version. Models have the gateway's address and a key for
    this rollout alone."""
    claim: str
    """The signed claim of the rollout. It ends the rollout in another process, too."""
    recorded: bool = True
    """False if the gateway is away and the models' own addresses are used."""
    began: float = field(default_factory=time.monotonic, repr=False)

    def llm(self) -> LLM:
        """Return the only model among the resources.

        Raise ConfigError if there is not exactly one.
        """
        models = [resource for resource in self.resources.values() if isinstance(resource, LLM)]
        if len(models) != 1:
            raise ConfigError(
                f"version {self.version} has {len(models)} models; choose one from `resources` by its name"
            )
        return models[0]


@dataclass(frozen=True)
class SessionStatus:
    """Status of a session: what it serves, and what is away, waiting or lost."""

    labels: Mapping[str, VersionKey]
    store_is_away: bool
    """Whether the store is away or full, so that labels are not read or records not written."""
    store_error: str | None
    """The reason why the store takes nothing, such as a full disk; None if it takes records."""
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
    """Records that the store refused; the log says why."""
    set_aside: int
    """Records on which the store fails. They wait in `outbox-aside` and are tried again."""


class OnlineSession:
    """Serve requests with released resources, between `start` and `close` (or in `with` or
    `async with`).

    All methods may be called from any thread and from coroutines: none waits for the network.
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
        """
        gateway: the address of a gateway that has the same `live_key`, such as
            http://127.0.0.1:4748.
        live_key: the secret that signs rollouts, and the key of the hash that assigns users.
        assignment: shares and rules; None: every user gets the label `production`.
        folder: where records wait while the store is away, and where the last released versions are
            kept for a start without the store. One process uses a folder at a time. None: both are
            lost with this process.
        spool_bytes: the largest size of the waiting records.
        refresh_seconds: how often the session checks whether the gateway answers, and whether a
            store that was away is back. Promotions and rollbacks are heard of by the store's news.
        fallback: while the gateway is away, give requests the models' own addresses (`models`),
            unrecorded and counted.
        models: the own address and key of each model by its name, for `fallback`.
        timeout_seconds: how long the store waits for the end of a rollout before it counts as
            `timeout`. Choose more than the time for which the store may be away, because ends
            wait for it.
        Raise ConfigError for an option that is out of its range.
        """
        if not live_key:
            raise ConfigError("live_key is empty; give the secret that the gateway has as live_key (LEYDEN_LIVE_KEY)")
        if fallback and not models:
            raise ConfigError("fallback=True needs models=: the models' own addresses, by their names")
        if models and not fallback:
            raise ConfigError("models= is for fallback=True alone: give both, or leave models out")
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

        Calling it again does nothing.

        If the store is away, the session begins with the versions that its folder has.
        Raise StoreError if there are none, ConfigError for a folder that another process uses.
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
        """Deliver what waits, for at most `within_seconds`, and stop.

        Records that are left stay in the folder.
        """
        if self._thread is None or self._outbox is None:
            return
        if self._tasks:
            self._outbox.wait_until_empty(within_seconds)
        self._thread.stop()
        self._thread, self._tasks = None, []
        if left := len(self._outbox) + len(self._outbox.aside):
            where = "in this session's folder" if self._folder is not None else "in no file, and are lost"
            logger.warning("%d records have not reached %s; they are %s", left, self._store.url, where)
        self._outbox.close()

    # ---- requests --------------------------------------------------------------------------------

    def begin(
        self,
        input: Any,
        *,
        user: str,
        task_type: str | None = None,
        quality: float | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Served:
        """Return what to serve one request with, and record that it began.

        input: the request, as JSON.
        user: the key that decides on the arm; a user keeps the arm. Only its keyed hash is
            recorded, as `metadata["user_hash"]`.
        task_type, quality: chosen by rules (`Assignment.rules`).
        Raise ConfigError if nothing is released for the request, GatewayError if the gateway is
        away and `fallback` is not set.
        """
        outbox = self._running()
        released, now = self._released.now, time.time()
        chosen = self._assignment.assign(
            self._key, user, released.labels, shares=released.shares, now=now, task_type=task_type, quality=quality
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
        known = {"task_type": task_type, "policy": chosen.policy, "user_hash": user_hash(self._key, user)}
        known |= {"unrecorded": not recorded or None, "labels_are_old": self._released.are_old or None}
        rollout = claim.rollout()
        rollout.input, rollout.timeout_seconds = input, self._timeout_seconds
        rollout.metadata = {**(metadata or {}), **{name: value for name, value in known.items() if value is not None}}
        self._put(outbox, rollout)
        self._served[chosen.arm] += 1
        self._unrecorded += not recorded
        return served

    def end(self, served: Served | str, status: LiveStatus = "succeeded", *, reason: str | None = None) -> None:
        """Record the end of a rollout. A second end changes nothing.

        served: what `begin` returned, or its `claim`.
        reason: why the rollout failed.
        Raise ConfigError for a claim that was not signed with this key.
        """
        claim = read_claim(self._key, served if isinstance(served, str) else served.claim)
        if claim is None:
            raise ConfigError(
                "the claim was not signed with this session's live_key; give the `claim` that begin returned"
            )
        rollout = claim.rollout()
        rollout.status, rollout.reason = status, reason
        rollout.seconds = (
            max(0.0, time.time() - claim.start_time) if isinstance(served, str) else time.monotonic() - served.began
        )
        self._put(self._running(), rollout)

    @contextmanager
    def serve(self, input: Any, *, user: str, **options: Any) -> Generator[Served]:
        """Call `begin` before the block and `end` after it. If the block raises, the rollout has
        failed, with the error as its reason.
        """
        served = self.begin(input, user=user, **options)
        try:
            yield served
        except BaseException as error:
            self.end(served, "failed", reason=f"{type(error).__name__}: {error}")
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

        rollout: what `begin` returned, its claim or the rollout's id, at any later time.
        reward, label, correction: exactly one of them.
        feedback_id: an id that the caller chooses, so that a repeated call is counted once.
        Raise ConfigError for an invalid value, StoreError if the spool is full.
        """
        given: dict[FeedbackKind, Any] = {"reward": reward, "label": label, "correction": correction}
        values: list[tuple[FeedbackKind, Any]] = [(kind, value) for kind, value in given.items() if value is not None]
        if len(values) != 1:
            raise ConfigError(f"give exactly one of reward=, label= and correction=, got {len(values)}")
        kind, value = values[0]
        fields: dict[str, Any] = {"rollout_id": rollout if isinstance(rollout, str) else rollout.rollout_id}
        text = rollout if isinstance(rollout, str) else rollout.claim
        if (claim := read_claim(self._key, text)) is not None:
            fields = dict(zip(("rollout_id", "resources_id", "version", "arm"), (claim[0], *claim[2:5]), strict=True))
        if feedback_id is not None:
            fields["feedback_id"] = feedback_id
        try:
            feedback = Feedback(source=source, kind=kind, value=value, given_time=time.time(), **fields)
        except ValueError as error:
            raise ConfigError(f"feedback about rollout {fields['rollout_id']!r}: {error}") from error
        self._running().put(feedback)
        return feedback

    def status(self) -> SessionStatus:
        """Return the session's status."""
        outbox = self._outbox
        store_error = (None if outbox is None else outbox.store_error) or self._released.store_error
        return SessionStatus(
            labels=dict(self._released.now.labels),
            store_is_away=store_error is not None,
            store_error=store_error,
            gateway_is_away=self._addresses.gateway_is_away,
            waiting=0 if outbox is None else len(outbox),
            served=dict(self._served),
            unrecorded=self._unrecorded,
            lost=self._lost,
            refused=0 if outbox is None else outbox.refused,
            set_aside=0 if outbox is None else len(outbox.aside),
        )

    def refresh(self) -> None:
        """Read what is released now, without waiting for news.

        Raise StoreError if the store is away.
        """
        self._running()
        assert self._thread is not None
        self._thread.run(self._released.read())

    # ---- behind the requests ---------------------------------------------------------------------

    async def _begin(self, outbox: Outbox) -> None:
        """Load the released versions, check the gateway, and start the background tasks: delivery,
        records set aside, versions, addresses.
        """
        await self._released.begin(_START_SECONDS)
        await self._addresses.check()
        pause_seconds = self._refresh_seconds
        background = (
            *(outbox.deliver(), outbox.aside.run()),
            *(self._released.follow(pause_seconds), self._addresses.watch(pause_seconds)),
        )
        self._tasks = [asyncio.create_task(work) for work in background]

    def _put(self, outbox: Outbox, rollout: LiveRollout) -> None:
        """Keep the beginning or the end of a rollout; a full spool loses it rather than the
        request.
        """
        try:
            outbox.put(rollout)
        except (StoreError, GatewayError):
            self._lost += 1

    def _running(self) -> Outbox:
        if self._outbox is None or self._thread is None:
            raise ConfigError("the session is not running; call start() or use `with OnlineSession(...) as session:`")
        return self._outbox
