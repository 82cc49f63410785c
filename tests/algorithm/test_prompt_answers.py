"""How a prompt is read out of a reflection model's answer: the text alone, to the character, or a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import leyden as ly
from leyden.algorithm.apo.requests import shipped_requests
from leyden.algorithm.collector import RolloutCollector
from leyden.algorithm.prompts.journal import Journal
from leyden.algorithm.prompts.proposed_prompts import Request, proposed_prompt, with_own_placeholders, without_reasoning
from leyden.algorithm.prompts.reflector import Reflector
from leyden.types import PromptTemplate

TAGS = Request(
    "Rewrite $prompt by the review. Return the new prompt between <new_prompt> and </new_prompt>.",
    "Rewrite Answer {ticket} by the review. Return the new prompt between <new_prompt> and </new_prompt>.",
)
FENCE = Request(
    "I gave this:\n```\n<curr_param>\n```\nExamples:\n```\n<side_info>\n```\nProvide it within ``` blocks.",
    "I gave this:\n```\nAnswer {ticket}\n```\nExamples:\n```\n# Example 1\nIt failed.\n```\nProvide it within ``` blocks.",
)
BARE = Request("Say only the new prompt for $prompt.", "Say only the new prompt for Answer {ticket}.")
FIRST = PromptTemplate(template="Answer {ticket}")
PLAIN = PromptTemplate(template="Answer the customer.")
GOOD = "Be kind. Answer {ticket}"


def read(answer: str, request: Request = TAGS, prompt: PromptTemplate = FIRST) -> tuple[str | None, str]:
    return proposed_prompt(answer, prompt, request, max_characters=500)


@pytest.mark.parametrize(
    "answer",
    [
        f"<new_prompt>{GOOD}</new_prompt>",
        f"Sure! I added one sentence:\n<new_prompt>\n{GOOD}\n</new_prompt>\nDone.",
        f"<NEW_PROMPT>{GOOD}</NEW_PROMPT>",
        f'< new_prompt lang="en" >{GOOD}</ New_Prompt >',
        f"<new_prompt>\n```\n{GOOD}\n```\n</new_prompt>",
        f"<new_prompt>````markdown\n{GOOD}\n````</new_prompt>",
        f"<new_prompt>\n```{GOOD}```\n</new_prompt>",
        f"**<new_prompt>**\n{GOOD}\n**</new_prompt>**",
        f"`<new_prompt>` {GOOD} `</new_prompt>`",
        f"```xml\n<new_prompt>{GOOD}</new_prompt>\n```",
        f"~~~\n{GOOD}\n~~~",
        f"I write it between <new_prompt> and </new_prompt>.\n<new_prompt>{GOOD}</new_prompt>",
        f"<new_prompt>{GOOD}</new_prompt> It is between <new_prompt> and </new_prompt> as asked.",
        f"<new_prompt>{GOOD}</new_prompt>\nAgain: <new_prompt>{GOOD}</new_prompt>",
        f"<new_prompt>Be kind.</new_prompt> That lost a placeholder. <new_prompt>{GOOD}</new_prompt>",
        f"<think>Perhaps <new_prompt>Draft {{ticket}}</new_prompt>?</think><new_prompt>{GOOD}</new_prompt>",
        f"Perhaps <new_prompt>Draft {{ticket}}</new_prompt>?</think>\n<new_prompt>{GOOD}</new_prompt>",
        f"<Thinking budget='3'>hm</Thinking><reasoning>ah</reasoning><new_prompt>{GOOD}</new_prompt>",
        f"[THINK]hm <new_prompt>[/THINK]<new_prompt>{GOOD}</new_prompt>",
        f"◁think▷hm <new_prompt>◁/think▷<new_prompt>{GOOD}</new_prompt>",
        f"<|channel|>analysis<|message|><new_prompt><|end|><|channel|>final<|message|><new_prompt>{GOOD}</new_prompt>",
        f"It has a `<thinking>` tag.\n<new_prompt>{GOOD}</new_prompt>",
        f"<seed:think>a<seed:think>b</seed:think>c</seed:think><new_prompt>{GOOD}</new_prompt>",
    ],
)
def test_the_text_between_the_tags_is_the_prompt_whatever_stands_around_it(answer: str) -> None:
    assert read(answer) == (GOOD, "")


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<inner_monologue>", "</inner_monologue>"),
        ("<chain-of-thought>", "</chain-of-thought>"),
        ("<COT>", "</cot>"),
        ("<think_fast>", "</think_fast>"),
        ("<|thinking|>", "<|/thinking|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("analysisWe must", "assistantfinal"),
        ("<|channel>thought\n", "<channel|>"),
        ("<unused94>thought\n", "<unused95>"),
    ],
)
@pytest.mark.parametrize(("opening", "closing"), [("<new_prompt>", "</new_prompt>"), ("```\n", "\n```")])
def test_a_draft_in_reasoning_is_no_prompt_whatever_marks_a_model_writes(
    begin: str, end: str, opening: str, closing: str
) -> None:
    request = FENCE if opening.startswith("`") else TAGS
    draft, good = f"\n{opening}Draft {{ticket}}{closing}\nHm. ", f"\n{opening}{GOOD}{closing}"
    assert read(begin + draft + end + good, request) == (GOOD, "")
    assert read(begin + draft, request)[0] is None


@pytest.mark.parametrize("request_", [TAGS, FENCE, BARE], ids=["tags", "fence", "bare"])
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("<think>Okay, {ticket} must stay. Maybe I should", "has no end"),
        ("<think>x</think><think>Okay, {ticket} must stay.", "has no end"),
        ("<thinking>{ticket}</think>", "has no end"),
        ("[THINK]Okay, {ticket}", "has no end"),
        ("<new_prompt>Be kind. {ticket}", "cut off"),
        ("<new_prompt>A {ticket}</new_prompt> or <new_prompt>B {ticket}", "cut off"),
        ("<new_prompt>```\nBe kind. {ticket}</new_prompt>", "a block without its closing ```"),
        ("```\nBe kind. {ticket}", "a block without its closing ```"),
        ("````\nBe kind. {ticket}\n```", "a block without its closing ````"),
        ("<new_prompt>Write <new_prompt>{ticket}</new_prompt> as an example.</new_prompt>", "write each once"),
        ("<new_prompt>Write {ticket} before </new_prompt> each time.</new_prompt>", "write each once"),
        ("Write {ticket} before </new_prompt>", "write each once"),
        ("<think><new_prompt>Be kind. {ticket}</new_prompt></think>", "it"),
        ("<new_prompt>Be kind. {ticket}</new_prompt></think>", "inside of reasoning"),
        ("<new_prompt>A {ticket}</new_prompt><new_prompt>B {ticket}</new_prompt>", "it has 2 texts"),
        ("<new_prompt>Be kind.</new_prompt>", "it lacks the placeholder {ticket}"),
        ("<new_prompt> </new_prompt>", "it is empty"),
    ],
)
def test_an_answer_without_a_whole_prompt_is_refused_with_the_reason(request_: Request, answer: str, why: str) -> None:
    text, problem = read(answer, request_)
    assert text is None and why in problem


@pytest.mark.parametrize(
    "answer",
    [
        f"```\n{GOOD}\n```",
        f"Here it is.\n\n```text\n{GOOD}\n```\nIt is better.",
        f"```\n{GOOD}```",
        f"For example:\n```json\n{{}}\n```\nSo:\n```\n{GOOD}\n```",
        f"For example:\n```\nno placeholder\n```\nSo:\n```\n{GOOD}\n```",
        f"```\n{GOOD}\n```\nIt leads to:\n```\nAnswer 1\n```",
        f"<think>```\nDraft {{ticket}}\n```</think>\n```\n{GOOD}\n```",
        f"```\nDraft {{ticket}}\n```\n</think>\n```\n{GOOD}\n```",
        f"<think>```</think>```\r\n{GOOD}\r\n```\r\n",
        f"<new_prompt>{GOOD}</new_prompt>",
    ],
)
def test_a_request_for_a_block_gets_the_text_of_the_one_block_that_can_be_the_prompt(answer: str) -> None:
    assert read(answer, FENCE) == (GOOD, "")


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        (
            "````\nAnswer {ticket} so:\n```\nyes\n```\nor no.\n````",
            "Answer {ticket} so:\n```\nyes\n```\nor no.",
        ),
        (
            "```\nAnswer {ticket} so:\n```json\n[1]\n```\nor no.\n```",
            "Answer {ticket} so:\n```json\n[1]\n```\nor no.",
        ),
        ("~~~\nAnswer {ticket} so:\n```\nyes\n```\n~~~", "Answer {ticket} so:\n```\nyes\n```"),
        ("```\nThink in <think> and </think>. {ticket}\n```", "Think in <think> and </think>. {ticket}"),
        ("<new_prompt>Close it by </think>. {ticket}</new_prompt>", "Close it by </think>. {ticket}"),
        ("<new_prompt>```\nx\n```\nbefore {ticket}</new_prompt>", "```\nx\n```\nbefore {ticket}"),
    ],
)
def test_marks_that_belong_to_the_prompt_stay_in_it(answer: str, inside: str) -> None:
    assert read(answer, FENCE) == (inside, "")


def test_several_blocks_that_can_be_the_prompt_are_asked_for_again() -> None:
    assert read("```\nFirst.\n```\nor\n```\nSecond.\n```", FENCE, PLAIN)[0] is None
    assert read("```\nBe kind.\n```\nSuch as\n```json\n[1]\n```", FENCE, PLAIN) == ("Be kind.", "")
    assert read("```\nDo X:\n```\nexample\n```\nThen Y.\n```", FENCE, PLAIN)[0] is None, "which block ends where?"
    for nested in (f"Use\n```\n{{}}\n```\n{GOOD}", f"{GOOD}\nSo:\n```\nIt is:\n```\nShortly."):
        text, problem = read(f"```\n{nested}\n```", FENCE)
        assert text is None and "between lines of ````" in problem
        assert read(f"````\n{nested}\n````", FENCE) == (nested.replace("{}", "{{}}"), "")


@pytest.mark.parametrize("request_", [TAGS, FENCE], ids=["tags", "fence"])
def test_an_answer_that_repeats_the_request_has_no_prompt(request_: Request) -> None:
    text, problem = read(request_.text, request_, PLAIN)
    assert text is None and problem
    half = request_.template.split(". ")[0][:25].strip()
    assert read(f"<new_prompt>{half}</new_prompt>", request_, PLAIN) == (None, "it only repeats the request")


def test_a_text_without_the_marks_that_were_asked_for_is_no_prompt() -> None:
    assert "between <new_prompt> and </new_prompt>" in read(f"I would write: {GOOD}", TAGS)[1]
    assert "in a block" in read(f"I would write: {GOOD}", FENCE)[1]
    assert read(GOOD, BARE) == (GOOD, "")
    assert read(f"</think>\n{GOOD}", BARE) == (GOOD, "")
    assert read(f"```\n{GOOD}\n```", BARE) == (GOOD, "")
    assert read(f"Hm. <think> {GOOD}", BARE)[0] is None


def test_the_shipped_requests_ask_for_tags() -> None:
    assert {Request(path.read_text(), "").marks for path in shipped_requests("edit")} == {"tags"}


def test_a_critique_is_what_stands_behind_the_reasoning() -> None:
    assert without_reasoning("<think>hm</think>\nSay more.") == "Say more."
    assert without_reasoning("hm</think>Say more.") == "Say more."
    assert without_reasoning("Say more.") == "Say more."
    assert without_reasoning("<think>hm") is None


# ---- braces --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ('Return {"answer": "..."} for {ticket}', 'Return {"answer": "..."} for T'),
        ('Return {{"answer": "..."}} for {ticket}', 'Return {"answer": "..."} for T'),
        ("{} and {ticket}", "{} and T"),
        ("{{}} and {ticket}", "{} and T"),
        ('{"a": {"b": {ticket}}}', '{"a": {"b": T}}'),
        ('{{"a": {"b": {ticket}}}}', '{"a": {"b": T}}'),
        ('{"a": {{"b": [{}, {}]}}, "c": {ticket}}', '{"a": {"b": [{}, {}]}, "c": T}'),
        ("{{{ticket}}}", "{T}"),
        (r"\boxed{answer} for {ticket}", r"\boxed{answer} for T"),
        ("{ticket} for {customer}, {0}, {ticket.x}, {ticket!r}", "T for {customer}, {0}, {ticket.x}, {ticket!r}"),
        ("if (x) { return {ticket}", "if (x) { return T"),
        ("} {ticket} {", "} T {"),
        ("{{name}} stays doubled for {ticket}", "{name} stays doubled for T"),
    ],
)
def test_braces_of_a_proposal_are_text_but_for_the_prompts_own_placeholders(written: str, rendered: str) -> None:
    text, problem = read(f"<new_prompt>{written}</new_prompt>")
    assert problem == "" and text is not None
    assert PromptTemplate(template=text).format(ticket="T") == rendered


@pytest.mark.parametrize("lost", ["Be kind.", "{{ticket}}", "{ticket.x}", "{ ticket }", "{Ticket}"])
def test_a_proposal_that_loses_a_placeholder_among_its_braces_is_refused(lost: str) -> None:
    assert read(f"<new_prompt>{lost}</new_prompt>") == (None, "it lacks the placeholder {ticket}")


@given(st.text(alphabet='ab{} "', max_size=14))
def test_any_text_becomes_a_template_with_at_most_the_own_placeholders(text: str) -> None:
    prompt = PromptTemplate(template="{a} {ab}")
    made = PromptTemplate(template=with_own_placeholders(text, prompt))
    assert set(made.placeholders) <= {"a", "ab"}
    assert with_own_placeholders(made.template, prompt) == made.template, "what is right already stays"
    assert re.sub("[{}]+", "", made.template) == re.sub("[{}]+", "", text)


@given(st.dictionaries(st.sampled_from("xyz"), st.recursive(st.integers(0, 9), st.lists, max_leaves=4), max_size=3))
def test_json_in_a_proposal_reads_as_json_in_the_prompt(value: Any) -> None:
    written = json.dumps({"outer": {"inner": value}, "list": [value, {}]})
    text, problem = read(f"<new_prompt>Answer {{ticket}} as {written}</new_prompt>")
    assert (problem, PromptTemplate(template=text or "").format(ticket="T")) == ("", f"Answer T as {written}")


def test_braces_in_a_jinja_template_that_jinja_reads_as_text_are_kept() -> None:
    prompt = PromptTemplate(template="Answer {{ ticket }}", engine="jinja")
    text = 'Return {"a": {"b": 1}} for {{ ticket }}'
    assert read(f"<new_prompt>{text}</new_prompt>", TAGS, prompt) == (text, "")
    assert read("<new_prompt>{{ customer }} {{ ticket }}</new_prompt>", TAGS, prompt)[0] is None


# ---- calls ---------------------------------------------------------------------------------------


class Client:
    """A client of OpenAI's API that gives these answers in turn, each a content, a `finish_reason` and tool calls."""

    def __init__(self, *answers: tuple[Any, str | None]) -> None:
        self.answers, self.asked = list(answers), list[Any]()
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **request: Any) -> Any:
        self.asked.append(request)
        content, reason = self.answers.pop(0)
        calls = [SimpleNamespace(id="1")] if content is None else None
        message = SimpleNamespace(content=content, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)], usage=None)


