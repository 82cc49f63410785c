"""A web application that learns from thumbs up and down while it serves.

    python examples/learning_app/app.py [--visitors N] [--rate N] [--seed N] [--promotions N] [--port N] [--stay]

Simulated visitors open tickets and press a thumb. `ContinualLearning` improves the prompt
meanwhile, tries the new one on half of the visitors, and promotes it or rolls it back. The page
whose address is printed first shows it. It needs the package `openai` and no key: the model is
simulated (`PromptSim`), so the true share of solved tickets is known for each prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from agent import answer, help_desk, is_solved
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

import leyden as ly
from benchmarks.promptsim import PromptSim
from leyden.errors import LeydenError
from leyden.serving import OnlineSession
from leyden.serving.continual import (
    FAILURE,
    REWARD,
    CanarySettings,
    ContinualLearning,
    DataSettings,
    GateSettings,
    GuardSettings,
    Limits,
    Trigger,
)
from leyden.store import LightningStore, SqliteLightningStore
from leyden.testing import FakeUpstream
from leyden.types import AuditRecord, PromptTemplate

PAGE = Path(__file__).parent / "page.html"
DESK = "help-desk"
FIRST_PROMPT = "You answer the tickets of a shop.\nAsk for the order number.\nGreet the customer by name."
WORLD = PromptSim("additive", seed=1)
"""Decides what a prompt must say to solve tickets. The simulated model alone knows it."""

CANARY = CanarySettings(
    share=0.5,
    guard=GuardSettings(metrics=(REWARD, FAILURE)),
    waiting_seconds=2,  # a day or more for real visitors
    deadline_seconds=40,
    settle_seconds=1,
    lag_seconds=0.5,
)


# ---- the application -------------------------------------------------------------------------------------------------


@dataclass
class Board:
    """The page's data, read from the store alone, so they hold for many sessions and restarts."""

    store: LightningStore
    thumbs: dict[int, Counter[str]] = field(default_factory=dict[int, Counter[str]])
    """Thumbs by version."""
    latest: list[bool] = field(default_factory=list[bool])
    """Whether each thumb was up, in the order of arrival."""
    _after: int | None = None

    async def read(self) -> None:
        """Count the thumbs that are new in the store."""
        for each in await self.store.query_feedback(resources_id=DESK, kind="label", after=self._after):
            self._after = each.sequence_id
            self.thumbs.setdefault(each.version or 0, Counter())[str(each.value)] += 1
            self.latest.append(each.value == "thumbs_up")

    def up(self, version: int) -> float:
        """Return the share of thumbs up of a version."""
        counts = self.thumbs.get(version, Counter())
        return counts["thumbs_up"] / max(1, counts.total())

    async def show(self) -> dict[str, Any]:
        """Return the page's data."""
        await self.read()
        labels: dict[int, list[str]] = {}
        for label in await self.store.get_labels():
            labels.setdefault(label.version, []).append(label.label)
        versions = [
            {
                "version": each.version,
                "labels": [*labels.get(each.version, []), *(["frozen"] if each.frozen else [])],
                "up": self.up(each.version),
                "thumbs": self.thumbs.get(each.version, Counter()).total(),
                "prompt": next(one.template for one in each.resources.values() if isinstance(one, PromptTemplate)),
            }
            for each in await self.store.query_resources(resources_id=DESK, all_versions=True)
        ]
        events = [{"time": each.time, "text": sentence(each)} for each in await self.store.query_audit(limit=12)]
        return {"versions": versions, "events": events, "bars": self.bars()[-40:]}

    def bars(self, width: int = 20) -> list[float]:
        """Return the share of thumbs up of each twenty thumbs."""
        whole = len(self.latest) // width
        return [sum(self.latest[place * width : (place + 1) * width]) / width for place in range(whole)]


class Ticket(BaseModel):
    """What a visitor sends to `/tickets`."""

    ticket: str
    visitor: str


class Thumb(BaseModel):
    """What a visitor sends to `/thumbs`."""

    claim: str
    thumb: Literal["thumbs_up", "thumbs_down"]


