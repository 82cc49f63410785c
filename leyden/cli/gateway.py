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
from leyden.errors import ConfigError, redact

DEFAULT_PORT = 4748
UNRECORDED = "none"
"""The `--store` of a gateway that records nothing."""
_ENGINE = ("max_length", "dtype", "tool_parser", "max_batch_rows")
"""Options of the engine that trained a model, with which it is served. The device is that of this machine."""


def gateway(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=URL|FOLDER|RUN",
            help="A model's name, and its server's base URL, its folder, or the run that trained it; several times for several.",
        ),
    ],
    store: Annotated[
        str,
        typer.Option(
            envvar="LEYDEN_STORE",
            show_envvar=True,
            help="Where calls are recorded: http://HOST:PORT, postgresql://..., a file, memory://; none serves anybody, unrecorded.",
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
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What the models charge for tokens; each call is recorded with its cost."),
    ] = None,
    num_workers: Annotated[
        int, typer.Option(min=1, help="Processes that share the port, each with attempts of its own.")
    ] = 1,
) -> None:
    """Pass model calls on and record each in its attempt, until Ctrl-C or SIGTERM.

    Agents call http://HOST:PORT/rollout/ID/attempt/ID/v1, or http://HOST:PORT/v1 with the attempt's key. A model that
    is named several times has several servers. A folder, a GGUF file and the model that a run trained are loaded here,
    by Leyden's own engine. Runners end their attempts here if they have the same LEYDEN_STORE_TOKEN; without one, the
    gateway's token serves.

    --store none serves a trained model to clients that know nothing of Leyden: they call http://HOST:PORT/v1, with the
    token as their API key if there is one, and nothing is recorded.

    \b
    Examples:
      leyden gateway --model policy=http://127.0.0.1:8000/v1
      leyden gateway --model a=http://gpu-1:8000/v1 --model a=http://gpu-2:8000/v1
      leyden gateway --store none --model policy=my-run
      leyden gateway --store none --model policy=smollm2.gguf
      leyden gateway --num-workers 4 --model policy=http://gpu-1:8000/v1
      LEYDEN_GATEWAY_TOKEN=secret leyden gateway --host 0.0.0.0 --model policy=http://gpu-1:8000/v1
    """
    import asyncio

    from leyden._lib.aio import look_for_cycles_rarely
    from leyden._lib.logs import setup_logging
    from leyden.gateway import Prices

    setup_logging("WARNING")
    if store == UNRECORDED:
        _check_unrecorded(
            {"durable": durable, "spool": spool, "live-key": live_key, "num-workers": num_workers > 1, "prices": prices}
        )
        record_tokens = False
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
    options["prices"] = None if prices is None else Prices.of(prices)
    look_for_cycles_rarely()
    folders = [each for each in given if each.is_folder]
    asyncio.run(_serve(store, port, num_workers, options, folders, record_tokens=record_tokens))


def _check_unrecorded(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that has no use where nothing is recorded."""
    if unused := next((name for name, value in options.items() if value), None):
        raise ConfigError(
            f"--{unused} belongs to a gateway that records, and --store none records nothing; leave one out"
        )


async def _serve(
    store: str,
    port: int,
    num_workers: int,
    options: dict[str, Any],
    folders: Sequence[ModelOption],
    *,
    record_tokens: bool,
) -> None:
    """Run the gateway until SIGINT or SIGTERM, and before it an engine for each folder. Print its address and whether
    the models' servers answer.
    """
    import asyncio

    from leyden.gateway.upstream import upstream_models

    upstream_models(options["model_list"])  # a wrong URL is told before a model is loaded
    if folders:  # a thread that loads a model cannot be interrupted, and nothing is lost with it
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            asyncio.get_running_loop().add_signal_handler(number, os._exit, status)
    async with AsyncExitStack() as engines:
        loaded = [
            {**await engines.enter_async_context(_loaded(model)), "record_tokens": record_tokens} for model in folders
        ]
        served = {**options, "model_list": [*options["model_list"], *loaded]}
        await _serve_models(store, port, num_workers, served, servers=options["model_list"])


@asynccontextmanager
async def _loaded(model: ModelOption) -> AsyncGenerator[dict[str, Any]]:
    from leyden.engine import EmbeddedBackend

    echo(f"loading {model.name} from {model.address} ...", err=True)
    trained = {name: model.engine[name] for name in _ENGINE if model.engine.get(name) is not None}
    key = secrets.token_urlsafe()
    async with EmbeddedBackend(model.address, model_name=model.name, api_key=key, **trained) as engine:
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
        echo(f"serving {names} at {endpoint}, {who}{by}; {recording}")
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
    if store != UNRECORDED and is_remote(store):
        checks.append(connect(store_in_words(store), store, meanwhile="calls cannot be recorded"))
    await asyncio.gather(*checks)


@asynccontextmanager
async def _in_this_process(store_url: str, port: int, options: dict[str, Any]) -> AsyncGenerator[tuple[str, str]]:
    """Run the gateway in this process. Yield its address and the URL of its store."""
    from leyden.gateway import LLMProxy
    from leyden.store import open_store

    unrecorded = store_url == UNRECORDED
    proxy = LLMProxy(port=port or None, unrecorded=unrecorded, **options)
    proxy.share_control(os.environ.get("LEYDEN_STORE_TOKEN"))
    async with open_store("memory://" if unrecorded else store_url) as store:
        proxy.set_store(store)
        async with proxy:
            yield proxy.endpoint, "recording nothing" if unrecorded else f"recording in {store.url}"


@asynccontextmanager
async def _in_worker_processes(
    store_url: str, port: int, num_workers: int, options: dict[str, Any]
) -> AsyncGenerator[tuple[str, str]]:
    from leyden.gateway.gateway_workers import GatewayWorkers

    secret = os.environ.get("LEYDEN_STORE_TOKEN")
    async with GatewayWorkers(num_workers, store_url=store_url, control_secret=secret, port=port, **options) as gateway:
        yield gateway.endpoint, f"recording in {redact(store_url)}"
