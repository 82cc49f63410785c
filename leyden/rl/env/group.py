"""`EnvGroup`: several environments that are stepped one after another, in the process and thread that they were made
in.

All kinds of vectorised environments use groups: the kind `dummy` has one, and each worker of the other kinds has its
own. A group writes the results of a step into arrays that it is given, adds up the episodes' statistics, and returns
failures of user code as data. Its caller chooses the seeds.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from leyden._lib.components import accepts
from leyden._lib.numbers import as_number, finite_number
from leyden._lib.options import check_number
from leyden._lib.text import shown
from leyden.errors import ConfigError, InvalidMetrics
from leyden.rl.batch import copied, select
from leyden.rl.data_queue import address_of
from leyden.rl.env.wrapper import EnvWrapper
from leyden.rl.seed import NO_ITEM, Seed
from leyden.rl.spaces import AnySpace, Batch, GymSpaceValidationError, Layout, layout_of
from leyden.training import EpisodeStats, LogLevel

AnyEnv: TypeAlias = gymnasium.Env[Any, Any]
EnvFactory: TypeAlias = Callable[[], AnyEnv]
Start: TypeAlias = tuple[int, Seed[Any]]
"""The number of an environment within its group, and the seed of its next episode."""
Infos: TypeAlias = dict[int, dict[str, Any]]
_MAX_WRAPPERS: Final = 100
_STEP: Final = "(observation, reward, terminated, truncated, info)"
_EPISODE_METRICS: Final = ("reward", "steps_per_episode")
"""The metrics of every episode, whose names no logged value may have."""
_NUMBERS: Final[tuple[type[Any], ...]] = (float, int, np.floating, np.integer)
_RESERVED_KEYS: Final = ("episode", "lost", "note")
"""Keys of a step's info that vectorised environments write, in place of an environment's own values."""


@dataclass(frozen=True, slots=True)
class EnvFailure:
    """The failure of one environment's episode."""

    env: int
    """The environment's number within its group."""
    step: int
    """The number of steps that the episode had made."""
    doing: str
    """The action during which the environment failed: `began`, `stepped` or `waited`."""
    headline: str
    """The error in one line."""
    traceback: str = ""
    """The traceback of user code."""
    error: BaseException | None = None
    """The error itself, if it was raised in this process."""
    guilty: bool = True
    """Whether this environment failed itself. If False, its worker was lost by another one's failure."""


class Rows(NamedTuple):
    """Arrays for the results of a group's environments, with a row for each."""

    obs: Batch
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @classmethod
    def allocate(cls, layout: Layout, n: int) -> Rows:
        return cls(layout.allocate(n), np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_))

    def part(self, rows: slice) -> Rows:
        return Rows(select(self.obs, rows), self.rewards[rows], self.terminated[rows], self.truncated[rows])


