"""`APO` finds a known optimum, spends what it may and no more, and survives reflection models of every kind."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm.prompts import PromptResult, best_label, read_best, read_history
from leyden.errors import ConfigError, ReflectionFailed
from leyden.gateway import UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from tests.algorithm.apo import rules

openai = pytest.importorskip("openai")

SMALL: dict[str, Any] = {
    "gradient_batch_size": 3,
    "val_batch_size": 15,
    "beam_width": 2,
    "branch_factor": 1,
    "beam_rounds": 1,
}


def proxy(upstream: FakeUpstream) -> ly.LLMProxy:
    return ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}])


async def optimise(
    apo: ly.APO,
    upstream: FakeUpstream | None,
    *,
    agent: Any = rules.quick,
    store: Any = "memory",
    prompts: dict[str, str] | None = None,
    train: Any = rules.TRAIN,
    val: Any = rules.VAL,
    **options: Any,
) -> tuple[PromptResult, Any]:
    """Run APO, with the upstream behind a gateway if there is one; return its result and the summary."""
    prompts = {"prompt": rules.SEED} if prompts is None else prompts
    trainer = ly.Trainer(
        algorithm=apo,
        llm_proxy=None if upstream is None else proxy(upstream),
        initial_resources={name: ly.PromptTemplate(template=text) for name, text in prompts.items()},
        store=store,
        progress=False,
        **options,
    )
    summary = await trainer.afit(agent, train, val)
    return summary.result, summary


class Row(ly.Callback):
    """Keeps the metrics of the newest round."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def on_train_end(self, loop: ly.TrainLoop, vessel: Any) -> None:
        self.metrics = dict(loop.metrics)


async def requested(store: ly.LightningStore, run_id: str) -> list[ly.Rollout]:
    """The rollouts that a run has paid for; the store is the trainer's, in memory."""
    return list(await store.query_rollouts(run_id=run_id))


# ---- the optimum ---------------------------------------------------------------------------------------------------------


async def test_the_optimum_is_found_within_the_stated_number_of_rollouts() -> None:
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        result, summary = await optimise(ly.APO(**rules.OPTIONS), upstream, agent=rules.support, store=store)
        assert rules.optimum(result.prompts["prompt"])
        assert result.reward == 1.0
        rollouts = await requested(store, summary.run_id)
        options = rules.OPTIONS
        runs = options["beam_width"] * options["branch_factor"] * options["gradient_batch_size"]
        whole = 2 * len(rules.VAL) - options["val_batch_size"] + 2 * options["gradient_batch_size"]
        assert len(rollouts) <= whole + options["beam_rounds"] * (runs + options["val_batch_size"])
        measured = [(rollout.resources_id, rollout.input["topic"], rollout.input["number"]) for rollout in rollouts]
        assert len(set(measured)) == len(measured), "a prompt ran a task twice"
        assert result.against_first is not None and result.against_first.is_sure
        assert list(summary.val_reward.values) == sorted(summary.val_reward.values)


async def test_a_round_in_stages_keeps_to_its_number_of_rollouts_and_repeats() -> None:
    options = {**rules.OPTIONS, "critic_runs": 1, "candidates_per_stage": 2, "stages_per_round": 3, "beam_rounds": 5}
    found: list[Any] = []
    async with FakeUpstream(reply=rules.reply) as upstream:
        for _ in range(2):
            async with InMemoryLightningStore() as store:
                result, summary = await optimise(ly.APO(**options), upstream, store=store)
                rollouts = await requested(store, summary.run_id)
            found.append((result.prompts, len(rollouts), result.expected_reward))
    assert found[0] == found[1]
    prompts, n_rollouts, expected = found[0]
    assert rules.optimum(prompts["prompt"])
    assert n_rollouts <= 15 + 2 * 4 + 5 * (3 * 2 * 4 + 15)
    assert 0.9 < expected <= 1.0


