"""Functions that record something in an agent's attempt: rewards, messages, objects, exceptions,
annotations, operations.

Each function records one span in the current trace and returns it. `propagate=False` makes the span
without recording it, and needs no trace. This package knows the current trace and the names in
`semconv`, and no store or tracer. To add a kind of emission, add its names to `semconv`, a function
here that checks its value and calls `emit_span`, and a reader beside it.
"""

from leyden.emitter.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    get_message_value,
    get_object_value,
)
from leyden.emitter.operation import operation
from leyden.emitter.reward import emit_reward
from leyden.types import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
]
