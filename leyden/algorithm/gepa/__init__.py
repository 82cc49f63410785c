"""GEPA: reflective evolution of prompts with a Pareto front over tasks (arXiv:2507.19457).

The search itself is that of the package `gepa`, which decides which candidate and which component are next. This
package holds `GEPA` (`gepa.py`), the functions that `gepa` calls (`adapter.py`), the calls from its thread to the event
loop (`bridge.py`), the validation race (`race.py`), and the records of rollouts for the reflection model
(`reflective.py`). `leyden.algorithm.prompts` has the parts that all optimisers use. To use another strategy of `gepa`,
pass it in `adapter.optimise`.
"""

from leyden.algorithm.gepa.gepa import GEPA

__all__ = ["GEPA"]
