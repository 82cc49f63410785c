"""The demo: a language model learns to play guess-the-number, with the parts that production uses.

`game.py` is the game, `agent.py` the agent, `make_weights.py` makes the starting policy, `run.py`
trains it, and `watch.py` plays with the result. To try a task of your own, copy these files. Only
the command `leyden demo` uses this package.
"""

from leyden.demo.watch import watch as watch
