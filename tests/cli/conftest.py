"""Commands that run in this process set the log up; the tests after them find it as it was."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the `leyden` logger and LEYDEN_LOG back."""
    monkeypatch.delenv("LEYDEN_LOG", raising=False)
    logger = logging.getLogger("leyden")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    os.environ.pop("LEYDEN_LOG", None)  # before monkeypatch puts it back
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)  # forgets what children have cached
