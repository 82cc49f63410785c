"""`leyden store`: serve a store to other processes and machines, and upgrade an older file."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_data
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from leyden.types import Retention

DEFAULT_PORT = 4747


def store(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="What to serve: sqlite:///absolute/path, a plain path, postgresql://..., memory://.")
    ] = ".leyden/store.db",
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    socket: Annotated[
        Path | None, typer.Option(help="A Unix socket to serve on instead of a port, for this user on this machine.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LEYDEN_STORE_TOKEN", show_envvar=True, help="Token that clients must send; other machines need one."
        ),
    ] = None,
    operator_token: Annotated[
        str | None,
        typer.Option(
            envvar="LEYDEN_OPERATOR_TOKEN", show_envvar=True, help="What moving labels needs, instead of --token."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve other machines without a token: everyone who reaches it may do everything."
        ),
    ] = False,
    durability: Annotated[
        str | None,
        typer.Option(help="Of a file: 'process' survives a killed process, 'power' a power cut too (slower)."),
    ] = None,
    keep_rollouts: Annotated[
        int | None, typer.Option(min=0, help="How many finished rollouts are kept; all by default.")
    ] = None,
    keep_days: Annotated[float | None, typer.Option(min=0.001, help="How long a finished rollout is kept.")] = None,
    keep_gb: Annotated[float | None, typer.Option(min=0.001, help="How many gigabytes of spans are kept.")] = None,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Watch the workers and the store, and write alerts to the log.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve pages of its runs at /dashboard/, too.")
    ] = False,
) -> None:
    """Serve a store over HTTP, until Ctrl-C or SIGTERM.

    Runners and algorithms open it with open_store("http://HOST:PORT"). The REST interface is described at
    /openapi.json; /metrics is for Prometheus.

    \b
    Examples:
      leyden store
      leyden store --url sqlite:///data/runs.db --port 4800
      leyden store --socket /run/user/1000/leyden.sock
      LEYDEN_STORE_TOKEN=secret leyden store --host 0.0.0.0 --keep-days 30
    """
    if context.invoked_subcommand is not None:
        return
    import asyncio

    from leyden._lib.host.listening import check_token
    from leyden._lib.logs import setup_logging
    from leyden.types import Retention

    setup_logging("WARNING")
    retention = Retention(
        max_rollouts=keep_rollouts,
        max_age_seconds=None if keep_days is None else keep_days * 86_400,
        max_bytes=None if keep_gb is None else int(keep_gb * 1e9),
    )
    check_token("--token", token, host=host, or_say="--insecure", insecure=insecure)
    if url.startswith(("http://", "https://", "http+unix://")):
        raise ConfigError(f"--url {url} is served already; give the database behind it, or nothing for a new file")
    if socket is not None and (host, port) != ("127.0.0.1", DEFAULT_PORT):
        raise ConfigError("a server has a port or a socket: leave out --host and --port, or --socket")
    place = {"host": host, "port": port} if socket is None else {"socket_path": socket}
    address = {**place, "token": token, "operator_token": operator_token, "insecure": insecure}
    asyncio.run(_serve(url, durability, address, retention, monitor=monitor, dashboard=dashboard))


def upgrade(
    url: Annotated[str, typer.Argument(help="The store's file, which no process may have open.")] = ".leyden/store.db",
    as_json: AsJson = False,
) -> None:
    """Upgrade a store's file that an older Leyden wrote.

    A program that writes to the store upgrades it by itself; `leyden show` and others only read it.

    \b
    Examples:
      leyden store upgrade .leyden/20260102-101500-ab12/store.sqlite
    """
    import asyncio

    path = Path(url.removeprefix("sqlite://"))
    if not path.is_file():
        raise ConfigError(
            f"there is no store in a file at {url}; give the path of one, such as .leyden/NAME/store.sqlite"
        )
    asyncio.run(_open_once(path))
    echo_data(as_json, {"store": path}, f"{path} is up to date")


async def _open_once(path: Path) -> None:
    from leyden.store import SqliteLightningStore

    async with SqliteLightningStore(path):
        pass


async def _serve(
    url: str, durability: Any, address: dict[str, Any], retention: Retention, *, monitor: bool, dashboard: bool
) -> None:
    """Serve a store until SIGINT or SIGTERM, with the monitor's alerts if `monitor` is set, and with pages if
    `dashboard` is.
    """
    import asyncio

    from leyden.monitor import Monitor
    from leyden.monitor.prometheus import metrics
    from leyden.store import LightningStoreServer, open_store

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with open_store(url, durability=durability) as opened:
        mounts: dict[str, Any] = {}
        if dashboard:
            if opened.url.startswith("memory:"):
                raise ConfigError("--dashboard reads a file or a database, and this store is in memory; give --url")
            from leyden._lib.host.http import SiteGuard
            from leyden.dashboard import DashboardApp, Source

            guard = SiteGuard(local_only=not address["token"] and not address["insecure"])
            source = Source(opened.url, server=lambda: server.client())
            mounts = {"/dashboard": DashboardApp(source, token=address["token"], guard=guard, prefix="/dashboard")}
        server = LightningStoreServer(opened, **address, retention=retention, views=metrics(opened), mounts=mounts)
        async with server, Monitor().watch(opened) if monitor else nullcontext():
            who = "with the token" if address["token"] else "without a token"
            echo(f"serving {opened.url} at {server.endpoint}, {who}")
            echo(f"API reference: {server.endpoint}/openapi.json")
            if dashboard:
                echo(f"dashboard: {server.endpoint}/dashboard/")
            await ended.wait()
