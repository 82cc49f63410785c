"""Prompts that an agent has hard-coded are found in what it has sent."""

from __future__ import annotations

import json
import string
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from leyden.algorithm.prompts.extraction import Conversation, ExtractedPrompt, Message, extract_prompts


def sent(task: Any, *texts: str, role: str = "user") -> Conversation:
    return Conversation(task, [Message(role, text, number, 0) for number, text in enumerate(texts)])


def filled(prompt: ExtractedPrompt, task: Any) -> str:
    """Return the prompt with the values that its expressions read from a task."""
    values = {
        name: eval(str(each.expression), {"task": task, "json": json}) for name, each in prompt.placeholders.items()
    }
    return prompt.template.format(**values)


def only(conversations: list[Conversation]) -> ExtractedPrompt:
    [prompt] = extract_prompts(conversations)
    return prompt


TOPICS = ["refund", "delivery", "invoice"]


def test_values_of_the_task_become_placeholders_with_the_names_of_their_fields() -> None:
    tasks = [{"topic": TOPICS[number % 3], "number": number % 7} for number in range(50)]
    prompt = only(
        [sent(task, f"Answer the ticket {task['number']} about {task['topic']}, within 3 days.") for task in tasks]
    )
    assert prompt.template.template == "Answer the ticket {number} about {topic}, within 3 days."
    assert {name: each.expression for name, each in prompt.placeholders.items()} == {
        "number": "task['number']",
        "topic": "task['topic']",
    }
    assert prompt.name == "prompt"
    assert prompt.rollouts == tuple(range(50))


def test_a_task_that_is_a_text_becomes_the_placeholder_task() -> None:
    texts = ["My parcel is late.", "I want a refund. Now!", "Where is the invoice?"]
    prompt = only([sent(text, f"Answer the customer. {text}") for text in texts])
    assert prompt.template.template == "Answer the customer. {task}"
    assert prompt.placeholders["task"].expression == "task"
    assert prompt.placeholders["task"].examples == tuple(texts)


def test_a_task_as_json_becomes_one_placeholder() -> None:
    tasks = [{"name": name, "age": age} for name, age in (("Zoë", 30), ("Bo", 41), ("Al", 5))]
    prompt = only([sent(task, f"Greet this person: {json.dumps(task, ensure_ascii=False)}") for task in tasks])
    assert prompt.template.template == "Greet this person: {task}"
    assert filled(prompt, tasks[0]) == 'Greet this person: {"name": "Zoë", "age": 30}'


def test_values_in_the_depth_of_a_task_are_found() -> None:
    tasks = [{"user": {"first name": name}, "tags": [tag, "x"]} for name, tag in (("Ann", "vip"), ("Bob", "new"))]
    prompt = only([sent(t, f"Dear {t['user']['first name']}, you are {t['tags'][0]} here.") for t in tasks])
    assert prompt.template.template == "Dear {user_first_name}, you are {tags_0} here."
    assert prompt.placeholders["tags_0"].expression == "task['tags'][0]"


def test_what_the_agent_computes_becomes_a_numbered_placeholder() -> None:
    found = ["the sky", "a tree. With leaves", "nothing at all"]
    prompt = only(
        [sent(number, f"Summarise what was found: {each}\nIn one sentence.") for number, each in enumerate(found)]
    )
    assert prompt.template.template == "Summarise what was found: {value_1}\nIn one sentence."
    assert prompt.placeholders["value_1"].expression is None
    assert prompt.placeholders["value_1"].examples == tuple(found)


def test_braces_of_the_text_are_doubled() -> None:
    prompt = only([sent(word, f'Reply as {{"answer": ...}} to {word}') for word in ("one", "two")])
    assert prompt.template.template == 'Reply as {{"answer": ...}} to {task}'
    assert filled(prompt, "two") == 'Reply as {"answer": ...} to two'


def test_a_field_that_is_always_the_same_stays_text() -> None:
    prompt = only([sent({"shop": "Acme", "q": q}, f"You work for Acme. Answer: {q}") for q in ("why?", "how?")])
    assert prompt.template.template == "You work for Acme. Answer: {q}"