class EnvGroup:
    """Several environments. `open` sets the arrays for their results; `begin` and `step` fill them."""

    def __init__(self, factories: Sequence[EnvFactory], *, wants_steps: bool) -> None:
        """Make the environments.

        wants_steps: put the logged values of every step into infos.
        Raise ConfigError if spaces or seed iterators differ, or for an object of another kind.
        """
        self._wants_steps = wants_steps
        self._slots = [self._make(factory) for factory in factories]
        self.envs: list[AnyEnv] = [slot.env for slot in self._slots]
        """The environments, as the factories made them."""
        require_distinct(self.envs)
        first = self._slots[0].env
        self.observation_space: AnySpace = first.observation_space
        self.action_space: AnySpace = first.action_space
        for slot in self._slots[1:]:
            require_same_spaces(first, slot.env)
        self.own_seeds = common_seeds([getattr(slot.env, "seed_iterator", None) for slot in self._slots])
        """The seed iterator that the environments were made with; None if they have none."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def at_work(self) -> int:
        """The number, in this group, of the environment that was last begun or stepped."""
        return int(self._progress[0])

    def open(self, layout: Layout, actions: Layout, rows: Rows, progress: Any = None) -> None:
        """Set the arrays for results.

        layout, actions: of observations and actions.
        rows: for the results.
        progress: an array of one number in which to keep `at_work`, such as shared memory; None: its own memory.
        """
        self._progress: Any = [0] if progress is None else progress
        self._actions = actions
        self._rows = rows
        self._write = layout.writer(rows.obs)

    def begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        """Begin episodes, and write their first observations. Return the failures.

        An environment that failed has no episode.
        """
        failures: list[EnvFailure] = []
        for env, seed in starts:
            self._progress[0] = env
            try:
                self._write(env, self._slots[env].begin(seed))
            except Exception as error:  # noqa: BLE001 -- user code may raise anything; it is returned
                failures.append(self._failure(env, "began", error))
            self._rows.rewards[env] = 0.0
            self._rows.terminated[env] = self._rows.truncated[env] = False
        return failures

    def step(self, envs: Sequence[int], actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        """Step some environments, and write the results. Return infos and failures.

        actions: a row for each environment of the group; copied, because simulators may keep them.
        """
        act = self._actions.reader(copied(actions))
        slots, write, progress = self._slots, self._write, self._progress
        _, rewards, terminated, truncated = self._rows
        infos: Infos = {}
        failures: list[EnvFailure] = []
        for env in envs:
            progress[0] = env
            try:
                obs, rewards[env], terminated[env], truncated[env], info = slots[env].step(act(env))
                write(env, obs)
            except Exception as error:  # noqa: BLE001 -- user code may raise anything; it is returned
                failures.append(self._failure(env, "stepped", error))
                continue
            if info is not None:
                infos[env] = info
        return infos, failures

    def close(self) -> None:
        for slot in self._slots:
            slot.env.close()

    def _make(self, factory: EnvFactory) -> _Slot:
        env: Any = factory()
        if isinstance(env, EnvWrapper):
            return _WrapperSlot(cast("EnvWrapper[Any, Any, Any, Any, Any]", env), wants_steps=self._wants_steps)
        if isinstance(env, gymnasium.Env):
            return _GymSlot(cast(AnyEnv, env), wants_steps=self._wants_steps)
        wanted = "it must return an EnvWrapper or a gymnasium.Env"
        if env is None:
            raise ConfigError(f"the environment factory returned None; {wanted} (is its `return` missing?)")
        if isinstance(env, type):
            raise ConfigError(f"the environment factory returned the class {env.__name__}; {wanted}: call the class")
        if hasattr(env, "step") and hasattr(env, "reset"):
            raise ConfigError(
                f"the environment factory returned a {type(env).__module__}.{type(env).__name__}, which has step and reset and is "
                f"no gymnasium.Env; {wanted}: inherit from gymnasium.Env, or for an environment of the old gym give "
                "`gymnasium.make('GymV21Environment-v0', env=...)` of the package shimmy"
            )
        raise ConfigError(f"the environment factory returned {shown(env)}; {wanted}")

    def _failure(self, env: int, doing: str, error: Exception) -> EnvFailure:
        slot = self._slots[env]
        headline = traceback.format_exception_only(error)[-1].strip()
        failure = EnvFailure(env, slot.length, doing, headline, "".join(traceback.format_exception(error)), error)
        slot.drop_episode()
        return failure


def _kind(value: object) -> str:
    return type(value).__name__


def require_distinct(envs: Sequence[AnyEnv]) -> None:
    """Raise ConfigError if two environments are the same one, or are wrapped around the same one.

    Their episodes would run in one simulator, so that each step of one moves the others.
    """
    seen: dict[int, int] = {}
    for number, env in enumerate(envs):
        for part in _chain(env):
            if (other := seen.setdefault(id(part), number)) != number:
                raise ConfigError(
                    f"the factory returned the same environment twice: the {type(part).__name__} of environments {other} and "
                    f"{number} is one object; make a new one in each call, for example `lambda: {type(part).__name__}(...)`"
                )


def _chain(env: Any) -> Iterator[object]:
    """Yield an environment and those that it wraps, in `unwrapped` or in `env` as Gymnasium's wrappers do."""
    outer = env
    for _ in range(_MAX_WRAPPERS):
        yield env
        inner = getattr(env, "env", None)
        if inner is None or inner is env or not (hasattr(inner, "step") and hasattr(inner, "reset")):
            break
        env = inner
    bare = getattr(outer, "unwrapped", outer)
    if bare is not env:
        yield bare


def require_same_spaces(first: Any, other: Any) -> None:
    """Raise ConfigError unless two environments, or groups of them, have the same spaces."""
    for name in ("observation_space", "action_space"):
        here, there = getattr(first, name), getattr(other, name)
        if here != there:
            raise ConfigError(
                f"the environments of one vectorised environment must have the same spaces; one has the {name} {here}, "
                f"another one {there}"
            )


def common_seeds(own: Sequence[Any]) -> Any:
    """Return the seed iterator that all environments have in common; None if they have none.

    own: the seed iterator of each environment, or None.
    Raise ConfigError for different ones, because each seed would begin several episodes.
    """
    first = own[0]
    address = address_of(first)
    if any(one is not first and (address is None or address_of(one) != address) for one in own[1:]):
        raise ConfigError(
            "the environments have seed iterators of their own, so each seed would begin several episodes; give the seeds to "
            "vectorize_env(seeds=...), or one DataQueue to all environments"
        )
    return first


