"""Importing this module adds Leyden's engines to verl's registries: the rollout engine `leyden`,
and, with `VERL_PLATFORM=cpu`, the FSDP2 engine of CPUs.

Each of verl's processes imports it, because `actor_rollout_ref.model.external_lib` names it.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from verl.plugin.platform import get_platform

from leyden.algorithm.verl import replica

replica.register()
if get_platform().device_name == "cpu":
    from leyden.algorithm.verl.cpu import register_engine

    register_engine()
