"""The most tokens that a sequence of a model can have, by the model's configuration.

Training and sampling compute the log-probability of a token once, in sequences of different length. A model whose
rotary embedding changes the angles of all tokens at a length (LongRoPE, arXiv:2402.13753, and dynamic NTK) gives a
token another log-probability when more tokens follow it, and its cached keys are wrong from that length on. Its context
ends there. The module knows the JSON of transformers' configurations, and loads no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast


def context_of(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the most tokens of a sequence, and what limits them, as a clause for messages.

    config: the configuration of a text model.
    """
    # The second name is GPT-2's. A model that has neither (a state-space model) has no fixed limit.
    context = int(config.get("max_position_embeddings") or config.get("n_positions") or 2048)
    reason = f"the model has a context of {context} tokens"
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind == "longrope":
            switch = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        elif "dynamic" in kind:
            switch = context
        else:
            continue
        if (length := int(switch or context)) <= context:
            context = length
            reason = (
                f"the rotary embedding of the model (rope_type {kind!r}) changes the angles of all tokens of a sequence that "
                f"has more than {length} tokens, so log-probabilities would depend on later tokens"
            )
    return context, reason


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of a model's rotary embeddings: one for all layers, or one for each kind of layer."""
    for field in ("rope_parameters", "rope_scaling"):
        found: Any = config.get(field)
        if isinstance(found, Mapping):
            given = cast(Mapping[str, Any], found)
            yield given
            yield from (cast(Mapping[str, Any], each) for each in given.values() if isinstance(each, Mapping))
