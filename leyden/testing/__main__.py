"""`python -m leyden.testing`: serve a `FakeUpstream`, for programs in any language."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from leyden.errors import ConfigError
from leyden.testing.upstream import FakeUpstream


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Return the exit status: 2 if the server cannot start."""
    parser = argparse.ArgumentParser(
        prog="python -m leyden.testing",
        description="A model server that answers with made-up text: OpenAI's chat, completions, responses and embeddings, and "
        "Anthropic's messages, streamed or not, with token ids as vLLM's. An answer depends on the request alone.",
        epilog="example: python -m leyden.testing --port 8000 --model policy --model judge",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="the port on 127.0.0.1; 0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="a name to serve, several times for several (default: any name)",
    )
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="SECONDS", help="how long each answer takes (default: 0)"
    )
    options = parser.parse_args(arguments)
    try:
        upstream = FakeUpstream(model=options.model, delay_seconds=options.delay)
        asyncio.run(_serve(upstream, options.port))
    except (ConfigError, OSError, OverflowError) as error:
        sys.stderr.write(f"the server cannot start: {error}\n")
        return 2
    return 0


async def _serve(upstream: FakeUpstream, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Print the address when the server takes requests."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await upstream.start(port=port)
    try:
        sys.stdout.write(f"serving {', '.join(upstream.models) or 'any model'} at {upstream.endpoint}\n")
        sys.stdout.flush()
        await ended.wait()
    finally:
        await upstream.stop()


if __name__ == "__main__":
    raise SystemExit(main())
