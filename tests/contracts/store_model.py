"""What a store promises, in a hundred lines without a database: the state machine test compares every store with it.

It knows no time but what it is told, makes no ids, and keeps everything in the order of arrival. A method does what the protocol
says of the method of that name, or raises what the protocol says it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from leyden.errors import (
    ConfigError,
    IllegalTransition,
    UnknownAttempt,
    UnknownResources,
    UnknownRollout,
    UnknownRun,
)
from leyden.types import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    FINAL_RUN_STATUSES,
    OVERTAKES,
    ROLLOUT_FINISHED,
    ROLLOUT_TRANSITIONS,
    RolloutConfig,
)

__all__ = ["Fit", "Model", "Promise", "Try"]

OPEN = ("preparing", "running")
WAITING = ("queuing", "requeuing")


@dataclass
class Try:
    """An attempt."""

    attempt_id: str
    worker_id: str | None
    claim_id: str | None = None
    status: str = "preparing"
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    heard: float = 0.0
    """Its last sign of life, in seconds after the test began."""
    drawn: int = 0
    spans: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def over(self) -> bool:
        return self.status in ATTEMPT_FINISHED


@dataclass
class Promise:
    """A rollout; `fields` are those that its user chose."""

    rollout_id: str
    place: int
    fields: dict[str, Any]
    status: str = "queuing"
    tries: list[Try] = field(default_factory=list[Try])
    interrupted: int = 0
    ended: tuple[float, int] | None = None
    """When it was finished, in seconds after the test began, and by which call."""
    pins: set[str] = field(default_factory=set[str])

    @property
    def over(self) -> bool:
        return self.status in ROLLOUT_FINISHED

    def find(self, attempt_id: str) -> Try:
        for tried in self.tries[-1:] if attempt_id == "latest" else self.tries:
            if attempt_id in ("latest", tried.attempt_id):
                return tried
        raise UnknownAttempt(attempt_id)


@dataclass
class Fit:
    """A run."""

    status: str = "running"
    cause: str | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[tuple[int, str, str], float | None] = field(default_factory=dict[tuple[int, str, str], float | None])
    """By iteration, stage and name."""


class Model:
    def __init__(self) -> None:
        self.rollouts: dict[str, Promise] = {}
        self.places = 0
        self.workers: dict[str, tuple[str, tuple[str, str] | None]] = {}
        """Each with its status and its current attempt."""
        self.resources: list[tuple[str, int, Any]] = []
        """Every version that was written."""
        self.arrived: list[tuple[int, tuple[str, str, str]]] = []
        """Every span that is there, behind its number: rollout, attempt, span."""
        self.arrivals = 0
        self.runs: dict[str, Fit] = {}
        self.now = (0.0, 0)
        """The time of the call: seconds after the test began, and its number."""

    def rollout(self, rollout_id: str) -> Promise:
        if rollout_id not in self.rollouts:
            raise UnknownRollout(rollout_id)
        return self.rollouts[rollout_id]

    @property
    def queue(self) -> list[Promise]:
        waiting = [rollout for rollout in self.rollouts.values() if rollout.status in WAITING]
        return sorted(waiting, key=lambda r: (r.place - r.fields["priority"] * OVERTAKES, r.place))

    def enqueue(self, *rollouts: tuple[str, dict[str, Any]]) -> list[Promise]:
        new: dict[str, dict[str, Any]] = {}
        for rollout_id, fields in rollouts:
            if rollout_id not in self.rollouts and rollout_id not in new:
                new[rollout_id] = fields | {"resources_id": self.known(fields["resources_id"])}
                if fields["run_id"] is not None:
                    self.run(fields["run_id"])
        for rollout_id, fields in new.items():
            self.places += 1
            self.rollouts[rollout_id] = Promise(rollout_id, self.places, fields)
        return [self.rollouts[rollout_id] for rollout_id, _ in rollouts]

    def start_rollout(self, rollout_id: str, attempt_id: str, worker_id: str | None, **fields: Any) -> Promise:
        if rollout_id in self.rollouts:
            if any(tried.attempt_id == attempt_id for tried in self.rollouts[rollout_id].tries):
                return self.rollouts[rollout_id]
            raise ConfigError(rollout_id)
        return self.begin(self.enqueue((rollout_id, fields))[0], attempt_id, worker_id)

    def start_attempt(self, rollout_id: str, attempt_id: str, worker_id: str | None) -> Promise:
        rollout = self.rollout(rollout_id)
        if any(tried.attempt_id == attempt_id for tried in rollout.tries):
            return rollout
        if rollout.over:
            raise IllegalTransition(rollout_id)
        return self.begin(rollout, attempt_id, worker_id)

    def begin(self, rollout: Promise, attempt_id: str, worker_id: str | None, claim_id: str | None = None) -> Promise:
        rollout.tries.append(Try(attempt_id, worker_id, claim_id))
        rollout.status = "preparing"
        if worker_id is not None:
            self.workers[worker_id] = ("busy", (rollout.rollout_id, attempt_id))
        return rollout

    def claimed_under(self, claim_id: str | None) -> list[tuple[str, str]]:
        everything = [(r.rollout_id, t) for r in self.rollouts.values() for t in r.tries]
        return [(key, t.attempt_id) for key, t in everything if claim_id is not None and t.claim_id == claim_id]

    def undo_claim(self, claim_id: str) -> None:
        for rollout_id, attempt_id in self.claimed_under(claim_id):
            rollout = self.rollouts[rollout_id]
            tried = rollout.tries[-1]
            if tried.attempt_id != attempt_id or tried.status != "preparing" or tried.drawn:
                continue
            rollout.tries.pop()
            self.leave(tried.worker_id, rollout, tried, "idle")
            if not rollout.over:
                rollout.status = "requeuing" if rollout.tries else "queuing"

    def update_rollout(self, rollout_id: str, status: str | None, **changes: Any) -> Promise:
        rollout = self.rollout(rollout_id)
        if status is not None and status != rollout.status:
            if status not in ROLLOUT_TRANSITIONS[rollout.status]:  # type: ignore[index]
                raise IllegalTransition(status)
            if status in OPEN and (not rollout.tries or rollout.tries[-1].over):
                raise IllegalTransition(status)
        if changes.get("resources_id") is not None:
            self.known(changes["resources_id"])
        self.become(rollout, status or rollout.status)
        rollout.fields |= changes
        return rollout

    def become(self, rollout: Promise, status: str) -> None:
        rollout.status = status
        if rollout.over and rollout.ended is None:
            rollout.ended = self.now

    def update_attempt(self, rollout_id: str, attempt_id: str, **changes: Any) -> Try:
        rollout = self.rollout(rollout_id)
        tried = rollout.find(attempt_id)
        status, worker = changes.get("status", tried.status), changes.get("worker_id", tried.worker_id)
        if status != tried.status and status not in ATTEMPT_TRANSITIONS[tried.status]:  # type: ignore[index]
            raise IllegalTransition(status)
        metadata = tried.metadata | changes.get("metadata", {})
        heard = changes.get("last_heartbeat_time", tried.heard)
        if (status, worker, metadata, heard) == (tried.status, tried.worker_id, tried.metadata, tried.heard):
            return tried
        if tried.over:
            raise IllegalTransition(attempt_id)
        tried.metadata, tried.heard = metadata, heard
        self.move(rollout, tried, status, worker)
        return tried

    def update_many_attempts(self, *lines: tuple[str, str, dict[str, Any]]) -> list[Try]:
        """All of them or none: they are tried on a copy."""
        for model in (deepcopy(self), self):
            updated: list[Try] = []
            for rollout_id, attempt_id, changes in lines:
                updated.append(model.update_attempt(rollout_id, attempt_id, **changes))
                if any(tried is updated[-1] for tried in updated[:-1]):
                    raise ConfigError(attempt_id)
        return updated

    def add_spans(self, spans: Sequence[tuple[str, str, str, int]]) -> list[int]:
        """The sequence ids of those that were new."""
        for rollout_id, attempt_id, _, _ in spans:
            self.rollout(rollout_id).find(attempt_id)
        added: list[int] = []
        for rollout_id, attempt_id, span_id, number in spans:
            rollout = self.rollouts[rollout_id]
            tried = rollout.find(attempt_id)
            if span_id in tried.spans:
                continue
            tried.spans[span_id] = number or tried.drawn + 1
            tried.drawn = max(tried.drawn, tried.spans[span_id])
            added.append(tried.spans[span_id])
            self.arrivals += 1
            self.arrived.append((self.arrivals, (rollout_id, attempt_id, span_id)))
            if not tried.over:
                tried.heard = 0.0
                self.move(rollout, tried, "running", tried.worker_id)
        return added

    def sweep(self, seconds: float) -> list[tuple[str, str, str]]:
        """`seconds` after the test began; the attempts that changed, and to what."""
        changed: list[tuple[str, str, str]] = []
        for rollout in self.rollouts.values():
            config: RolloutConfig = rollout.fields["config"]
            limit, silence = config.timeout_seconds, config.unresponsive_seconds
            for tried in rollout.tries:
                if not tried.over and limit is not None and limit <= seconds:
                    tried.metadata |= {"reason_kind": "timeout"}
                    self.move(rollout, tried, "timeout", tried.worker_id)
                elif tried.status in OPEN and silence is not None and tried.heard + silence <= seconds:
                    self.move(rollout, tried, "unresponsive", tried.worker_id)
                else:
                    continue
                changed.append((rollout.rollout_id, tried.attempt_id, tried.status))
        return changed

    def release_claims(self, workers: Sequence[str] | None) -> set[str]:
        released: set[str] = set()
        for rollout in self.rollouts.values():
            for tried in rollout.tries:
                if tried.over or (workers is not None and tried.worker_id not in workers):
                    continue
                if not rollout.over:
                    rollout.status = "requeuing"  # before it could follow
                    rollout.interrupted += 1
                    released.add(rollout.rollout_id)
                reported, tried.metadata = tried.metadata, {}
                self.move(rollout, tried, "failed", tried.worker_id)
                tried.metadata = reported | {"reason_kind": "interrupted"}
        return released

    def move(self, rollout: Promise, tried: Try, status: str, worker: str | None) -> None:
        """An attempt has a new status, a new worker or both: its workers and its rollout follow."""
        before, tried.status = tried.status, status
        former, tried.worker_id = tried.worker_id, worker
        if former not in (None, worker):
            self.leave(former, rollout, tried, "idle")
        if worker is not None and (before, former) != (status, worker):
            if status in ATTEMPT_FINISHED and status != "timeout":
                self.leave(worker, rollout, tried, "idle")
            elif status in ("timeout", "unresponsive"):
                self.leave(worker, rollout, tried, "unknown")
            elif former != worker or (before == "unresponsive" and self.workers.get(worker) == ("unknown", None)):
                self.workers[worker] = ("busy", (rollout.rollout_id, tried.attempt_id))
        if status == before or rollout.over or tried is not rollout.tries[-1]:
            return
        config: RolloutConfig = rollout.fields["config"]
        if status in ("running", "succeeded"):
            self.become(rollout, status)
        elif status == "failed" and tried.metadata.get("reason_kind") == "interrupted":
            rollout.interrupted += 1
            self.become(rollout, "requeuing")
        elif status == "cancelled" and rollout.status != "requeuing":
            self.become(rollout, "cancelled")
        elif rollout.status != "requeuing":
            again = status in config.retry_condition and len(rollout.tries) - rollout.interrupted < config.max_attempts
            self.become(rollout, "requeuing" if again else "failed")

    def leave(self, worker: str | None, rollout: Promise, tried: Try, status: str) -> None:
        if worker is not None and self.workers.get(worker) == ("busy", (rollout.rollout_id, tried.attempt_id)):
            self.workers[worker] = (status, None)

    def pin(self, name: str, rollout_ids: Sequence[str]) -> None:
        pinned = [self.rollout(rollout_id) for rollout_id in rollout_ids]
        for rollout in self.rollouts.values():
            rollout.pins.discard(name)
        for rollout in pinned:
            rollout.pins.add(name)

    def prune(self, max_rollouts: int, limit: int) -> int:
        finished = sorted((r for r in self.rollouts.values() if r.ended), key=lambda r: (r.ended, r.place))
        stay = {*list(self.rollouts)[-1:], *(span[0] for _, span in self.arrived[-1:])}
        may_go = [rollout for rollout in finished if not rollout.pins and rollout.rollout_id not in stay]
        gone = may_go[: min(limit, max(0, len(finished) - max_rollouts))]
        for rollout in gone:
            del self.rollouts[rollout.rollout_id]
            self.workers = {
                name: ("idle", None) if current and current[0] == rollout.rollout_id else (status, current)
                for name, (status, current) in self.workers.items()
            }
        self.arrived = [(number, span) for number, span in self.arrived if span[0] in self.rollouts]
        return len(gone)

    def known(self, resources_id: str | None) -> str | None:
        if resources_id is None:
            return self.resources[-1][0] if self.resources else None
        if not self.versions(resources_id):
            raise UnknownResources(resources_id)
        return resources_id

    def versions(self, resources_id: str) -> list[Any]:
        return [content for key, _, content in self.resources if key == resources_id]

    def write_resources(self, resources_id: str, content: Any, *, update: bool) -> int:
        """The version that is there then."""
        versions = self.versions(resources_id)
        newest = (resources_id, len(versions), content)
        if versions and not update:
            if versions[-1] != content:
                raise ConfigError(resources_id)
            return len(versions)
        if not self.resources or self.resources[-1] != newest:
            self.resources.append((resources_id, len(versions) + 1, content))
        return len(self.versions(resources_id))

    def run(self, run_id: str) -> Fit:
        if run_id not in self.runs:
            raise UnknownRun(run_id)
        return self.runs[run_id]

    def start_run(self, run_id: str, config: dict[str, Any]) -> Fit:
        run = self.runs.setdefault(run_id, Fit())
        run.status, run.cause, run.config = "running", None, config
        return run

    def update_run(self, run_id: str, **changes: Any) -> Fit:
        run = self.run(run_id)
        if run.status in FINAL_RUN_STATUSES and changes.get("status", run.status) != run.status:
            raise IllegalTransition(run_id)
        for name, value in changes.items():
            setattr(run, name, value)
        return run

    def add_metrics(self, run_id: str, points: Sequence[tuple[tuple[int, str, str], float | None]]) -> None:
        self.run(run_id).metrics |= dict(points)

    def cut_metrics(self, run_id: str, after_iteration: int) -> None:
        run = self.run(run_id)
        run.metrics = {place: value for place, value in run.metrics.items() if place[0] <= after_iteration}