async def test_a_client_of_the_users_own_is_asked_without_a_gateway() -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        async with openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="key") as client:
            models = {"gradient_model": "fake", "apply_edit_model": "fake"}
            result, _ = await optimise(ly.APO(client, **models, diversity_temperature=0.5, **SMALL), None)
        assert {request["temperature"] for request in upstream.requests} == {0.5}
        assert {request["model"] for request in upstream.requests} == {"fake"}
    assert result.reward is not None and result.reward > 0


def test_the_options_are_those_of_the_paper_and_of_agent_lightning() -> None:
    defaults = {name: each.default for name, each in inspect.signature(ly.APO).parameters.items()}
    wanted = {
        "diversity_temperature": 1.0,
        "gradient_batch_size": 4,
        "val_batch_size": 16,
        "beam_width": 4,
        "branch_factor": 4,
        "beam_rounds": 3,
        "rollout_batch_timeout": 3600.0,
        "run_initial_validation": True,
    }
    assert {name: defaults[name] for name in wanted} == wanted
    assert next(iter(defaults)) == "async_openai_client"
    with pytest.raises(ConfigError, match="beam_width is 0; it must be a whole number, at least 1"):
        ly.APO(beam_width=0)
    with pytest.raises(ConfigError, match="did you mean 'beam_width'"):
        ly.APO(beam_widht=1)


async def test_two_runs_with_one_seed_are_the_same_and_the_second_pays_nothing() -> None:
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        found: list[tuple[str, int]] = []
        for _ in range(2):
            result, summary = await optimise(ly.APO(**{**SMALL, "beam_rounds": 2}), upstream, store=store)
            found.append((result.prompts["prompt"].template, len(await requested(store, summary.run_id))))
    assert found[0][0] == found[1][0]
    assert (found[0][1] > 0, found[1][1]) == (True, 0)


async def test_scores_of_another_model_behind_the_same_name_are_not_reused_unless_a_version_is_given() -> None:
    for version, is_paid in ((None, True), ("v1", False)):
        async with InMemoryLightningStore() as store:
            for number in range(2):
                async with FakeUpstream(reply=rules.reply) as upstream:
                    apo = ly.APO(**SMALL, agent_version=version)
                    _, summary = await optimise(apo, upstream, store=store)
                assert bool(await requested(store, summary.run_id)) == (is_paid or number == 0)


async def test_prompts_are_improved_in_turn_or_one_alone() -> None:
    @ly.rollout
    async def both(task: dict[str, Any], resources: ly.NamedResources) -> float:
        texts = " ".join(each.template for each in resources.values() if isinstance(each, ly.PromptTemplate))
        ly.emit_message(f"I do not know about {task['topic']}.")
        return float(rules.RULES[task["topic"]] in texts)

    prompts = {"system": "You help.", "user": rules.SEED}
    for resource_name, changed in ((None, {"system", "user"}), ("user", {"user"})):
        async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
            apo = ly.APO(**{**SMALL, "beam_rounds": 2}, resource_name=resource_name)
            _, summary = await optimise(apo, upstream, agent=both, prompts=prompts, store=store)
            history = await read_history(store, summary.run_id)
            edited = [name for record in history for name in (record.edited or "").split(", ") if name]
            assert {*edited} == changed


# ---- what is kept --------------------------------------------------------------------------------------------------------


