"""`PromptOptimiser`: the base class of APO and GEPA.

It opens the reflection models and the budget, publishes candidates, labels the best one, and compares it with the
user's prompts at the end. It does not know how candidates are found. To write another optimiser, derive from it, and
from `IterativeAlgorithm` if it works in steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number, nearest
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.algorithm.budget import Budget
from leyden.algorithm.evaluator import Evaluator, Score
from leyden.algorithm.prompts.candidate import Candidate
from leyden.algorithm.prompts.comparison import Comparison, PromptResult, Rewards, compare
from leyden.algorithm.prompts.journal import Journal
from leyden.algorithm.prompts.records import CandidateRecord, best_label, read_best, record_round
from leyden.algorithm.prompts.reflector import Reflector
from leyden.errors import BudgetExceeded, ConfigError
from leyden.training.runs import open_run
from leyden.types import NamedResources, PromptTemplate, ResourcesUpdate

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOURNAL = "reflections.jsonl"
_AGENT = "agent"
"""The journal's key for the agent's version."""


class PromptOptimiser(Algorithm):
    """Base class of algorithms that improve the prompt templates among the initial resources."""

    enqueues_datasets = True

    def __init__(
        self,
        client: AsyncOpenAI | None,
        *,
        reward_range: tuple[float, float] | None,
        rollout_batch_timeout: float,
        resource_name: str | None,
        agent_model: str | None,
        test_dataset: Dataset[Any] | None,
        budget: Budget | None,
        max_prompt_characters: int,
        agent_version: str | None,
        failed_reward: float,
        seed: int,
        **loop_options: Any,
    ) -> None:
        """Check and set the options that all optimisers have, as `APO` and `GEPA` document them.

        loop_options: options of the next base class.
        Raise ConfigError, with the option's name and a remedy, for the first value that is not possible.
        """
        super().__init__(**loop_options)
        if client is not None and not hasattr(client, "chat"):
            raise ConfigError(
                f"async_openai_client is a {type(client).__name__}; give an openai.AsyncOpenAI, or None for the gateway"
            )
        check_counts(max_prompt_characters=max_prompt_characters)
        check_number("rollout_batch_timeout", rollout_batch_timeout, above=0)
        check_number("failed_reward", failed_reward)
        check_number("seed", seed, whole=True)
        check_texts(agent_model=agent_model, resource_name=resource_name, agent_version=agent_version)
        if budget is not None and not isinstance(cast(object, budget), Budget):
            raise ConfigError(f"budget is {budget!r}; give Budget(rollouts=...), or None for no limit")
        if test_dataset is not None and (isinstance(test_dataset, str) or not hasattr(test_dataset, "__getitem__")):
            raise ConfigError(f"test_dataset is a {type(test_dataset).__name__}; give a list of tasks, or None")
        self._client = client
        self.reward_range = None if reward_range is None else _checked_range(reward_range)
        self.rollout_batch_timeout = rollout_batch_timeout
        self.resource_name, self.agent_model = resource_name, agent_model
        self.test_dataset, self.budget = test_dataset, budget
        self.max_prompt_characters, self.failed_reward, self.seed = max_prompt_characters, failed_reward, seed
        self._agent_version_given = agent_version
        self._others: NamedResources = {}
        """The resources that are not improved."""
        self._best: Candidate | None = None
        self._is_in_range = True

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        return None if self.budget is None else self.budget.rollouts

    # ---- the beginning ---------------------------------------------------------------------------

    async def open_services(
        self, initial: NamedResources, *, models: Sequence[str | None], temperature: float
    ) -> dict[str, PromptTemplate]:
        """Open budget, evaluator, journal and reflector. Return the prompts among the initial resources.

        models: the names of the reflection models.
        temperature: the sampling temperature of their calls.
        Raise ConfigError if there is no reflection model.
        """
        self._best, self._is_in_range = None, True
        prompts = {name: prompt for name, prompt in initial.items() if isinstance(prompt, PromptTemplate)}
        self._others = await self._with_model(
            {name: each for name, each in initial.items() if name not in prompts}, models
        )
        run = self.get_run()
        self.collector.budget = Budget() if self.budget is None else replace(self.budget)
        version = self._agent_version_given or self.get_agent_version()
        self._evaluator = Evaluator(
            self.collector,
            agent_version=version,
            models=self.models_version,
            failed_reward=self.failed_reward,
            watched_prompts=None if self.resource_name is None else [self.resource_name],
        )
        self._journal = Journal(None if run.directory is None else run.directory / _JOURNAL)
        self._note_agent(version)
        self._reflector = Reflector(
            self._client, self.recorded_calls, self.collector, self._journal, temperature=temperature
        )
        if run.resume:
            await self._count_earlier()
        return prompts

    def _note_agent(self, version: str | None) -> None:
        before = self._journal.get(_AGENT)
        if version is None or before == version:
            return
        if before is not None:
            logger.warning(
                "the agent has changed since this run began, from %s to %s: new prompts are measured with the new code, and "
                "rewards of earlier rounds are those of the old code; start a new run to measure all with the new code",
                before,
                version,
            )
        self._journal.add(_AGENT, version, purpose="version")

    async def _count_earlier(self) -> None:
        await self.collector.count_earlier(self.get_run().run_id)
        if self._client is not None:  # the store has no record of these calls
            budget = self.collector.budget
            for place, tokens in self._journal.tokens.items():
                budget.spend([budget.call_of_own_client(place, tokens)])

    async def _with_model(self, others: NamedResources, models: Sequence[str | None]) -> NamedResources:
        """Return the resources that are not improved, with a model of the gateway as `main_llm` if they have none.

        Raise ConfigError if a reflection model is not served, or if there is neither a client nor a gateway.
        """
        proxy, name = self.get_llm_proxy(), type(self).__name__
        if proxy is None:
            if self._client is None:
                raise ConfigError(
                    f"{name} has no model to improve prompts with; give {name}(AsyncOpenAI()), or a gateway with "
                    "Trainer(llm_proxy=LLMProxy(model_list=[...]))"
                )
            return others
        if self._client is None:
            for model in models:
                proxy.as_resource(model=model)  # raises for a model that is not served
        return await self.with_model(others, model=self.agent_model)

    # ---- candidates ------------------------------------------------------------------------------

    async def publish(self, candidate: Candidate) -> ResourcesUpdate:
        """Write a candidate's resources to the store, and return the stored version. Safe to repeat."""
        return await self.evaluator.publish(candidate.resources(self._others), parent=candidate.parent)

    async def accept(self, candidate: Candidate) -> None:
        """Make a candidate the best one, and label its resources."""
        self._best = candidate
        version = await self.publish(candidate)
        await self.get_store().set_label(best_label(self.get_run().run_id), version.resources_id, version.version)

    def get_best_prompt(self, run: str | Path | None = None, *, resource_name: str | None = None) -> PromptTemplate:
        """Return the best prompt so far.

        run: the run to read it from, for example after a restart: its folder, its name or "latest". None: the run of
            this object.
        resource_name: the name of the prompt to return. None: the algorithm's own `resource_name`, or the first prompt.
        Raise ConfigError if there is no best prompt yet, or none with this name.
        """
        if run is None:
            if self._best is None:
                raise ConfigError(
                    f"{type(self).__name__} has no best prompt yet; call fit() first, or name a run: get_best_prompt('latest')"
                )
            prompts = dict(self._best.prompts)
        else:
            recorded = open_run(run)
            update = recorded.read_store(lambda store: read_best(store, recorded.record.run_id))
            prompts = {name: each for name, each in update.resources.items() if isinstance(each, PromptTemplate)}
        name = resource_name or self.resource_name or next(iter(prompts))
        if name not in prompts:
            raise ConfigError(f"resource_name is {name!r}; {nearest(name, prompts)}")
        return prompts[name]

    async def record(self, round_: int, candidates: Sequence[CandidateRecord]) -> None:
        """Write the records of a round's candidates to the store. Safe to repeat."""
        await record_round(
            self.get_store(),
            self.get_run().run_id,
            round_,
            candidates,
            algorithm=type(self).__name__,
            pin=f"{self.pin}, decisions",
        )

    def check_rewards(self, scores: Sequence[Score], consequence: str) -> bool:
        """Return whether all rewards of the run so far are within `reward_range`. Log a warning about the first one
        that is not.

        scores: the new rewards.
        consequence: what follows if one is not, for the message.
        """
        low, high = self.reward_range or (-math.inf, math.inf)
        wrong = next((score for score in scores if not low <= score.reward <= high), None)
        if wrong is not None and self._is_in_range:
            self._is_in_range = False
            logger.warning(
                "%s has the reward %s, outside of reward_range=%s: %s; give the right range",
                "a rollout" if wrong.result is None else wrong.result.rollout_id,
                figure(wrong.reward),
                self.reward_range,
                consequence,
            )
        return self._is_in_range

    # ---- the end ---------------------------------------------------------------------------------

    async def result(
        self, first: Candidate, rewards: dict[str, Rewards], *, n_compared: int, expected_reward: float | None = None
    ) -> PromptResult:
        """Return the best prompts, compared with the first ones on validation tasks, and on the test set if there is
        one.

        first: the user's prompts.
        rewards: rewards on validation tasks, by the candidate's key.
        n_compared: the number of candidates of which these rewards have chosen the best one.
        expected_reward: the reward that is expected of the best prompts on new tasks, if known.
        """
        if self._best is None:  # the budget was over at once
            await self.accept(first)
        best = self._best or first
        version, is_first = await self.publish(best), best.key == first.key
        found, before = rewards.get(best.key), rewards.get(first.key)
        has_both = not is_first and found and before and found.keys() <= before.keys()
        test_reward, test = await self._test(first, best)
        result = PromptResult(
            prompts=dict(best.prompts),
            resources_id=version.resources_id,
            version=version.version,
            reward=mean_of(found.values()) if found else None,
            against_first=compare(before, found, n_compared=n_compared) if has_both and before and found else None,
            test_reward=test_reward,
            test=test,
            expected_reward=expected_reward,
        )
        logger.info("the best prompt is %s: %s", f"labelled {best_label(self.get_run().run_id)!r}", result)
        return result

    async def _test(self, first: Candidate, best: Candidate) -> tuple[float | None, Comparison | None]:
        """Return both results on the test set, or twice None without one and without room for it in the budget."""
        if self.test_dataset is None or not len(self.test_dataset):
            return None, None
        tasks = [self.test_dataset[index] for index in range(len(self.test_dataset))]
        try:
            before, after = await gather_all(
                [
                    self.evaluator.evaluate(
                        await self.publish(each), tasks, mode="test", deadline_seconds=self.rollout_batch_timeout
                    )
                    for each in (first, best)
                ]
            )
        except BudgetExceeded as error:
            logger.warning("the prompts are not measured on the test set: %s", error)
            return None, None
        return after.mean, compare(dict(enumerate(before.by_task)), dict(enumerate(after.by_task)))


def check_counts(**counts: object) -> None:
    """Raise ConfigError for the first option that is no whole number of at least 1."""
    for name, count in counts.items():
        check_number(name, count, at_least=1, whole=True)


def check_texts(**texts: object) -> None:
    """Raise ConfigError for the first option that is neither None nor a text with a letter."""
    for name, text in texts.items():
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise ConfigError(f"{name} is {text!r}; give a text that is not empty, or None")


def _checked_range(value: object) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(cast("Sequence[Any]", value)) != 2:
        raise ConfigError(f"reward_range is {value!r}; give the lowest and the highest reward, as (0.0, 1.0)")
    low, high = cast("Sequence[Any]", value)
    check_number("the lowest reward of reward_range", low)
    check_number("the highest reward of reward_range", high)
    if not low < high:
        raise ConfigError(f"reward_range is {value!r}; give the lowest reward first, as (0.0, 1.0)")
    return float(low), float(high)


async def gather_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once; return their results in order. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
