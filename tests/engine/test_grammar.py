"""Responses of a random model that must have a form: what it cannot say it does not say."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from leyden.engine import EmbeddedBackend
from tests.engine import tiny

pytest.importorskip("llguidance")

TEMPLATES = Path(__file__).parent / "templates"
USER = {"role": "user", "content": "?"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Lima"]}}, "required": ["city"]}
HOUR = {"type": "object", "properties": {"hour": {"$ref": "#/$defs/hour"}}, "$defs": {"hour": {"enum": [1, 2, 3]}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": schema}}
    for name, schema in (("weather", CITY), ("clock", HOUR))
]
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}, "logprobs": True}


@pytest.fixture
def template() -> str:
    return "qwen2.5"


def model() -> Any:
    return tiny.model(max_position_embeddings=4096, vocab_size=264)


def tokenizer(template: str) -> Any:
    more = {"mistral": ["[TOOL_CALLS]"], "qwen2.5": ["<tool_call>", "</tool_call>"]}.get(template, [])
    end = "<|eot_id|>" if template == "llama3.1" else "<|im_end|>"
    return tiny.tokenizer((TEMPLATES / f"{template}.jinja").read_text(), end=end, more=more)


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, EmbeddedBackend]]:
    """Engines by template, started when a test asks for one."""
    running: dict[str, EmbeddedBackend] = {}
    yield running
    for backend in running.values():
        asyncio.run(backend.stop())


@pytest.fixture
async def client(template: str, backends: dict[str, EmbeddedBackend]) -> AsyncIterator[openai.AsyncOpenAI]:
    if template not in backends:
        backends[template] = EmbeddedBackend(model(), tokenizer=tokenizer(template))
        await backends[template].start()
    address = backends[template].endpoint().endpoint
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": "policy", "messages": [USER], "max_tokens": 300, **IDS, **options}
    )


@pytest.mark.parametrize("template", ["qwen2.5", "llama3.1", "mistral"])
async def test_required_calls_are_calls_of_the_tools_with_arguments_as_their_schemas_say(client: openai.AsyncOpenAI):
    for seed in range(3):
        answer = await ask(client, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments in ({"city": "Paris"}, {"city": "Lima"})
        else:
            assert (call.function.name, arguments) in [("clock", {}), *(("clock", {"hour": n}) for n in (1, 2, 3))]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None


async def test_a_named_tool_is_the_one_that_is_called(client: openai.AsyncOpenAI):
    for name in ("weather", "clock"):
        choice = {"type": "function", "function": {"name": name}}
        answer = (await ask(client, tools=TOOLS, tool_choice=choice, n=2, seed=1)).choices
        assert [[call.function.name for call in each.message.tool_calls] for each in answer] == [[name]] * 2


@pytest.mark.parametrize("template", ["qwen2.5", "llama3.1", "mistral"])
async def test_a_named_tool_is_called_once_though_it_is_the_only_one(client: openai.AsyncOpenAI):
    """With a tool whose calls are short, a random model writes several whenever it may."""
    named = {"type": "function", "function": {"name": "clock"}}
    once: list[dict[str, Any]] = [
        {"tool_choice": named},
        {"tool_choice": named, "parallel_tool_calls": True},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ]
    for seed in range(4):
        for options in once:
            answer = (await ask(client, tools=TOOLS[1:], seed=seed, **options)).choices[0]
            assert len(answer.message.tool_calls) == 1, options
            assert answer.finish_reason == "tool_calls"


async def test_required_calls_may_be_several_unless_the_request_says_otherwise(client: openai.AsyncOpenAI):
    answers = [await ask(client, tools=TOOLS[1:], tool_choice="required", seed=seed) for seed in range(6)]
    assert max(len(answer.choices[0].message.tool_calls) for answer in answers) > 1


async def test_json_follows_its_schema_whole_and_as_a_stream(client: openai.AsyncOpenAI):
    schema = {"name": "city", "schema": CITY}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}, "seed": 3}
    whole = (await ask(client, **asked)).choices[0]
    assert json.loads(whole.message.content)["city"] in ("Paris", "Lima")
    assert whole.finish_reason == "stop"
    text = "".join([chunk.choices[0].delta.content async for chunk in await ask(client, **asked, stream=True)])
    assert text == whole.message.content


async def test_with_tools_a_json_response_is_a_call_or_json(client: openai.AsyncOpenAI):
    schema = {"name": "n", "schema": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}, "tools": TOOLS}
    for seed in range(3):
        message = (await ask(client, **asked, seed=seed, parallel_tool_calls=False)).choices[0].message
        assert message.tool_calls or json.loads(message.content) == {"n": 1}


async def test_a_json_object_is_one(client: openai.AsyncOpenAI):
    choice = (await ask(client, response_format={"type": "json_object"}, temperature=0, max_tokens=800)).choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:  # an unconstrained random model does not begin with a brace
        assert choice.message.content.startswith("{")


async def test_log_probabilities_are_those_of_what_was_allowed(client: openai.AsyncOpenAI, template: str):
    """Independently: the model's own logits, of which only P and L may follow the opening quote."""
    schema = {"name": "city", "schema": CITY}
    answer = await ask(client, response_format={"type": "json_schema", "json_schema": schema}, seed=4)
    choice = answer.choices[0]
    text = tokenizer(template)
    place = len('{"city": "')
    assert choice.message.content[place] in "PL"
    ids = torch.tensor([answer.prompt_token_ids + choice.token_ids])
    with torch.no_grad():
        logits_V = model()(ids).logits[0, len(answer.prompt_token_ids) + place - 1]
    allowed = text.convert_tokens_to_ids(["P", "L"])
    wanted = torch.log_softmax(logits_V[allowed], -1)[allowed.index(choice.token_ids[place])]
    logprobs = [token.logprob for token in choice.logprobs.content]
    assert logprobs[place] == pytest.approx(float(wanted), abs=1e-4)
    assert logprobs[:place] + logprobs[place + 1 :] == [0.0] * (len(logprobs) - 1)  # nothing else was free


