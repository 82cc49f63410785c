"""The command `agl` of Agent Lightning, as in `python -m leyden.compat agl store --port 4747`.

`agl store` serves a store to clients of Agent Lightning 0.3 and of Leyden at one address. The other subcommands print
what to use instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, Final

from leyden.errors import LeydenError
from leyden.store import open_store
from leyden_compat.agentlightning import answers as say
from leyden_compat.agentlightning.logs import setup
from leyden_compat.agentlightning.store import LightningStoreServer

INSTEAD: Final[dict[str, str]] = {"vllm": say.VLLM, "prometheus": say.PROMETHEUS, "agentops": say.AGENTOPS_SERVICE}
"""The subcommands of `agl` that Leyden lacks, each with the text that says what to use instead."""


def main(argv: Iterable[str] | None = None) -> int:
    """Run a subcommand of `agl`, and return the exit status."""
    parser = argparse.ArgumentParser(prog="agl", description="The command of Agent Lightning, served by Leyden.")
    parser.add_argument("subcommand", choices=["store", *INSTEAD], help="store: serve a store")
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(None if argv is None else list(argv))
    if options.subcommand == "store":
        return store_main(options.args)
    sys.stderr.write(f"error: `agl {options.subcommand}` has no counterpart in Leyden: {INSTEAD[options.subcommand]}\n")
    return 1


def store_main(argv: Iterable[str] | None = None) -> int:
    """Serve a store until Ctrl-C or SIGTERM, and return the exit status."""
    options = _store_parser().parse_args(None if argv is None else list(argv))
    setup(options.log_level)
    if options.backend == "mongo":
        sys.stderr.write("error: Leyden has no store on MongoDB; give --url postgresql://user@host/database\n")
        return 1
    try:
        asyncio.run(_serve(options.url, options.host, options.port, options.cors_origin))
    except LeydenError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _store_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agl store", description="Serve a store to clients of Agent Lightning 0.3 and of Leyden."
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="0.0.0.0 for other machines: any client may do anything, unless LEYDEN_STORE_TOKEN is set",
    )
    parser.add_argument("--port", type=int, default=4747, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--url", default="memory://", help="what to serve: a file, postgresql://..., or memory:// (the default)"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument("--backend", choices=["memory", "mongo"], default="memory", help="mongo: use --url instead")
    no_effect = "of no effect: "
    parser.add_argument("--tracker", nargs="+", help=no_effect + "metrics are at /metrics")
    parser.add_argument("--n-workers", type=int, default=1, help=no_effect + "one process serves")
    parser.add_argument("--cors-origin", action="append", help="an origin whose web pages may call the server")
    return parser


async def _serve(url: str, host: str, port: int, origins: list[str] | None) -> None:
    """Serve the store until SIGTERM, with the token in `LEYDEN_STORE_TOKEN` if it is set."""
    token = os.environ.get("LEYDEN_STORE_TOKEN")
    options: dict[str, Any] = {"token": token} if token else {}
    async with open_store(url) as store:
        server = LightningStoreServer(store, host, port, origins, **options)
        await server.start()
        sys.stdout.write(f"{server.endpoint} serves {store.url}\n")
        sys.stdout.flush()
        serving = asyncio.ensure_future(server.run_forever())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
