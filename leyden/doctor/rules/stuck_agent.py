"""Agents hang: they block the event loop, or do not return in time."""

from __future__ import annotations

from statistics import median

from leyden._lib.formatting import duration
from leyden.doctor.evidence import Evidence
from leyden.doctor.messages import Kind, rule_of_messages
from leyden.doctor.rule import Finding, Rule

_PATIENCE_SECONDS = 30.0
_TIMES = 10.0
"""An agent that takes this many times the median of the succeeded ones is stuck."""
_ENOUGH = 3

_BY_MESSAGES = rule_of_messages(
    "stuck-agent",
    Kind(
        pattern=r"blocks the event loop|blocked the event loop|holds Python's lock",
        cause="the agent blocks the event loop, and all others of its process wait for it",
        remedy="In an `async` agent, await an asynchronous client, use await asyncio.to_thread(function) for the rest, or "
        "write the agent as a plain def.",
    ),
    Kind(
        pattern=r"^timeout: |did not return within timeout_seconds|attempts are now (?:timeout|unresponsive)|^unresponsive: ",
        cause="agents do not return within their time limit",
        remedy="Look at what such a rollout did last, and give its calls time limits of their own. If agents need longer, "
        "raise timeout_seconds.",
    ),
    Kind(
        pattern=r"did not end within .* of its cancellation|ignore(?:d)? their cancellation",
        cause="agents go on after they were cancelled",
        remedy="Let the agent pass asyncio.CancelledError on, and give blocking calls a time limit.",
    ),
)


def _find(run: Evidence) -> Finding | None:
    took = [
        each.rollout.attempt.end_time - each.rollout.attempt.start_time
        for each in run.succeeded
        if each.rollout.attempt.end_time is not None
    ]
    if run.run.state == "running" and len(took) >= _ENOUGH:
        limit = max(_PATIENCE_SECONDS, _TIMES * median(took))
        stuck = {
            each.rollout_id: age
            for each in run.working
            if (age := run.now - (each.attempt.last_heartbeat_time or each.attempt.start_time)) > limit
        }
        if stuck:
            worst = max(stuck, key=stuck.__getitem__)
            return Finding(
                cause="agents hang: they have done nothing for much longer than others take in all",
                evidence=(
                    f"{len(stuck)} of {len(run.working)} rollouts under way are silent; {worst} for {duration(stuck[worst])}",
                    f"the median of {len(took)} succeeded ones took {duration(median(took))}",
                ),
                remedy="Look at what it did last, and give its calls time limits; timeout_seconds of the algorithm ends "
                "rollouts that hang.",
                command=f"leyden show {run.source} {worst}",
                severity="critical" if len(stuck) == len(run.working) else "warning",
                share=len(stuck) / len(run.working),
            )
    return _BY_MESSAGES.find(run)


RULE = Rule("stuck-agent", _find, explains=_BY_MESSAGES.explains, during_fit=True)
