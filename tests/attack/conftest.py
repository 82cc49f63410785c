"""The `attack` fixture, and the table of figures at the end of a run."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.harness import Attack, table

OUTCOME = pytest.StashKey[str]()
FIGURES = Path(os.environ.get("LEYDEN_ATTACK_FIGURES", ".leyden/attack.jsonl")).resolve()
STARTED = time.time()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    if call.when == "call":
        item.stash[OUTCOME] = outcome.get_result().outcome


@pytest.fixture
def attack(request: pytest.FixtureRequest) -> Iterator[Attack]:
    """This test's randomness and figures. `LEYDEN_ATTACK_SEED` repeats a run's choices, though not its timing."""
    seed = int(os.environ.get("LEYDEN_ATTACK_SEED") or random.SystemRandom().randrange(2**31))
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)

    name = request.node.name.replace("test_", "").replace("_", " ")
    attack = Attack(name, seed, say)
    print(f"LEYDEN_ATTACK_SEED={seed} repeats this")
    yield attack
    attack.write(FIGURES, request.node.stash.get(OUTCOME, "error"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the attack did; xdist's parent has the lines of all its processes."""
    lines = [json.loads(line) for line in FIGURES.read_text().splitlines()] if FIGURES.exists() else []
    if ours := [line for line in lines if line["at"] >= STARTED]:
        terminalreporter.section(f"figures of the attack, also in {FIGURES}")
        for row in table(ours):
            terminalreporter.line(row)
