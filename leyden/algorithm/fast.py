"""`Baseline`, an algorithm that learns nothing: it runs the agent on the data and logs what happened, for development
and for measuring. `FastAlgorithm` is the base of such algorithms.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from leyden._lib.numbers import mean_of
from leyden._lib.options import check_choice, check_number
from leyden._lib.text import as_json
from leyden.algorithm.algorithm import Algorithm, Dataset, Run
from leyden.algorithm.collector import rollout_id_at
from leyden.algorithm.own_metrics import means_of, own_metrics
from leyden.errors import ConfigError
from leyden.training import Metrics, Stage
from leyden.types import (
    EnqueueRolloutRequest,
    NamedResources,
    Rollout,
    RolloutMode,
    Span,
    failure_reason,
)

logger = logging.getLogger(__name__)
details = logging.getLogger(f"{__name__}.details")
"""The logger of each rollout's spans, which are too many for the log of a run."""

_STAGES: tuple[Stage, ...] = ("val", "train")
"""The stages in the order in which an epoch reports them: a train row ends the iteration."""
_EARLY = 16
"""Warn at once if the first this many rollouts all fail, because the run's summary would come too late."""
_PROGRESS_SECONDS = 0.1
"""The time between two reports of progress. A report takes longer than the other work on a result, so not every result
is reported."""
SpanVerbosity = Literal["none", "keys", "key_values"]


@dataclass(slots=True)
class _Counts:
    """Counts of the finished rollouts of one mode in one epoch."""

    rollouts: int = 0
    failed: int = 0
    rewards: list[float] = field(default_factory=list[float])
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Why rollouts failed."""

    own: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """The agent's own numbers of each succeeded rollout, by the metric's name."""

    def add(self, rollout: Rollout, reward: float | None, spans: Sequence[Span]) -> None:
        """Count a finished rollout."""
        self.rollouts += 1
        if rollout.status != "succeeded":
            self.failed += 1
            self.reasons[failure_reason(rollout)] += 1
        else:
            self.own.append(own_metrics(spans))
        if reward is not None:
            self.rewards.append(reward)

    def metrics(self) -> Metrics:
        """Return the counts, the mean reward if there is one, and the agent's own numbers."""
        mean = {"reward": mean_of(self.rewards)} if self.rewards else {}
        return {**mean, "rollouts": self.rollouts, "failed": self.failed, **means_of(self.own)}


def _log_progress(epoch: int, finished: int, total: int, counts: dict[str, _Counts]) -> None:
    rewards = [reward for each in counts.values() for reward in each.rewards]
    mean = f"{mean_of(rewards):.3f}" if rewards else "none yet"
    mean += f" of {len(rewards)}" if 0 < len(rewards) < finished else ""
    failed = sum(each.failed for each in counts.values())
    failures = f", {failed} of them failed" if failed else ""
    logger.info("epoch %d: %d of %d rollouts finished%s, mean reward %s", epoch + 1, finished, total, failures, mean)


def _warn_of_failures(finished: int, total: int, counts: dict[str, _Counts]) -> None:
    reasons = sum((each.reasons for each in counts.values()), Counter[str]())
    if reasons.total() == finished:
        shown = "; ".join(f"{count} x {reason:.300}" for reason, count in reasons.most_common(3))
        logger.warning(
            "all of the first %d rollouts failed, %d are left: %s. Usual causes: an error in the agent, a "
            "server or key that is missing, a time limit that is too short",
            finished,
            total - finished,
            shown,
        )


class FastAlgorithm(Algorithm):
    """Base class of algorithms that are quick enough for `Trainer.dev`."""


