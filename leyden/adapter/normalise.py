"""Read a model call, a tool call or an agent's step from a span, whichever instrumentation recorded it.

| convention | recognised by | written by |
|---|---|---|
| `leyden` | the name `leyden.model_call` | Leyden's gateway, the only one that proves tokens |
| `agentlightning` | `agentlightning.operation.output.*`, `raw_gen_ai_request` | Agent Lightning |
| `openinference` | `openinference.span.kind` = `LLM`, `llm.input_messages.*` | Arize |
| `gen_ai` | `gen_ai.input.messages`, `gen_ai.operation.name` | OpenTelemetry, OpenLLMetry |
| `gen_ai_indexed` | `gen_ai.prompt.N.*` | conventions up to 1.36, AgentOps, older Traceloop |

The module reads one span at a time and knows nothing of the others; `calls` finds that two spans belong to one call. A
span in none of these conventions is no model call. To add a convention, add a line to `_CONVENTIONS`, and messages of a
new form to `chat`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from leyden._lib.json import Json
from leyden.adapter.attributes import as_dict, as_list, parsed, unflatten
from leyden.adapter.chat_messages import chat_messages, chat_tool
from leyden.dialects.request_checks import NUMBER
from leyden.dialects.sampling import SAMPLING_PARAMETERS
from leyden.types import Attributes, Span, TokenRecord, is_reward_span, semconv

GATEWAY: Final = "leyden"
"""The convention of the gateway's own record."""


@dataclass(frozen=True, slots=True)
class ModelCallView:
    """One call of a model, answered or failed, as all conventions can describe it. Messages and tools have the form of
    OpenAI's chat completions.
    """

    spans: tuple[Span, ...]
    """The spans that record the call, the gateway's first."""
    convention: str
    """The convention of the first span, as in the table of `leyden.adapter.normalise`."""
    response_id: str | None = None
    model: str | None = None
    input_messages: list[Json] = field(default_factory=list[Json])
    output_messages: list[Json] = field(default_factory=list[Json])
    """One message for each choice of the answer."""
    tools: list[Json] = field(default_factory=list[Json])
    settings: Json = field(default_factory=dict[str, Any])
    """The request's sampling options: `temperature`, `top_p`, `logit_bias`, `max_tokens`, ..."""
    usage: tuple[int, int] | None = None
    """Prompt and response tokens, as the server counted them."""
    tokens: TokenRecord | None = None
    """The exact token ids of prompt and response; None if they are not known."""
    refused: str | None = None
    """Why the call has no tokens to train on; None if it has."""

    @property
    def span(self) -> Span:
        """The span that stands for the call: the gateway's if there is one."""
        return self.spans[0]

    @property
    def replayed(self) -> bool:
        """Whether the answer came from the record of another attempt. Then it is context, and not trained on again."""
        return self.span.attributes.get(semconv.REPLAYED) is True

    @property
    def failed(self) -> bool:
        """Whether no source recorded the call as successful."""
        return all(span.status.status_code == "ERROR" for span in self.spans)


@dataclass(frozen=True, slots=True)
class ToolCallView:
    """A run of a tool. If only the model's request for it was recorded, that request."""

    span: Span
    name: str
    call_id: str | None
    """The id that the model gave the call; None if it was not recorded."""
    arguments: Any
    """The arguments, parsed if they are JSON text; None if they were not recorded."""
    result: Any
    """The tool's result; None if it was not recorded."""


@dataclass(frozen=True, slots=True)
class AgentView:
    """A step of an agent. All steps below it belong to this agent, down to the next agent's step."""

    span: Span
    name: str
    is_node: bool = False
    """Whether the agent is a node of a LangGraph graph. Its full name is `graph.node`."""


# ---- model calls ---------------------------------------------------------------------------------


def read_model_call(span: Span) -> ModelCallView | None:
    """Return a span as a model call; None for any other span, such as embeddings or an agent's step."""
    if not _may_be_model_call(span):
        return None
    return next((read(span) for recognises, read in _CONVENTIONS if recognises(span)), None)


