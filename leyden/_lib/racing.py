"""Wait for the first of several awaitables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def first_done(
    *work: Awaitable[Any], timeout_seconds: float | None = None
) -> AsyncGenerator[Sequence[asyncio.Future[Any]]]:
    """Run awaitables at the same time. Yield their futures, in order, as soon as one of them is
    done or the time is over. At the end of the block, cancel the unfinished ones, and wait for
    their end.
    """
    futures = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        yield futures
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
