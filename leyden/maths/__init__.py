"""Advantages, returns and losses as pure functions of numbers.

This package knows no spans, store or framework. Each kind has a module: `advantages` (lists of
floats), `returns` (NumPy arrays) and `losses` (torch tensors). NumPy is imported by `returns` only,
and torch by none, so that a process that only configures them does not pay.

To add an estimator or a loss, see the module; test it against an independent formula.
"""

from leyden.maths.advantages import ESTIMATORS, Advantages, make_advantages, register_estimator
from leyden.maths.losses import LOSSES, Loss, make_loss, register_loss

__all__ = [
    "ESTIMATORS",
    "LOSSES",
    "Advantages",
    "Loss",
    "make_advantages",
    "make_loss",
    "register_estimator",
    "register_loss",
]
