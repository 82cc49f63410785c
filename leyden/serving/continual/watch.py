"""Judge a canary by its requests in the store, and advance its release by the verdict.

`judge` reads the live rollouts of both arms with their feedback and computes the whole verdict each time, so a
restarted process reaches the same verdict. Values that reach the store after the waiting time never count, so a later
call sees the same outcomes. `step` advances the release.

This module knows how requests are recorded: a rollout of mode `live` with an arm, `control` or `canary`. It does not
assign requests to arms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from leyden._lib.clock import unix_time
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.serving.assignment import NO_USER
from leyden.serving.continual.guard import GuardSettings, Verdict, decide, observe, start
from leyden.serving.continual.order import RequestOrder
from leyden.serving.continual.release import CANARY, Event, advance, is_stopped, state_of
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout, Feedback, Release, Rollout

CONTROL: Final = "control"
"""The arm of requests that run with the version in production."""
_EVENTS: Mapping[str, Event] = {"promote": "better", "roll_back": "worse"}
"""The release's event for each decision."""
GOOD_LABELS, BAD_LABELS = frozenset({"thumbs_up", "good"}), frozenset({"thumbs_down", "bad"})
"""Labels of feedback that count as a reward of 1, and of 0."""


def request_values(rollout: Rollout, feedback: Sequence[Feedback]) -> dict[str, float]:
    """Return the metrics of one request that are known by now: reward, failure, latency (seconds), cost.

    The reward is the mean over the given feedback, the last of each source and kind: its number, or 1 and 0 for the
    labels in `GOOD_LABELS` and `BAD_LABELS`. Without such feedback it is the reward that the agent recorded.
    """
    values: dict[str, float] = {}
    rewards = [number for each in feedback if (number := reward_of(each)) is not None]
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if not rewards and attempt is not None and attempt.reward is not None:
        rewards = [attempt.reward]
    if rewards:
        values["reward"] = mean_of(rewards)
    if rollout.finished:
        values["failure"] = float(rollout.status != "succeeded")
    if attempt is not None and attempt.end_time is not None:
        values["latency"] = attempt.end_time - attempt.start_time
        if attempt.cost is not None:
            values["cost"] = attempt.cost
    return values


