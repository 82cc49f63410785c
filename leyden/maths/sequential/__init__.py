"""Sequential tests by betting: evidence that may be read after every observation.

`difference` compares the means of two arms of randomised traffic, `ranks` makes unbounded values
comparable, `share` checks the randomisation, `change` finds a drop of a mean against a reference,
and `finite` tests the mean of a finite population. All are pure functions of numbers over small
frozen states, without NumPy.

An *e-process* is a non-negative process whose expectation is at most 1 at every stopping time, if
the null hypothesis holds. So it exceeds 1 / error with a probability of at most `error`, however
often it is read (Ville's inequality, 1939). This package knows no release, store or request: a
caller orders the observations and knows the randomisation.

To add a test: a module with a frozen state and a function that returns the next one. Its tests
compute the expectation over all outcomes of a small case exactly, and simulate the null hypothesis.
"""

from leyden.maths.sequential.change import ChangeEvidence, observe_change
from leyden.maths.sequential.difference import (
    FRACTIONS,
    STAKES,
    ArmTotals,
    Evidence,
    average_log_e,
    observe_difference,
    weighted_difference,
)
from leyden.maths.sequential.finite import ShortfallEvidence, observe_shortfall
from leyden.maths.sequential.ranks import RankHistory, observe_rank
from leyden.maths.sequential.share import ShareEvidence, observe_share

__all__ = [
    "FRACTIONS",
    "STAKES",
    "ArmTotals",
    "ChangeEvidence",
    "Evidence",
    "RankHistory",
    "ShareEvidence",
    "ShortfallEvidence",
    "average_log_e",
    "observe_change",
    "observe_difference",
    "observe_rank",
    "observe_share",
    "observe_shortfall",
    "weighted_difference",
]
