"""`Evaluation`: run an agent on every task, several times if wanted, and measure its rewards.

It learns nothing. `leyden eval` is its command.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden._lib import ids
from leyden._lib.components import arguments_of
from leyden._lib.options import check_number
from leyden.adapter import model_calls
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.own_metrics import means_of, own_metrics
from leyden.engine.policy_backend import PolicyBackend
from leyden.errors import ConfigError
from leyden.gateway import UpstreamModel
from leyden.statistics import Estimate, estimate
from leyden.types import (
    EnqueueRolloutRequest,
    NamedResources,
    ProxyLLM,
    RolloutConfig,
    failure_reason,
    semconv,
)

_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """One rollout of an evaluation."""

    rollout_id: str
    task: int
    """The task's index in the data set."""
    repeat: int
    """The number of the repetition, from 0."""
    status: str
    reward: float | None
    """The final reward; None if the rollout failed."""
    reason: str | None
    """Why the rollout failed; None if it succeeded."""
    input: Any
    model_calls: int
    prompt_tokens: int
    response_tokens: int
    own: dict[str, float] = field(default_factory=dict[str, float])
    """The agent's own numbers, by the metric's name; empty if the rollout failed."""


@dataclass(frozen=True, slots=True, repr=False)
class EvaluationResult:
    """The rewards, failures and costs that an evaluation measured."""

    reward: Estimate | None
    """The mean reward over the tasks that have a rollout with a reward; None if there is none."""
    reward_with_failures_as_zero: Estimate
    """The mean reward over all tasks, in which a rollout without a reward counts as 0."""
    tasks: int
    repeats: int
    rollouts: list[EvaluatedRollout]
    seconds: float = 0.0
    cost: float | None = None
    """Cost of the model calls, in the currency of the prices; None without prices."""

    def __repr__(self) -> str:
        reward = "no reward" if self.reward is None else f"reward {self.reward}"
        return f"{reward}, {self.failed:,} of {len(self.rollouts):,} rollouts failed"

    @property
    def failed(self) -> int:
        """The number of rollouts without a reward."""
        return sum(each.reward is None for each in self.rollouts)

    @property
    def failures(self) -> list[tuple[str, int, str]]:
        """The failures by reason, the most frequent first: the reason, the number of rollouts, the id of one."""
        failed = {each.rollout_id: each.reason or each.status for each in self.rollouts if each.reward is None}
        examples = {reason: rollout_id for rollout_id, reason in failed.items()}
        return [(reason, count, examples[reason]) for reason, count in Counter(failed.values()).most_common()]

    @property
    def model_calls(self) -> int:
        """Answered model calls of all rollouts."""
        return sum(each.model_calls for each in self.rollouts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model read."""
        return sum(each.prompt_tokens for each in self.rollouts)

    @property
    def response_tokens(self) -> int:
        return sum(each.response_tokens for each in self.rollouts)


class Evaluation(Algorithm):
    """Runs every task of the data set `repeats` times, and returns an `EvaluationResult`.

    backend: a model that is loaded for the evaluation and served as `backend.model_name`.
    models: models that other servers have.
    llms: the resources that are models: by the resource's name, the name of the backend's model or of one of `models`,
        and the sampling parameters to suggest to the agent.
    resources: other resources, such as prompt templates.
    timeout_seconds: time limit of each rollout; None: no limit.
    price_per_million: the prices of a million prompt tokens and of a million response tokens.
    """

    enqueues_datasets = True

    run_kind = "eval"

    def __init__(
        self,
        *,
        repeats: int = 1,
        backend: PolicyBackend | None = None,
        models: Sequence[UpstreamModel] = (),
        llms: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
        resources: NamedResources | None = None,
        timeout_seconds: float | None = 600.0,
        price_per_million: tuple[float, float] | None = None,
    ) -> None:
        check_number("repeats", repeats, at_least=1, whole=True)
        check_number("timeout_seconds", timeout_seconds, above=0, or_none="no limit")
        for price in price_per_million or ():
            check_number("price_per_million", price, at_least=0)
        self.repeats, self.timeout_seconds, self.price_per_million = repeats, timeout_seconds, price_per_million
        self._backend, self._models = backend, list(models)
        self._llms, self._resources = dict(llms or {}), dict(resources or {})
        self.uses_gateway = backend is not None or bool(self._models)

    def planned_resources(self) -> NamedResources:
        planned = {name: ProxyLLM(endpoint="http://gateway/v1", model=model) for name, (model, _) in self._llms.items()}
        return {**self._resources, **planned}

    def trained_model(self) -> Any:
        if self._backend is not None:
            return arguments_of(self._backend).get("model", self._backend.model_name)
        return self._models[0].model_name if self._models else None

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> EvaluationResult:
        """Measure the agent on the data set. Raise ConfigError for two of them."""
        if train_dataset is not None and val_dataset is not None:
            raise ConfigError("Evaluation measures on one data set and was given two; leave out train_dataset")
        tasks = train_dataset if val_dataset is None else val_dataset
        if tasks is None or not len(tasks):
            raise ConfigError("Evaluation needs tasks to measure the agent on; pass a data set with at least one")
        started = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            resources: NamedResources = dict(self._resources)
            if self.uses_gateway:
                proxy = await stack.enter_async_context(self.serving(self._backend, self._models))
                for name, (model, sampling) in self._llms.items():
                    llm = proxy.as_resource(model=model, sampling_parameters=dict(sampling))
                    resources[name] = await self.publish_endpoint(llm)
            rollouts = await self._measure(tasks, await self.publish_resources("evaluation", resources))
        result = self._result(rollouts, n_tasks=len(tasks), seconds=time.monotonic() - started)
        if result.reward is not None:
            self.get_run().report(
                {
                    "reward": result.reward.mean,
                    "rollouts": len(result.rollouts),
                    "failed": result.failed,
                    "model_calls": result.model_calls,
                    "prompt_tokens": result.prompt_tokens,
                    "response_tokens": result.response_tokens,
                    **means_of(each.own for each in result.rollouts),
                },
                stage="val",
            )
        return result

    async def _measure(self, tasks: Dataset[Any], resources_id: str) -> list[EvaluatedRollout]:
        run = self.get_run()
        places = [(task, repeat) for task in range(len(tasks)) for repeat in range(self.repeats)]
        requests = (self._request(tasks, place, resources_id) for place in places)
        found: list[EvaluatedRollout] = []
        counts: dict[str, float] = {"tokens": 0} if self.price_per_million is None else {"tokens": 0, "cost": 0.0}

        def show_progress() -> None:
            run.progress(len(found), len(places), **counts)

        async for result in self.collector.collect(
            requests, max_unfinished="auto", check=show_progress, check_seconds=_PROGRESS_SECONDS
        ):
            found.append(_evaluated(result, places[result.place]))
            counts["tokens"] += found[-1].response_tokens
            if self.price_per_million is not None:
                counts["cost"] += _cost(found[-1], self.price_per_million)
            show_progress()
        return sorted(found, key=lambda each: (each.task, each.repeat))

    def _request(self, tasks: Dataset[Any], place: tuple[int, int], resources_id: str) -> EnqueueRolloutRequest:
        task, repeat = place
        run_id = self.get_run().run_id
        return EnqueueRolloutRequest(
            rollout_id=rollout_id_at(run_id, task, repeat),
            input=tasks[task],
            mode="val",
            group_id=ids.derived_id("gr", run_id, task),
            resources_id=resources_id,
            config=RolloutConfig(timeout_seconds=self.timeout_seconds, require_reward=True),
            metadata={"task": task, "repeat": repeat, semconv.SAMPLING_KEY: f"val/{task}/{repeat}"},
        )

    def _result(self, rollouts: list[EvaluatedRollout], *, n_tasks: int, seconds: float) -> EvaluationResult:
        """Rollouts without a reward are left out of `reward` and count as 0 in `reward_with_failures_as_zero`."""
        by_task: dict[int, list[float | None]] = {}
        for each in rollouts:
            by_task.setdefault(each.task, []).append(each.reward)
        rewards = [[reward for reward in of_task if reward is not None] for of_task in by_task.values()]
        measured = [of_task for of_task in rewards if of_task]
        cost = None
        if self.price_per_million is not None:
            cost = sum(_cost(each, self.price_per_million) for each in rollouts)
        return EvaluationResult(
            reward=estimate(measured) if measured else None,
            reward_with_failures_as_zero=estimate(
                [[0.0 if reward is None else reward for reward in of_task] for of_task in by_task.values()]
            ),
            tasks=n_tasks,
            repeats=self.repeats,
            rollouts=rollouts,
            seconds=seconds,
            cost=cost,
        )


def _cost(rollout: EvaluatedRollout, price_per_million: tuple[float, float]) -> float:
    prompt_price, response_price = price_per_million
    return (rollout.prompt_tokens * prompt_price + rollout.response_tokens * response_price) / 1e6


def _evaluated(result: CollectedRollout, place: tuple[int, int]) -> EvaluatedRollout:
    calls = [call for call in model_calls(result.spans) if not call.failed] if result.spans else []
    counts = [
        (len(call.tokens.prompt_ids), len(call.tokens.response_ids))
        if call.tokens is not None
        else call.usage or (0, 0)
        for call in calls
    ]
    return EvaluatedRollout(
        rollout_id=result.rollout_id,
        task=place[0],
        repeat=place[1],
        status=result.status,
        reward=result.reward,
        reason=None if result.reward is not None else failure_reason(result.rollout),
        input=result.rollout.input,
        model_calls=len(calls),
        prompt_tokens=sum(prompt for prompt, _ in counts),
        response_tokens=sum(response for _, response in counts),
        own={} if result.reward is None else own_metrics(result.spans),
    )
