"""`PolicyAlgorithm`: the base class of all algorithms that train a policy.

It starts the policy, routes the gateway to it, gives it to agents as a resource, runs rollouts, and saves the policy. A
subclass defines what a step learns from: fresh rollouts (`policy_gradient.py`) or recorded ones (`recorded.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from leyden._lib.atomic import ASIDE
from leyden._lib.components import arguments_of, build_component
from leyden._lib.formatting import figure
from leyden._lib.options import check_choice, check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.collector import CollectedRollout, rollout_id_at
from leyden.algorithm.iterative import IterativeAlgorithm, Metrics
from leyden.algorithm.policy_gradient.collapse import MAX_RESTORES, STATE, CollapseWatch
from leyden.algorithm.policy_gradient.rollout_metrics import mean, rollout_metrics
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, RolloutReader
from leyden.engine import EngineRegistry
from leyden.engine.footprint import check_room
from leyden.engine.isolated import IsolatedBackend, Visitor
from leyden.engine.policy_backend import ForwardBackwardResult, OptimParams, PolicyBackend
from leyden.engine.source import BaseModel
from leyden.errors import CheckpointError, ConfigError, InvalidArgument, PolicyDiverged
from leyden.gateway import LLMProxy, hosted
from leyden.objectives.losses import Loss
from leyden.objectives.schedules import check_learning_rate_schedule, default_learning_rate, learning_rate_at
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
_BEST, _WATCH_FILE = "best", "collapse.json"
"""The folder of the best weights, in the run's directory and in a checkpoint, and the file of the watch beside it."""


