"""`Evaluator`: measure the rewards of resources on tasks. Each evaluation is run once, and then found in the store.

A rollout's id is derived from everything that its reward depends on: the agent's code, the content of the resources
(without addresses and keys), the mode, the task and the number of the replica. So equal evaluations are run once,
whichever algorithm requests them, and a resumed run finds all that it had finished. The module knows rewards, not which
resources are better. It logs a warning once if the agent's model calls do not contain a prompt that the agent was
given.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from leyden._lib import ids
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number
from leyden.algorithm.collector import CollectedRollout, RolloutCollector, rollout_id_of
from leyden.algorithm.own_metrics import own_metrics
from leyden.algorithm.reported import ReportedVersion
from leyden.algorithm.usage import PromptUsage
from leyden.errors import BudgetExceeded, ConfigError, UnknownResources
from leyden.types import (
    GATEWAY_SCHEME,
    LLM,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    RolloutConfig,
    RolloutMode,
    failure_reason,
    semconv,
)
from leyden.types.resources import digest_of
from leyden.types.run_record import current_run_id

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.2
"""Interval at which an evaluation with a deadline checks the clock."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one replica of one task."""

    task: int
    """The task's index in the argument of `scores`."""
    replica: int
    """Number of the repetition of the task, from 0."""
    reward: float
    """The rollout's reward, or `failed_reward` if it failed."""
    reason: str | None
    """Why the rollout failed; None if it has a reward."""
    result: CollectedRollout | None
    """The rollout; None if it was not started at the deadline, or was unfinished in another run."""

    @property
    def failed(self) -> bool:
        """Whether the rollout has no reward itself."""
        return self.reason is not None

    @property
    def own(self) -> dict[str, float]:
        """The agent's own numbers, by the metric's name; empty if the rollout failed."""
        return {} if self.failed or self.result is None else own_metrics(self.result.spans)


@dataclass(frozen=True, slots=True)
class Scores:
    """All scores of one evaluation, by task and replica."""

    scores: Sequence[Score]

    @property
    def by_task(self) -> list[float]:
        """Each task's mean reward, in the order of the tasks."""
        rewards: dict[int, list[float]] = {}
        for score in self.scores:
            rewards.setdefault(score.task, []).append(score.reward)
        return [mean_of(rewards[task]) for task in sorted(rewards)]

    @property
    def mean(self) -> float:
        """The mean reward over tasks. A failed rollout counts as `failed_reward`."""
        return mean_of(self.by_task)

    @property
    def failed(self) -> int:
        return sum(score.failed for score in self.scores)