async def test_objects_have_the_properties_that_the_schema_names_at_every_depth(client: openai.AsyncOpenAI):
    inner = {"type": "object", "properties": {"x": {"enum": [{"properties": {}}]}}}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/inner"}},
        "required": ["a"],
        "$defs": {"inner": inner},
    }
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    for seed in range(3):
        content = (await ask(client, **asked, seed=seed)).choices[0].message.content
        assert json.loads(content) in ({"a": {}}, {"a": {"x": {"properties": {}}}})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_choice": "required"}, "'required' needs 'tools'"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice must be 'none', 'auto', 'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "cook"}}},
            "'cook', which is not among the tools: weather, clock",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
            r"response_format.json_schema.schema: type cannot be enforced by a grammar \(Invalid type: thing\)",
        ),
    ],
)
async def test_a_form_that_cannot_be_had_is_refused(client: openai.AsyncOpenAI, options: dict[str, Any], says: str):
    with pytest.raises(openai.BadRequestError, match=says):
        await ask(client, **options)


async def test_a_keyword_that_cannot_be_held_is_refused_by_its_path(client: openai.AsyncOpenAI):
    faults: dict[str, Any] = {
        "uniqueItems": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        "not": {"type": "integer", "not": {"const": 3}},
        "pattern": {"type": "string", "pattern": "^(?=.*x)[a-z]{3}$"},
        "$ref": {"$ref": "#/$defs/nowhere"},
        "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    }
    for keyword, part in faults.items():
        schema = {"type": "object", "properties": {"p": part, "q": {"type": "boolean"}}, "required": ["p"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        where = re.escape(f"tools[2].function.parameters.properties.p: {keyword} cannot be enforced")
        with pytest.raises(openai.BadRequestError, match=where) as refused:
            await ask(client, tools=[*TOOLS, tool], tool_choice="required")
        assert "\n" not in str(refused.value)
        assert refused.value.param == "tools"
        assert (await ask(client, tools=[*TOOLS, tool], max_tokens=2)).choices, "nothing is enforced without a choice"


async def test_the_arguments_of_a_call_are_an_object_whatever_else_the_schema_admits(client: openai.AsyncOpenAI):
    def tool(kind: Any) -> Any:
        schema = {"type": kind, "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
        return {"type": "function", "function": {"name": "f", "parameters": schema}}

    for seed in range(4):
        choice = (await ask(client, tools=[tool(["null", "object"])], tool_choice="required", seed=seed)).choices[0]
        assert all(json.loads(call.function.arguments).keys() == {"x"} for call in choice.message.tool_calls)
        assert choice.message.tool_calls
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.parameters: type cannot be enforced"):
        await ask(client, tools=[tool("array")], tool_choice="required")


@pytest.mark.parametrize("template", ["qwen3-coder"])
async def test_a_form_of_calls_that_has_no_grammar_is_refused(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError, match="'qwen3_coder' cannot be enforced here; use tool_choice='auto'"):
        await ask(client, tools=TOOLS, tool_choice="required")


async def test_without_the_package_the_refusal_names_it(client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    never = {"name": "n", "schema": {"const": "never asked before"}}
    with pytest.raises(openai.BadRequestError, match=r"needs llguidance.* install the extra 'grammar'"):
        await ask(client, response_format={"type": "json_schema", "json_schema": never})
