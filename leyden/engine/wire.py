"""Validate requests in OpenAI's wire format and read them into a `CompletionRequest`.

Pure functions; they know no model and no server. `return_token_ids` is vLLM's convention.
`conversation` reads messages and tools.

To accept a new field, add it to a body model with its type, its default and a description of the
values that it takes, which the error message quotes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from leyden.dialects import Json
from leyden.engine.conversation import read_messages, read_response_format, read_tool_choice, read_tools
from leyden.engine.refusal import bad_request, shown

Kind = Literal["chat.completion", "text_completion"]


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


class CompletionRequest(BaseModel):
    """A validated request: the fields that chat and text completions share. A description completes
    the error message "FIELD must be ...".

    A field of the type Any does not change the response, or is validated where it is read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    kind: ClassVar[Kind]

    model: Annotated[str, Field(min_length=1, description="a string")]
    max_tokens: Count = None
    """The most response tokens; None: as many as the context has room for."""
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

    logprobs: Flag = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(CompletionRequest):
    """A request for a chat completion. Messages and tools are in the form of chat templates."""

    kind = "chat.completion"

    messages: Annotated[list[Any], Field(description="a list")]
    max_completion_tokens: Count = None
    top_logprobs: Zero = 0
    tools: Annotated[list[Any], Field(description="a list")] = []
    tool_choice: Any = "auto"
    """"none", "auto" or "required"."""
    parallel_tool_calls: Flag = True
    """Whether a response may hold several calls."""
    response_format: Annotated[Json | None, Field(description="an object")] = None
    metadata: Any = None
    store: No = False
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    _callable_tools: tuple[str, ...] = ()
    _json_schema: Json | None = None

    def model_post_init(self, context: Any) -> None:
        self.tools = read_tools(self.tools)
        self.tool_choice, self._callable_tools = read_tool_choice(self.tool_choice, self.tools)
        self.messages = read_messages(self.messages)
        # Required calls are the whole response, so no content could follow a schema.
        if self.response_format is not None and self.tool_choice != "required":
            self._json_schema = read_response_format(self.response_format)
        self.max_tokens = self.max_completion_tokens or self.max_tokens

    @property
    def callable_tools(self) -> tuple[str, ...]:
        """The names of the tools that may be called: all, or the one that `tool_choice` named."""
        return self._callable_tools

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


Request = TypeVar("Request", bound=CompletionRequest)


def _alternatives(given: Any) -> bool:
    """Return whether the response has log-probabilities, given their number of alternatives: 0, or
    False for none.
    """
    if given is not False and (isinstance(given, bool) or given != 0):
        raise ValueError("no alternatives are supported")
    return given is not False


class TextRequest(CompletionRequest):
    """A request for a text completion."""

    kind = "text_completion"

    prompt: Annotated[
        Text | Annotated[TokenIds, Field(min_length=1)], Field(description="a string or a list of token ids")
    ]
    max_tokens: Count = 16
    logprobs: Annotated[bool, BeforeValidator(_alternatives), Field(description="0 (nothing else is supported)")] = (
        False
    )
    echo: No = False
    best_of: Annotated[Literal[1], Field(description="1 (nothing else is supported)")] = 1


def parse_request(body: bytes, model: type[Request]) -> Request:
    """Return a request's body as a ChatRequest or a TextRequest. A field that is null gets its
    default.

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
