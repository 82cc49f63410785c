"""Waiting for an engine to be in the middle of something."""

from __future__ import annotations

import asyncio

from leyden.engine import PolicyBackend


async def until_sampling(backend: PolicyBackend, n_tokens: int = 1) -> None:
    """Return when `n_tokens` have been sampled since start."""
    async with asyncio.timeout(20):
        while (await backend.statistics()).response_tokens < n_tokens:  # noqa: ASYNC110 -- a backend announces no tokens
            await asyncio.sleep(0.002)


async def until_idle(backend: PolicyBackend) -> None:
    """Return when no row is being decoded."""
    async with asyncio.timeout(20):
        while (await backend.statistics()).extra["rows"]:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
