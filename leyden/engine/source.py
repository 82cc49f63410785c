"""Say why a path is no folder of a model, before a library is asked to load it, and what an adapter belongs to.

The module knows file names of model formats; it loads no library, so that the command line can ask.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from leyden.errors import EngineError

_HUB_NAME: Final = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
ADAPTER: Final = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter, as the package peft names them."""
BASE: Final = "base_model.json"
"""The file beside a trained adapter with the fields of its `BaseModel`."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt"})
"""Suffixes of files of weights."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a trained adapter belongs to."""

    model: str
    """The folder, GGUF file or hub name that the run was given; a path is absolute."""
    folder: str
    """The folder with its files: the one that a GGUF file was written to, or the one in the hub's cache."""
    sha256: str
    """See `model_digest`."""
    dtype: str
    """The type of the weights in training, to which a merged copy is rounded."""

    @classmethod
    def of(cls, folder: str | Path) -> BaseModel | None:
        """Return the base model of the adapter in a folder; None for a whole model. Raise EngineError if the record
        cannot be read.
        """
        path = Path(folder) / BASE
        try:
            return cls(**json.loads(path.read_text())) if path.is_file() else None
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(f"{path} cannot be read, so the adapter's base model is unknown: {error}") from error

    def found(self) -> str | None:
        """Return what to load; None if the base model is gone."""
        return next(
            (name for name in (self.folder, self.model) if Path(name).exists() or not Path(name).is_absolute()), None
        )


def model_files(folder: Path) -> list[Path]:
    """Return the files that decide what a model computes: its configuration and weights."""
    return [each for each in sorted(folder.iterdir()) if each.name == "config.json" or each.suffix in _WEIGHTS]


def model_digest(folder: Path) -> str:
    """Return a SHA-256 of a model's configuration and weights. A gigabyte takes a second."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)  # changes nothing, and each version writes its own
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in model_files(folder):
        if path.suffix != ".json":
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def remedy(adapter: str | Path) -> str:
    """Return how to go on with an adapter whose base model is not where it was."""
    return f"put it back, or give its place now: leyden models export {adapter} FOLDER --base PLACE"


def require_source(name: str | Path) -> None:
    """Raise EngineError unless a model may be found there: in a folder that exists, or by a hub name."""
    if not Path(name).exists() and not (isinstance(name, str) and _HUB_NAME.fullmatch(name)):
        raise EngineError(
            f"there is no folder {str(name)!r} to load a model from (looked for {Path(name).absolute()}); "
            "give an existing folder, or a hub name such as 'Qwen/Qwen3-0.6B'"
        )


def why_not_loadable(source: str | Path) -> str:
    """Return why no model can be loaded from an existing path, or from a GGUF file that is absent, and what to give
    instead; empty if it may be a GGUF file, a model's folder or a hub name.
    """
    path = Path(source)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return "" if path.is_file() else f"there is no file {source}"
    if path.is_file():
        kind = "a file of weights" if path.suffix in _WEIGHTS else "a file"
        return f"{source} is {kind}, not a model's folder; give the folder with its config.json, such as {path.parent}"
    if not path.is_dir():
        return ""
    if (base := BaseModel.of(path)) is not None:
        gone = f"{source} is an adapter of the model {base.model}, which is gone; {remedy(path)}"
        return "" if base.found() else gone
    names = {each.name for each in path.iterdir()}
    if "config.json" not in names:
        if ADAPTER[0] in names:
            return (
                f"{source} is the folder of an adapter; give its base model ({_base_of(path)}), and the folder as "
                f"lora={{'adapter': {str(source)!r}}}"
            )
        if gguf := sorted(name for name in names if name.lower().endswith(".gguf")):
            return f"{source} holds a GGUF file; give {path / gguf[0]}"
        inside = path / "model"
        hint = f"give {inside}" if (inside / "config.json").is_file() else "give a folder that save_pretrained wrote"
        return f"{source} has no config.json, so it is no model's folder; {hint}"
    if not any(Path(name).suffix in _WEIGHTS for name in names):
        return f"{source} has a config.json and no weights (such as model.safetensors); copy them there"
    return ""


def _base_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER[0]).read_text()).get("base_model_name_or_path"))
    except (OSError, ValueError, AttributeError):
        return "unnamed"
