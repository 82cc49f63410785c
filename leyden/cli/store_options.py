"""The options of commands that read a store: its address, its server's token, and how long to wait.

The module only declares them, so that importing it costs nothing but typer.
"""

from __future__ import annotations

from typing import Annotated

import typer

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
