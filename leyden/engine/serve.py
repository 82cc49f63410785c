"""The child process of an `IsolatedBackend`: `python -m leyden.engine.serve`.

It reads its options as one line of JSON from standard input, starts an `EmbeddedBackend`, and
writes one line of JSON to standard output: the port, or why it could not start. It lives as long as
its parent: it ends when standard input is closed, or when the parent has gone (another process may
have inherited the other end of the pipe). Ctrl-C is the parent's to handle.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

from leyden.engine.control import describe_error
from leyden.engine.embedded import EmbeddedBackend
from leyden.host.child import end_with_parent
from leyden.utils.logs import setup_relayed_logging


def main() -> None:
    """Serve until the parent goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_relayed_logging()
    config = json.loads(sys.stdin.readline())
    end_with_parent(config["parent"], also=sys.stdin.fileno(), end=lambda: os._exit(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints belongs to the log
    try:
        backend = EmbeddedBackend(**config["options"], control_key=config["control_key"])
        asyncio.run(backend.start())
        answer: dict[str, Any] = {
            "ok": {"port": int(backend.endpoint().endpoint.rsplit(":", 1)[1].removesuffix("/v1"))}
        }
    except Exception as error:  # noqa: BLE001 -- every error is reported to the parent
        answer = describe_error(error)
    print(json.dumps(answer), file=answers, flush=True)
    answers.close()
    if "error" in answer:
        sys.exit(1)
    threading.Event().wait()


if __name__ == "__main__":
    main()
