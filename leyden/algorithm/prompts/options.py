"""Check the options that all prompt optimisers have, so that all refuse the same values.

To add an option of all optimisers, add it here and to `PromptOptimiser.configure`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from leyden._lib.options import check_number
from leyden.algorithm.budget import Budget
from leyden.errors import ConfigError


def check_shared_options(
    *,
    client: object,
    counts: Mapping[str, object],
    temperature: tuple[str, object],
    names: Mapping[str, object],
    rollout_batch_timeout: object,
    test_dataset: object,
    budget: object,
    agent_version: object,
    failed_reward: object,
    seed: object,
) -> None:
    """Raise ConfigError, with the option's name and a remedy, for the first value that is not possible.

    client: the client for the reflection models, or None.
    counts: options that are whole numbers of at least 1, by name.
    temperature: the name and the value of the option for the temperature.
    names: options that name models or resources, by the option's name; None is possible.
    """
    if client is not None and not hasattr(client, "chat"):
        raise ConfigError(
            f"async_openai_client is a {type(client).__name__}; give an openai.AsyncOpenAI, or None for the gateway"
        )
    for name, count in counts.items():
        check_number(name, count, at_least=1, whole=True)
    check_number(*temperature, at_least=0)
    check_number("rollout_batch_timeout", rollout_batch_timeout, above=0)
    check_number("failed_reward", failed_reward)
    check_number("seed", seed, whole=True)
    for name, text in {**names, "agent_version": agent_version}.items():
        if text is not None and (not isinstance(text, str) or not text.strip()):
            raise ConfigError(f"{name} is {text!r}; give a text that is not empty, or None")
    if budget is not None and not isinstance(budget, Budget):
        raise ConfigError(f"budget is {budget!r}; give Budget(rollouts=...), or None for no limit")
    if test_dataset is not None and (isinstance(test_dataset, str) or not hasattr(test_dataset, "__getitem__")):
        raise ConfigError(f"test_dataset is a {type(test_dataset).__name__}; give a list of tasks, or None")


def check_reward_range(value: Any) -> tuple[float, float]:
    """Return the lowest and the highest reward. Raise ConfigError unless the value has two finite numbers in this
    order.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or len(cast("Sequence[Any]", value)) != 2:
        raise ConfigError(f"reward_range is {value!r}; give the lowest and the highest reward, as (0.0, 1.0)")
    low, high = cast("Sequence[Any]", value)
    check_number("the lowest reward of reward_range", low)
    check_number("the highest reward of reward_range", high)
    if not low < high:
        raise ConfigError(f"reward_range is {value!r}; give the lowest reward first, as (0.0, 1.0)")
    return float(low), float(high)
