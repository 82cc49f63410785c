"""Clients of Agent Lightning 0.1's protocol: `AgentLightningClient` requests tasks from a server, and `DevTaskLoader`
takes them from a list, without a server.

As in the original, a request that fails is logged and its method returns None, so that a worker survives a restart of
the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from leyden._lib.options import NamedOptions, check_number
from leyden.errors import ConfigError, UnknownResources
from leyden.legacy.types import RolloutLegacy, Task, TaskIfAny, read_resources, warn_deprecated
from leyden.types import NamedResources, ResourcesUpdate

logger = logging.getLogger(__name__)

_HEADERS = {"X-AgentLightning-Client": "true", "Content-Type": "application/json"}
_LOCAL = "local://"


class AgentLightningClient(NamedOptions):
    """Requests tasks and resources from a server, and reports results.

    Each method has a form for `await`, whose name ends in `_async`.
    endpoint: the server's URL.
    poll_interval: seconds between two requests for a task while there is none.
    timeout: seconds that one request may take.
    """

    def __init__(self, endpoint: str, poll_interval: float = 5.0, timeout: float = 10.0) -> None:
        warn_deprecated("AgentLightningClient", "LightningStoreClient(url), and store.dequeue_rollout(...)")
        self._set_up(endpoint, poll_interval, timeout)

    def _set_up(self, endpoint: str, poll_interval: float, timeout: float) -> None:
        if not endpoint.startswith(("http://", "https://", _LOCAL)):
            raise ConfigError(f"endpoint is {endpoint!r}; give the server's URL, such as http://127.0.0.1:8000")
        check_number("poll_interval", poll_interval, above=0)
        check_number("timeout", timeout, above=0)
        self.endpoint = endpoint.rstrip("/") if endpoint != _LOCAL else endpoint
        self.poll_interval = poll_interval
        self.timeout = timeout
        self.task_count = 0
        """The number of tasks that this client has received."""
        self._resources: dict[str, ResourcesUpdate] = {}
        """Resources that were received, by id."""

    def poll_next_task(self) -> Task | None:
        """Wait for the next task and return it; never None here, but subclasses may return it."""
        while (task := self._found(self._send("/task"))) is None:
            time.sleep(self.poll_interval)
        return task

    async def poll_next_task_async(self) -> Task | None:
        """Wait for the next task and return it; never None here, but subclasses may return it."""
        while (task := self._found(await self._send_async("/task"))) is None:  # noqa: ASYNC110 -- it has no event
            await asyncio.sleep(self.poll_interval)
        return task

    def get_resources_by_id(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the resources with this id; None if the server lacks them or the request failed.

        Resources that were received before are not requested again.
        """
        return self._resources.get(resource_id) or self._kept(self._send(_path_of(resource_id)))

    async def get_resources_by_id_async(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the resources with this id; None if the server lacks them or the request failed.

        Resources that were received before are not requested again.
        """
        return self._resources.get(resource_id) or self._kept(await self._send_async(_path_of(resource_id)))

    def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the latest resources; None if the server has none or the request failed."""
        return self._kept(self._send("/resources/latest"))

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        return self._kept(await self._send_async("/resources/latest"))

    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        """Report a result and return the server's reply; None if it could not be delivered."""
        return self._send("/rollout", rollout.model_dump_json().encode())

    async def post_rollout_async(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        return await self._send_async("/rollout", rollout.model_dump_json().encode())

    def _found(self, reply: dict[str, Any] | None) -> Task | None:
        found = None if reply is None else TaskIfAny.model_validate(reply)
        if found is None or not found.is_available or found.task is None:
            logger.debug("no task yet; the next request is in %g s", self.poll_interval)
            return None
        self.task_count += 1
        logger.debug("task %s received, the %d. of this client", found.task.rollout_id, self.task_count)
        return found.task

    def _kept(self, reply: dict[str, Any] | None) -> ResourcesUpdate | None:
        if reply is None:
            return None
        update = read_resources(reply)
        self._resources[update.resources_id] = update
        return update

    def _send(self, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        request = urllib.request.Request(self.endpoint + path, data=body, headers=_HEADERS)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:  # urllib raises an OSError for a status above 399
            return self._failed(path, error)

    async def _send_async(self, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, raise_for_status=True, headers=_HEADERS) as session,
                session.request("GET" if body is None else "POST", self.endpoint + path, data=body) as reply,
            ):
                return await reply.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return self._failed(path, error)

    def _failed(self, path: str, error: Exception) -> None:
        logger.warning("a request to %s%s failed: %s", self.endpoint, path, error or type(error).__name__)


class DevTaskLoader(AgentLightningClient):
    """A client without a server: it takes tasks from a list, again and again, and keeps the reports in `rollouts`.

    tasks: inputs, or Task objects, but not both.
    resources: the resources of all tasks.
    poll_interval, timeout: not used, because nothing is requested.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        resources: NamedResources | ResourcesUpdate,
        poll_interval: float = 5.0,
        timeout: float = 10.0,
    ) -> None:
        warn_deprecated("DevTaskLoader", "Trainer(initial_resources=...).dev(agent, tasks)")
        self._set_up(_LOCAL, poll_interval, timeout)
        if not tasks:
            raise ConfigError("DevTaskLoader has no tasks; give at least one")
        kinds = {isinstance(task, Task) for task in tasks}
        if len(kinds) > 1:
            raise ConfigError("DevTaskLoader takes inputs or Task objects, not both; make all of them Task objects")
        if not isinstance(resources, ResourcesUpdate):
            resources = read_resources({"resources_id": "local", "resources": resources})
        self._resources_update = resources
        self._tasks = [self._task(number, task) for number, task in enumerate(tasks, start=1)]
        self.rollouts: list[RolloutLegacy] = []
        """The reports, in the order in which they came."""

    def _task(self, number: int, task: Any) -> Task:
        if isinstance(task, Task):
            return task
        resources_id = self._resources_update.resources_id
        return Task(
            rollout_id=f"local_task_{number:03d}", input=task, resources_id=resources_id, create_time=time.time()
        )

    def poll_next_task(self) -> Task | None:
        task = self._tasks[self.task_count % len(self._tasks)]
        self.task_count += 1
        return task

    async def poll_next_task_async(self) -> Task | None:
        return self.poll_next_task()

    def get_resources_by_id(self, resource_id: str) -> ResourcesUpdate | None:
        """Return the loader's resources. Raise UnknownResources for another id."""
        if resource_id != self._resources_update.resources_id:
            raise UnknownResources(
                f"resources {resource_id!r} are not in this DevTaskLoader, which has {self._resources_update.resources_id!r}"
            )
        return self._resources_update

    async def get_resources_by_id_async(self, resource_id: str) -> ResourcesUpdate | None:
        return self.get_resources_by_id(resource_id)

    def get_latest_resources(self) -> ResourcesUpdate | None:
        return self._resources_update

    async def get_latest_resources_async(self) -> ResourcesUpdate | None:
        return self._resources_update

    def post_rollout(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        self.rollouts.append(rollout)
        return {"status": "received", "rollout_id": rollout.rollout_id}

    async def post_rollout_async(self, rollout: RolloutLegacy) -> dict[str, Any] | None:
        return self.post_rollout(rollout)

    def __repr__(self) -> str:
        return f"DevTaskLoader(num_tasks={len(self._tasks)}, resources={self._resources_update.resources})"


def _path_of(resource_id: str) -> str:
    return f"/resources/{quote(resource_id, safe='')}"


def as_client(source: object) -> AgentLightningClient | None:
    """Return a client for a server's URL, or `source` itself if it is a client. Return None for any other object, such
    as a data set. Raise ConfigError for text that is no URL.
    """
    if isinstance(source, str):
        if not source.startswith(("http://", "https://")):
            raise ConfigError(f"{source!r} is no URL of a server (http://... or https://...), and text is no data set")
        return _ClientOfUrl(source)
    return source if isinstance(source, AgentLightningClient) else None


class _ClientOfUrl(AgentLightningClient):
    """A client that Leyden makes itself, and that gives no DeprecationWarning: its caller has."""

    def __init__(self, endpoint: str) -> None:
        self._set_up(endpoint, poll_interval=5.0, timeout=10.0)
