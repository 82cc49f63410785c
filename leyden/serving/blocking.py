"""A store and an algorithm without `await`, for plain loops that serve and learn.

    store = BlockingStore(SqliteLightningStore("store.db"))
    for rollout in store.dequeue_rollout():
        ...

`BlockingStore` runs every method of the store that it was given, and waits for the result. Only the few methods below
differ, in forms that suit a loop. `BlockingAlgorithm.optimize` trains on recorded spans. The module knows no gateway
and no session.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, Self, cast

from leyden._lib.event_loops import LoopThread
from leyden.agent import LitAgent
from leyden.algorithm.decorator import FunctionalAlgorithm
from leyden.errors import ConfigError, IllegalTransition, UnknownAttempt, UnknownResources
from leyden.serving.assignment import CONTROL
from leyden.store import InMemoryLightningStore
from leyden.store.base import LightningStore
from leyden.trainer import Trainer
from leyden.types import (
    Attempt,
    AttemptedRollout,
    NamedResources,
    Span,
)
from leyden.types.checks import json_text

_CANARY, _PRODUCTION = "canary", "production"


class QueuedRollout(AttemptedRollout):
    """A claimed rollout with two shorter names, `id` and `group`, for a loop that runs the queue."""

    @property
    def id(self) -> str:
        return self.rollout_id

    @property
    def group(self) -> str | None:
        """The side of the experiment that the rollout belongs to (`arm`), such as `control`."""
        return self.arm


class BlockingStore:
    """A store whose methods block until they are done. They may be called from any thread, also under a running event
    loop.

    Methods that are not listed here have the arguments and the results of `LightningStore`, without `await`. `close`,
    or the end of `with`, closes the store that was given.
    """

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._thread = LoopThread("leyden-blocking-store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._store, name)
        return self._blocking(found) if callable(found) else found

    def close(self) -> None:
        """Close the store, and end the thread in which its methods run."""
        self._thread.run(self._store.close())
        self._thread.stop()

    def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout_seconds: float = 0.0
    ) -> Generator[QueuedRollout, None, None]:
        """Claim rollouts one after the other, until the queue has had none for `timeout_seconds`.

        A rollout succeeds when the loop requests the next one, unless `update_attempt` has ended its attempt. If the
        loop is left by `break` or an error, the current rollout returns to the queue.
        """
        while (claimed := self._call("dequeue_rollout", worker_id, timeout_seconds=timeout_seconds)) is not None:
            attempt = cast(AttemptedRollout, claimed).attempt
            try:
                yield QueuedRollout.model_construct(**dict(claimed))
            except BaseException:
                left = {
                    "reason": "the loop was left before it requested the next rollout",
                    "reason_kind": "interrupted",
                }
                self._end(attempt, status="failed", metadata=left)
                raise
            self._end(attempt, status="succeeded")

    def add_span(
        self, rollout_id: str, spans: Span | Sequence[Span], metadata: Mapping[str, Any] | None = None
    ) -> Sequence[Span]:
        """Add spans to the latest attempt of a rollout, and return the new ones.

        The spans get the ids of the rollout and the attempt.
        metadata: attributes that each of the spans gets; a value of None is left out.
        Raise UnknownRollout, or UnknownAttempt if the rollout was not claimed yet.
        """
        attempt: Attempt | None = self._call("get_latest_attempt", rollout_id)
        if attempt is None:
            raise UnknownAttempt(f"rollout {rollout_id!r} has no attempt that spans could belong to; claim it first")
        added = {name: value for name, value in (metadata or {}).items() if value is not None}
        ids = {"rollout_id": rollout_id, "attempt_id": attempt.attempt_id}
        given = [spans] if isinstance(spans, Span) else spans
        return self._call(
            "add_many_spans",
            [span.model_copy(update={**ids, "attributes": {**span.attributes, **added}}) for span in given],
        )

    def poll_new_spans(self, *, timeout_seconds: float = 0.0) -> list[Span]:
        """Return all spans that are new since the last call, in order of arrival.

        Waits up to `timeout_seconds` for the first one. The store object that was given keeps the position, in memory,
        so a second `BlockingStore` of it continues there.
        """
        found: list[Span] = []
        while page := self._call("poll_new_spans", timeout_seconds=0.0 if found else timeout_seconds).spans:
            found += page
        return found

    def get_latest_resources(self) -> NamedResources | None:
        """Return the resources with the label `production` by name, as an agent receives them.

        While no version has the label, return those written last; None if there are none. So a version that is only
        tried, such as a canary, is never taken for the released one. The method of `LightningStore` with this name
        knows no labels.
        """
        found = self._call("get_labelled_resources", _PRODUCTION) or self._call("get_latest_resources")
        return None if found is None else found.resources

    def get_resources_by_id(self, resources_id: str, *, version: int | None = None) -> NamedResources:
        """Return one version of resources by name, by default the newest.

        Raise UnknownResources for an id or a version that is not in the store.
        """
        return self._call("get_resources_by_id", resources_id, version=version).resources

    def get_optimized_resources(self, group: str | None = None) -> NamedResources:
        """Return the released resources of a group by name, as an agent receives them.

        group: a label, such as an arm. None means `canary`, and `control` means `production`. If no version has the
            label, as after the end of a canary, the version with the label `production` is returned.
        Raise UnknownResources if no version has the label `production` either.
        """
        label = _PRODUCTION if group == CONTROL else group or _CANARY
        found = self._call("get_labelled_resources", label) or self._call("get_labelled_resources", _PRODUCTION)
        if found is None:
            raise UnknownResources(
                f"no version in {self._store.url} has the label {label!r} or {_PRODUCTION!r}; release one with "
                "`leyden resources promote ID VERSION`, or LightningStore.set_label"
            )
        return found.resources

    def watch_spans(self, **options: Any) -> Generator[Span, None, None]:
        """Yield spans as they arrive, for ever.

        options: those of `LightningStore.watch_spans`.
        """
        spans: AsyncGenerator[Span] = self._store.watch_spans(**options)
        try:
            while True:
                yield self._thread.run(anext(spans))
        finally:
            self._thread.run(spans.aclose())

    def _end(self, attempt: Attempt, **changes: Any) -> None:
        """Update an attempt at its end, and do nothing if it has ended already."""
        try:
            self._call("update_attempt", attempt.rollout_id, attempt.attempt_id, **changes)
        except IllegalTransition:  # the loop has ended it already, or the rollout was cancelled
            return

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._blocking(getattr(self._store, name))(*args, **kwargs)

    def _blocking(self, method: Any) -> Any:
        """Return a blocking function that runs a store's method, asynchronous or not, in the store's thread."""

        async def called(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def blocking(*args: Any, **kwargs: Any) -> Any:
            return self._thread.run(called(*args, **kwargs))

        return blocking


class BlockingAlgorithm:
    """An algorithm that learns from recorded spans each time `optimize` is called.

    It trains in a separate store in memory, so that no process that serves users claims its rollouts.
    """

    def __init__(self, algorithm: Any, agent: LitAgent[Any], store: BlockingStore, **options: Any) -> None:
        """algorithm: in any form that `Trainer` accepts.
        agent: runs the rollouts that the algorithm enqueues, if any.
        store: holds the spans and their rollouts; it is only read.
        options: options of the `Trainer`. `initial_resources` are by default those of
            `get_optimized_resources("control")`, or else the latest.
        """
        self._algorithm, self._agent, self._recorded, self._options = algorithm, agent, store, options

    def optimize(self, new_data: Sequence[Span]) -> NamedResources:
        """Train on recorded spans until the algorithm has ended, and return the resources that it has found.

        The tasks of the spans' rollouts, each once, are both the training and the validation data set. The training
        store gets the rollouts with these spans, so that an algorithm can read recorded rewards and calls from it. An
        `@algo` function returns the resources; the other algorithms' results name them. Raise the algorithm's error, or
        ConfigError if its result has no resources.
        """
        spans: dict[str, list[Span]] = {}
        for span in new_data:
            spans.setdefault(span.rollout_id, []).append(span)
        rollouts = self._recorded.query_rollouts(rollout_id_in=list(spans))
        tasks = list({json_text(each.input, "the input of a rollout"): each.input for each in rollouts}.values())
        initial = self._recorded.get_latest_resources()
        options: dict[str, Any] = {"initial_resources": initial, "progress": False, **self._options}
        names = ["train_dataset", "val_dataset"]
        if isinstance(self._algorithm, FunctionalAlgorithm):
            parameters = inspect.signature(self._algorithm.function).parameters
            names = [name for name in names if name in parameters]
        memory = InMemoryLightningStore()
        with BlockingStore(memory) as training:
            for rollout in rollouts:
                own = spans[rollout.rollout_id]
                placing = {"rollout_id": rollout.rollout_id, "attempt_id": own[-1].attempt_id}
                labels = {"mode": rollout.mode, "group_id": rollout.group_id, "arm": rollout.arm}
                training.start_rollout(rollout.input, **labels, **placing)
                training.add_span(rollout.rollout_id, own)
                if rollout.finished:
                    training.update_attempt(**placing, status=rollout.status)
            datasets: dict[str, Any] = dict.fromkeys(names, tasks)
            result = Trainer(algorithm=self._algorithm, store=memory, **options).fit(self._agent, **datasets).result
            if isinstance(result, Mapping):
                return dict(cast(NamedResources, result))
            resources_id, version = getattr(result, "resources_id", None), getattr(result, "version", None)
            if resources_id is None:
                raise ConfigError(
                    f"the algorithm's result is {result!r:.80}, which has no resources; return a dict of resources from "
                    "run(), or use an algorithm whose result names some, such as APO, GEPA or FewShot"
                )
            return training.get_resources_by_id(resources_id, version=version)
