"""The routes of Agent Lightning 0.1's server, as an ASGI application over a `TaskQueue`.

An error has the form that clients of that server read: `{"detail": ...}`. It knows no sockets.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from leyden._lib.host.http import (
    MAX_BODY_BYTES,
    ClientGone,
    Receive,
    Refusal,
    Scope,
    Send,
    SiteGuard,
    check_method,
    parsed,
    raw_path,
    read_body,
    send_reply,
)
from leyden.errors import ConfigError
from leyden.legacy.tasks import TaskQueue
from leyden.legacy.types import GenericResponse, RolloutLegacy, TaskIfAny
from leyden.types.checks import check_id

logger = logging.getLogger(__name__)

_RESOURCES = "/resources/"


class _Invalid(Exception):
    """The body of a request is not a report.

    faults: the list for the reply.
    rollout_id: the task, if the only fault is its reward, so that no other report on this attempt will come.
    """

    def __init__(self, faults: list[dict[str, Any]], rollout_id: str | None = None) -> None:
        super().__init__(faults, rollout_id)
        self.faults, self.rollout_id = faults, rollout_id


class LegacyApp:
    """Serves a `TaskQueue` over HTTP, in any event loop.

    guard: refuses requests that pages of other sites send.
    max_body_bytes: the limit of one report; a larger one is refused with 413.
    """

    def __init__(self, tasks: TaskQueue, *, guard: SiteGuard, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._tasks = tasks
        self._guard = guard
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._guard.check(scope)
            body = await self._reply(scope, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            await send_reply(send, _detail(refusal.message), status=refusal.status)
        except _Invalid as invalid:
            await send_reply(send, _detail(invalid.faults), status=422)
        except ConfigError as error:  # a value that no store takes
            await send_reply(send, _detail([{"type": "value_error", "loc": ["body"], "msg": str(error)}]), status=422)
        except Exception:
            logger.exception("%s %s failed", scope["method"], raw_path(scope))
            await send_reply(send, _detail("Internal Server Error: the server's log says more"), status=500)
        else:
            await send_reply(send, body)

    async def _reply(self, scope: Scope, receive: Receive) -> bytes:
        path = raw_path(scope).split("?")[0]
        if path == "/task":
            check_method(scope, "GET")
            task = await self._tasks.claim()
            return TaskIfAny(is_available=task is not None, task=task).model_dump_json().encode()
        if path.startswith(_RESOURCES) and "/" not in path[len(_RESOURCES) :]:
            check_method(scope, "GET")
            return await self._resources(unquote(path[len(_RESOURCES) :]))
        if path == "/rollout":
            check_method(scope, "POST")
            body = await read_body(dict(scope["headers"]), receive, max_bytes=self._max_body_bytes)
            try:
                report = await parsed(body, _report)
            except _Invalid as invalid:
                if invalid.rollout_id is not None:
                    await self._tasks.refuse(invalid.rollout_id, f"the report was refused: {invalid.faults[0]['msg']}")
                raise
            await self._tasks.report(report)
            message = f"Rollout {report.rollout_id} received and stored."
            return GenericResponse(status="ok", message=message).model_dump_json().encode()
        raise Refusal(404, "", "Not Found; the routes are /task, /resources/latest, /resources/{id} and /rollout")

    async def _resources(self, resources_id: str) -> bytes:
        latest = resources_id == "latest"
        update = await self._tasks.resources(None if latest else resources_id)
        if update is None:
            missing = "No resources have been set on the server."
            raise Refusal(404, "", missing if latest else f"Resource ID '{resources_id}' not found.")
        return update.model_dump_json(exclude={"parent", "author"}).encode()  # which 0.1 does not know


def _report(body: bytes) -> RolloutLegacy:
    try:
        report = RolloutLegacy.model_validate_json(body)
    except ValidationError as error:
        # Without the inputs, which may be numbers that JSON lacks, or megabytes.
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        rewards_only = all(fault["loc"][-1:] in (("final_reward",), ("reward",)) for fault in faults)
        named = _Named.model_validate_json(body).rollout_id if rewards_only else None
        raise _Invalid([{**fault, "loc": ["body", *fault["loc"]]} for fault in faults], named) from None
    check_id("rollout_id", report.rollout_id)
    rewards: list[tuple[list[str | int], float | None]] = [(["final_reward"], report.final_reward)]
    rewards += [(["triplets", index, "reward"], each.reward) for index, each in enumerate(report.triplets or ())]
    faulty = [
        {"type": "finite_number", "loc": ["body", *path], "msg": f"{path[-1]} is {reward}, which is no finite number"}
        for path, reward in rewards
        if reward is not None and not math.isfinite(reward)
    ]
    if faulty:
        raise _Invalid(faulty, report.rollout_id)
    return report


class _Named(BaseModel):
    rollout_id: str


def _detail(detail: Any) -> bytes:
    return json.dumps({"detail": detail}).encode()
