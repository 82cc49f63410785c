"""Rollouts that a report shows in full: with their conversation, their tokens, and what each was credited with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import pvariance
from typing import Any

from leyden._lib.json import Json
from leyden.adapter.transcript import answer_of, conversation
from leyden.errors import ConfigError
from leyden.report.credit import advantages_of, recorded_credit
from leyden.report.tokens import Texts, sequences
from leyden.store.base import LightningStore
from leyden.training.runs import RecordedRun
from leyden.training.runs.recorded_runs import iteration_of
from leyden.training.runs.rollouts import scored_rollouts
from leyden.types import AttemptedRollout, Rollout
from leyden.types.run_record import algorithm_group

_SEARCHED, _MAX_GROUP = 200, 256
"""The newest training rollouts among which a group is looked for, and the most rollouts of a group."""
_MEMBERS, _SAMPLED, _SPANS, _MESSAGES, _CHARACTERS = 8, 3, 300, 30, 3_000
"""What is shown: rollouts of the group, and at each end of the rewards; spans, messages, characters of a message."""


@dataclass(slots=True)
class RolloutViews:
    """Reads rollouts of one run from its open store.

    run_id: the run's, if its store may hold others.
    texts: shows the run's tokens; None: they are shown as ids.
    """

    run: RecordedRun
    store: LightningStore
    run_id: str | None
    texts: Texts | None
    _credits: dict[str, tuple[dict[str, float], str | None]] = field(default_factory=dict[str, Any])

    async def samples(self) -> Json:
        """Return the rollouts with the highest and the lowest rewards, and the newest that failed."""
        failed = await self.store.query_rollouts(
            status_in=["failed"], run_id=self.run_id, sort_by="end_time", sort_order="desc", limit=_SAMPLED
        )
        best, worst = [await scored_rollouts(self.run, self.store, order=o, limit=_SAMPLED) for o in ("best", "worst")]
        shown = [each.rollout.rollout_id for each in best]
        worst = [each for each in worst if each.rollout.rollout_id not in shown]
        chosen = {
            "failed": failed,
            **{n: [each.rollout for each in of] for n, of in (("best", best), ("worst", worst))},
        }
        return {name: [await self.view(each) for each in of] for name, of in chosen.items()}

    async def group(self) -> Json | None:
        """Return the group of training rollouts whose rewards differ the most among the newest; None without groups."""
        newest = await self.store.query_rollouts(
            mode_in=["train"],
            status_in=["succeeded"],
            run_id=self.run_id,
            sort_by="end_time",
            sort_order="desc",
            limit=_SEARCHED,
        )
        own = algorithm_group(self.run.record.run_id)
        rewards: dict[str, list[float]] = {}
        for each in newest:
            if each.group_id is not None and each.group_id != own and (reward := _reward(each)) is not None:
                rewards.setdefault(each.group_id, []).append(reward)
        groups = [name for name, of in rewards.items() if len(of) > 1]
        if not groups:
            return None
        name = max(groups, key=lambda each: pvariance(rewards[each]))  # of equal ones the newest
        members = list(await self.store.query_rollouts(group_id=name, limit=_MAX_GROUP))
        ordered = sorted(members, key=lambda each: _reward(each) or 0.0, reverse=True)
        kept = ordered if len(ordered) <= _MEMBERS else ordered[: _MEMBERS // 2] + ordered[-_MEMBERS // 2 :]
        views = [await self.view(each) for each in kept]
        _, reason = await self._credit(name)
        estimator = recorded_credit(self.run).get("advantages")
        return {"group_id": name, "size": len(members), "estimator": estimator, "reason": reason, "rollouts": views}

    async def view(self, rollout: Rollout) -> Json:
        """Return one rollout in full, within limits."""
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        spans: Sequence[Any] = ()
        if attempt is not None:
            spans = await self.store.query_spans(rollout.rollout_id, attempt.attempt_id, limit=_SPANS)
        messages, answer = conversation(spans), answer_of(spans)
        advantages, reason = await self._credit(rollout.group_id)
        left_out = [f"{len(messages) - _MESSAGES:,} messages"] if len(messages) > _MESSAGES else []
        left_out += [f"spans after the first {_SPANS:,}"] if len(spans) == _SPANS else []
        return {
            "rollout_id": rollout.rollout_id,
            "mode": rollout.mode,
            "status": rollout.status,
            "iteration": iteration_of(rollout),
            "reward": _reward(rollout),
            "rewards": {} if attempt is None else attempt.rewards,
            "seconds": None if attempt is None or attempt.end_time is None else attempt.end_time - attempt.start_time,
            "tokens": None if attempt is None else attempt.prompt_tokens + attempt.response_tokens,
            "cost": None if attempt is None else attempt.cost,
            "task": _cut(rollout.input),
            "answer": None if answer is None else _cut(answer),
            "advantage": advantages.get(rollout.rollout_id),
            "largest": max(map(abs, advantages.values()), default=None),
            "reason": reason,
            "messages": [_cut_message(each) for each in messages[:_MESSAGES]],
            "sequences": sequences(self.run, spans, self.texts),
            "left_out": left_out,
        }

    async def _credit(self, group_id: str | None) -> tuple[dict[str, float], str | None]:
        """Return the advantages of a group by rollout id, or why they are not known."""
        if group_id is None:
            return {}, "it is in no group"
        if group_id not in self._credits:
            members = await self.store.query_rollouts(group_id=group_id, limit=_MAX_GROUP)
            try:
                self._credits[group_id] = advantages_of(self.run, list(members)), None
            except ConfigError as error:
                self._credits[group_id] = {}, str(error)
        return self._credits[group_id]


def _reward(rollout: Rollout) -> float | None:
    return rollout.attempt.reward if isinstance(rollout, AttemptedRollout) else None


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    half = _CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]} ({len(text):,} characters in all)"


def _cut_message(message: Json) -> Json:
    calls = [{"name": each["name"][:200], "arguments": _cut(each["arguments"])} for each in message["tool_calls"][:20]]
    return {**message, "text": _cut(message["text"]), "tool_calls": calls}
