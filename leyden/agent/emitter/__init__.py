"""Functions that record something in an agent's attempt: rewards, messages, objects, exceptions, annotations,
operations.

Each function records one span in the current trace and returns it. `propagate=False` makes the span without recording
it, and needs no trace. This package knows the current trace and the names in `semconv`, and no store or tracer. To add
a kind of emission, add its names to `semconv`, a function here that checks its value and calls `emit_span`, and a
reader beside it.
"""

from leyden.agent.emitter.emit import emit_annotation as emit_annotation
from leyden.agent.emitter.emit import emit_exception as emit_exception
from leyden.agent.emitter.emit import emit_message as emit_message
from leyden.agent.emitter.emit import emit_object as emit_object
from leyden.agent.emitter.emit import get_message_value as get_message_value
from leyden.agent.emitter.emit import get_object_value as get_object_value
from leyden.agent.emitter.operation import operation as operation
from leyden.agent.emitter.rewards import emit_reward as emit_reward
from leyden.types import find_final_reward as find_final_reward
from leyden.types import find_reward_spans as find_reward_spans
from leyden.types import get_reward_value as get_reward_value
from leyden.types import get_rewards_from_span as get_rewards_from_span
from leyden.types import is_reward_span as is_reward_span
