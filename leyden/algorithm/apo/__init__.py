"""Automatic prompt optimisation: textual gradients and beam search (ProTeGi, arXiv:2305.03495).

Lives here: `APO` (`apo.py`), the state of a search (`search.py`), prompts with the edits of several others
(`joining.py`, `transfer.py`), the number of rollouts of a round (`plan.py`), what the rounds report (`round.py`), and
the requests to the models that criticise and rewrite (`requests.py`, `prompts/`, `writer.py`). What each edit adds to
the reward is estimated in `leyden.statistics`. The code that it shares with other optimisers is in
`leyden.algorithm.prompts`.
"""

from leyden.algorithm.apo.apo import APO

__all__ = ["APO"]
