"""Helpers for algorithms: batches of a data set, and the store and gateway as arguments."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict

from leyden import algorithm as native
from leyden.algorithm.base import Dataset
from leyden.compat.agentlightning.rest import NativeView
from leyden.store.base import LightningStore


class _OnTheNativeStore(native.Algorithm):
    """An algorithm of Leyden. Its store raises an error for an unknown id, as Leyden's stores do,
    where Agent Lightning's returns None.
    """

    def set_store(self, store: LightningStore) -> None:
        """Set the store that `get_store` returns."""
        super().set_store(NativeView(store))


class VERL(_OnTheNativeStore, native.VERL):
    """Train with verl."""


class APO(_OnTheNativeStore, native.APO):
    """Automatic prompt optimisation. `APO[Task]` is `APO`.

    `_poml_trace` has no effect, because its requests are text files.
    """

    def __init__(self, async_openai_client: Any, *, _poml_trace: bool = False, **options: Any) -> None:
        super().__init__(async_openai_client, **options)

    def __class_getitem__(cls, task: Any) -> type[APO]:
        return cls


class Baseline(native.Baseline):
    """Run the agent on the data; without a validation set, on one half of it in mode `val`."""

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


def batch_iter_over_dataset(dataset: Dataset[Any], batch_size: int) -> Iterator[Sequence[Any]]:
    """Yield shuffled batches for ever, each without a repeated task. A data set that is no larger
    than a batch is yielded as a whole.
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
