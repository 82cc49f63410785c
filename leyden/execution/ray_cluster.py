"""Join a Ray cluster for the length of a run, or start one here and end it, and tell how many runners fit on it.

This module knows Ray, and neither runners nor stores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil

from leyden._lib.extras import import_optional
from leyden.errors import ConfigError

logger = logging.getLogger(__name__)

_ADDRESS_VARIABLE = "RAY_ADDRESS"
_AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
_OBJECT_STORE_BYTES = 100 * 2**20
"""The size of a new cluster's object store, which holds the runners' payload and no data."""
_ANSWER_SECONDS = 10.0
"""The seconds that a cluster's server may take to accept a connection."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that this process is connected to."""

    ray: Any
    """The module `ray`."""
    host: str
    """The address at which the cluster's nodes reach this machine."""
    ours: bool
    """Whether the cluster was started for this run, on this machine, so that no node will be added to it."""

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each living node, used or not, by Ray's names."""
        return [dict(node["Resources"]) for node in self.ray.nodes() if node["Alive"]]

    def describe(self) -> str:
        """Return the resources of the nodes as text, for an error."""
        nodes = "; ".join(in_words(node) for node in self.nodes())
        return f"its nodes have: {nodes or 'nothing, there are none'}; free now: {in_words(self.ray.available_resources())}"


def import_ray() -> Any:
    """Import and return the module `ray`. Raise MissingExtra if it is not installed."""
    return import_optional("ray", extra="ray", needed_by="strategy 'ray'")


def in_words(resources: Mapping[str, float]) -> str:
    """Return resources as text, without zeros and without the entries that Ray adds for itself."""
    words = [
        f"{name}={amount / 2**30:.1f} GB" if name == "memory" else f"{name}={amount:g}"
        for name, amount in sorted(resources.items())
        if amount and not name.startswith(("node:", "object_store_memory", "accelerator_type:"))
    ]
    return ", ".join(words) or "nothing"


def room_for(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]], wanted: int) -> int:
    """Return how many of `wanted` runners, each with this need, fit on nodes that are otherwise empty."""
    room = 0
    for node in nodes:
        # 1e-9: 0.3 / 0.1 is a little less than 3.
        shares = [int(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount > 0]
        room += min(shares, default=wanted)
    return min(wanted, room)


@asynccontextmanager
async def connected(address: str | None) -> AsyncGenerator[Cluster]:
    """Connect to the cluster at `address`, or to a default one, and yield it.

    address: None selects the cluster that this process is connected to, else that of RAY_ADDRESS, else a new one, which
        ends with the context.
    Raise ConfigError if there is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ConfigError(
                f"address={address!r}, but this process is connected to a Ray cluster already; leave address out to use that one"
            )
        yield Cluster(ray, _host_towards(ray.get_runtime_context().gcs_address), ours=False)
        return
    if address in (None, "auto"):
        address = os.environ.get(_ADDRESS_VARIABLE) or address or "local"
    # In a thread that lives as long as the cluster, because Ray's processes end with the thread that started them; and
    # not in the main thread, because Ray installs signal handlers there.
    thread = ThreadPoolExecutor(1, thread_name_prefix="leyden-ray")
    loop = asyncio.get_running_loop()
    short = "/tmp" if sys.platform == "darwin" else None  # holds Ray's sockets, whose paths must be short
    with tempfile.TemporaryDirectory(prefix="leyden-ray-", dir=short, ignore_cleanup_errors=True) as folder:
        auth_mode = os.environ.get(_AUTH_MODE_VARIABLE)
        connecting = loop.run_in_executor(thread, _connect, ray, address, folder)
        try:
            cluster = await asyncio.shield(connecting)
            if threading.current_thread() is threading.main_thread():
                # Ray's handler, below Python's, kills the process 3 s after SIGTERM. This installs Python's again.
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            yield cluster
        finally:
            await asyncio.shield(loop.run_in_executor(thread, _disconnect, ray, folder))
            _set_auth_mode(ray, auth_mode)
            thread.shutdown(wait=False)


def _set_auth_mode(ray: Any, mode: str | None) -> None:
    """Set or clear the variable that turns on Ray's tokens. Starting a cluster turns them on for the whole process,
    which could then not talk to a cluster without them.
    """
    if os.environ.get(_AUTH_MODE_VARIABLE) == mode:
        return
    if mode is None:
        del os.environ[_AUTH_MODE_VARIABLE]
    else:
        os.environ[_AUTH_MODE_VARIABLE] = mode
    with contextlib.suppress(AttributeError):  # Ray itself does this after a change; the names are private
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _connect(ray: Any, address: str, folder: str) -> Cluster:
    """Join the cluster at `address`, or start one on this machine for "local", and return it.

    folder: for the files of a cluster that is started. Raise ConfigError if there is no cluster.
    """
    ours = address == "local"
    options: dict[str, Any] = {"address": address, "configure_logging": False}
    if ours:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options |= {
            "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "_temp_dir": folder,
        }
    rays_log = logging.getLogger("ray")
    level = rays_log.level
    try:
        at = urlsplit(address if "://" in address else f"//{address}")
        if at.hostname is not None and at.port is not None:  # Ray would try for minutes to connect
            socket.create_connection((at.hostname, at.port), timeout=_ANSWER_SECONDS).close()
        rays_log.setLevel(logging.ERROR)
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as error:
        if ours:
            raise ConfigError(f"no Ray cluster could be started on this machine: {error}") from error
        raise ConfigError(
            f"address={address!r}: no Ray cluster there can be joined: {error}. Start one with `ray start --head`; set RAY_AUTH_MODE=token "
            f"if it asks for its token; or leave address out (and {_ADDRESS_VARIABLE} unset) for one that lives as long as the run"
        ) from error
    finally:
        rays_log.setLevel(level)
    if ours:
        return Cluster(ray, "127.0.0.1", ours=True)
    server = address if "://" in address else f"ray://{ray.get_runtime_context().gcs_address}"
    return Cluster(ray, _host_towards(urlsplit(server).netloc), ours=False)


def _disconnect(ray: Any, folder: str) -> None:
    """Leave the cluster, and end it if this process started it (with `folder` in its command lines). Ray's own helper
    processes are killed, because they would look for their node for another minute.
    """
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(folder in word for word in child.cmdline()):
                processes += [child, *child.children(recursive=True)]
    ray.shutdown()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _host_towards(netloc: str) -> str:
    parts = urlsplit(f"//{netloc}")
    family, _, _, _, there = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
