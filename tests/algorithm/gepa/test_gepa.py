"""`GEPA` finds a known optimum, spends what it may and no more, and stops candidates that cannot win."""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import leyden as ly
from benchmarks.promptsim import PromptSim
from leyden.algorithm.evaluator import Score
from leyden.algorithm.gepa.race import Race, common_stages, stages
from leyden.algorithm.gepa.reflective import objective_scores
from leyden.algorithm.prompts import PromptResult, best_label, read_history
from leyden.errors import ConfigError, ReflectionFailed
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving

openai = pytest.importorskip("openai")
pytest.importorskip("gepa")


async def optimise(
    gepa: ly.GEPA,
    upstream: FakeUpstream,
    *,
    agent: Any = rules.quick,
    store: Any = "memory",
    prompts: dict[str, str] | None = None,
    val: Any = rules.VAL,
    **options: Any,
) -> tuple[PromptResult, Any]:
    trainer = ly.Trainer(
        algorithm=gepa,
        llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
        initial_resources={
            name: ly.PromptTemplate(template=text) for name, text in (prompts or {"prompt": rules.SEED}).items()
        },
        store=store,
        progress=False,
        **options,
    )
    summary = await trainer.afit(agent, rules.TRAIN, val)
    return summary.result, summary


@pytest.mark.parametrize("selection", ["leader", "pareto"])
async def test_the_optimum_is_found_from_what_the_agents_calls_show(selection: Any) -> None:
    async with FakeUpstream(reply=evolving.reply) as upstream, InMemoryLightningStore() as store:
        gepa = ly.GEPA(**evolving.OPTIONS, candidate_selection=selection)
        result, summary = await optimise(gepa, upstream, agent=rules.support, store=store)
        assert rules.optimum(result.prompts["prompt"])
        assert result.reward == 1.0
        assert result.against_first is not None and result.against_first.n_compared > 1
        assert result.expected_reward is not None and 0.8 < result.expected_reward <= 1
        assert f"reward 1, {result.expected_reward:.3g} expected on new tasks; better by" in str(result)
        history = await read_history(store, summary.run_id)
        assert history[0].accepted and history[-1].parent is not None
        assert "the sum of rewards rose from" in history[-1].reason
        labelled = await store.get_labelled_resources(best_label(summary.run_id))
        assert labelled is not None and labelled.resources["prompt"] == result.prompts["prompt"]
        measured = [
            (rollout.resources_id, rollout.mode, rollout.input["topic"], rollout.input["number"])
            for rollout in await store.query_rollouts(run_id=summary.run_id)
        ]
        assert len(set(measured)) == len(measured), "a rollout was run twice"


@pytest.mark.parametrize("rollouts", [15, 40])
async def test_rollouts_never_exceed_the_budget_and_the_best_prompt_is_returned(rollouts: int) -> None:
    async with FakeUpstream(reply=evolving.reply) as upstream, InMemoryLightningStore() as store:
        gepa = ly.GEPA(**evolving.OPTIONS, budget=ly.Budget(rollouts=rollouts))
        result, summary = await optimise(gepa, upstream, store=store)
        rollouts_of_best = await store.query_rollouts(run_id=summary.run_id, mode_in=["val"])
        measured = {
            json.dumps(each.input, sort_keys=True)
            for each in rollouts_of_best
            if each.resources_id == result.resources_id
        }
        assert len(measured) == len(rules.VAL), "the best prompts are measured on all validation tasks in the end"
        assert len(await store.query_rollouts(run_id=summary.run_id)) <= rollouts
        assert gepa.get_best_prompt() == result.prompts["prompt"]
    with pytest.raises(ConfigError, match="measuring the first prompts takes 15"):
        async with FakeUpstream(reply=evolving.reply) as upstream:
            await optimise(ly.GEPA(budget=ly.Budget(rollouts=14)), upstream)


