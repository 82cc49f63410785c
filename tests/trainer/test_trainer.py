"""The trainer: specs in, a run out, and every wrong thing said before anything starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm import Algorithm
from leyden.errors import ConfigError, MissingResource, StoreError
from leyden.execution import SharedMemoryExecutionStrategy
from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.training.runs import open_run


@ly.rollout
async def double(task: int) -> float:
    return 2.0 * task


@ly.prompt_rollout
async def greet(task: str, prompt_template: ly.PromptTemplate) -> float:
    return float(len(prompt_template.format(name=task)))


async def rewards(store: ly.LightningStore) -> list[float | None]:
    rollouts = await store.query_rollouts()
    spans = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    return [ly.find_final_reward(spans[rollout.rollout_id]) for rollout in rollouts]


def test_fit_keeps_the_run_in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    summary = ly.Trainer(algorithm="baseline", n_runners=3).fit(double, [1, 2, 3])
    (directory,) = (tmp_path / ".leyden").iterdir()
    assert summary.run_dir is not None
    assert summary.run_dir.resolve() == directory.resolve()
    assert json.loads((directory / "run.json").read_text())["format"] == 2

    async def read() -> list[float | None]:
        async with SqliteLightningStore(directory / "store.sqlite") as store:
            return await rewards(store)

    assert asyncio.run(read()) == [2.0, 4.0, 6.0]


def test_a_run_is_private_to_its_user(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ly.Trainer(algorithm="baseline", run_dir=run).fit(double, [1])
    assert run.stat().st_mode & 0o777 == 0o700
    for file in run.glob("store.sqlite*"):
        assert file.stat().st_mode & 0o077 == 0, file
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    ly.Trainer(algorithm="baseline", run_dir=shared).fit(double, [1])
    assert shared.stat().st_mode & 0o777 == 0o755


async def test_afit_runs_on_the_callers_loop_and_fit_under_a_running_one() -> None:
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm="baseline", store=store).afit(double, [1])
        ly.Trainer(algorithm="baseline", store=store).fit(double, [2])  # what a notebook does
        assert await rewards(store) == [2.0, 4.0]


async def test_a_store_of_the_users_stays_open_and_our_own_is_closed() -> None:
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm="baseline", store=store).afit(double, [1])
        assert (await store.statistics())["total_rollouts"] == 1


def test_an_agent_method_and_every_registered_spec_work_together() -> None:
    trainer = ly.Trainer(
        algorithm={"type": "baseline", "n_epochs": 2},
        tracer="dummy",
        adapter="trajectory",
        store="memory",
        runner={"type": "litagent", "concurrency": 2},
        strategy={"type": "shm", "n_runners": 2},
    )
    assert trainer.n_runners == 2
    assert trainer.fit(double, [1, 2], val_dataset=[3]).rollouts["succeeded"] == 6


@pytest.mark.parametrize("given", [{"train_dataset": [1]}, {"val_dataset": []}])
def test_data_without_an_algorithm_is_refused_with_what_to_pass(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"there is data and no algorithm.* give Trainer\(algorithm='baseline'\)"):
        ly.Trainer(store="memory").fit(double, **given)


@pytest.mark.parametrize("strategy", ["shm", "ipc"])
def test_a_limit_below_the_work_ends_the_run_and_says_what_is_left(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = ly.Trainer(algorithm="baseline", n_runners=2, max_rollouts=3, strategy=strategy, run_dir=tmp_path)
    assert trainer.max_rollouts == 3
    summary = trainer.fit(double, list(range(9)))
    assert (summary.rollouts["succeeded"], summary.rollouts["queuing"]) == (6, 3)
    assert summary.stopped is not None
    assert "all 2 runners have ended after max_rollouts=3 each, and 3 rollouts are left" in summary.stopped
    assert summary.stopped in " ".join(str(summary).split())
    assert summary.stopped in " ".join(capsys.readouterr().err.split())
    run = open_run(tmp_path)
    assert (run.state, run.record.cause) == ("stopped", summary.stopped)


def test_a_limit_that_is_just_enough_lets_the_algorithm_finish() -> None:
    summary = ly.Trainer(algorithm="baseline", n_runners=1, max_rollouts=4, store="memory").fit(double, list(range(4)))
    assert (summary.rollouts["succeeded"], summary.stopped) == (4, None)


def test_a_limit_ends_an_algorithm_that_enqueues_only_later() -> None:
    """Its first rollouts are done and the runners gone; what it enqueues then would wait for ever."""
    ended: list[str] = []

    @ly.algo
    async def two_rounds(*, store: ly.LightningStore) -> None:
        try:
            for _ in range(2):
                rollout = await store.enqueue_rollout(1)
                await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    summary = ly.Trainer(algorithm=two_rounds, max_rollouts=1, store="memory").fit(double)
    assert (summary.rollouts["succeeded"], summary.rollouts["queuing"], ended) == (1, 1, ["cancelled"])


async def test_the_store_of_a_run_is_the_trainers_while_it_runs_and_can_be_read_afterwards(tmp_path: Path) -> None:
    seen: list[Any] = []

    @ly.algo
    async def look(*, store: ly.LightningStore) -> None:
        await store.enqueue_rollout(1)
        seen.append((trainer.store is store, (await store.statistics())["total_rollouts"]))

    trainer = ly.Trainer(algorithm=look, run_dir=tmp_path)
    assert trainer.store is None
    await trainer.afit(double)
    assert seen == [(True, 1)]
    assert trainer.store is not None and trainer.store is trainer.store
    assert (await trainer.store.statistics())["total_rollouts"] == 1
    with pytest.raises(StoreError, match="opened read-only"):
        await trainer.store.enqueue_rollout(2)
    await trainer.afit(double, resume=True)  # the file can be owned again
    assert (await trainer.store.statistics())["total_rollouts"] == 2
    await trainer.store.close()


async def test_a_store_in_memory_can_be_looked_at_after_the_run_and_one_of_the_users_is_the_trainers() -> None:
    trainer = ly.Trainer(algorithm="baseline")
    trainer.dev(double, [1, 2])
    assert trainer.store is not None
    assert await rewards(trainer.store) == [2.0, 4.0]
    async with InMemoryLightningStore() as store:
        trainer = ly.Trainer(algorithm="baseline", store=store)
        assert trainer.store is store
        await trainer.afit(double, [1])
        assert trainer.store is store


def test_dicts_without_a_type_hold_the_arguments_of_the_default_classes(tmp_path: Path) -> None:
    trainer = ly.Trainer(
        algorithm="baseline",
        adapter={"agent_match": "writer"},
        llm_proxy={"port": 0},
        tracer={"model_hosts": ["models.example"]},
        runner={"concurrency": 2},
        strategy={"n_runners": 2},
        store={"path": tmp_path / "rollouts.sqlite"},
        monitor={"interval_seconds": 5},
    )
    assert isinstance(trainer.adapter, ly.TraceToTriplet) and trainer.adapter.agent_match == "writer"
    assert isinstance(trainer.llm_proxy, ly.LLMProxy)
    assert isinstance(trainer.tracer, ly.OtelTracer)
    assert (trainer.runner.concurrency, trainer.n_runners) == (2, 2)
    assert isinstance(trainer.monitor, ly.Monitor)
    assert trainer.fit(double, [1, 2]).rollouts["succeeded"] == 2
    assert (tmp_path / "rollouts.sqlite").exists()
    with pytest.raises(ConfigError, match=r"algorithm=.* does not say which component"):
        ly.Trainer(algorithm={"n_epochs": 2})
    with pytest.raises(ConfigError, match="TraceToTriplet has no option 'agent_mach'; did you mean 'agent_match'"):
        ly.Trainer(adapter={"agent_mach": "writer"})


async def test_data_sets_are_given_by_position() -> None:
    trainer = ly.Trainer(algorithm="baseline", store="memory")
    assert trainer.fit(double, [1, 2], [3]).rollouts["succeeded"] == 3
    assert trainer.dev(double, [1, 2], [3]).rollouts["succeeded"] == 3
    assert (await trainer.afit(double, [1, 2], [3])).rollouts["succeeded"] == 3


def test_an_agent_without_a_gateway_yields_triplets_by_default() -> None:
    @ly.rollout
    async def calls_a_hosted_model(task: str) -> None:
        told = {"gen_ai.operation.name": "chat", "gen_ai.response.id": task}
        with ly.operation(name="chat", attributes=told):  # as OpenTelemetry's instrumentation of a client records it
            pass
        ly.emit_reward(0.5)

    found: list[Any] = []

    @ly.algo
    async def collect(*, store: ly.LightningStore, adapter: ly.TraceAdapter[Any], train_dataset: Any) -> None:
        [rollout] = [await store.enqueue_rollout(task) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])
        found.extend(adapter.adapt(await store.query_spans(rollout.rollout_id)))

    ly.Trainer(algorithm=collect, store="memory").fit(calls_a_hosted_model, ["hosted"])
    assert [(triplet.metadata["response_id"], triplet.reward) for triplet in found] == [("hosted", 0.5)]


def test_a_free_function_and_a_sync_function_are_algorithms() -> None:
    seen: list[Any] = []

    @ly.algo
    def ask(*, store: ly.LightningStore, train_dataset: list[int], val_dataset: list[int] | None = None) -> None:
        async def work() -> None:
            rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
            seen.extend(await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts]))

        asyncio.run(work())

    ly.Trainer(algorithm=ask, store="memory").fit(double, [1, 2])
    assert [rollout.status for rollout in seen] == ["succeeded", "succeeded"]


def test_what_an_algorithm_raises_is_raised_and_nothing_is_left_running() -> None:
    @ly.algo
    async def broken(*, train_dataset: list[int]) -> None:
        raise ZeroDivisionError("in the algorithm")

    with pytest.raises(ZeroDivisionError, match="in the algorithm"):
        ly.Trainer(algorithm=broken, store="memory").fit(double, [1])


def test_without_an_algorithm_runners_work_on_what_is_there_until_stopped() -> None:
    async def work() -> list[float | None]:
        async with InMemoryLightningStore() as store:
            fit = asyncio.create_task(ly.Trainer(store=store).afit(double))
            rollout = await store.enqueue_rollout(21)
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=20)
            fit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fit
            return await rewards(store)

    assert asyncio.run(work()) == [42.0]


def test_dev_takes_only_a_fast_algorithm() -> None:
    @ly.algo
    async def slow(*, store: Any) -> None: ...

    with pytest.raises(TypeError, match="use fit\\(\\) to train"):
        ly.Trainer(algorithm=slow).dev(double, [1])


def test_a_trainer_for_development_keeps_nothing_when_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ly.Trainer(n_runners=1, dev=True)
    for summary in (
        trainer.fit(double, [1, 2]),
        trainer.dev(double, [1, 2]),
        asyncio.run(trainer.afit(double, [1, 2])),
    ):
        assert (summary.rollouts["succeeded"], summary.run_dir) == (2, None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="dev=True keeps no run"):
        trainer.fit(double, [1], resume=True)
    with pytest.raises(TypeError, match="FastAlgorithm"):
        ly.Trainer(dev=True, algorithm=ly.algo(lambda store: None)).fit(double, [1])


def test_a_port_means_runners_in_processes() -> None:
    strategy = ly.Trainer(n_runners=16, port=9999).strategy
    assert isinstance(strategy, ly.ClientServerExecutionStrategy)
    assert (strategy.n_runners, strategy.server_port) == (16, 9999)
    given = ly.Trainer(strategy={"type": "cs", "server_port": 9999}, port=9999, daemon=True).strategy
    assert isinstance(given, ly.ClientServerExecutionStrategy)
    assert (given.server_port, given.daemon) == (9999, True)
    assert ly.Trainer(strategy="ipc", daemon=True).strategy.daemon  # pyright: ignore[reportAttributeAccessIssue]


def test_a_missing_resource_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with pytest.raises(MissingResource, match="PromptTemplate"):
        ly.Trainer(algorithm="baseline", run_dir=directory).fit(greet, ["Ada"])
    assert not directory.exists()


def test_a_policy_gradient_agent_that_wants_a_prompt_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    backend = ly.IsolatedBackend(tmp_path / "no such model")
    with pytest.raises(MissingResource, match="PromptTemplate"):
        ly.Trainer(algorithm=ly.PolicyGradient(backend), run_dir=tmp_path / "run").fit(greet, ["Ada"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "smh"}, "did you mean 'shm'?"),
        ({"algorithm": "baselin"}, "did you mean 'baseline'?"),
        ({"n_runners": 0}, "n_runners is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"strategy": {"type": "shm", "n_runners": 2}, "n_runners": 3}, "n_runners=3"),
        (
            {"strategy": {"type": "cs", "server_port": 9999}, "port": 9998},
            "server_port=9998, but the strategy given has server_port=9999",
        ),
        ({"strategy": "ipc", "port": 9999}, "InterProcessExecutionStrategy has no such option"),
        ({"strategy": {"type": "shm", "daemon": True}, "daemon": False}, "the strategy given has daemon=True"),
        ({"store": "mysql"}, "'mysql' is not known"),
    ],
)
def test_a_wrong_option_says_what_was_given_and_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ly.Trainer(**options).dev(double, [1])
    assert message in str(refused.value)


def test_a_plain_function_is_refused_with_the_decorators_named() -> None:
    with pytest.raises(ConfigError, match="@rollout"):
        ly.Trainer().dev(lambda task: 1.0, [1])  # type: ignore[arg-type]


def test_a_run_directory_is_not_used_twice_unless_resumed(tmp_path: Path) -> None:
    trainer = ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run")
    trainer.fit(double, [1])
    with pytest.raises(ConfigError, match="resume=True"):
        trainer.fit(double, [1])
    assert trainer.fit(double, [2], resume=True).rollouts["succeeded"] == 2
    with pytest.raises(ConfigError, match="holds no run"):
        ly.Trainer(algorithm="baseline", run_dir=tmp_path / "other").fit(double, [1], resume=True)


INTERRUPTED = """
import asyncio, sys
import leyden as ly

