"""Read `--model NAME=URL` and `--model NAME=FOLDER`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from leyden.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelOption:
    """A model of the command line: its name, and where it is."""

    name: str
    address: str
    """The base URL of the model's server, or the model's folder or hub name."""
    is_folder: bool
    """Whether the command is to load the model itself."""

    @classmethod
    def of(cls, text: str) -> ModelOption:
        """Return the model that one `--model` names. Raise ConfigError for another form or a missing folder."""
        from leyden.engine.source import why_not_loadable  # `leyden --help` does not load the engine

        name, equals, address = text.partition("=")
        if not (name and equals and address):
            raise ConfigError(
                f"--model is {text!r}; it must be NAME=URL or NAME=FOLDER, such as policy=http://127.0.0.1:8000/v1"
            )
        if "://" not in address and (reason := why_not_loadable(address)):
            raise ConfigError(f"--model {text}: {reason}")
        is_path = address.startswith((".", "/", "~")) or ("://" not in address and address.count("/") > 1)
        is_gguf = address.lower().endswith(".gguf") and Path(address).is_file()
        if is_path and not is_gguf and not Path(address).is_dir():
            raise ConfigError(f"--model {text}: there is no folder {address}")
        is_folder = is_path or is_gguf or Path(address).is_dir() or _HUB_NAME.fullmatch(address) is not None
        return cls(name, address, is_folder)
