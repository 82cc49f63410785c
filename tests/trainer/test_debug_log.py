"""At DEBUG a person follows a rollout from the queue to its end, and the log holds no secret and no whole prompt."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

import leyden as ly
from leyden._lib.logs import Preview
from leyden.algorithm import Dataset, IterativeAlgorithm
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.training import Metrics
from leyden.types import EnqueueRolloutRequest

QUESTION = "What is the capital of Norway? " * 100


@ly.llm_rollout
async def asks(task: str, llm: ly.LLM) -> float:
    if task == "broken":
        raise RuntimeError("no connection to postgresql://me:hunter2@db/x")
    async with AsyncOpenAI(base_url=llm.endpoint, api_key="EMPTY") as client:
        said: Any = [{"role": "user", "content": QUESTION}]
        await client.chat.completions.create(model=llm.model, messages=said, max_tokens=4)
    return 0.5


class Collects(IterativeAlgorithm):
    """One step: everything once, adapted."""

    uses_gateway = True

    async def setup(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> None:
        self.tasks = list(train_dataset or ())

    async def step(self, iteration: int) -> Metrics:
        store, proxy = self.get_store(), self.get_llm_proxy()
        assert proxy is not None
        llm = proxy.as_resource(model="fake")
        resources = await store.update_resources("policy", {"llm": llm})
        requests = [EnqueueRolloutRequest(input=task, resources_id=resources.resources_id) for task in self.tasks]
        rollouts = await store.enqueue_many_rollouts(requests)
        ids = [rollout.rollout_id for rollout in rollouts]
        await store.wait_for_rollouts(rollout_ids=ids)
        spans = await store.query_spans_of(ids)
        return {"triplets": sum(len(self.get_adapter().adapt(spans[id])) for id in ids)}


async def run(tasks: list[str]) -> list[str]:
    """The ids of the rollouts, in the order of the tasks."""
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store, token="sk-secret-of-the-gateway") as proxy,
    ):
        trainer = ly.Trainer(algorithm=Collects(max_iters=1), store=store, llm_proxy=proxy)
        await trainer.afit(asks, tasks)
        return [rollout.rollout_id for rollout in await store.query_rollouts()]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is told of events; a busy machine has the watchdog say other things, at length."""
    events = [record for record in caplog.records if record.levelno < logging.WARNING]
    return [record.getMessage() for record in events if record.name.startswith("leyden")]


async def test_a_rollout_is_followed_from_the_queue_to_what_was_learned_from_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "leyden")
    good, broken = await run(["fine", "broken"])
    told = lines(caplog)
    expected = [
        rf"rollout {good}: enqueued, None, policy, task fine",
        rf"Worker-0: claimed .*{good}",
        rf"rollout {good}: attempt at-\w+ begins, Worker-0",
        rf"rollout {good}: call 0 of model fake, OK, \d+ ms, \d+ \+ 4 tokens: .*capital of Norway.* -> .*assistant",
        rf"rollout {good}: attempt at-\w+ succeeded, no reason, \d+ ms, \d+ spans, reward 0\.5",
        rf"rollout {good}: attempt at-\w+, TraceToTriplet made 1 triplets of \d+ spans$",
    ]
    places = [next(place for place, line in enumerate(told) if re.match(pattern, line)) for pattern in expected]
    assert places == sorted(places)
    assert any(re.match(rf"rollout {good}: span leyden.reward, 0 ms, reward 0\.5", line) for line in told)
    assert any(re.match(rf"rollout {broken}: attempt \S+ failed, RuntimeError: no connection", line) for line in told)
    for pattern in [
        r"run \w+: Collects with 1 runners \(SharedMemoryExecutionStrategy\) on memory://, adapter TraceToTriplet",
        r"resources policy: version 1 written, of llm",
        r"iteration 1: train begins",
        r"iteration 1: train done, \{'triplets': 1.*\}",
        r"run \w+: done\nfinished in [\d:]+\nrollouts: 1 failed, 1 succeeded",
    ]:
        assert any(re.match(pattern, line) for line in told), pattern
    assert "hunter2" not in caplog.text
    assert "sk-secret-of-the-gateway" not in caplog.text
    assert max(len(line) for line in told) < 1_000, "a prompt is shown in part"


async def test_at_info_none_of_this_is_shown(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "leyden")
    (rollout,) = await run(["fine"])
    assert not [line for line in lines(caplog) if rollout in line]


def test_refused_calls_are_counted_by_their_reason(caplog: pytest.LogCaptureFixture):
    from tests.adapter.traces import sdk_call

    caplog.set_level(logging.DEBUG, "leyden.adapter")
    ly.TraceToTriplet().adapt([sdk_call(1, 2, id=1, asked="1"), sdk_call(3, 4, id=2, asked="2")])
    assert "made 2 triplets of 2 spans, 2 refused: the call was recorded without token ids" in caplog.text


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two\n  lines", "two lines"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        ("http://me:hunter2@host/", "http://me:***@host/"),
        (Unprintable(), "<Unprintable instance at 0x1>"),
    ],
)
def test_a_preview_is_one_line_without_passwords(value: object, text: str):
    assert re.sub("0x[0-9a-f]+", "0x1", str(Preview(value))) == text


@pytest.mark.parametrize("value", ["x" * 10_000, ["x" * 10_000] * 10_000, {str(n): n for n in range(10_000)}])
def test_a_preview_is_short(value: object):
    assert len(str(Preview(value))) <= 200


@pytest.fixture
def leyden_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("leyden")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield logger
    logger.propagate = before[1]
    logger.handlers[:] = before[2]
    logger.setLevel(before[0])
    logger.getChild("runner").setLevel(logging.NOTSET)


def test_agent_lightnings_function_shows_the_level_that_is_asked_for(
    leyden_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    logger = ly.configure_logger(logging.DEBUG)
    assert logger is leyden_logger
    logger.getChild("store").debug("rollout ro-1: enqueued")
    assert "rollout ro-1: enqueued" in capsys.readouterr().err
    assert ly.configure_logger(logging.INFO, "leyden.execution.runner").name == "leyden.execution.runner"
