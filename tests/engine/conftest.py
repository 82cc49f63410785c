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
