"""An agent that ignores its prompt is told so once, whichever optimiser runs it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm.usage import PromptUsage, calls_with, fixed_pieces
from leyden.testing import FakeUpstream
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving

FIRST, SECOND = "You write the answer for {name} now.", "You write a better answer for {name}."


class Call:
    """A recorded model call with one message."""

    def __init__(self, text: str) -> None:
        self.input_messages = [{"role": "system", "content": text}]


def gateway_span(text: str) -> Any:
    """Return a span as a tracer of OpenTelemetry's conventions records a model call."""
    return ly.Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=1,
        trace_id="0" * 31 + "1",
        span_id="0" * 15 + "1",
        name="chat fake",
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": f'[{{"role": "user", "content": "{text}"}}]',
            "gen_ai.output.messages": '[{"role": "assistant", "content": "yes"}]',
        },
        start_time=0.0,
        end_time=1.0,
    )


def observed(usage: PromptUsage, template: str, text: str, rollouts: int, names: list[str] | None = None) -> list[str]:
    """Return the warnings of some rollouts that were given a template and have sent a text."""
    resources = {"prompt": ly.PromptTemplate(template=template)}
    return [each for _ in range(rollouts) for each in usage.observe(resources, [gateway_span(text)], names)]


def test_a_placeholder_stands_for_any_text() -> None:
    plan, write = Call("You plan the answer to a ticket. {x}"), Call("You write the answer for Ann\n now.")
    calls: Any = [plan, write]
    assert calls_with(ly.PromptTemplate(template="You write the answer for {name} now."), calls) == [write]
    assert calls_with(ly.PromptTemplate(template="You plan the answer to a ticket. {{x}}"), calls) == [plan]
    assert calls_with(ly.PromptTemplate(template="You plan {{ what }} to a ticket. ", engine="jinja"), calls) == [plan]
    assert calls_with(ly.PromptTemplate(template="Something that no call has said"), calls) == []
    assert fixed_pieces(ly.PromptTemplate(template="Be {kind} and answer briefly { so")) == []


def test_a_prompt_that_no_call_has_is_ignored_after_eight_rollouts() -> None:
    usage = PromptUsage()
    assert observed(usage, FIRST, "something else", 7) == []
    [warning] = observed(usage, FIRST, "something else", 9)
    assert "the agent ignores the prompt 'prompt': the model calls of 8 rollouts" in warning
    assert "leyden prompts extract RUN" in warning


def test_an_agent_that_has_the_first_text_in_its_code_is_found_at_the_first_new_text() -> None:
    usage = PromptUsage()
    assert observed(usage, FIRST, "You write the answer for Ann now.", 20) == []
    assert observed(usage, SECOND, "You write the answer for Ann now.", 3) == []
    assert len(observed(usage, SECOND, "You write the answer for Ann now.", 5)) == 1


def test_a_prompt_that_few_tasks_need_is_not_ignored() -> None:
    usage = PromptUsage()
    assert observed(usage, FIRST, "You write the answer for Ann now.", 1) == []
    assert observed(usage, FIRST, "something else", 20) == []
    assert observed(usage, SECOND, "something else", 20) == []


def test_other_prompts_short_ones_and_rollouts_without_calls_tell_nothing() -> None:
    usage = PromptUsage()
    assert observed(usage, FIRST, "something else", 20, ["another"]) == []
    assert observed(usage, "Go: {name}", "something else", 20) == []
    resources: Any = {"prompt": ly.PromptTemplate(template=FIRST)}
    assert [usage.observe(resources, []) for _ in range(20)] == [[]] * 20


# ---- in a run ----------------------------------------------------------------------------------------------------------


@ly.rollout
async def deaf(task: dict[str, Any], llm: ly.LLM) -> float:
    """Answer with a prompt of its own."""
    messages = [{"role": "user", "content": f"Just answer this ticket about {task['topic']}"}]
    answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages)
    return float(task["topic"] == "refund") if answer.choices[0].message.content else 0.0


def _optimiser(name: str) -> Any:
    if name == "apo":
        return ly.APO(beam_width=1, branch_factor=1, beam_rounds=2, gradient_batch_size=2)
    if name == "gepa":
        pytest.importorskip("gepa")
        return ly.GEPA(max_steps=3)
    return ly.FewShot(n_candidates=3)


@pytest.mark.parametrize("name", ["apo", "gepa", "few_shot"])
@pytest.mark.parametrize("agent", [deaf, rules.support])
async def test_an_optimiser_warns_once_of_an_agent_that_ignores_its_prompt(
    name: str, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openai")
    optimiser = _optimiser(name)
    async with FakeUpstream(reply=evolving.reply) as upstream:
        trainer = ly.Trainer(
            algorithm=optimiser,
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=f"{rules.RULES['refund']} {rules.SEED}")},
            store="memory",
            progress=False,
        )
        with caplog.at_level(logging.WARNING, "leyden"):
            await trainer.afit(agent, rules.TRAIN, rules.VAL)
    warnings = [record.getMessage() for record in caplog.records if "ignores the prompt" in record.getMessage()]
    assert len(warnings) == (1 if agent is deaf else 0)
