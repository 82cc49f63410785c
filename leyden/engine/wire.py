"""Validate requests in OpenAI's wire format and read them into a `CompletionRequest`.

Pure functions; they know no model and no server. `return_token_ids` is vLLM's convention. `conversation` reads messages
and tools. Sampling parameters that this engine lacks are accepted at their neutral values (`leyden.dialects.sampling`),
and so are the options of other servers.

To accept a new field, add it to a body model with its type, its default and a description of the values that it takes,
which the error message quotes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from leyden._lib.json import Json
from leyden.dialects.sampling import (
    ABOUT_THE_CALL,
    OPTIONS,
    SAMPLING_PARAMETERS,
    WITH_ANOTHER,
    equals_any,
    is_neutral,
    stop_strings,
)
from leyden.engine.conversation import read_messages, read_response_format, read_tool_choice, read_tools
from leyden.engine.refusal import bad_request, shown

Kind = Literal["chat.completion", "text_completion"]


# Types of fields. A description completes the message "FIELD must be ...".
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Count = Annotated[int | None, Field(ge=1, description="an integer of at least 1")]
Flag = Annotated[bool, Field(description="true or false")]

_INTEGERS = ("max_tokens", "max_completion_tokens", "n", "seed")
"""Fields that take a whole float such as 3.0 for an integer, as the gateway does."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: parameter.neutral for name, parameter in SAMPLING_PARAMETERS.items()},
    **OPTIONS,
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
}
"""The values that change nothing, of options that this engine lacks."""


class _StreamOptions(BaseModel):
    """The object `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Any = None
    include_obfuscation: Any = None


class _Thinking(BaseModel):
    """The object `thinking` of Anthropic's API."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count = None
    display: Any = None


class CompletionRequest(BaseModel):
    """A validated request: the fields that chat and text completions share. A description completes the error message
    "FIELD must be ...".

    A field of the type Any is validated where it is read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    kind: ClassVar[Kind]
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    model: Annotated[str, Field(min_length=1, description="a string")]
    max_tokens: Count = None
    """The most response tokens; None: as many as the context has room for."""
    temperature: Annotated[float, Field(ge=0, le=1000, description="a number from 0 to 1000")] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1, description="a number from 1e-06 to 1")] = 1.0
    stop: Annotated[str | list[str] | None, Field(description="a string or a list of strings")] = None
    stop_token_ids: Annotated[TokenIds | None, Field(description="a list of token ids")] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64, description=f"an integer from {-(2**63)} to {2**64}")] = (
        None
    )
    n: Annotated[int, Field(ge=1, le=128, description="an integer from 1 to 128")] = 1
    stream: Flag = False
    stream_options: Annotated[_StreamOptions | None, Field(description="an object with 'include_usage'")] = None
    return_token_ids: Flag = False
    logprobs: Flag = False

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(stop_strings(self.stop))

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(CompletionRequest):
    """A request for a chat completion. Messages and tools are in the form of chat templates."""

    kind = "chat.completion"
    neutral = _NEUTRAL | {
        "documents": ([],),
        "mm_processor_kwargs": ({},),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "include_reasoning": (True,),
        "context_management": ({}, {"edits": []}),
    }

    messages: Annotated[list[Any], Field(description="a list")]
    max_completion_tokens: Count = None
    tools: Annotated[list[Any], Field(description="a list")] = []
    tool_choice: Any = "auto"
    """"none", "auto" or "required"."""
    parallel_tool_calls: Flag = True
    """Whether a response may hold several calls."""
    response_format: Annotated[Json | None, Field(description="an object")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Field(description="one of 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'"),
    ] = None
    thinking: Annotated[
        _Thinking | None, Field(description="an object with the type 'enabled', 'adaptive' or 'disabled'")
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Field(description="one of 'low', 'medium', 'high'")
    ] = None
    chat_template_kwargs: Annotated[Json | None, Field(description="an object")] = None
    _callable_tools: tuple[str, ...] = ()
    _is_named: bool = False
    _json_schema: Json | None = None

    def model_post_init(self, context: Any) -> None:
        self.tools = read_tools(self.tools)
        choice: Any = self.tool_choice
        self._is_named = isinstance(choice, dict) and "function" in choice
        self.tool_choice, self._callable_tools = read_tool_choice(choice, self.tools)
        self.messages = read_messages(self.messages)
        # Required calls are the whole response, so no content could follow a schema.
        if self.response_format is not None and self.tool_choice != "required":
            self._json_schema = read_response_format(self.response_format)
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if taken := sorted(_OF_RENDERING.intersection(self.chat_template_kwargs or ())):
            raise bad_request(
                f"chat_template_kwargs has {taken[0]!r}, which the engine sets itself; remove it",
                param="chat_template_kwargs",
            )

    @property
    def template_options(self) -> Json:
        """The variables for the chat template, beside messages and tools: the request's own, and what it says about
        thinking, effort and verbosity, under the names that templates read.
        """
        options: Json = {}
        if self.reasoning_effort == "none":
            options |= {"enable_thinking": False, "thinking": False}
        elif self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        if self.thinking is not None:
            options |= dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
            if self.thinking.budget_tokens is not None:
                options["thinking_budget"] = self.thinking.budget_tokens
        if self.verbosity is not None:
            options["verbosity"] = self.verbosity
        return options | (self.chat_template_kwargs or {})

    @property
    def callable_tools(self) -> tuple[str, ...]:
        """The names of the tools that may be called: all, or the one that `tool_choice` named."""
        return self._callable_tools

    @property
    def may_call_often(self) -> bool:
        """Whether the response may hold several calls: a tool that `tool_choice` names is called once."""
        return self.parallel_tool_calls and not self._is_named

    @property
    def json_schema(self) -> Json | None:
        """The schema that the content must follow; None if the content is free."""
        return self._json_schema

    @property
    def may_call(self) -> bool:
        """Whether the response may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def constrained(self) -> bool:
        """Whether the response must follow a grammar: tool calls or JSON."""
        return self.tool_choice == "required" or self._json_schema is not None

    @property
    def schemas(self) -> dict[str, Json]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


