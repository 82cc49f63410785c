"""GEPA: reflective evolution of prompts with a Pareto front over tasks (arXiv:2507.19457).

Lives here: `GEPA` (`algorithm.py`), what the package `gepa` calls (`adapter.py`), the way between
its thread and the event loop (`bridge.py`), the validation race (`race.py`), and what the
reflection model reads of rollouts (`reflective.py`). What other optimisers share is in
`leyden.algorithm.prompts`. The package decides which candidate and which component are next. To use
another of its strategies, pass it in `GEPA.run`.
"""

from leyden.algorithm.gepa.algorithm import GEPA

__all__ = ["GEPA"]
