"""Forward passes of a model: its own, or a faster one after a check that both give equal numbers.

- `model_forward`: the protocol `ModelForward`, and the storage of a cache;
- `cached`: runs any causal model of transformers through its own `forward`;
- `layout`: the fast path for the Llama and Qwen family;
- `prefix_tree`: finds the tokens that rows share;
- `products`: faster matrix products on some CPUs;
- `recompute`: activations that are computed again for the gradient;
- `choose`: checks the candidates on probes, and returns the fastest that is right.

The package does not sample, train or serve. To add a fast path for another layout, implement `ModelForward` and add it
to `choose.CANDIDATES`; the probe decides whether it is used.
"""
