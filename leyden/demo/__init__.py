"""The demo: a small agent learns to guess a number, over the same road that production uses.

`game` holds the rules, `make_weights` made the starting policy in `weights/`. The game knows nothing of Leyden, so a
demo of another task is another module like it, with its own starting weights.
"""
