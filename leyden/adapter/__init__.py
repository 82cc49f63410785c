"""Spans to training data, as pure functions.

Lives here: `TraceAdapter` and the adapters that ship. They know spans and training data; they know no store, model or tokenizer
(text is never tokenised again). To add one, subclass `TraceAdapter` and pass it to `Trainer(adapter=...)`.
"""

from leyden.adapter.base import Adapter, TraceAdapter
from leyden.adapter.trajectory import TraceToTrajectory, merge_triplets
from leyden.adapter.triplet import LlmProxyTraceToTriplet

__all__ = ["Adapter", "LlmProxyTraceToTriplet", "TraceAdapter", "TraceToTrajectory", "merge_triplets"]
