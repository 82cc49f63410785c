"""`ContinualLearning`: agents that keep learning from the requests that they serve.

One cycle consists of a trigger, training on recorded requests, a check on held-out tasks, optionally answers in the
shadow, a canary, and its promotion or rollback. Only the store holds the state of a cycle: one row of the release table
for the search of a candidate, and one for the candidate's release (`release`). So a crash of the controller loses
nothing: the next one that opens the store continues, or rolls back.

This module runs no algorithm: `jobs` do, in separate processes (`isolation`). To add a stage, add its state to
`release.TRANSITIONS` and a method here.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from leyden._lib.atomic import private_directory, write_file
from leyden._lib.clock import unix_time
from leyden._lib.options import check_number
from leyden._lib.text import describe_error, storable
from leyden.agent import LitAgent
from leyden.errors import (
    ChildDied,
    ConfigError,
    LabelMoved,
    ReleaseAdvanced,
    StoreClosed,
    StoreError,
    UnknownRelease,
    UnknownRollout,
    VersionFrozen,
)
from leyden.serving.continual.decision_metrics import REWARD
from leyden.serving.continual.gate import GateReport, GateSettings, Measurement, check
from leyden.serving.continual.isolation import Job, Limits, run_isolated, spent
from leyden.serving.continual.jobs import RESERVED, RESOURCES, Choose, MeasureJob, TrainJob
from leyden.serving.continual.recorded import DataSettings, LearningData, read_data, read_inputs
from leyden.serving.continual.release import (
    PRODUCTION,
    Event,
    Version,
    advance,
    begin,
    is_stopped,
    open_releases,
)
from leyden.serving.continual.trigger import (
    Trigger,
    TriggerState,
    drop_at,
    is_drop,
    learned,
    observe_reward,
    reason_to_learn,
)
from leyden.serving.continual.watch import CONTROL, CanarySettings, reward_of, start_canary, step
from leyden.statistics import RankHistory
from leyden.store.base import LightningStore
from leyden.types import Feedback, NamedResources, Release
from leyden.types.resources import digest_of

logger = logging.getLogger(__name__)

_WHO: Final = "continual"
"""The author of this module's changes in the audit log."""
_PAGE: Final = 1000
"""The number of feedback entries that are read at a time."""
_MAX_REWARDS: Final = 10_000
"""The number of latest rewards that are kept, to find the beginning of a drop among them."""
_DATA: Final = "data.json"
"""The file, in a cycle's folder, with the requests that the cycle learns from."""
_RELEASE: Final = "-release"
"""The end of the id of a release, which begins with the id of its cycle."""
_MAX_REASON: Final = 2000
"""The most characters of a reason that a process gave, such as its last words."""
_NO_RANKS: Final = RankHistory()
"""`REWARD` needs no history of ranks to be scaled."""


@dataclass(frozen=True, slots=True)
class ShadowSettings:
    """Options of the shadow: candidate and production answer live requests again, unseen by users, before any user gets
    the candidate.

    requests: how many live requests are answered again, by both versions.
    gate: the limits, as for held-out tasks. No user sees these answers and gives feedback, so rewards are compared only
        if `min_gain` is set, for an agent that returns a reward itself.
    deadline_seconds: the release ends if there are fewer than `requests` requests after this time.
    """

    requests: int = 50
    gate: GateSettings = field(default_factory=lambda: GateSettings(min_gain=None))
    deadline_seconds: float = 24 * 3600.0

    def __post_init__(self) -> None:
        check_number("requests", self.requests, at_least=1, whole=True)
        check_number("deadline_seconds", self.deadline_seconds, above=0)


@dataclass(frozen=True, slots=True)
class CycleStatus:
    """The result of one call of `ContinualLearning.step`."""

    state: str
    """The state of the cycle or release that is worked on; `idle` without one, `stopped` if the kill switch is on."""
    release_id: str | None
    """The id of that cycle or release; None without one."""
    said: str
    """The status in one sentence, for people."""


