"""Declares the extra `compat` in released wheels only (`make wheels`).

leyden-compat is on no package index yet. In a clone, `pip install -e '.[compat]'` would therefore take whatever package
somebody registers there under this name.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReleaseMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        if os.environ.get("LEYDEN_RELEASE") == "1":
            metadata["optional-dependencies"]["compat"] = [f"leyden-compat=={metadata['version']}"]
