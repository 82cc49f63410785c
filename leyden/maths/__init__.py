"""Advantages, returns and losses as pure functions of numbers.

This package knows no spans, store or framework. Each kind has a module: `advantages` (lists of floats),
`returns` (NumPy arrays) and `losses` (torch tensors). NumPy is imported by `returns` only, so that
the rest works without it.

To add an estimator or a loss, add its function to the module, with its source in the docstring, and
its name to the registry (`ESTIMATORS`, `LOSSES`); test it against an independent formula.
"""

from leyden.maths.advantages import ESTIMATORS, Estimator

__all__ = ["ESTIMATORS", "Estimator"]
