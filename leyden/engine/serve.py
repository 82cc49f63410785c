"""The child process of an `IsolatedBackend`: `python -m leyden.engine.serve`.

The process reads its options as one line of JSON from standard input, starts an `EmbeddedBackend`, and writes one line
of JSON to standard output: the port, or the error that prevented the start. It ends when standard input is closed, or
when the parent has gone (another process may have inherited the other end of the pipe). Only the parent handles Ctrl-C.

A companion (`isolated.Visitor` for the parent), such as the run's gateway, may run beside the endpoint in its event
loop. It is closed in good order if the parent lives.
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

from leyden._lib.host.child import end_with_parent
from leyden._lib.logs import setup_relayed_logging
from leyden.engine.control import describe_error, import_loss
from leyden.engine.embedded import Companion, EmbeddedBackend


def main() -> None:
    """Serve until the parent process ends or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup_relayed_logging()
    config = json.loads(sys.stdin.readline())
    serving: list[EmbeddedBackend] = []

    def end() -> None:
        if os.getppid() == config["parent"]:  # else a companion could not write its records to the parent's store
            for backend in serving:
                backend.stop_serving()
        os._exit(0)

    end_with_parent(config["parent"], also=sys.stdin.fileno(), end=end)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries goes to the log, because standard output carries the answer
    # Behind the child's own folders, so that no module beside the parent's script hides one of theirs.
    sys.path += [folder for folder in config["path"] if folder not in sys.path]
    try:
        for name, module in config["losses"].items():
            import_loss(name, module)
        companion: Companion | None = None
        if "visitor" in config:
            function, argument, descriptor = config["visitor"]
            module, name = function.split(":")
            visit = getattr(import_module(module), name)
            companion = partial(visit, pickle.loads(base64.b64decode(argument)), descriptor)
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


if __name__ == "__main__":
    main()
