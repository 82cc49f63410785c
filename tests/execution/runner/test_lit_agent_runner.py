"""A runner runs what is queued, and nothing an agent does gets past its own attempt."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

import leyden as ly
from leyden._lib.aio import Latch
from leyden.agent import LitAgent
from leyden.algorithm import Dataset
from leyden.errors import ConfigError, MissingResource, StoreError, UnknownRollout
from leyden.execution.runner import Hook
from leyden.store import InMemoryLightningStore
from leyden.types import AttemptedRollout, RolloutConfig, find_final_reward


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def run_all(store: InMemoryLightningStore, agent: LitAgent[Any], tasks: list[Any], **options: Any) -> list[Any]:
    """Run one rollout for each task and return the attempts in order."""
    config = options.pop("config", None)
    hooks = options.pop("hooks", ())
    rollouts = [await store.enqueue_rollout(task, config=config) for task in tasks]
    ids = [rollout.rollout_id for rollout in rollouts]
    stop = Latch()
    async with ly.LitAgentRunner(**options).run_context(agent=agent, store=store, hooks=hooks) as runner:
        work = asyncio.create_task(runner.iter(event=stop))
        await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
        stop.set()
        await work
    return [await store.get_latest_attempt(rollout_id) for rollout_id in ids]


async def test_a_return_value_is_the_reward_of_its_own_attempt(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        await asyncio.sleep(0.001 * (task % 7))
        return float(task)

    attempts = await run_all(store, agent, list(range(200)), concurrency=50)
    assert {attempt.status for attempt in attempts} == {"succeeded"}
    spans = await store.query_spans_of([attempt.rollout_id for attempt in attempts])
    assert [find_final_reward(spans[attempt.rollout_id]) for attempt in attempts] == [float(n) for n in range(200)]


async def test_a_rollout_runs_on_the_version_that_it_was_enqueued_with_at_the_address_of_its_start(
    store: InMemoryLightningStore,
) -> None:
    def resources(text: str) -> dict[str, ly.Resource]:
        return {"prompt": ly.PromptTemplate(template=text), "llm": ly.ProxyLLM(endpoint="gateway://g", model="m")}

    @ly.rollout
    async def agent(task: str, resources: Any) -> None:
        ly.emit_message(f"{task} {resources['prompt'].template} {resources['llm'].endpoint}")

    await store.add_resources(resources("one"), resources_id="rs")
    first = await store.enqueue_rollout("first")
    await store.update_resources("rs", resources("two"))
    await store.set_endpoint("g", "http://127.0.0.1:1/v1")
    await store.set_endpoint("g", "http://127.0.0.1:2/v1")
    (second,) = await run_all(store, agent, ["second"])
    seen = [
        span.attributes["leyden.message.body"]
        for rollout_id in (first.rollout_id, second.rollout_id)
        for span in await store.query_spans(rollout_id, name="leyden.message")
    ]
    assert seen == ["first one http://127.0.0.1:2/v1", "second two http://127.0.0.1:2/v1"]


async def test_a_model_whose_address_nobody_has_said_fails_the_attempt_with_its_name(
    store: InMemoryLightningStore,
) -> None:
    @ly.rollout
    async def agent(task: str, resources: Any) -> float:
        return 1.0

    await store.add_resources({"llm": ly.ProxyLLM(endpoint="gateway://nowhere", model="m")})
    (attempt,) = await run_all(store, agent, ["task"])
    assert attempt.failure == "missing_resource"
    assert "set_endpoint('nowhere'" in attempt.metadata["reason"]


@pytest.mark.parametrize("ahead_seconds", [-3600.0, 3600.0])
async def test_a_clock_that_differs_from_the_stores_neither_ends_an_agent_nor_lets_it_go_on(
    ahead_seconds: float,
) -> None:
    class StoreElsewhere(InMemoryLightningStore):
        async def dequeue_many_rollouts(self, **options: Any) -> list[AttemptedRollout]:
            claimed = list(await super().dequeue_many_rollouts(**options))
            for rollout in claimed:
                rollout.attempt.start_time += ahead_seconds
            return claimed

    @ly.rollout
    async def agent(task: float) -> float:
        await asyncio.sleep(task)
        return 1.0

    async with StoreElsewhere() as store:
        attempts = await run_all(store, agent, [0.05, 20.0], config=RolloutConfig(timeout_seconds=0.5))
    assert [attempt.status for attempt in attempts] == ["succeeded", "timeout"]


async def test_many_rollouts_wait_at_the_same_time(store: InMemoryLightningStore) -> None:
    together = 100
    here = 0
    everyone = asyncio.Event()

    @ly.rollout
    async def agent(task: int) -> float:
        nonlocal here
        here += 1
        if here == together:
            everyone.set()
        await asyncio.wait_for(everyone.wait(), 20)  # returns only if all are in flight at once
        return 1.0

    attempts = await run_all(store, agent, list(range(together)), concurrency=together)
    assert {attempt.status for attempt in attempts} == {"succeeded"}


async def test_sync_agents_run_at_the_same_time_in_threads_of_their_own(store: InMemoryLightningStore) -> None:
    barrier = threading.Barrier(20, timeout=20)

    @ly.rollout
    def agent(task: int) -> float:
        barrier.wait()
        ly.emit_message(f"task {task}")
        return float(task)

    attempts = await run_all(store, agent, list(range(20)), concurrency=20)
    assert {attempt.status for attempt in attempts} == {"succeeded"}
    spans = await store.query_spans_of([attempt.rollout_id for attempt in attempts])
    assert all(len(recorded) == 2 for recorded in spans.values())


class Unlucky(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class UnprintableExit(BaseException):
    __str__ = __repr__ = Unprintable.__str__


async def raises(task: Any) -> float:
    raise Unlucky("no such luck")


async def raises_what_has_no_text(task: Any) -> float:
    raise Unprintable


async def exits_without_text(task: Any) -> float:
    raise UnprintableExit


def raises_in_a_thread_what_has_no_text(task: Any) -> float:
    raise UnprintableExit


async def raises_what_utf8_cannot_say(task: Any) -> float:
    raise ValueError("half a pair: \udc80")


async def raises_megabytes(task: Any) -> float:
    raise ValueError("x" * 3_000_000 + "the end")


async def returns_what_has_no_text(task: Any) -> Any:
    return Unprintable()


async def emits_what_utf8_cannot_say(task: Any) -> None:
    ly.emit_message("half a pair: \udc80")


async def exits(task: Any) -> float:
    raise SystemExit(3)


async def interrupts(task: Any) -> float:
    raise KeyboardInterrupt


async def cancels_itself(task: Any) -> float:
    raise asyncio.CancelledError


async def raises_in_task_groups(task: Any) -> float:
    async def tool() -> None:
        raise ConnectionError("refused")

    async with asyncio.TaskGroup() as outer:

        async def session() -> None:
            async with asyncio.TaskGroup() as inner:
                inner.create_task(tool())
                inner.create_task(asyncio.sleep(60))  # is cancelled

        outer.create_task(session())
    return 1.0


async def exits_in_a_group(task: Any) -> float:
    raise BaseExceptionGroup("unhandled", [SystemExit(3), asyncio.CancelledError()])


def raises_a_group_in_a_thread(task: Any) -> float:
    raise ExceptionGroup("unhandled", [ConnectionError("refused"), ExceptionGroup("x", [TimeoutError("slow")])])


async def cancels_itself_in_a_group(task: Any) -> float:
    raise BaseExceptionGroup("unhandled", [asyncio.CancelledError()])


async def hangs_and_answers_its_cancellation_with_a_group(task: Any) -> float:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError as error:
        raise BaseExceptionGroup("unhandled", [error, ValueError("while closing")]) from None
    return 1.0


async def lacks_a_resource_in_a_group(task: Any) -> float:
    raise ExceptionGroup("unhandled", [MissingResource("there is no resource 'llm'")])


async def returns_text(task: Any) -> Any:
    return "done"


async def returns_nan(task: Any) -> float:
    return float("nan")


async def hangs(task: Any) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def hangs_and_will_not_be_cancelled(task: Any) -> float:
    end = time.monotonic() + 4
    while time.monotonic() < end:
        try:
            await asyncio.sleep(4)
        except asyncio.CancelledError:
            continue
    return 1.0


def blocks(task: Any) -> float:
    time.sleep(3)
    return 1.0


def raises_in_a_thread(task: Any) -> float:
    raise SystemExit("out")


async def returns_nothing(task: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("function", "status", "kind", "reason"),
    [
        (raises, "failed", "exception", "Unlucky: no such luck"),
        (raises_what_has_no_text, "failed", "exception", "Unprintable: (its __str__ raised RuntimeError)"),
        (exits_without_text, "failed", "exception", "UnprintableExit: (its __str__ raised RuntimeError)"),
        (raises_in_a_thread_what_has_no_text, "failed", "exception", "UnprintableExit: (its __str__ raised"),
        (raises_what_utf8_cannot_say, "failed", "exception", "ValueError: half a pair: \\udc80"),
        (raises_megabytes, "failed", "exception", "the end"),
        (returns_what_has_no_text, "failed", "invalid_return", "(its __repr__ raised RuntimeError)"),
        (emits_what_utf8_cannot_say, "failed", "no_reward", "without a reward"),
        (exits, "failed", "exception", "SystemExit: 3"),
        (interrupts, "failed", "exception", "KeyboardInterrupt"),
        (cancels_itself, "failed", "exception", "cancelled itself"),
        (raises_in_a_thread, "failed", "exception", "SystemExit: out"),
        (raises_in_task_groups, "failed", "exception", "ConnectionError: refused"),
        (exits_in_a_group, "failed", "exception", "the agent raised SystemExit: 3"),
        (raises_a_group_in_a_thread, "failed", "exception", "ConnectionError: refused; TimeoutError: slow"),
        (cancels_itself_in_a_group, "failed", "exception", "cancelled itself"),
        (hangs_and_answers_its_cancellation_with_a_group, "timeout", "timeout", "timeout_seconds=0.3"),
        (lacks_a_resource_in_a_group, "failed", "missing_resource", "there is no resource 'llm'"),
        (returns_text, "failed", "invalid_return", "'done'"),
        (returns_nan, "failed", "invalid_return", "nan"),
        (hangs, "timeout", "timeout", "timeout_seconds=0.3"),
        (hangs_and_will_not_be_cancelled, "timeout", "timeout", "timeout_seconds=0.3"),
        (blocks, "timeout", "timeout", "timeout_seconds=0.3"),
        (returns_nothing, "failed", "no_reward", "without a reward"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_whatever_an_agent_does_is_recorded_with_its_reason(
    store: InMemoryLightningStore, function: Any, status: str, kind: str, reason: str
) -> None:
    config = RolloutConfig(timeout_seconds=0.3 if status == "timeout" else None, require_reward=kind == "no_reward")
    (attempt,) = await run_all(store, ly.rollout(function), [1], config=config)
    assert (attempt.status, attempt.metadata["reason_kind"]) == (status, kind)
    assert reason in attempt.metadata["reason"]
    assert "unhandled" not in attempt.metadata["reason"]
    assert len(attempt.metadata["reason"]) < 20_000
    assert attempt.end_time is not None


async def test_a_bad_rollout_does_not_hurt_its_siblings(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int) -> Any:
        if task % 3 == 0:
            raise SystemExit(1)
        return "text" if task % 3 == 1 else 1.0

    attempts = await run_all(store, agent, list(range(60)), concurrency=16)
    assert [attempt.status for attempt in attempts] == ["failed", "failed", "succeeded"] * 20


async def test_an_agent_that_never_called_the_model_has_failed_where_that_is_required(
    store: InMemoryLightningStore,
) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    (attempt,) = await run_all(store, agent, [1], config=RolloutConfig(require_model_call=True))
    assert attempt.metadata["reason_kind"] == "no_model_call"


async def test_a_rollout_that_was_forgotten_while_it_ran_does_not_hurt_the_next(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int, rollout: ly.Rollout) -> float:
        if task == 0:
            await store.update_rollout(rollout.rollout_id, status="cancelled")
            assert await store.prune(ly.Retention(max_rollouts=0)) == 1
        return 1.0

    (first, *rest) = [await store.enqueue_rollout(task) for task in range(3)]
    stop = Latch()
    async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        work = asyncio.create_task(runner.iter(event=stop))
        done = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rest], timeout=30)
        stop.set()
        await work
    assert [rollout.status for rollout in done] == ["succeeded", "succeeded"]
    with pytest.raises(UnknownRollout):
        await store.get_rollout_by_id(first.rollout_id)


async def test_a_failed_attempt_is_tried_again_as_its_config_says(store: InMemoryLightningStore) -> None:
    tries = 0

    @ly.rollout
    async def agent(task: int) -> float:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("not yet")
        return 1.0

    (attempt,) = await run_all(store, agent, [1], config=RolloutConfig(max_attempts=3, retry_condition=["failed"]))
    assert (attempt.status, attempt.sequence_id) == ("succeeded", 3)


async def test_a_missing_resource_fails_the_attempt_and_says_what_there_is(store: InMemoryLightningStore) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        return 1.0

    await store.add_resources({"greeting": ly.PromptTemplate(template="hi")})
    (attempt,) = await run_all(store, agent, [1])
    assert attempt.metadata["reason_kind"] == "missing_resource"
    assert "greeting" in attempt.metadata["reason"]


class StoreThatLost(InMemoryLightningStore):
    """As when resources were removed by hand, or a rollout was written by something else."""

    lost = ""

    async def get_resources_by_id(self, resources_id: str, *, version: int | None = None) -> Any:
        return await super().get_resources_by_id("rs-nowhere" if resources_id == self.lost else resources_id)


async def test_resources_that_are_not_there_fail_their_own_attempt_only() -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    async with StoreThatLost() as store:
        store.lost = (await store.add_resources({"greeting": ly.PromptTemplate(template="hi")})).resources_id
        bad = await store.enqueue_rollout(1, resources_id=store.lost)
        await store.add_resources({"greeting": ly.PromptTemplate(template="hello")})
        (good,) = await run_all(store, agent, [2])
        assert good.status == "succeeded"
        (finished,) = await store.wait_for_rollouts(rollout_ids=[bad.rollout_id], timeout=5)
        attempt = await store.get_latest_attempt(finished.rollout_id)
        assert attempt is not None
        assert attempt.metadata["reason_kind"] == "missing_resource"


async def test_what_an_agent_changes_in_its_resources_its_siblings_do_not_see(store: InMemoryLightningStore) -> None:
    seen: list[Any] = []

    @ly.rollout
    async def agent(task: int, llm: ly.LLM, resources: Any) -> float:
        seen.append(llm.sampling_parameters.pop("temperature", "gone"))
        seen.append(len(resources))
        resources.clear()
        return 1.0

    await store.add_resources(
        {"llm": ly.LLM(endpoint="http://there/v1", model="m", sampling_parameters={"temperature": 1.0})}
    )
    await run_all(store, agent, [1, 2, 3])
    assert seen == [1.0, 1] * 3


class StoreThatReadsSlowly(InMemoryLightningStore):
    reading = Latch()

    async def get_resources_by_id(self, resources_id: str, *, version: int | None = None) -> Any:
        self.reading.set()
        await asyncio.sleep(0.05)
        return await super().get_resources_by_id(resources_id, version=version)


async def test_a_stop_right_after_a_claim_leaves_no_attempt_behind() -> None:
    """Whatever was claimed is run, however unlucky the moment: nothing stays `preparing`."""

    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    async with StoreThatReadsSlowly() as store:
        await store.add_resources({"greeting": ly.PromptTemplate(template="hi")})
        for task in range(3):
            await store.enqueue_rollout(task)
        async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
            await asyncio.wait_for(runner.iter(event=store.reading), 20)
        assert (await store.statistics())["rollouts_by_status"]["succeeded"] == 3


async def test_what_is_no_hook_is_logged_and_goes_no_further(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    (attempt,) = await run_all(store, agent, [1], hooks=[object()])
    assert attempt.status == "succeeded"


async def test_hooks_run_at_their_four_points_in_order_and_may_fail(store: InMemoryLightningStore) -> None:
    points: list[str] = []

    class Watch(Hook):
        async def on_rollout_start(self, **_: Any) -> None:
            points.append("rollout start")
            raise RuntimeError("a hook's trouble is its own")

        async def on_trace_start(self, **_: Any) -> None:
            points.append("trace start")

        async def on_trace_end(self, **_: Any) -> None:
            points.append("trace end")

        async def on_rollout_end(self, *, spans: Any, **_: Any) -> None:
            points.append(f"rollout end with {len(spans)} span")

    @ly.rollout
    async def agent(task: int) -> float:
        points.append("agent")
        return 1.0

    (attempt,) = await run_all(store, agent, [1], hooks=[Watch()])
    assert attempt.status == "succeeded"
    assert points == ["rollout start", "trace start", "agent", "trace end", "rollout end with 1 span"]


async def test_step_runs_one_task_and_raises_what_the_agent_raised(store: InMemoryLightningStore) -> None:
    @ly.prompt_rollout
    async def agent(task: str, prompt_template: ly.PromptTemplate) -> float:
        if task == "bad":
            raise ValueError("bad task")
        return float(len(prompt_template.format(x=task)))

    async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        rollout = await runner.step("abc", resources={"p": ly.PromptTemplate(template="<{x}>")}, mode="val")
        assert (rollout.status, rollout.mode) == ("succeeded", "val")
        spans = await store.query_spans_of([rollout.rollout_id])
        assert find_final_reward(spans[rollout.rollout_id]) == 5.0
        with pytest.raises(ValueError, match="bad task"):
            await runner.step("bad")


async def test_step_takes_the_task_the_resources_and_the_mode_by_position(store: InMemoryLightningStore) -> None:
    @ly.prompt_rollout
    async def agent(task: str, prompt_template: ly.PromptTemplate, rollout: ly.Rollout) -> float:
        return float(prompt_template.format(task=task) == "Do it" and rollout.mode == "train")

    async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        rollout = await runner.step("it", {"main": ly.PromptTemplate(template="Do {task}")}, "train")
    assert find_final_reward(await store.query_spans(rollout.rollout_id)) == 1.0


def test_a_plain_with_block_makes_a_runner_ready_as_an_async_one_does() -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 2.0 * task

    async def step(runner: ly.Runner[int]) -> ly.Rollout:
        return await runner.step(21)

    runner, store = ly.LitAgentRunner[int](), InMemoryLightningStore()
    with runner.run_context(agent=agent, store=store, hooks=None, worker_id=3) as ready:
        assert ready is runner
        assert asyncio.run(step(ready)).status == "succeeded"
    with pytest.raises(ConfigError, match="the runner has no agent"):
        asyncio.run(step(runner))


async def test_a_block_that_raises_tears_the_runner_down(store: InMemoryLightningStore) -> None:
    runner = ly.LitAgentRunner[int]()
    agent = ly.rollout(lambda task: 1.0)
    with pytest.raises(Unlucky), runner.run_context(agent=agent, store=store):
        raise Unlucky
    with pytest.raises(Unlucky):
        async with runner.run_context(agent=agent, store=store):
            raise Unlucky
    with pytest.raises(ConfigError, match="the runner has no agent"):
        await runner.step(1)


def test_runners_agents_and_data_sets_say_the_type_of_their_tasks() -> None:
    class Halving(ly.LitAgent[int]):
        """An agent of a class with a type."""

    class MyRunner(ly.LitAgentRunner[int]):
        """A runner of a class with a type."""

    assert isinstance(MyRunner(), ly.Runner)
    assert isinstance(Halving(), LitAgent)
    tasks: Dataset[int] = [1, 2, 3]
    assert [alias.__args__ for alias in (Dataset[str], ly.Runner[str], ly.LitAgentRunner[str], LitAgent[str])] == [
        (str,)
    ] * 4
    assert len(tasks) == 3


async def test_train_and_validation_have_entry_points_of_their_own(store: InMemoryLightningStore) -> None:
    class Agent(LitAgent[int]):
        async def training_rollout_async(self, task: int, resources: Any, rollout: Any) -> float:
            return 1.0

        async def validation_rollout_async(self, task: int, resources: Any, rollout: Any) -> float:
            return 2.0

    async with ly.LitAgentRunner().run_context(agent=Agent(), store=store) as runner:
        for mode, reward in (("train", 1.0), ("val", 2.0), ("test", 2.0), ("live", 2.0)):
            rollout = await runner.step(0, mode=mode)  # type: ignore[arg-type]
            spans = await store.query_spans_of([rollout.rollout_id])
            assert find_final_reward(spans[rollout.rollout_id]) == reward


async def test_a_runner_ends_by_itself_after_max_rollouts(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    for task in range(10):
        await store.enqueue_rollout(task)
    async with ly.LitAgentRunner(max_rollouts=4, concurrency=3).run_context(agent=agent, store=store) as runner:
        await asyncio.wait_for(runner.iter(), 20)
    statistics = await store.statistics()
    assert (statistics["rollouts_by_status"]["succeeded"], statistics["rollouts_by_status"]["queuing"]) == (4, 6)


async def test_stopping_finishes_what_is_under_way_and_claims_nothing_more(store: InMemoryLightningStore) -> None:
    started, stop = asyncio.Event(), Latch()

    @ly.rollout
    async def agent(task: int) -> float:
        started.set()
        await asyncio.sleep(0.2)
        return 1.0

    first = await store.enqueue_rollout(0)
    second = await store.enqueue_rollout(1)
    async with ly.LitAgentRunner(concurrency=1).run_context(agent=agent, store=store) as runner:
        work = asyncio.create_task(runner.iter(event=stop))
        await started.wait()
        stop.set()
        await work
    assert (await store.get_rollout_by_id(first.rollout_id)).status == "succeeded"
    assert (await store.get_rollout_by_id(second.rollout_id)).status == "queuing"


async def test_a_store_that_is_gone_ends_the_runner_with_its_error() -> None:
    store = InMemoryLightningStore()

    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    async with ly.LitAgentRunner().run_context(agent=agent, store=store) as runner:
        work = asyncio.create_task(runner.iter())
        await asyncio.sleep(0.05)
        await store.close()
        with pytest.raises(ly.LeydenError, match="close"):
            await asyncio.wait_for(work, 10)


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"max_rollouts": 0}, {"heartbeat_interval": 0.0}],
    ids=lambda value: next(iter(value)),
)
def test_wrong_options_are_refused_with_their_value(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        ly.LitAgentRunner(**options)


class OwnTracer(ly.DummyTracer):
    """A tracer of a user's own, which opens no trace of Leyden and may fail where it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at

    def trace_context(self, *_: Any, **__: Any) -> Any:
        return self._own()

    @contextlib.asynccontextmanager
    async def _own(self) -> AsyncGenerator[None]:
        self._fail("entry")
        yield
        self._fail("exit")

    def get_last_trace(self) -> Any:
        self._fail("spans")
        return []

    def teardown_worker(self, worker_id: int) -> None:
        self._fail("teardown")

    def _fail(self, point: str) -> None:
        if point == self.fails_at:
            raise RuntimeError(f"the tracer failed at {point}")


