"""Let the agent's own code add to its record: rewards, messages, objects, annotations, exceptions, operations.

Each call records one span in the current trace. It knows the tracer's context and the names in `semconv`; it does not know the store. To
add a kind, add a function here and its names there.
"""

from leyden.emitter.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    get_message_value,
    get_object_value,
)
from leyden.emitter.operation import operation

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "get_message_value",
    "get_object_value",
    "operation",
]
