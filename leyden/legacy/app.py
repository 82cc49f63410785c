"""The routes of Agent Lightning 0.1's server, as an ASGI application over a `TaskQueue`.

An error has the form that clients of that server read: `{"detail": ...}`. It knows no sockets.
"""

from __future__ import annotations

import json
import logging
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from leyden.host.http import (
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
from leyden.legacy.tasks import TaskQueue
from leyden.legacy.types import GenericResponse, RolloutLegacy, TaskIfAny

logger = logging.getLogger(__name__)

_RESOURCES = "/resources/"


class _Invalid(Exception):
    """The body of a request is not a report. The argument is the list of faults for the reply."""


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
        """Reply to one HTTP request. Errors have the form of Agent Lightning 0.1,
        `{"detail": ...}`.
        """
        try:
            self._guard.check(scope)
            body = await self._reply(scope, receive)
        except ClientGone:
            return
        except Refusal as refusal:
            await send_reply(send, _detail(refusal.message), status=refusal.status)
        except _Invalid as invalid:
            await send_reply(send, _detail(invalid.args[0]), status=422)
        except Exception:
            logger.exception("%s %s failed", scope["method"], raw_path(scope))
            await send_reply(send, _detail("Internal Server Error: the server's log says more"), status=500)
        else:
            await send_reply(send, body)

    async def _reply(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of the reply to a request.

        Raise Refusal for an unknown path or method, _Invalid for a body that is no report.
        """
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
            report = await parsed(body, _report)
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
    """Return the report in a request's body. Raise _Invalid, with each fault and its place."""
    try:
        return RolloutLegacy.model_validate_json(body)
    except ValidationError as error:
        faults: list[dict[str, Any]] = json.loads(error.json(include_url=False, include_context=False))
        raise _Invalid([{**fault, "loc": ["body", *fault["loc"]]} for fault in faults]) from None


def _detail(detail: Any) -> bytes:
    return json.dumps({"detail": detail}).encode()
