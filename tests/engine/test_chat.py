"""Chat templates of well-known models: which form of calls they have, what they can express, what the next turn continues.

The templates are in `templates`, as their makers publish them or, where the first line says so, the part that matters.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden._lib.host.http import Refusal
from leyden.engine.chat_prompts import Chat
from leyden.engine.text import Text
from leyden.engine.tools import PARSERS, ToolCall, parse
from leyden.engine.turns import Turns
from leyden.engine.wire import ChatRequest, parse_request
from tests.engine import tiny

TEMPLATES = Path(__file__).parent / "templates"
FORMS = {
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "hermes3": "hermes",
    "qwen3-coder": "qwen3_coder",
    "llama3.1": "llama3_json",
    "mistral": "mistral",
}
END = 2
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": ["boolean", "null"]},
        "parts": {"anyOf": [{"type": "array"}, {"type": "object"}]},
        "maybe": {"type": ["string", "null"]},
    },
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "Where is it?"}


def chat(name: str) -> Chat:
    end = "<|eot_id|>" if name == "llama3.1" else "<|im_end|>"
    more = ["[TOOL_CALLS]"] if name == "mistral" else []
    tokenizer = tiny.tokenizer((TEMPLATES / f"{name}.jinja").read_text(), end=end, more=more)
    return Chat(Text(tokenizer), model="policy", eos_ids=frozenset([END]), tool_parser=None)


CHATS = {name: chat(name) for name in FORMS}


def request(messages: list[Any], tools: Any = (TOOL,), **options: Any) -> ChatRequest:
    body = {"model": "policy", "messages": messages, "tools": list(tools), **options}
    return parse_request(json.dumps(body).encode(), ChatRequest)


def turn(call_id: str, call: ToolCall) -> list[Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": "here"},
    ]


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_the_parser_is_the_one_that_reads_what_the_template_writes(name: str, form: str):
    assert CHATS[name].parser is PARSERS[form]


TEXTS = st.text(st.sampled_from('ab \n"\\\u00e9\U0001f600{}[],:;'), max_size=8)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXTS, lambda x: st.lists(x, max_size=2), max_leaves=3)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-(10**9), 10**9),
        "flag": st.none() | st.booleans(),
        "parts": st.lists(JSON, max_size=2) | st.dictionaries(TEXTS, JSON, max_size=2),
        "maybe": st.none() | TEXTS.filter(lambda text: text != "None"),
    },
)


@settings(max_examples=40)
@given(st.sampled_from(sorted(FORMS)), ARGUMENTS)
def test_a_call_that_a_template_writes_is_read_back(name: str, arguments: dict[str, Any]):
    begun = CHATS[name].prompt(request([USER]))
    whole = CHATS[name].prompt(request([USER, *turn("abcdefghi", ToolCall("look", arguments))]))
    assert whole.text.startswith(begun.text)
    rest = whole.text[len(begun.text) :]
    written = rest[: rest.index("<|eot_id|>" if name == "llama3.1" else "<|im_end|>")]
    parser = CHATS[name].parser
    assert parser is not None
    assert parse(written, parser, {"look": PARAMETERS}) == ("", [ToolCall("look", arguments)])


SAYS = {
    "hermes": '<tool_call>{"arguments":{"text":"x"},"name":"look"}</tool_call>',
    "qwen3_coder": "\n<function=look><parameter=text>x</parameter></function>",
    "llama3_json": '{ "parameters": {"text":"x"}, "name": "look" }',
    "mistral": '[TOOL_CALLS] [{"arguments":{"text":"x"},"name":"look"}]',
}


@pytest.mark.parametrize("name", FORMS)
def test_the_next_turn_continues_what_was_sampled_unless_the_template_adds_to_it(name: str):
    asked = request([USER])
    prompt = CHATS[name].prompt(asked)
    sampled = [*CHATS[name]._text.encode(SAYS[FORMS[name]], special=False), END]
    reply = CHATS[name].reply(asked, prompt, 0)
    content, calls = reply.advance(sampled, final=True)
    assert (content, reply.calls) == ("", [ToolCall("look", {"text": "x"})])
    CHATS[name].ended(asked, prompt, sampled, reply)
    following = CHATS[name].prompt(request([USER, *turn(calls[0]["id"], reply.calls[0])]))
    begun = [*prompt.token_ids, *sampled]
    if name == "mistral":  # it writes the id of the call, which the model did not
        assert following.token_ids == CHATS[name]._text.encode(following.text, special=False)
    else:
        assert following.token_ids[: len(begun)] == begun
        rest = CHATS[name]._text.tokenizer.decode(following.token_ids[len(begun) - 1 :])
        assert following.text.endswith(rest)


def test_a_template_that_drops_reasoning_is_obeyed():
    """Qwen3 drops the reasoning of earlier questions, so the prompt must not continue the ids that hold it."""
    asked = request([USER])
    qwen = CHATS["qwen3"]
    prompt = qwen.prompt(asked)
    sampled = [*qwen._text.encode("<think>\nHm.\n</think>\n\n" + SAYS["hermes"], special=False), END]
    reply = qwen.reply(asked, prompt, 0)
    _, calls = reply.advance(sampled, final=True)
    qwen.ended(asked, prompt, sampled, reply)
    messages = [USER, *turn(calls[0]["id"], reply.calls[0])]
    messages[1]["content"] = reply.content
    begun = [*prompt.token_ids, *sampled]
    assert qwen.prompt(request(messages)).token_ids[: len(begun)] == begun
    later = qwen.prompt(request([*messages, {"role": "user", "content": "Thanks."}]))
    assert "Hm." not in later.text
    assert later.token_ids == qwen._text.encode(later.text, special=False)


def test_tokens_behind_a_stop_string_are_not_put_back():
    asked = request([USER], stop="Observation")
    qwen = CHATS["qwen2.5"]
    prompt = qwen.prompt(asked)
    sampled = qwen._text.encode(SAYS["hermes"] + "Observation", special=False)
    reply = qwen.reply(asked, prompt, 0)
    _, calls = reply.advance(sampled, final=True)
    qwen.ended(asked, prompt, sampled, reply)
    following = qwen.prompt(request([USER, *turn(calls[0]["id"], reply.calls[0])]))
    assert following.token_ids == qwen._text.encode(following.text, special=False)


def test_turns_that_are_not_used_are_forgotten_first():
    turns = Turns(["<|im_end|>"], max_tokens=8)
    for name in "abc":
        turns.add((name,), "prompt", [1, 2], [3, 4], ("", []), "")
        turns.longest("prompt<|im_end|>", [("a",)], lambda _: ("", []))
    kept = [name for name in "abc" if turns.longest("prompt<|im_end|>", [(name,)], lambda _: ("", []))]
    assert kept == ["a", "c"]


def test_the_last_turn_of_a_conversation_is_forgotten_last():
    turns = Turns(["<|im_end|>"], max_tokens=12)
    turns.add(("other",), "prompt", [1, 2], [3, 4], ("", []), "")
    turns.add(("first",), "prompt", [1, 2], [3, 4], ("", []), "")
    turns.add(("second",), "prompt", [1, 2], [3, 4], ("", []), "", before=("first",))
    turns.add(("new",), "prompt", [1, 2], [3, 4], ("", []), "")
    assert [(name,) in turns for name in ("other", "first", "second", "new")] == [True, False, True, True]


def test_a_prompt_is_remembered_and_told_apart_from_others():
    qwen = CHATS["qwen2.5"]
    first = qwen.prompt(request([USER]))
    assert qwen.prompt(request([dict(USER)])) is first
    assert qwen.prompt(request([{**USER, "content": "b"}])).token_ids != first.token_ids
    assert qwen.prompt(request([USER], tools=[])).token_ids != first.token_ids


def test_one_tool_has_one_rendering_and_no_word_of_the_servers():
    function = TOOL["function"]
    shuffled = {"strict": True, **dict(reversed(function.items()))}
    prompts = [
        CHATS["qwen3"].prompt(request([USER], [{"function": it, "type": "function"}])) for it in (shuffled, function)
    ]
    assert prompts[0].text == prompts[1].text


def test_the_next_turns_prompt_extends_this_ones_ids():
    plain = Chat(Text(tiny.tokenizer()), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    messages = [{"role": "user", "content": "0..9"}]
    prompt = plain.prompt(request(messages, []))
    messages += [{"role": "assistant", "content": "5"}, {"role": "user", "content": "higher"}]
    begun = [*prompt.token_ids, *plain._text.encode("5", special=False), END]
    assert plain.prompt(request(messages, [])).token_ids[: len(begun)] == begun


SHOWS_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
ODD = (
    SHOWS_TOOLS + "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "says"),
    [
        (tiny.TEMPLATE, [USER], [TOOL], "'policy' has no place for tools"),
        (
            SHOWS_TOOLS + tiny.TEMPLATE,
            [USER, *turn("a", ToolCall("look", {}))],
            [TOOL],
            "drops tool calls or their results",
        ),
        (tiny.TEMPLATE, [USER, *turn("a", ToolCall("look", {}))], [], "the role 'tool'"),
        (ODD, [USER], [TOOL], r"tool_parser \(known: hermes, qwen3_coder"),
        ("{{ raise_exception('only system messages') }}", [USER], [], "refuses the messages: only system messages"),
    ],
)
def test_a_request_that_the_template_cannot_express_is_refused(template: str, messages: Any, tools: Any, says: str):
    odd = Chat(Text(tiny.tokenizer(template)), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    with pytest.raises(Refusal, match=says):
        odd.prompt(request(messages, tools))


def test_a_parser_that_is_named_is_used_and_no_choice_needs_none():
    named = Chat(Text(tiny.tokenizer(ODD)), model="policy", eos_ids=frozenset([END]), tool_parser="hermes")
    assert named.parser is PARSERS["hermes"]
    assert named.prompt(request([USER])).token_ids
    unnamed = Chat(Text(tiny.tokenizer(ODD)), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    assert unnamed.prompt(request([USER], tool_choice="none")).token_ids


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(**changes: Any) -> list[Any]:
    return [USER, {"role": "assistant", "tool_calls": [{**CALL, **changes}]}]


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([USER, {"role": "function", "name": "f", "content": "x"}], [], r"messages\[1\] is in OpenAI's old form"),
        ([{**USER, "tool_calls": [CALL]}], [], r"messages\[0\].role must be 'assistant', because"),
        (calling(type="custom"), [], r"messages\[1\].tool_calls\[0\].type must be 'function', got \"custom\""),
        (calling(function={"name": "f", "arguments": "{"}), [], r"tool_calls\[0\].function.arguments is not JSON"),
        (calling(function={"name": "f", "arguments": "[]"}), [], r"arguments must be the JSON text of an object"),
        (calling(function={"arguments": "{}"}), [], r"function.name must be a string that is not empty, got null"),
        ([USER], [{"type": "web_search"}], r"tools\[0\].type must be 'function'"),
        ([USER], [{"type": "function"}], r"tools\[0\].function must be an object, got null"),
        (
            [USER],
            [{"type": "function", "function": {"name": ""}}],
            r"tools\[0\].function.name must be a string that is not empty",
        ),
        ([USER], [TOOL, TOOL], "two functions with the name 'look'"),
    ],
)
def test_a_malformed_message_or_tool_is_named(messages: Any, tools: Any, says: str):
    with pytest.raises(Refusal, match=says):
        request(messages, tools)


def test_messages_reach_the_template_in_its_own_form():
    asked = request(
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "Done.", "tool_calls": []},
        ]
    )
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x", "name": "f"},
        {"role": "assistant", "content": "Done."},
    ]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (r'[{"role": "user", "content": "\ud83d"}]', r"'\\ud83d', which is half a character"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
    ],
    ids=["surrogate", "depth"],
)
def test_a_body_that_no_template_could_take_is_refused(messages: str, says: str):
    with pytest.raises(Refusal, match=says):
        parse_request(f'{{"model": "policy", "messages": {messages}}}'.encode(), ChatRequest)


def test_a_character_that_is_escaped_as_a_pair_is_read():
    body = rb'{"model": "policy", "messages": [{"role": "user", "content": "\ud83d\ude80"}]}'
    assert parse_request(body, ChatRequest).messages[0]["content"] == "\N{ROCKET}"


def turns_of(content: str) -> str:
    """A template that writes each content by an expression."""
    return f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{content}<|im_end|>\n{{% endfor %}}<|im_start|>assistant\n"


EACH_PART = "{% for part in m.content %}{{ part.text }}{% endfor %}"
PLAIN = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "<think>Hm.</think>\n\nIn it."},
    {"role": "user", "content": " Really?\n"},
]


@pytest.mark.parametrize(
    "content",
    [
        EACH_PART,
        "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}",
        "{{ m.content[0].text }}",
        "{{ m.content | map(attribute='text') | join }}",
        "{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}" + EACH_PART,
        "{% if m.role == 'user' %}" + EACH_PART + "{% else %}{{ m.content }}{% endif %}",
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ m.content | e }}",
        "{{ m.content.split('</think>')[-1] | trim }}",
    ],
)
@pytest.mark.parametrize("as_parts", [False, True])
def test_every_text_is_in_the_prompt_whether_a_template_reads_strings_or_parts(content: str, as_parts: bool):
    made = Chat(Text(tiny.tokenizer(turns_of(content))), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    sent = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in PLAIN] if as_parts else PLAIN
    prompt = made.prompt(request(sent, []))
    at = 0
    for text in ("Be brief.", "Where is it?", "In it.", "Really?"):
        at = prompt.text.index(text, at)
    assert "'type'" not in prompt.text
    assert "leyden" not in prompt.text
    assert made._text.decode(prompt.token_ids) == prompt.text.replace("<|im_start|>", "").replace("<|im_end|>", "")


CALLED = [USER, *turn("a", ToolCall("look", {}))]


@pytest.mark.parametrize(
    ("content", "messages", "says"),
    [
        ("{% if m.role != 'system' %}{{ m.content }}{% endif %}", PLAIN, r"messages\[0\], of the role 'system'"),
        (
            "{% if m.role != 'system' %}{{ m.content }}{% endif %}",
            [USER, {"role": "developer", "content": "Be brief."}],
            r"messages\[1\], of the role 'system'",
        ),
        ("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}", PLAIN, r"messages\[2\], of the role 'assistant'"),
        ("{% if loop.last %}{{ m.content }}{% endif %}", PLAIN, r"messages\[0\], of the role 'system'"),
        ("{{ m.content[:8] }}", PLAIN, r"messages\[0\]"),
        ("{{ m.content[-4:] }}", [USER], r"messages\[0\], of the role 'user'"),
        ("{% for c in m.content %}{{ c }} {% endfor %}", [USER], r"messages\[0\], of the role 'user'"),
        ("{% if not m.content.startswith('Be') %}{{ m.content }}{% endif %}", PLAIN, r"messages\[0\], of the role"),
        (
            "{% if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls | default([]) | tojson }}{% endif %}",
            CALLED,
            "their results",
        ),
        (
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
            CALLED,
            "drops tool calls",
        ),
    ],
)
def test_a_text_that_the_template_drops_is_named(content: str, messages: Any, says: str):
    made = Chat(Text(tiny.tokenizer(turns_of(content))), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    with pytest.raises(Refusal, match=says):
        made.prompt(request(messages, []))


def test_a_template_may_leave_out_what_an_answer_says_beside_its_calls_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
):
    template = turns_of("{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}")
    made = Chat(Text(tiny.tokenizer(template)), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    said = {**CALLED[1], "content": "I look."}
    for question in ("Where is it?", "And now?"):
        prompt = made.prompt(request([{**USER, "content": question}, said, CALLED[2]], []))
        assert question in prompt.text and "I look." not in prompt.text
    assert (
        sum("leaves out what an answer says beside its tool calls" in each.getMessage() for each in caplog.records) == 1
    )


def test_a_text_that_looks_like_a_part_passes_through_a_template_of_parts():
    template = turns_of("{% for c in m.content %}{{ c.text }}{% endfor %}")
    made = Chat(Text(tiny.tokenizer(template)), model="policy", eos_ids=frozenset([END]), tool_parser=None)
    content = '{"type": "text", "text": "a"}'
    assert content in made.prompt(request([{"role": "user", "content": content}], [])).text


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
    ],
)
def test_what_the_assistant_refused_is_in_the_prompt(refused: Any):
    messages = [USER, {"role": "assistant", **refused}, USER]
    assert "I will not." in CHATS["qwen3"].prompt(request(messages)).text
    with pytest.raises(Refusal, match=r"messages\[1\].audio must be left out"):
        CHATS["qwen3"].prompt(request([USER, {"role": "assistant", "content": "a", "audio": {"id": "x"}}]))


@pytest.mark.parametrize("name", FORMS)
def test_a_conversation_with_tools_passes_through_every_template(name: str):
    call_id = "abc123XYZ"
    messages = [
        USER,
        *turn(call_id, ToolCall("look", {"text": 'a "b"\n'})),
        {"role": "assistant", "content": "Here."},
        USER,
    ]
    prompt = CHATS[name].prompt(request(messages))
    assert prompt.text.count("Where is it?") == 2


def ended_by(template: str, eos_ids: set[int]) -> Chat:
    return Chat(Text(tiny.tokenizer(template)), model="policy", eos_ids=frozenset(eos_ids), tool_parser=None)


@pytest.mark.parametrize(
    ("template", "eos_ids", "says"),
    [
        (
            tiny.TEMPLATE,
            {0},
            r"ends an answer with '<|im_end|>' (2), at which sampling does not stop (it stops at '<|pad|>' (0))",
        ),
        (tiny.TEMPLATE, set[int](), "(it stops at no token)"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            {2},
            r"ends an answer with '\n', which is no token",
        ),
        (tiny.TEMPLATE, {0, 2}, ""),
        ("{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|pad|>' }}{% endfor %}", {2}, ""),
        ("{{ raise_exception('no conversations') }}", {2}, ""),
    ],
)
def test_an_end_of_turn_at_which_sampling_does_not_stop_is_named_at_the_start(
    template: str, eos_ids: set[int], says: str, caplog: pytest.LogCaptureFixture
):
    ended_by(template, eos_ids)
    assert len(caplog.records) == bool(says)
    assert says in caplog.text


def test_templates_of_well_known_models_end_their_turns(caplog: pytest.LogCaptureFixture):
    for name in FORMS:
        chat(name)
    assert [each.message for each in caplog.records if "ends an answer" in each.message] == []


TOLD = "{{ tool.function.name }}: {{ tool.function.description }}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ tool | tojson }}", None),
        ("{{ tool.function | string }}", None),
        (TOLD + "{{ tool.function.parameters | tojson }}", None),
        ("", None),  # such requests are refused
        ("{{ tool.function.name }}{{ tool.function.parameters | tojson }}", "leaves out: the descriptions of tools. "),
        (
            TOLD + "{% for p in tool.function.parameters.properties %}{{ p }}{% endfor %}",
            "leaves out: the descriptions of parameters, the names of fields within parameters, the descriptions of fields",
        ),
        (TOLD, "leaves out: the names of parameters, the descriptions of parameters, the names of fields within"),
    ],
)
def test_a_template_that_leaves_out_parts_of_tools_is_named_at_the_start(
    template: str, says: str | None, caplog: pytest.LogCaptureFixture
):
    ended_by(f"{{% for tool in tools or [] %}}{template}{{% endfor %}}" + tiny.TEMPLATE, {0, 2})
    assert len(caplog.records) == (says is not None)
    assert (says or "") in caplog.text


def test_long_conversations_are_checked_in_time_that_grows_with_their_length():
    tokenizer = tiny.tokenizer((TEMPLATES / "qwen2.5.jinja").read_text())
    one = Chat(Text(tokenizer), model="policy", eos_ids=frozenset([2]), tool_parser=None)
    messages = [{"role": "user", "content": f"message {index} " + "word " * 30} for index in range(3000)]
    began = time.process_time()
    one._render(messages, [])
    rendered = time.process_time() - began
    began = time.process_time()
    one._proven(messages, [], {})
    assert time.process_time() - began < 8 * rendered + 0.05
