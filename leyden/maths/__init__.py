"""Pure advantages, returns and losses: numbers in, numbers out.

It knows no spans, no store and no framework. What needs NumPy (`returns`) or torch (`losses`) is a module of its own that only its users
import. To add an estimator, add a function with its source and a test against an independent formula.
"""

from leyden.maths.advantages import group_advantages

__all__ = ["group_advantages"]