def test_every_prompt_of_an_agent_of_several_calls_is_found_and_named() -> None:
    def conversation(number: int, topic: str) -> Conversation:
        messages = [
            Message("system", "You are a careful clerk.", 0, 0),
            Message("user", f"Make a plan for {topic}.", 0, 1),
            Message("user", f"Now write the answer about {topic}; the plan: step {number}", 1, 1),
        ]
        return Conversation({"topic": topic}, messages if number % 2 else messages[:2])

    found = extract_prompts([conversation(number, TOPICS[number % 3]) for number in range(12)])
    assert [(each.name, each.template.template) for each in found] == [
        ("system_prompt", "You are a careful clerk."),
        ("user_prompt", "Make a plan for {topic}."),
        ("user_prompt_2", "Now write the answer about {topic}; the plan: step {value_1}"),
    ]
    assert [len(each.rollouts) for each in found] == [12, 12, 6]
    assert [each.call for each in found] == [0, 0, 1]


def test_messages_that_users_wrote_are_no_prompt() -> None:
    tasks = ["Where is my parcel?", "I want my money back", "hello", "Is the shop open on Sunday?"]
    assert extract_prompts([sent(task, task) for task in tasks]) == []
    assert extract_prompts([sent(number, task) for number, task in enumerate(tasks)]) == []


def test_one_rollout_and_none_have_no_prompts() -> None:
    assert extract_prompts([]) == []
    assert extract_prompts([sent("x", "Answer the customer: x")]) == []


def test_tasks_without_values_that_differ_leave_the_message_as_it_is() -> None:
    assert (
        only([sent(None, "Write a short poem, please.") for _ in range(3)]).template.template
        == "Write a short poem, please."
    )


# ---- properties --------------------------------------------------------------------------------------------------------

_WORDS = st.text(string.ascii_lowercase, min_size=4, max_size=9)
_FIXED = st.lists(_WORDS, min_size=3, max_size=6).map(" ".join)
_VALUE = st.text(string.ascii_uppercase + "{}\n.?", min_size=1, max_size=12).filter(lambda text: bool(text.strip()))


@given(
    fixed=st.lists(_FIXED, min_size=2, max_size=4),
    data=st.data(),
)
def test_a_template_of_fields_is_recovered_exactly(fixed: list[str], data: st.DataObject) -> None:
    names = [f"field{number}" for number in range(len(fixed) - 1)]
    count = data.draw(st.integers(2, 6))
    columns = [data.draw(st.lists(_VALUE, min_size=count, max_size=count, unique=True)) for _ in names]
    tasks = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    wanted = "".join(f"{text} {{{name}}} " for text, name in zip(fixed, names, strict=False)) + fixed[-1]
    prompt = only([sent(task, wanted.format(**task)) for task in tasks])
    assert [filled(prompt, task) for task in tasks] == [wanted.format(**task) for task in tasks]
    if not any(task[a] in task[b] for task in tasks for a in names for b in names if a != b):
        assert prompt.template.template == wanted


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from("abc"), st.sampled_from(["a", "3", "", " ", "within 3", "{", "é x"]) | st.integers(0, 9)
            ),
            st.lists(st.text("ab3 {}.\n", max_size=30), max_size=4),
        ),
        max_size=8,
    )
)
def test_any_rollouts_give_templates_that_can_be_formatted(drawn: list[tuple[dict[str, Any], list[str]]]) -> None:
    conversations = [sent(task, *(f"Please think well. {text}" for text in texts)) for task, texts in drawn]
    for prompt in extract_prompts(conversations):
        assert set(prompt.template.placeholders) == set(prompt.placeholders)
        assert len(prompt.rollouts) >= 2
        fixed = prompt.template.format(**dict.fromkeys(prompt.placeholders, "\0")).split("\0")
        for number in prompt.rollouts:
            assert any(_matches(fixed, message.text) for message in conversations[number].messages)


def _matches(pieces: list[str], text: str) -> bool:
    """Return whether the pieces are in the text in order, the first at its start and the last at its end."""
    at = 0
    for number, piece in enumerate(pieces):
        found = text.startswith(piece) - 1 if number == 0 else text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return text.endswith(pieces[-1]) and (len(pieces) > 1 or text == pieces[0])


@pytest.mark.parametrize("size", [200])
def test_many_rollouts_with_long_computed_values_are_read_in_seconds(size: int) -> None:
    conversations = [
        sent(
            {"id": number},
            f"Question {number}. Documents: {' '.join(f'w{(number * k) % 97}' for k in range(300))}\nAnswer briefly.",
        )
        for number in range(size)
    ]
    assert only(conversations).template.template.endswith("\nAnswer briefly.")
