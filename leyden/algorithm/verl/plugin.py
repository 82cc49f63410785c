"""Importing this module adds Leyden's engines to verl's registries: the rollout engine `leyden`, and the engines of the
platform that `leyden.platform` names.

Each of verl's processes imports it, because `actor_rollout_ref.model.external_lib` names it.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import os
from importlib import import_module

from leyden.algorithm.verl import replica

replica.register()
for name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    register_engine = getattr(import_module(name), "register_engine", None)
    if register_engine is not None:
        register_engine()