@pytest.mark.parametrize("fails_at", ["", "spans", "teardown"])
@pytest.mark.parametrize("error", [ValueError("the agent's own"), Unprintable(), KeyError()])
async def test_no_error_of_a_tracer_hides_the_error_of_the_agent(
    store: InMemoryLightningStore, fails_at: str, error: Exception
) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        raise error

    runner = ly.LitAgentRunner(OwnTracer(fails_at))
    with pytest.raises(type(error)) as caught:
        async with runner.run_context(agent=agent, store=store):
            await runner.step(1)
    assert caught.value is error
    [rollout] = await store.query_rollouts()
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None and attempt.status == "failed"
    assert attempt.metadata["reason_kind"] == "exception"
    assert attempt.metadata["reason"].startswith(type(error).__name__)
    assert ("the tracer failed at spans" in attempt.metadata["reason"]) == (fails_at == "spans")


@pytest.mark.parametrize("fails_at", ["entry", "exit", "spans"])
async def test_a_tracer_that_fails_fails_its_attempt_alone(store: InMemoryLightningStore, fails_at: str) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    attempts = await run_all(store, agent, [1, 2], tracer=OwnTracer(fails_at))
    assert [attempt.status for attempt in attempts] == ["failed", "failed"]
    assert all(f"the tracer failed at {fails_at}" in attempt.metadata["reason"] for attempt in attempts)


async def test_a_reward_of_an_agent_under_a_tracer_without_traces_is_stored(store: InMemoryLightningStore) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return 0.5

    [attempt] = await run_all(store, agent, [1], tracer=OwnTracer())
    assert attempt.status == "succeeded"
    assert find_final_reward(await store.query_spans(attempt.rollout_id)) == 0.5


async def test_a_report_that_fails_names_the_end_that_it_was_to_report() -> None:
    class Away(InMemoryLightningStore):
        async def update_attempt(self, *args: Any, **options: Any) -> Any:
            raise StoreError("the store is away")

    @ly.rollout
    async def agent(task: int) -> float:
        raise ValueError("the agent's own")

    async with Away() as store, ly.LitAgentRunner(OwnTracer()).run_context(agent=agent, store=store) as runner:
        with pytest.raises(StoreError, match="the store is away") as caught:
            await runner.step(1)
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("ValueError: the agent's own" in note for note in caught.value.__notes__)
