"""Helpers for algorithms: batches of a data set, and the store and gateway as arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict, cast

from leyden import algorithm as native
from leyden.algorithm.algorithm import Dataset
from leyden.store.base import LightningStore
from leyden.types import Rollout, RolloutMode, Span
from leyden_compat.agentlightning.interfaces import Algorithm, FastAlgorithm
from leyden_compat.agentlightning.own_store import as_native
from leyden_compat.agentlightning.resources import old_resource
from leyden_compat.agentlightning.rest import NativeView
from leyden_compat.agentlightning.types import Span as OldSpan

logger = logging.getLogger("leyden.compat.agentlightning.algorithm")


class _OnTheNativeStore(native.Algorithm):
    """An algorithm of Leyden. Its store raises an error for an unknown id, as Leyden's stores do, where Agent
    Lightning's returns None.
    """

    def set_store(self, store: LightningStore) -> None:
        super().set_store(NativeView(as_native(store)))


class VERL(_OnTheNativeStore, native.VERL):
    """Train with verl. Its own keys alone say when it validates."""

    validates_at_end = False


class APO(_OnTheNativeStore, native.APO):
    """Automatic prompt optimisation. `APO[Task]` is `APO`.

    `_poml_trace` has no effect, because its requests are text files.
    """

    def __init__(self, async_openai_client: Any, *, _poml_trace: bool = False, **options: Any) -> None:
        super().__init__(async_openai_client, **options)
        self.async_openai_client = async_openai_client
        models = inspect.signature(native.APO.__init__).parameters
        self.gradient_model = options.get("gradient_model", models["gradient_model"].default)
        self.apply_edit_model = options.get("apply_edit_model", models["apply_edit_model"].default)

    def __class_getitem__(cls, task: Any) -> type[APO]:
        return cls

    def get_best_prompt(self, *args: Any, **options: Any) -> Any:
        """Return the best prompt."""
        return old_resource(super().get_best_prompt(*args, **options))


class Baseline(_OnTheNativeStore, native.Baseline):
    """Run the agent on the data, and log what the adapter makes of it.

    train_split: of no effect, as in Agent Lightning. Without data, an error is logged.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float = 0.5,
        polling_interval: float = 5.0,
        max_queue_length: int | None = 4,
        span_verbosity: Literal["keys", "key_values", "none"] = "keys",
    ) -> None:
        super().__init__(
            n_epochs=n_epochs,
            train_split=train_split,
            polling_interval=polling_interval,
            max_queue_length=max_queue_length,
            span_verbosity=span_verbosity,
        )
        if not 0.0 < train_split < 1.0:
            raise ValueError("train_split must be between 0 and 1.")

    def _tasks(self, train: Dataset[Any] | None, val: Dataset[Any] | None) -> Iterator[tuple[Any, RolloutMode]]:
        """Yield each task with its mode: `train` for the first data set, `val` for the second."""
        for data, mode in ((train, "train"), (val, "val")):
            for index in range(0 if data is None else len(data)):
                yield cast(Dataset[Any], data)[index], cast(RolloutMode, mode)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Run the agent on the data. Log an error if there is none."""
        if next(self._tasks(train_dataset, val_dataset), None) is None:
            logger.error("Baseline has no tasks; give fit() or dev() a train_dataset or a val_dataset")
            return
        await super().run(train_dataset, val_dataset)

    def _log_rollout(self, rollout: Rollout, reward: float | None, spans: list[Span]) -> None:
        """Log a rollout, and its data as the adapter returns them, whatever is shown of the log."""
        super()._log_rollout(rollout, reward, spans)
        if self._adapter is not None:
            data = self._adapter.adapt([OldSpan.of(span) for span in spans])
            logger.info("rollout %s: adapted data: %s", rollout.rollout_id, data)

    def _log_adapted(self, spans: list[Span]) -> None:
        """Do nothing: `_log_rollout` has logged it."""


for _kind in (VERL, APO, Baseline):
    Algorithm.register(_kind)
FastAlgorithm.register(Baseline)


def batch_iter_over_dataset(dataset: Dataset[Any], batch_size: int) -> Iterator[Sequence[Any]]:
    """Yield shuffled batches for ever, each without a repeated task. A data set that is no larger than a batch is
    yielded as a whole.
    """
    indices = list(range(len(dataset)))
    size = min(batch_size, len(indices))
    batch: list[int] = []
    while True:
        random.shuffle(indices)
        for index in indices:
            if index not in batch:
                batch.append(index)
            if len(batch) == size:
                yield [dataset[chosen] for chosen in batch]
                batch = []


def with_store(func: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method that is called with the algorithm's store as an additional first argument."""

    @functools.wraps(func)
    async def with_its_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await func(self, self.get_store(), *args, **kwargs)

    return with_its_store


def with_llm_proxy(
    required: bool = False, auto_start: bool = True
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Return a decorator. The method gets the algorithm's gateway as an additional first argument.

    required: raise ValueError if the algorithm has no gateway.
    auto_start: start a gateway that does not run, and stop it after the call.
    """

    def decorate(func: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(func)
        async def with_its_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
            proxy: Any = self.get_llm_proxy()
            if required and not proxy:
                raise ValueError("this algorithm needs a gateway; give Trainer(llm_proxy=LLMProxy(...))")
            if not auto_start or proxy is None or proxy.is_running():
                return await func(self, proxy, *args, **kwargs)
            await proxy.start()
            try:
                return await func(self, proxy, *args, **kwargs)
            finally:
                await proxy.stop()

        return with_its_proxy

    return decorate


class RolloutResultForAPO(TypedDict):
    """The result of one rollout of a prompt."""

    status: str
    final_reward: float | None
    spans: list[dict[str, Any]]
    messages: list[Any]
