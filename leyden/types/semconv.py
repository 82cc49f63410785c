"""Names of spans and attributes, in one place.

Model calls carry OpenTelemetry's `gen_ai.*` names; what OpenTelemetry has no name for is under `leyden.*`.
"""

from __future__ import annotations

from typing import Final

# Span names
ANNOTATION: Final = "leyden.annotation"
EMBEDDINGS: Final = "leyden.embeddings"
EXCEPTION: Final = "leyden.exception"
MESSAGE: Final = "leyden.message"
MODEL_CALL: Final = "leyden.model_call"
OBJECT: Final = "leyden.object"
OPERATION: Final = "leyden.operation"
PROCESS: Final = "leyden.process"
REWARD: Final = "leyden.reward"
VIRTUAL: Final = "leyden.virtual"

# Where a span belongs (OpenTelemetry resource or span attributes)
ROLLOUT_ID: Final = "leyden.rollout_id"
ATTEMPT_ID: Final = "leyden.attempt_id"
SEQUENCE_ID: Final = "leyden.span_sequence_id"

# The links of a span, as JSON: a list of `{"trace_id": ..., "span_id": ..., "attributes": {...}}`
LINKS: Final = "leyden.links"

# Rewards: `leyden.reward.0.name`, `leyden.reward.0.value`, ...; index 0 is the primary one
REWARD_PREFIX: Final = "leyden.reward"
PRIMARY_REWARD: Final = "primary"

# Rewards in OpenTelemetry's form, for backends that know nothing of Leyden: one event for each
# dimension.
GEN_AI_EVALUATION: Final = "gen_ai.evaluation.result"
GEN_AI_EVALUATION_NAME: Final = "gen_ai.evaluation.name"
GEN_AI_EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
# A link from a span to the span that it is about, which is found by one of its attributes:
# `leyden.link.0.key_match` is the attribute's name ("gen_ai.response.id", "span_id", any other),
# `leyden.link.0.value_match` its value.
LINK_PREFIX: Final = "leyden.link"

# Agent Lightning's names of the same things; Leyden reads them too
AGL_ANNOTATION: Final = "agentlightning.annotation"
AGL_REWARD: Final = "agentlightning.reward"
AGL_LINK_PREFIX: Final = "agentlightning.link"
AGL_OPERATION_NAME: Final = "agentlightning.operation.name"
AGL_OPERATION_INPUT: Final = "agentlightning.operation.input"
AGL_OPERATION_OUTPUT: Final = "agentlightning.operation.output"

# Emitted values
MESSAGE_BODY: Final = "leyden.message.body"
OBJECT_TYPE: Final = "leyden.object.type"
OBJECT_LITERAL: Final = "leyden.object.literal"
OBJECT_JSON: Final = "leyden.object.json"
OPERATION_NAME: Final = "leyden.operation.name"
OPERATION_INPUT: Final = "leyden.operation.input"
OPERATION_OUTPUT: Final = "leyden.operation.output"

# Programs (OpenTelemetry's names where it has them)
PROCESS_COMMAND: Final = "process.command_args"
PROCESS_PID: Final = "process.pid"
PROCESS_EXIT_CODE: Final = "process.exit.code"
PROCESS_SIGNAL: Final = "leyden.process.signal"
PROCESS_CAUSE: Final = "leyden.process.cause"
PROCESS_STDOUT: Final = "leyden.process.stdout"
PROCESS_STDERR: Final = "leyden.process.stderr"
PROCESS_STDOUT_BYTES: Final = "leyden.process.stdout_bytes"
PROCESS_STDERR_BYTES: Final = "leyden.process.stderr_bytes"
PROCESS_CPU_SECONDS: Final = "leyden.process.cpu_seconds"
PROCESS_MEMORY_BYTES: Final = "leyden.process.memory_bytes"
PROCESS_LEFT: Final = "leyden.process.left"

