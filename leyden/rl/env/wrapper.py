"""`EnvWrapper`: a simulator, its interpreters and its reward as one Gymnasium environment.

A step calls the parts in the order of Qlib's EnvWrapper: validate and interpret the action, step the simulator, call
`done`, interpret and validate the new state, compute the reward, and collect auxiliary information. The wrapper knows
no other environment and no seed plan: the caller gives a seed in `reset(options=...)`, or the wrapper draws from an
iterator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypedDict, cast

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from leyden._lib.numbers import finite_number
from leyden.errors import ConfigError, SeedsExhausted
from leyden.rl.parts import (
    ActionInterpreter,
    ActType,
    AuxiliaryInfoCollector,
    InitialStateType,
    ObsType,
    PolicyActType,
    Reward,
    Simulator,
    StateInterpreter,
    StateType,
)
from leyden.rl.seed import NO_ITEM
from leyden.training import LogCollector, LogLevel
from leyden.training.metrics import Logs

_NEVER_TRUNCATED: Final = cast(Any, Simulator).truncated
"""The base class's method, which need not be called if a simulator does not override it."""


class EnvWrapperStatus(TypedDict, Generic[InitialStateType, ObsType, PolicyActType]):
    """The record of the current episode."""

    cur_step: int
    """The number of steps so far; within a step, it counts already."""
    done: bool
    initial_state: InitialStateType | None
    """The item of the seed; None without seeds."""
    obs_history: list[ObsType]
    """The observations, beginning with that of the reset, so one more than actions."""
    action_history: list[PolicyActType]
    """The actions of the policy, before they are interpreted."""
    reward_history: list[float]


class InfoDict(TypedDict):
    """The `info` of a step."""

    log: Logs
    """The level and the value of each name that was logged in the step."""
    aux_info: Any
    """The values of the auxiliary information collector; None without one."""