def user_of(rollout: Rollout) -> str:
    """Return the key that decided the arm of a request.

    It is `metadata["user_hash"]`, which `OnlineSession` records, or `metadata["user"]`. Without either, it is the
    rollout's id, so that each request counts as another user.
    """
    user = rollout.metadata.get("user_hash", rollout.metadata.get("user"))
    return rollout.rollout_id if user is None else str(user)


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """How a canary is run and judged.

    share: the part of the users who get the canary, in (0, 1), from `start_canary` on. The sessions read it from the
        release.
    guard: the metrics and errors of the test.
    waiting_seconds: how long a missing value is awaited, from the arrival of the request's record at the store. Values
        that arrive later never count.
    deadline_seconds: a canary without a verdict after this time is rolled back, also one without any requests.
    settle_seconds: requests this soon after the start do not count, because some sessions do not know of the canary
        yet. Give at least the time in which sessions refresh their labels.
    lag_seconds: requests younger than this are not read yet, because records of older ones may still arrive.
    values: returns the metrics of one request, given its rollout and the feedback that counts.
    key: returns the key that decided the arm of a request.
    """

    share: float
    guard: GuardSettings = field(default_factory=GuardSettings)
    waiting_seconds: float = 3600.0
    deadline_seconds: float = 7 * 24 * 3600.0
    settle_seconds: float = 30.0
    lag_seconds: float = 5.0
    values: Callable[[Rollout, Sequence[Feedback]], Mapping[str, float]] = request_values
    key: Callable[[Rollout], str] = user_of

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(
                f"share is {self.share!r}; a canary and a control both need requests, so give a part in (0, 1)"
            )
        for name in ("waiting_seconds", "settle_seconds", "lag_seconds"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("deadline_seconds", self.deadline_seconds, above=self.settle_seconds)


async def start_canary(
    store: LightningStore,
    release: Release,
    settings: CanarySettings,
    *,
    details: Mapping[str, Any] | None = None,
    now: float | None = None,
    who: str | None = None,
    why: str | None = None,
) -> Release:
    """Put the label `canary` on the candidate, set its deadline, and return the release.

    The sessions read the share of the users, and the salt that chooses them, from the release. Raise IllegalTransition,
    ReleaseAdvanced or LabelMoved, as `advance` does.
    details: further ones to record with the release.
    now: the time in Unix seconds; None: the present.
    """
    now = unix_time() if now is None else now
    return await advance(
        store,
        release,
        "release",
        details={**(details or {}), "canary_from": now, "share": settings.share, "salt": release.release_id},
        deadline=now + settings.deadline_seconds,
        who=who,
        why=why,
    )


async def judge(
    store: LightningStore, release: Release, settings: CanarySettings, *, now: float | None = None
) -> Verdict:
    """Return the verdict on a canary by all requests and feedback in the store.

    All live rollouts of the two versions are read, so the cost grows with their number.
    now: Unix seconds; None: the present time.
    Raise ConfigError for a release that `start_canary` has not started.
    """
    now = unix_time() if now is None else now
    since = release.details.get("canary_from")
    if since is None:
        raise ConfigError(f"release {release.release_id!r} has no canary; call start_canary first")
    share = release.details.get("share", settings.share)
    order = RequestOrder([metric.name for metric in settings.guard.metrics], waiting_seconds=settings.waiting_seconds)
    feedback: dict[str, list[Feedback]] = {}
    for resources_id, number in filter(None, (release.canary_version, release.from_version)):
        for each in await store.query_feedback(resources_id=resources_id, version=number, received_from=since):
            feedback.setdefault(each.rollout_id, []).append(each)
    for rollout in await _requests(store, release, since + settings.settle_seconds, now - settings.lag_seconds):
        canary = rollout.arm == CANARY
        order.assign(rollout.rollout_id, key=settings.key(rollout), canary=canary, share=share, time=rollout.start_time)
        last = rollout.start_time + settings.waiting_seconds
        # Of each source and kind the latest in time counts.
        counted = {
            (each.source, each.kind): each
            for each in feedback.get(rollout.rollout_id, ())
            if each.received_time is None or each.received_time <= last
        }
        for metric, value in settings.values(_known_at(rollout, last), list(counted.values())).items():
            order.value(rollout.rollout_id, metric, value)
    state = start(settings.guard)
    for outcome in order.release(now):
        state = observe(settings.guard, state, outcome)
        verdict = decide(settings.guard, state)
        if verdict.decision != "continue":  # a sequential test ends at its first decision
            return verdict
    return decide(settings.guard, state)


async def step(
    store: LightningStore, release_id: str, settings: CanarySettings, *, now: float | None = None
) -> tuple[Release, Verdict | None]:
    """Judge a release once, and promote it, roll it back or leave it. Safe to repeat, from any process.

    The kill switch has priority over the verdict, and the verdict over the deadline. Return the release after this
    step, and the verdict; None instead of a verdict if the release is no canary or the kill switch is on. Raise
    ReleaseAdvanced or LabelMoved if a person or another process has intervened; the release is unchanged then.
    """
    now = unix_time() if now is None else now
    release = await store.get_release(release_id)
    if state_of(release) != "canary":
        return release, None
    if await is_stopped(store):
        return await advance(store, release, "stop", who="continual", why="learning is stopped"), None
    verdict = await judge(store, release, settings, now=now)
    details: dict[str, Any] = {
        "canary_requests": verdict.canary_requests,
        "control_requests": verdict.control_requests,
        "missing_alarm": verdict.missing_alarm,
        "share_alarm": verdict.share_alarm,
    }
    if verdict.decision != "continue":
        event = _EVENTS[verdict.decision]
        release = await advance(store, release, event, details=details, who="continual", why=verdict.reason)
    elif release.deadline is not None and now >= release.deadline:
        why = f"no verdict after {verdict.canary_requests:,} requests: {verdict.reason}"
        release = await advance(store, release, "deadline", details=details, who="continual", why=why)
    return release, verdict


async def _requests(store: LightningStore, release: Release, since: float, before: float) -> Sequence[Rollout]:
    """Return the live requests of both versions in the order in which they reached the store, from `since` until
    `before` (Unix seconds).

    A session that is cut off from the store may not know of the canary. So the requests that it marks as such are left
    out, and requests that were served before `since` and reported later. So are requests without a user, which are
    never given the canary, and requests from the release's deadline on, because sessions then serve production to all
    users.
    """
    ends = math.inf if release.deadline is None else release.deadline
    of_release: list[Rollout] = []
    for arm, version in ((CANARY, release.canary_version), (CONTROL, release.from_version)):
        if version is not None:
            found = await store.query_rollouts(
                mode_in=["live"], arm_in=[arm], resources_id=version[0], resources_version=version[1]
            )
            of_release += [
                rollout
                for rollout in found
                if rollout.start_time < before
                and rollout.metadata.get("served_at", rollout.start_time) < ends
                and min(rollout.start_time, rollout.metadata.get("served_at", math.inf)) >= since
                and not rollout.metadata.get("labels_are_old")
                and not rollout.metadata.get(NO_USER)
            ]
    return sorted(of_release, key=lambda rollout: (rollout.start_time, rollout.rollout_id))


def _known_at(rollout: Rollout, last: float) -> Rollout:
    """Return the rollout as it was at `last`: without its end if it ended later."""
    if rollout.end_time is None or rollout.end_time <= last:
        return rollout
    if not isinstance(rollout, AttemptedRollout):
        return rollout.model_copy(update={"status": "running", "end_time": None})
    attempt = rollout.attempt.model_copy(update={"status": "running", "end_time": None, "reward": None, "cost": None})
    return rollout.model_copy(update={"status": "running", "end_time": None, "attempt": attempt})


def reward_of(feedback: Feedback) -> float | None:
    """Return a feedback's reward: its number, 1 for a good label, 0 for a bad one; None for any other feedback."""
    if feedback.kind == "reward":
        return float(feedback.value)
    if feedback.kind == "label" and feedback.value in GOOD_LABELS | BAD_LABELS:
        return float(feedback.value in GOOD_LABELS)
    return None