# Exceptions (OpenTelemetry's names)
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# Model calls (OpenTelemetry's gen_ai names)
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
GEN_AI_REQUEST_PREFIX: Final = "gen_ai.request"

POLICY_VERSION: Final = "leyden.policy_version"
"""The version of a model's weights at the start of a call, as set by `set_policy_version`."""
POLICY_VERSION_AT_END: Final = "leyden.policy_version.at_end"
"""The version at the end of the call, if it is another one."""

COST: Final = "leyden.cost"
"""What a model call cost, in the unit of `UpstreamModel.price_per_million`."""
COST_UNKNOWN: Final = "leyden.cost.unknown"
"""Why the cost of a call that may be billed is not known. An answered call of a model without a price lacks both."""

# The number of a model call within its attempt, in the order of arrival, from 0
CALL_INDEX: Final = "leyden.call_index"
# The claim (`leyden.types.LiveClaim`) with which a live rollout made the call
LIVE_CLAIM: Final = "leyden.live_claim"
RETRY_OF: Final = "leyden.retry_of"
"""The span id of the failed try that this call is sent again after; both have one `CALL_INDEX`."""

ROLE: Final = "leyden.role"
"""The role of a model call, or of all calls below a span, where a program says it itself: a `CallRole`."""
SPANS_LEFT_OUT: Final = "leyden.spans.left_out"
"""How many spans a program sent that were not kept."""
AUXILIARY: Final = "leyden.auxiliary"
"""Regular expressions, on the span of a program: a call without tools whose instructions match one is auxiliary."""

REQUEST_FIELDS: Final = "leyden.request.fields"
"""The fields of the agent's request that may change the answer, besides messages and tools, as a JSON object. They have
the names of the agent's API. Seeds and overrides of the gateway are left out."""

RESTORED: Final = "leyden.request.restored"
"""The fields of the recorded messages that the server got as its model had written them in earlier answers, and not as
the agent sent them back: `messages[2].tool_calls`."""
DROPPED_TOOLS: Final = "leyden.request.dropped_tools"
"""The tools that the gateway left out of the request, because the server cannot run them and the user said so."""
USER_AGENT: Final = "user_agent.original"
"""The name and version of the client that made a model call (OpenTelemetry's name)."""

# A rollout that repeats a recorded attempt
REPLAY_FROM: Final = "leyden.replay_from"
"""In a rollout's metadata: the `ReplayFrom` that says which attempt it repeats, and how far."""
REPLAYED: Final = "leyden.replayed"
"""True for a model call that the gateway answered from the record of another attempt."""
REPLAY_OF: Final = "leyden.replay_of"
"""The span id of the recorded call that answered a replayed one."""
REPLAY_DIVERGED: Final = "leyden.replay_diverged"
"""How the request differs from the recorded one, in one line. This call and all later ones are live."""

SENT_TIME: Final = "leyden.sent_time"
"""When the agent's process sent a model call, in Unix seconds by its own clock, from an instrumented HTTP client."""

# Key in a rollout's metadata. `LLMProxy(deterministic_seed=...)` derives the seeds of its calls
# from the value, in place of the rollout's id.
SAMPLING_KEY: Final = "leyden.sampling_key"

# The earlier call of its attempt that a model call's prompt continues, and how far. The gateway's
# recorder finds the pair; the store and the token graph compare the ids before they use it.
GOES_ON_FROM: Final = "leyden.tokens.goes_on_from"
"""The span id of the earlier call with whose ids (prompt, then response) the prompt begins."""
KNOWN_PREFIX: Final = "leyden.tokens.known_prefix"
"""How many of the prompt's ids are the first ids of that call; 0 if no earlier call begins alike."""

# What of a model's response the record could not read, with the field's name
UNREAD: Final = "leyden.unread"
# Why a model call cannot be trained on, when it cannot
TOKENS_REFUSED: Final = "leyden.tokens.refused"
