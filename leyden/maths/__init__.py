"""Advantages, returns and losses as pure functions of numbers.

This package knows no spans, store or framework. Each kind has a module: `advantages` (lists of
floats), `returns` (NumPy arrays) and `losses` (torch tensors). NumPy is imported by `returns` only,
and torch by none, so that a process that only configures them does not pay.

To add an estimator or a loss, see the module; test it against an independent formula.
"""

from leyden.maths.advantages import ESTIMATORS as ESTIMATORS
from leyden.maths.advantages import Advantages as Advantages
from leyden.maths.advantages import make_advantages as make_advantages
from leyden.maths.advantages import register_estimator as register_estimator
from leyden.maths.losses import LOSSES as LOSSES
from leyden.maths.losses import Loss as Loss
from leyden.maths.losses import make_loss as make_loss
from leyden.maths.losses import register_loss as register_loss
