"""`PromptSim`'s models serve any optimiser: through a server, in the form that each asks for, and APO learns with them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import aiohttp
import pytest

import leyden as ly
from benchmarks.promptsim import PromptSetting, PromptSim, Skill
from benchmarks.promptsim.vocabulary import DISTRACTORS, FLUFF, RULES
from leyden.algorithm import Evaluator
from leyden.algorithm.apo.requests import RequestTemplate, shipped_requests
from leyden.testing import FakeUpstream

COLD, SECRET, PARCEL = (rule for rule in RULES if rule.name in ("apology", "password", "tracking"))
PROMPT = "You answer the tickets of a shop.\nAsk for the order number."
RUNS = f"reward 0: Not solved.\n   {COLD.symptom}\nreward 0: Not solved. {SECRET.symptom}\nreward 0: {SECRET.symptom}"
REQUESTS = {
    "GEPA": (
        (
            "I provided an assistant with the following instructions to perform a task for me:\n"
            f"```\n{PROMPT}\n```\n\nThe following are examples of different task inputs with feedback:\n```\n{RUNS}\n```\n\n"
            "Your task is to write a new instruction for the assistant. Provide the new instructions within ``` blocks."
        ),
        "```\n{}\n```",
    ),
    "ProTeGi": (
        (
            f'My current prompt is:\n"{PROMPT}"\n\nBut it gets the following examples wrong:\n{RUNS}\n'
            "Based on the above information, I wrote 1 different improved prompts. "
            "Each prompt is wrapped with <START> and <END>."
        ),
        "<START>{}<END>",
    ),
    "DSPy": (
        (
            f"Your task is to propose an instruction.\n[[ ## basic_instruction ## ]]\n{PROMPT}\n{RUNS}\n"
            "Respond with the fields:\n[[ ## proposed_instruction ## ]]\n{proposed_instruction}\n[[ ## completed ## ]]"
        ),
        "[[ ## proposed_instruction ## ]]\n{}\n\n[[ ## completed ## ]]",
    ),
    "plain": (f"{PROMPT}\n{RUNS}\nGive me an improved prompt.", "{}"),
}
"""Requests in the forms of optimisers, and the form of the answer that each can read."""


def sim_with(**skill: float) -> PromptSim:
    setting = PromptSim("additive", seed=2)
    skills = Skill(**{"right": 1.0, "drop": 0.0, "fluff": 0.0, **skill})
    return PromptSim(PromptSetting(setting.world, setting.initial_prompts, setting.behaviour, skills))


# ---- the reflection model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", REQUESTS)
def test_any_optimiser_gets_the_prompt_with_a_clause_for_the_most_frequent_symptom(form: str) -> None:
    request, wanted = REQUESTS[form]
    answer = sim_with().reflect(request)
    assert answer in [wanted.format(f"{PROMPT}\n{clause}") for clause in SECRET.clauses]


def test_apos_own_requests_are_understood() -> None:
    sim = sim_with()
    fields = {"prompt": PROMPT, "rollouts": RUNS, "placeholders": "none", "max_characters": 20_000}
    for path in shipped_requests("critique"):
        critique = sim.reflect(RequestTemplate(path, ("prompt", "rollouts")).fill(prompt=PROMPT, rollouts=RUNS))
        assert SECRET.symptom in critique and COLD.symptom in critique and PARCEL.symptom not in critique
        assert critique.index(SECRET.symptom) < critique.index(COLD.symptom)
        for edit in shipped_requests("edit"):
            names = ("prompt", "critique", "placeholders", "max_characters")
            text = RequestTemplate(edit, names).fill(**{**fields, "critique": critique})
            assert sim.reflect(text) in [f"<new_prompt>{PROMPT}\n{clause}</new_prompt>" for clause in SECRET.clauses]


def test_a_request_for_reasons_gets_reasons_and_no_prompt() -> None:
    request = (
        f'My prompt is "{PROMPT}". {RUNS}\nGive 4 reasons why it is wrong. Wrap each reason with <START> and <END>'
    )
    assert sim_with().reflect(request) == (
        f"<START>These complaints are the most frequent:\n- {SECRET.symptom}\n- {COLD.symptom}<END>"
    )


def test_what_the_prompt_states_already_is_not_added_again() -> None:
    sim = sim_with()
    text = f"<prompt>\n{PROMPT} {SECRET.clauses[3]}\n</prompt>\n{RUNS}\nWrite a new prompt."
    assert sim.reflect(text) in [f"{PROMPT} {SECRET.clauses[3]}\n{clause}" for clause in COLD.clauses]


def test_the_skill_of_the_reflection_model_has_the_stated_shares() -> None:
    sim = sim_with(right=0.7, drop=0.3, fluff=0.2)
    first, second = PROMPT.splitlines()
    seen: Counter[str] = Counter()
    for replica in range(1500):
        lines = sim.reflect(REQUESTS["plain"][0], replica=replica).splitlines()
        assert lines[0] == first, "the first statement is never dropped"
        seen["right"] += any(line in SECRET.clauses for line in lines)
        seen["wrong"] += any(line in DISTRACTORS for line in lines)
        seen["drop"] += second not in lines
        seen["fluff"] += any(line in FLUFF for line in lines)
    shares = {name: count / 1500 for name, count in seen.items()}
    assert shares == pytest.approx({"right": 0.7, "wrong": 0.3, "drop": 0.3, "fluff": 0.2}, abs=0.05)  # four errors


def test_without_symptoms_the_model_guesses_among_all_rules() -> None:
    sim = sim_with()
    text = f"<prompt>\n{PROMPT}\n</prompt>\nreward 0: Not solved.\nWrite a better prompt."
    added = [sim.reflect(text, replica=replica).splitlines()[-1] for replica in range(400)]
    guessed = {rule.name for rule in RULES for line in added if rule.stated_in(line)}
    assert guessed == {rule.name for rule in RULES} - {"order"}
    assert {line for line in added if line in DISTRACTORS} == {*DISTRACTORS}


# ---- through a server ----------------------------------------------------------------------------------------------------


async def test_a_server_gives_the_answers_of_the_plain_functions_in_two_formats() -> None:
    sim, chance = PromptSim("additive", seed=3), random.Random(1)
    async with FakeUpstream(reply=sim.reply, fault=sim.fault) as upstream, aiohttp.ClientSession() as session:
        for task in sim.tasks(20):
            prompt = "\n".join(chance.choice(rule.clauses) for rule in chance.sample(RULES, 5))
            [wanted] = sim.attempt(prompt, task, replica=4).answers
            user, head = {"role": "user", "content": task["text"]}, {"model": "fake", "seed": 4, "max_tokens": 4000}
            joined = {"role": "user", "content": [{"type": "text", "text": f"{prompt}\n\n{task['text']}"}]}
            chats: list[tuple[str, Any]] = [
                ("chat/completions", {**head, "messages": [{"role": "system", "content": prompt}, user]}),
                ("chat/completions", {**head, "messages": [joined]}),
                ("messages", {**head, "system": prompt, "messages": [user]}),
            ]
            for path, body in chats:
                async with session.post(f"{upstream.endpoint}/{path}", json=body) as response:
                    answer = await response.json()
                text = (
                    answer["choices"][0]["message"]["content"] if "choices" in answer else answer["content"][0]["text"]
                )
                assert text == wanted
        text = REQUESTS["GEPA"][0]
        body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
        async with session.post(f"{upstream.endpoint}/chat/completions", json=body) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == sim.reflect(text)


def test_a_hung_rollout_is_a_long_delay_of_the_server_and_reflections_are_never_late() -> None:
    sim = PromptSim("flaky", seed=3)
    prompt = sim.initial_prompts["prompt"]
    for task in sim.tasks(60):
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": task["text"]}]
        fault = sim.fault({"messages": messages})
        assert fault is not None
        assert (fault.delay_seconds > 3600) == (not sim.attempt(prompt, task).answers)
    assert (
        sim.fault({"messages": [{"role": "user", "content": f"Improve this. {sim.tasks(1)[0]['text']} was hard."}]})
        is None
    )


@pytest.mark.parametrize("prompts", [1, 3])
async def test_the_agents_earn_the_rewards_of_the_plain_function(prompts: int) -> None:
    pytest.importorskip("openai")
    sim = PromptSim("additive", seed=3, difficulty=0.0, prompts=prompts)
    best, tasks = sim.optimum().prompts, sim.tasks(12)
    half = {name: "\n".join(text.splitlines()[:-1]) for name, text in best.items()}

    @ly.algo
    async def measure(train_dataset: Any, evaluator: Evaluator, initial_resources: ly.NamedResources) -> list[float]:
        scores = await evaluator.evaluate(await evaluator.publish(initial_resources), train_dataset)
        assert scores.failed == 0
        return scores.by_task

    async with FakeUpstream(reply=sim.reply, fault=sim.fault) as upstream:
        trainer = ly.Trainer(
            algorithm=measure,
            initial_resources={
                "llm": upstream.llm(),
                **{name: ly.PromptTemplate(template=text) for name, text in half.items()},
            },
            store="memory",
            progress=False,
        )
        summary = await trainer.afit(sim.agent, tasks)
    wanted = [sim.attempt(half, task).reward for task in tasks]
    assert summary.result == wanted
    assert {*wanted} == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.merge
async def test_apo_reaches_nine_tenths_of_the_optimum_of_the_additive_family_within_500_rollouts() -> None:
    pytest.importorskip("openai")
    sim = PromptSim("additive", seed=0)
    async with FakeUpstream(reply=sim.reply, fault=sim.fault) as upstream:
        trainer = ly.Trainer(
            algorithm=ly.APO(
                beam_width=4, branch_factor=1, beam_rounds=20, val_batch_size=4, budget=ly.Budget(rollouts=500)
            ),
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources=sim.initial_resources,
            store="memory",
            progress=False,
            concurrency=8,
        )
        summary = await trainer.afit(sim.agent, sim.tasks(40), sim.tasks(32, start=100))
    assert sim.expected_score(summary.result.prompts) >= 0.9 * sim.optimum().score
    assert sim.expected_score(sim.initial_prompts) < 0.1
