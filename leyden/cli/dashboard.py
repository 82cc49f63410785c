"""`leyden dashboard`: every run as pages in a browser."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from leyden.cli.output import echo
from leyden.errors import ConfigError

DEFAULT_PORT = 4750


def dashboard(
    place: Annotated[
        str, typer.Argument(help="A folder of runs, the folder of one run, or the path or URL of a store.")
    ] = ".leyden",
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LEYDEN_DASHBOARD_TOKEN",
            show_envvar=True,
            help="Token that browsers must send; other machines need one.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser: running, finished, crashed, from their files or from a store, until Ctrl-C.

    Runs are not changed; a reviewer's answers are added to their stores. The pages are served to this machine alone,
    unless --host says more, which needs a token.

    \b
    Examples:
      leyden dashboard
      leyden dashboard runs/mine
      leyden dashboard http://127.0.0.1:4747
      leyden dashboard --host 0.0.0.0 --token "$(openssl rand -hex 16)"
    """
    import asyncio

    from leyden._lib.host.listening import check_token
    from leyden._lib.logs import setup_logging
    from leyden.dashboard import Source

    setup_logging("WARNING")
    check_token("--token", token, host=host)
    source = Source(place)
    source.runs()  # an unreachable store or an unreadable folder is said now
    asyncio.run(_serve(source, host, port, token))


async def _serve(source: object, host: str, port: int, token: str | None) -> None:
    """Serve until SIGINT or SIGTERM. Print the address when it listens."""
    import asyncio

    from leyden._lib.host.asgi import AsgiServer
    from leyden._lib.host.http import SiteGuard
    from leyden._lib.host.listening import is_loopback, listen, netloc, reachable
    from leyden.dashboard import DashboardApp, Source

    assert isinstance(source, Source)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another with --port or --host"
        ) from error
    app = DashboardApp(source, token=token, guard=SiteGuard(local_only=token is None and is_loopback(host)))
    server = AsgiServer(app, keep_alive_seconds=75)
    address = f"http://{netloc(reachable(host), listener.getsockname()[1])}/"
    await server.start(listener)
    shown = address if token is None else f"{address}#token={token}"
    echo(f"the runs of {source.name} are at {shown} (Ctrl-C ends it)")
    await ended.wait()
    app.stop_waiting()
    await server.stop(grace_seconds=2.0)
