"""`leyden gateway`: the gateway alone, for agents and runners that were started elsewhere."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from leyden.cli.model_option import ModelOption
from leyden.cli.output import echo
from leyden.errors import redact

DEFAULT_PORT = 4748


def gateway(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=URL|FOLDER",
            help="A model's name, and its server's base URL or its folder; several times for several.",
        ),
    ],
    store: Annotated[
        str,
        typer.Option(
            envvar="LEYDEN_STORE",
            show_envvar=True,
            help="Where calls are recorded: http://HOST:PORT, postgresql://..., a file, memory://.",
        ),
    ] = "http://127.0.0.1:4747",
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LEYDEN_GATEWAY_TOKEN",
            show_envvar=True,
            help="Token that clients must send; other machines need one.",
        ),
    ] = None,
    live_key: Annotated[
        str | None,
        typer.Option(envvar="LEYDEN_LIVE_KEY", show_envvar=True, help="The secret that serving sessions sign with."),
    ] = None,
    model_key: Annotated[
        str | None,
        typer.Option(envvar="LEYDEN_MODEL_KEY", show_envvar=True, help="The API key that the models' servers want."),
    ] = None,
    record_tokens: Annotated[
        bool,
        typer.Option(help="Ask servers for token ids; not for those that refuse unknown fields (api.openai.com)."),
    ] = True,
    durable: Annotated[
        bool, typer.Option("--durable", help="Record each call before the last byte of its answer.")
    ] = False,
    spool: Annotated[
        Path | None,
        typer.Option(help="A file for records that wait while the store is away, also for the next gateway with it."),
    ] = None,
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", min=1, help="The most of one request, in MiB; a larger one is refused.")
    ] = 64,
    num_workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the port, each with attempts of its own.")
    ] = 1,
) -> None:
    """Pass model calls on and record each in its attempt, until Ctrl-C or SIGTERM.

    Agents call http://HOST:PORT/rollout/ID/attempt/ID/v1, or http://HOST:PORT/v1 with the attempt's key. A model that
    is named several times has several servers. A folder is loaded here, by Leyden's own engine, such as the model/ that
    a training run leaves in its folder. Runners end their attempts here if they have the same LEYDEN_STORE_TOKEN;
    without one, the gateway's token serves.

    \b
    Examples:
      leyden gateway --model policy=http://127.0.0.1:8000/v1
      leyden gateway --model a=http://gpu-1:8000/v1 --model a=http://gpu-2:8000/v1
      leyden gateway --model policy=.leyden/my-run/model
      leyden gateway --num-workers 4 --model policy=http://gpu-1:8000/v1
      LEYDEN_GATEWAY_TOKEN=secret leyden gateway --host 0.0.0.0 --model policy=http://gpu-1:8000/v1
    """
    import asyncio

    from leyden._lib.aio import look_for_cycles_rarely
    from leyden._lib.logs import setup_logging

    setup_logging("WARNING")
    given = [ModelOption.of(text) for text in model]
    models = [
        {"model_name": each.name, "endpoint": each.address, "api_key": model_key, "record_tokens": record_tokens}
        for each in given
        if not each.is_folder
    ]
    options: dict[str, Any] = {"host": host, "token": token, "model_list": models, "durable": durable}
    options["max_body_bytes"] = max_body_mb * 2**20
    options["spool"] = spool
    options["live_key"] = live_key
    look_for_cycles_rarely()
    asyncio.run(_serve(store, port, num_workers, options, [each for each in given if each.is_folder]))


async def _serve(
    store: str, port: int, num_workers: int, options: dict[str, Any], folders: Sequence[ModelOption]
) -> None:
    """Run the gateway until SIGINT or SIGTERM, and before it an engine for each folder. Print its address and whether
    the models' servers answer.
    """
    from leyden.gateway.upstream import upstream_models

    upstream_models(options["model_list"])  # a wrong URL is told before a model is loaded
    async with AsyncExitStack() as engines:
        loaded = [await engines.enter_async_context(_loaded(model)) for model in folders]
        served = {**options, "model_list": [*options["model_list"], *loaded]}
        await _serve_models(store, port, num_workers, served, servers=options["model_list"])


@asynccontextmanager
async def _loaded(model: ModelOption) -> AsyncGenerator[dict[str, Any]]:
    from leyden.engine import EmbeddedBackend

    async with EmbeddedBackend(model.address, model_name=model.name, api_key=secrets.token_urlsafe()) as engine:
        llm = engine.endpoint()
        yield {"model_name": llm.model, "endpoint": llm.endpoint, "api_key": llm.api_key}


async def _serve_models(
    store: str, port: int, num_workers: int, options: dict[str, Any], *, servers: Sequence[Mapping[str, Any]]
) -> None:
    """Run the gateway until SIGINT or SIGTERM.

    servers: the models whose servers other programs run.
    """
    import asyncio

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    opened = (
        _in_this_process(store, port, options)
        if num_workers == 1
        else _in_worker_processes(store, port, num_workers, options)
    )
    async with opened as (endpoint, recording):
        who = "with the token" if options["token"] else "without a token"
        names = ", ".join(dict.fromkeys(entry["model_name"] for entry in options["model_list"]))
        by = f", by {num_workers} processes" if num_workers > 1 else ""
        echo(f"serving {names} at {endpoint}, {who}{by}; recording in {recording}")
        checks = asyncio.ensure_future(_report_targets(store, servers))
        await ended.wait()
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)


async def _report_targets(store: str, models: Sequence[Mapping[str, Any]]) -> None:
    """Report on standard error which servers of models, and which store server, answer.

    Return when each of them has accepted a connection.
    """
    import asyncio

    from leyden.cli.connecting import connect, is_remote, store_in_words

    targets = [(f"model {entry['model_name']} at {redact(entry['endpoint'])}", entry["endpoint"]) for entry in models]
    checks = [connect(what, url, meanwhile="calls to it fail") for what, url in targets]
    if is_remote(store):
        checks.append(connect(store_in_words(store), store, meanwhile="calls cannot be recorded"))
    await asyncio.gather(*checks)


@asynccontextmanager
async def _in_this_process(store_url: str, port: int, options: dict[str, Any]) -> AsyncGenerator[tuple[str, str]]:
    """Run the gateway in this process. Yield its address and the URL of its store."""
    from leyden.gateway import LLMProxy
    from leyden.store import open_store

    proxy = LLMProxy(port=port or None, **options)
    proxy.share_control(os.environ.get("LEYDEN_STORE_TOKEN"))
    async with open_store(store_url) as store:
        proxy.set_store(store)
        async with proxy:
            yield proxy.endpoint, store.url


@asynccontextmanager
async def _in_worker_processes(
    store_url: str, port: int, num_workers: int, options: dict[str, Any]
) -> AsyncGenerator[tuple[str, str]]:
    from leyden.gateway.gateway_workers import GatewayWorkers

    secret = os.environ.get("LEYDEN_STORE_TOKEN")
    async with GatewayWorkers(num_workers, store_url=store_url, control_secret=secret, port=port, **options) as gateway:
        yield gateway.endpoint, redact(store_url)
