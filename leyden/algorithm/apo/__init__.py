"""Automatic prompt optimisation: textual gradients and beam search (ProTeGi, arXiv:2305.03495).

Lives here: `APO` (`algorithm.py`), the state of a search (`search.py`), what each edit is worth
(`effects.py`), prompts with the edits of several others (`joining.py`, `transfer.py`), what a round
costs (`plan.py`), and the requests to the models that criticise and rewrite (`requests.py`,
`prompts/`, `writer.py`). What other optimisers share is in `leyden.algorithm.prompts`.
"""

from leyden.algorithm.apo.algorithm import APO

__all__ = ["APO"]
