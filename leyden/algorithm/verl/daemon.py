"""`AgentModeDaemon`: runs a batch of verl's prompts as rollouts of agents, and returns their rows.

The daemon works on the event loop of the algorithm. verl's trainer, which is synchronous, calls it from another thread
and waits there. The daemon knows the store, the gateway and how rollouts are read. It does not know verl: it returns
rows and metrics as plain values.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from leyden._lib import ids
from leyden._lib.aio import first_done
from leyden.adapter import TraceAdapter
from leyden.algorithm.collector import RolloutCollector, rollout_id_at
from leyden.algorithm.policy_gradient.rollout_metrics import rollout_metrics
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, RolloutReader, explanation
from leyden.algorithm.policy_gradient.step_data import Group, RolloutData
from leyden.algorithm.verl.rows import (
    Aggregation,
    Overlong,
    SequenceRow,
    data_proto,
    make_rows,
    placeholder_row,
    score_rollouts,
    truncate_rows,
)
from leyden.errors import ConfigError, NoTrainingData, StoreError
from leyden.gateway import LLMProxy
from leyden.legacy import AgentLightningServer
from leyden.training import Metrics
from leyden.types import LLM, EnqueueRolloutRequest, NamedResources, RolloutConfig, RolloutMode

logger = logging.getLogger(__name__)

DaemonMode = Literal["v1", "v0"]
"""The processes that run rollouts. "v1": runners, which claim them from the store. "v0": also workers of Agent
Lightning 0.1, which fetch tasks from a task server."""

_NAMED = 5
"""How many rollouts the error of a batch without a runner names."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How a daemon runs and reads rollouts. `of` reads the options from a configuration."""

    model: str
    """The name of the policy at verl's servers and for agents."""
    rollouts_per_task: int
    max_prompt_length: int
    """The limit of a row's prompt, in tokens."""
    max_response_length: int
    """The limit of a row's response, in tokens; also the `max_tokens` that agents should use."""
    temperature: float
    val_temperature: float
    """The sampling temperature of validation."""
    aggregation: Aggregation
    overlong: Overlong
    timeout_seconds: float | None
    """The time limit of each rollout; None: no limit."""
    failed_reward: float | None
    """The reward of a failed rollout in its group; None leaves it out."""
    resource_name: str
    """The name under which agents find the policy."""
    runner_timeout_seconds: float | None
    """How long to wait for the first runner before giving up; None: for ever."""
    pad_id: int = 0
    """The token of placeholders and padding."""
    mode: DaemonMode = "v1"
    port: int = 0
    """The port of the task server of mode v0; 0 takes a free one."""

    @classmethod
    def of(cls, config: Any) -> DaemonOptions:
        """Return the options in a whole configuration, from its section `leyden` and verl's keys."""
        rollout, own = config.actor_rollout_ref.rollout, config.leyden
        return cls(
            model=config.actor_rollout_ref.model.path,
            rollouts_per_task=rollout.n,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            temperature=rollout.temperature,
            val_temperature=rollout.val_kwargs.temperature,
            **{each.name: own[each.name] for each in fields(cls) if each.name in own},
        )


def policy_version(step: int, mode: RolloutMode) -> int:
    """Return the number of the trainer's step whose weights sample a batch.

    The rollouts of a training step are sampled with the weights of the step before, those of a validation with the
    step's own.
    """
    return max(step - 1, 0) if mode == "train" else step


@dataclass(slots=True)
class RolloutBatch:
    """The result of one batch of prompts: rows of its rollouts, and metrics."""

    rows: list[SequenceRow] = field(default_factory=list[SequenceRow])
    """The rows that fit, and a row without a trained token for each rollout that has none."""
    sessions: list[int] = field(default_factory=list[int])
    """For each row, the number of its rollout among the rollouts of its prompt."""
    metrics: Metrics = field(default_factory=dict[str, Any])


