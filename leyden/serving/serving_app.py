"""`ServingApp`: an `OnlineSession` over HTTP, for applications in any language.

The routes are begin, end, feedback and status, and the pages that every server has. The module knows requests and
replies; the session does all of the work. A reply never holds a traceback.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from leyden._lib.host import pages
from leyden._lib.host.http import (
    JSON,
    ClientGone,
    HttpReply,
    Receive,
    Refusal,
    Scope,
    Send,
    SiteGuard,
    bearer_token,
    check_method,
    header,
    is_secret,
    parsed,
    raw_path,
    read_body,
    send_reply,
)
from leyden._lib.text import fault_reason
from leyden.errors import ConfigError, GatewayError, LeydenError, StoreError
from leyden.monitor.prometheus import of_requests
from leyden.serving.session import OnlineSession
from leyden.store.request_metrics import RequestMetrics
from leyden.types import FeedbackKind, LiveStatus

logger = logging.getLogger(__name__)

PREFIX = "/v1/serving"
"""The beginning of every route."""
_STATUS: dict[type[LeydenError], int] = {ConfigError: 400, GatewayError: 503, StoreError: 503}
"""The HTTP status of each kind of error; 500 for others."""


class BeginRequest(BaseModel):
    """Body of `POST /v1/serving/begin`."""

    model_config = ConfigDict(extra="forbid")

    input: Any = None
    user: str | None
    """None for a request without a user."""
    task_type: str | None = None
    quality: float | None = None
    metadata: dict[str, Any] | None = None


class EndRequest(BaseModel):
    """Body of `POST /v1/serving/end`."""

    model_config = ConfigDict(extra="forbid")

    claim: str
    status: LiveStatus = "succeeded"
    reason: str | None = None


class FeedbackRequest(BaseModel):
    """Body of `POST /v1/serving/feedback`."""

    model_config = ConfigDict(extra="forbid")

    rollout: str
    """The claim, or the rollout's id."""
    source: str
    kind: FeedbackKind = "reward"
    value: Any
    feedback_id: str | None = None


class ServingApp:
    """An ASGI application that offers a running session over HTTP."""

    def __init__(
        self,
        session: OnlineSession,
        *,
        token: str | None,
        guard: SiteGuard,
        max_body_bytes: int = 2**24,
        connections: Callable[[], int] = lambda: 0,
    ) -> None:
        """session: must be started, and is not closed here.
        token: the secret that clients must send as `Authorization: Bearer`; None admits every client that `guard`
            admits.
        guard: checks where a request comes from.
        connections: returns the number of open connections.
        """
        self._session = session
        self._token = None if token is None else token.encode()
        self._guard = guard
        self._max_body_bytes = max_body_bytes
        self._posts: dict[str, Callable[[bytes], Any]] = {
            f"{PREFIX}/begin": self._begin,
            f"{PREFIX}/end": self._end,
            f"{PREFIX}/feedback": self._feedback,
        }
        self._paths = (*self._posts, f"{PREFIX}/status", pages.HEALTH, pages.METRICS)
        self._requests = RequestMetrics(connections)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. An error becomes a response with its status; an unforeseen one is logged, status 500."""
        with pages.counting(scope, send, self._requests.add) as counted:
            await self._serve(scope, receive, counted)

    def _metrics(self) -> Iterator[Metric]:
        status = self._session.status()
        for name, about, value in (
            ("store_is_away", "1 while labels are not read or records not written.", status.store_is_away),
            ("gateway_is_away", "1 while the gateway does not answer.", status.gateway_is_away),
            ("records_waiting", "Records that are not in the store yet.", status.waiting),
            ("records_set_aside", "Records on which the store fails.", status.set_aside),
        ):
            yield GaugeMetricFamily(f"leyden_serving_{name}", about, value)
        for name, about, value in (
            ("unrecorded", "Requests whose calls go to the models' own addresses.", status.unrecorded),
            ("lost", "Beginnings and ends of rollouts for which the spool had no room.", status.lost),
            ("refused", "Records that the store refused.", status.refused),
        ):
            yield CounterMetricFamily(f"leyden_serving_{name}", about, value)
        served = CounterMetricFamily("leyden_serving_served", "Requests by arm.", labels=["arm"])
        for arm, number in status.served.items():
            served.add_metric([arm], number)
        yield served
        yield from of_requests(self._requests)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply(scope, receive)
            await send_reply(send, reply.body, headers=reply.headers)
        except ClientGone:
            return
        except Refusal as refusal:
            await _send_error(send, refusal.status, refusal.message)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            await _send_error(send, 400, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {fault_reason(first)}")
        except LeydenError as error:
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
            await _send_error(send, status, str(error))
        except Exception:
            logger.exception("%s %s failed", scope["method"], raw_path(scope))
            await _send_error(send, 500, "an unexpected error; the log of `leyden serve` has the details")

    async def _reply(self, scope: Scope, receive: Receive) -> HttpReply:
        self._guard.check(scope)
        path = raw_path(scope)
        if path == pages.HEALTH:
            scope["asked"] = path.strip("/")
            return pages.health()
        if self._token is not None and not is_secret(bearer_token(header(scope, b"authorization")), self._token):
            raise Refusal(401, "", "this server needs its token as `Authorization: Bearer` (LEYDEN_SERVING_TOKEN)")
        scope["asked"] = path.rpartition("/")[2] if path in self._paths else "other"
        if path == pages.METRICS:
            check_method(scope, "GET")
            return pages.metrics(self._metrics())
        if path == f"{PREFIX}/status":
            check_method(scope, "GET")
            return HttpReply(200, to_json(dataclasses.asdict(self._session.status())), JSON)
        if (post := self._posts.get(path)) is None:
            raise Refusal(404, "", f"there is no {path}; possible: {', '.join(self._paths)}")
        check_method(scope, "POST")
        body = await read_body(dict(scope["headers"]), receive, max_bytes=self._max_body_bytes)
        return HttpReply(200, to_json(await parsed(body, post)), JSON)

    def _begin(self, body: bytes) -> dict[str, Any]:
        asked = BeginRequest.model_validate_json(body)
        served = self._session.begin(
            asked.input, user=asked.user, task_type=asked.task_type, quality=asked.quality, metadata=asked.metadata
        )
        return {
            "rollout_id": served.rollout_id,
            "claim": served.claim,
            "arm": served.arm,
            "version": served.version,
            "policy": served.policy,
            "recorded": served.recorded,
            "resources": served.resources,
        }

    def _end(self, body: bytes) -> dict[str, Any]:
        asked = EndRequest.model_validate_json(body)
        self._session.end(asked.claim, asked.status, reason=asked.reason)
        return {}

    def _feedback(self, body: bytes) -> dict[str, Any]:
        asked = FeedbackRequest.model_validate_json(body)
        given = {asked.kind: asked.value}
        feedback = self._session.feedback(asked.rollout, source=asked.source, feedback_id=asked.feedback_id, **given)
        return {"feedback_id": feedback.feedback_id}


async def _send_error(send: Send, status: int, message: str) -> None:
    await send_reply(send, json.dumps({"error": message}).encode(), status=status)
