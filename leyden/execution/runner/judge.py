"""`Judge`: a hook that rewards an attempt by its record, for agents that cannot tell how well they did.

It knows spans and a function of the user's, which may call a reward model. It does not know the algorithm that reads
the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from leyden.agent import LitAgent
from leyden.agent.emitter import emit_reward
from leyden.errors import ConfigError, InvalidArgument
from leyden.execution.runner.lit_agent_runner import LitAgentRunner
from leyden.execution.runner.runner import Hook, Runner
from leyden.tracing import Tracer
from leyden.types import AttemptedRollout, Span

Score = float | Mapping[str, float] | None
"""A reward, rewards by name (the first one is primary), or None to leave the agent's own."""


class Judge(Hook):
    """Emit a reward when the agent has returned, before the attempt is checked for one.

    An algorithm reads the last reward of an attempt. The judge's reward therefore counts, and a reward of the agent
    stays on record. An error of the judge is logged; an attempt whose agent gave no reward either then fails with the
    reason `no_reward` if its rollout requires one. A failed attempt is judged too, and its reward is not used.

    score: a function of the task and of the spans recorded so far, ordered by sequence id: the agent's own and the
        gateway's model calls. A coroutine function does not hold up other rollouts.
    """

    def __init__(self, score: Callable[[Any, Sequence[Span]], Score | Awaitable[Score]]) -> None:
        if not callable(score):
            raise InvalidArgument(f"score is {score!r}; give a function of the task and the spans")
        self._score = score

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Score the attempt, and emit the reward. Raise ConfigError for another kind of runner."""
        if not isinstance(runner, LitAgentRunner):
            raise ConfigError(
                f"a Judge needs a LitAgentRunner, which can read the recorded spans; got {type(runner).__name__}"
            )
        found = self._score(rollout.input, await runner.recorded_spans(rollout))
        score = await found if inspect.isawaitable(found) else found
        if isinstance(score, Mapping):
            emit_reward(score, primary_key=next(iter(score), None))  # emit_reward refuses an empty mapping
        elif score is not None:
            emit_reward(score)