class _Slot:
    """One environment, with the length, the reward and the sums of logged values of its episode."""

    env: AnyEnv

    def __init__(self, *, wants_steps: bool) -> None:
        """wants_steps: whether a writer needs the values logged in each step, not only the sums of the episode."""
        self._wants_steps = wants_steps
        self._seed: Seed[Any] | None = None
        self.length = 0
        self._reward = 0.0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def begin(self, seed: Seed[Any]) -> Any:
        self._seed = seed
        self.length, self._reward = 0, 0.0
        self._sums, self._counts = {}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any] | None]:
        raise NotImplementedError

    def drop_episode(self) -> None:
        pass

    def _stats(self) -> EpisodeStats:
        seed = self._seed
        logs = {name: total / self._counts[name] for name, total in self._sums.items()}
        return EpisodeStats(
            self.length,
            self._reward,
            logs,
            None if seed is None else seed.index,
            None if seed is None else seed.number,
        )


class _WrapperSlot(_Slot):
    """An `EnvWrapper`. It is stepped without an info, unless a writer wants steps."""

    def __init__(self, env: EnvWrapper[Any, Any, Any, Any, Any], *, wants_steps: bool) -> None:
        super().__init__(wants_steps=wants_steps)
        self.env = self._env = env
        self._logger = env.logger
        self._has_aux = env.aux_info_collector is not None
        interpreter = env.state_interpreter
        self._lenient = None if interpreter.strict else interpreter.observation_layout

    def begin(self, seed: Seed[Any]) -> Any:
        super().begin(seed)
        return self._env.begin(seed.item, (seed.entropy, seed.number))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any] | None]:
        """Make a step. Return observation, reward, terminated, truncated, and an info or None.

        The info has "log" if writers want steps, "aux_info" if there is a collector, "note" about an observation
        outside its bounds, and "episode" with the statistics after the last step. Most steps have no info, which saves
        a dict.
        """
        env = self._env
        obs, reward, terminated, truncated = env.advance(action)
        self.length += 1
        self._reward += reward
        info: dict[str, Any] | None = None
        if logs := self._logger.logs():
            for name, (_, value) in logs.items():
                if name in _EPISODE_METRICS:
                    raise InvalidMetrics(f"metric {name!r} was logged; that is the environment's own, use another name")
                if type(value) is float:
                    self._sums[name] = self._sums.get(name, 0.0) + value
                    self._counts[name] = self._counts.get(name, 0) + 1
        if self._wants_steps:
            info = {"log": env.info(obs, action, reward)["log"]}
        if self._has_aux:
            info = {} if info is None else info
            info["aux_info"] = env.aux_info
        if self._lenient is not None and self._lenient.note is not None:
            info = {} if info is None else info
            info["note"], self._lenient.note = self._lenient.note, None
        if terminated or truncated:
            info = {} if info is None else info
            info["episode"] = self._stats()
        return obs, reward, terminated, truncated, info

    def drop_episode(self) -> None:
        self._env.simulator = None


