"""The front door: put an agent, an algorithm and data together and run them.

Lives here: `Trainer`, the resolution of component specs, and the registry of short names. It
knows every part by its protocol only. A new component needs one line in
`registry.py`, or a call of `register_component`.
"""

from leyden.components import build_component, instantiate_component, instantiate_from_spec, load_class
from leyden.runs import RewardMetrics, RunSummary
from leyden.trainer.legacy import TrainerLegacy
from leyden.trainer.registry import register_component, registered_components
from leyden.trainer.trainer import Trainer

__all__ = [
    "RewardMetrics",
    "RunSummary",
    "Trainer",
    "TrainerLegacy",
    "build_component",
    "instantiate_component",
    "instantiate_from_spec",
    "load_class",
    "register_component",
    "registered_components",
]