class ContinualLearning:
    """Learns from the requests in production, and releases the results, cycle after cycle.

    Only a canary's promotion changes production. The algorithm runs in a separate process and store, within `limits`; a
    failure there ends the cycle, with the error as its reason.

    `async with` locks the folder, `run()` works until it is cancelled, and `step()` does the work that is due now. A
    crash loses nothing: the next `run()` on the same store continues in the cycle's state, and an interrupted training
    from its run folder. To stop learning, from any process, call `stop_learning(store)`.

    algorithm: in any form that `Trainer` accepts, picklable: an instance, class, import path, name or dict. Its result
        becomes the candidate: named resources, the result of a prompt optimiser, or None if there is nothing to try. It
        gets recorded requests as `train_dataset` and `val_dataset` (`RecordedTasks`).
    agent: runs tasks for the algorithm and for the checks, as for `Trainer.fit`; picklable.
    store: the store in which sessions record requests, and whose labels they follow.
    folder: where the cycles' run folders, logs and results are kept. One process uses it at a time.
    trigger: when to learn, by feedback on the version in production.
    canary: how a canary is run and judged.
    data: which requests are learned from; None: the defaults of `DataSettings`.
    gate: the check on held-out tasks; None: the defaults of `GateSettings`.
    shadow: the check on live requests; None: no such check.
    limits: the limits of the training and of each check; None: the defaults of `Limits`.
    trainer: further options of `Trainer` for training and checks, picklable, such as `n_runners` or
        `llm_proxy={"model_list": [...]}`, which also records the cost of calls.
    candidate: a function of a run's summary and production's resources that returns the candidate, for algorithms that
        train weights; None: the algorithm's result is the candidate.
    name: the beginning of the cycles' ids. Several learners on one store need different names, and take turns.
    every_seconds: seconds between two reads of the store.
    pause_seconds: the least time between two cycles.
    """

    def __init__(
        self,
        algorithm: Any,
        agent: LitAgent[Any],
        *,
        store: LightningStore,
        folder: str | Path,
        trigger: Trigger,
        canary: CanarySettings,
        data: DataSettings | None = None,
        gate: GateSettings | None = None,
        shadow: ShadowSettings | None = None,
        limits: Limits | None = None,
        trainer: Mapping[str, Any] | None = None,
        candidate: Choose | None = None,
        name: str = "learning",
        every_seconds: float = 5.0,
        pause_seconds: float = 60.0,
    ) -> None:
        check_number("every_seconds", every_seconds, above=0)
        check_number("pause_seconds", pause_seconds, at_least=0)
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name is {name!r}; it names rows and folders, so give letters, digits, - and _")
        if wrong := sorted(RESERVED & (trainer or {}).keys()):
            raise ConfigError(f"trainer has {', '.join(wrong)}, which ContinualLearning sets itself; leave it out")
        if not isinstance(agent, LitAgent):
            raise ConfigError(f"the agent is a {type(agent).__name__}; decorate the function with @rollout")
        self._algorithm, self._agent, self._store, self._folder = algorithm, agent, store, Path(folder)
        self._trigger, self._canary, self._shadow = trigger, canary, shadow
        self._data, self._gate, self._limits = data or DataSettings(), gate or GateSettings(), limits or Limits()
        self._options, self._choose = dict(trainer or {}), candidate
        self._name, self._every, self._pause = name, every_seconds, pause_seconds
        self._rewards = _Rewards(trigger)
        self._lock: int | None = None

    # ---- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> ContinualLearning:
        """Create and lock the folder. Raise ConfigError if another process has locked it."""
        private_directory(self._folder)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"another process learns in {self._folder}; end it, or give this one another folder and name"
            ) from None
        self._lock = lock
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def run(self) -> None:
        """Learn until cancelled, in steps of `every_seconds`. Log each change of the status.

        While the store is unavailable, no step is taken; a training under way continues. Any other error is logged, and
        the step is tried again, until the deadline ends the cycle or release. Raise ConfigError if no process can be
        started for a training or a check.
        """
        if self._lock is None:
            async with self:
                return await self.run()
        last, words, trouble = None, None, None
        while True:
            try:
                status = await self.step()
            except (StoreClosed, _NoProcess):
                raise
            except StoreError as error:
                if trouble is not StoreError:
                    logger.warning("%s is away; learning waits: %s", self._store.url, error)
                trouble = StoreError
            except ReleaseAdvanced as error:
                logger.info("another controller was faster: %s", error)
            except Exception as error:
                if trouble != (said := describe_error(error)):
                    logger.error("%s: a step has failed and is tried again: %s", self._name, said, exc_info=error)
                trouble = said
            else:
                trouble = None
                if status != last:
                    before, words = words, (status.release_id, status.state, re.sub(r"\d", "", status.said))
                    level = logging.DEBUG if words == before else logging.INFO  # DEBUG: only a number has changed
                    last = status
                    logger.log(level, "%s %s: %s", status.release_id or self._name, status.state, status.said)
                    continue  # more work may be due
            await asyncio.sleep(self._every)

    async def step(self) -> CycleStatus:
        """Do the work that is due, up to the next transition of a state, and return the status.

        Returns after the training or check, if one is due. Safe to cancel and to repeat.
        Raise StoreError if the store is unavailable, ReleaseAdvanced if another process was faster.
        """
        rows = await open_releases(self._store)
        own = [row for row in rows if self._is_own(row)]
        if not own:
            if rows:
                return CycleStatus("idle", None, f"another controller's release {rows[0].release_id!r} is open")
            return await self._begin_if_due()
        row = own[0]
        match row.state:
            case "training":
                return await self._train(row)
            case "gating":
                return await self._check_offline(row)
            case "shadow":
                return await self._check_in_shadow(row)
            case _:
                return await self._watch(row)

    # ---- the states ------------------------------------------------------------------------------

    async def _begin_if_due(self) -> CycleStatus:
        """Begin a cycle if the trigger fires and there is enough data, and return its status; else return the status
        "idle" or "stopped", with the reason.
        """
        store, now = self._store, unix_time()
        if await is_stopped(store):
            return CycleStatus("stopped", None, "learning is stopped; allow_learning(store) allows it again")
        production = await self._production()
        if production is None:
            return CycleStatus("idle", None, f"no version has the label {PRODUCTION!r}")
        earlier = [row for row in await store.query_releases() if self._is_own(row)]
        ended = max((row.update_time for row in earlier), default=None)
        state = await self._rewards.read(store, production, ended)
        reason = reason_to_learn(self._trigger, state, now)
        if reason is None:
            return CycleStatus("idle", None, f"{state.count:,} new rewards")
        if ended is not None and now < ended + self._pause:
            return CycleStatus("idle", None, f"{reason}; the last cycle ended less than {self._pause:g} s ago")
        cycles = [row for row in earlier if not row.release_id.endswith(_RELEASE)]
        cycle_id = f"{self._name}-{len(cycles) + 1:06d}"
        since = max((row.create_time for row in cycles), default=0.0)
        if self._trigger.drift is not None and is_drop(self._trigger.drift, state):
            since = await self._rewards.changed_at(store)
        data = await read_data(store, self._data, since=since, before=now, cycle_id=cycle_id)
        n_checks, least = len(self._held_out(data)), self._gate.min_tasks
        if n_checks < least or not data.train:
            enough = (
                f"{len(data.train)} requests to learn from and {n_checks} of {least} to check on are not enough yet"
            )
            return CycleStatus("idle", None, f"{reason}; {enough}")
        details = {"reason": reason, "since": since, "before": now}
        cycle = await store.create_release(
            cycle_id,
            production,
            state="training",
            from_version=production,
            details=details,
            deadline=now + self._limits.seconds,
            who=_WHO,
            why=reason,
        )
        return _status(cycle, reason)

    async def _train(self, cycle: Release) -> CycleStatus:
        """Search for a candidate, and begin the candidate's release; end the cycle if there is none."""
        store = self._store
        try:
            release = await store.get_release(cycle.release_id + _RELEASE)
        except UnknownRelease:
            release = None
        if release is None:
            if ended := await self._end_if_due(cycle):
                return ended
            base = cycle.canary_version
            if (now_there := await self._production()) != base:
                why = f"production was moved from {_name(base)} to {_name(now_there)} meanwhile"
                return await self._advance(cycle, "give_up", why)
            data = await self._data_of(cycle)
            production = (await store.get_resources_by_id(base[0], version=base[1])).resources
            folder = self._folder_of(cycle)
            job = TrainJob(
                self._agent, self._options, folder / "train", self._algorithm, production, data, self._choose
            )
            try:
                found = await self._run(job, "train", cycle)
            except ChildDied as error:
                return await self._advance(cycle, "give_up", str(error))
            if found is None:
                return _status(cycle, "the training has ended with the cycle")
            version, why = await self._publish(cycle, production, found["candidate"])
            if version is None:
                return await self._advance(cycle, "give_up", why)
            release = await begin(
                store,
                cycle.release_id + _RELEASE,
                candidate=version,
                production=base,
                details={"cycle": cycle.release_id, "reason": cycle.details["reason"]},
                deadline=unix_time() + self._limits.seconds,
                who=_WHO,
                why=str(cycle.details["reason"]),
            )
        found = {"candidate": list(release.canary_version), "release": release.release_id}
        await self._advance(cycle, "propose", f"the candidate is {_name(release.canary_version)}", found)
        return _status(release, f"the candidate is {_name(release.canary_version)}")

    async def _check_offline(self, release: Release) -> CycleStatus:
        """Measure the candidate on held-out tasks, and refuse it, or pass it on to the shadow or the canary."""
        if ended := await self._end_if_due(release):
            return ended
        tasks = self._held_out(await self._data_of(await self._store.get_release(_cycle_of(release))))
        report = await self._measure(release, "gate", tasks, self._gate)
        if report is None:
            return _status(release, "the check has ended with the release")
        if not report.passed:
            return await self._advance(release, "refuse", report.reason, {"gate": report.numbers})
        if self._shadow is None:
            return await self._give_to_canary(release, report.reason, {"gate": report.numbers})
        now = unix_time()
        details = {"gate": report.numbers, "shadow_from": now}
        deadline = now + self._shadow.deadline_seconds
        return await self._advance(release, "observe", report.reason, details, deadline)

    async def _check_in_shadow(self, release: Release) -> CycleStatus:
        """Measure the candidate on live requests, once there are enough; refuse it or pass it on to the canary."""
        if ended := await self._end_if_due(release):
            return ended
        shadow = self._shadow or ShadowSettings()
        assert release.from_version is not None
        tasks = await read_inputs(
            self._store, release.from_version, since=release.details["shadow_from"], limit=shadow.requests
        )
        if len(tasks) < shadow.requests:
            return _status(release, f"{len(tasks)} of {shadow.requests} live requests")
        report = await self._measure(release, "shadow", tasks, shadow.gate)
        if report is None:
            return _status(release, "the check has ended with the release")
        if not report.passed:
            return await self._advance(release, "refuse", report.reason, {"shadow": report.numbers})
        return await self._give_to_canary(release, report.reason, {"shadow": report.numbers})

    async def _watch(self, release: Release) -> CycleStatus:
        """Judge the canary once with the feedback that has arrived. If a person has moved the label meanwhile, stop the
        cycle. If it cannot be judged, its deadline still ends it.
        """
        try:
            release, verdict = await step(self._store, release.release_id, self._canary)
        except (LabelMoved, VersionFrozen) as error:  # a person has intervened, who has priority
            return await self._advance(release, "stop", str(error))
        except (StoreError, ReleaseAdvanced):
            raise
        except Exception as error:
            if (ended := await self._end_if_due(release, describe_error(error))) is None:
                raise
            return ended
        return _status(release, "ended" if verdict is None else verdict.reason)

    # ---- transitions -----------------------------------------------------------------------------

    async def _give_to_canary(self, release: Release, why: str, details: Mapping[str, Any]) -> CycleStatus:
        """Make the release the canary, or stop it if a person has moved the label or frozen the version."""
        why = storable(why, limit=_MAX_REASON)
        try:
            release = await start_canary(self._store, release, self._canary, details=details, who=_WHO, why=why)
        except (LabelMoved, VersionFrozen) as error:
            return await self._advance(release, "stop", str(error))
        return _status(release, why)

    async def _end_if_due(self, row: Release, trouble: str | None = None) -> CycleStatus | None:
        """End a cycle or release if its time is over or the kill switch is on, and return the status; None if it may
        continue.

        trouble: why the last step has failed; None if it has not.
        """
        if await is_stopped(self._store):
            return await self._advance(row, "stop", "learning is stopped")
        if row.deadline is not None and unix_time() >= row.deadline:
            why = f"it was not done in time ({row.state})" + (f": {trouble}" if trouble else "")
            return await self._advance(row, "deadline", why)
        return None

    async def _advance(
        self,
        row: Release,
        event: Event,
        why: str,
        details: Mapping[str, Any] | None = None,
        deadline: float | None = None,
    ) -> CycleStatus:
        """Write one transition of a cycle or release to the store, and return the new status.

        why: the reason, for the audit log and the status, of any length.
        """
        why = storable(why, limit=_MAX_REASON)
        row = await advance(
            self._store, row, event, details={**(details or {}), "why": why}, deadline=deadline, who=_WHO, why=why
        )
        return _status(row, why)

    # ---- work ------------------------------------------------------------------------------------

    async def _measure(self, release: Release, name: str, tasks: list[Any], gate: GateSettings) -> GateReport | None:
        """Measure production and candidate on tasks, and return the report; None if the release has ended meanwhile.

        name: names the run's folder and log. If the process fails or dies, the candidate has failed the check.
        """
        base, candidate = [
            (await self._store.get_resources_by_id(version[0], version=version[1])).resources
            for version in (release.from_version, release.canary_version)
            if version is not None
        ]
        folder = self._folder / _cycle_of(release)
        job = MeasureJob(self._agent, self._options, folder / name, base, candidate, tasks, gate.replicas)
        try:
            found = await self._run(job, name, release)
        except ChildDied as error:
            return GateReport(False, str(error), {})
        return None if found is None else check(gate, Measurement.model_validate(found))

    async def _run(self, job: Job, name: str, row: Release) -> Any:
        """Run a job in a separate process, and return its result; None if the cycle or release `row` has ended
        meanwhile, the kill switch is on or the time is over.
        """

        async def go_on() -> bool:
            """Wait until the next check, and return whether the job may go on: in time, with its cycle open and
            learning not stopped. A store that is unavailable does not stop it.
            """
            await asyncio.sleep(self._every)
            in_time = row.deadline is None or unix_time() < row.deadline
            try:
                is_open = (await self._store.get_release(row.release_id)).state == row.state
                return in_time and is_open and not await is_stopped(self._store)
            except StoreClosed:
                raise
            except StoreError as error:  # the job does not use this store
                logger.info("%s is away; %s goes on: %s", self._store.url, name, error)
                return in_time

        folder = self._folder / _cycle_of(row)
        left = None if self._limits.cost is None else self._limits.cost - spent(folder)
        try:
            return await run_isolated(job, folder, name=name, limits=self._limits, cost_left=left, go_on=go_on)
        except ConfigError as error:
            raise _NoProcess(str(error)) from error

    async def _publish(self, cycle: Release, production: NamedResources, found: Any) -> tuple[Version | None, str]:
        """Write a candidate as the next version of the resources in production, and return the version and "". Return
        None and the reason if there is no candidate, or none worth trying.

        found: the candidate's resources as JSON, or None. Safe to repeat after a crash.
        """
        if found is None:
            return None, "the algorithm has found nothing to try"
        candidate = RESOURCES.validate_python(found)
        digest = digest_of(candidate)
        if digest == digest_of(production):
            return None, "the algorithm has found nothing better than what is in production"
        resources_id = cycle.canary_version[0]
        versions = await self._store.query_resources(resources_id=resources_id, all_versions=True)
        for each in versions:
            if each.author == cycle.release_id:  # an earlier process has written it, and crashed
                return (resources_id, each.version), ""
            if each.frozen and each.digest == digest:
                return None, (
                    f"the candidate is equal to version {each.version}, which is frozen; `leyden resources freeze "
                    f"{resources_id} {each.version} --undo` lets it be tried again"
                )
        update = await self._store.update_resources(
            resources_id, candidate, parent=cycle.canary_version, author=cycle.release_id
        )
        return (resources_id, update.version), ""

    async def _data_of(self, cycle: Release) -> LearningData:
        """Return the training data of a cycle, as it was when the cycle began. It is kept in the cycle's folder, in a
        file that only this user can read.
        """
        path = self._folder_of(cycle) / _DATA
        if path.exists():
            return LearningData.model_validate_json(path.read_text())
        details = cycle.details
        data = await read_data(
            self._store, self._data, since=details["since"], before=details["before"], cycle_id=cycle.release_id
        )
        private_directory(path.parent)
        write_file(path, data.model_dump_json())
        return data

    def _held_out(self, data: LearningData) -> list[Any]:
        tasks = [each.input for each in data.held_out] if self._gate.tasks is None else list(self._gate.tasks)
        return tasks[: self._gate.n_tasks]

    def _is_own(self, row: Release) -> bool:
        prefix, _, number = _cycle_of(row).rpartition("-")
        return prefix == self._name and number.isdigit()

    def _folder_of(self, cycle: Release) -> Path:
        return self._folder / cycle.release_id

    async def _production(self) -> Version | None:
        labels = {each.label: (each.resources_id, each.version) for each in await self._store.get_labels()}
        return labels.get(PRODUCTION)