class Evaluator:
    """Evaluates resources on tasks. Concurrent evaluations share one collector, and so one budget.

    collector: runs the rollouts.
    agent_version: the agent's version, a text that changes whenever its results may change. Include the model's
        version; `Algorithm.get_agent_version` includes the gateway's models. None: the version that the workers report.
        If they report none, scores are reused within one run only.
    models: the version of the models behind the agent, which is added to a version that workers report; None: nothing
        is added.
    failed_reward: the reward of a rollout that failed, was cancelled or returned no reward.
    watched_prompts: names of the prompts for which a warning is logged if the agent's model calls do not contain their
        text; None: all prompts among the resources.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        *,
        agent_version: str | None = None,
        models: str | None = None,
        failed_reward: float = 0.0,
        watched_prompts: Collection[str] | None = None,
    ) -> None:
        if agent_version is not None and (not isinstance(agent_version, str) or not agent_version):
            raise ConfigError(f"agent_version is {agent_version!r}; give a text such as 'v1', or None if it is unknown")
        check_number("failed_reward", failed_reward)
        self.collector, self.agent_version, self.models = collector, agent_version, models
        self.failed_reward, self.watched_prompts = failed_reward, watched_prompts
        self._reported = ReportedVersion(collector.store)
        self._usage = PromptUsage()
        self._timed_out: set[str] = set()
        """Rollouts that a deadline of `scores` has cancelled in this process. They count as failed."""
        self._own_name = secrets.token_hex(6)
        self._has_warned = False

    async def publish(self, resources: NamedResources, *, parent: tuple[str, int] | None = None) -> ResourcesUpdate:
        """Write resources to the store, under an id that is derived from this run and their content, and return the
        stored version.

        It is safe to repeat. A repeat returns the version in the store, and writes a new one only if the address or key
        of a model has changed.
        parent: the id and version of the resources from which these were made.
        """
        store, author = self.collector.store, current_run_id.get()
        resources_id = ids.derived_id("rs", self._scope(), digest_of(resources))
        try:
            present = await store.get_resources_by_id(resources_id)
        except UnknownResources:
            return await store.update_resources(resources_id, resources, parent=parent, author=author)
        if _have_moved(present.resources, resources):
            return await store.update_resources(resources_id, resources, author=author)
        return present

    async def evaluate(self, resources: ResourcesUpdate, tasks: Sequence[Any], **options: Any) -> Scores:
        """Return the scores of all tasks, when the last rollout has finished. The options are those of `scores`."""
        found = [score async for score in self.scores(resources, tasks, **options)]
        return Scores(sorted(found, key=lambda score: (score.task, score.replica)))

    async def scores(
        self,
        resources: ResourcesUpdate,
        tasks: Sequence[Any],
        *,
        replicas: int = 1,
        mode: RolloutMode = "val",
        deadline_seconds: float | None = None,
        keep_until: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> AsyncGenerator[Score]:
        """Yield a score for each replica of each task, as soon as its rollout has finished.

        A rollout that is unfinished at the deadline is cancelled and counts as failed. Rollouts of other runs with the
        same prompt, task and agent version are reused. If such a rollout has failed, it is tried once more, because the
        cause may be gone; a failure in this run counts. When the budget's time is over, unfinished rollouts are
        cancelled and have no score; a resumed run with more time requests them again.

        resources: the newest version under its id, as `publish` returns it.
        tasks: JSON values. Equal tasks share one rollout for each replica.
        replicas: how often each task is run.
        deadline_seconds: time limit from now on; None: no limit.
        keep_until: keep the rollouts pinned in the store until `collector.release` is called with at least this number
            of steps; None: until their results are read.
        metadata: the metadata of each new rollout.
        Raise BudgetExceeded, and enqueue nothing, if the budget has too few rollouts for the new ones. Raise it after
        the finished scores if time, tokens or cost are used up before the last rollout.
        """
        check_number("replicas", replicas, at_least=1, whole=True)
        check_number("deadline_seconds", deadline_seconds, above=0, or_none="no deadline")
        ends_at = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        identity = await self._identity(deadline_seconds)
        places = [(task, replica) for task in range(len(tasks)) for replica in range(replicas)]
        requests = [
            self._request(
                identity, resources, tasks[task], replica, mode, {"task": task, "replica": replica, **(metadata or {})}
            )
            for task, replica in places
        ]
        wanted = list(range(len(places)))
        while wanted:
            again: list[int] = []
            async for index, result in self._collect([requests[place] for place in wanted], ends_at, keep_until):
                place = wanted[index]
                if self._is_tried_again(result):
                    again.append(place)
                else:
                    if result is not None:
                        for warning in self._usage.observe(resources.resources, result.spans, self.watched_prompts):
                            logger.warning("%s", warning)
                    yield self._score(places[place], result)
            for place in again:
                fresh = rollout_id_of("again", self._scope(), requests[place].rollout_id)
                requests[place] = requests[place].model_copy(update={"rollout_id": fresh})
            wanted = again

    # ---- one evaluation --------------------------------------------------------------------------

    def _request(
        self,
        identity: str,
        resources: ResourcesUpdate,
        task: Any,
        replica: int,
        mode: RolloutMode,
        metadata: dict[str, Any],
    ) -> EnqueueRolloutRequest:
        """Equal evaluations share a rollout, because its id is derived from `identity` and the content."""
        content = (resources.digest, mode, task, replica)
        return EnqueueRolloutRequest(
            rollout_id=rollout_id_of("evaluation", identity, *content),
            input=task,
            mode=mode,
            resources_id=resources.resources_id,
            config=RolloutConfig(require_reward=True),
            metadata={**metadata, semconv.SAMPLING_KEY: rollout_id_of(*content)},  # the same in another run
        )

    async def _collect(
        self, requests: Sequence[EnqueueRolloutRequest], ends_at: float | None, keep_until: int | None
    ) -> AsyncGenerator[tuple[int, CollectedRollout | None]]:
        """Yield each request's index and its result, which is None if the deadline passed first.

        ends_at: the deadline, by `time.monotonic`; None: no deadline.
        If the budget's time is over instead, yield the finished results, and raise BudgetExceeded if there are others.
        """

        def check_deadline() -> None:
            if self._out_of_time or (ends_at is not None and time.monotonic() >= ends_at):
                raise _DeadlinePassed

        left = dict(enumerate(requests))
        try:
            async for result in self.collector.collect(
                requests, keep_until=keep_until, check=check_deadline, check_seconds=_CHECK_SECONDS
            ):
                del left[result.place]
                yield result.place, result
        except _DeadlinePassed:
            # Cancel the others, and read those that finished before they could be cancelled.
            is_cut = self._out_of_time
            unfinished = [str(request.rollout_id) for request in left.values()]
            if not is_cut:
                self._timed_out.update(unfinished)
            await self.collector.cancel(unfinished)
            stored = await self.collector.store.query_rollouts(rollout_id_in=unfinished)
            finished = {rollout.rollout_id for rollout in stored if rollout.finished}
            places = [place for place, request in left.items() if request.rollout_id in finished]
            async for result in self.collector.collect([left[place] for place in places], keep_until=keep_until):
                yield places[result.place], result
            others = left.keys() - set(places)
            if others and is_cut:
                raise BudgetExceeded(
                    f"the time of Budget(seconds={self.collector.budget.seconds:g}) is over, and {len(others):,} rollouts "
                    "have not started, or belong to another run and have not finished; give a larger budget"
                ) from None
            for place in others:
                yield place, None

    def _is_tried_again(self, result: CollectedRollout | None) -> bool:
        """Return whether to run a rollout again: it failed in another run, or was cancelled before it could have a
        score, but not by a deadline of this evaluator.
        """
        if result is None or result.reward is not None:
            return False
        if result.rollout.run_id != result.request.run_id:
            return True
        is_cut = result.cached or self._out_of_time
        return result.status == "cancelled" and is_cut and result.rollout_id not in self._timed_out

    @property
    def _out_of_time(self) -> bool:
        return self.collector.budget.seconds_left == 0

    def _score(self, place: tuple[int, int], result: CollectedRollout | None) -> Score:
        reason = "not started at the deadline, or unfinished in another run"
        if result is not None:
            if result.status == "succeeded" and result.reward is not None:
                return Score(*place, result.reward, None, result)
            reason = failure_reason(result.rollout)
        return Score(*place, self.failed_reward, reason, result)

    # ---- what a score depends on -----------------------------------------------------------------

    async def _identity(self, seconds: float | None) -> str:
        """Return the agent's version, or the run's id if the version is unknown."""
        if self.agent_version is not None:
            return self.agent_version
        if (reported := await self._reported.read(seconds=seconds)) is not None:
            return reported if self.models is None else with_models(reported, self.models)
        if not self._has_warned:
            self._has_warned = True
            logger.info(
                "the agent's version is unknown to the algorithm and to its workers, so scores of other runs are not "
                "used; give agent_version= to use them"
            )
        return f"an agent of {self._scope()}"

    def _scope(self) -> str:
        """Return the run's part of a rollout's id: the run's id, or, outside a run, a random name of this evaluator."""
        return current_run_id.get() or self._own_name


def with_models(agent_version: str, models: str) -> str:
    """Return the version of an agent together with that of the models behind it."""
    return f"{agent_version} with models {models}"


class _DeadlinePassed(Exception):
    """Raised to end a collection at its deadline."""


def _have_moved(stored: NamedResources, given: NamedResources) -> bool:
    """A `gateway://` name has not moved, because the store knows its current address."""
    return any(
        isinstance(model, LLM) and not model.endpoint.startswith(GATEWAY_SCHEME) and stored[name] != model
        for name, model in given.items()
    )
