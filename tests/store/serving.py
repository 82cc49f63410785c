"""A store server as a process of its own, which a test kills and starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.store.ports import free_port

__all__ = ["StoreProcess"]


class StoreProcess:
    """`leyden store` as a user starts it, on one port and one file."""

    def __init__(self, path: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        leyden = [sys.executable, "-c", "from leyden.cli import main; main()"]
        self._command = [*leyden, "store", "--url", str(path), "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StoreProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=20)
