"""Advantages, returns and losses as pure functions of numbers.

This package knows no spans, store or framework. Each kind has a module: `advantages` (lists of floats), `returns`
(NumPy arrays) and `losses` (torch tensors). Only `returns` imports NumPy, and no module imports torch, so that a
process that only configures them does not pay for it.

To add an estimator or a loss, follow the docstring of `advantages` or `losses`; test it against an independent formula.
"""

from leyden.objectives.advantages import ESTIMATORS as ESTIMATORS
from leyden.objectives.advantages import Advantages as Advantages
from leyden.objectives.advantages import make_advantages as make_advantages
from leyden.objectives.advantages import register_estimator as register_estimator
from leyden.objectives.losses import LOSSES as LOSSES
from leyden.objectives.losses import Loss as Loss
from leyden.objectives.losses import make_loss as make_loss
from leyden.objectives.losses import register_loss as register_loss
