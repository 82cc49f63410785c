"""One of several serving processes: requests of many users through a session of its own, each told in a ledger."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

from leyden.serving import Assignment, OnlineSession
from leyden.store import LightningStoreClient
from leyden.types import PromptTemplate
from tests.serving.processes import KEY, call_model
from tests.store.killing import Pen

__all__ = ["CANARY_PERCENT", "N_USERS", "Labels", "Request", "requests_in", "visit"]

CANARY_PERCENT = 30.0
N_USERS = 50
_AT_ONCE = 2
_PAUSE_SECONDS = 0.002

Labels = tuple[int, int]
"""The versions in `production` and `canary`."""


class Request(NamedTuple):
    """What one request was served with, as its process saw it."""

    process: str
    rollout_id: str
    user: str
    arm: str
    version: int
    text: str
    """Of the prompt."""
    before: Labels
    """Where the labels were for this session before the request."""
    after: Labels
    time: float
    """When the session had chosen the version."""
    feedback_id: str


def requests_in(ledger: Path) -> list[Request]:
    """Return the requests that are over, in their order."""
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [Request(*row[:6], tuple(row[6]), tuple(row[7]), *row[8:]) for row in rows]


async def visit(name: str, store_url: str, gateway_url: str, folder: str, n_requests: str, ledger: str) -> None:
    """Serve `n_requests` requests of users that all processes share."""
    pen = Pen(ledger)
    async with (
        LightningStoreClient(store_url) as store,
        OnlineSession(
            store,
            gateway=gateway_url,
            live_key=KEY,
            folder=folder,
            assignment=Assignment(canary_percent=CANARY_PERCENT),
        ) as session,
        aiohttp.ClientSession() as http,
    ):
        numbers = iter(range(int(n_requests)))

        def labels() -> Labels:
            found = session.status().labels
            return found["production"][1], found["canary"][1]

        async def visitor() -> None:
            for number in numbers:
                user = f"user {number % N_USERS}"
                before = labels()
                with session.serve(number, user=user) as served:
                    chosen, after = time.time(), labels()
                    prompt = served.resources["prompt"]
                    assert isinstance(prompt, PromptTemplate)
                    assert await call_model(http, served.llm(), prompt.template) == 200
                given = session.feedback(served, source="user", reward=1.0).feedback_id
                shown = (served.rollout_id, user, served.arm, served.version[1], prompt.template)
                pen.write(name, *shown, before, after, chosen, given)
                await asyncio.sleep(_PAUSE_SECONDS)

        await asyncio.gather(*(visitor() for _ in range(_AT_ONCE)))
        await asyncio.to_thread(session.close, within_seconds=60.0)