@pytest.mark.parametrize(
    ("content", "reason", "why"),
    [
        (f"<new_prompt>{GOOD}</new_prompt>", "length", "cut off at the limit of its length"),
        (f"<new_prompt>{GOOD}</new_prompt>", "MAX_TOKENS", "cut off at the limit of its length"),
        (f"<new_prompt>{GOOD}</new_prompt>", "content_filter", "not whole (finish_reason 'content_filter')"),
        (f"<new_prompt>{GOOD}</new_prompt>", "incomplete", "not whole"),
        (None, "tool_calls", "it calls a tool"),
        ([{"type": "text", "text": "Draft {ticket}"}], "stop", "it does not have the new prompt"),
    ],
)
async def test_an_answer_that_the_model_did_not_end_is_asked_for_again_also_from_the_journal(
    content: Any, reason: str, why: str, tmp_path: Path
) -> None:
    first = PromptTemplate(template="Answer the ticket: {ticket}")
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]
    parts += [{"type": "text", "text": each} for each in ("<new_prompt>Better.", " {ticket}</new_prompt>")]
    client = Client((content, reason), (parts, "stop"))
    path = tmp_path / "journal.jsonl"
    for attempt in range(2):
        text, counts = await _reflect(client, Journal(path), first)
        assert text == "Better. {ticket}" and why in counts.last_problem
        assert (counts.calls, counts.replayed) == ((2, 0) if attempt == 0 else (0, 2))
    assert len(client.asked) == 2 and why in client.asked[1]["messages"][2]["content"]


async def _reflect(client: Client, journal: Journal, prompt: PromptTemplate) -> Any:
    async with ly.InMemoryLightningStore() as store:
        collector = RolloutCollector(store)
        asking = Reflector(client, None, collector, journal, temperature=1.0)  # type: ignore[arg-type]
        text = await asking.ask(
            "edit",
            "m",
            TAGS.text,
            lambda answer: proposed_prompt(answer, prompt, TAGS, max_characters=100),
            place="0/edit",
        )
        return text, asking.counts
