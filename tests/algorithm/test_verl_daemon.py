"""The daemon before verl: prompts become rollouts of a real store and gateway, and rows leave it. verl is not needed."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.adapter import TraceToTriplet
from leyden.algorithm.verl.daemon import AgentModeDaemon, DaemonOptions, RolloutBatch
from leyden.errors import ConfigError, NoTrainingData
from leyden.gateway import UpstreamModel
from leyden.legacy import AgentLightningClient, LegacyAgentRunner
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.training.runs import open_run
from tests.algorithm.asking import ask

OPTIONS = DaemonOptions(
    model="fake",
    rollouts_per_task=3,
    max_prompt_length=64,
    max_response_length=64,
    temperature=1.0,
    val_temperature=1.0,
    aggregation="trajectory",
    overlong="drop",
    timeout_seconds=30.0,
    failed_reward=0.0,
    resource_name="main_llm",
    runner_timeout_seconds=20.0,
)


@ly.rollout
async def agent(task: dict[str, int], llm: ly.LLM) -> float:
    """Fail on the task 2; otherwise ask twice, of which the second call does not continue the first."""
    if task["number"] == 2:
        raise ValueError("no")
    await ask(llm)
    return float(len(await ask(llm, "guess 3..5")) > 0) + task["number"]


class Batches(ly.Algorithm):
    """Runs one batch of training and one of validation, as verl's trainer would, from another thread."""

    uses_gateway = True

    def __init__(self) -> None:
        self.train, self.val = RolloutBatch(), RolloutBatch()

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        proxy = self.get_llm_proxy()
        assert proxy is not None
        async with FakeUpstream() as policy:
            daemon = AgentModeDaemon(
                self.collector,
                proxy,
                self.get_adapter(),
                publish=self.publish_endpoint,
                run_id=self.get_run().run_id,
                options=OPTIONS,
            )
            address = policy.llm().endpoint.removeprefix("http://").removesuffix("/v1")
            await asyncio.to_thread(daemon.set_up_servers, [address])
            tasks = ['{"number": 1}', '{"number": 2}']
            self.train = await asyncio.to_thread(daemon.run_batch, ["a", "b"], tasks, step=4, mode="train", n=3)
            self.val = await asyncio.to_thread(daemon.run_batch, ["c"], tasks[:1], step=4, mode="val", n=1)


def test_a_batch_of_prompts_becomes_rows_with_every_reward(tmp_path: Path) -> None:
    algorithm = Batches()
    ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", progress=False).fit(agent)
    rows, sessions = algorithm.train.rows, algorithm.train.sessions
    assert [(row.group, session) for row, session in zip(rows, sessions, strict=True)] == [
        *(("a", session) for session in (0, 0, 1, 1, 2, 2)),
        *(("b", session) for session in (0, 1, 2)),
    ]
    assert all(row.n_trained and row.reward >= 1.0 for row in rows[:6])
    assert all(not row.n_trained and row.reward == 0.0 for row in rows[6:])
    metrics = algorithm.train.metrics
    assert metrics["rollouts"] == 6 and metrics["failed"] == 3 and metrics["placeholder_rows"] == 3
    assert metrics["rows_before_processing"] == metrics["rows_after_processing"] == 6
    assert [row.reward for row in algorithm.val.rows] == [2.0, 2.0]
    failures = open_run(tmp_path / "run").failures()
    assert [failure.iteration for failure in failures] == [4, 4, 4]  # verl's own number of the step


def hosted(store: Any, proxy: ly.LLMProxy, options: DaemonOptions) -> AgentModeDaemon:
    return AgentModeDaemon(
        ly.RolloutCollector(store), proxy, TraceToTriplet(), publish=_unpublished, run_id="run", options=options
    )


