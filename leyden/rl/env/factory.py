"""Make vectorised environments of a kind that is given by name.

To add a kind, subclass `FiniteVectorEnv` in its own module and add a line to `ENV_KINDS`. A class of another package is
named by its import path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, Final, TypeAlias, cast

import gymnasium
import numpy as np

from leyden._lib.components import Component, accepts, resolve_name
from leyden._lib.host.child import StartMethod
from leyden._lib.options import check_number
from leyden._lib.text import shown
from leyden.errors import ConfigError
from leyden.rl.env.group import AnyEnv, EnvFactory
from leyden.rl.env.randomness import WorkerSeeds
from leyden.rl.env.vector import FiniteVectorEnv, OnWorkerError, Writers
from leyden.rl.seed import SeedsLike

_ENV: Any = gymnasium.Env
FiniteEnvType: TypeAlias = str
"""A name in `ENV_KINDS`, or the import path of a `FiniteVectorEnv`."""
ENV_KINDS: Final[dict[str, Component]] = {
    "dummy": "leyden.rl.env.in_process.FiniteDummyVectorEnv",
    "thread": "leyden.rl.env.in_process.FiniteThreadVectorEnv",
    "subproc": "leyden.rl.env.processes.FiniteSubprocVectorEnv",
    "shmem": "leyden.rl.env.processes.FiniteShmemVectorEnv",
}
"""The import path of each kind of vectorised environment, by its name. The classes are called with `(logger, env_fns,
seeds=..., on_worker_error=..., ...)`.
"""


def env_kind(env_type: FiniteEnvType) -> Any:
    """Return the class of a kind of vectorised environment. Raise ConfigError for an unknown name."""
    return resolve_name(env_type, spec_name="env_type", registry=ENV_KINDS)


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
    """Return `concurrency` environments that run episodes over `seeds`, one for each seed.

    env_factory: makes an EnvWrapper or any gymnasium.Env. It is called once for each environment, in the environment's
        process. A list has one factory for each environment. An id of Gymnasium's registry is possible too; its
        environments are reset with a seed and no options. For one that needs options, give `partial(gymnasium.make, id,
        ...)`.
    env_type: `dummy` (one after another, in this thread), `thread`, `subproc` (worker processes), `shmem` (worker
        processes, for spaces of a fixed size only), or the import path of a class.
    concurrency: the number of environments; with a list of factories, leave it out.
    logger: writers that are notified of episodes and steps.
    seeds: a SeedPlan, a DataQueue, a sequence (one pass, in order), an iterator, or None. With None, episodes have no
        end of seeds: simulators are made without an argument, and the environments of an id are reset with the seeds 0,
        1, 2 and so on.
    on_worker_error, max_retries, quiet_seconds: options of every kind (`FiniteVectorEnv`).
    workers: an option of `thread`, `subproc` and `shmem`: the number of threads or processes.
    start_method, step_timeout_seconds, seed: options of `subproc` and `shmem`.
    Raise ConfigError for an option that the kind does not use, and for an id that Gymnasium does not know.
    """
    check_number("concurrency", concurrency, at_least=1, whole=True)
    check_number("max_retries", max_retries, at_least=0, whole=True)
    wanted: Any = env_factory
    for factory in cast("list[Any]", wanted) if isinstance(wanted, list | tuple) else [wanted]:
        if isinstance(factory, str) or (callable(factory) and not isinstance(factory, _ENV)):
            continue
        if hasattr(factory, "step") and hasattr(factory, "reset"):
            raise ConfigError(
                f"env_factory is the environment {shown(factory)}; give a function that makes one, because each of the environments is "
                f"a new one: `lambda: {type(factory).__name__}(...)`, an id of Gymnasium's registry, or a class"
            )
        raise ConfigError(f"env_factory is {shown(factory)}; give a function that makes an environment, or an id")
    if isinstance(env_factory, str) or callable(env_factory):
        env_factory = [env_factory] * concurrency
    elif concurrency not in (1, len(env_factory)):
        raise ConfigError(
            f"concurrency={concurrency} with {len(env_factory)} factories; leave it out, or give one factory"
        )
    if seeds is None and any(isinstance(factory, str) for factory in env_factory):
        seeds = count()
    factories = [_registered(factory) if isinstance(factory, str) else factory for factory in env_factory]
    kind = env_kind(env_type)
    options = {"workers": workers, "start_method": start_method, "step_timeout_seconds": step_timeout_seconds}
    given = {name: value for name, value in {**options, "seed": seed}.items() if value is not None}
    if useless := sorted(name for name in given if not accepts(kind, name)):
        raise ConfigError(
            f"{', '.join(useless)}: env_type={env_type!r} has no use for that; choose 'subproc' or 'shmem'"
        )
    return kind(
        logger,
        factories,
        seeds=seeds,
        on_worker_error=on_worker_error,
        max_retries=max_retries,
        quiet_seconds=quiet_seconds,
        **given,
    )


class _BySeed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment of Gymnasium's registry, which is reset with the seed alone, because the options are its own."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        item = None if options is None else options["seed_item"]
        if item is not None and (isinstance(item, bool) or not isinstance(item, int | np.integer)):
            raise ValueError(f"{item!r} is no integer, and the registry's environments begin with no other seed")
        return self.env.reset(seed=seed)


def _registered(env_id: str) -> EnvFactory:
    """Return a factory for an id of Gymnasium's registry. Raise ConfigError for an unknown id here, because an error in
    a worker is harder to read.
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            import_module(module)
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"Gymnasium cannot make the environment {env_id!r}: {error}") from error
    return partial(_make, env_id)


def _make(env_id: str) -> AnyEnv:
    return _BySeed(gymnasium.make(env_id))