def is_model_call(span: Span) -> bool:
    """Return whether `read_model_call` would return a call, without reading its messages."""
    return _may_be_model_call(span) and any(recognises(span) for recognises, _ in _CONVENTIONS)


def _may_be_model_call(span: Span) -> bool:
    """Return False for a span that declares another kind, such as a tool or an agent."""
    if span.name != semconv.MODEL_CALL and _kind(span.attributes) not in (None, "llm"):
        return False
    return span.attributes.get(semconv.GEN_AI_OPERATION, "chat") in _GENERATES


_GENERATES = ("chat", "text_completion", "completion", "generate_content", "responses", "response", "messages")
"""The values of `gen_ai.operation.name` in which a model writes something."""


def _kind(attributes: Attributes) -> str | None:
    """Return the kind of span that an instrumentation declares, in lower case; None if it declares none."""
    for name in ("openinference.span.kind", "agentops.span.kind", "traceloop.span.kind"):
        if isinstance(kind := attributes.get(name), str):
            # AgentOps sometimes writes the name of its enum, too: AgentOpsSpanKindValues.TOOL.
            return kind.rpartition(".")[2].lower()
    return None


def _is_gateways(span: Span) -> bool:
    return span.name == semconv.MODEL_CALL


def _is_gen_ai(span: Span) -> bool:
    if semconv.GEN_AI_INPUT_MESSAGES in span.attributes or semconv.GEN_AI_OUTPUT_MESSAGES in span.attributes:
        return True
    return semconv.GEN_AI_OPERATION in span.attributes and not _has_indexed_messages(span.attributes)


def _from_gen_ai(span: Span) -> ModelCallView:
    """Read OpenTelemetry's attributes. The gateway writes the same ones, with messages in the form of chat."""
    attributes = span.attributes
    messages = chat_messages(parsed(attributes.get(semconv.GEN_AI_INPUT_MESSAGES)))
    if system := as_list(parsed(attributes.get("gen_ai.system_instructions"))):
        messages = chat_messages([{"role": "system", "parts": system}]) + messages
    return _call(
        span,
        GATEWAY if _is_gateways(span) else "gen_ai",
        input_messages=messages,
        output_messages=chat_messages(parsed(attributes.get(semconv.GEN_AI_OUTPUT_MESSAGES)), role="assistant"),
        tools=[chat_tool(tool) for tool in as_list(parsed(attributes.get(semconv.GEN_AI_TOOL_DEFINITIONS)))],
    )


def _has_indexed_messages(attributes: Attributes) -> bool:
    return any(name.startswith(("gen_ai.prompt.", "gen_ai.completion.")) for name in attributes)


def _is_gen_ai_indexed(span: Span) -> bool:
    kind = span.attributes.get("gen_ai.request.type", span.attributes.get("llm.request.type"))
    return kind in ("chat", "completion") or _has_indexed_messages(span.attributes)


def _from_gen_ai_indexed(span: Span) -> ModelCallView:
    """Read a span with an attribute for each part of a message, such as `gen_ai.prompt.0.content`."""
    attributes = span.attributes
    functions = unflatten(attributes, "gen_ai.request.functions") or unflatten(attributes, "llm.request.functions")
    return _call(
        span,
        "gen_ai_indexed",
        input_messages=chat_messages(as_list(unflatten(attributes, "gen_ai.prompt"))),
        output_messages=[_answer(as_dict(said)) for said in as_list(unflatten(attributes, "gen_ai.completion"))],
        tools=[chat_tool(tool) for tool in as_list(functions)],
    )


def _answer(message: Json) -> Json:
    """Return an answer's message, without the fields of the choice that the convention mixes in."""
    own = {name: value for name, value in message.items() if name not in ("finish_reason", "content_filter_results")}
    return chat_messages([{"content": None, **own}], role="assistant")[0]


def _is_openinference(span: Span) -> bool:
    return span.attributes.get("openinference.span.kind") == "LLM"