async def test_the_best_prompt_is_labelled_with_its_lineage_reasons_and_scores(tmp_path: Path) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        apo = ly.APO(**{**SMALL, "beam_rounds": 4, "gradient_batch_size": 5})
        result, summary = await optimise(apo, upstream, store=None, run_dir=tmp_path / "run")
    again = ly.APO()
    with pytest.raises(ConfigError, match="APO has no best prompt yet"):
        again.get_best_prompt()
    assert again.get_best_prompt(tmp_path / "run") == apo.get_best_prompt() == result.prompts["prompt"]
    with pytest.raises(ConfigError, match="resource_name is 'promt'; did you mean 'prompt'"):
        apo.get_best_prompt(resource_name="promt")
    async with ly.open_store(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        best = await read_best(store, summary.run_id)
        assert (best.resources_id, best.version, best.author) == (
            result.resources_id,
            result.version,
            summary.run_id,
        )
        history = {record.resources_id: record for record in await read_history(store, summary.run_id)}
        record, lineage = history[best.resources_id], list[float]()
        while True:
            lineage.append(record.reward)
            if record.parent is None:
                break
            assert record.reason.startswith("RULE: ")
            parent = await store.get_resources_by_id(record.parent[0], version=record.parent[1])
            record = history[parent.resources_id]
        assert lineage == sorted(lineage, reverse=True)
        assert len(lineage) >= 3
        assert [label.label for label in await store.get_labels()] == [best_label(summary.run_id)]
        own = await store.query_rollouts(group_id=f"{summary.run_id}/algorithm")
        assert sum(summary.rollouts.values()) == len(await requested(store, summary.run_id)), "its own calls are none"
        purposes = [rollout.input["purpose"] for rollout in own]
        assert purposes.count("selection") == 1 + 4, "the first prompts, and each round"
        assert 0 < purposes.count("critique") <= purposes.count("edit")
        calls = [rollout for rollout in own if rollout.input["purpose"] == "edit"]
        assert all(isinstance(each, ly.AttemptedRollout) and each.attempt.response_tokens > 0 for each in calls)


async def test_a_test_set_is_used_once_and_at_the_end() -> None:
    tests = [{"topic": topic, "number": 99} for topic in rules.TOPICS]
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        result, summary = await optimise(ly.APO(**SMALL, test_dataset=tests), upstream, store=store)
        rollouts = await requested(store, summary.run_id)
    assert sum(rollout.mode == "test" for rollout in rollouts) == 2 * len(tests)
    assert max(rollout.start_time for rollout in rollouts if rollout.mode != "test") <= min(
        rollout.start_time for rollout in rollouts if rollout.mode == "test"
    )
    assert (result.test_reward, result.test is not None) == (pytest.approx(0.2), True)
    assert "1 better, 0 worse of 5 tasks; not sure" in repr(result)


async def test_a_run_without_a_first_validation_records_its_rounds() -> None:
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        apo = ly.APO(**SMALL, run_initial_validation=False)
        _, summary = await optimise(apo, upstream, store=store)
        assert {record.round for record in await read_history(store, summary.run_id)} == {0, 1}


async def test_hung_and_failed_rollouts_count_as_zero() -> None:
    @ly.rollout
    async def fragile(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        ly.emit_message(f"I do not know about {task['topic']}.")
        if prompt_template.template != rules.SEED:
            if task["number"] % 2:
                await asyncio.sleep(60)
            raise ValueError("the new prompt is too much for me")
        return 0.5

    async with FakeUpstream(reply=rules.reply) as upstream:
        apo = ly.APO(**SMALL, rollout_batch_timeout=1.0)
        result, _ = await optimise(apo, upstream, agent=fragile, callbacks=[row := Row()])
    assert result.prompts["prompt"].template == rules.SEED
    assert row.metrics["failed"] in (3, 6), "each new prompt that ran, on all tasks"


# ---- budgets -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollouts", [49, 75, 130])
async def test_rollouts_never_exceed_the_budget(rollouts: int, caplog: pytest.LogCaptureFixture) -> None:
    val = [*rules.VAL, *rules.TRAIN[:5]]
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        apo = ly.APO(**{**SMALL, "beam_rounds": 9, "val_batch_size": 10}, budget=ly.Budget(rollouts=rollouts))
        result, summary = await optimise(apo, upstream, val=val, store=store, callbacks=[row := Row()])
        spent = len(await requested(store, summary.run_id))
    assert len(val) < spent <= rollouts
    assert result.reward is not None and result.reward > 0
    assert "the budget has no room for another prompt" in caplog.text
    measured_at_the_end = row.metrics["budget_rollouts_left"] - (rollouts - spent)
    assert measured_at_the_end in (0, len(val) - 10), "the best prompt, unless it is the first one"


async def test_a_budget_that_pays_for_no_prompt_is_refused() -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        with pytest.raises(ConfigError, match="measuring the first prompts and one new one takes up to 39"):
            await optimise(ly.APO(**SMALL, budget=ly.Budget(rollouts=38)), upstream)


async def test_tokens_and_cost_of_rollouts_and_of_the_critics_calls_never_exceed_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits: dict[str, Any] = {
        "tokens": 14_000,
        "tokens_per_attempt": 2_500,
        "cost": 0.1,
        "cost_per_attempt": 0.0025,
    }
    async with FakeUpstream(reply=rules.reply) as upstream, InMemoryLightningStore() as store:
        trainer = ly.Trainer(
            algorithm=ly.APO(**{**SMALL, "beam_rounds": 9}, budget=ly.Budget(**limits)),
            llm_proxy=ly.LLMProxy(
                model_list=[UpstreamModel("fake", upstream.endpoint, price_per_million=(1.0, 1.0))], store=store
            ),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            store=store,
            progress=False,
            callbacks=[row := Row()],
        )
        summary = await trainer.afit(rules.support, rules.TRAIN, rules.VAL)
        groups = [
            await store.query_rollouts(run_id=summary.run_id),
            await store.query_rollouts(group_id=f"{summary.run_id}/algorithm"),
        ]
        attempts = [[each.attempt for each in group if isinstance(each, ly.AttemptedRollout)] for group in groups]
    tokens = [sum(each.prompt_tokens + each.response_tokens for each in group) for group in attempts]
    cost = [sum(each.cost or 0.0 for each in group) for group in attempts]
    assert all(tokens)
    assert sum(tokens) <= limits["tokens"]
    assert "cannot be kept exactly" not in caplog.text
    assert "the run ends after round" in caplog.text
    assert row.metrics["budget_tokens_left"] == limits["tokens"] - sum(tokens)
    assert row.metrics["budget_cost_left"] == pytest.approx(limits["cost"] - sum(cost))
    assert summary.result.reward is not None


async def test_a_budget_of_time_ends_the_run_with_its_best_prompt(caplog: pytest.LogCaptureFixture) -> None:
    @ly.rollout
    async def slow(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        await asyncio.sleep(0.01 if prompt_template.template == rules.SEED else 60)
        ly.emit_message(f"I do not know about {task['topic']}.")
        return 0.25

    async with FakeUpstream(reply=rules.reply) as upstream:
        apo = ly.APO(**{**SMALL, "beam_rounds": 9}, budget=ly.Budget(seconds=3))
        result, _ = await optimise(apo, upstream, agent=slow, callbacks=[row := Row()])
    assert (result.reward, result.prompts["prompt"].template) == (0.25, rules.SEED)
    assert "the run ends after round 1 with its best prompt: the time of the budget is over" in caplog.text
    assert row.metrics["budget_seconds_left"] == 0


@pytest.mark.parametrize("has_client", [True, False])
async def test_a_reflection_model_that_is_silent_ends_with_the_time_of_the_budget(
    has_client: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        return Misbehaviour(delay_seconds=60) if "<prompt>" in str(body["messages"][0]["content"]) else None

    async with FakeUpstream(reply=rules.reply, fault=fault) as upstream:
        client = openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="none") if has_client else None
        apo = ly.APO(client, **SMALL, budget=ly.Budget(seconds=2))
        async with asyncio.timeout(20):
            result, _ = await optimise(apo, None if has_client else upstream)
    assert result.prompts["prompt"].template == rules.SEED
    assert result.reward == 0.0
    assert "the run ends after round 1 with its best prompt" in caplog.text


async def test_a_slow_reflection_model_is_waited_for() -> None:
    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        return Misbehaviour(delay_seconds=1.5) if "<prompt>" in str(body["messages"][0]["content"]) else None

    async with FakeUpstream(reply=rules.reply, fault=fault) as upstream:
        result, _ = await optimise(ly.APO(**SMALL, budget=ly.Budget(seconds=60)), upstream)
    assert result.reward is not None and result.reward > 0


async def test_a_measurement_that_the_budget_has_cut_off_is_missing_and_made_after_a_resume_with_more_time(
    tmp_path: Path,
) -> None:
    has_time = False

    @ly.rollout
    async def slow(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        await asyncio.sleep(60 if task["number"] > 11 and not has_time else 0.01)
        ly.emit_message(f"I do not know about {task['topic']}.")
        return 0.5

    async with FakeUpstream(reply=rules.reply) as upstream:

        async def run(seconds: float, rounds: int, *, resume: bool) -> PromptResult:
            trainer = ly.Trainer(
                algorithm=ly.APO(**{**SMALL, "beam_rounds": rounds}, budget=ly.Budget(seconds=seconds)),
                llm_proxy=proxy(upstream),
                initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                run_dir=tmp_path / "run",
                callbacks=[row],
                progress=False,
            )
            return (await trainer.afit(slow, rules.TRAIN, rules.VAL, resume=resume)).result

        row = Row()
        cut = await run(2, 2, resume=False)
        assert (cut.reward, cut.prompts["prompt"].template, row.metrics["failed"]) == (None, rules.SEED, 0)
        has_time = True
        whole = await run(600, 2, resume=True)
    assert (whole.reward, row.metrics["failed"]) == (0.5, 0)


async def test_a_resumed_run_with_too_few_rollouts_says_that_it_has_too_few(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        for rounds, rollouts, val in ((2, 200, rules.VAL[:5]), (3, 39, rules.VAL)):
            trainer = ly.Trainer(
                algorithm=ly.APO(**{**SMALL, "beam_rounds": rounds}, budget=ly.Budget(rollouts=rollouts)),
                llm_proxy=proxy(upstream),
                initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                run_dir=tmp_path / "run",
                progress=False,
            )
            await trainer.afit(rules.quick, rules.TRAIN, val, resume=rounds == 3)
    assert "the run ends after round 3 with its best prompt: the budget has no room for another prompt" in caplog.text


# ---- reflection models ---------------------------------------------------------------------------------------------------


def edits(answer: str | Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], Any]:
    """Return a model that criticises as `rules.reply` does, and rewrites like this."""

    def reply(body: dict[str, Any]) -> Any:
        if "<new_prompt>" in body["messages"][0]["content"]:
            return answer if isinstance(answer, str) else answer(body)
        return rules.reply(body)

    return reply


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("bananas", "it does not have the new prompt between <new_prompt> and </new_prompt>"),
        ("", "it is empty"),
        ("<new_prompt>  </new_prompt>", "it is empty"),
        (f"<new_prompt>{rules.SEED}</new_prompt>", "it is the current prompt without any change"),
        ("<new_prompt>Be kind.</new_prompt>", "it lacks the placeholder {ticket}"),
        ("<new_prompt>{ticket.__class__}</new_prompt>", "it lacks the placeholder {ticket}"),
        ("<think>Okay, {ticket} must stay. Maybe I should", "has no end"),
        ("<new_prompt>{ticket", "it seems to be cut off"),
        ("<new_prompt>{ticket} " + "x" * 300 + "</new_prompt>", "it has 309 characters, and at most 300 are possible"),
    ],
)
async def test_an_answer_that_cannot_be_used_costs_no_rollout_and_is_said_once(
    answer: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(reply=edits(answer)) as upstream, InMemoryLightningStore() as store:
        apo = ly.APO(**SMALL, max_prompt_characters=300)
        result, summary = await optimise(apo, upstream, store=store)
        rollouts = await requested(store, summary.run_id)
        asked = [request["messages"] for request in upstream.requests if "<new_prompt>" in str(request["messages"][0])]
    assert result.prompts["prompt"].template == rules.SEED
    assert len(rollouts) == len(rules.VAL) + 2 * 3 + 1, "critics have read two of the three tasks of the round"
    assert sorted(len(messages) for messages in asked) == [1, 1, 3, 3]
    again = next(messages for messages in asked if len(messages) == 3)
    assert why in again[2]["content"]
    assert (
        "round 1: the reflection models wrote no prompt that can be used, in 2 branches; the last reason:"
        in caplog.text
    )
    assert why in caplog.text


async def test_a_failure_in_one_branch_ends_the_measurements_beside_it() -> None:
    under_way: set[str] = set()
    left: list[set[str]] = []

    class Broken(ly.APO):
        async def compute_textual_gradient(self, *_: Any, **__: Any) -> str | None:
            raise ValueError("as it was told")

        async def evaluate_prompt_on_batch(self, prompt: Any, tasks: Any, mode: Any = "val", **options: Any) -> Any:
            under_way.add(mode)
            try:
                return await super().evaluate_prompt_on_batch(prompt, tasks, mode, **options)
            finally:
                under_way.discard(mode)

        async def step(self, iteration: int) -> Any:
            try:
                return await super().step(iteration)
            finally:
                left.append(set(under_way))

    @ly.rollout
    async def slow(task: dict[str, Any]) -> float:
        await asyncio.sleep(60 if task["number"] >= 10 else 0)
        return 0.5

    async with FakeUpstream(reply=rules.reply) as upstream:
        with pytest.raises(ValueError, match="as it was told"):
            await optimise(Broken(**SMALL, run_initial_validation=False), upstream, agent=slow)
    assert left == [set()]


async def test_a_model_that_is_told_may_do_better() -> None:
    def corrects(body: dict[str, Any]) -> str:
        return str(rules.reply(body)) if len(body["messages"]) == 3 else "Sorry?"

    async with FakeUpstream(reply=edits(corrects)) as upstream:
        result, _ = await optimise(ly.APO(**SMALL), upstream, callbacks=[row := Row()])
    assert result.reward == pytest.approx(0.2)
    assert (row.metrics["new_prompts"] > 0, row.metrics["refused_answers"]) == (True, 0)


async def test_a_prompt_that_was_tried_before_is_refused() -> None:
    async with (
        FakeUpstream(reply=edits("<new_prompt>Be kind. {ticket}</new_prompt>")) as upstream,
        InMemoryLightningStore() as store,
    ):
        apo = ly.APO(**{**SMALL, "beam_rounds": 2})
        _, summary = await optimise(apo, upstream, store=store, callbacks=[row := Row()])
        rollouts = await requested(store, summary.run_id)
    assert len({rollout.resources_id for rollout in rollouts}) == 2, "the first and the new prompt"
    assert row.metrics["new_prompts"] == 0


async def test_a_round_in_which_every_reflection_call_failed_is_repeated_by_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_away = True

    def fault(_: Any) -> Misbehaviour | None:
        return Misbehaviour(status=429) if is_away else None

    async with FakeUpstream(reply=rules.reply, fault=fault) as upstream:  # noqa: SIM117 -- too long for one
        async with openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="key", max_retries=0) as client:

            async def run(*, resume: bool) -> Any:
                trainer = ly.Trainer(
                    algorithm=ly.APO(client, gradient_model="fake", apply_edit_model="fake", **SMALL),
                    initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                    run_dir=tmp_path / "run",
                    progress=False,
                )
                return (await trainer.afit(rules.quick, rules.TRAIN, rules.VAL, resume=resume)).result

            with pytest.raises(
                ReflectionFailed, match=r"no reflection call of round 1 succeeded: RateLimitError.*resume=True"
            ):
                await run(resume=False)
            assert "2 reflection calls failed: 2 x RateLimitError" in caplog.text
            assert ly.APO().get_best_prompt(tmp_path / "run").template == rules.SEED
            is_away = False
            result = await run(resume=True)
    assert result.reward == pytest.approx(0.2)


async def test_a_call_that_fails_now_and_then_costs_its_branch_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        upstream.misbehave(Misbehaviour(status=429))
        async with openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="key", max_retries=0) as client:
            apo = ly.APO(client, gradient_model="fake", apply_edit_model="fake", **SMALL)
            await optimise(apo, None, callbacks=[row := Row()])
    assert (row.metrics["failed_calls"], row.metrics["new_prompts"]) == (1, 1)


@pytest.mark.parametrize("choices", [[], None, [SimpleNamespace(message=SimpleNamespace(content=None))]])
async def test_a_model_that_returns_nothing_leaves_the_first_prompts(choices: Any) -> None:
    class Silent:
        async def create(self, **_: Any) -> Any:
            return SimpleNamespace(choices=choices)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=Silent()))
    result, _ = await optimise(ly.APO(client, **SMALL), None)
    assert result.prompts["prompt"].template == rules.SEED


