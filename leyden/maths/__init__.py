"""Advantages, returns and losses as pure functions: numbers in, numbers out.

`advantages` needs nothing, `returns` needs NumPy and `losses` needs torch, so each is imported by its
users. They know no spans, no store and no model. To add an estimator or a loss, write a function with
its source, add it to `advantages.ESTIMATORS` or `losses.LOSSES`, and test it against an independent
formula.
"""

from leyden.maths.advantages import ESTIMATORS, AdvantageEstimator

__all__ = ["ESTIMATORS", "AdvantageEstimator"]