class Baseline(FastAlgorithm):
    """Runs every task once in each epoch, and logs each rollout's status, reward and spans.

    Agents get the model of `Trainer(llm_proxy=)`, as `main_llm`, if no initial resource is a model.

    A run with a directory can be resumed, and restarted after a failure: it finds the rollouts that it had enqueued by
    their ids. Without a Trainer, call `set_store` and then `await Baseline().run(train, val)`, which enqueues for the
    runners of that store.

    n_epochs: how often to go through both data sets.
    train_split: without a validation set, this share of the training set is run in mode `train` and the rest in mode
        `val`. Each mode has a mean reward of its own; by default one mean covers all tasks. With a validation set, it
        is refused.
    polling_interval: the longest time in seconds between two progress lines.
    max_queue_length: the number of rollouts that are enqueued and not finished at a time; a new one is enqueued when
        one has finished. None: twice as many as all runners work on at once, at least 128, and more if other runners
        work on more.
    span_verbosity: the part of each rollout's spans that is logged: `none`, `keys` (the names of attributes), or
        `key_values` (names and values).
    """

    enqueues_datasets = True

    holds_runners = True  # until the address of this process's gateway is in the store, which queued rollouts need

    resumable = True

    steps_option = "n_epochs"

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{name: (name,) for name in ("n_epochs", "max_queue_length", "polling_interval", "span_verbosity")}
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls) and "holds_runners" not in vars(cls):  # a `run` of its own announces nothing
            cls.holds_runners = False

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 1.0,
        polling_interval: float = 5.0,
        max_queue_length: int | None = None,
        span_verbosity: SpanVerbosity = "keys",
    ) -> None:
        check_number("n_epochs", n_epochs, at_least=1, whole=True)
        check_number("train_split", train_split, at_least=0, at_most=1)
        check_number("polling_interval", polling_interval, above=0)
        check_number("max_queue_length", max_queue_length, at_least=1, whole=True, or_none="following the runners")
        check_choice("span_verbosity", span_verbosity, ("none", "keys", "key_values"))
        self.n_epochs, self.train_split = n_epochs, train_split
        self.polling_interval, self.max_queue_length = polling_interval, max_queue_length
        self.span_verbosity: SpanVerbosity = span_verbosity

    def planned_resources(self) -> NamedResources:
        return self.get_initial_resources() or {}

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        return self.n_epochs * (n_train + n_val)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Enqueue a rollout for each task, wait for all of them, and log their rewards.

        Raise ConfigError if there are no tasks, and for a `train_split` beside a validation set.
        """
        if self._run is None:  # without a Trainer; only the run's id is needed
            self.set_run(Run(run_id=secrets.token_hex(6)))
        tasks = list(self._tasks(train_dataset, val_dataset))
        if not tasks:
            raise ConfigError("Baseline needs tasks to run; pass a train_dataset or a val_dataset to fit() or dev()")
        resources_id: str | None = None
        given = self.get_initial_resources()
        resources = await self.with_model(given or {})
        if resources or given is not None:
            resources_id = (await self.get_store().update_resources("default", resources)).resources_id
        epoch = 0
        while epoch < self.n_epochs:
            await self._run_epoch(epoch, tasks, resources_id)
            epoch += 1
            await self.step_ended(epoch, partial(self._is_before_end, epoch))

    def _is_before_end(self, epoch: int) -> bool:
        return epoch < self.n_epochs

    def _tasks(self, train: Dataset[Any] | None, val: Dataset[Any] | None) -> Iterator[tuple[Any, RolloutMode]]:
        """Yield each task with the mode in which it is run."""
        train, val = ([] if train is None else train), ([] if val is None else val)
        if len(val) and self.train_split != 1.0:
            raise ConfigError(
                f"train_split is {self.train_split:g}, and with a val_dataset nothing is split off; leave one of them out"
            )
        n_train = round(len(train) * self.train_split)
        for index in range(len(train)):
            yield train[index], "train" if index < n_train else "val"
        for index in range(len(val)):
            yield val[index], "val"

    async def _run_epoch(self, epoch: int, tasks: list[tuple[Any, RolloutMode]], resources_id: str | None) -> None:
        """Run every task once, log the rollouts as they finish, and report the metrics of each stage."""
        run, total = self.get_run(), len(tasks)
        requests = (
            EnqueueRolloutRequest(
                rollout_id=self._rollout_id(epoch, place, task), input=task, mode=mode, resources_id=resources_id
            )
            for place, (task, mode) in enumerate(tasks)
        )
        counts = {"train": _Counts(), "val": _Counts()}
        finished, last_line, last_shown = 0, time.monotonic(), 0.0

        def log_progress() -> None:
            nonlocal last_line
            if time.monotonic() - last_line >= self.polling_interval or finished == total:
                last_line = time.monotonic()
                _log_progress(epoch, finished, total, counts)

        async for result in self.collector.collect(
            requests,
            max_unfinished=self.max_queue_length or "auto",
            check=log_progress,
            check_seconds=self.polling_interval,
        ):
            finished += 1
            counts[str(result.rollout.mode)].add(result.rollout, result.reward, result.spans)
            self._log_rollout(result.rollout, result.reward, result.spans)
            if finished == _EARLY < total:
                _warn_of_failures(finished, total, counts)
            if time.monotonic() >= last_shown + _PROGRESS_SECONDS or finished == total:
                last_shown = time.monotonic()
                run.progress(finished, total)
            log_progress()
        for stage in _STAGES:
            if counts[stage].rollouts:
                run.report(counts[stage].metrics(), stage=stage, iteration=epoch + 1)

    def _rollout_id(self, epoch: int, place: int, task: Any) -> str | None:
        run = self.get_run()
        return None if run.directory is None else rollout_id_at(run.run_id, epoch, place, as_json(task))

    def _log_rollout(self, rollout: Rollout, reward: float | None, spans: list[Span]) -> None:
        logger.info("rollout %s (%s) %s, reward %s", rollout.rollout_id, rollout.mode, rollout.status, reward)
        if self.span_verbosity == "none" or not details.isEnabledFor(logging.INFO):
            return
        for span in spans:
            shown: Any = sorted(span.attributes) if self.span_verbosity == "keys" else span.attributes
            details.info("  span %d %s: %s", span.sequence_id, span.name, shown)
        if self._adapter is not None:
            details.info("  adapted: %s", self._adapter.adapt(spans))