def _from_openinference(span: Span) -> ModelCallView:
    attributes = span.attributes
    settings = as_dict(parsed(attributes.get("llm.invocation_parameters")))
    model = attributes.get("llm.model_name")
    counts = (attributes.get("llm.token_count.prompt"), attributes.get("llm.token_count.completion"))
    return _call(
        span,
        "openinference",
        response_id=_openinference_response_id(as_dict(parsed(attributes.get("output.value")))),
        model=model if isinstance(model, str) else None,
        input_messages=chat_messages(as_list(unflatten(attributes, "llm.input_messages"))),
        output_messages=chat_messages(as_list(unflatten(attributes, "llm.output_messages")), role="assistant"),
        tools=[chat_tool(tool) for tool in as_list(unflatten(attributes, "llm.tools"))],
        settings=_settings(settings),
        usage=_usage(*counts),
    )


def _openinference_response_id(output: Json) -> str | None:
    """Return the response id from the complete answer, because no attribute has it. LangChain keeps it elsewhere."""
    for found in (output.get("id"), as_dict(output.get("llm_output")).get("id")):
        if isinstance(found, str) and found:
            return found
    for generation in as_list(next(iter(as_list(output.get("generations"))), None)):
        message = as_dict(as_dict(as_dict(generation).get("message")).get("kwargs"))
        if isinstance(found := as_dict(message.get("response_metadata")).get("id"), str):
            return found
    return None


def _is_litellm(span: Span) -> bool:
    return span.name in ("raw_gen_ai_request", "litellm_request")


def _is_weave(span: Span) -> bool:
    # Agent Lightning's tracer for Weave writes only here what a model said
    return any(name.startswith(f"{semconv.AGL_OPERATION_OUTPUT}.choices") for name in span.attributes)


def _from_weave(span: Span) -> ModelCallView:
    """Read an operation of Agent Lightning's Weave tracer, which flattens request and response to attributes."""
    attributes = span.attributes
    request = as_dict(unflatten(attributes, semconv.AGL_OPERATION_INPUT))
    response = as_dict(unflatten(attributes, semconv.AGL_OPERATION_OUTPUT))
    return _call(
        span,
        "agentlightning",
        response_id=_name(response.get("id")),
        model=_name(request.get("model")),
        input_messages=chat_messages(as_list(request.get("messages"))),
        output_messages=chat_messages(
            [as_dict(choice).get("message") or {} for choice in as_list(response.get("choices"))], role="assistant"
        ),
        tools=[chat_tool(tool) for tool in as_list(parsed(request.get("tools")))],
        settings=_settings(request),
    )


def _from_litellm(span: Span) -> ModelCallView:
    """Read a span of litellm's callback. In `raw_gen_ai_request`, the server's answer is a Python literal."""
    attributes = span.attributes
    messages = chat_messages(as_list(unflatten(attributes, "gen_ai.prompt")))
    answers = [_answer(as_dict(said)) for said in as_list(unflatten(attributes, "gen_ai.completion"))]
    for choice in as_list(_literal(attributes.get("llm.hosted_vllm.choices"))):
        answers = answers or chat_messages([as_dict(choice).get("message") or {}], role="assistant")
    messages = messages or chat_messages(as_list(_literal(attributes.get("llm.hosted_vllm.messages"))))
    return _call(
        span,
        "agentlightning",
        response_id=_name(attributes.get("llm.hosted_vllm.id")),
        input_messages=messages,
        output_messages=answers,
    )


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


_CONVENTIONS: tuple[tuple[Callable[[Span], bool], Callable[[Span], ModelCallView]], ...] = (
    (_is_gateways, _from_gen_ai),
    (_is_litellm, _from_litellm),
    (_is_weave, _from_weave),
    (_is_openinference, _from_openinference),
    (_is_gen_ai, _from_gen_ai),
    (_is_gen_ai_indexed, _from_gen_ai_indexed),
)
"""A test and a reader for each convention. The first whose test succeeds reads the span."""

_SETTINGS = (*SAMPLING_PARAMETERS, "max_tokens", "max_completion_tokens", "seed")
"""The sampling options that a view keeps."""


