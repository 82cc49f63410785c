"""Leyden's entry point: `Trainer` runs an agent, an algorithm and data together.

The package holds `Trainer` and the registry of components' short names. It knows every component by its protocol only.
A new component needs one line in `component_registry.py`, or a call of `register_component`.
"""

from leyden._lib.components import build_component as build_component
from leyden._lib.components import instantiate_component as instantiate_component
from leyden._lib.components import instantiate_from_spec as instantiate_from_spec
from leyden._lib.components import load_class as load_class
from leyden.legacy.trainer_legacy import TrainerLegacy as TrainerLegacy
from leyden.trainer.component_registry import register_component as register_component
from leyden.trainer.component_registry import registered_components as registered_components
from leyden.trainer.trainer import Trainer as Trainer
from leyden.training.runs import RewardMetrics as RewardMetrics
from leyden.training.runs import RunSummary as RunSummary
