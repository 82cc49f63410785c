"""What a run may cost and is expected to cost: the limit that ends it, and an estimate before it starts.

The store is the truth: it sums the calls that every gateway of the run has recorded, also those of earlier processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leyden._lib.formatting import figure
from leyden.agent import LitAgent
from leyden.algorithm import Algorithm
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy, Prices, UpstreamModel
from leyden.store import LightningStore
from leyden.trainer.run_config import agent_name
from leyden.training.runs.recorded_runs import find_runs
from leyden.training.runs.run_options import facts_of, spending_of

_CHECK_SECONDS = 1.0
"""The longest time between two checks. A gateway in this process asks for one when it has passed on too much."""
_LAG_SECONDS = 0.05
"""The pause before the next check if the store does not have all calls that the gateway has passed on."""
_SHARE = 20
"""The shortest time between two checks, as a multiple of the time that a check takes."""


async def limit_reached(
    store: LightningStore, run_id: str, max_cost: float, proxy: LLMProxy | None, currency: str = ""
) -> str:
    """Return when the model calls of a run have cost `max_cost`, or an unknown amount, with the reason in words."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    passed_on = (await store.sum_spending(run_id)).cost or 0.0

    def notify(cost: float | None) -> None:
        nonlocal passed_on
        passed_on += math.inf if cost is None else cost
        if passed_on >= max_cost:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(news.set)

    if proxy is not None:
        proxy.watch_spending(notify)
    try:
        while True:
            began = time.monotonic()
            spent = await store.sum_spending(run_id)
            if (spent.cost or 0.0) >= max_cost:
                words = spent.in_words(currency)
                return (
                    f"max_cost={max_cost:g} is reached: the model calls have cost {words}; continue with a higher one"
                )
            if n := spent.unpriced_calls:
                return (
                    f"max_cost={max_cost:g} cannot be kept, because {n:,} model call{'s have' if n > 1 else ' has'} no known cost: "
                    "give each model a price, 0 for one of your own, and streams include_usage; or leave max_cost out"
                )
            took = time.monotonic() - began
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(_CHECK_SECONDS, _SHARE * took)):
                    await news.wait()
            if news.is_set():
                await asyncio.sleep(max(_LAG_SECONDS, took))
    finally:
        if proxy is not None:
            proxy.watch_spending(None)


def priced_models(proxy: LLMProxy | None, prices: Prices | None) -> list[UpstreamModel]:
    """Return the models that a gateway serves, with the prices that a run gives it."""
    models = [] if proxy is None else proxy.served_models
    return [model.priced(prices or Prices()) for model in models]


def check_max_cost(max_cost: float, algorithm: Algorithm | None, proxy: LLMProxy | None, prices: Prices | None) -> None:
    """Raise ConfigError if it is plain before a run that its `max_cost` cannot be kept."""
    if proxy is None and (algorithm is None or not algorithm.uses_gateway):
        raise ConfigError(
            f"max_cost={max_cost:g}, but the run has no gateway that records what calls cost; give llm_proxy={{'model_list': [...]}}"
        )
    for model in priced_models(proxy, prices):
        if model.price is None:
            raise ConfigError(
                f"max_cost={max_cost:g} needs a price of {model.model_name!r}; give it one in prices=, 0 for a model of your own"
            )


def estimate(
    algorithm: Algorithm,
    agent: LitAgent[Any],
    n_train: int,
    n_val: int,
    *,
    models: Sequence[UpstreamModel],
    currency: str = "",
    root: Path,
) -> str:
    """Return how many rollouts a run will have, and what they will take if they are like those of the newest run of the
    agent under `root`; or why that is not known.

    models: the models that the gateway will serve, with their prices.
    """
    if (planned := algorithm.planned_rollouts(n_train, n_val)) is None:
        return f"no estimate: {type(algorithm).__name__} does not know beforehand how many rollouts it runs"
    name = agent_name(agent)
    of_agent = [run for run in find_runs(root)[0] if facts_of(run.record).get("agent") == name]
    earlier = ((run.record, spending_of(run)) for run in of_agent)
    found = next(((record, spent) for record, spent in earlier if spent is not None and spent.attempts), None)
    if found is None:
        return f"no estimate: {planned:,} rollouts at most, and no run of {name} in {root} says what one takes"
    record, spent = found
    n, prompt, answer = spent.attempts, spent.prompt_tokens, spent.response_tokens
    if not prompt + answer:
        return (
            f"no estimate: {planned:,} rollouts at most, and the gateway of {record.name} recorded no tokens of {name}"
        )
    each, cost, words = round((prompt + answer) / n), None, ""
    if len(prices := {model.price for model in models}) == 1 and (price := prices.pop()) is not None:
        cost = planned / n * (prompt * price.prompt + answer * price.answer) / 1e6
        words = "" if price.cached is None or price.cached >= price.prompt else ", less with cached prompts"
    elif spent.cost is not None and not spent.unpriced_calls:
        cost, words = planned / n * spent.cost, " at its prices"
    about = "" if cost is None else f", about {figure(cost)} {currency}".rstrip() + words
    return (
        f"estimate: {planned:,} rollouts x {each:,} tokens, the mean of {n:,} in {record.name}, "
        f"are {round(planned / n * (prompt + answer)):,} tokens{about}"
    )