async def test_several_prompts_are_improved_and_several_proposals_are_made_at_once() -> None:
    @ly.rollout
    async def two_prompts(task: dict[str, Any], resources: ly.NamedResources) -> float:
        texts = [prompt.template for prompt in resources.values() if isinstance(prompt, ly.PromptTemplate)]
        knows = rules.RULES[task["topic"]] in "\n".join(texts)
        ly.emit_message("Here is what to do." if knows else f"I do not know about {task['topic']}.")
        return float(knows)

    async with FakeUpstream(reply=evolving.reply) as upstream:
        gepa = ly.GEPA(**{**evolving.OPTIONS, "max_steps": 6}, proposals_per_step=3)
        result, _ = await optimise(
            gepa, upstream, agent=two_prompts, prompts={"plan": "Make a plan.", "write": "Write an answer."}
        )
    assert result.reward is not None and result.reward > 0.5
    assert result.prompts["plan"].template != "Make a plan."
    assert result.prompts["write"].template != "Write an answer."


@pytest.mark.parametrize("frontier", ["instance", "objective", "hybrid", "cartesian"])
async def test_the_best_candidate_in_a_dimension_of_the_reward_stays_a_parent_unless_the_frontier_is_of_tasks(
    frontier: Any,
) -> None:
    @ly.rollout
    async def solved_and_brief(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> None:
        text = prompt_template.template
        solved = rules.RULES[task["topic"]] in text
        ly.emit_message("Here is what to do." if solved else f"I do not know about {task['topic']}.")
        ly.emit_reward({"solved": float(solved), "brevity": 1 / len(text.splitlines())}, primary_key="solved")

    rewritten: list[str] = []

    def reply(body: dict[str, Any]) -> Any:
        text = str(body["messages"][0]["content"])
        assert "Its parts: solved " in text and ", brevity " in text
        rewritten.append(text.split("```")[1].strip())
        return evolving.reply(body)

    async with FakeUpstream(reply=reply) as upstream:
        options = {**evolving.OPTIONS, "max_steps": 20}
        gepa = ly.GEPA(**options, candidate_selection="pareto", frontier=frontier)
        result, _ = await optimise(gepa, upstream, agent=solved_and_brief)
    assert result.reward is not None and result.reward > 0.5
    first_success = next(place for place, text in enumerate(rewritten) if text != rules.SEED)
    assert (rules.SEED in rewritten[first_success:]) == (frontier != "instance"), "the first prompt is the shortest"


@pytest.mark.parametrize("frontier", ["objective", "hybrid", "cartesian"])
async def test_a_search_whose_first_prompt_always_fails_finds_one_that_does_not(frontier: Any) -> None:
    @ly.rollout
    async def fails_without_the_rule(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> None:
        if rules.RULES[task["topic"]] not in prompt_template.template:
            raise ValueError(f"I do not know about {task['topic']}.")
        ly.emit_reward({"solved": 1.0, "brevity": 1 / len(prompt_template.template.splitlines())}, primary_key="solved")

    async with FakeUpstream(reply=evolving.reply) as upstream:
        gepa = ly.GEPA(**{**evolving.OPTIONS, "max_steps": 30}, candidate_selection="pareto", frontier=frontier)
        result, _ = await optimise(gepa, upstream, agent=fails_without_the_rule)
    assert result.reward is not None and result.reward > 0.5, "the first prompt failed on every task"


def test_a_failed_rollout_lowers_the_mean_of_every_known_dimension() -> None:
    failed, known = Score(0, 0, -1.0, "it failed", None), dict[str, None]()
    assert objective_scores([failed], known, -1.0) == [{"primary": -1.0}]
    known = {"solved": None, "brevity": None}
    assert objective_scores([failed], known, -1.0) == [{"solved": -1.0, "brevity": -1.0}]


async def test_a_rollout_whose_reward_lacks_a_dimension_counts_there_as_failed() -> None:
    """The first prompt is the best in brevity on the one task on which it states its brevity. Were the other tasks left out, it
    would have a brevity of 1, and would stay a parent."""

    @ly.rollout
    async def at_times_brief(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> None:
        text = prompt_template.template
        solved = rules.RULES[task["topic"]] in text
        ly.emit_message("Here is what to do." if solved else f"I do not know about {task['topic']}.")
        is_first = text == rules.SEED
        rewards = {"solved": float(solved), "brevity": 1.0 if is_first else 0.5}
        if is_first and task != rules.VAL[0]:
            del rewards["brevity"]
        ly.emit_reward(rewards, primary_key="solved")

    rewritten: list[str] = []

    def reply(body: dict[str, Any]) -> Any:
        rewritten.append(str(body["messages"][0]["content"]).split("```")[1].strip())
        return evolving.reply(body)

    async with FakeUpstream(reply=reply) as upstream:
        options = {**evolving.OPTIONS, "max_steps": 20}
        gepa = ly.GEPA(**options, candidate_selection="pareto", frontier="objective")
        await optimise(gepa, upstream, agent=at_times_brief)
    first_success = next(place for place, text in enumerate(rewritten) if text != rules.SEED)
    assert rules.SEED not in rewritten[first_success:]


async def test_by_success_the_prompt_whose_rewriting_helps_is_chosen_most_often() -> None:
    first = {"plan": "Make a plan.", "write": "Write an answer.", "check": "Check the answer."}
    rewritten: list[str] = []

    @ly.rollout
    async def one_of_three(task: dict[str, Any], resources: ly.NamedResources) -> float:
        prompt = resources["write"]
        knows = isinstance(prompt, ly.PromptTemplate) and rules.RULES[task["topic"]] in prompt.template
        ly.emit_message("Here is what to do." if knows else f"I do not know about {task['topic']}.")
        return float(knows)

    def reply(body: dict[str, Any]) -> Any:
        text = str(body["messages"][0]["content"])
        rewritten.extend(name for name, prompt in first.items() if f"```\n{prompt}" in text)
        return evolving.reply(body)

    async with FakeUpstream(reply=reply) as upstream:
        options = {**evolving.OPTIONS, "max_steps": 25, "component_selection": "success"}
        result, _ = await optimise(ly.GEPA(**options), upstream, agent=one_of_three, prompts=first)
    assert all(rule in result.prompts["write"].template for rule in rules.RULES.values())
    assert set(rewritten[:3]) == set(first)
    found = rewritten.index("write") + 1  # until the last rule is found, its rewriting helps
    assert rewritten[found:].count("write") > len(rewritten[found:]) / 3


@pytest.mark.parametrize(
    "answer",
    [
        "",
        f"```\n{rules.SEED}\n```",
        "```\nno placeholder\n```",
        "```\n{ticket.__class__}\n```",
        "```\nBe kind. {ticket}",
        "<think>Okay, {ticket} must stay. Maybe I should",
        "I would write: Be kind. {ticket}",
    ],
)
async def test_an_answer_that_cannot_be_used_costs_no_rollout(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    def reply(body: dict[str, Any]) -> Any:
        return answer if "new instruction" in str(body["messages"][0]["content"]) else rules.reply(body)

    async with FakeUpstream(reply=reply) as upstream, InMemoryLightningStore() as store:
        result, summary = await optimise(ly.GEPA(max_steps=2, minibatch_size=4), upstream, store=store)
        assert {each.resources_id for each in await store.query_rollouts(run_id=summary.run_id)} == {
            result.resources_id
        }
    assert result.prompts["prompt"].template == rules.SEED
    assert "no prompt that can be used" in caplog.text


async def test_a_reflection_model_that_is_silent_ends_with_the_time_of_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        return Misbehaviour(delay_seconds=60) if "new instruction" in str(body["messages"][0]["content"]) else None

    async with FakeUpstream(reply=evolving.reply, fault=fault) as upstream:
        async with asyncio.timeout(20):
            result, _ = await optimise(ly.GEPA(**evolving.OPTIONS, budget=ly.Budget(seconds=2)), upstream)
    assert result.prompts["prompt"].template == rules.SEED
    assert "the run ends after step 0 with its best prompt: the time of Budget(seconds=2) is over" in caplog.text


@pytest.mark.parametrize("choices", [[], None, [SimpleNamespace(message=SimpleNamespace(content=None))]])
async def test_a_model_that_returns_nothing_leaves_the_first_prompts(
    choices: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        async def create(self, **_: Any) -> Any:
            return SimpleNamespace(choices=choices)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=Silent()))
    async with FakeUpstream(reply=evolving.reply) as upstream:
        result, _ = await optimise(ly.GEPA(client, max_steps=2), upstream)
    assert result.prompts["prompt"].template == rules.SEED
    assert "no prompt that can be used: it is empty" in caplog.text


async def test_refusals_now_and_then_cost_a_step_each_and_the_best_prompt_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = 0

    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        nonlocal calls
        calls += "new instruction" in str(body["messages"][0]["content"])
        return Misbehaviour(status=429) if calls % 2 else None

    async with FakeUpstream(reply=evolving.reply, fault=fault) as upstream:  # noqa: SIM117 -- too long for one
        async with openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="key", max_retries=0) as client:
            gepa = ly.GEPA(client, reflection_model="fake", **evolving.OPTIONS)
            result, _ = await optimise(gepa, upstream)
    assert result.reward is not None and result.reward > 0
    assert "1 reflection calls failed: 1 x RateLimitError" in caplog.text


async def test_refusals_without_end_end_the_run_and_its_best_prompt_is_kept(tmp_path: Path) -> None:
    calls = 0

    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        nonlocal calls
        calls += "new instruction" in str(body["messages"][0]["content"])
        return Misbehaviour(status=429) if calls > 2 else None

    async with FakeUpstream(reply=evolving.reply, fault=fault) as upstream:  # noqa: SIM117 -- too long for one
        async with openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="key", max_retries=0) as client:
            gepa = ly.GEPA(client, reflection_model="fake", **evolving.OPTIONS)
            with pytest.raises(ReflectionFailed, match=r"last 3 steps succeeded: RateLimitError.*resume=True"):
                await optimise(gepa, upstream, store=None, run_dir=tmp_path / "run")
    best = ly.GEPA().get_best_prompt(tmp_path / "run").template
    assert best == gepa.get_best_prompt().template != rules.SEED


async def test_a_reflection_model_that_is_away_ends_the_run_with_a_clear_error() -> None:
    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        return Misbehaviour(status=400) if "new instruction" in str(body["messages"][0]["content"]) else None

    async with FakeUpstream(reply=evolving.reply, fault=fault) as upstream:
        with pytest.raises(ReflectionFailed, match="no reflection call of the last 3 steps succeeded"):
            await optimise(ly.GEPA(**evolving.OPTIONS), upstream)


async def test_a_cancelled_run_ends_its_thread() -> None:
    async with FakeUpstream(reply=evolving.reply, delay_seconds=0.2) as upstream:
        run = asyncio.ensure_future(optimise(ly.GEPA(**evolving.OPTIONS), upstream, agent=rules.support))
        async with asyncio.timeout(30):
            while not upstream.requests:  # noqa: ASYNC110 -- another task sends them
                await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_reward_outside_the_stated_range_switches_races_off(caplog: pytest.LogCaptureFixture) -> None:
    @ly.rollout
    async def loud(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        return 10.0 * float(rules.RULES[task["topic"]] in prompt_template.template)

    prompt = rules.SEED + "\n" + rules.RULES["refund"]
    async with FakeUpstream(reply=evolving.reply) as upstream:
        await optimise(ly.GEPA(max_steps=1), upstream, agent=loud, prompts={"prompt": prompt})
    assert "has the reward 10, outside of reward_range=(0.0, 1.0)" in caplog.text


async def test_a_validation_set_of_one_works_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeUpstream(reply=evolving.reply) as upstream:
        result, _ = await optimise(ly.GEPA(**evolving.OPTIONS), upstream, val=rules.VAL[:1])
    assert "the validation set has one task" in caplog.text
    assert result.reward == 1.0
    assert result.against_first is not None and not result.against_first.is_sure


@pytest.mark.slow
async def test_the_expected_reward_is_closer_to_the_truth_than_the_one_by_which_the_best_was_chosen() -> None:
    chosen_by, expected = [], []
    for seed in range(8):
        sim = PromptSim("clustered", seed=seed)

        @ly.rollout
        async def agent(task: dict[str, Any], prompt_template: ly.PromptTemplate, sim: PromptSim = sim) -> float:
            attempt = sim.attempt(prompt_template, task)
            ly.emit_message(attempt.answers[0])
            return attempt.reward

        async with FakeUpstream(reply=sim.reply) as upstream:
            gepa = ly.GEPA(max_steps=15, seed=seed)
            trainer = ly.Trainer(
                algorithm=gepa,
                llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
                initial_resources=sim.initial_resources,
                store="memory",
                progress=False,
            )
            result = (await trainer.afit(agent, sim.tasks(40), sim.tasks(20, start=100))).result
        of_all = gepa._expected_rewards()  # pyright: ignore[reportPrivateUsage]
        assert result.expected_reward == max(of_all.values()), "no candidate that ran is expected to be better"
        assert result.against_first.tasks == 20, "it is measured on the whole validation set"
        truth = sim.expected_reward(result.prompts)
        chosen_by.append(result.reward - truth)
        expected.append(result.expected_reward - truth)
    assert statistics.fmean(chosen_by) > 0.02, "the best prompts were also lucky"
    assert abs(statistics.fmean(expected)) < statistics.fmean(chosen_by)
    assert statistics.fmean(map(abs, expected)) < statistics.fmean(map(abs, chosen_by))


def test_a_hopeless_candidate_is_stopped_early_and_a_specialist_is_not() -> None:
    best = dict.fromkeys(range(40), 1.0) | {39: 0.0}
    hopeless, specialist = (Race(best, best, 0.05, (0.0, 1.0), 40) for _ in range(2))
    for stage in stages(40, "seed"):
        hopeless.add(dict.fromkeys(stage, 0.0))
        if hopeless.is_lost:
            break
    assert len(hopeless.rewards) <= 18
    specialist.add({39: 1.0})
    for task in range(30):
        specialist.add({task: 0.0})
    assert specialist.is_above_front and not specialist.is_lost


def test_a_challenger_is_ahead_if_it_leads_by_more_than_chance_explains() -> None:
    leader = dict.fromkeys(range(20), 0.0) | dict.fromkeys(range(10), 1.0)
    for better, worse, is_ahead in (
        (0, 0, False),
        (1, 1, False),
        (3, 2, False),
        (2, 0, True),
        (6, 2, True),
        (0, 3, False),
    ):
        race = Race(leader, None, 0.05, (0.0, 1.0), 20)
        race.add(dict.fromkeys(range(10, 10 + better), 1.0) | dict.fromkeys(range(worse), 0.0))
        race.add({task: leader[task] for task in range(20) if task not in race.rewards})
        assert race.is_ahead == is_ahead, (better, worse)


@pytest.mark.parametrize(
    ("n_tasks", "ends"), [(40, [10, 20, 40]), (100, [25, 50, 100]), (10, [6, 10]), (3, [3]), (1, [1])]
)
def test_all_challengers_run_the_same_stages(n_tasks: int, ends: list[int]) -> None:
    found = common_stages(n_tasks, "a")
    assert [sum(map(len, found[: place + 1])) for place in range(len(found))] == ends
    assert sorted(task for stage in found for task in stage) == list(range(n_tasks))
    assert found == common_stages(n_tasks, "a")


def test_every_task_is_in_one_stage() -> None:
    assert sorted(task for stage in stages(50, "a") for task in stage) == list(range(50))
    assert list(stages(50, "a")) != list(stages(50, "b"))


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"reward_range is \(1, 0\)"):
        ly.GEPA(reward_range=(1, 0))
    with pytest.raises(ConfigError, match="use_merge=True joins candidates of a Pareto front"):
        ly.GEPA(use_merge=True, candidate_selection="leader")
    with pytest.raises(ConfigError, match="frontier='objective' chooses parents from a front"):
        ly.GEPA(frontier="objective", candidate_selection="leader")
    with pytest.raises(ConfigError, match="candidate_selection is 'best'"):
        ly.GEPA(candidate_selection="best")  # pyright: ignore[reportArgumentType]
    logging.getLogger("gepa").setLevel(logging.WARNING)