_OF_RENDERING = {
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of `apply_chat_template` that are no variables of a template."""
Request = TypeVar("Request", bound=CompletionRequest)


def _alternatives(given: Any) -> bool:
    """Return whether the response has log-probabilities, given their number of alternatives: 0, or False for none."""
    if given is not False and (isinstance(given, bool) or given != 0):
        raise ValueError("no alternatives are supported")
    return given is not False


class TextRequest(CompletionRequest):
    """A request for a text completion."""

    kind = "text_completion"
    neutral = _NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}

    prompt: Annotated[
        Text | Annotated[TokenIds, Field(min_length=1)], Field(description="a string or a list of token ids")
    ]
    max_tokens: Count = 16
    logprobs: Annotated[bool, BeforeValidator(_alternatives), Field(description="0 (nothing else is supported)")] = (
        False
    )


def parse_request(body: bytes, model: type[Request]) -> Request:
    """Return a request's body as a ChatRequest or a TextRequest. A field that is null gets its default.

    Raise Refusal, which names the first wrong field of the body and its value, for an invalid one.
    """
    try:
        data = json.loads(body)
        if b"\\ud" in body.lower():  # an escape that may be half of a surrogate pair, which cannot be encoded
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"the request body has a text with {error.object[error.start]!r}, which is half a character and cannot be tokenized"
        ) from error
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise bad_request(f"the request body must be a JSON object, got {type(data).__name__}")
    given, known = cast(Json, data), model.model_fields
    named = {name: value for name, value in given.items() if value is not None}
    for name in _INTEGERS:
        if isinstance(value := named.get(name), float) and value.is_integer():
            named[name] = int(value)
    problems = {name: fault for name in named if name not in known and (fault := _fault(name, named, model))}
    request = None
    try:
        request = model.model_validate({name: value for name, value in named.items() if name in known})
    except ValidationError as error:
        for each in error.errors(include_url=False, include_context=False, include_input=False):
            name = str(each["loc"][0])
            got = f"must be {known[name].description}, got {shown(named[name])}" if name in named else "is missing"
            problems[name] = got
    if request is None or problems:
        name = next((name for name in given if name in problems), next(iter(problems)))
        raise bad_request(f"{name!r} {problems[name]}", param=name)
    return request


def _fault(name: str, request: Json, model: type[CompletionRequest]) -> str | None:
    """Return why a field that the model lacks cannot be accepted; None if its value changes nothing."""
    value, neutral = request[name], model.neutral.get(name, ())
    if name in ABOUT_THE_CALL or name in WITH_ANOTHER or equals_any(value, neutral):
        return None
    if name in SAMPLING_PARAMETERS and is_neutral(name, value, request):
        return None
    if not neutral:
        return "is not supported here; remove it from the request"
    return f"must be {' or '.join(map(json.dumps, neutral))} (nothing else is supported), got {shown(value)}"