@pytest.mark.filterwarnings("ignore:.*task protocol of Agent Lightning 0.1:DeprecationWarning")
async def test_workers_of_the_old_protocol_run_a_batch_and_the_gateway_records_their_calls() -> None:
    async with (
        InMemoryLightningStore() as store,
        ly.LLMProxy(store=store) as proxy,
        FakeUpstream() as policy,
    ):
        daemon = hosted(store, proxy, replace(OPTIONS, mode="v0"))
        await asyncio.to_thread(daemon.start)
        assert daemon.task_server is not None
        client = AgentLightningClient(daemon.task_server.endpoint, poll_interval=0.05)
        working = asyncio.create_task(LegacyAgentRunner(agent, client, max_tasks=3).iter_async())
        address = policy.llm().endpoint.removeprefix("http://").removesuffix("/v1")
        data = {"number": [1]}
        try:
            await asyncio.to_thread(daemon.set_up_data_and_server, data, [address])
            await asyncio.to_thread(daemon.run_until_all_finished)
            assert await working == 3
        finally:
            working.cancel()
            await daemon.aclose()
    made = daemon.made
    assert made is not None
    assert [row.reward for row in made.rows] == [2.0] * 6 and all(row.n_trained for row in made.rows)
    with pytest.raises(ConfigError, match="no finished batch of 'val'"):
        daemon.get_test_metrics()
    daemon.clear_data_and_server()
    with pytest.raises(ConfigError, match="no tasks; call set_up_data_and_server"):
        daemon.run_until_all_finished()


async def test_agents_get_their_modes_sampling_and_the_gateway_keeps_its_own_models() -> None:
    judge = UpstreamModel("judge", "http://127.0.0.1:2/v1")
    async with InMemoryLightningStore() as store, ly.LLMProxy(model_list=[judge], store=store) as proxy:
        daemon = hosted(store, proxy, replace(OPTIONS, temperature=0.7, val_temperature=0.0))
        await asyncio.to_thread(daemon.set_up_servers, ["127.0.0.1:3"])
        await asyncio.to_thread(daemon.set_up_servers, ["127.0.0.1:1"])  # as after a restart of the servers
        models = [(model.model_name, model.endpoint) for model in proxy.served_models]
        found = [each.resources["main_llm"] for each in await store.query_resources()]
    assert {tuple(llm.sampling_parameters.items()) for llm in found if isinstance(llm, ly.LLM)} == {
        (("temperature", 0.7), ("max_tokens", 64)),
        (("temperature", 0.0), ("max_tokens", 64)),
    }
    assert models == [("judge", "http://127.0.0.1:2/v1"), ("fake", "http://127.0.0.1:1/v1")]


async def test_a_batch_without_a_valid_sample_is_an_error_with_the_reasons() -> None:
    async with InMemoryLightningStore() as store, ly.LLMProxy(store=store) as proxy, FakeUpstream() as policy:
        daemon = hosted(store, proxy, OPTIONS)
        address = policy.llm().endpoint.removeprefix("http://").removesuffix("/v1")
        runner = ly.LitAgentRunner[Any](max_rollouts=3)
        runner.init(agent)
        runner.init_worker(0, store)
        working = asyncio.create_task(runner.iter())
        try:
            await asyncio.to_thread(daemon.set_up_servers, [address])
            with pytest.raises(NoTrainingData, match=r"step 2 has nothing to train on.*3 .*ValueError: no"):
                await asyncio.to_thread(daemon.run_batch, ["a"], ['{"number": 2}'], step=2, mode="train", n=3)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def test_a_batch_that_no_runner_takes_is_an_error_with_the_setting() -> None:
    async with InMemoryLightningStore() as store, ly.LLMProxy(store=store) as proxy:
        daemon = AgentModeDaemon(
            ly.RolloutCollector(store),
            proxy,
            TraceToTriplet(),
            publish=_unpublished,
            run_id="run",
            options=replace(OPTIONS, runner_timeout_seconds=1.1),
        )
        await asyncio.to_thread(daemon.set_up_servers, ["127.0.0.1:1"])
        with pytest.raises(
            ConfigError,
            match=r"no runner has started any of 2 rollouts within leyden\.runner_timeout_seconds=1\.1 \(ro-",
        ) as error:
            await asyncio.to_thread(daemon.run_batch, ["a"], ["1"], step=0, mode="train", n=2)
        waited_for = {rollout.rollout_id for rollout in await store.query_rollouts()}
    assert all(rollout_id in str(error.value) for rollout_id in waited_for)


@pytest.mark.filterwarnings("ignore:.*task protocol of Agent Lightning 0.1:DeprecationWarning")
async def test_a_port_of_mode_v0_that_is_in_use_is_named_with_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with InMemoryLightningStore() as store, ly.LLMProxy(store=store) as proxy:
            daemon = hosted(store, proxy, replace(OPTIONS, mode="v0", port=port))
            with pytest.raises(
                ConfigError, match=rf"leyden\.port is {port}, the port of mode v0, and .*in use.*port=0"
            ):
                await asyncio.to_thread(daemon.start)


async def _unpublished(llm: ly.LLM) -> ly.LLM:
    return llm
