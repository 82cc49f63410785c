"""Sequential tests by betting, whose evidence may be read after every observation, and a model of effects.

`difference` compares the means of two arms of randomised traffic and checks the randomisation, `ranks` makes unbounded
values comparable, `change` finds a drop of a mean against a reference, and `finite` tests the mean of a finite
population. All are pure functions of numbers over small frozen states, without NumPy. `effects` estimates what each
edit of a prompt adds to its reward, and `intervals` has confidence intervals for numbers that are read once.

An *e-process* is a non-negative process whose expectation is at most 1 at every stopping time, if the null hypothesis
holds. So it exceeds 1 / error with a probability of at most `error`, however often it is read (Ville's inequality,
1939). This package knows no release, store or request: a caller orders the observations and knows the randomisation.

To add a test, write a module with a frozen state and a function that returns the next state. Test it by computing the
expectation over all outcomes of a small case exactly, and by simulating the null hypothesis.
"""

from leyden.statistics.change import ChangeEvidence as ChangeEvidence
from leyden.statistics.change import observe_change as observe_change
from leyden.statistics.difference import FRACTIONS as FRACTIONS
from leyden.statistics.difference import STAKES as STAKES
from leyden.statistics.difference import ArmTotals as ArmTotals
from leyden.statistics.difference import Evidence as Evidence
from leyden.statistics.difference import ShareEvidence as ShareEvidence
from leyden.statistics.difference import average_log_e as average_log_e
from leyden.statistics.difference import observe_difference as observe_difference
from leyden.statistics.difference import observe_share as observe_share
from leyden.statistics.difference import weighted_difference as weighted_difference
from leyden.statistics.effects import EffectModel as EffectModel
from leyden.statistics.effects import Effects as Effects
from leyden.statistics.finite import ShortfallEvidence as ShortfallEvidence
from leyden.statistics.finite import observe_shortfall as observe_shortfall
from leyden.statistics.intervals import Estimate as Estimate
from leyden.statistics.intervals import Sample as Sample
from leyden.statistics.intervals import estimate as estimate
from leyden.statistics.intervals import paired_difference as paired_difference
from leyden.statistics.intervals import unpaired_difference as unpaired_difference
from leyden.statistics.ranks import RankHistory as RankHistory
from leyden.statistics.ranks import observe_rank as observe_rank
