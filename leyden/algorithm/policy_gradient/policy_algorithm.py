"""`PolicyAlgorithm`: the base class of all algorithms that train a policy.

It starts the policy, routes the gateway to it, gives it to agents as a resource, runs rollouts, and saves the policy. A
subclass defines what a step learns from: fresh rollouts (`policy_gradient.py`) or recorded ones (`recorded.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from leyden._lib.components import arguments_of, build_component
from leyden._lib.options import check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.iterative import IterativeAlgorithm, Metrics
from leyden.algorithm.policy_gradient.rollout_metrics import mean, rollout_metrics
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, RolloutReader
from leyden.algorithm.policy_gradient.signal import learning_rate_hint
from leyden.engine import EngineRegistry
from leyden.engine.footprint import check_room
from leyden.engine.isolated import IsolatedBackend, Visitor
from leyden.engine.policy_backend import ForwardBackwardResult, OptimParams, PolicyBackend
from leyden.engine.schedules import check_learning_rate_schedule, learning_rate_at
from leyden.errors import ConfigError, InvalidArgument
from leyden.gateway import LLMProxy, hosted
from leyden.objectives.losses import Loss
from leyden.training.runs.run_description import weights_of
from leyden.types import (
    LLM,
    EnqueueRolloutRequest,
    NamedResources,
    ProxyLLM,
    RolloutConfig,
    RolloutMode,
    TrainingSequence,
    semconv,
)

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.5
_DIFFERENCE = "max_logprob_difference"
"""The metric in which losses report how much the log-probabilities of learner and sampler differ."""


class PolicyAlgorithm(IterativeAlgorithm):
    """Base class of algorithms that train a policy in steps. Override `step`.

    backend: the policy: a backend, or a dict with its type ("embedded", "isolated", "vllm", or an import path) and its
        options, such as {"type": "vllm", "model": FOLDER}.
    n_steps: steps in all.
    optim: parameters of the optimizer; None: `OptimParams()`.
    warmup_steps: steps over which the learning rate rises from a fraction to its full value.
    schedule: how the learning rate continues: "constant", "linear" or "cosine".
    final_fraction: the learning rate of the last step, as a fraction of the full one; for the schedules "linear" and
        "cosine".
    temperature, max_tokens: suggested to the agent in its LLM's sampling_parameters.
    timeout_seconds, max_attempts: limits of each rollout.
    failed_reward: the reward of a failed rollout in the reported mean and in its group's baseline. None leaves it out
        of both.
    success_reward: a rollout with at least this reward counts as a success.
    val_every_n_steps: run the validation set each time this many steps are done; None, or more than `n_steps`: once,
        after the last step.
    resource_name: the name under which agents find the policy.
    agent_match: a regular expression. Only calls of agents whose name contains a match are trained on. Other agents'
        messages are context, and need no tokens. None: all calls.
    seed: seed of all random choices.
    """

    enqueues_datasets = True

    uses_gateway = True

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        n_steps: int = 100,
        optim: OptimParams | None = None,
        warmup_steps: int = 5,
        schedule: str = "constant",
        final_fraction: float = 0.0,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        timeout_seconds: float | None = 600.0,
        max_attempts: int = 1,
        failed_reward: float | None = 0.0,
        success_reward: float = 1.0,
        val_every_n_steps: int | None = None,
        resource_name: str = "main_llm",
        agent_match: str | None = None,
        seed: int = 0,
        **loop_options: Any,
    ) -> None:
        if isinstance(backend, Mapping):
            backend = build_component(
                backend, expected_type=PolicyBackend, spec_name="backend", registry=EngineRegistry
            )
        if not isinstance(backend, PolicyBackend):
            raise InvalidArgument(_no_backend(type(self).__name__, backend))
        check_number("n_steps", n_steps, at_least=1, whole=True)
        check_number("max_attempts", max_attempts, at_least=1, whole=True)
        check_number("max_tokens", max_tokens, at_least=1, whole=True, or_none="what the agent asks for")
        check_number(
            "val_every_n_steps",
            val_every_n_steps,
            at_least=1,
            whole=True,
            or_none="one validation, after the last step",
        )
        check_number("temperature", temperature)
        check_number("timeout_seconds", timeout_seconds, above=0, or_none="no limit")
        check_number("warmup_steps", warmup_steps, at_least=0, whole=True)
        check_number("failed_reward", failed_reward, or_none="failed rollouts left out")
        check_number("success_reward", success_reward)
        check_number("seed", seed, whole=True)
        if optim is not None and not isinstance(optim, OptimParams):
            raise InvalidArgument(f"optim is {optim!r}; give OptimParams(...)")
        if temperature <= 0:
            raise ConfigError(f"temperature is {temperature}; a policy that is trained must be sampled, above 0")
        if not isinstance(resource_name, str) or not resource_name:
            raise ConfigError(f"resource_name is {resource_name!r}; agents find the policy under this name")
        super().__init__(max_iters=n_steps, val_every_n_iters=val_every_n_steps, **loop_options)
        self.backend = backend
        self.optim = optim or OptimParams()
        self._chose_optim = optim is not None
        self._schedule: dict[str, Any] = {"warmup": warmup_steps, "kind": schedule, "final_fraction": final_fraction}
        if schedule == "constant" and final_fraction:
            raise ConfigError(
                f"final_fraction is {final_fraction!r}, and schedule='constant' has no use for it; set schedule='linear' or "
                "'cosine', or leave final_fraction out"
            )
        if schedule != "constant" and warmup_steps >= n_steps:
            raise ConfigError(
                f"warmup_steps is {warmup_steps} and n_steps is {n_steps}, which leaves no step for schedule={schedule!r}; "
                "give fewer warmup_steps"
            )
        check_learning_rate_schedule(n_steps, self.optim.learning_rate, **self._schedule)
        self.temperature, self.failed_reward, self.success_reward = temperature, failed_reward, success_reward
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
        self._llm: LLM | None = None
        self._other_backends: Sequence[PolicyBackend] = ()
        """Further models, such as a reference, which are started and stopped with the policy."""
        self._val: Dataset[Any] | None = None

    # ---- the loop's points -----------------------------------------------------------------------

    def planned_resources(self) -> NamedResources:
        llm = ProxyLLM(endpoint="http://gateway/v1", model=self.backend.model_name)
        return {**(self.get_initial_resources() or {}), self.resource_name: llm}

    def trained_model(self) -> Any:
        return arguments_of(self.backend).get("model", self.backend.model_name)

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Start the policy, route the gateway to it, and publish it as a resource. Raise ConfigError without a
        gateway.
        """
        if (self.val_every_n_iters or self.validate_first) and (val_dataset is None or not len(val_dataset)):
            asked = (
                "validate_first is True" if self.validate_first else f"val_every_n_steps is {self.val_every_n_iters}"
            )
            logger.warning("%s, and nothing is validated, because there is no val_dataset with tasks", asked)
        proxy = self.require_llm_proxy()
        self._val = val_dataset
        self._warn_of_learning_rate()
        self._check_room()
        await self._start_backend(proxy)
        proxy.serve_engine(self.backend.endpoint())
        self._note_version(proxy)
        llm = proxy.as_resource(model=self.backend.model_name, sampling_parameters=self.sampling_parameters)
        self._llm = await self.publish_endpoint(llm)
        self._resources_id = await self._publish_policy("policy", self._llm)
        for other in self._other_backends:
            await other.start()

    async def teardown(self) -> None:
        """Stop the policy and the other backends. If the policy's process also runs the gateway, the policy continues
        until the gateway stops, after the last runner.
        """
        proxy = self.get_llm_proxy()
        async with contextlib.AsyncExitStack() as stack:  # an error of one does not keep the others running
            for other in self._other_backends:
                stack.push_async_callback(other.stop)
            if proxy is None or not (proxy.is_reserved and proxy.is_running()):
                stack.push_async_callback(self.backend.stop)

    @property
    def hosts_gateway(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] -- it depends on the engine
        """Whether the policy's process can run the gateway, which then needs no HTTP."""
        return isinstance(self.backend, IsolatedBackend)

    async def _start_backend(self, proxy: LLMProxy) -> None:
        if not (proxy.is_reserved and isinstance(self.backend, IsolatedBackend)):
            return await self.backend.start()
        await proxy.leave()  # a process from before a restart of the algorithm
        settings, listener = proxy.for_process()
        self.backend.host(Visitor(hosted.FUNCTION, settings, listener))
        try:
            await self.backend.start()
        finally:
            self.backend.host(None)
        proxy.run_by(self.backend.stop)

    async def validate(self, iteration: int) -> Metrics:
        """Run the validation set once with the current policy, and return metrics of its rollouts."""
        if self._val is None:
            return {}
        started = time.perf_counter()
        counts, reader = RolloutCounts(), self._reader()
        requests = [self._request("val", iteration, place, self._val[place]) for place in range(len(self._val))]
        async with contextlib.aclosing(self._results(requests, iteration)) as results:
            async for result in results:
                reader.read(result, counts)
        return rollout_metrics(counts, seconds=time.perf_counter() - started, success_reward=self.success_reward)

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        """Save the policy's weights, optimizer and random state.

        If the backend can copy them, training continues while they are written, and the returned function waits until
        they are. Otherwise return None.
        """
        if await self.backend.snapshot_state(path):
            return partial(self.backend.state_written, path)
        return None

    async def load(self, path: Path) -> None:
        await self.backend.load_state(path)
        if (proxy := self.get_llm_proxy()) is not None:
            self._note_version(proxy)

    async def finish(self) -> None:
        """Write the trained model to `model/` in the run's directory, as a Hugging Face folder that any library
        loads.
        """
        if (directory := self.get_run().directory) is not None:
            await self.backend.save_pretrained(directory / "model")

    # ---- for subclasses --------------------------------------------------------------------------

    def _scaled(self, optim: OptimParams, iteration: int) -> OptimParams:
        def at(rate: float) -> float:
            return learning_rate_at(iteration, self.max_iters, rate, **self._schedule)

        value_rate = optim.value_learning_rate
        return replace(
            optim,
            learning_rate=at(optim.learning_rate),
            value_learning_rate=None if value_rate is None else at(value_rate),
        )

    async def _optimise(
        self, batches: Iterable[Sequence[TrainingSequence]], loss: Loss, iteration: int
    ) -> dict[str, Any]:
        optim = self._scaled(self.optim, iteration)
        results: list[ForwardBackwardResult] = []
        grad_norms: list[float] = []
        for batch in batches:
            results.append(await self.backend.forward_backward(batch, loss, temperature=self.temperature))
            grad_norms.append((await self.backend.optim_step(optim)).grad_norm)
        # Before the first optimizer step, the learner's log-probabilities differ from the sampler's
        # by rounding only, so only the first result shows a difference of their kernels.
        first = {"logprob_difference": results[0].metrics[_DIFFERENCE]} if _DIFFERENCE in results[0].metrics else {}
        names = [name for name in results[0].metrics if name != _DIFFERENCE]
        return {
            "optimizer_steps": len(results),
            "policy_version": await self._publish_weights(),
            "learning_rate": optim.learning_rate,
            "loss": mean([result.loss for result in results]),
            **{
                name: (max if name.startswith("max_") else mean)([result.metrics[name] for result in results])
                for name in names
            },
            "grad_norm": mean(grad_norms),
            **first,
            "trained_tokens": sum(result.n_trained for result in results),
        }

    async def _publish_weights(self) -> int:
        """Let sampling use the trained weights, and return their version.

        A sampler with its own copy of the weights must be idle meanwhile, so that every call has one version.
        """
        if self.backend.capabilities.shared_weights:
            return await self.backend.publish_weights()
        proxy = self.get_llm_proxy()
        if proxy is None or not proxy.is_running():
            return await self.backend.publish_weights()
        await proxy.drain()
        try:
            version = await self.backend.publish_weights()
            self._note_version(proxy)
        finally:
            await proxy.resume()
        return version

    def _note_version(self, proxy: LLMProxy) -> None:
        """Tell the gateway the version of the weights, to record it with each call, unless the sampler's endpoint
        reports versions itself.
        """
        if not self.backend.capabilities.reports_versions:
            proxy.set_policy_version(self.backend.model_name, self.backend.policy_version)

    def _reader(self) -> RolloutReader:
        return RolloutReader(self.get_adapter(), self.temperature, self.failed_reward, self._agent_match)

    def _request(
        self, mode: RolloutMode, iteration: int, place: int | str, task: Any, *, generation: int = 0, **changes: Any
    ) -> EnqueueRolloutRequest:
        """iteration, place: the step, and the rollout's place in it, from which its id is derived.
        generation: counts how often the rollout was replaced by a new one at the same place.
        """
        place_in_run = [mode, iteration, place, *([generation] if generation else [])]
        request = EnqueueRolloutRequest(
            rollout_id=rollout_id_at(self.get_run().run_id, *place_in_run),
            input=task,
            mode=mode,
            resources_id=self._resources_id,
            config=self.rollout_config,
            metadata={
                "step": iteration,
                "place": place,
                semconv.SAMPLING_KEY: "/".join(map(str, place_in_run)),  # the same in another run, where ids differ
            },
        )
        return request.model_copy(update=changes)

    async def _results(
        self,
        requests: Sequence[EnqueueRolloutRequest],
        keep_until: int,
        on_progress: Callable[[], None] | None = None,
    ) -> AsyncGenerator[CollectedRollout]:
        """Run rollouts, and yield their results as they finish.

        keep_until: the step until which the rollouts stay pinned in the store.
        on_progress: called after each result, and between them; None: report how many requests are done.
        Raise EngineError if the policy has died, because its calls would wait until the run ends.
        """
        look = asyncio.create_task(self.backend.statistics())
        done = 0

        def show_progress() -> None:
            on_progress() if on_progress else self.progress(done, len(requests))

        def check_policy() -> None:
            nonlocal look
            show_progress()
            if look.done():  # a policy that hangs must not stop this loop: its rollouts have time limits
                look.result()
                look = asyncio.create_task(self.backend.statistics())

        collecting = self.collector.collect(
            requests, keep_until=keep_until, check=check_policy, check_seconds=_PROGRESS_SECONDS
        )
        try:
            async with contextlib.aclosing(collecting) as results:
                async for result in results:
                    done += 1
                    show_progress()
                    yield result
        finally:
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)

    async def _publish_policy(self, name: str, llm: LLM) -> str:
        return await self.publish_resources(name, {**(self.get_initial_resources() or {}), self.resource_name: llm})

    def _check_room(self) -> None:
        """Say what the run will take, and raise ConfigError if there is no room for it."""
        run, backends = self.get_run(), [self.backend.learner, *(each.learner for each in self._other_backends)]
        check_room(
            [arguments_of(each) for each in backends],
            directory=run.directory,
            resume=run.resume,
            n_checkpoints=(self.keep_last or self.max_iters) + (self.keep_best is not None),
            n_rollouts=self.max_iters * getattr(self, "tasks_per_step", 0) * getattr(self, "rollouts_per_task", 0),
        )

    def _warn_of_learning_rate(self) -> None:
        """Log a hint if the learning rate is the default and seldom fits a model of this size."""
        counted = None if self._chose_optim else weights_of(self.trained_model())
        if counted is None:
            return
        n_trained, n_weights = counted
        if hint := learning_rate_hint(self.optim.learning_rate, n_trained=n_trained, n_weights=n_weights):
            logger.warning("%s", hint)


def make_reference(backend: PolicyBackend) -> PolicyBackend:
    """Return a second backend with the model that `backend` was made with.

    Raise ConfigError if that is a model object, because training changes it.
    """
    backend = backend.learner
    arguments = arguments_of(backend)
    if not isinstance(arguments.get("model"), str | Path):
        raise ConfigError(
            "the policy is compared with the one that it was at first, and the backend was made with a model object, "
            "which training changes; give reference=EmbeddedBackend(FOLDER), or make the backend with a folder"
        )
    return type(backend)(**{**arguments, **({"port": 0} if "port" in arguments else {})})


def _no_backend(algorithm: str, given: object) -> str:
    kind = type(given).__name__
    if isinstance(given, str | Path):
        return f"backend is {str(given)!r}; a model needs a backend that runs it: {algorithm}(IsolatedBackend({str(given)!r}))"
    if isinstance(given, type) and issubclass(given, PolicyBackend):
        return f"backend is the class {given.__name__}; give an instance: {algorithm}({given.__name__}(MODEL))"
    return f"backend is a {kind}; give a PolicyBackend, for example IsolatedBackend(MODEL)"
