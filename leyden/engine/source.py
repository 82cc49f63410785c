"""Say why a path is no folder of a model, before a library is asked to load it.

The module knows file names of model formats; it loads no library, so that the command line can ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt"})
"""Suffixes of files of weights."""


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
    names = {each.name for each in path.iterdir()}
    if "config.json" not in names:
        if "adapter_config.json" in names:
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
        return str(json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path"))
    except (OSError, ValueError, AttributeError):
        return "unnamed"
