"""Keep the released versions: labels, the resources of their versions and the shares of canaries.

They are kept in memory, follow the store's news, and are written to a file for a start without the store. The module
knows no requests, and moves no label.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from leyden._lib.atomic import write_file
from leyden.errors import StoreError
from leyden.serving.assignment import CanaryShare
from leyden.store.base import LightningStore
from leyden.types import NamedResources, Release, VersionKey

logger = logging.getLogger(__name__)

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)
_CANARY_STATE = "canary"
"""The state of releases whose candidate serves users."""
_NEWS_SECONDS = 2.0
"""Seconds that one request for the store's news waits. A store that is cut off is noticed after at most twice that
time."""


@dataclass(frozen=True)
class Released:
    """One state of the labels. It is replaced as a whole, so that a request sees one state."""

    labels: Mapping[str, VersionKey] = field(default_factory=dict[str, VersionKey])
    """The version of each label."""
    resources: Mapping[VersionKey, NamedResources] = field(default_factory=dict[VersionKey, NamedResources])
    """The resources of each version that has a label."""
    shares: Mapping[VersionKey, CanaryShare] = field(default_factory=dict[VersionKey, CanaryShare])
    """The share of users of each canary that belongs to a release."""


class ReleasedVersions:
    """Keeps the released versions of the store's resources in memory, up to date.

    `current` may be read from any thread; everything else runs in one event loop.
    """

    def __init__(self, store: LightningStore, path: Path | None) -> None:
        """path: the file that keeps the last state; None keeps nothing."""
        self._store = store
        self._file = _ReleasedFile(path)
        self.current = Released()
        """The state that the store had when it last answered."""
        self.store_error: str | None = None
        """Why the last request to the store failed; None if it succeeded."""
        self._heard = time.monotonic()
        """When the store last answered, by the monotonic clock."""

    @property
    def are_old(self) -> bool:
        """Whether the last request to the store failed, or its last answer is long ago, as after a suspension."""
        return self.store_error is not None or time.monotonic() - self._heard > 2 * _NEWS_SECONDS

    async def begin(self, within_seconds: float) -> None:
        """Read the released versions from the store, or from the file if the store is unavailable.

        Raise StoreError if the file has none.
        """
        try:
            async with asyncio.timeout(within_seconds):
                await self.read()
        except (StoreError, TimeoutError) as error:
            found = self._file.read()
            if found is None:
                raise StoreError(
                    f"{self._store.url} is away and this session has no folder with versions from before, so nothing can be served; "
                    "start the store, or give the session the folder of an earlier one"
                ) from error
            self.current, self.store_error = found, self._words(error)
            logger.warning("%s is away; serving the versions released last: %s", self._store.url, dict(found.labels))

    async def read(self) -> None:
        """Read the released versions from the store, and write a changed state to the file. Raise StoreError if the
        store is unavailable.
        """
        labels = await self._labels()
        while True:
            releases = await self._store.query_releases(state_in=[_CANARY_STATE])
            of_canaries = {each.canary_version: _share_of(each) for each in releases}
            shares = {
                version: share for version in set(labels.values()) if (share := of_canaries.get(version)) is not None
            }
            if (again := await self._labels()) == labels:  # unchanged, so labels and shares belong together
                break
            labels = again
        known = self.current.resources
        resources = {
            key: known.get(key) or (await self._store.get_resources_by_id(key[0], version=key[1])).resources
            for key in set(labels.values())
        }
        if (labels, shares) != (self.current.labels, self.current.shares):
            self.current = Released(labels, resources, shares)  # one assignment, so that no request mixes two versions
            self._file.write(self.current)
        self.store_error, self._heard = None, time.monotonic()

    async def follow(self, pause_seconds: float) -> None:
        """Read the released versions each time the store's news report a change of the labels. Runs until cancelled.

        pause_seconds: the pause between two tries to reach a store that is unavailable.
        """
        after: str | None = None
        while True:
            try:
                async with asyncio.timeout(2 * _NEWS_SECONDS):
                    waits = 0.0 if after is None else _NEWS_SECONDS
                    news = await self._store.get_news(after=after, labels=True, timeout_seconds=waits)
                if after is None or news.labels or news.gap:
                    async with asyncio.timeout(2 * _NEWS_SECONDS):
                        await self.read()
                after, self._heard = news.after, time.monotonic()
            except Exception as error:  # noqa: BLE001 -- serving goes on with the last state
                words = self._words(error)
                if self.store_error is None:
                    logger.warning(
                        "labels cannot be read, serving goes on with %s: %s", dict(self.current.labels), words
                    )
                self.store_error, after = words, None
                await asyncio.sleep(pause_seconds)

    def _words(self, error: Exception) -> str:
        return str(error) or f"{self._store.url} does not answer; does it run?"

    async def _labels(self) -> dict[str, VersionKey]:
        return {each.label: (each.resources_id, each.version) for each in await self._store.get_labels()}


class _ReleasedFile:
    """Keeps the last state in a file that only this user can read, because resources may hold keys."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, released: Released) -> None:
        """Replace the file. A failure is logged: serving continues without it."""
        if self._path is None:
            return
        versions = [
            [list(key), _RESOURCES.dump_python(value, mode="json")] for key, value in released.resources.items()
        ]
        shares = [[list(key), asdict(share)] for key, share in released.shares.items()]
        try:
            write_file(self._path, json.dumps({"labels": released.labels, "versions": versions, "shares": shares}))
        except OSError as error:
            logger.warning("the released versions cannot be kept in %s: %s", self._path, error)

    def read(self) -> Released | None:
        """Return the state of the last `write`; None if there is none, or it cannot be read."""
        if self._path is None:
            return None
        try:
            found = json.loads(self._path.read_text())
            labels = {label: _version(key) for label, key in found["labels"].items()}
            versions = {_version(key): _RESOURCES.validate_python(value) for key, value in found["versions"]}
            shares = {_version(key): CanaryShare(**value) for key, value in found.get("shares", ())}
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            logger.debug("no released versions in %s: %s", self._path, error)
            return None
        return Released(labels, versions, shares)


def _version(key: Any) -> VersionKey:
    return str(key[0]), int(key[1])


def _share_of(release: Release) -> CanaryShare | None:
    """Return the share that `start_canary` has written into a release; None without a valid one."""
    share, salt = release.details.get("share"), release.details.get("salt", "")
    if not isinstance(share, int | float) or not isinstance(salt, str):
        return None
    return CanaryShare(float(share), salt, release.deadline)
