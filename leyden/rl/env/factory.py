"""Vectorised environments by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import gymnasium

from leyden.errors import ConfigError
from leyden.rl.env.group import AnyEnv, EnvFactory
from leyden.rl.env.in_process import FiniteDummyVectorEnv, FiniteThreadVectorEnv
from leyden.rl.env.processes import FiniteShmemVectorEnv, FiniteSubprocVectorEnv, StartMethod
from leyden.rl.env.vector import FiniteVectorEnv, OnWorkerError, Writers
from leyden.rl.seed import SeedsLike

__all__ = ["FiniteEnvType", "vectorize_env"]

FiniteEnvType: TypeAlias = Literal["dummy", "thread", "subproc", "shmem"]


def vectorize_env(
    env_factory: EnvFactory | Sequence[EnvFactory] | str,
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
) -> FiniteVectorEnv:
    """`concurrency` environments over `seeds`, each of which begins one episode.

    env_factory: makes an EnvWrapper or any gymnasium.Env, and is called once for each environment where that will live; or one factory
    for each; or an id of Gymnasium's registry, whose environments are given integer seeds as `reset(seed=...)`. env_type: `dummy` (one
    after another, here), `thread`, `subproc` (worker processes), `shmem` (the same, refusing spaces that cannot lie in shared memory).
    seeds: a SeedPlan, a DataQueue, a sequence (one pass, in order), an iterator, or None: simulators are made with no argument, for ever.
    The rest: see the classes. Raises ConfigError for an option that this kind has no use for, and for an id that Gymnasium does not know.
    """
    if isinstance(env_factory, str):
        env_factory = partial(_registered, env_factory)
    factories = [env_factory] * concurrency if callable(env_factory) else list(env_factory)
    if not callable(env_factory) and concurrency not in (1, len(factories)):
        raise ConfigError(
            f"concurrency={concurrency} with {len(factories)} factories; leave it out, or give one factory"
        )
    common: dict[str, Any] = {"seeds": seeds, "on_worker_error": on_worker_error, "max_retries": max_retries}
    given: dict[str, Any] = {
        "workers": workers,
        "start_method": start_method,
        "step_timeout_seconds": step_timeout_seconds,
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


def _registered(env_id: str) -> AnyEnv:
    try:
        return gymnasium.make(env_id)
    except gymnasium.error.Error as error:
        raise ConfigError(f"Gymnasium makes no environment {env_id!r}: {error}") from error
