"""One environment: a simulator, its interpreters and its reward as a Gymnasium environment.

The order of calls is that of Qlib's EnvWrapper. A step: the action is validated and interpreted on the state before it, the simulator
steps, `done` is asked, the new state is interpreted and validated, rewarded, collected from. It does not know where its seeds come from
(the caller names one in `reset(options=...)`, or it draws from an iterator) nor that there are other environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypedDict

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from leyden.errors import SeedsExhausted
from leyden.loop import LogCollector, LogLevel
from leyden.loop.metrics import Logs
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


class EnvWrapperStatus(TypedDict, Generic[InitialStateType, ObsType, PolicyActType]):
    """The episode so far."""

    cur_step: int
    done: bool
    initial_state: InitialStateType | None
    """The seed's item."""
    obs_history: list[ObsType]
    """The first one is of the reset: always one longer than the others."""
    action_history: list[PolicyActType]
    """As the policy gave them."""
    reward_history: list[float]


class InfoDict(TypedDict):
    """What a step says besides."""

    log: Logs
    aux_info: Any


class EnvWrapper(
    gymnasium.Env[ObsType, PolicyActType], Generic[InitialStateType, StateType, ActType, ObsType, PolicyActType]
):
    """Simulates one episode after another, each by a simulator of its own.

    `status` is the episode so far, `logger` takes what components log of the present step; both are theirs to read through `self.env`.
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
        """simulator_fn: makes a simulator of a seed's item; without seeds it is called with nothing.

        seed_iterator: the seeds of an environment that is used alone. For a vectorised environment,
            give the seeds to `vectorize_env` instead; a common DataQueue works too.
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
        self._entropy: tuple[int, int] | None = None
        self.aux_info: Any = None
        """What the collector made of the last step."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin an episode with `options["seed_item"]`, else with the iterator's next item, else with none.

        seed: of `np_random`, as in any Gymnasium environment; a component may draw from `self.env.np_random`.
        Raises SeedsExhausted when the iterator has ended.
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
        """One step; info is an InfoDict, with `reward`, at the end `steps_per_episode`, at DEBUG `obs` and `policy_act` in its log."""
        obs, reward, terminated, truncated = self.advance(action)
        return obs, reward, terminated, truncated, dict(self.info(obs, action, reward))

    def render(self) -> Any:
        """Simulators have no picture."""
        raise NotImplementedError(f"{type(self.simulator).__name__} is not rendered")

    @property
    def np_random(self) -> np.random.Generator:
        """Return the generator that simulators, interpreters and rewards draw from.

        In a vectorised environment each episode has one of its own, seeded from the seed plan's seed and the episode's number, so the
        numbers depend neither on the kind of environment nor on the number of workers.
        """
        if self._entropy is not None:
            self.np_random = np.random.default_rng(self._entropy)
        return super().np_random

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        self._np_random, self._np_random_seed, self._entropy = value, -1, None

    def begin(self, item: Any, entropy: tuple[int, int] | None = None) -> ObsType:
        """Begin an episode with an item, or with NO_ITEM, and return its first observation.

        entropy: seeds `np_random` for this episode; None: `np_random` keeps its state.
        """
        self._entropy = entropy
        self.logger.reset()
        self.simulator = None
        try:
            simulator = self.simulator_fn() if item is NO_ITEM else self.simulator_fn(item)
            self.simulator = simulator
            self.status = _fresh_status(None if item is NO_ITEM else item)
            simulator.env = self
            self._may_truncate = _may_truncate(simulator)
            self._state = simulator.get_state()
            obs = self.state_interpreter(self._state)
        except StopIteration as error:
            self.simulator = None
            raise RuntimeError(
                "StopIteration in a simulator or an interpreter; it ends nothing, so let none escape"
            ) from error
        self.status["obs_history"].append(obs)
        return obs

    def advance(self, action: PolicyActType) -> tuple[ObsType, float, bool, bool]:
        """What `step` does, without its info: observation, reward, terminated, truncated."""
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
                reward = float(reward_fn(state))
                if reward != reward:
                    raise ValueError(
                        f"{type(reward_fn).__name__} is NaN at step {status['cur_step']}; a reward is a number"
                    )
            status["reward_history"].append(reward)
            if self.aux_info_collector is not None:
                self.aux_info = self.aux_info_collector(state)
        except StopIteration as error:
            raise RuntimeError(
                "StopIteration in a simulator or an interpreter; it ends nothing, so let none escape"
            ) from error
        return obs, reward, ended and not truncated, truncated

    def info(self, obs: ObsType, action: PolicyActType, reward: float) -> InfoDict:
        """What is to be said of the step just made."""
        logger = self.logger
        if self.status["done"]:
            logger.add_scalar("steps_per_episode", self.status["cur_step"])
        logger.add_scalar("reward", reward)
        logger.add_any("obs", obs, LogLevel.DEBUG)
        logger.add_any("policy_act", action, LogLevel.DEBUG)
        return {"log": logger.logs(), "aux_info": self.aux_info}


def _may_truncate(simulator: Any) -> bool:
    return type(simulator).truncated is not Simulator.truncated  # pyright: ignore[reportUnknownMemberType] -- of any simulator


def _fresh_status(item: Any) -> EnvWrapperStatus[Any, Any, Any]:
    return {
        "cur_step": 0,
        "done": False,
        "initial_state": item,
        "obs_history": [],
        "action_history": [],
        "reward_history": [],
    }