class _NoProcess(ConfigError):
    """Raised if this program cannot start processes at all, so that no cycle can succeed."""


class _Rewards:
    """Reads the feedback on the version in production in the order of its arrival, and keeps the trigger's state."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._of: tuple[Version, float | None] | None = None
        """The version, and the end of the last cycle, to which the state belongs."""
        self._state = TriggerState(since=0.0)
        self._after: int | None = None
        """The sequence id of the last feedback that was read."""
        self._reset = False
        """Whether the count and the evidence have been reset after the last cycle."""
        self._latest: deque[tuple[str, float, float]] = deque(maxlen=_MAX_REWARDS)
        """Rollout, time and reward of the latest feedback, also from before the last cycle."""

    async def read(self, store: LightningStore, version: Version, ended: float | None) -> TriggerState:
        """Read the new feedback, and return the trigger's state.

        version: the version in production. Another version, or another `ended`, resets the state.
        ended: when the last cycle ended, in Unix seconds; the count and the evidence of a drop begin there. None: there
            was no cycle.
        """
        if self._of != (version, ended):
            since = ended
            if since is None:  # when the label was moved last
                records = await store.query_audit(label=PRODUCTION, limit=1)
                since = records[0].time if records else unix_time()
            self._of, self._state, self._after, self._reset = (version, ended), TriggerState(since=since), None, False
            self._latest.clear()
        while True:
            page = await store.query_feedback(
                resources_id=version[0], version=version[1], arm=CONTROL, after=self._after, limit=_PAGE
            )
            for each in page:
                self._observe(each, ended)
            if len(page) < _PAGE:
                break
        if ended is not None and not self._reset:
            self._state, self._reset = learned(self._state, ended), True
        return self._state

    def _observe(self, feedback: Feedback, ended: float | None) -> None:
        """Add one feedback to the trigger's evidence. The evidence is reset by the first reward that arrived after
        `ended`, the end of the last cycle.
        """
        self._after = feedback.sequence_id
        reward = reward_of(feedback)
        if reward is None:
            return
        if ended is not None and not self._reset and (feedback.received_time or 0.0) >= ended:
            self._state, self._reset = learned(self._state, ended), True
        number, _ = REWARD.scaled(reward, _NO_RANKS)
        self._state = observe_reward(self._trigger, self._state, number)
        self._latest.append((feedback.rollout_id, feedback.received_time or 0.0, number))

    async def changed_at(self, store: LightningStore) -> float:
        """Return when, most likely, the first request after a drop of the reward reached the store, in Unix seconds."""
        rollout_id, received, _ = self._latest[drop_at([reward for _, _, reward in self._latest])]
        try:
            return (await store.get_rollout_by_id(rollout_id)).start_time
        except UnknownRollout:  # pruned by the store's retention
            return received


def _name(version: Version | None) -> str:
    return "no version" if version is None else f"{version[0]} {version[1]}"


def _cycle_of(row: Release) -> str:
    return row.release_id.removesuffix(_RELEASE)


def _status(row: Release, said: str) -> CycleStatus:
    return CycleStatus(row.state, row.release_id, said)