class PolicyAlgorithm(IterativeAlgorithm):
    """Base class of algorithms that train a policy in steps. Override `step`.

    backend: the policy: a backend, or a dict with its type ("embedded", "isolated", "vllm", or an import path) and its
        options, such as {"type": "vllm", "model": FOLDER}.
    n_steps: steps in all.
    optim: parameters of the optimizer; None: `OptimParams()` with the learning rate that suits the model's size
        (`leyden.objectives.schedules.default_learning_rate`).
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
    hand_back: "best" keeps the weights with the best reward so far, with the optimizer's moments, in `best/` of the
        run's directory. They become the run's `model/` if the last weights are worse by more than noise, and the last
        ones `model-last/`. The best are those of the best validation if there is one every so many steps, else of the
        best training reward. "last" keeps none.
    on_collapse: what to do when the policy has fallen from its best by more than noise. "restore": go back to the best
        weights with half the learning rate, at most twice. "stop": end the run. "warn": log a warning. None: "restore"
        if the best weights are kept, else "warn".
    resource_name: the name under which agents find the policy.
    agent_match: a regular expression. Only calls of agents whose name contains a match are trained on. Other agents'
        messages are context, and need no tokens. None: all calls.
    seed: seed of all random choices.
    """

    enqueues_datasets = True

    uses_gateway = True

    steps_option = "n_steps"

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "max_iters": (),
        "val_every_n_iters": (),
        "n_steps": ("max_iters",),
        "val_every_n_steps": ("val_every_n_iters",),
        **{f"optim.{each.name}": ("optim",) for each in fields(OptimParams) if each.name != "betas"},
    }

    fixed_options: ClassVar[Mapping[str, str]] = {
        "warmup_steps": "the learning rate's course follows from the first step on",
        "schedule": "the learning rate's course follows from the first step on",
        "backend": "the policy's process and its checkpoints are made with it",
    }

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
        hand_back: Literal["best", "last"] = "best",
        on_collapse: Literal["restore", "stop", "warn"] | None = None,
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
        check_choice("hand_back", hand_back, ("best", "last"))
        on_collapse = on_collapse or ("restore" if hand_back == "best" else "warn")
        check_choice("on_collapse", on_collapse, ("restore", "stop", "warn"))
        if hand_back == "last" and on_collapse == "restore":
            raise ConfigError(
                "on_collapse is 'restore', and hand_back='last' keeps no weights to go back to; choose 'stop' or 'warn', or "
                "hand_back='best'"
            )
        super().__init__(max_iters=n_steps, val_every_n_iters=val_every_n_steps, **loop_options)
        self.backend = backend
        self.hand_back, self.on_collapse = hand_back, on_collapse
        self._collapse = self._new_collapse_watch()
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        """The temporary folder of the best weights, for a run without a directory."""
        self.optim = optim or OptimParams(learning_rate=self._default_learning_rate())
        if not self.optim.learning_rate and not self.optim.value_learning_rate:
            raise ConfigError("learning_rate of optim is 0, so that nothing would be learned; it must be above 0")
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
        self.max_tokens, self.timeout_seconds = max_tokens, timeout_seconds
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
        """Start the policy, and publish it as a resource behind the gateway. Raise ConfigError without a gateway."""
        if (self.val_every_n_iters or self.validate_first) and (val_dataset is None or not len(val_dataset)):
            asked = (
                "validate_first is True" if self.validate_first else f"val_every_n_steps is {self.val_every_n_iters}"
            )
            logger.warning("%s, and nothing is validated, because there is no val_dataset with tasks", asked)
        proxy = self.require_llm_proxy()
        self._val = val_dataset
        self._collapse, self.ends_early = self._new_collapse_watch(), False
        self._check_room()
        await self._start_backend(proxy)
        proxy.serve_engine(self.backend.endpoint())
        self._note_version(proxy)
        llm = proxy.as_resource(model=self.backend.model_name, sampling_parameters=self.sampling_parameters)
        self._llm = await self.publish_endpoint(llm)
        await self._publish_policies(self._llm, "")
        for other in self._other_backends:
            await other.start()

    def options_changed(self, n_finished: int) -> Awaitable[None] | None:
        super().options_changed(n_finished)
        if self._llm is None or self._llm.sampling_parameters == self.sampling_parameters:
            return None
        self._llm = self._llm.model_copy(update={"sampling_parameters": self.sampling_parameters})
        return self._publish_policies(self._llm, f" from step {n_finished + 1}")

    async def teardown(self) -> None:
        """Stop the policy and the other backends. If the policy's process also runs the gateway, the policy continues
        until the gateway stops, after the last runner.
        """
        proxy = self.get_llm_proxy()
        async with contextlib.AsyncExitStack() as stack:  # an error of one does not keep the others running
            if self._own_folder is not None:
                stack.callback(self._own_folder.cleanup)
                self._own_folder = None
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

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        return self.planned_validations(n_val) * n_val

    async def validate(self, iteration: int) -> Metrics:
        """Run the validation set once with the current policy, and return metrics of its rollouts."""
        if self._val is None:
            return {}
        started = time.perf_counter()
        counts, reader, rewards = RolloutCounts(), self._reader(), dict[int, float]()
        requests = [self._request("val", iteration, place, self._val[place]) for place in range(len(self._val))]
        async with contextlib.aclosing(self._results(requests, iteration)) as results:
            async for result in results:
                if (read := reader.read(result, counts)) is not None:
                    rewards[result.place] = read.reward
        is_best, fall = self._collapse.validated(iteration, rewards)
        if is_best:
            await self._keep(iteration, rewards)
        if fall and self.on_collapse == "restore":
            self._collapse.due = fall  # a validation does not change the policy; the next step does
        elif fall:
            await self._after_fall(fall)
        return rollout_metrics(counts, seconds=time.perf_counter() - started, success_reward=self.success_reward)

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        """Save the policy's weights, optimizer and random state.

        If the backend can copy them, training continues while they are written, and the returned function waits until
        they are. Otherwise return None.
        """
        (path / _WATCH_FILE).write_text(json.dumps(asdict(self._collapse)))
        if self._keeps_best and self._collapse.kept is not None:
            _link_tree(self._best, path / _BEST)
        if await self.backend.snapshot_state(path):
            return partial(self.backend.state_written, path)
        return None

    async def load(self, path: Path) -> None:
        await self.backend.load_state(path)
        if (proxy := self.get_llm_proxy()) is not None:
            self._note_version(proxy)
        if (file := path / _WATCH_FILE).exists():
            try:
                watch = STATE.validate_python(json.loads(file.read_text()))
            except ValueError as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
            watch.by_validation = self._collapse.by_validation
            self._collapse = watch
            if self._keeps_best and (path / _BEST).is_dir():
                _link_tree(path / _BEST, self._best)
            elif self._keeps_best:
                watch.kept = None  # an earlier process kept none

    async def finish(self) -> None:
        """Write the trained model to `model/` in the run's directory, as a Hugging Face folder that any library loads.

        If the last weights are worse than the best ones by more than noise, `model/` has the best and `model-last/` the
        last.
        """
        if (directory := self.get_run().directory) is None:
            return
        shutil.rmtree(directory / "model-last", ignore_errors=True)  # of an earlier end of this run
        if self._keeps_best and (worse := self._collapse.last_is_worse()):
            await self.backend.save_pretrained(directory / "model-last")
            await self._load_best()
            logger.warning("the last weights are not the best (%s): model/ has the best, model-last/ the last", worse)
        await self.backend.save_pretrained(directory / "model")

    # ---- the best weights ------------------------------------------------------------------------

    def _new_collapse_watch(self) -> CollapseWatch:
        every = self.val_every_n_iters
        return CollapseWatch(by_validation=every is not None and every < self.max_iters)

    @property
    def _keeps_best(self) -> bool:
        return self.hand_back == "best"

    @property
    def _best(self) -> Path:
        """The folder of the best weights."""
        if (directory := self.get_run().directory) is not None:
            return directory / _BEST
        self._own_folder = self._own_folder or tempfile.TemporaryDirectory(prefix="leyden-best-")
        return Path(self._own_folder.name) / _BEST

    async def _keep(self, step: int, validation: Mapping[int, float] | None = None) -> None:
        """Keep the weights as the best ones.

        step: how many steps they were trained for.
        validation: the rewards of their validation, by task; None: they are the best by their training reward.
        """
        if self._keeps_best:
            aside = self._best.with_name(f"{ASIDE}{_BEST}")
            shutil.rmtree(aside, ignore_errors=True)
            await self._save_weights(aside)
            shutil.rmtree(self._best, ignore_errors=True)  # after a kill, the newest checkpoint has its own best
            aside.rename(self._best)
        self._collapse.keep(step, validation)

    async def _save_weights(self, path: Path) -> None:
        """Write the states of all models that are trained into the directory `path`, which is made."""
        await self.backend.save_state(path)

    async def _load_best(self) -> None:
        """Give all models that are trained their best weights, as a further version."""
        async with self._sampler_idle():
            await self.backend.load_state(self._best, as_version=self.backend.policy_version + 1)

    async def _after_fall(self, fall: str) -> Metrics:
        """Do what `on_collapse` says. Return metrics of the step if the policy has its best weights again, else none.

        fall: how the policy has fallen.
        """
        watch = self._collapse
        kept, watch.due = watch.kept, ""
        if self.on_collapse == "restore" and kept is not None and watch.restores < MAX_RESTORES:
            await self._load_best()
            watch.went_back()
            rate = self.optim.learning_rate * self._rate_scale
            logger.warning(
                "%s. The run goes back to the weights after step %d, with half the learning rate (now %s)",
                fall,
                kept.step,
                figure(rate),
            )
            return {"restored_to": kept.step, "policy_version": self.backend.policy_version}
        if self.on_collapse == "stop":
            logger.warning("%s. The run ends here", fall)
            self.ends_early = True
            self._loop.stop()
        elif not watch.warned:
            watch.warned = True
            logger.warning(
                "%s. The learning rate (%s) may be too large%s",
                fall,
                figure(self.optim.learning_rate * self._rate_scale),
                f", after {watch.restores} returns to the best weights" if watch.restores else "",
            )
        return {}

    async def _after_due_fall(self) -> Metrics:
        """Do what `on_collapse` says about a fall that the last validation has shown, before a step."""
        return await self._after_fall(self._collapse.due) if self._collapse.due else {}

    async def _watched(self, iteration: int, update: Awaitable[Metrics]) -> Metrics:
        """Make the update of a step, and return its metrics. If it has broken the policy, do what `on_collapse` says.

        Raise PolicyDiverged for numbers that are not finite, unless the run goes back or ends.
        """
        try:
            metrics = await update
        except PolicyDiverged as error:
            self._collapse.broken = f"step {iteration + 1}: {error}"
            went_back = await self._after_fall(self._collapse.broken)
            if went_back or self.ends_early:
                return {"optimizer_steps": 0, "policy_version": self.backend.policy_version, **went_back}
            raise
        kl = metrics.get("kl")
        fall = self._collapse.updated(iteration + 1, kl if isinstance(kl, float) else None)
        return {**metrics, **(await self._after_fall(fall) if fall else {})}

    @property
    def _rate_scale(self) -> float:
        """The fraction of the learning rate that the run has after it went back to its best weights."""
        return 0.5**self._collapse.restores

    # ---- for subclasses --------------------------------------------------------------------------

    def _scaled(self, optim: OptimParams, iteration: int) -> OptimParams:
        def at(rate: float) -> float:
            return self._rate_scale * learning_rate_at(iteration, self.max_iters, rate, **self._schedule)

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
        """Let sampling use the trained weights, and return their version."""
        async with self._sampler_idle():
            return await self.backend.publish_weights()

    @contextlib.asynccontextmanager
    async def _sampler_idle(self) -> AsyncGenerator[None]:
        """Change the sampled weights in the block. A sampler with its own copy of the weights is idle meanwhile, so
        that every call has one version.
        """
        proxy = self.get_llm_proxy()
        if self.backend.capabilities.shared_weights or proxy is None or not proxy.is_running():
            yield
            return
        await proxy.drain()
        try:
            yield
            self._note_version(proxy)
        finally:
            await proxy.resume()

    def _note_version(self, proxy: LLMProxy) -> None:
        """Tell the gateway the version of the weights, for its records, unless the sampler's endpoint reports it."""
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

    async def _publish_policies(self, llm: LLM, since: str) -> None:
        """Publish the policy with its sampling parameters, for the rollouts from now on.

        since: the end of the resources' name.
        """
        self._resources_id = await self._publish_policy(f"policy{since}", llm)

    async def _publish_policy(self, name: str, llm: LLM) -> str:
        return await self.publish_resources(name, {**(self.get_initial_resources() or {}), self.resource_name: llm})

    def _check_room(self) -> None:
        """Say what the run will take, and raise ConfigError if there is no room for it."""
        run, backends = self.get_run(), [self.backend.learner, *(each.learner for each in self._other_backends)]
        check_room(
            [arguments_of(each) for each in backends],
            directory=run.directory,
            resume=run.resume,
            n_checkpoints=(self.keep_last or self.max_iters) + (self.keep_best is not None) + self._keeps_best,
            n_rollouts=self.max_iters * getattr(self, "tasks_per_step", 0) * getattr(self, "rollouts_per_task", 0),
        )

    def _default_learning_rate(self) -> float:
        made_with = arguments_of(self.backend.learner)
        model = made_with.get("model")
        if isinstance(model, str | Path) and (base := BaseModel.of(model)) is not None:
            model = base.folder  # an earlier run's adapter is merged into it
        n_trained, n_weights = weights_of(model) or (None, None)
        adapter = made_with.get("lora") is not None or n_trained != n_weights
        return default_learning_rate(n_weights, adapter=adapter)


def _link_tree(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source`, as further names of them where the file system allows it."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # another file system
            shutil.copyfile(one, other)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link)


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
