"""Options of the commands that use a store, and `with_store`, which opens it for the operators' commands (`resources`,
`learning`).

Importing the module costs nothing but typer.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from leyden.store import LightningStore
    from leyden.types import VersionKey

T = TypeVar("T")

StoreAddress = Annotated[
    str, typer.Argument(help="The store: http://host:port, postgresql://..., or a file, in use or not.")
]
ServerToken = Annotated[
    str | None, typer.Option(envvar="LEYDEN_STORE_TOKEN", show_envvar=True, help="What the server asks for.")
]
WAIT_SECONDS = 10.0
"""How long a command that only reads or changes a store waits for a server, unless `--wait` says otherwise."""
ServerWait = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a server that does not answer.")
]

DEFAULT_STORE = "http://127.0.0.1:4747"
StoreUrl = Annotated[
    str,
    typer.Option(
        envvar="LEYDEN_STORE", show_envvar=True, help="The store: http://HOST:PORT, postgresql://..., or a file."
    ),
]
OperatorToken = Annotated[
    str | None,
    typer.Option(
        envvar="LEYDEN_OPERATOR_TOKEN",
        show_envvar=True,
        help="The operators' token of the store's server, to move labels.",
    ),
]
Who = Annotated[str | None, typer.Option(help="Who does it, for the audit log; your login name by default.")]
Why = Annotated[str | None, typer.Option(help="Why, for the audit log.")]


def with_store(
    url: str, token: str | None, work: Callable[[LightningStore], Awaitable[T]], *, read_only: bool = False
) -> T:
    """Open the store, await `work` on it, and return the result.

    read_only: `work` only reads, so a file that is missing is not made but refused.
    token: the operators' token, for a store server; None without one.
    Raise StoreError if the server does not answer within `WAIT_SECONDS`.
    """
    import asyncio

    from leyden.cli.connecting import connect, is_remote, store_in_words
    from leyden.store import LightningStoreClient, open_store

    async def run() -> T:
        if is_remote(url):
            opened = LightningStoreClient(url, token=token, retry_seconds=WAIT_SECONDS)
            await connect(store_in_words(url), url, wait_seconds=WAIT_SECONDS)
        else:
            in_a_file = "://" not in url or url.startswith("sqlite:")
            opened = open_store(url, read_only=read_only and in_a_file)
        async with opened as store:
            return await work(store)

    return asyncio.run(run())


def name_of(key: VersionKey | None) -> str:
    """Return a version as the command line takes it, `ID NUMBER`."""
    return "no version" if key is None else f"{key[0]} {key[1]}"


def login() -> str:
    """Return the name of the person at the keyboard."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return f"uid {os.getuid()}"
