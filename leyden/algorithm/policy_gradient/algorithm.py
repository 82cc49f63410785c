"""`PolicyGradient`: sample groups of rollouts, compare within each, step the policy.

One step, from the store's point of view: rollouts whose ids are derived from the run, the step and their place are enqueued (a repeat is
not a second rollout, so a killed step goes on where it was), waited for by event, read back as spans, and trained on. From the policy's:
every token keeps the log-probability and the version it was sampled with.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from leyden import semconv
from leyden.adapter import TraceTree, merge_triplets
from leyden.adapter.selection import select_calls
from leyden.adapter.trajectory import refusal
from leyden.algorithm.base import Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.iterative import IterativeAlgorithm, Metrics
from leyden.algorithm.policy_gradient.batch import Group, RolloutData, StepData, build_step, minibatches, task_indices
from leyden.algorithm.policy_gradient.signal import Answers, Example, SignalWatch, learning_rate_hint
from leyden.engine.base import ForwardBackwardResult, OptimParams, PolicyBackend
from leyden.errors import ConfigError, InvalidArgument, NoTrainingData
from leyden.gateway import UpstreamModel
from leyden.maths import ESTIMATORS
from leyden.maths.losses import Loss, make_loss
from leyden.options import check_choice, check_number
from leyden.runs.config import weights_of
from leyden.types import (
    EnqueueRolloutRequest,
    NamedResources,
    ProxyLLM,
    Rollout,
    RolloutConfig,
    RolloutMode,
    Span,
    Triplet,
    failure_reason,
    find_final_reward,
)
from leyden.utils import ids
from leyden.utils.arguments import arguments_of

logger = logging.getLogger(__name__)

_DIFFERENCE = "max_logprob_difference"
"""The metric of a loss that compares log-probabilities of learner and sampler."""

_PROGRESS_SECONDS = 0.5
_SHOWN_REASONS = 5


@dataclass(slots=True)
class _Collected:
    """The rollouts of one step, by place in the batch; None where one failed or cannot be trained on."""

    rollouts: list[RolloutData | None] = field(default_factory=list[RolloutData | None])
    """None: failed, or not to be trained on."""
    rewards: list[float] = field(default_factory=list[float])
    model_calls: int = 0
    response_tokens: int = 0
    refused_calls: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])
    answers: Answers = field(default_factory=Answers)


class PolicyGradient(IterativeAlgorithm):
    """Group-relative policy optimisation (GRPO, arXiv:2402.03300) on rollouts of any number of model calls.

    loss = mean over rollouts of (mean over the rollout's sampled tokens of the clipped loss), so each rollout weighs the same however
    many turns it took.

    backend: the policy.
    n_steps: steps in all.
    tasks_per_step, rollouts_per_task: a step samples their product; the rollouts of one task are a group.
    minibatch_size: rollouts in each optimizer step, about; None: all rollouts of the step.
    epochs: passes over the step's rollouts.
    advantages: estimator of the advantages, a name of `leyden.maths.ESTIMATORS`. "grpo" divides the
        centred rewards by the group's standard deviation, "dr_grpo" does not.
    loss: the loss of the sampled tokens: its name ("ppo"), or its constants (`PPOLoss(clip_high=0.2)`).
    warmup_steps: steps over which the learning rate rises from a fraction to its full value.
    temperature, max_tokens: suggested to the agent in its LLM's sampling_parameters.
    timeout_seconds, max_attempts: of each rollout.
    val_every_n_steps: run the validation set after every so many steps, and after the last.
    resource_name: the name under which agents find the policy.
    agent_match: a regular expression; only calls of agents whose names it matches are trained
        (`TracerTraceToTriplet` finds a call's agent). Other agents' messages are context, and need
        no tokens. None: all calls.
    seed: of tasks and minibatches.
    """

    uses_gateway = True

    def __init__(
        self,
        backend: PolicyBackend,
        *,
        n_steps: int = 100,
        tasks_per_step: int = 8,
        rollouts_per_task: int = 16,
        minibatch_size: int | None = None,
        epochs: int = 1,
        advantages: str = "grpo",
        loss: Loss | str = "ppo",
        optim: OptimParams | None = None,
        warmup_steps: int = 5,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        timeout_seconds: float | None = 600.0,
        max_attempts: int = 1,
        val_every_n_steps: int | None = None,
        resource_name: str = "main_llm",
        agent_match: str | None = None,
        seed: int = 0,
        **loop_options: Any,
    ) -> None:
        if not isinstance(backend, PolicyBackend):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass a model's name
            raise InvalidArgument(_no_backend(backend))
        for name, count in {
            "n_steps": n_steps,
            "tasks_per_step": tasks_per_step,
            "rollouts_per_task": rollouts_per_task,
            "epochs": epochs,
            "max_attempts": max_attempts,
        }.items():
            check_number(name, count, at_least=1, whole=True)
        check_number("minibatch_size", minibatch_size, at_least=1, whole=True, or_none="all rollouts of the step")
        check_number("max_tokens", max_tokens, at_least=1, whole=True, or_none="what the agent asks for")
        check_number("val_every_n_steps", val_every_n_steps, at_least=1, whole=True, or_none="no validation")
        check_number("temperature", temperature)
        check_number("timeout_seconds", timeout_seconds, above=0, or_none="no limit")
        check_number("warmup_steps", warmup_steps, at_least=0, whole=True)
        check_number("seed", seed, whole=True)
        check_choice("advantages", advantages, ESTIMATORS)
        if optim is not None and not isinstance(optim, OptimParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"optim is {optim!r}; give OptimParams(...)")
        self.loss = make_loss(loss) if isinstance(loss, str) else loss
        backend.check_loss(self.loss)
        super().__init__(max_iters=n_steps, val_every_n_iters=val_every_n_steps, **loop_options)
        if rollouts_per_task < 2:
            raise ConfigError(f"rollouts_per_task is {rollouts_per_task}; a group needs at least 2 to compare")
        if temperature <= 0:
            raise ConfigError(f"temperature is {temperature}; a policy that is trained must be sampled, above 0")
        if not isinstance(resource_name, str) or not resource_name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"resource_name is {resource_name!r}; agents find the policy under this name")
        self.backend = backend
        self.tasks_per_step, self.rollouts_per_task = tasks_per_step, rollouts_per_task
        self.minibatch_size = minibatch_size or tasks_per_step * rollouts_per_task
        self.epochs, self.advantages, self.warmup_steps = epochs, advantages, warmup_steps
        self.temperature = temperature
        self.optim = optim or OptimParams()
        self._chose_optim = optim is not None
        self.sampling_parameters: dict[str, Any] = {"temperature": temperature}
        if max_tokens is not None:
            self.sampling_parameters["max_tokens"] = max_tokens
        self.rollout_config = RolloutConfig(
            timeout_seconds=timeout_seconds,
            max_attempts=max_attempts,
            retry_condition=["failed", "timeout", "unresponsive"] if max_attempts > 1 else [],
            require_reward=True,
            require_model_call=True,
        )
        try:
            self._agent_match = None if agent_match is None else re.compile(agent_match)
        except (re.error, TypeError) as error:
            raise ConfigError(f"agent_match is {agent_match!r}, which is no regular expression: {error}") from error
        self.resource_name, self.seed = resource_name, seed
        self._resources_id = ""
        self._watch = self._new_watch()
        self._train: Dataset[Any] = ()
        self._val: Dataset[Any] | None = None

    # ---- the loop's four points ----------------------------------------------------------------------------------------

    def planned_resources(self) -> NamedResources:
        """The initial resources, and the policy under `resource_name`."""
        llm = ProxyLLM(endpoint="http://gateway/v1", model=self.backend.model_name)
        return {**(self.get_initial_resources() or {}), self.resource_name: llm}

    def trained_model(self) -> Any:
        """Return the model that the backend was made with."""
        return arguments_of(self.backend).get("model", self.backend.model_name)

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Start the policy, route the gateway to it, publish it as a resource."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("PolicyGradient needs tasks to train on; pass a train_dataset with at least one")
        proxy = self.get_llm_proxy()
        if proxy is None:
            raise ConfigError("PolicyGradient needs a gateway; Trainer makes one, or call set_llm_proxy(LLMProxy(...))")
        self._train, self._val = train_dataset, val_dataset
        self._watch = self._new_watch()
        self._warn_of_learning_rate()
        await self.backend.start()
        server = self.backend.endpoint()
        proxy.update_model_list(
            [UpstreamModel(server.model, server.endpoint, api_key=server.api_key, part_of_run=True)]
        )
        llm = proxy.as_resource(model=self.backend.model_name, sampling_parameters=self.sampling_parameters)
        llm = await self.publish_endpoint(llm)
        resources = {**(self.get_initial_resources() or {}), self.resource_name: llm}
        self._resources_id = ids.derived_id("rs", self.get_run().run_id, "policy")
        await self.get_store().update_resources(self._resources_id, resources, author=self.get_run().run_id)

    async def teardown(self) -> None:
        """Stop the policy."""
        await self.backend.stop()

    async def step(self, iteration: int) -> Metrics:
        """Sample, compare, train. `iteration` counts from 0."""
        started = time.perf_counter()
        tasks = task_indices(len(self._train), iteration, tasks_per_step=self.tasks_per_step, seed=self.seed)
        inputs = [self._train[index] for index in tasks for _ in range(self.rollouts_per_task)]
        collected = await self._collect("train", iteration, inputs)
        sampled = time.perf_counter()
        if not any(collected.rollouts):
            raise NoTrainingData(f"step {iteration + 1} has nothing to train on. {_explanation(collected)}")
        if collected.refused_calls:
            logger.warning("step %d does not train on all of its rollouts. %s", iteration + 1, _explanation(collected))
        data = build_step(self._groups(collected), ESTIMATORS[self.advantages])
        self._warn(
            self._watch.look(
                iteration + 1,
                rewards=collected.rewards,
                flat=data.flat_groups > 0 and not data.rollouts,
                n_groups=data.flat_groups,
                answers=collected.answers,
            )
        )
        return {
            **_rollout_metrics(collected, seconds=sampled - started),
            "flat_groups": data.flat_groups,
            "small_groups": data.small_groups,
            **await self._update(iteration, data),
            "update_seconds": time.perf_counter() - sampled,
        }

    async def validate(self, iteration: int) -> Metrics:
        """Run the validation set once with the current policy."""
        if self._val is None:
            return {}
        started = time.perf_counter()
        inputs = [self._val[index] for index in range(len(self._val))]
        collected = await self._collect("val", iteration, inputs)
        return _rollout_metrics(collected, seconds=time.perf_counter() - started)

    async def save(self, path: Path) -> None:
        """The policy's weights, optimizer and random state."""
        await self.backend.save_state(path)

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        await self.backend.load_state(path)

    async def finish(self) -> None:
        """Leave the trained model in the run's directory, as a Hugging Face folder that any library loads."""
        self._warn(self._watch.end(self.max_iters))
        if (directory := self.get_run().directory) is not None:
            await self.backend.save_pretrained(directory / "model")

    def _warn_of_learning_rate(self) -> None:
        """Log a hint if the learning rate was left at its default and seldom fits the model's size."""
        counted = None if self._chose_optim else weights_of(self.trained_model())
        if counted is None:
            return
        n_trained, n_weights = counted
        if hint := learning_rate_hint(self.optim.learning_rate, n_trained=n_trained, n_weights=n_weights):
            logger.warning("%s", hint)

    def _new_watch(self) -> SignalWatch:
        return SignalWatch(self.optim.learning_rate, self.sampling_parameters.get("max_tokens"))

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            logger.warning("%s", warning)

    # ---- rollouts ------------------------------------------------------------------------------------------------------

    async def _collect(self, mode: RolloutMode, iteration: int, inputs: Sequence[Any]) -> _Collected:
        """Run the rollouts of one stage. The place in `inputs` is the place in the answer.

        A stage in which every rollout had failed before a resume is sampled anew, under other ids,
        because the cause may have been fixed since.
        """
        generation = 0
        while True:
            requests = [self._request(mode, iteration, place, generation, value) for place, value in enumerate(inputs)]
            results = await self._results(requests, keep_until=iteration + 1 if mode == "train" else iteration)
            if not all(result.cached and result.status in ("failed", "cancelled") for result in results):
                break
            generation += 1
        collected = _Collected()
        for result in results:
            self._add(collected, result.rollout, result.spans)
        return collected

    async def _results(
        self, requests: Sequence[EnqueueRolloutRequest], *, keep_until: int
    ) -> Sequence[CollectedRollout]:
        """Return the results by place. Raise EngineError if the policy has died, because its calls
        wait for the run to end.
        """
        look = asyncio.create_task(self.backend.statistics())
        results: list[CollectedRollout] = []

        def check_policy() -> None:
            nonlocal look
            self.progress(len(results), len(requests))
            if look.done():  # a policy that hangs must not stop this loop: its rollouts have time limits
                look.result()
                look = asyncio.create_task(self.backend.statistics())

        try:
            async for result in self.collector.collect(
                requests, keep_until=keep_until, check=check_policy, check_seconds=_PROGRESS_SECONDS
            ):
                results.append(result)
                self.progress(len(results), len(requests))
        finally:
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)
        return sorted(results, key=lambda result: result.place)

    def _request(
        self, mode: RolloutMode, iteration: int, place: int, generation: int, value: Any
    ) -> EnqueueRolloutRequest:
        place_in_run = [mode, iteration, place, *([generation] if generation else [])]
        run_id, group = self.get_run().run_id, place // self.rollouts_per_task
        return EnqueueRolloutRequest(
            rollout_id=rollout_id_at(run_id, *place_in_run),
            input=value,
            mode=mode,
            group_id=ids.derived_id("gr", run_id, iteration, group, generation) if mode == "train" else None,
            resources_id=self._resources_id,
            config=self.rollout_config,
            metadata={
                "step": iteration,
                "place": place,
                semconv.SAMPLING_KEY: "/".join(map(str, place_in_run)),  # the same in another run, where ids differ
            },
        )

    def _add(self, collected: _Collected, rollout: Rollout, spans: Sequence[Span]) -> None:
        triplets = self._triplets(spans)
        collected.model_calls += len(triplets)
        collected.response_tokens += sum(len(triplet.response.token_ids) for triplet in triplets)
        reward = find_final_reward(spans)
        if rollout.status != "succeeded" or reward is None:
            collected.failures[failure_reason(rollout)] += 1
            collected.rollouts.append(None)
            return
        collected.rewards.append(reward)
        _note_answers(collected.answers, rollout, triplets, spans, reward)
        if self._agent_match is not None and triplets:
            triplets = _of_agents(triplets, spans, self._agent_match)
            if not triplets:
                collected.refused_calls[f"agent_match={self._agent_match.pattern!r} finds no agent's call"] += 1
        refused = [reason for triplet in triplets if (reason := self._refusal(triplet)) is not None]
        collected.refused_calls.update(refused)
        # A rollout with a hole in its record is not trained on: what the policy did there would get no gradient.
        trajectories = [] if refused else merge_triplets(triplets, reward=reward)
        collected.rollouts.append(RolloutData(rollout.rollout_id, reward, trajectories) if trajectories else None)

    def _triplets(self, spans: Sequence[Span]) -> list[Triplet]:
        adapter = self.get_adapter()
        triplets: list[Any] = adapter.adapt(spans)
        for item in triplets:
            if not isinstance(item, Triplet):
                raise ConfigError(
                    f"PolicyGradient trains on Triplets, but adapter={type(adapter).__name__} gave a {type(item).__name__}; "
                    "use TraceToTriplet, which is the default"
                )
        return triplets

    def _refusal(self, triplet: Triplet) -> str | None:
        """Why a call cannot be trained on, None when it can: its log-probabilities must be of the policy that is trained."""
        temperature = triplet.metadata.get("temperature", 1.0)  # the default of every OpenAI-compatible server
        if abs(temperature - self.temperature) > 1e-6:
            return (
                f"the agent sampled at temperature {temperature:g}, the policy is trained at {self.temperature:g}: "
                "use llm.sampling_parameters['temperature'] in the agent, or PolicyGradient(temperature=...)"
            )
        return refusal(triplet)

    def _groups(self, collected: _Collected) -> list[Group]:
        size = self.rollouts_per_task
        return [
            Group([rollout for rollout in collected.rollouts[start : start + size] if rollout is not None])
            for start in range(0, len(collected.rollouts), size)
        ]

    # ---- the gradient --------------------------------------------------------------------------------------------------

    async def _update(self, iteration: int, data: StepData) -> Metrics:
        if not data.rollouts:
            return {"optimizer_steps": 0, "policy_version": self.backend.policy_version}
        warmup = min(1.0, (iteration + 1) / max(1, self.warmup_steps))
        optim = replace(self.optim, learning_rate=self.optim.learning_rate * warmup)
        results: list[ForwardBackwardResult] = []
        grad_norms: list[float] = []
        for epoch in range(self.epochs):
            for batch in minibatches(
                data.rollouts, size=self.minibatch_size, seed=self.seed, step=iteration, epoch=epoch
            ):
                results.append(await self.backend.forward_backward(batch, self.loss, temperature=self.temperature))
                grad_norms.append((await self.backend.optim_step(optim)).grad_norm)
        # The learner's log-probabilities differ from the sampler's by rounding alone, before the first step.
        first = {"logprob_difference": results[0].metrics[_DIFFERENCE]} if _DIFFERENCE in results[0].metrics else {}
        names = [name for name in results[0].metrics if name != _DIFFERENCE]
        return {
            "optimizer_steps": len(results),
            "policy_version": await self.backend.publish_weights(),
            "learning_rate": optim.learning_rate,
            "loss": _mean([result.loss for result in results]),
            **{name: _mean([result.metrics[name] for result in results]) for name in names},
            "grad_norm": _mean(grad_norms),
            **first,
            "trained_tokens": sum(result.n_trained for result in results),
        }


def _of_agents(triplets: Sequence[Triplet], spans: Sequence[Span], agent_match: re.Pattern[str]) -> list[Triplet]:
    """Return the triplets of the calls whose nearest agent's name matches."""
    calls = select_calls(spans, TraceTree.from_spans(spans), agent_match=agent_match.pattern, repair_hierarchy=True)
    chosen = {span.span_id for call in calls for span in call.view.spans}
    return [triplet for triplet in triplets if triplet.metadata.get("span_id") in chosen]


def _note_answers(
    answers: Answers, rollout: Rollout, triplets: Sequence[Triplet], spans: Sequence[Span], reward: float
) -> None:
    """Count the answers of a rollout; the first rollout of a step is its example."""
    reasons = {span.span_id: span.attributes.get(semconv.GEN_AI_FINISH_REASONS) for span in spans}
    cut = {span_id for span_id, found in reasons.items() if isinstance(found, list | tuple) and "length" in found}
    for triplet in triplets:
        answers.add(triplet.response.token_ids, cut=triplet.metadata.get("span_id") in cut)
    if triplets and answers.example is None:
        answers.example = Example(rollout.input, triplets[-1].response.raw_content, reward)


def _rollout_metrics(collected: _Collected, *, seconds: float) -> Metrics:
    n = len(collected.rollouts)
    return {
        "reward": _mean(collected.rewards),
        "rollouts": n,
        "failed": collected.failures.total(),
        "refused_calls": collected.refused_calls.total(),
        "model_calls": collected.model_calls,
        "response_tokens": collected.response_tokens,
        "rollout_seconds": seconds,
        "rollouts_per_second": n / seconds,
        "tokens_per_second": collected.response_tokens / seconds,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _explanation(collected: _Collected) -> str:
    kinds = {"Failed rollouts": collected.failures, "Model calls that cannot be trained on": collected.refused_calls}
    return ". ".join(f"{kind}: {_counts(reasons)}" for kind, reasons in kinds.items() if reasons)


def _counts(reasons: Counter[str]) -> str:
    shown = [f"{count} x {reason:.300}" for reason, count in reasons.most_common(_SHOWN_REASONS)]
    rest = reasons.total() - sum(count for _, count in reasons.most_common(_SHOWN_REASONS))
    return "; ".join(shown + [f"{rest} x something else"] * (rest > 0))


def _no_backend(given: object) -> str:
    """Return what to write in place of what was given as the backend."""
    kind = type(given).__name__
    if isinstance(given, str | Path):
        return f"backend is {str(given)!r}; a model needs a backend that runs it: PolicyGradient(IsolatedBackend({str(given)!r}))"
    if isinstance(given, type) and issubclass(given, PolicyBackend):
        return f"backend is the class {given.__name__}; give an instance: PolicyGradient({given.__name__}(MODEL))"
    return f"backend is a {kind}; give a PolicyBackend, for example IsolatedBackend(MODEL)"