class AgentModeDaemon:
    """Runs prompts of verl's data loader as rollouts in the store, and converts the rollouts to rows.

    Make it in the algorithm's event loop. Call the other methods from another thread: they block. `run_batch`, which
    Leyden's trainer calls, runs a whole batch. A trainer that was written for Agent Lightning calls
    `set_up_data_and_server`, `run_until_all_finished`, `get_train_data_batch` or `get_test_metrics`, and
    `clear_data_and_server` in place of it.

    collector: enqueues rollouts, and waits for them.
    llm_proxy: the gateway, which gets verl's servers as its upstream.
    adapter: makes triplets of spans.
    publish: `Algorithm.publish_endpoint`, which stores an endpoint and returns the model that names it.
    run_id: the run's id, from which the ids of rollouts are derived, so that a resumed run finds them.
    initial_resources: further resources of agents.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        llm_proxy: LLMProxy,
        adapter: TraceAdapter[Any],
        *,
        publish: Callable[[LLM], Awaitable[LLM]],
        run_id: str,
        options: DaemonOptions,
        initial_resources: NamedResources | None = None,
    ) -> None:
        self._collector, self._proxy, self._adapter = collector, llm_proxy, adapter
        self._publish, self._run_id, self.options = publish, run_id, options
        self._initial_resources = initial_resources or {}
        self._resources_ids: dict[RolloutMode, str] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: Sequence[str] = ()
        self._batch_mode: RolloutMode = "train"
        self._steps = 0
        """The number of training batches of `set_up_data_and_server` so far."""
        self.made: RolloutBatch | None = None
        """The result of the newest batch of `run_until_all_finished`."""
        self.task_server: AgentLightningServer | None = None
        """The server of mode v0, while it runs."""

    def start(self) -> None:
        """Start the task server of mode v0, as `set_up_servers` also does. Do nothing in mode v1.

        Raise ConfigError if the port cannot be opened.
        """
        self._wait(self._serve_tasks())

    async def aclose(self) -> None:
        """Stop the task server of mode v0. Await it in the algorithm's event loop. Calling it again does nothing."""
        server, self.task_server = self.task_server, None
        if server is not None:
            await server.stop()

    def set_up_servers(self, addresses: Sequence[str]) -> None:
        """Route the gateway to verl's servers, and publish the policy as a resource for training and one for
        validation.

        addresses: the servers, as HOST:PORT.
        """
        self._wait(self._set_up(addresses))

    def run_batch(
        self, uids: Sequence[str], tasks: Sequence[str], *, step: int, mode: RolloutMode, n: int
    ) -> RolloutBatch:
        """Run each task `n` times, and return the rows when all have finished.

        uids: verl's name of each prompt, which becomes the rows' group.
        tasks: the tasks as JSON texts.
        step: verl's step, from which the version of the weights follows (`policy_version`), which the gateway records.
        Raise NoTrainingData if nothing of a training batch can be trained on, and ConfigError if no runner has started
        a rollout within `runner_timeout_seconds`.
        """
        return self._wait(self._run(list(uids), list(tasks), step, mode, n))

    # ---- the steps of a batch one by one ---------------------------------------------------------

    def set_up_data_and_server(
        self, data: Mapping[str, Sequence[Any]], server_addresses: Sequence[str], is_train: bool = True
    ) -> None:
        """Set the tasks of a batch, and route the gateway to verl's servers.

        data: columns of equal length; each row is a task, an object with the columns as its keys.
        server_addresses: the servers, as HOST:PORT.
        is_train: whether the batch is for training, not for validation.
        Raise ConfigError for columns of unequal length.
        """
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"the columns of a batch must have one length, and have {lengths}")
        columns = [[(name, value) for value in column] for name, column in data.items()]
        self._tasks = [json.dumps(dict(row)) for row in zip(*columns, strict=True)]
        self._batch_mode, self.made = "train" if is_train else "val", None
        self._steps += is_train
        self.set_up_servers(server_addresses)

    def run_until_all_finished(self) -> None:
        """Run the tasks, and return when all rollouts have finished. Raise ConfigError if no tasks were set."""
        if not self._tasks:
            raise ConfigError("the daemon has no tasks; call set_up_data_and_server first")
        n = self.options.rollouts_per_task if self._batch_mode == "train" else 1
        uids = [str(place) for place in range(len(self._tasks))]
        self.made = self.run_batch(uids, self._tasks, step=self._steps, mode=self._batch_mode, n=n)

    def get_test_metrics(self) -> Metrics:
        """Return the metrics of a validation batch. Raise ConfigError if none has finished."""
        return self._result("val").metrics

    def get_train_data_batch(
        self, max_prompt_length: int, max_response_length: int, device: Any, global_steps: int
    ) -> tuple[Any, Metrics]:
        """Return a training batch as verl's `DataProto`, padded to these lengths, and its metrics.

        device: where its tensors are put.
        global_steps: is written to its `meta_info`.
        Raise ConfigError if no training batch has finished, and for a length that is shorter than a
        row: the daemon's own limits may be larger.
        """
        made = self._result("train")
        longest = max(len(row.prompt_ids) for row in made.rows), max(len(row.response_ids) for row in made.rows)
        if longest[0] > max_prompt_length or longest[1] > max_response_length:
            raise ConfigError(
                f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} are less than the "
                f"longest row ({longest[0]} and {longest[1]} tokens); give those of the daemon's options"
            )
        batch = data_proto(
            made.rows,
            pad_id=self.options.pad_id,
            prompt_length=max_prompt_length,
            response_length=max_response_length,
        ).to(device)
        batch.meta_info["global_steps"] = global_steps
        return batch, made.metrics

    def clear_data_and_server(self) -> None:
        """Forget the batch. The gateway keeps its servers until others are set."""
        self._tasks, self.made = (), None

    def _result(self, mode: RolloutMode) -> RolloutBatch:
        if self.made is None or self._batch_mode != mode:
            raise ConfigError(
                f"the daemon has no finished batch of {mode!r}; call set_up_data_and_server and run_until_all_finished"
            )
        return self.made

    # ---- in the algorithm's event loop -----------------------------------------------------------

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve_tasks(self) -> None:
        if self.options.mode == "v1" or self.task_server is not None:
            return
        server = AgentLightningServer(port=self.options.port, store=self._collector.store, recorder=self._proxy)
        try:
            await server.start()
        except StoreError as error:
            raise ConfigError(f"leyden.port is {self.options.port}, the port of mode v0, and {error}") from error
        self.task_server = server
        logger.info("workers of Agent Lightning 0.1 find their tasks at %s", server.endpoint)

    async def _set_up(self, addresses: Sequence[str]) -> None:
        options = self.options
        await self._serve_tasks()
        endpoints = [f"http://{address.removeprefix('http://')}/v1" for address in addresses]
        self._proxy.serve_engine(*(LLM(model=options.model, endpoint=endpoint) for endpoint in endpoints))
        temperatures: dict[RolloutMode, float] = {"train": options.temperature, "val": options.val_temperature}
        for mode, temperature in temperatures.items():
            sampling = {"temperature": temperature, "max_tokens": options.max_response_length}
            llm = self._proxy.as_resource(model=options.model, sampling_parameters=sampling)
            resources_id = ids.derived_id("rs", self._run_id, f"policy for {mode}")
            resources = {**self._initial_resources, options.resource_name: await self._publish(llm)}
            await self._collector.store.update_resources(resources_id, resources, author=self._run_id)
            self._resources_ids[mode] = resources_id

    async def _run(self, uids: list[str], tasks: list[str], step: int, mode: RolloutMode, n: int) -> RolloutBatch:
        """Run each task `n` times, and return the rows. Raise NoTrainingData if a training step has none. A validation
        step without rows returns one untrained row per rollout, because verl needs its rewards.
        """
        started = time.perf_counter()
        self._proxy.set_policy_version(self.options.model, policy_version(step, mode))
        requests = [
            self._request(task, mode, step, place, session) for place, task in enumerate(tasks) for session in range(n)
        ]
        counts = RolloutCounts()
        groups = await self._collect(requests, uids, n, mode, counts)
        metrics = rollout_metrics(counts, seconds=time.perf_counter() - started, success_reward=1.0)
        scored, report = score_rollouts(groups, uids)
        rows = make_rows(scored, self.options.aggregation)
        before = _row_metrics(rows, "_before_processing")
        try:
            kept = truncate_rows(
                rows,
                scored,
                report,
                max_prompt_length=self.options.max_prompt_length,
                max_response_length=self.options.max_response_length,
                overlong=self.options.overlong,
                pad_id=self.options.pad_id,
            )
        except NoTrainingData as error:
            if mode == "train":
                raise NoTrainingData(f"step {step} has nothing to train on. {explanation(counts)}. {error}") from error
            kept = [placeholder_row(each, self.options.pad_id) for each in scored]
            report.placeholders = report.rows = len(kept)
        if report.dropped:
            logger.warning("step %d: %s", step, report)
        session_of = {str(request.rollout_id): place % n for place, request in enumerate(requests)}
        after = _row_metrics([row for row in kept if row.n_trained], "_after_processing")
        return RolloutBatch(
            rows=kept,
            sessions=[session_of[row.rollout_id] for row in kept],
            metrics={**metrics, **before, **after, **report.metrics("")},
        )

    def _request(self, task: str, mode: RolloutMode, step: int, place: int, session: int) -> EnqueueRolloutRequest:
        """place: the index of the task in the step.
        session: the number of the rollout among those of its task.
        """
        return EnqueueRolloutRequest(
            rollout_id=rollout_id_at(self._run_id, mode, step, place, session),
            input=json.loads(task),
            mode=mode,
            group_id=ids.derived_id("gr", self._run_id, mode, step, place),
            resources_id=self._resources_ids[mode],
            config=RolloutConfig(
                timeout_seconds=self.options.timeout_seconds,
                max_attempts=1,
                retry_condition=[],
                require_reward=True,
                require_model_call=mode == "train",
            ),
            # `step` is the number of finished steps, as in the other algorithms; verl counts the
            # current one
            metadata={"step": policy_version(step, mode), "place": place, "session": session},
        )

    async def _collect(
        self,
        requests: Sequence[EnqueueRolloutRequest],
        uids: Sequence[str],
        n: int,
        mode: RolloutMode,
        counts: RolloutCounts,
    ) -> list[Group]:
        """Run the requests and return one group for each prompt, with `n` rollouts at most. Count the rollouts in
        `counts`.

        Raise ConfigError if no runner has started one within `runner_timeout_seconds`.
        """
        temperature = self.options.temperature if mode == "train" else None
        reader = RolloutReader(self._adapter, temperature, self.options.failed_reward)
        found: dict[int, RolloutData] = {}

        async def collect() -> None:
            async with contextlib.aclosing(self._collector.collect(requests)) as results:
                async for result in results:
                    if (read := reader.read(result, counts)) is not None:
                        found[result.place] = read

        async with first_done(collect(), timeout_seconds=self.options.runner_timeout_seconds) as (collecting,):
            if not collecting.done():
                await self._require_runner([str(request.rollout_id) for request in requests])
            await collecting
        return [
            Group([found[place] for place in range(prompt * n, prompt * n + n) if place in found])
            for prompt in range(len(uids))
        ]

    async def _require_runner(self, rollout_ids: Sequence[str]) -> None:
        page = await self._collector.store.query_rollouts(rollout_id_in=rollout_ids)
        if all(rollout.status == "queuing" for rollout in page):
            named = ", ".join(rollout_ids[:_NAMED]) + (", ..." if len(rollout_ids) > _NAMED else "")
            raise ConfigError(
                f"no runner has started any of {len(rollout_ids)} rollouts within "
                f"leyden.runner_timeout_seconds={self.options.runner_timeout_seconds:g} ({named}); start runners on this "
                "store, or raise the limit"
            )


def _row_metrics(rows: Sequence[SequenceRow], suffix: str) -> Metrics:
    """Return the number and the lengths of rows, under the metric names of Agent Lightning's daemon.

    suffix: the end of each name, which tells the rows before dropping and cutting from those after.
    """
    prompts, responses = [len(row.prompt_ids) for row in rows], [len(row.response_ids) for row in rows]
    if not rows:
        return {f"rows{suffix}": 0}
    return {
        f"rows{suffix}": len(rows),
        f"prompt_length_mean{suffix}": sum(prompts) / len(rows),
        f"prompt_length_max{suffix}": max(prompts),
        f"response_length_mean{suffix}": sum(responses) / len(rows),
        f"response_length_max{suffix}": max(responses),
        f"trained_tokens{suffix}": sum(row.n_trained for row in rows),
    }
