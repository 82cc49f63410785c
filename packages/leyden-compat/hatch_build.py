"""Declares the dependency on Leyden of the same version, which stands in one place: `leyden/__init__.py`."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"leyden=={metadata['version']}"]
