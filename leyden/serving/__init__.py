"""Agents in production.

- `session`: `OnlineSession` serves requests with released resources; `assignment` chooses the
  version, `released` follows the labels, `addresses` the gateway, `outbox` delivers records.
- `blocking`: a store and an algorithm without `await`, for plain loops.
- `serving_app`: the session over HTTP.
- `continual`: learning while serving: a canary, promotion and rollback.

The package uses stores, gateways and algorithms through their public interfaces. To add a way to choose a version, add
a field to `AssignmentRule`.
"""

from leyden.serving.assignment import CONTROL, Assigned, Assignment, AssignmentRule, place_of
from leyden.serving.blocking import BlockingAlgorithm, BlockingStore, QueuedRollout
from leyden.serving.session import OnlineSession, Served, SessionStatus

__all__ = [
    "CONTROL",
    "Assigned",
    "Assignment",
    "AssignmentRule",
    "BlockingAlgorithm",
    "BlockingStore",
    "OnlineSession",
    "QueuedRollout",
    "Served",
    "SessionStatus",
    "place_of",
]