class _GymSlot(_Slot):
    """A Gymnasium environment."""

    def __init__(self, env: AnyEnv, *, wants_steps: bool) -> None:
        super().__init__(wants_steps=wants_steps)
        self.env = env
        for name in ("observation_space", "action_space"):
            space: Any = getattr(env, name, None)
            if not isinstance(space, gymnasium.Space):
                raise ConfigError(
                    f"{type(env).__name__}.{name} is {shown(space)}; set it to a space of gymnasium.spaces in __init__"
                )
        if not accepts(env.unwrapped.reset, "seed"):
            raise ConfigError(
                f"{self._name}.reset takes no seed; define reset(self, *, seed=None, options=None), which returns (observation, info)"
            )
        self._obs_layout = layout_of(env.observation_space)
        self._check, self._coerce = self._obs_layout.check, self._obs_layout.coerce
        self._coerces = False
        """Whether observations need the lenient check, which is slower than the strict one."""

    def begin(self, seed: Seed[Any]) -> Any:
        """Reset the environment with a seed, and return the first observation.

        An integer item is the seed of the reset. For any other item, the seed derives from the plan's entropy and the
        episode's number, so that a rerun repeats it. The item itself is passed in `options`.
        """
        super().begin(seed)
        item = seed.item
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            number = int(cast(int, item))
        else:
            # 31 bits, because some environments take no larger seed
            number = int(np.random.SeedSequence([seed.entropy, seed.number]).generate_state(1)[0] >> 1)
        if item is NO_ITEM:
            obs = self._reset(seed=number)
        else:
            obs = self._reset(seed=number, options={"seed_item": item, "seed_index": seed.index})
        obs = self._coerce(obs)
        self._coerces |= self._obs_layout.note is not None
        return obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any] | None]:
        """Make a step. Return observation, reward, terminated, truncated, and an info or None.

        Observations are checked strictly until the first one that does not fit its space. From then on each is cast by
        the lenient check, which is slower. Raise ValueError for a reward that is no finite number.
        """
        result: Any = self.env.step(action)
        values = cast("tuple[Any, ...]", result)
        if type(cast(object, result)) is not tuple or len(values) != 5:
            values = self._checked_step(cast(object, result))
        obs, reward, terminated, truncated, given = values
        if type(terminated) is not bool or type(truncated) is not bool:
            terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"the info of {self._name}.step is {shown(cast(object, given))}; return a dict, {_STEP}")
        if self._coerces:
            obs = self._coerce(obs)
        else:
            try:
                self._check(obs)
            except GymSpaceValidationError:
                self._coerces = True
                obs = self._coerce(obs)
        self.length += 1
        try:
            reward = finite_number(reward)
        except ValueError as error:
            raise ValueError(f"the reward of step {self.length} {error}") from error
        self._reward += reward
        info = self._info(cast("dict[str, Any]", given)) if given else None
        if self._wants_steps:
            info = {} if info is None else info
            info["log"] = {**info.get("log", {}), "reward": (int(LogLevel.PERIODIC), reward)}
        if self._coerces and self._obs_layout.note is not None:
            info = {} if info is None else info
            info["note"], self._obs_layout.note = self._obs_layout.note, None
        if terminated or truncated:
            info = {} if info is None else info
            info["episode"] = self._stats()
        return obs, reward, terminated, truncated, info

    def _reset(self, **options: Any) -> Any:
        """Reset the environment, and return the observation. Raise ConfigError for another result than Gymnasium's."""
        result: Any = self.env.reset(**options)
        if isinstance(result, tuple | list):
            values = cast("Sequence[Any]", result)
            if len(values) == 2 and isinstance(values[1], Mapping):
                return values[0]
            what = f"a {_kind(values)} of {len(values)}: {', '.join(map(_kind, values))}"
        else:
            what = f"a {_kind(result)} alone"
        raise ConfigError(f"{self._name}.reset returned {what}; return (observation, info) with a dict as info")

    def _checked_step(self, result: object) -> tuple[Any, ...]:
        if isinstance(result, list) and len(cast("list[Any]", result)) == 5:
            return tuple(cast("list[Any]", result))
        if not isinstance(result, tuple | list):
            raise ConfigError(f"{self._name}.step returned a {_kind(result)}; return {_STEP}")
        values = cast("Sequence[Any]", result)
        old = ": the old gym's `done` is `terminated` or, after a time limit, `truncated`" if len(values) == 4 else ""
        raise ConfigError(
            f"{self._name}.step returned {len(values)} values ({', '.join(map(_kind, values))}); return {_STEP}{old}"
        )

    def _flag(self, name: str, value: object) -> bool:
        try:
            number = as_number(value)
        except ValueError as error:
            raise ConfigError(f"{name} of {self._name}.step {error}; return {_STEP}") from error
        if number not in (0, 1):
            raise ConfigError(f"{name} of {self._name}.step is {number}, neither True nor False; return {_STEP}")
        return bool(number)

    @property
    def _name(self) -> str:
        return type(self.env.unwrapped).__name__

    def _info(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the environment's info without reserved keys, and add up the numbers of its `log`."""
        info = {name: value for name, value in given.items() if name not in _RESERVED_KEYS}
        log = info.pop("log", None)
        if isinstance(log, Mapping):
            logged = info["log"] = {
                str(name): _with_level(value) for name, value in cast("Mapping[Any, Any]", log).items()
            }
            for name, (_, value) in logged.items():
                if isinstance(value, _NUMBERS) and name not in _EPISODE_METRICS:
                    self._sums[name] = self._sums.get(name, 0.0) + float(cast(Any, value))
                    self._counts[name] = self._counts.get(name, 0) + 1
        return info


def _with_level(value: Any) -> tuple[int, Any]:
    """Return the level and the value of a logged value. A pair whose first part is a level (in Qlib, an array of two)
    is split. Anything else is a value of the level PERIODIC.
    """
    pair: Any = value
    if isinstance(value, tuple | np.ndarray) and len(pair) == 2:
        level: Any = pair[0]
        if isinstance(level, int) and level in tuple(LogLevel):
            return int(level), pair[1]
    return int(LogLevel.PERIODIC), pair


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(wanted: int | None, n_envs: int, default: int) -> int:
    """Return the number of workers, at most one for each environment. Raise ConfigError if less than 1 are wanted."""
    check_number("workers", wanted, at_least=1, whole=True, or_none="the kind's default")
    return min(default if wanted is None else wanted, n_envs)


def split(n_envs: int, n_workers: int) -> list[range]:
    """Return the numbers of the environments of each worker, in order and as evenly as possible."""
    sizes = [n_envs // n_workers + (worker < n_envs % n_workers) for worker in range(n_workers)]
    starts = [sum(sizes[:worker]) for worker in range(n_workers)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
