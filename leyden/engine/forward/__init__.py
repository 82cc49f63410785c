"""Forward passes of a model: its own, or a faster one after a check that both give equal numbers.

`base` is the protocol, `cached` runs any causal model of transformers through its own `forward`,
`layout` is the fast path for the Llama and Qwen family, `prefix_tree` finds the tokens that rows
share, `choose` proves a candidate on probes and falls back. Nothing here samples, trains or serves.
To add a fast path for another layout: implement `ModelForward` and name it in `choose.CANDIDATES`;
the probe decides whether it is used.
"""
