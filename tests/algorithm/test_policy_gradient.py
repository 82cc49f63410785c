"""Policy gradients end to end, with a real model: whatever an agent does is trained on or told, and the policy learns."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import itertools
import math
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")
openai = pytest.importorskip("openai")

import leyden as ly  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.errors import ConfigError, EngineError, NoTrainingData  # noqa: E402
from leyden.objectives import Advantages, register_estimator  # noqa: E402
from leyden.objectives.advantages import AdvantageEstimate, RolloutRewards  # noqa: E402
from leyden.store import InMemoryLightningStore, SqliteLightningStore  # noqa: E402
from leyden.testing import FakeUpstream  # noqa: E402
from leyden.training import Callback, CsvWriter, EarlyStopping, TrainLoop  # noqa: E402
from leyden.training.runs import open_run  # noqa: E402
from leyden.types import AttemptedRollout, failure_reason, find_final_reward  # noqa: E402
from tests.algorithm.asking import Rows, client  # noqa: E402

Agent = Callable[..., Awaitable[Any]]


async def ask(llm: ly.LLM, text: str = "guess 0..9", **options: Any) -> Any:
    arguments = {"model": llm.model, "max_tokens": 4, "temperature": 1.0} | options
    messages = [{"role": "user", "content": text}]
    return await client().with_options(base_url=llm.endpoint).chat.completions.create(messages=messages, **arguments)


def policy_gradient(rows: Rows, **options: Any) -> ly.PolicyGradient:
    backend = options.pop("backend", None) or ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=1)
    defaults = {"n_steps": 1, "tasks_per_step": 2, "rollouts_per_task": 3, "max_tokens": 4}
    return ly.PolicyGradient(backend, writers=[rows], **(defaults | options))


# ---- agents that do not do what they should ---------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


async def raises(llm: ly.LLM) -> float:
    await ask(llm)
    raise ValueError("no such luck")


async def raises_what_has_no_text(llm: ly.LLM) -> float:
    raise Unprintable


async def exits(llm: ly.LLM) -> float:
    raise SystemExit(3)


async def returns_text(llm: ly.LLM) -> Any:
    await ask(llm)
    return "done"


async def returns_nan(llm: ly.LLM) -> float:
    await ask(llm)
    return math.nan


async def returns_nothing(llm: ly.LLM) -> None:
    await ask(llm)


async def never_calls(llm: ly.LLM) -> float:
    return 1.0


async def calls_in_vain(llm: ly.LLM) -> float:
    try:
        await ask(llm, max_tokens=-1)
    except openai.APIError:
        pass
    return random.random()


async def calls_another_model(llm: ly.LLM) -> float:
    await ask(llm, model="gpt-4")
    return 1.0


async def says_too_much(llm: ly.LLM) -> float:
    await ask(llm, "guess 0..9 " * 100)
    return 1.0


async def hangs(llm: ly.LLM) -> float:
    await ask(llm)
    await asyncio.sleep(3600)
    return 1.0


def blocks(llm: ly.LLM) -> float:
    threading.Event().wait(3)
    return 1.0


FAILURES: list[tuple[Callable[..., Any], str, str]] = [
    (raises, "exception", "ValueError: no such luck"),
    (raises_what_has_no_text, "exception", "Unprintable: (its __str__ raised RuntimeError)"),
    (exits, "exception", "SystemExit: 3"),
    (returns_text, "invalid_return", "'done'"),
    (returns_nan, "invalid_return", "which is no finite number"),
    (returns_nothing, "no_reward", "without a reward"),
    (never_calls, "no_model_call", "never called the model"),
    (calls_in_vain, "no_model_call", "'max_tokens' must be an integer"),
    (calls_another_model, "exception", "no model 'gpt-4'"),
    (says_too_much, "exception", "the context has 128"),
    (hangs, "timeout", "timeout_seconds=1"),
    (blocks, "timeout", "timeout_seconds=1"),
]


async def plays_well(llm: ly.LLM) -> float:
    await ask(llm)
    return random.random()


def agent_of(bad: Callable[..., Any]) -> Any:
    """Tasks "good" are played as they should be, by the same agent."""
    if asyncio.iscoroutinefunction(bad):

        @ly.llm_rollout
        async def agent(task: str, llm: ly.LLM) -> Any:
            return await (plays_well if task == "good" else bad)(llm)

        return agent

    @ly.llm_rollout
    def sync_agent(task: str, llm: ly.LLM) -> Any:
        if task != "good":
            return bad(llm)
        with openai.OpenAI(base_url=llm.endpoint, api_key="unused") as blocking:
            blocking.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], max_tokens=4, temperature=1.0
            )
        return random.random()

    return sync_agent


async def stored(directory: Path) -> list[AttemptedRollout]:
    async with SqliteLightningStore(directory / "store.sqlite") as store:
        return [rollout for rollout in await store.query_rollouts() if isinstance(rollout, AttemptedRollout)]


@pytest.mark.parametrize(("bad", "kind", "reason"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_rollout_is_recorded_with_its_reason_and_the_others_are_trained_on(
    tmp_path: Path, bad: Callable[..., Any], kind: str, reason: str
) -> None:
    rows = Rows()
    trainer = ly.Trainer(algorithm=policy_gradient(rows, timeout_seconds=1.0), run_dir=tmp_path / "run")
    summary = trainer.fit(agent_of(bad), ["good", "bad"])
    assert {status: count for status, count in summary.rollouts.items() if count} == {"succeeded": 3, "failed": 3}
    assert sum(summary.failures.values()) == 3
    assert all(reason in text for text in summary.failures)
    rollouts = asyncio.run(stored(tmp_path / "run"))
    assert all(rollout.attempt.finished for rollout in rollouts)
    failed = [rollout for rollout in rollouts if rollout.status == "failed"]
    assert {rollout.attempt.metadata["reason_kind"] for rollout in failed} == {kind}
    assert (rows.train[0]["failed"], rows.train[0]["small_groups"], rows.train[0]["optimizer_steps"]) == (3, 1, 1)


@pytest.mark.slow
def test_all_kinds_of_bad_agents_in_one_run_with_policy_and_gateway_in_their_own_process(tmp_path: Path) -> None:
    kinds = {bad.__name__: bad for bad, _, _ in FAILURES if asyncio.iscoroutinefunction(bad)}

    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> Any:
        return await kinds.get(task, plays_well)(llm)

    rows = Rows()
    algorithm = policy_gradient(
        rows,
        backend=ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128),
        n_steps=2,
        tasks_per_step=len(kinds) + 3,
        timeout_seconds=2.0,
    )
    trainer = ly.Trainer(algorithm=algorithm, llm_proxy=ly.LLMProxy(launch_mode="engine"), run_dir=tmp_path / "run")
    summary = trainer.fit(agent, [*kinds, "good", "fine", "well"])
    assert {status: count for status, count in summary.rollouts.items() if count} == {
        "succeeded": 2 * 3 * 3,
        "failed": 2 * 3 * len(kinds),
    }
    assert sum(summary.failures.values()) == 2 * 3 * len(kinds)
    assert [row["optimizer_steps"] for row in rows.train] == [1, 1]


def test_a_step_in_which_everything_fails_ends_the_run_with_the_reasons_and_a_resumed_one_tries_again(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoTrainingData, match=r"6 x ValueError: no such luck.*`leyden show latest --failed`"):
        ly.Trainer(algorithm=policy_gradient(Rows()), run_dir=tmp_path / "run").fit(agent_of(raises), ["bad", "worse"])
    rows = Rows()
    trainer = ly.Trainer(algorithm=policy_gradient(rows), run_dir=tmp_path / "run")
    summary = trainer.fit(agent_of(raises), ["good", "good"], resume=True)
    assert rows.train[0]["failed"] == 0
    assert summary.rollouts["succeeded"] == 6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": 0.3}, "the agent sampled at temperature 0.3, the policy is trained at 1:"),
        ({"top_p": 0.5}, "the agent sampled with top_p 0.5, the policy is trained on its whole distribution:"),
        ({"n": 2}, "2 choices"),
    ],
    ids=["temperature", "top_p", "n"],
)
def test_calls_that_cannot_be_trained_on_are_told_and_never_pass_in_silence(
    tmp_path: Path, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        await ask(llm, **(options if task == "bad" else {}))
        return random.random()

    with pytest.raises(NoTrainingData) as ended:
        ly.Trainer(algorithm=policy_gradient(Rows()), store="memory").fit(agent, ["bad"])
    assert reason in str(ended.value)
    rows = Rows()
    ly.Trainer(algorithm=policy_gradient(rows), store="memory").fit(agent, ["bad", "good"])
    assert (rows.train[0]["refused_calls"], rows.train[0]["trained_tokens"] > 0) == (3, True)
    assert reason in caplog.text


@dataclass(frozen=True, slots=True)
class BestOnly(Advantages):
    """An estimator that Leyden does not have, as a user would add it."""

    worth: float = 1.0


@register_estimator("best_only", BestOnly)
def best_only(rollouts: Sequence[RolloutRewards], constants: BestOnly) -> AdvantageEstimate:
    best = max(rollout.reward for rollout in rollouts)
    return AdvantageEstimate([[constants.worth * (rollout.reward == best)] for rollout in rollouts])


@pytest.mark.parametrize(("advantages", "worth"), [("best_only", 1.0), (BestOnly(worth=2.0), 2.0)])
def test_an_estimator_is_its_constants_and_one_function(advantages: Advantages | str, worth: float) -> None:
    rows = Rows()
    algorithm = policy_gradient(rows, advantages=advantages, tasks_per_step=1)
    ly.Trainer(algorithm=algorithm, store="memory").fit(agent_of(plays_well), ["good"])
    # On the first minibatch every ratio is 1, so the loss is minus the mean advantage: one of three is the best.
    assert rows.train[0]["loss"] == pytest.approx(-worth / 3, abs=1e-3)


@dataclass(frozen=True, slots=True)
class Diverging(Advantages):
    """Its second step is too large for a number of 32 bits."""


_steps_of_diverging = itertools.count(1)


@register_estimator("diverging", Diverging)
def diverging(rollouts: Sequence[RolloutRewards], constants: Diverging) -> AdvantageEstimate:
    advantage = 1e39 if next(_steps_of_diverging) == 2 else 1.0
    return AdvantageEstimate([[advantage] for _ in rollouts])


def test_a_diverging_loss_ends_the_run_with_what_to_change_and_keeps_the_steps_before(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    options: dict[str, Any] = {"advantages": "diverging", "n_steps": 3, "tasks_per_step": 1, "on_collapse": "warn"}
    with pytest.raises(EngineError, match=r"sequences is .*lower the learning_rate or max_grad_norm"):
        ly.Trainer(algorithm=policy_gradient(Rows(), **options), run_dir=directory).fit(agent_of(plays_well), ["good"])
    rows = Rows()
    ly.Trainer(algorithm=policy_gradient(rows, **options), run_dir=directory).fit(
        agent_of(plays_well), ["good"], resume=True
    )
    assert [row["policy_version"] for row in rows.train] == [2, 3], "the first step is not done again"


# ---- agents that do unusual things, which is their right --------------------------------------------------------------------


async def asks_twice_at_once(llm: ly.LLM) -> float:
    await asyncio.gather(ask(llm), ask(llm))
    return random.random()


async def rewrites_history(llm: ly.LLM) -> float:
    await ask(llm)
    await ask(llm, "guess 0..5")
    return random.random()


async def streams(llm: ly.LLM) -> float:
    async for _ in await ask(llm, stream=True):
        pass
    return random.random()


async def leaves_a_task_that_calls_too_late(llm: ly.LLM) -> float:
    await ask(llm)

    async def late() -> None:
        await asyncio.sleep(0.1)
        with pytest.raises(openai.APIStatusError, match="410"):
            await ask(llm)
        refused.append(llm.endpoint)

    leftovers.add(asyncio.create_task(late()))
    return random.random()


async def leaves_a_call_under_way(llm: ly.LLM) -> float:
    await ask(llm)
    leftovers.add(asyncio.create_task(ask_in_vain(llm)))
    await asyncio.sleep(0.005)
    return random.random()


async def ask_in_vain(llm: ly.LLM) -> None:
    with contextlib.suppress(openai.APIStatusError):
        await ask(llm)


refused: list[str] = []
leftovers: set[asyncio.Task[Any]] = set()


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (asks_twice_at_once, 2),
        (rewrites_history, 2),
        (streams, 1),
        (leaves_a_task_that_calls_too_late, 1),
        (leaves_a_call_under_way, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unusual_agents_are_trained_on_with_all_of_their_calls(function: Agent, calls: int | None) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        return await function(llm)

    rows = Rows()
    refused.clear()
    calls_late = function is leaves_a_task_that_calls_too_late
    ly.Trainer(algorithm=policy_gradient(rows, n_steps=8 if calls_late else 2), store="memory").fit(agent, [1, 2])
    for row in rows.train:
        assert (row["failed"], row["refused_calls"], row["small_groups"], row["flat_groups"]) == (0, 0, 0, 0)
        assert calls is None or row["model_calls"] == 6 * calls
        assert row["logprob_difference"] < 1e-3
    if calls_late:
        assert len(refused) >= 6, "those of the first step had the time of all others"


@pytest.mark.parametrize("rewritten", [False, True])
def test_the_share_of_merged_turns_is_a_metric_and_a_low_one_is_explained_once(
    rewritten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        messages = [{"role": "user", "content": "guess 0..9"}]
        for _ in range(2):
            own = client().with_options(base_url=llm.endpoint)
            answer = await own.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=4, temperature=1.0
            )
            said = answer.choices[0].message.content or ""
            messages += [
                {"role": "assistant", "content": f"{said} (sure)" if rewritten else said},
                {"role": "user", "content": "higher"},
            ]
        return random.random()

    rows = Rows()
    ly.Trainer(algorithm=policy_gradient(rows, n_steps=2), store="memory").fit(agent, [1, 2])
    assert [row["model_calls"] for row in rows.train] == [12, 12]
    warnings = [record.message for record in caplog.records if "sequences of their own" in record.message]
    assert [row["merged_turns"] for row in rows.train] == ([0.0, 0.0] if rewritten else [1.0, 1.0])
    assert len(warnings) == rewritten
    assert all("history rewritten" in warning for warning in warnings)


def test_the_policy_is_the_same_model_for_sync_agents_in_threads() -> None:
    rows = Rows()
    ly.Trainer(algorithm=policy_gradient(rows), store="memory").fit(agent_of(blocks), ["good", "good"])
    assert (rows.train[0]["failed"], rows.train[0]["optimizer_steps"]) == (0, 1)


# ---- several agents in one rollout ------------------------------------------------------------------------------------------


class NotingBackend(ly.EmbeddedBackend):
    """Remembers which tokens were trained."""

    def __init__(self, **options: Any) -> None:
        super().__init__(WEIGHTS, device="cpu", max_length=128, **options)
        self.trained: list[tuple[tuple[int, ...], float]] = []
        """The tokens with a weight of one sequence, and the sign of their advantage."""

    async def forward_backward(self, sequences: Any, loss: Any, *, temperature: float = 1.0) -> Any:
        for sequence in sequences:
            tokens = [(token, a) for token, w, a in self._rows(sequence) if w]
            self.trained.append((tuple(token for token, _ in tokens), tokens[0][1] > 0))
        return await super().forward_backward(sequences, loss, temperature=temperature)

    @staticmethod
    def _rows(sequence: Any) -> Any:
        return zip(sequence.token_ids, sequence.weights, sequence.columns["advantages"], strict=True)


@ly.llm_rollout
async def planner_and_writer(task: int, llm: ly.LLM) -> float:
    with ly.operation(name="plan", attributes={"gen_ai.agent.name": "planner"}):
        plan = await ask(llm, temperature=0.7)  # at a temperature that could not be trained on
    with ly.operation(name="write", attributes={"gen_ai.agent.name": "writer"}):
        answer = await ask(llm, f"guess {plan.choices[0].message.content}")
    return float(len(answer.choices[0].message.content or "") + random.random())


async def test_only_the_calls_of_the_chosen_agent_are_trained() -> None:
    rows, backend = Rows(), NotingBackend()
    algorithm = policy_gradient(rows, backend=backend, agent_match="^writer$")
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(planner_and_writer, [1, 2])
        rewards, written = dict[str, float](), dict[str, tuple[int, ...]]()
        for rollout in await store.query_rollouts():
            spans = await store.query_spans(rollout.rollout_id)
            calls = [span.tokens for span in spans if span.name == "leyden.model_call"]
            assert len(calls) == 2
            assert calls[1] is not None
            written[rollout.rollout_id] = tuple(calls[1].response_ids)
            rewards[rollout.rollout_id] = find_final_reward(spans) or 0.0
    assert (rows.train[0]["failed"], rows.train[0]["refused_calls"], rows.train[0]["model_calls"]) == (0, 0, 12)
    assert Counter(tokens for tokens, _ in backend.trained) == Counter(written.values())
    assert rows.train[0]["trained_tokens"] == sum(map(len, written.values()))
    assert rows.train[0]["reward"] == pytest.approx(sum(rewards.values()) / 6)
    assert {better for _, better in backend.trained} == {True, False}, "rewards are compared"


async def test_another_agents_model_that_the_gateway_serves_is_asked_and_not_trained() -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        with ly.operation(name="plan", attributes={"gen_ai.agent.name": "planner"}):
            plan = await ask(llm, model="planner")
        with ly.operation(name="write", attributes={"gen_ai.agent.name": "writer"}):
            await ask(llm, f"guess {plan.choices[0].message.content}")
        return random.random()

    rows, backend = Rows(), NotingBackend()
    algorithm = policy_gradient(rows, backend=backend, agent_match="^writer$")
    async with FakeUpstream(model="planner", reply=lambda body: "0..9") as planner:
        gateway = ly.LLMProxy(model_list=[planner.llm()])
        await ly.Trainer(algorithm=algorithm, llm_proxy=gateway, store="memory").afit(agent, [1, 2])
    assert len(planner.calls) == rows.train[0]["rollouts"] == len(backend.trained) == 6
    assert (rows.train[0]["failed"], rows.train[0]["refused_calls"]) == (0, 0)


def test_an_agent_that_made_no_call_is_named() -> None:
    algorithm = policy_gradient(Rows(), agent_match="critic")
    with pytest.raises(NoTrainingData, match="6 x agent_match='critic' finds no agent's call"):
        ly.Trainer(algorithm=algorithm, store="memory").fit(planner_and_writer, [1, 2])


# ---- wrong uses, and things that break --------------------------------------------------------------------------------------


def test_an_adapter_that_gives_something_else_is_named() -> None:
    with pytest.raises(ConfigError, match="adapter=TraceToTrajectory gave a Trajectory"):
        ly.Trainer(algorithm=policy_gradient(Rows()), adapter="trajectory", store="memory").fit(
            agent_of(raises), ["good"]
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts_per_task": 1}, "rollouts_per_task is 1"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"minibatch_size": 0}, "minibatch_size is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tasks_per_step": 0}, "tasks_per_step is 0"),
        ({"n_steps": 0}, "n_steps is 0"),
        ({"val_every_n_steps": 0}, "val_every_n_steps is 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0.0"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"resource_name": ""}, "resource_name is ''"),
        ({"final_fraction": 0.5}, "final_fraction is 0.5, and schedule='constant' has no use for it"),
        ({"optim": ly.OptimParams(learning_rate=0)}, "learning_rate of optim is 0, so that nothing would be learned"),
        ({"critic_optim": ly.OptimParams()}, "critic_optim is .*, and there is no critic of its own to optimise"),
        ({"best_mode": "min"}, "mode is 'min', and no metric is monitored"),
        ({"agent_match": "("}, r"agent_match is '\(', which is no regular expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_with_their_name_and_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy_gradient(Rows(), **options)


def test_data_that_are_missing_or_no_data_are_refused(tmp_path: Path) -> None:
    agent = agent_of(raises)
    for data in (None, []):
        with pytest.raises(ConfigError, match="train_dataset"):
            ly.Trainer(algorithm=policy_gradient(Rows()), store="memory").fit(agent, data)
    with pytest.raises(ConfigError, match="train_dataset is a generator"):
        ly.Trainer(algorithm=policy_gradient(Rows()), store="memory").fit(agent, (task for task in "ab"))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("launch_mode", ["thread", "engine"])
def test_a_policy_process_that_is_killed_ends_the_run_with_how_it_died_and_what_was_lost_is_sampled_again(
    tmp_path: Path, launch_mode: Any
) -> None:
    backend = ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128)
    killed: list[int] = []

    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        await ask(llm)
        if not killed:  # the first one has its answer, the others will have none
            threads = {thread.name for thread in threading.enumerate()}
            assert ("leyden-gateway" in threads) == (launch_mode == "thread")
            children = psutil.Process().children()
            killed.extend(child.pid for child in children if "leyden.engine.serve" in child.cmdline())
            os.kill(killed[0], signal.SIGKILL)
        return random.random()

    started = time.monotonic()
    directory = tmp_path / "run"
    algorithm = policy_gradient(Rows(), backend=backend)
    proxy = ly.LLMProxy(launch_mode=launch_mode)
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        ly.Trainer(algorithm=algorithm, llm_proxy=proxy, run_dir=directory, concurrency=1).fit(agent, ["a", "b"])
    assert time.monotonic() - started < 30
    rollouts = asyncio.run(stored(directory))
    # the killed gateway takes the record of the first one's call along, so that this rollout is sampled again, too
    finished = {"succeeded": 1} if launch_mode == "thread" else {}
    assert Counter(rollout.status for rollout in rollouts) == {**finished, "requeuing": 1}
    assert all(rollout.attempt.interrupted for rollout in rollouts if rollout.status == "requeuing")
    rows = Rows()
    ly.Trainer(algorithm=policy_gradient(rows), run_dir=directory).fit(agent, ["a", "b"], resume=True)
    assert (rows.train[0]["rollouts"], rows.train[0]["failed"]) == (6, 0)
    assert Counter(rollout.status for rollout in asyncio.run(stored(directory))) == {"succeeded": 6}


@pytest.mark.slow
@pytest.mark.merge
def test_an_algorithm_that_starts_its_engine_by_itself_has_its_gateway_in_this_process(tmp_path: Path) -> None:
    class StartsIt(ly.GRPO):
        async def _start_backend(self, proxy: ly.LLMProxy) -> None:
            await self.backend.start()

    seen: set[str] = set()

    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        seen.update(thread.name for thread in threading.enumerate())
        return await plays_well(llm)

    backend = ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128)
    algorithm = StartsIt(backend, n_steps=1, tasks_per_step=1, rollouts_per_task=2)
    proxy = ly.LLMProxy(launch_mode="engine")
    summary = ly.Trainer(algorithm=algorithm, llm_proxy=proxy, run_dir=tmp_path / "run").fit(agent, ["a"])
    assert summary.rollouts["succeeded"] == 2
    assert "leyden-gateway" in seen


# ---- a run that cannot learn ------------------------------------------------------------------------------------------------


@ly.llm_rollout
async def never_rewarded(task: str, llm: ly.LLM) -> float:
    await ask(llm, **llm.sampling_parameters)
    return 0.0


async def test_a_reward_that_is_always_the_same_is_one_warning_with_an_example(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = policy_gradient(Rows(), n_steps=4)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(never_rewarded, ["good", "bad"])
        rollouts = await store.query_rollouts(mode_in=["train"])
    (warning,) = [record.message for record in caplog.records if "nothing to learn" in record.message]
    assert warning.startswith("steps 1 to 3: nothing to learn, because in each of the 2 groups all rewards are equal")
    assert re.search(r"Example: task '?(good|bad)'?, answer '.*', reward 0$", warning)
    groups = Counter((rollout.metadata["step"], rollout.input, rollout.group_id) for rollout in rollouts)
    assert set(groups.values()) == {3}, "the rollouts of one task in one step are a group"
    assert len({group for _, _, group in groups}) == len(groups) == 8


# ---- learning ---------------------------------------------------------------------------------------------------------------


def test_a_policy_learns_a_toy_problem_whose_best_answer_is_known() -> None:
    """The reward is 1 for "4" and 0 for all else: the best policy always says 4, the given one does so in one game of four."""

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        answer = await ask(llm, **llm.sampling_parameters)
        return float((answer.choices[0].message.content or "").strip() == "4")

    rows = Rows()
    algorithm = policy_gradient(
        rows,
        n_steps=10,
        tasks_per_step=2,
        rollouts_per_task=32,
        minibatch_size=16,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3),
        warmup_steps=1,
        seed=3,
    )
    ly.Trainer(algorithm=algorithm, store="memory", concurrency=64).fit(agent, [0])
    assert rows.train[0]["reward"] < 0.5
    assert sum(row["reward"] for row in rows.train[-3:]) / 3 > 0.9


async def test_validation_measures_without_training() -> None:
    rows = Rows()
    algorithm = policy_gradient(rows, n_steps=2, val_every_n_steps=1, validate_first=True)
    async with InMemoryLightningStore() as store:
        await ly.Trainer(algorithm=algorithm, store=store).afit(agent_of(raises), ["good"], val_dataset=["good"] * 5)
        rollouts = await store.query_rollouts(mode_in=["val"])
        assert {failure_reason(rollout) for rollout in rollouts if rollout.status != "succeeded"} == set()
    assert [row["rollouts"] for row in rows.val] == [5, 5, 5]
    assert algorithm.rollouts_per_task == 3


def test_a_validation_set_without_an_interval_is_run_once_after_the_last_step() -> None:
    for given, every, expected in ((["good"] * 5, None, [5]), (["good"], 3, [1]), ([], None, []), (None, None, [])):
        rows = Rows()
        algorithm = policy_gradient(rows, n_steps=2, val_every_n_steps=every)
        ly.Trainer(algorithm=algorithm, store="memory").fit(agent_of(raises), ["good"], val_dataset=given)
        assert [row["rollouts"] for row in rows.val] == expected
        assert len(rows.train) == 2


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"val_every_n_steps": 1}, "val_every_n_steps is 1"), ({"validate_first": True}, "validate_")],
)
@pytest.mark.parametrize("data", [None, []])
def test_validations_without_tasks_are_said_not_to_be_done(
    options: dict[str, Any], asked: str, data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ly.Trainer(algorithm=policy_gradient(Rows(), **options), store="memory").fit(agent_of(raises), ["good"], data)
    (warned,) = [message for message in caplog.messages if "nothing is validated" in message]
    assert asked in warned


def test_one_validation_at_the_end_is_nothing_to_stop_early_by_or_to_choose_the_best_by(tmp_path: Path) -> None:
    asking: dict[str, dict[str, Any]] = {"stop": {"callbacks": [EarlyStopping()]}, "best": {"keep_best": "val/reward"}}
    for name, options in asking.items():
        algorithm = policy_gradient(Rows(), n_steps=2, **options)
        with pytest.raises(ConfigError, match=r"no interval of validations; set .*val_every_n_steps"):
            ly.Trainer(algorithm=algorithm, run_dir=tmp_path / name).fit(agent_of(raises), ["good"], ["good"])


def test_two_deterministic_runs_with_one_seed_measure_and_end_the_same(tmp_path: Path) -> None:
    """Every run has an id of its own, and nothing that is sampled depends on it."""

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        texts = [(await ask(llm, seed=None)).choices[0].message.content or "" for _ in range(2)]
        return float(sum(map(ord, "".join(texts))) % 7)

    ended: list[tuple[bytes, list[float]]] = []
    for name in ("first", "second"):
        rows = Rows()
        algorithm = policy_gradient(
            rows,
            backend=ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, deterministic=True),
            validate_first=True,
            val_every_n_steps=1,
        )
        trainer = ly.Trainer(algorithm=algorithm, run_dir=tmp_path / name, llm_proxy=ly.LLMProxy(deterministic_seed=5))
        trainer.fit(agent, [1, 2], val_dataset=[3, 4, 5])
        weights = (tmp_path / name / "model" / "model.safetensors").read_bytes()
        ended.append((weights, [row["reward"] for row in (*rows.val, *rows.train)]))
    assert ended[0][1] == ended[1][1]
    assert ended[0][0] == ended[1][0], "the weights differ"


class LogsItsOwn(Callback):
    """Logs a number in each hook, in one way or the other."""

    def on_train_start(self, loop: TrainLoop, vessel: Any) -> None:
        loop.metrics["before"] = 1

    def on_train_end(self, loop: TrainLoop, vessel: Any) -> None:
        loop.metrics["mine"] = torch.tensor(42.0)

    def on_validate_end(self, loop: TrainLoop, vessel: Any) -> None:
        loop.log("gap", 0.5)

    def on_iter_end(self, loop: TrainLoop, vessel: Any) -> None:
        loop.log("late", loop.current_iter)


def test_numbers_of_agents_and_callbacks_are_in_the_folder_the_store_and_the_loggers(tmp_path: Path) -> None:
    @ly.llm_rollout
    async def agent(task: str, llm: ly.LLM) -> None:
        text = (await ask(llm)).choices[0].message.content or ""
        ly.emit_annotation({"length": 3.0})
        ly.emit_reward({"right": float(text == "4"), "short": 0.25}, primary_key="right")

    rows = Rows()
    trainer = ly.Trainer(
        algorithm=policy_gradient(rows, n_steps=2, val_every_n_steps=1),
        callbacks=[LogsItsOwn()],
        loggers=CsvWriter(tmp_path / "metrics.csv"),
        run_dir=tmp_path / "run",
        store=str(tmp_path / "leyden.db"),
    )
    trainer.fit(agent, ["x", "y"], val_dataset=["z"])
    with (tmp_path / "metrics.csv").open() as file:
        written = list(csv.DictReader(file))
    for source in (tmp_path / "run", tmp_path / "leyden.db"):
        train, val = open_run(source).metrics("train"), open_run(source).metrics("val")
        wanted = {"reward/short": 0.25, "annotation/length": 3, "before": 1, "mine": 42}
        assert [row.metrics | wanted | {"late": row.iteration} for row in train] == [row.metrics for row in train]
        assert [row.metrics["gap"] for row in val] == [0.5, 0.5]
        assert [row.metrics["annotation/length"] for row in val] == [3, 3]
        assert "reward/right" not in train[0].metrics
    assert [float(row["mine"]) for row in written if row["mine"]] == [42, 42]


def test_the_tokens_of_title_calls_have_a_gradient_of_exactly_zero(tmp_path: Path) -> None:
    """The policy after a step is the same to the last bit, whether the agent asks for titles or not."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + (WEIGHTS / "chat_template.jinja").read_text()
    )
    tool: Any = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}

    def learned(name: str, title: str | None, roles: Sequence[str] | None = None) -> tuple[bytes, dict[str, Any]]:
        @ly.llm_rollout
        async def agent(task: int, llm: ly.LLM) -> float:
            text = (await ask(llm, tools=[tool], seed=None)).choices[0].message.content or ""
            if title is not None:
                messages = [{"role": "system", "content": title}, {"role": "user", "content": "guess 0..9"}]
                titles = client().with_options(base_url=llm.endpoint).chat.completions
                await titles.create(model=llm.model, max_tokens=4, temperature=1.0, messages=messages)
            return float(sum(map(ord, text)) % 7)

        rows = Rows()
        algorithm = ly.GRPO(
            ly.EmbeddedBackend(
                WEIGHTS,
                device="cpu",
                max_length=256,
                deterministic=True,
                chat_template=str(template),
                tool_parser="hermes",
            ),
            writers=[rows],
            n_steps=1,
            tasks_per_step=2,
            rollouts_per_task=3,
            max_tokens=4,
        )
        trainer = ly.Trainer(
            algorithm=algorithm,
            adapter=ly.TraceToTriplet(roles=roles),
            run_dir=tmp_path / name,
            llm_proxy=ly.LLMProxy(deterministic_seed=5),
            concurrency=1,
        )
        trainer.fit(agent, [1, 2])
        return (tmp_path / name / "model" / "model.safetensors").read_bytes(), rows.train[0]

    alone, row = learned("alone", None)
    assert row["grad_norm"] > 0 and "auxiliary_calls" not in row
    titled, row = learned("titled", "Write a title for this conversation.")
    assert row["auxiliary_calls"] == 6 and row["auxiliary_tokens"] >= 6
    assert titled == alone
    trained, row = learned("trained", "Write a title for this conversation.", ["agent", "auxiliary"])
    assert row["model_calls"] == 12 and trained != alone
