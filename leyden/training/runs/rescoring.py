"""Score recorded rollouts again with another judge, without running them. `leyden rescore` does.

A score is feedback of kind "reward" in the run's store. Its source is the name of the scores, its id names the judge
and a digest of the judge's module, and its times say when. Nothing that was recorded changes. Each score is stored as
soon as it is there, so a judge that fails, or a process that is killed, continues with the rollouts that are left.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from leyden._lib.json import Json
from leyden._lib.numbers import finite_number, mean_of
from leyden._lib.text import error_line
from leyden.adapter import TraceToMessages
from leyden.adapter.messages import OpenAIMessages
from leyden.adapter.transcript import answer_of
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.training.runs.comparison import solved_from
from leyden.training.runs.dataset import Selection
from leyden.training.runs.recorded_runs import RecordedRun
from leyden.types import AttemptedRollout, Feedback, Span
from leyden.types.checks import check_id

Judge = Callable[["RecordedRollout"], Any]
"""A function, sync or async, that returns a finite number for a rollout. A sync one runs in threads."""
_BATCH = 50
"""Rollouts whose spans are read at once."""
_MAX_FAILURES = 10
"""Failures of the judge after which no further rollout is given to it."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """The record of a rollout, for a judge."""

    rollout: AttemptedRollout
    """The rollout with its latest attempt."""
    spans: Sequence[Span]
    """The spans of that attempt."""

    @property
    def task(self) -> Any:
        return self.rollout.input

    @property
    def reward(self) -> float | None:
        """The primary reward that was recorded; None without one."""
        return self.rollout.attempt.reward

    @property
    def answer(self) -> str:
        """The text with which the rollout ended; empty without one."""
        return answer_of(self.spans) or ""

    @property
    def conversations(self) -> list[OpenAIMessages]:
        """The agent's conversations, as `TraceToMessages` makes them."""
        return TraceToMessages().adapt(self.spans)


@dataclass(slots=True)
class Rescored:
    """What came of a rescoring. `scores` has every rollout that has a score now, also of earlier calls."""

    scored: int = 0
    """How many rollouts this call has scored."""
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The ids of rollouts at which the judge failed, with the reason."""
    left: int = 0
    """How many rollouts have no score of this judge yet."""
    scores: dict[str, tuple[float | None, float, Any]] = field(
        default_factory=dict[str, tuple[float | None, float, Any]]
    )
    """The recorded reward, the new score and the task, by rollout id."""

    def comparison(self) -> Json:
        """Return how the scores compare with the recorded rewards, of the rollouts that have both.

        `correlation` (Pearson) is None if either side is constant. `gained` and `lost` are rollouts that count as
        solved only by the score, or only by the reward (`solved_from`); None if either side has no such line.
        """
        both = {name: (old, new) for name, (old, new, _) in self.scores.items() if old is not None}
        olds, news = [old for old, _ in both.values()], [new for _, new in both.values()]
        found: Json = {"rollouts": len(both), "mean_reward": None, "mean_score": None, "correlation": None}
        found |= {"gained": None, "lost": None}
        if not both:
            return found
        found |= {"mean_reward": mean_of(olds), "mean_score": mean_of(news)}
        if len(set(olds)) > 1 and len(set(news)) > 1:
            correlation = statistics.correlation(olds, news)
            found["correlation"] = correlation if math.isfinite(correlation) else None
        old_line, new_line = solved_from(olds), solved_from(news)
        if old_line is not None and new_line is not None:
            found["gained"] = [name for name, (old, new) in both.items() if old < old_line and new >= new_line]
            found["lost"] = [name for name, (old, new) in both.items() if old >= old_line and new < new_line]
        return found


async def rescore(
    run: RecordedRun,
    store: LightningStore,
    judge: Judge,
    *,
    name: str,
    judge_id: str,
    selection: Selection,
    again: bool = False,
    concurrency: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rescored:
    """Score the selected rollouts that have no score of this judge yet.

    name: the name of the scores, under which `leyden dataset --reward` and `SFT(reward=)` find them.
    judge_id: names the judge and the version of its code.
    again: score rollouts anew that another version of the judge has scored under this name. The earlier scores stay in
        the store, and the new ones count.
    concurrency: rollouts that are judged at a time.
    on_progress: called with the rollouts that are done, and all that are to be scored.
    Raise ConfigError if another version has scored some and `again` is False, and if the recorded reward has a
    dimension of this name.
    """
    check_id("the name of scores", name)
    earlier: dict[str, list[Feedback]] = {}
    for each in await store.query_feedback(source=name, kind="reward"):
        earlier.setdefault(each.rollout_id, []).append(each)
    result, waiting, others = Rescored(), list[tuple[AttemptedRollout, int]](), 0
    async for page in selection.pages(run, store):
        for rollout, _ in page:
            if name in rollout.attempt.rewards:
                raise ConfigError(f"{name!r} is a dimension of the reward of the run's rollouts; give another name")
            scores = earlier.get(rollout.rollout_id, [])
            if scores and scores[-1].feedback_id.startswith(f"{judge_id}:"):
                result.scores[rollout.rollout_id] = rollout.attempt.reward, float(scores[-1].value), rollout.input
            else:
                others += bool(scores)
                waiting.append((rollout, len(scores)))
    if others and not again:
        raise ConfigError(
            f"{others:,} rollouts have a score {name!r} of another judge or another version of its module; score them anew "
            "with --again, or give the scores another --name"
        )

    async def score(rollout: AttemptedRollout, spans: Sequence[Span], number: int) -> Feedback | Exception:
        try:
            given = RecordedRollout(rollout, spans)
            value = await asyncio.get_running_loop().run_in_executor(threads, judge, given)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:  # noqa: BLE001 -- the judge is the user's code: the rollout is left for the next call
            return error
        try:
            value = finite_number(value)
        except ValueError as error:
            return ConfigError(f"the score {error}")
        return Feedback(
            feedback_id=f"{judge_id}:{rollout.rollout_id}:{number}",
            rollout_id=rollout.rollout_id,
            source=name,
            value=value,
            given_time=time.time(),
        )

    async def records() -> AsyncIterator[tuple[AttemptedRollout, Sequence[Span], int]]:
        for start in range(0, len(waiting), _BATCH):
            batch = waiting[start : start + _BATCH]
            spans = await store.query_spans_of([rollout.rollout_id for rollout, _ in batch])
            for rollout, number in batch:
                yield rollout, spans[rollout.rollout_id], number

    threads = ThreadPoolExecutor(concurrency, "leyden-judge")
    running: dict[asyncio.Task[Feedback | Exception], AttemptedRollout] = {}

    async def collect(most: int) -> None:
        """Store what is done until at most `most` rollouts are being judged."""
        while len(running) > most:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended = [(running.pop(task), task.result()) for task in done]
            await store.add_many_feedback([each for _, each in ended if isinstance(each, Feedback)])
            for rollout, each in ended:
                if isinstance(each, Feedback):
                    result.scored += 1
                    result.scores[rollout.rollout_id] = rollout.attempt.reward, each.value, rollout.input
                else:
                    result.failures.append((rollout.rollout_id, error_line(each)))
            on_progress(result.scored + len(result.failures), len(waiting))

    try:
        async for rollout, spans, number in records():
            running[asyncio.create_task(score(rollout, spans, number))] = rollout
            await collect(concurrency - 1)
            if len(result.failures) >= _MAX_FAILURES:
                break
        await collect(0)
    finally:
        for task in running:
            task.cancel()
        threads.shutdown(wait=False, cancel_futures=True)
    result.left = len(waiting) - result.scored
    return result
