"""Validate requests in OpenAI's wire format and read them into a `CompletionRequest`.

Pure functions; they know no model and no server. `return_token_ids` is vLLM's convention.
`conversation` reads messages and tools.

To accept a new field, add it to a body model with its type, its default and a description of the
values that it takes, which the error message quotes. Then read it in `_request`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden.dialects import Json
from leyden.engine.conversation import read_messages, read_response_format, read_tool_choice, read_tools
from leyden.engine.refusal import bad_request, shown

Kind = Literal["chat.completion", "text_completion"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated request for a chat or text completion."""

    kind: Kind
    model: str
    messages: list[Json]
    """The messages in the form of chat templates; empty for a text completion."""
    tools: list[Json]
    """The tools in the form of chat templates."""
    tool_choice: Literal["none", "auto", "required"]
    callable_tools: tuple[str, ...]
    """The names of the tools that may be called: all, or the one that `tool_choice` names."""
    parallel_tool_calls: bool
    """Whether a response may hold several calls."""
    json_schema: Json | None
    """The schema that the content must follow; None if the content is free."""
    prompt: str | list[int]
    """The prompt as text or token ids; empty for a chat completion."""
    max_tokens: int | None
    """The most response tokens; None: as many as the context has room for."""
    temperature: float
    top_p: float
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool

    @property
    def may_call(self) -> bool:
        """Whether the response may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def may_choose(self) -> bool:
        """Whether the model may choose among all of the tools."""
        return len(self.callable_tools) == len(self.tools)

    @property
    def constrained(self) -> bool:
        """Whether the response must follow a grammar: tool calls or JSON."""
        return self.tool_choice == "required" or self.json_schema is not None

    @property
    def schemas(self) -> dict[str, Json]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}


# Types of fields. A description completes the message "FIELD must be ...".
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Count = Annotated[int | None, Field(ge=1, description="an integer of at least 1")]
Flag = Annotated[bool, Field(description="true or false")]
Zero = Annotated[float, Field(ge=0, le=0, description="0 (nothing else is supported)")]
No = Annotated[Literal[False], Field(description="false (nothing else is supported)")]


class _StreamOptions(BaseModel):
    """The object `stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Any = None
    include_obfuscation: Any = None


class _Body(BaseModel):
    """The fields that chat and text completions share. A description completes the error message
    "FIELD must be ...".

    A field of the type Any does not change the response, or is validated where it is read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1, description="a string")]
    max_tokens: Count = None
    temperature: Annotated[float, Field(ge=0, le=1000, description="a number from 0 to 1000")] = 1.0
    top_p: Annotated[float, Field(ge=1e-6, le=1, description="a number from 1e-06 to 1")] = 1.0
    stop: Annotated[Text | list[Text] | None, Field(description="a string or a list of strings")] = None
    stop_token_ids: Annotated[TokenIds | None, Field(description="a list of token ids")] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64, description=f"an integer from {-(2**63)} to {2**64}")] = (
        None
    )
    n: Annotated[int, Field(ge=1, le=128, description="an integer from 1 to 128")] = 1
    stream: Flag = False
    stream_options: Annotated[_StreamOptions | None, Field(description="an object with 'include_usage'")] = None
    return_token_ids: Flag = False
    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Annotated[Json | None, Field(max_length=0, description="{} (nothing else is supported)")] = None
    user: Any = None


class _ChatBody(_Body):
    """The body of a chat completion."""

    messages: Annotated[list[Any], Field(description="a list")]
    max_completion_tokens: Count = None
    logprobs: Flag = False
    top_logprobs: Zero = 0
    tools: Annotated[list[Any] | None, Field(description="a list")] = None
    tool_choice: Any = "auto"
    parallel_tool_calls: Flag = True
    response_format: Annotated[Json | None, Field(description="an object")] = None
    metadata: Any = None
    store: No = False
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class _TextBody(_Body):
    """The body of a text completion."""

    prompt: Annotated[
        Text | Annotated[TokenIds, Field(min_length=1)], Field(description="a string or a list of token ids")
    ]
    max_tokens: Count = 16
    logprobs: Annotated[
        Annotated[float, Field(ge=0, le=0)] | Literal[False] | None,
        Field(union_mode="left_to_right", description="0 (nothing else is supported)"),
    ] = None
    """The number of alternatives to each token. With 0, only the sampled tokens have
    log-probabilities."""
    echo: No = False
    best_of: Annotated[Literal[1], Field(description="1 (nothing else is supported)")] = 1


def parse_request(body: bytes, kind: Kind) -> CompletionRequest:
    """Return a request's body as a `CompletionRequest`. Raise Refusal, which names the field and
    its value, for an invalid one.
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
    return _request(_validated(cast(Json, data), _ChatBody if kind == "chat.completion" else _TextBody))


def _validated(given: Json, model: type[_ChatBody | _TextBody]) -> _ChatBody | _TextBody:
    """Return the body as `model`. A field that is null gets its default. Raise Refusal, which names
    the first wrong field of the body.
    """
    known = model.model_fields
    try:
        return model.model_validate(
            {name: value for name, value in given.items() if value is not None or name not in known}
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    problems = {str(each["loc"][0]): each["type"] for each in found}
    name = next((name for name in given if name in problems), next(iter(problems)))
    if name not in known:
        raise bad_request(f"{name!r} is not supported here; remove it from the request", param=name)
    if given.get(name) is None:
        raise bad_request(f"{name!r} is missing", param=name)
    raise bad_request(f"{name!r} must be {known[name].description}, got {shown(given[name])}", param=name)


def _request(body: _ChatBody | _TextBody) -> CompletionRequest:
    """Return a validated body of the chat or the text-completions API as one kind of request."""
    chat = body if isinstance(body, _ChatBody) else None
    tools = read_tools((chat and chat.tools) or [])
    tool_choice, callable_tools = read_tool_choice(chat.tool_choice if chat else "auto", tools)
    response_format = chat and chat.response_format
    if tool_choice == "required":  # the response consists of calls, and has no content that could follow a schema
        response_format = None
    stop = body.stop or ()
    return CompletionRequest(
        kind="chat.completion" if chat else "text_completion",
        model=body.model,
        messages=read_messages(chat.messages) if chat else [],
        tools=tools,
        tool_choice=tool_choice,
        callable_tools=callable_tools,
        parallel_tool_calls=chat.parallel_tool_calls if chat else True,
        json_schema=None if response_format is None else read_response_format(response_format),
        prompt=body.prompt if isinstance(body, _TextBody) else "",
        max_tokens=(chat and chat.max_completion_tokens) or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=body.seed,
        n=body.n,
        stream=body.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=chat.logprobs if chat else isinstance(body.logprobs, float),
        return_token_ids=body.return_token_ids,
    )
