"""The child process of an `IsolatedBackend`: `python -m leyden.engine.serve`.

It reads its options as one line of JSON from standard input, starts an `EmbeddedBackend`, and writes one line of JSON
to standard output: the port, or why it could not start. It lives as long as its parent: it ends when standard input is
closed, or when the parent has gone (another process may have inherited the other end of the pipe). Ctrl-C is the
parent's to handle.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
from typing import Any

from leyden.engine.control import describe_error
from leyden.engine.embedded import EmbeddedBackend
from leyden.utils.logs import setup_relayed_logging


def main() -> None:
    """Serve until the parent goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_relayed_logging()
    config = json.loads(sys.stdin.readline())
    # A parent that dies while the model is loading must not be outlived either.
    threading.Thread(target=_end_with_parent, args=(config["parent"],), name="leyden-parent-watch", daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints belongs to the log
    try:
        backend = EmbeddedBackend(**config["options"], control_key=config["control_key"])
        asyncio.run(backend.start())
        answer: dict[str, Any] = {
            "ok": {"port": int(backend.endpoint().endpoint.rsplit(":", 1)[1].removesuffix("/v1"))}
        }
    except Exception as error:  # noqa: BLE001 -- the parent is told, whatever it is
        answer = describe_error(error)
    print(json.dumps(answer), file=answers, flush=True)
    answers.close()
    if "error" in answer:
        sys.exit(1)
    threading.Event().wait()


def _end_with_parent(parent: int) -> None:
    watched: list[int] = [sys.stdin.fileno()]
    try:
        watched.append(os.pidfd_open(parent))
    except (AttributeError, OSError):  # not Linux, or the parent has gone already: the pipe says so
        pass
    while os.getppid() == parent:
        # The time-out matters only where there are no pidfds.
        readable, _, _ = select.select(watched, [], [], 5.0)
        if readable:
            break
    os._exit(0)


if __name__ == "__main__":
    main()
