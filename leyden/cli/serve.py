"""`leyden serve`: a serving session over HTTP, for applications in any language."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from leyden.cli.output import echo
from leyden.errors import ConfigError

DEFAULT_PORT = 4749


def serve(
    run: Annotated[str | None, typer.Argument(hidden=True)] = None,
    *,
    gateway: Annotated[
        str, typer.Option(help="The gateway's address; it has the same live key.")
    ] = "http://127.0.0.1:4748",
    store: Annotated[
        str,
        typer.Option(
            envvar="LEYDEN_STORE", show_envvar=True, help="The store: http://HOST:PORT, postgresql://..., or a file."
        ),
    ] = "http://127.0.0.1:4747",
    live_key: Annotated[
        str | None, typer.Option(envvar="LEYDEN_LIVE_KEY", show_envvar=True, help="The secret shared with the gateway.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LEYDEN_SERVING_TOKEN",
            show_envvar=True,
            help="Token that clients must send; other machines need one.",
        ),
    ] = None,
    canary_percent: Annotated[
        float, typer.Option(min=0, max=99, help="The percentage of users who get a canary that belongs to no release.")
    ] = 0.0,
    salt: Annotated[
        str, typer.Option(help="Chooses which users get such a canary; give a new text for each new canary.")
    ] = "",
    folder: Annotated[
        Path, typer.Option(help="Where records wait while the store is away; one process uses it at a time.")
    ] = Path(".leyden/serving"),
    refresh_seconds: Annotated[
        float, typer.Option(min=0.01, help="How often it looks for a gateway or a store that was away.")
    ] = 0.5,
    model: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL: a model's own address, used unrecorded while the gateway is away."),
    ] = None,
) -> None:
    """Serve released resources to applications, until Ctrl-C or SIGTERM.

    An application posts to /v1/serving/begin and gets resources and a model address for one request. It posts to
    /v1/serving/end when it is done, and to /v1/serving/feedback when an opinion arrives.

    \b
    Examples:
      leyden serve --live-key secret
      leyden serve --live-key secret --canary-percent 10 --model policy=http://127.0.0.1:8000/v1
      curl localhost:4749/v1/serving/begin -d '{"input": "hello", "user": "ada"}'
      curl localhost:4749/v1/serving/feedback -d '{"rollout": "ro-1", "source": "user", "value": 1}'
    """
    import asyncio

    from leyden._lib.host.listening import check_token
    from leyden._lib.logs import setup_logging
    from leyden.serving import Assignment
    from leyden.types import LLM

    if run is not None:
        raise ConfigError(_instead(run))
    setup_logging("WARNING")
    check_token("--token", token, host=host)
    if not live_key:
        raise ConfigError("leyden serve needs the gateway's live key: give --live-key, or set LEYDEN_LIVE_KEY for both")
    own: dict[str, LLM] = {}
    for given in model or ():
        name, equals, url = given.partition("=")
        if not (name and equals and url):
            raise ConfigError(f"--model is {given!r}; it must be NAME=URL, such as policy=http://127.0.0.1:8000/v1")
        own[name] = LLM(endpoint=url, model=name, api_key=os.environ.get("LEYDEN_MODEL_KEY"))
    options = {
        "gateway": gateway,
        "live_key": live_key,
        "assignment": Assignment(canary_percent=canary_percent, salt=salt),
        "folder": folder,
        "refresh_seconds": refresh_seconds,
        "fallback": bool(own),
        "models": own,
    }
    asyncio.run(_serve(store, host, port, token, options))


def _instead(run: str) -> str:
    """Return what serves the model of a run, because this command serves what was released in a store."""
    from leyden.cli.model_option import engine_options, trained_model
    from leyden.training.runs import open_run
    from leyden.training.runs.folder import RUNS

    opened = open_run(run)
    folder = trained_model(opened).parent
    name = engine_options(opened).get("model_name", "policy")
    given = folder.name if folder.parent == RUNS else str(folder)
    command = shlex.join(["leyden", "gateway", "--store", "none", "--model", f"{name}={given}"])
    return (
        f"leyden serve takes no run: it serves the resources that were released in a store. The model of this run is "
        f"served to any client by\n  {command}"
    )


async def _serve(store: str, host: str, port: int, token: str | None, options: dict[str, Any]) -> None:
    """Serve sessions until SIGINT or SIGTERM. Print the address and the labels when it listens."""
    import asyncio

    from leyden._lib.host.asgi import AsgiServer
    from leyden._lib.host.http import SiteGuard
    from leyden._lib.host.listening import is_loopback, listen, netloc, reachable
    from leyden.serving import OnlineSession
    from leyden.serving.serving_app import ServingApp
    from leyden.store import open_store

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another with --port or --host"
        ) from error
    guard = SiteGuard(local_only=token is None and is_loopback(host))
    async with open_store(store) as opened, OnlineSession(opened, **options) as session:
        app = ServingApp(session, token=token, guard=guard, connections=lambda: server.connections)
        server = AsgiServer(app, keep_alive_seconds=75)
        address = f"http://{netloc(reachable(host), listener.getsockname()[1])}"
        await server.start(listener)
        labels = ", ".join(f"{label}: {key[0]} {key[1]}" for label, key in session.status().labels.items())
        missing = "no version has the label production yet"
        echo(f"listening on {address} ({labels or missing}; {'with the token' if token else 'no token'})")
        await ended.wait()
        await server.stop(grace_seconds=2.0)
