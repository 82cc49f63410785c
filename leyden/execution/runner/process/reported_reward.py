"""Read a program's reward from its last line of output, or from a report that it posts.

| text | is |
|---|---|
| `0.7` | the reward |
| `{"reward": 0.7}` | the reward |
| `{"rewards": {"primary": 0.7, "speed": 1}}` | rewards by name, `primary` first |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from leyden._lib.numbers import as_number
from leyden.types import semconv

FORMS = 'a number, {"reward": number} or {"rewards": {name: number, ...}}'
"""The possible forms of a reward, for messages."""

Reward = Any
"""A number, or values by name. `emit_reward` checks that they are finite numbers."""


def read_reward(text: str | bytes) -> Reward:
    """Return the reward in a text. Raise ValueError for a text in none of the three forms."""
    try:
        value: object = json.loads(text)
    except ValueError:
        value = float(text)  # `.5`, `+1`, which JSON does not have
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        if len(fields) != 1 or not fields.keys() <= {"reward", "rewards"}:
            raise ValueError(f"an object with the fields {sorted(fields)}")
        ((name, value),) = fields.items()
        if isinstance(value, Mapping) != (name == "rewards"):
            raise ValueError(f"{name} is {value!r:.100}")
        if name == "rewards":
            rewards = cast(Mapping[str, Any], value)
            if len(rewards) > 1 and semconv.PRIMARY_REWARD not in rewards:
                raise ValueError(f"of the rewards {sorted(rewards)} none is called {semconv.PRIMARY_REWARD!r}")
            return rewards
    return as_number(value)
