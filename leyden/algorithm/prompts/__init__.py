"""Parts that all searches for better prompts share.

Lives here: the base class (`base.py`: models, budget, the best prompts), candidates
(`candidate.py`) and how they compare (`comparison.py`), the calls of reflection models and their
replay (`reflector.py`, `journal.py`), what these models read and which of their answers can be used
(`texts.py`), which of several prompts is rewritten (`components.py`), the checks of options
(`options.py`), and what a store keeps of a run (`records.py`, `result.py`). `extraction.py` finds
the prompts of an agent that has them in its code. It knows no optimiser: how candidates are found
and which are kept is decided in `algorithm/apo` and `algorithm/gepa`.
"""

from leyden.algorithm.prompts.base import PromptOptimiser
from leyden.algorithm.prompts.candidate import Branch, Candidate
from leyden.algorithm.prompts.comparison import Comparison
from leyden.algorithm.prompts.records import CandidateRecord, best_label, read_best, read_history
from leyden.algorithm.prompts.result import PromptResult

__all__ = [
    "Branch",
    "Candidate",
    "CandidateRecord",
    "Comparison",
    "PromptOptimiser",
    "PromptResult",
    "best_label",
    "read_best",
    "read_history",
]
