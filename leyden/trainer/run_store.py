"""The store of a trainer's runs: made from the trainer's `store=`, and open while a run uses it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from leyden._lib.components import build_component
from leyden.store import InMemoryLightningStore, LightningStore, SqliteLightningStore, open_store
from leyden.trainer.component_registry import StoreRegistry


class RunStore:
    """Makes a run's store, and knows the store of the run under way or of the last run."""

    def __init__(self, spec: Any) -> None:
        """spec: the trainer's `store=`; None if every run makes its own store."""
        self._spec = spec
        self._current: LightningStore | None = None
        """The store of the run under way, or of the last run, opened for reading."""
        self._last_file: str | None = None
        """The URL of the last run's store, if that was a file."""

    @property
    def is_given(self) -> bool:
        """Whether the trainer was given a store."""
        return self._spec is not None

    def build(self) -> LightningStore:
        """Return the store that the spec names. Raise ConfigError for a spec that names none."""
        if isinstance(self._spec, str) and "/" in self._spec:  # an address or a path
            return open_store(self._spec)
        return build_component(
            self._spec,
            expected_type=LightningStore,
            spec_name="store",
            registry=StoreRegistry,
            dict_requires_type=False,
            dict_default_cls=SqliteLightningStore,
        )

    def current(self) -> LightningStore | None:
        """Return the store of the run under way, else the last run's (a file read-only), the trainer's own, or None."""
        if self._current is None and self._last_file is not None:
            self._current = open_store(self._last_file, read_only=True)
        if self._current is not None:
            return self._current
        return self._spec if isinstance(self._spec, LightningStore) else None

    @contextlib.asynccontextmanager
    async def attached(self, store: LightningStore) -> AsyncGenerator[None]:
        """Make `store` the current one during the block. Open and close it if the run made it.

        A store in memory stays open and current, because closing it would drop its content.
        """
        self._current, self._last_file = store, None
        is_own = store is not self._spec
        try:
            async with contextlib.AsyncExitStack() as stack:
                if is_own and not isinstance(store, InMemoryLightningStore):
                    await stack.enter_async_context(store)
                yield
        finally:
            if not isinstance(store, InMemoryLightningStore):
                self._current = None
                if is_own and store.url.startswith("sqlite://"):
                    self._last_file = store.url

    def drop_file(self) -> None:
        """Forget the URL of the last run's store, whose file is about to be removed."""
        self._last_file = None
