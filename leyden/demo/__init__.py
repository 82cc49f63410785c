"""The demo: a language model learns to play guess-the-number, from HTTP calls to weights through the parts that production uses.

`game.py` is the game, `agent.py` the agent, `make_weights.py` how the starting policy was made, `run.py` the training, `watch.py` what
comes of it. To try a task of your own, copy the four; nothing of Leyden knows this package but the command `leyden demo`.
"""

from leyden.demo.watch import watch as watch