def _call(
    span: Span,
    convention: str,
    *,
    response_id: str | None = None,
    model: str | None = None,
    settings: Json | None = None,
    usage: tuple[int, int] | None = None,
    **messages: list[Json],
) -> ModelCallView:
    """Return a view of a span: the given values, and the rest from the `gen_ai.*` attributes that nearly all
    conventions share. `messages` are the view's fields `input_messages`, `output_messages` and `tools`.
    """
    attributes = span.attributes
    sampling = _settings({name: attributes.get(f"{semconv.GEN_AI_REQUEST_PREFIX}.{name}") for name in _SETTINGS})
    tokens = span.tokens or _tokens(attributes)
    refused = attributes.get(semconv.TOKENS_REFUSED, "the call was recorded without token ids")
    return ModelCallView(
        spans=(span,),
        convention=convention,
        response_id=_name(attributes.get(semconv.GEN_AI_RESPONSE_ID)) or response_id,
        model=_name(attributes.get(semconv.GEN_AI_REQUEST_MODEL)) or model,
        settings={**sampling, **(settings or {})},
        usage=usage
        or _usage(attributes.get(semconv.GEN_AI_INPUT_TOKENS), attributes.get(semconv.GEN_AI_OUTPUT_TOKENS))
        or _usage(attributes.get("gen_ai.usage.prompt_tokens"), attributes.get("gen_ai.usage.completion_tokens")),
        tokens=tokens,
        refused=str(refused) if tokens is None else None,
        **messages,
    )


def _settings(options: Mapping[str, Any]) -> Json:
    """Return the options of a request that a view keeps; lists and objects may be JSON text."""
    found: Json = {}
    for name in _SETTINGS:
        types = SAMPLING_PARAMETERS[name].types if name in SAMPLING_PARAMETERS else NUMBER
        value = options.get(name)
        if isinstance(value, str) and (str not in types or (list in types and value.startswith("["))):
            value = parsed(value)
        if value is not None and (types != NUMBER or isinstance(value, int | float)):
            found[name] = value
    return found


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _usage(prompt: Any, response: Any) -> tuple[int, int] | None:
    return (prompt, response) if isinstance(prompt, int) and isinstance(response, int) else None


# ---- token ids that Agent Lightning left in attributes -------------------------------------------

_WEAVE = semconv.AGL_OPERATION_OUTPUT
_PROMPT_IDS = ("prompt_token_ids", f"{_WEAVE}.prompt_token_ids", "llm.hosted_vllm.prompt_token_ids")
_RESPONSE_IDS = (
    "response_token_ids",
    f"{_WEAVE}.response_token_ids.0",
    f"{_WEAVE}.choices.0.token_ids",
    f"{_WEAVE}.choices.0.provider_specific_fields.token_ids",
    "llm.hosted_vllm.response_token_ids",
)


def _tokens(attributes: Attributes) -> TokenRecord | None:
    """Return the tokens that Agent Lightning wrote as attributes; None unless both prompt and response have ids.
    Log-probabilities are kept if there is one for each response token.
    """
    prompt_ids = _first_ids(attributes, _PROMPT_IDS)
    response_ids = _first_ids(attributes, _RESPONSE_IDS)
    if not response_ids and (choices := as_list(_literal(attributes.get("llm.hosted_vllm.choices")))):
        response_ids = _ids(as_dict(choices[0]).get("token_ids"))
    if not prompt_ids or not response_ids:
        return None
    entries = [as_dict(entry).get("logprob") for entry in as_list(parsed(attributes.get("logprobs.content")))]
    found = [float(entry) for entry in entries if isinstance(entry, int | float)]
    logprobs = found if len(found) == len(entries) == len(response_ids) else None
    return TokenRecord.model_construct(prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs)


def _first_ids(attributes: Attributes, names: tuple[str, ...]) -> list[int]:
    for name in names:
        if ids := _ids(_literal(attributes.get(name))):
            return ids
    return []


