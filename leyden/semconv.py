"""Names of spans and attributes, in one place.

Model calls carry OpenTelemetry's `gen_ai.*` names; what OpenTelemetry has no name for is under `leyden.*`.
"""

from __future__ import annotations

from typing import Final

# Span names
ANNOTATION: Final = "leyden.annotation"
EXCEPTION: Final = "leyden.exception"
MESSAGE: Final = "leyden.message"
MODEL_CALL: Final = "leyden.model_call"
OBJECT: Final = "leyden.object"
OPERATION: Final = "leyden.operation"
REWARD: Final = "leyden.reward"
VIRTUAL: Final = "leyden.virtual"

# Where a span belongs (OpenTelemetry resource or span attributes)
ROLLOUT_ID: Final = "leyden.rollout_id"
ATTEMPT_ID: Final = "leyden.attempt_id"
SEQUENCE_ID: Final = "leyden.span_sequence_id"

# Rewards: `leyden.reward.0.name`, `leyden.reward.0.value`, ...; index 0 is the primary one
REWARD_PREFIX: Final = "leyden.reward"
PRIMARY_REWARD: Final = "primary"

# Emitted values
MESSAGE_BODY: Final = "leyden.message.body"
OBJECT_TYPE: Final = "leyden.object.type"
OBJECT_LITERAL: Final = "leyden.object.literal"
OBJECT_JSON: Final = "leyden.object.json"
OPERATION_NAME: Final = "leyden.operation.name"
OPERATION_INPUT: Final = "leyden.operation.input"
OPERATION_OUTPUT: Final = "leyden.operation.output"

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

# The number of a model call within its attempt, in the order of arrival, from 0
CALL_INDEX: Final = "leyden.call_index"

# Why a model call cannot be trained on, when it cannot
TOKENS_REFUSED: Final = "leyden.tokens.refused"
