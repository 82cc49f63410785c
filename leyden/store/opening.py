"""Open a store by its address."""

from __future__ import annotations

from pathlib import Path

from leyden._lib.host.listening import UNIX_SCHEME
from leyden._lib.options import check_path, named_arguments
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.store.memory import InMemoryLightningStore
from leyden.store.postgres import PostgresLightningStore
from leyden.store.sql.driver import Durability
from leyden.store.sqlite import SqliteLightningStore


@named_arguments
def open_store(
    url: str | Path,
    *,
    durability: Durability | None = None,
    token: str | None = None,
    read_only: bool = False,
) -> LightningStore:
    """Open the store at `memory://`, `sqlite:///absolute/path`, a plain path, `postgresql://...` or a server's URL
    (`http://host:port`).

    durability: of a file or a database. "process" (the default) survives the death of any process, "power" also a power
        cut.
    token: the server's token; None takes it from LEYDEN_STORE_TOKEN, if it is set.
    read_only: open a file without owning it, while another process may own and write it.
    Raise ConfigError for another address and for an option that the address has no use for. Raise StoreError if the
    store cannot be opened.
    """
    check_path("url", url, example="runs.sqlite")
    scheme, separator, rest = str(url).partition("://")
    if read_only:
        if separator and not (scheme == "sqlite" and rest.startswith("/")):
            raise ConfigError(f"read_only=True is for a store in a file, not for {url}; leave it out")
        for name, value in {"durability": durability, "token": token}.items():
            if value is not None:
                raise ConfigError(f"{name} has no effect with read_only=True; leave it out")
        return SqliteLightningStore(rest if separator else url, read_only=True)
    if scheme in ("http", "https", UNIX_SCHEME) and separator:
        if durability is not None:
            raise ConfigError(f"durability={durability!r} is an option of the server; leave it out for {url}")
        from leyden.store.client import LightningStoreClient

        return LightningStoreClient(str(url), token=token)
    if token is not None:
        raise ConfigError(f"a token is for a store server, and {str(url)!r} is opened here; leave it out")
    if not separator:
        return SqliteLightningStore(url, durability=durability or "process")
    if scheme == "sqlite" and rest.startswith("/"):
        return SqliteLightningStore(rest, durability=durability or "process")
    if scheme in ("postgresql", "postgres"):
        return PostgresLightningStore(str(url), durability=durability or "process")
    if scheme == "memory" and not rest:
        if durability is not None:
            raise ConfigError(
                f"memory:// is lost with its process, so durability={durability!r} has no effect; leave it out"
            )
        return InMemoryLightningStore()
    raise ConfigError(
        f"cannot open a store at {str(url)!r}; possible: memory://, sqlite:///absolute/path, a path, "
        "postgresql://user@host/database, or http://host:port (http+unix://%2Fpath) of a store server"
    )