class Application:
    """The web application: tickets, thumbs, and the page."""

    def __init__(self, session: OnlineSession, board: Board) -> None:
        self._session, self._board = session, board

    def app(self) -> web.Application:
        """Return it as an aiohttp application."""
        app = web.Application(middlewares=[refuse_politely])
        app.router.add_get("/", self.page)
        app.router.add_get("/board", self.show)
        app.router.add_post("/tickets", self.ticket)
        app.router.add_post("/thumbs", self.thumb)
        return app

    async def ticket(self, request: web.Request) -> web.Response:
        """Answer a ticket with the version that the visitor gets: production, or the canary."""
        asked = Ticket.model_validate_json(await request.read())
        with self._session.serve({"ticket": asked.ticket}, user=asked.visitor) as served:
            prompt = served.resources["prompt"]
            assert isinstance(prompt, PromptTemplate)
            reply = await answer(asked.ticket, served.llm(), prompt)
        return web.json_response({"answer": reply, "claim": served.claim, "version": served.version[1]})

    async def thumb(self, request: web.Request) -> web.Response:
        """Record a thumb: `thumbs_up` or `thumbs_down`."""
        asked = Thumb.model_validate_json(await request.read())
        self._session.feedback(asked.claim, source="visitor", label=asked.thumb)
        return web.json_response({})

    async def show(self, _: web.Request) -> web.Response:
        """Return what the page shows."""
        return web.json_response(await self._board.show())

    async def page(self, _: web.Request) -> web.FileResponse:
        """Return the page."""
        return web.FileResponse(PAGE)


