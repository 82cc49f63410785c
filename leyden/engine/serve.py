"""The child process of an `IsolatedBackend`: `python -m leyden.engine.serve`.

It reads its options as one line of JSON from standard input, starts an `EmbeddedBackend`, and
writes one line of JSON to standard output: the port, or why it could not start. It lives as long as
its parent: it ends when standard input is closed, or when the parent has gone (another process may
have inherited the other end of the pipe). Ctrl-C is the parent's to handle. A visitor
(`isolated.Visitor`) runs beside the endpoint and ends in good order while the parent lives.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import sys
import threading
from functools import partial
from importlib import import_module
from typing import Any

from leyden.engine.control import describe_error
from leyden.engine.embedded import Companion, EmbeddedBackend
from leyden.host.child import end_with_parent
from leyden.utils.logs import setup_relayed_logging


def main() -> None:
    """Serve until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_relayed_logging()
    config = json.loads(sys.stdin.readline())
    serving: list[EmbeddedBackend] = []

    def end() -> None:
        if os.getppid() == config["parent"]:  # a visitor reports to the parent
            for backend in serving:
                backend.stop_serving()
        os._exit(0)

    end_with_parent(config["parent"], also=sys.stdin.fileno(), end=end)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints belongs to the log
    try:
        companion = _companion(*config["visitor"]) if "visitor" in config else None
        backend = EmbeddedBackend(**config["options"], control_key=config["control_key"], companion=companion)
        asyncio.run(backend.start())
        if companion is not None:
            serving.append(backend)
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


def _companion(function: str, argument: str, descriptor: int) -> Companion:
    module, name = function.split(":")
    return partial(getattr(import_module(module), name), pickle.loads(base64.b64decode(argument)), descriptor)


if __name__ == "__main__":
    main()
