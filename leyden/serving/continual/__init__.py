"""Learn in production: train on recorded requests, check the candidate, serve it to a share of the users (a canary),
and promote it or roll it back.

- `decision_metrics`: the metrics that judge a canary.
- `order`: puts requests into the order in which they were assigned.
- `guard`: the verdict on a canary, a pure function of its requests' outcomes.
- `release`: the states of a release and their transitions, as a table.
- `trigger`: decides when to learn.
- `watch`: reads a canary's requests from the store, and acts on the verdict.
- `learning`: `ContinualLearning`, the whole cycle.
- `recorded`: the recorded requests that a cycle learns from, and the held-out ones for its checks.
- `gate`: the offline check of a candidate.
- `jobs`, `isolation`: training and measuring, in a separate process with limits.

The tests behind the verdict are in `leyden.statistics`; docs/concepts/release-test.md has the mathematics.
"""

from leyden.serving.continual.decision_metrics import COST, FAILURE, LATENCY, REWARD, Bounded, Exceeds, Metric, Ranked
from leyden.serving.continual.gate import GateReport, GateSettings, Measurement, TaskOutcome, check
from leyden.serving.continual.guard import (
    GuardSettings,
    GuardState,
    MetricReport,
    RequestOutcome,
    Verdict,
    decide,
    observe,
    start,
)
from leyden.serving.continual.isolation import Limits
from leyden.serving.continual.learning import ContinualLearning, CycleStatus, ShadowSettings
from leyden.serving.continual.order import RequestOrder
from leyden.serving.continual.recorded import DataSettings, LearningData, RecordedTask, RecordedTasks
from leyden.serving.continual.release import (
    OPEN_STATES,
    TRANSITIONS,
    advance,
    allow_learning,
    begin,
    is_stopped,
    next_state,
    open_releases,
    stop_learning,
)
from leyden.serving.continual.trigger import (
    Drift,
    Trigger,
    TriggerState,
    drop_at,
    is_drop,
    learned,
    observe_reward,
    reason_to_learn,
)
from leyden.serving.continual.watch import CanarySettings, judge, request_values, start_canary, step

__all__ = [
    "COST",
    "FAILURE",
    "LATENCY",
    "OPEN_STATES",
    "REWARD",
    "TRANSITIONS",
    "Bounded",
    "CanarySettings",
    "ContinualLearning",
    "CycleStatus",
    "DataSettings",
    "Drift",
    "Exceeds",
    "GateReport",
    "GateSettings",
    "GuardSettings",
    "GuardState",
    "LearningData",
    "Limits",
    "Measurement",
    "Metric",
    "MetricReport",
    "Ranked",
    "RecordedTask",
    "RecordedTasks",
    "RequestOrder",
    "RequestOutcome",
    "ShadowSettings",
    "TaskOutcome",
    "Trigger",
    "TriggerState",
    "Verdict",
    "advance",
    "allow_learning",
    "begin",
    "check",
    "decide",
    "drop_at",
    "is_drop",
    "is_stopped",
    "judge",
    "learned",
    "next_state",
    "observe",
    "observe_reward",
    "open_releases",
    "reason_to_learn",
    "request_values",
    "start",
    "start_canary",
    "step",
    "stop_learning",
]
