"""The common parts of all searches for better prompts.

| module | has |
|---|---|
| `prompt_optimiser.py` | the base class: options, models, budget, the best prompts |
| `candidate.py` | candidates, and the choice of the prompt to rewrite, of several |
| `comparison.py` | how two candidates compare, and the result of a run |
| `reflector.py`, `journal.py` | calls of reflection models, and their replay |
| `texts.py` | what these models read, and which prompts can take the place of others |
| `proposed_prompts.py` | the prompt in an answer |
| `records.py` | what the store keeps of a run |
| `extraction.py` | finds the prompts of an agent that has them in its code |

The package knows no optimiser: `algorithm/apo` and `algorithm/gepa` decide how candidates are found and which of them
are kept. What all rewards together say about each edit is in `leyden.statistics.effects`.
"""

from leyden.algorithm.prompts.candidate import Branch, Candidate
from leyden.algorithm.prompts.comparison import Comparison, PromptResult
from leyden.algorithm.prompts.prompt_optimiser import PromptOptimiser
from leyden.algorithm.prompts.records import CandidateRecord, best_label, read_best, read_history

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
