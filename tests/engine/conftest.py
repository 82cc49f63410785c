"""Fixtures of several modules."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.engine import EmbeddedBackend
from tests.engine import tiny
from tests.engine.reciting import Script

QWEN = Path(__file__).parent / "templates/qwen2.5.jinja"


@pytest.fixture(scope="module")
def reciting() -> Iterator[tuple[EmbeddedBackend, Script, Any]]:
    """One engine for all tests of a module: its model says what a test tells it to."""
    tokenizer = tiny.tokenizer(QWEN.read_text())
    script = Script(n_vocabulary=len(tokenizer), eos_id=tokenizer.eos_token_id)
    backend = EmbeddedBackend(script.model, tokenizer=tokenizer)
    asyncio.run(backend.start())
    yield backend, script, tokenizer
    asyncio.run(backend.stop())


_STARTED_TWICE = ("test_a_stopped_backend_starts_again[isolated]", "test_a_state_moves_to_a_fresh_backend[isolated]")
"""Contract tests that cannot share a child process; each starts two, which import torch for seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name in _STARTED_TWICE:
            item.add_marker("slow")
