"""`DashboardApp`: the pages, their JSON and the stream of changes, as an ASGI application.

The one request that writes is a reviewer's answer. Every request but those of the static files needs the token, if
there is one, as `Authorization: Bearer`: it never stands in a URL. Views block, so they run in threads, and a view that
was read for the same state of its run is served again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qsl

from pydantic import ValidationError

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
    on_disconnect,
    raw_path,
    read_body,
    send_reply,
)
from leyden._lib.json import Json
from leyden._lib.text import fault_reason
from leyden.dashboard.review import write
from leyden.dashboard.source import Source
from leyden.dashboard.views import VIEWS, Query
from leyden.errors import LeydenError, StoreError

logger = logging.getLogger(__name__)

API: Final = "/api/"
EVENTS: Final = "/api/events"
REVIEW: Final = "/api/review"
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_SAFE: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
            b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_POLL_SECONDS: Final = 1.0
"""How often the files of the runs are looked at while a page is open."""
_QUIET_SECONDS: Final = 15.0
"""A stream without changes says so this often, so that both sides notice a lost connection."""
_MAX_ANSWER_BYTES: Final = 2**20
_KEPT: Final = 64
"""Views that are kept in memory."""
_KEPT_BYTES: Final = 2**20
"""A larger view is read again each time."""


class DashboardApp:
    """Serves the runs of a source in any event loop."""

    def __init__(self, source: Source, *, token: str | None, guard: SiteGuard, prefix: str = "") -> None:
        """source: the runs.
        token: the secret that clients must send; None admits every client that `guard` admits.
        guard: checks where a request comes from.
        prefix: the path below which the application is mounted, such as `/dashboard`.
        """
        self._source, self._guard, self._prefix = source, guard, prefix
        self._token = None if token is None else token.encode()
        self._kept: OrderedDict[tuple[str, str], tuple[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._watch = _Watch(source)

    def stop_waiting(self) -> None:
        """End the streams of changes. Call it in the loop that serves."""
        self._watch.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. An error becomes JSON with its status; an unforeseen one is logged, status 500."""
        try:
            self._guard.check(scope)
            path = raw_path(scope).removeprefix(self._prefix) or "/"
            if path == pages.HEALTH:
                reply = pages.health()
            elif path.startswith(API):
                self._check_token(scope)
                if path == REVIEW and scope["method"] == "POST":
                    reply = await self._write(scope, receive)
                    await send_reply(send, reply.body, headers=(*reply.headers, *_SAFE))
                    return
                check_method(scope, "GET")
                if path == EVENTS:
                    await self._stream(receive, send)
                    return
                reply = await self._view(path.removeprefix(API), scope.get("query_string", b"").decode("latin-1"))
            else:
                check_method(scope, "GET", "HEAD")
                if raw_path(scope) == self._prefix != "":
                    raise Refusal(
                        308, "", "it is one slash further", headers=[(b"location", f"{self._prefix}/".encode())]
                    )
                reply = _static(path)
            await send_reply(send, reply.body, status=reply.status, headers=(*reply.headers, *_SAFE))
        except ClientGone:
            return
        except Refusal as refusal:
            await _send_error(send, refusal.status, refusal.message, refusal.headers)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            await _send_error(send, 400, f"{where}: {fault_reason(first)}")
        except LeydenError as error:
            await _send_error(send, 503 if isinstance(error, StoreError) else 400, str(error))
        except Exception:
            logger.exception("%s %s failed", scope["method"], raw_path(scope))
            await _send_error(send, 500, "an unexpected error; the log of `leyden dashboard` has the details")

    def _check_token(self, scope: Scope) -> None:
        if self._token is not None and not is_secret(bearer_token(header(scope, b"authorization")), self._token):
            raise Refusal(401, "", "this dashboard needs its token; open it with #token=... behind its address")

    async def _write(self, scope: Scope, receive: Receive) -> HttpReply:
        """Store the answers of a reviewer. A browser names the page that asks; a program without a token is refused."""
        if self._token is None and header(scope, b"origin") is None:
            raise Refusal(403, "", "an answer needs the Origin of the dashboard's own page, or a token")
        body = await read_body(dict(scope["headers"]), receive, max_bytes=_MAX_ANSWER_BYTES)
        stored = await asyncio.to_thread(write, self._source, body)
        return HttpReply(200, json.dumps(stored).encode(), JSON)

    async def _view(self, name: str, query: str) -> HttpReply:
        view = VIEWS.get(name)
        if view is None:
            raise Refusal(404, "", f"there is no view {name!r}; possible: {', '.join(sorted(VIEWS))}")
        given = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=50))
        body = await asyncio.to_thread(self._read, name, query, given)
        return HttpReply(200, body, JSON, (b"cache-control", b"no-store"))

    def _read(self, name: str, query: str, given: Mapping[str, str]) -> bytes:
        run_id = given.get("run")
        state = None if run_id is None else json.dumps(self._source.state_of(run_id))
        kept = self._kept.get((name, query))
        if kept is not None and state is not None and kept[0] == state:
            return kept[1]
        data = VIEWS[name](self._source, Query(given))
        body = json.dumps(_finite(data), separators=(",", ":"), default=str).encode("utf-8", "backslashreplace")
        if state is not None and state != "null" and len(body) <= _KEPT_BYTES:
            with self._lock:
                self._kept[name, query] = state, body
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return body

    async def _stream(self, receive: Receive, send: Send) -> None:
        """Send the ids of the runs that have changed, until the client leaves."""
        head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), *_SAFE]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        left = asyncio.Event()
        with self._watch.listening() as changes, on_disconnect(receive, left.set) as gone:
            text = "retry: 2000\nevent: hello\ndata: {}\n\n"
            while True:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                getting = asyncio.ensure_future(changes.get())
                done, _ = await asyncio.wait(
                    {getting, gone}, timeout=_QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if gone in done:
                    getting.cancel()
                    return
                if getting in done:
                    if (runs := getting.result()) is None:
                        await send({"type": "http.response.body", "body": b""})
                        return
                    text = f"event: changed\ndata: {json.dumps({'runs': runs})}\n\n"
                else:
                    getting.cancel()
                    text = ": nothing has changed\n\n"


class _Watch:
    """Looks for changed runs while somebody listens."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._state: dict[str, Any] | None = None
        self._listeners: list[asyncio.Queue[list[str] | None]] = []
        self._task: asyncio.Task[None] | None = None

    def listening(self) -> _Listening:
        return _Listening(self)

    def close(self) -> None:
        for queue in self._listeners:
            queue.put_nowait(None)
        if self._task is not None:
            self._task.cancel()

    def add(self, queue: asyncio.Queue[list[str] | None]) -> None:
        self._listeners.append(queue)
        if self._task is None or self._task.done():
            self._state = None
            self._task = asyncio.get_running_loop().create_task(self._look())

    def remove(self, queue: asyncio.Queue[list[str] | None]) -> None:
        self._listeners.remove(queue)

    async def _look(self) -> None:
        while self._listeners:
            try:
                state = await asyncio.to_thread(self._source.state)
            except (LeydenError, OSError) as error:  # the folder or the store is away for a while
                logger.debug("the runs cannot be looked at: %s", error)
            else:
                before, self._state = self._state, state
                changed = [] if before is None else [each for each in state if state[each] != before.get(each)]
                if before is not None and before.keys() != state.keys():
                    changed += [each for each in before if each not in state]
                for queue in self._listeners if changed else ():
                    queue.put_nowait(changed)
            await asyncio.sleep(_POLL_SECONDS)


class _Listening:
    def __init__(self, watch: _Watch) -> None:
        self._watch, self._queue = watch, asyncio.Queue[list[str] | None]()

    def __enter__(self) -> asyncio.Queue[list[str] | None]:
        self._watch.add(self._queue)
        return self._queue

    def __exit__(self, *_: object) -> None:
        self._watch.remove(self._queue)


@cache
def _files() -> Mapping[str, HttpReply]:
    """Return the static files by path, read once."""
    root = resources.files("leyden.dashboard") / "static"
    found: dict[str, HttpReply] = {}
    waiting = [("/", root)]
    while waiting:
        at, folder = waiting.pop()
        for each in folder.iterdir():
            if each.is_dir():
                waiting.append((f"{at}{each.name}/", each))
            elif (kind := _TYPES.get(each.name.rpartition(".")[2])) is not None:
                types = (b"content-type", f"{kind}; charset=utf-8".encode())
                found[f"{at}{each.name}"] = HttpReply(200, each.read_bytes(), types, (b"cache-control", b"no-cache"))
    found["/"] = found["/index.html"]
    return found


def _static(path: str) -> HttpReply:
    try:
        return _files()[path]
    except KeyError:
        raise Refusal(404, "", f"there is no {path}; the dashboard is at /") from None


def _finite(value: Any) -> Any:
    """Return JSON data with null for numbers that are not finite, which JSON has not."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType] -- any JSON
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType] -- any JSON
    return value


async def _send_error(send: Send, status: int, message: str, headers: Any = ()) -> None:
    body: Json = {"error": message}
    await send_reply(send, json.dumps(body).encode(), status=status, headers=(JSON, *headers, *_SAFE))