# ---- agents and data -----------------------------------------------------------------------------------------------------


async def test_an_agent_that_ignores_its_prompt_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    @ly.rollout
    async def deaf(task: dict[str, Any]) -> float:
        ly.emit_message(f"I do not know about {task['topic']}.")
        return float(task["number"] % 2)

    async with FakeUpstream(reply=rules.reply) as upstream:
        result, _ = await optimise(ly.APO(**{**SMALL, "beam_rounds": 3}), upstream, agent=deaf)
    assert caplog.text.count("prompts have equal rewards, on each of") == 1
    assert "check that the agent uses the prompt 'prompt'" in caplog.text
    assert result.prompts["prompt"].template == rules.SEED


async def test_an_agent_whose_code_changed_before_a_resume_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        for rounds, agent, n_warnings in ((1, rules.quick, 0), (2, rules.quick, 0), (3, rules.support, 1)):
            trainer = ly.Trainer(
                algorithm=ly.APO(**{**SMALL, "beam_rounds": rounds}),
                llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
                initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                run_dir=tmp_path / "run",
                progress=False,
            )
            summary = await trainer.afit(agent, rules.TRAIN, rules.VAL, resume=rounds > 1)
            assert caplog.text.count("the agent has changed since this run began, from ") == n_warnings
    assert summary.result.reward > 0, "the run keeps its best"


