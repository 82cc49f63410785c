"""Spans to training data, as pure functions.

The package holds `TraceAdapter` and the adapters that ship. They know spans and training data; they
know no store, model or tokenizer (text is never tokenised again). To add one, subclass
`TraceAdapter` and pass it to `Trainer(adapter=...)`.

The meaning of spans is found once, for all adapters: `normalise` reads one span of any dialect,
`calls` joins several records of one call, `tree` finds which step was part of which, and
`selection` assigns calls to agents and rewards to calls.
"""

from leyden.adapter.base import Adapter, TraceAdapter
from leyden.adapter.calls import model_calls
from leyden.adapter.merging import SplitTurn, TurnMerges, turn_merges
from leyden.adapter.messages import OpenAIMessages, TraceToMessages
from leyden.adapter.normalise import (
    AgentView,
    ModelCallView,
    ToolCallView,
    read_agent,
    read_model_call,
    read_tool_call,
)
from leyden.adapter.replayed import ReplayedCall, divergence, replayed_calls
from leyden.adapter.selection import RewardMatchPolicy
from leyden.adapter.token_graph import TokenGraph, TokenNode
from leyden.adapter.trajectory import TraceToTrajectory, merge_triplets
from leyden.adapter.tree import TraceTree
from leyden.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToTriplet

__all__ = [
    "Adapter",
    "AgentView",
    "LlmProxyTraceToTriplet",
    "ModelCallView",
    "OpenAIMessages",
    "ReplayedCall",
    "RewardMatchPolicy",
    "SplitTurn",
    "TokenGraph",
    "TokenNode",
    "ToolCallView",
    "TraceAdapter",
    "TraceToMessages",
    "TraceToTrajectory",
    "TraceToTriplet",
    "TraceTree",
    "TracerTraceToTriplet",
    "TurnMerges",
    "divergence",
    "merge_triplets",
    "model_calls",
    "read_agent",
    "read_model_call",
    "read_tool_call",
    "replayed_calls",
    "turn_merges",
]
