"""The web application that learns from thumbs, run as its reader runs it until a better prompt serves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("openai")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "learning_app" / "app.py"
VERSION = re.compile(r"^ +(\d+) +(\d+) +(\d+)% +(\d+)% *(.*)$", re.MULTILINE)


@asynccontextmanager
async def running(*options: object) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The application, and the address of its page."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(APP), *map(str, options)),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode()
        found = re.fullmatch(r"The page is at (http://\S+)\n", said)
        assert found, said + (await process.stdout.read()).decode()
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_the_prompt_gets_better_while_visitors_come() -> None:
    async with running("--visitors", 2400, "--rate", 12, "--promotions", 1) as (process, _):
        assert process.stdout is not None
        printed = (await process.stdout.read()).decode()
        assert await process.wait() == 0, printed
    states = ["training", "gating", "trained", "canary", "promoted"]
    assert [state for state in re.findall(r"-0*1(?:-release)? is (\w+)", printed) if state in states] == states, printed
    assert "Traceback" not in printed and " failed" not in printed, printed
    versions = {int(number): (int(up), int(truth), labels) for number, _, up, truth, labels in VERSION.findall(printed)}
    (production,) = [number for number, (*_, labels) in versions.items() if "production" in labels]
    assert production > 1, printed
    assert versions[production][1] >= versions[1][1] + 15, "the prompt is better by the truth that no part of it knows"
    assert versions[production][0] >= versions[1][0] + 10, "visitors see it too"
    shares = re.search(r"Thumbs up: (\d+)% of the first eighty, (\d+)% of the last eighty", printed)
    assert shares and int(shares[2]) >= int(shares[1]) + 15, printed


async def test_the_page_shows_versions_and_a_person_can_ask_and_press_a_thumb() -> None:
    async with running("--visitors", 3, "--stay") as (process, address), aiohttp.ClientSession(address) as http:
        async with http.get("/") as page:
            assert page.status == 200 and "/board" in await page.text()
        given = {"ticket": "Ticket 1000000, shop: please help.", "visitor": "ada"}
        async with http.post("/tickets", json=given) as response:
            answered = await response.json()
        assert answered["version"] == 1 and "olved." in answered["answer"]
        for body in ({"claim": answered["claim"]}, {"claim": answered["claim"], "thumb": "sideways"}, []):
            async with http.post("/thumbs", json=body) as response:
                assert response.status == 400 and (await response.json())["error"]
        async with http.post("/thumbs", json={"claim": answered["claim"], "thumb": "thumbs_up"}) as response:
            assert response.status == 200
        async with asyncio.timeout(20):
            while not (board := await shown(http))["versions"][0]["thumbs"]:  # noqa: ASYNC110 -- the thumb is on its way
                await asyncio.sleep(0.05)
        assert board["versions"][0]["labels"] == ["production"] and board["versions"][0]["prompt"]
        assert board["events"][-1]["text"] == "production is on version 1 by you: the first prompt"
        assert process.stdout is not None
        while not (line := await process.stdout.readline()).startswith(b"The page stays"):
            assert line, "it ended without saying that the page stays"
        process.send_signal(signal.SIGINT)
        assert await process.stdout.read() == b"" and await process.wait() == 0


async def shown(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/board") as response:
        return await response.json()