async def test_a_reward_outside_the_stated_range_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    @ly.rollout
    async def loud(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        ly.emit_message(f"I do not know about {task['topic']}.")
        return 10.0 * float(rules.RULES[task["topic"]] in prompt_template.template)

    async with FakeUpstream(reply=rules.reply) as upstream:
        apo = ly.APO(**{**SMALL, "beam_rounds": 5}, reward_range=(0, 1))
        result, _ = await optimise(apo, upstream, agent=loud)
    assert caplog.text.count("has the reward 10, outside of reward_range=(0.0, 1.0): the range is not used") == 1
    assert result.reward is not None and result.reward > 1, "the run goes on"


async def test_a_prompt_with_the_highest_possible_reward_is_not_rewritten() -> None:
    @ly.rollout
    async def perfect(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        return 1.0

    for reward_range, is_asked in ((None, True), ((0, 1), False)):
        async with FakeUpstream(reply=rules.reply) as upstream:
            await optimise(ly.APO(**SMALL, reward_range=reward_range), upstream, agent=perfect)
            assert bool(upstream.requests) == is_asked


async def test_a_validation_set_of_one_works_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        result, _ = await optimise(ly.APO(**SMALL), upstream, train=rules.TRAIN[:1], val=rules.VAL[:1])
    assert "the validation set has one task" in caplog.text
    assert result.reward == 1.0
    assert result.against_first is not None and not result.against_first.is_sure


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": {}}, "APO improves prompt templates, and there is none among the initial resources"),
        ({"val": None}, "APO needs tasks to compare prompts on; pass a val_dataset"),
        ({"train": []}, "APO needs tasks to learn from; pass a train_dataset"),
        ({"prompts": {"prompt": "{task.x}"}}, "which is no plain name such as"),
        ({"apo": {"resource_name": "promt"}}, "resource_name is 'promt'; did you mean 'prompt'"),
        ({"apo": {"gradient_model": "gpt"}}, "model is 'gpt'; the gateway serves 'fake'"),
        ({"upstream": None}, r"APO has no model to improve prompts with; give APO\(AsyncOpenAI\(\)\)"),
    ],
)
async def test_what_cannot_work_is_refused_before_a_rollout(given: dict[str, Any], message: str) -> None:
    async with FakeUpstream(reply=rules.reply) as upstream:
        given = {"apo": {}, "upstream": upstream, **given}
        apo, behind = ly.APO(**SMALL, **given.pop("apo")), given.pop("upstream")
        with pytest.raises(ConfigError, match=message):
            await optimise(apo, behind, **given)


async def test_the_registry_knows_apo(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = ly.Trainer(algorithm={"type": "apo", "beam_rounds": 1}, store="memory")
    assert isinstance(trainer.algorithm, ly.APO)
