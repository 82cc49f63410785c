"""Convert spans to training data, with pure functions.

The package holds `TraceAdapter` and the adapters that ship. They know spans and training data, but no store, model or
tokenizer (text is never tokenised again). To add one, subclass `TraceAdapter` and pass it to `Trainer(adapter=...)`.

Spans are interpreted once, for all adapters: `normalise` reads one span of any convention, `calls` joins several
records of one call, `tree` finds which step was part of which, and `selection` assigns calls to agents and rewards to
calls.
"""

from leyden.adapter.calls import model_calls as model_calls
from leyden.adapter.merging import FEW_MERGED as FEW_MERGED
from leyden.adapter.merging import SplitTurn as SplitTurn
from leyden.adapter.merging import TurnMerges as TurnMerges
from leyden.adapter.merging import turn_merges as turn_merges
from leyden.adapter.messages import OpenAIMessages as OpenAIMessages
from leyden.adapter.messages import TraceToMessages as TraceToMessages
from leyden.adapter.normalise import AgentView as AgentView
from leyden.adapter.normalise import ModelCallView as ModelCallView
from leyden.adapter.normalise import ToolCallView as ToolCallView
from leyden.adapter.normalise import read_agent as read_agent
from leyden.adapter.normalise import read_model_call as read_model_call
from leyden.adapter.normalise import read_tool_call as read_tool_call
from leyden.adapter.replayed import ReplayedCall as ReplayedCall
from leyden.adapter.replayed import divergence as divergence
from leyden.adapter.replayed import replayed_calls as replayed_calls
from leyden.adapter.roles import ROLES as ROLES
from leyden.adapter.roles import CallRole as CallRole
from leyden.adapter.roles import RoleOfCall as RoleOfCall
from leyden.adapter.roles import call_roles as call_roles
from leyden.adapter.roles import count_roles as count_roles
from leyden.adapter.selection import RewardMatchPolicy as RewardMatchPolicy
from leyden.adapter.token_graph import TokenGraph as TokenGraph
from leyden.adapter.token_graph import TokenNode as TokenNode
from leyden.adapter.trace_adapter import Adapter as Adapter
from leyden.adapter.trace_adapter import TraceAdapter as TraceAdapter
from leyden.adapter.trajectory import TraceToTrajectory as TraceToTrajectory
from leyden.adapter.trajectory import merge_triplets as merge_triplets
from leyden.adapter.tree import TraceTree as TraceTree
from leyden.adapter.triplet import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
from leyden.adapter.triplet import TracerTraceToTriplet as TracerTraceToTriplet
from leyden.adapter.triplet import TraceToTriplet as TraceToTriplet