class EnvWrapper(
    gymnasium.Env[ObsType, PolicyActType], Generic[InitialStateType, StateType, ActType, ObsType, PolicyActType]
):
    """Runs one episode after another, each with a new simulator.

    `status` is the record of the current episode, and `logger` holds the values that the parts log in the current step.
    The parts read both through `self.env`.
    """

    def __init__(
        self,
        simulator_fn: Callable[..., Simulator[InitialStateType, StateType, ActType]],
        state_interpreter: StateInterpreter[StateType, ObsType],
        action_interpreter: ActionInterpreter[StateType, PolicyActType, ActType],
        seed_iterator: Iterable[InitialStateType] | None = None,
        reward_fn: Reward[StateType] | None = None,
        aux_info_collector: AuxiliaryInfoCollector[StateType, Any] | None = None,
        logger: LogCollector | None = None,
    ) -> None:
        """Take the parts, whose `env` is this environment from now on.

        simulator_fn: makes a simulator from a seed's item; without seeds it is called without an argument.
        seed_iterator: the items for an environment that is used alone. For a vectorised environment, give the seeds to
            `vectorize_env` instead, or one DataQueue to all environments.
        reward_fn: None: every reward is 0.
        logger: collects the values that the parts log; None: a new one.
        """
        for part in (state_interpreter, action_interpreter, reward_fn, aux_info_collector):
            if part is not None:
                part.env = self
        self.simulator_fn = simulator_fn
        self.state_interpreter = state_interpreter
        self.action_interpreter = action_interpreter
        self.reward_fn = reward_fn
        self.aux_info_collector = aux_info_collector
        self.logger = LogCollector() if logger is None else logger
        self.observation_space = state_interpreter.observation_space
        self.action_space = action_interpreter.action_space
        self.seed_iterator = seed_iterator
        self._seeds: Iterator[InitialStateType] | None = None if seed_iterator is None else iter(seed_iterator)
        self.simulator: Simulator[InitialStateType, StateType, ActType] | None = None
        self.status: EnvWrapperStatus[InitialStateType, ObsType, PolicyActType] = _fresh_status(None)
        self._state: Any = None
        self._may_truncate = False
        """Whether the simulator overrides `truncated`."""
        self._entropy: tuple[int, int] | None = None
        """The seed of the episode's generator, until `np_random` is first read."""
        self.aux_info: Any = None
        """The auxiliary information of the last step."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin an episode. Return its first observation and an info.

        seed: the seed of `np_random`, as in any Gymnasium environment; parts draw from `self.env.np_random`.
        options: "seed_item" is the item to begin with. Without it, the iterator's next item is taken; without an
            iterator, the simulator gets no item.
        Raise SeedsExhausted when the iterator has ended.
        """
        super().reset(seed=seed)
        if options is not None and "seed_item" in options:
            item: Any = options["seed_item"]
        elif self._seeds is not None:
            try:
                item = next(self._seeds)
            except StopIteration:
                raise SeedsExhausted(
                    "the environment's last seed was taken; give it another iterator, or stop here"
                ) from None
        else:
            item = NO_ITEM
        obs = self.begin(item)
        return obs, {"log": self.logger.logs(), "aux_info": None}

    def step(self, action: PolicyActType) -> tuple[ObsType, float, bool, bool, dict[str, Any]]:
        """Make one step. Return observation, reward, terminated, truncated and info.

        The info is an `InfoDict`. Its log has `reward`, at the end of an episode `steps_per_episode`, and at the level
        DEBUG `obs` and `policy_act`.
        Raise ResetNeeded without a running episode, GymSpaceValidationError for an action or an observation outside its
        space, ValueError for a NaN reward, and the simulator's own errors.
        """
        obs, reward, terminated, truncated = self.advance(action)
        return obs, reward, terminated, truncated, dict(self.info(obs, action, reward))

    def is_running(self, simulator: Simulator[Any, Any, Any]) -> bool:
        """Return whether an episode of this environment is under way in the simulator."""
        return self.simulator is simulator and not self.status["done"]

    def render(self) -> Any:
        """Raise NotImplementedError, because simulators cannot be rendered."""
        raise NotImplementedError(f"{type(self.simulator).__name__} cannot be rendered")

    @property
    def np_random(self) -> np.random.Generator:
        """The generator that simulators, interpreters and rewards draw from.

        In a vectorised environment each episode has its own generator, seeded from the seed plan's seed and the
        episode's number. So the numbers depend neither on the kind of environment nor on the number of workers.
        """
        if self._entropy is not None:
            self.np_random = np.random.default_rng(self._entropy)
        return super().np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self._np_random, self._np_random_seed, self._entropy = value, -1, None

    def begin(self, item: Any, entropy: tuple[int, int] | None = None) -> ObsType:
        """Begin an episode with an item, or with NO_ITEM, and return its first observation.

        entropy: the seed of `np_random` for this episode; None: `np_random` keeps its state.
        Raise RuntimeError for a StopIteration of a part, and its other errors as they are.
        """
        self._entropy = entropy
        self.logger.reset()
        before, self.simulator = self.simulator, None
        try:
            simulator = self.simulator_fn() if item is NO_ITEM else self.simulator_fn(item)
            holder = simulator.env
            if isinstance(holder, EnvWrapper) and holder is not self and holder.is_running(simulator):
                raise ConfigError(
                    f"the factory returned the same {type(simulator).__name__} twice, to two environments; make a new one in "
                    "each call"
                )
            if simulator is before and simulator.done():
                raise ConfigError(
                    f"the factory returned the {type(simulator).__name__} of the episode before, which is done; make a new one in "
                    "each call"
                )
            self.simulator = simulator
            self.status = _fresh_status(None if item is NO_ITEM else item)
            simulator.env = self
            kind: Any = type(simulator)
            self._may_truncate = kind.truncated is not _NEVER_TRUNCATED
            self._state = simulator.get_state()
            obs = self.state_interpreter(self._state)
        except StopIteration as error:
            self.simulator = None
            raise RuntimeError(
                "StopIteration in a simulator or an interpreter ends no episode; catch it there"
            ) from error
        self.status["obs_history"].append(obs)
        return obs

    def advance(self, action: PolicyActType) -> tuple[ObsType, float, bool, bool]:
        """Step as `step` does, with its errors and without the cost of an info. Return observation, reward, terminated
        and truncated.
        """
        simulator, status = self.simulator, self.status
        if simulator is None or status["done"]:
            raise ResetNeeded("the environment has no episode under way; call reset() first")
        self.logger.reset()
        status["action_history"].append(action)
        try:
            act = self.action_interpreter(simulator.get_state(), action)
            status["cur_step"] += 1
            simulator.step(act)
            ended = bool(simulator.done())
            truncated = self._may_truncate and bool(simulator.truncated())
            if ended or truncated:
                status["done"] = True
            state = simulator.get_state()
            obs = self.state_interpreter(state)
            status["obs_history"].append(obs)
            if (reward_fn := self.reward_fn) is None:
                reward = 0.0
            else:
                try:
                    reward = finite_number(reward_fn(state))
                except ValueError as error:
                    raise ValueError(f"{type(reward_fn).__name__} at step {status['cur_step']} {error}") from error
            status["reward_history"].append(reward)
            if self.aux_info_collector is not None:
                self.aux_info = self.aux_info_collector(state)
        except StopIteration as error:
            raise RuntimeError(
                "StopIteration in a simulator or an interpreter ends no episode; catch it there"
            ) from error
        return obs, reward, ended and not truncated, truncated

    def info(self, obs: ObsType, action: PolicyActType, reward: float) -> InfoDict:
        """Return the info of the last step. Call it once for each step, because it logs the reward."""
        logger = self.logger
        if self.status["done"]:
            logger.add_scalar("steps_per_episode", self.status["cur_step"])
        logger.add_scalar("reward", reward)
        logger.add_any("obs", obs, LogLevel.DEBUG)
        logger.add_any("policy_act", action, LogLevel.DEBUG)
        return {"log": logger.logs(), "aux_info": self.aux_info}


def _fresh_status(item: Any) -> EnvWrapperStatus[Any, Any, Any]:
    """Return the record of an episode that begins with this item."""
    return {
        "cur_step": 0,
        "done": False,
        "initial_state": item,
        "obs_history": [],
        "action_history": [],
        "reward_history": [],
    }