@ly.rollout
async def waits(task):
    print("started", flush=True)
    await asyncio.sleep(3600)

ly.Trainer(algorithm="baseline", run_dir=sys.argv[1]).fit(waits, [1, 2, 3])
"""


def test_sigterm_ends_a_run_also_where_ctrl_c_is_ignored() -> None:
    """As in what a shell script starts with `&`."""
    program = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{INTERRUPTED}".replace(
        "run_dir=sys.argv[1]", "store='memory', strategy={'type': 'shm', 'drain_seconds': 0}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    try:
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert "the run was stopped" in errors
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_soon_keeps_everything_and_says_how_to_resume(tmp_path: Path, number: int) -> None:
    directory = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    asked = time.monotonic()
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - asked < 20  # its tasks take an hour
    assert "resume=True" in errors, errors
    assert str(directory) in errors

    async def statuses() -> set[str]:
        async with SqliteLightningStore(directory / "store.sqlite") as store:
            return {rollout.status for rollout in await store.query_rollouts()}

    assert asyncio.run(statuses()) == {"requeuing"}


def test_algorithms_that_are_given_nothing_say_what_is_missing() -> None:
    class Bare(Algorithm):
        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None: ...

    for name in ("store", "adapter", "run", "trainer"):
        with pytest.raises(ConfigError, match=f"set_{name}"):
            getattr(Bare(), f"get_{name}")()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"retention": "1 day"}, "retention is '1 day'; give a Retention"),
        ({"run_dir": ""}, "run_dir is ''"),
        ({"run_dir": 5}, "run_dir is 5"),
        ({"dev": "yes"}, "dev is 'yes'; possible: True, False"),
        ({"n_runners": "4"}, "n_runners is '4'; it must be a whole number, at least 1"),
        ({"port": 99999}, "server_port is 99999; it must be a whole number, at least 0 and at most 65535"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_its_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}"):
        ly.Trainer(**options)


@pytest.mark.parametrize("restarts", ["2", 1.5, True, -1])
def test_restarts_that_cannot_be_counted_are_refused(restarts: Any) -> None:
    with pytest.raises(ConfigError, match="max_algorithm_restarts is "):
        ly.Trainer(max_algorithm_restarts=restarts, store="memory").fit(double, [1])


@pytest.mark.parametrize("part", ["strategy", "runner"])
async def test_two_trainers_do_not_work_with_the_same_strategy_or_runner_at_a_time(part: str) -> None:
    """A runner is bound to one agent, and a strategy ends what agents of its runners started."""
    shared: dict[str, Any] = {"strategy": SharedMemoryExecutionStrategy(), "runner": ly.LitAgentRunner()}
    options = {part: shared[part], "algorithm": "baseline"}
    begun, released = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @ly.rollout
    async def first(task: int) -> float:
        loop.call_soon_threadsafe(begun.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(released.wait(), loop))
        return 1.0

    async with asyncio.timeout(30):
        running = asyncio.create_task(ly.Trainer(**options, store="memory").afit(first, [1]))
        await begun.wait()
        with pytest.raises(ConfigError, match=f"this {type(shared[part]).__name__} is in a run already"):
            await ly.Trainer(**options, store="memory").afit(double, [1])
        released.set()
        assert (await running).rollouts["succeeded"] == 1
        assert (await ly.Trainer(**options, store="memory").afit(double, [1])).rollouts["succeeded"] == 1


async def test_a_run_whose_set_up_fails_ends_at_once_and_starts_no_rollout() -> None:
    """Runners that wait for the algorithm are not given the time to finish what they have not begun."""
    ran: list[int] = []

    @ly.rollout
    async def agent(task: int) -> float:
        ran.append(task)
        return 1.0

    class Refused(ly.IterativeAlgorithm):
        async def setup(self, train_dataset: Any, val_dataset: Any) -> None:
            await self.get_store().enqueue_rollout(1)
            raise ValueError("refused")

        async def step(self, iteration: int) -> ly.Metrics:
            return {}

    strategy = {"type": "shm", "drain_seconds": 60}
    trainer = ly.Trainer(algorithm=Refused(max_iters=1), store="memory", strategy=strategy, progress=False)
    started = time.monotonic()
    with pytest.raises(ValueError, match="refused"):
        await trainer.afit(agent, [1])
    assert time.monotonic() - started < 30
    assert ran == []