@web.middleware
async def refuse_politely(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 400 to what cannot be read, and 503 if the gateway or the store is away."""
    try:
        return await handler(request)
    except ValidationError as error:
        return web.json_response({"error": error.errors(include_url=False)[0]["msg"]}, status=400)
    except LeydenError as error:
        return web.json_response({"error": str(error)}, status=503)


def learner(store: LightningStore, folder: Path, model: ly.LLM) -> ContinualLearning:
    """Return what improves the prompt, as soon as there are eighty thumbs."""
    return ContinualLearning(
        ly.APO(beam_width=3, branch_factor=1, beam_rounds=8, gradient_batch_size=6, val_batch_size=16),
        help_desk,
        store=store,
        folder=folder,
        trigger=Trigger(count=80),
        canary=CANARY,
        data=DataSettings(new_tasks=120, validation=0.25, held_out=0.25),
        gate=GateSettings(n_tasks=30),
        limits=Limits(nice=10, cpu_seconds=120, seconds=120),
        trainer={"llm_proxy": {"model_list": [model]}, "concurrency": 8},
        every_seconds=0.5,
        pause_seconds=2,
    )


# ---- the simulated visitors ------------------------------------------------------------------------------------------


async def visit(http: aiohttp.ClientSession, number: int, numbers: random.Random) -> None:
    """Open a ticket, read the answer, and press a thumb.

    One visitor in five presses none, and one in twenty the wrong one.
    """
    ticket = WORLD.tasks(1, start=number)[0]["text"]
    async with http.post("/tickets", json={"ticket": ticket, "visitor": f"visitor-{number}"}) as response:
        response.raise_for_status()
        answered = await response.json()
    await asyncio.sleep(numbers.uniform(0.1, 0.8))
    if numbers.random() < 0.2:
        return
    content = is_solved(answered["answer"]) != (numbers.random() < 0.05)
    thumb = {"claim": answered["claim"], "thumb": "thumbs_up" if content else "thumbs_down"}
    async with http.post("/thumbs", json=thumb) as response:
        response.raise_for_status()


async def visits(address: str, options: argparse.Namespace, is_enough: asyncio.Event) -> int:
    """Let visitors come at random times until it is enough. Return how many came."""
    arrivals = random.Random(options.seed)
    came = 0
    async with aiohttp.ClientSession(address) as http, asyncio.TaskGroup() as group:
        while came < options.visitors and not is_enough.is_set():
            group.create_task(visit(http, came, random.Random(f"{options.seed}/{came}")))
            came += 1
            await asyncio.sleep(arrivals.expovariate(options.rate))
    return came


# ---- what is printed -------------------------------------------------------------------------------------------------


def sentence(event: AuditRecord) -> str:
    """Return a change of a label, a freeze or a release as a sentence."""
    why = f": {event.why}" if event.why else ""
    if event.action == "release":
        return f"{event.release_id} is {event.state}{why}"
    version = f"version {event.after[1]}" if event.after else "no version"
    if event.label is not None:  # a release that has moved it says why
        return f"{event.label} is on {version}" + (f" by {event.who}{why}" if event.release_id is None else "")
    return f"{version} is frozen" if event.action == "freeze" else f"{version} may have labels again"


async def report(store: LightningStore, promotions: int, board: Board, is_enough: asyncio.Event) -> None:
    """Print events as they happen. Set `is_enough` a hundred thumbs after this many promotions."""
    began, printed, promoted, last = time.time(), 0, 0, 0
    while True:
        for event in await store.query_audit(sort_order="asc", offset=printed):
            printed += 1
            print(f"{max(0.0, event.time - began):6.1f} s  {sentence(event)}", flush=True)
            if event.state == "promoted":
                await board.read()
                promoted, last = promoted + 1, len(board.latest)
        await board.read()
        if promoted >= promotions and len(board.latest) >= last + 100:
            is_enough.set()
        await asyncio.sleep(0.2)


async def summarise(store: LightningStore, board: Board, came: int) -> None:
    """Print the thumbs of each version beside the truth that the simulated model knows."""
    shown = await board.show()
    print(f"\n{came} visitors came, and {len(board.latest)} pressed a thumb.")
    print("version  thumbs  up     truth  labels")
    for each in sorted(shown["versions"], key=lambda one: one["version"]):
        truth = f"{WORLD.expected_score(each['prompt']):.0%}"
        labels = " ".join(each["labels"])
        print(f"{each['version']:7}  {each['thumbs']:6}  {each['up']:<5.0%}  {truth:5}  {labels}".rstrip())
    if bars := board.bars(80):
        print(f"Thumbs up: {bars[0]:.0%} of the first eighty, {sum(board.latest[-80:]) / 80:.0%} of the last eighty.")
    prompt = next(each["prompt"] for each in shown["versions"] if "production" in each["labels"])
    print(f"\nThe prompt in production:\n{prompt}")


# ---- all of it -------------------------------------------------------------------------------------------------------


async def run(options: argparse.Namespace, folder: Path) -> None:
    """Serve, learn and report until the visitors have gone."""
    key = secrets.token_hex(16)
    async with (
        SqliteLightningStore(folder / "store.sqlite") as store,
        FakeUpstream(reply=WORLD.reply, delay_seconds=0.02) as upstream,
        ly.LLMProxy(model_list=[upstream.llm()], store=store, live_key=key, spool=folder / "gateway") as gateway,
    ):
        first = {
            "prompt": PromptTemplate(template=FIRST_PROMPT),
            "llm": ly.LLM(endpoint="http://replaced-by-the-session/v1", model=upstream.model),
        }
        version = await store.update_resources(DESK, first)
        await store.set_label("production", DESK, version.version, who="you", why="the first prompt")
        async with (
            OnlineSession(store, gateway=gateway.endpoint, live_key=key, folder=folder / "session") as session,
            learner(store, folder / "learning", upstream.llm()) as learning,
        ):
            board, is_enough = Board(store), asyncio.Event()
            runner = web.AppRunner(Application(session, board).app(), access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", options.port)
            await site.start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            print(f"The page is at {address}", flush=True)
            beside = [
                asyncio.create_task(work)
                for work in (learning.run(), report(store, options.promotions, board, is_enough))
            ]
            came = await visits(address, options, is_enough)
            while session.status().waiting:  # noqa: ASYNC110 -- a session says how many wait, not when none does
                await asyncio.sleep(0.05)
            for task in beside:
                task.cancel()
            for result in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
            await summarise(store, board, came)
            if not is_enough.is_set():
                print(
                    f"\nThe visitors had gone before {options.promotions} promotions and the thumbs after them. "
                    "Learning gets little CPU on a busy machine; give it time with --visitors 5000."
                )
            if options.stay:
                print(f"\nThe page stays at {address}, without learning; Ctrl-C ends it.", flush=True)
                await asyncio.Event().wait()
            await runner.cleanup()


def main() -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visitors", type=int, default=1400, help="how many come at most")
    parser.add_argument("--rate", type=float, default=12.0, help="visitors a second, on average")
    parser.add_argument("--seed", type=int, default=0, help="of the visitors")
    parser.add_argument("--promotions", type=int, default=2, help="end a hundred thumbs after this many promotions")
    parser.add_argument("--port", type=int, default=0, help="of the page; 0 takes a free one")
    parser.add_argument("--stay", action="store_true", help="keep the page open at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learning-app-") as folder, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
