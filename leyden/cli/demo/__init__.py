"""The demo: a language model learns to play guess-the-number, with the parts that production uses.

`game.py` is the game, `demo_agent.py` the agent, `demo_run.py` trains the policy in `weights/`, `watch.py` plays with
the result, and `command.py` is `leyden demo`. To try a task of your own, copy these files. `benchmarks/make_weights.py`
made the weights.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""The folder of a tiny model (117,000 weights) that has never seen the questions of the examples."""