def _ids(value: Any) -> list[int]:
    """Return token ids, of the first choice if there is a list for each; [] for anything but 32-bit integers."""
    ids = as_list(value)
    if ids and isinstance(ids[0], list):
        ids = cast(list[Any], ids[0])
    return ids if all(type(item) is int and -(2**31) <= item < 2**31 for item in ids) else []


# ---- tool calls, agents, rewards -----------------------------------------------------------------


def read_tool_call(span: Span) -> ToolCallView | None:
    """Return a span as a tool call; None for any other span."""
    attributes = span.attributes
    name = _name(attributes.get("gen_ai.tool.name")) or _name(attributes.get("tool.name"))
    kind = _kind(attributes)
    # Some versions of OpenTelemetry drop the kind that AgentOps writes.
    has_only_id = kind is None and "tool.call.id" in attributes
    if attributes.get(semconv.GEN_AI_OPERATION) != "execute_tool" and kind != "tool" and not has_only_id:
        return None
    name = name or _name(attributes.get("traceloop.entity.name")) or span.name
    arguments = ["gen_ai.tool.call.arguments", "input.value", "traceloop.entity.input"]
    if "openinference.span.kind" not in attributes:  # there it holds the arguments' schema
        arguments.append("tool.parameters")
    return ToolCallView(
        span=span,
        name=name,
        call_id=_name(_first(attributes, "gen_ai.tool.call.id", "tool.call.id", "tool_call.id")),
        arguments=parsed(_first(attributes, *arguments)),
        result=parsed(
            _first(attributes, "gen_ai.tool.call.result", "tool.result", "output.value", "traceloop.entity.output")
        ),
    )


def _first(attributes: Attributes, *names: str) -> Any:
    return next((attributes[name] for name in names if name in attributes), None)


def read_agent(span: Span) -> AgentView | None:
    """Return a span as an agent's step; None for any other span."""
    attributes = span.attributes
    for name, needed, value in _AGENT_NAMES:
        # An enum is written with or without its name, in any case.
        if needed is not None and str(attributes.get(needed)).rpartition(".")[2].lower() != value:
            continue
        if found := _name(attributes.get(name)):
            return AgentView(span, found)
    if span.name.startswith("langchain.Chain.") and (found := _name(attributes.get("lc_name"))):
        return AgentView(span, found)
    return _langgraph(span)


_AGENT_NAMES = (
    ("gen_ai.agent.name", None, ""),  # OpenTelemetry, Microsoft Agent Framework
    ("agent.name", None, ""),  # OpenAI Agents SDK, OpenInference
    ("operation.name", "agentops.span.kind", "agent"),
    ("traceloop.entity.name", "traceloop.span.kind", "agent"),
    ("recipient_agent_type", None, ""),  # AutoGen
    ("langchain.chain.type", None, ""),  # LangGraph through AgentOps
    ("executor.id", None, ""),  # Microsoft Agent Framework's workflows
    (f"{semconv.AGL_OPERATION_INPUT}.name", "type", "agent"),  # Weave
)
"""Attributes that hold an agent's name, each with another attribute and the value that this must have (None: no
condition)."""


def _langgraph(span: Span) -> AgentView | None:
    """Return a LangGraph graph or node, which OpenInference describes in `metadata`; None for any other span."""
    text = span.attributes.get("metadata")
    if not isinstance(text, str) or "langgraph" not in text or _kind(span.attributes) not in ("chain", "agent"):
        return None
    metadata = as_dict(parsed(text))
    if metadata.get("ls_integration") != "langgraph":
        return None
    if metadata.get("langgraph_node") == span.name:
        return AgentView(span, span.name, is_node=True)
    is_graph = "langgraph_node" not in metadata
    return AgentView(span, span.name) if is_graph else None


def is_reward(span: Span) -> bool:
    """Return whether a span carries a reward, or is the operation that computes one (named `leyden.reward` or
    `agentlightning.reward`).
    """
    names = (span.attributes.get(semconv.OPERATION_NAME), span.attributes.get(semconv.AGL_OPERATION_NAME))
    return is_reward_span(span) or semconv.REWARD in names or semconv.AGL_REWARD in names
