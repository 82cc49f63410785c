"""`Evaluation`: run an agent on every task, several times if wanted, and measure its rewards.

It learns nothing. `leyden eval` is its command.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden._lib import ids
from leyden._lib.components import arguments_of
from leyden._lib.options import check_number
from leyden.adapter import model_calls
from leyden.adapter.normalise import ModelCallView
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.own_metrics import means_of, own_metrics
from leyden.engine.policy_backend import PolicyBackend
from leyden.errors import ConfigError
from leyden.gateway import Prices, UpstreamModel
from leyden.statistics import Estimate, estimate
from leyden.types import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    NamedResources,
    ProxyLLM,
    Rollout,
    RolloutConfig,
    Spending,
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
    cost: float | None = None
    """Cost of the model calls of its last attempt; None if one of them has no known cost."""
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
    spending: Spending | None = None
    """The tokens and the cost of all model calls, those of repeated attempts included; None without prices."""

    @property
    def cost(self) -> float | None:
        """Cost of the model calls, in the currency of the prices; None without prices. If `spending.unpriced_calls` is
        not 0, it is a part of the whole.
        """
        return None if self.spending is None else self.spending.cost

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
    prices: what the models charge for tokens; None: no cost is reported.
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
        prices: Prices | None = None,
    ) -> None:
        check_number("repeats", repeats, at_least=1, whole=True)
        check_number("timeout_seconds", timeout_seconds, above=0, or_none="no limit")
        self.repeats, self.timeout_seconds, self.prices = repeats, timeout_seconds, prices
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

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        return self.repeats * (n_train + n_val)

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
                if self.prices is not None:
                    self.require_llm_proxy().set_prices(self.prices)
                proxy = await stack.enter_async_context(self.serving(self._backend, self._models))
                for name, (model, sampling) in self._llms.items():
                    llm = proxy.as_resource(model=model, sampling_parameters=dict(sampling))
                    resources[name] = await self.publish_endpoint(llm)
            rollouts = await self._measure(tasks, await self.publish_resources("evaluation", resources))
        spending = None if self.prices is None else await self._spending(rollouts)
        result = self._result(rollouts, n_tasks=len(tasks), seconds=time.monotonic() - started, spending=spending)
        if result.reward is not None:
            self.get_run().report(
                {
                    "reward": result.reward.mean,
                    "rollouts": len(result.rollouts),
                    "failed": result.failed,
                    "model_calls": result.model_calls,
                    "prompt_tokens": result.prompt_tokens,
                    "response_tokens": result.response_tokens,
                    **({} if result.cost is None else {"cost": result.cost, "total_cost": result.cost}),
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
        counts: dict[str, float] = {"tokens": 0}

        def show_progress() -> None:
            run.progress(len(found), len(places), **counts)

        async for result in self.collector.collect(
            requests, max_unfinished="auto", check=show_progress, check_seconds=_PROGRESS_SECONDS
        ):
            found.append(_evaluated(result, places[result.place], self.prices))
            counts["tokens"] += found[-1].response_tokens
            if (cost := found[-1].cost) is not None:
                counts["cost"] = counts.get("cost", 0.0) + cost
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

    async def _spending(self, rollouts: list[EvaluatedRollout]) -> Spending:
        """Return what the gateway has recorded; without one, what the agent's own client has told."""
        if self.uses_gateway:
            return await self.get_store().sum_spending(self.get_run().run_id)
        costs = [each.cost for each in rollouts if each.cost is not None]
        return Spending(
            attempts=len(rollouts),
            prompt_tokens=sum(each.prompt_tokens for each in rollouts),
            response_tokens=sum(each.response_tokens for each in rollouts),
            cost=math.fsum(costs) if costs else None,
            unpriced_calls=sum(each.model_calls for each in rollouts if each.cost is None),
        )

    def _result(
        self, rollouts: list[EvaluatedRollout], *, n_tasks: int, seconds: float, spending: Spending | None
    ) -> EvaluationResult:
        """Rollouts without a reward are left out of `reward` and count as 0 in `reward_with_failures_as_zero`."""
        by_task: dict[int, list[float | None]] = {}
        for each in rollouts:
            by_task.setdefault(each.task, []).append(each.reward)
        rewards = [[reward for reward in of_task if reward is not None] for of_task in by_task.values()]
        measured = [of_task for of_task in rewards if of_task]
        return EvaluationResult(
            reward=estimate(measured) if measured else None,
            reward_with_failures_as_zero=estimate(
                [[0.0 if reward is None else reward for reward in of_task] for of_task in by_task.values()]
            ),
            tasks=n_tasks,
            repeats=self.repeats,
            rollouts=rollouts,
            seconds=seconds,
            spending=spending,
        )


def _cost(rollout: Rollout, calls: Sequence[ModelCallView], prices: Prices) -> float | None:
    """Return the cost of a rollout's calls, as the gateway has recorded it, or else by their usage and the prices."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if attempt is not None and (attempt.cost is not None or attempt.unpriced_calls):
        return None if attempt.unpriced_calls else attempt.cost
    costs: list[float] = []
    for call in calls:
        asked = call.span.attributes.get(semconv.GEN_AI_REQUEST_MODEL)
        price = prices.of_model(*(name for name in (call.model, asked) if isinstance(name, str)))
        usage = (
            None if call.usage is None else dict(zip(("prompt_tokens", "completion_tokens"), call.usage, strict=True))
        )
        if price is None or (cost := price.cost(usage)) is None:
            return None
        costs.append(cost)
    return math.fsum(costs)


def _evaluated(result: CollectedRollout, place: tuple[int, int], prices: Prices | None) -> EvaluatedRollout:
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
        cost=None if prices is None else _cost(result.rollout, calls, prices),
        own={} if result.reward is None else own_metrics(result.spans),
    )
