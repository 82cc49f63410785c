"""`Judge`: a hook that rewards an attempt by its record, for agents that cannot tell how well they
did.

It knows spans and a function of the user's, which may call a reward model; not the reader of the
reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from leyden.emitter import emit_reward
from leyden.errors import ConfigError, InvalidArgument
from leyden.litagent import LitAgent
from leyden.runner.base import Hook, Runner
from leyden.runner.litagent import LitAgentRunner
from leyden.tracer import Tracer
from leyden.types import AttemptedRollout, Span

Score = float | Mapping[str, float] | None
"""A reward, rewards by name (the first one is primary), or None to leave the agent's own."""


class Judge(Hook):
    """Emit a reward when the agent has returned, before the attempt is checked for one.

    An algorithm reads the last reward of an attempt, so the judge's counts and the agent's own, if
    it gave one, stays on record. A judge that raises is logged; an attempt without a reward of its
    own then fails with the reason `no_reward`, because it has none. A failed agent is judged too,
    and its reward is not used.

    score: a function of the task and of what was recorded so far, by sequence id: the agent's spans
        and the model calls that the gateway recorded. It may be a coroutine function, which does
        not hold up other rollouts.
    """

    def __init__(self, score: Callable[[Any, Sequence[Span]], Score | Awaitable[Score]]) -> None:
        if not callable(score):
            raise InvalidArgument(f"score is {score!r}; give a function of the task and the spans")
        self._score = score

    async def on_trace_end(
        self, *, agent: LitAgent[Any], runner: Runner[Any], tracer: Tracer, rollout: AttemptedRollout
    ) -> None:
        """Score the attempt, and emit the reward."""
        if not isinstance(runner, LitAgentRunner):
            raise ConfigError(
                f"a Judge needs a LitAgentRunner, which knows what was recorded; got {type(runner).__name__}"
            )
        found = self._score(rollout.input, await runner.recorded_spans(rollout))
        score = await found if inspect.isawaitable(found) else found
        if isinstance(score, Mapping):
            emit_reward(score, primary_key=next(iter(score), None))
        elif score is not None:
            emit_reward(score)
