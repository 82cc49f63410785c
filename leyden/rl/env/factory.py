"""Vectorised environments by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

import gymnasium
import numpy as np

from leyden.errors import ConfigError
from leyden.host.child import StartMethod
from leyden.rl.env.group import AnyEnv, EnvFactory
from leyden.rl.env.in_process import FiniteDummyVectorEnv, FiniteThreadVectorEnv
from leyden.rl.env.processes import FiniteShmemVectorEnv, FiniteSubprocVectorEnv
from leyden.rl.env.randomness import WorkerSeeds
from leyden.rl.env.vector import FiniteVectorEnv, OnWorkerError, Writers
from leyden.rl.seed import SeedsLike

FiniteEnvType: TypeAlias = Literal["dummy", "thread", "subproc", "shmem"]


def vectorize_env(
    env_factory: EnvFactory | str | Sequence[EnvFactory | str],
    env_type: FiniteEnvType = "dummy",
    concurrency: int = 1,
    logger: Writers = None,
    *,
    seeds: SeedsLike = None,
    on_worker_error: OnWorkerError = "raise",
    max_retries: int = 3,
    workers: int | None = None,
    start_method: StartMethod | None = None,
    step_timeout_seconds: float | None = None,
    seed: int | WorkerSeeds | None = None,
    quiet_seconds: float = 60.0,
) -> FiniteVectorEnv:
    """Make `concurrency` environments over `seeds`, each of which begins one episode.

    env_factory: makes an EnvWrapper or any gymnasium.Env. It is called once for each environment,
        in the environment's process. A list has one factory for each. An id of Gymnasium's registry
        is possible too; its environments begin with `reset(seed=...)` alone.
        For one with options give `partial(gymnasium.make, id, ...)`.
    env_type: `dummy` (one after another, here), `thread`, `subproc` (worker processes), `shmem` (worker processes, for spaces of a fixed
        size only).
    seeds: a SeedPlan, a DataQueue, a sequence (one pass, in order), an iterator, or None: simulators are made with no argument, for ever,
        and an id's environments begin with 0, 1, 2 and so on.
    The other options are those of the environment classes. Raises ConfigError for an option that
    this kind does not use, and for an id that Gymnasium does not know.
    """
    if isinstance(env_factory, str) or callable(env_factory):
        env_factory = [env_factory] * concurrency
    elif concurrency not in (1, len(env_factory)):
        raise ConfigError(
            f"concurrency={concurrency} with {len(env_factory)} factories; leave it out, or give one factory"
        )
    if seeds is None and any(isinstance(factory, str) for factory in env_factory):
        seeds = count()
    factories = [_registered(factory) if isinstance(factory, str) else factory for factory in env_factory]
    common: dict[str, Any] = {"seeds": seeds, "on_worker_error": on_worker_error, "max_retries": max_retries}
    common["quiet_seconds"] = quiet_seconds
    given: dict[str, Any] = {
        "workers": workers,
        "start_method": start_method,
        "step_timeout_seconds": step_timeout_seconds,
        "seed": seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    useful = {"dummy": set[str](), "thread": {"workers"}}.get(env_type, set(given))
    if useless := sorted(given.keys() - useful):
        raise ConfigError(
            f"{', '.join(useless)}: env_type={env_type!r} has no use for that; choose 'subproc' or 'shmem'"
        )
    kinds: dict[str, Any] = {
        "dummy": FiniteDummyVectorEnv,
        "thread": FiniteThreadVectorEnv,
        "subproc": FiniteSubprocVectorEnv,
        "shmem": FiniteShmemVectorEnv,
    }
    if env_type not in kinds:
        raise ConfigError(f"env_type={env_type!r}; choose one of {', '.join(get_args(FiniteEnvType))}")
    return kinds[env_type](logger, factories, **common, **given)


class _BySeed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Begins with the seed alone: the registry's environments have options of their own."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        item = None if options is None else options["seed_item"]
        if item is not None and (isinstance(item, bool) or not isinstance(item, int | np.integer)):
            raise ValueError(f"{item!r} is no integer, and the registry's environments begin with no other seed")
        return self.env.reset(seed=seed)


def _registered(env_id: str) -> EnvFactory:
    """What makes it, wherever that will be. Raises ConfigError here for one that is not there."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            import_module(module)
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"Gymnasium makes no environment {env_id!r}: {error}") from error
    return partial(_make, env_id)


def _make(env_id: str) -> AnyEnv:
    return _BySeed(gymnasium.make(env_id))
