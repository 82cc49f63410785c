"""Qlib's `EnvWrapper`, which has the interface of the old `gym`, and an adapter that makes such environments usable in
Gymnasium.
"""

from __future__ import annotations

from typing import Any, Final, cast

import gymnasium
import numpy as np

from leyden.errors import SeedsExhausted
from leyden.rl import parts
from leyden.rl.env import EnvWrapper as NativeEnvWrapper
from leyden_compat.qlib.log import LogCollector
from leyden_compat.qlib.spaces import as_gymnasium, check_nan_observation, generate_nan_observation

SEED_INTERATOR_MISSING: Final = "_missing_"
"""Qlib's mark of an environment without seeds, under Qlib's name."""


class EnvWrapper(
    NativeEnvWrapper[parts.InitialStateType, parts.StateType, parts.ActType, parts.ObsType, parts.PolicyActType]
):
    """One environment: `reset()` returns an observation, `step(action)` returns observation, reward, done and info.

    When its seed iterator has ended, `reset` returns the observation of `generate_nan_observation`.
    """

    _is_dead = False

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        if len(parts) < 7 and named.get("logger") is None:  # the logger is the seventh argument
            self.logger = LogCollector()

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode with the next seed. After the last seed, return NaN once; raise RuntimeError at any later
        reset.
        """
        if self._is_dead:
            raise RuntimeError("the environment wrapper is dead: its seeds have ended, and its last reset returned NaN")
        try:
            return super().reset()[0]
        except SeedsExhausted:
            self._is_dead = True
            return generate_nan_observation(self.observation_space)

    def step(self, action: Any, **kwargs: Any) -> Any:
        """Make one step, and return observation, reward, done, info."""
        if self._is_dead:
            raise RuntimeError("the seeds of the environment have ended, but it still receives an action")
        result: Any = super().step(action)
        obs, reward, terminated, truncated, info = result
        return obs, reward, terminated or truncated, info


class AnyObservation(gymnasium.Space[Any]):
    """A space that contains every observation, also one outside the declared space, because Qlib does not check
    observations.
    """

    def __init__(self, declared: Any) -> None:
        super().__init__()
        self.declared = declared
        """The space that the environment declares."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyObservation) and self.declared == other.declared

    __hash__ = None  # pyright: ignore[reportAssignmentType] -- like every space

    def contains(self, x: Any) -> bool:
        """Return True for any value."""
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Return a sample of the declared space."""
        return self.declared.sample()


class OldEnv(gymnasium.Env[Any, Any]):
    """Adapts an environment to Gymnasium. The environment has the interface of the old `gym` or of Gymnasium, and says
    by a NaN observation that it has no further episode.

    Its observations become {"obs": observation, "ended": 0}. After the last episode "ended" is 1, and "obs" is None.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self.action_space = as_gymnasium(env.action_space)
        observed = AnyObservation(as_gymnasium(env.observation_space))
        self.observation_space = gymnasium.spaces.Dict({"obs": observed, "ended": gymnasium.spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. `seed` and `options` have no effect: the environment chooses its seeds."""
        result: Any = self._env.reset()
        obs: Any = result[0] if _has_info(result) else result
        if check_nan_observation(obs):
            return {"obs": None, "ended": np.int64(1)}, {}
        return {"obs": obs, "ended": np.int64(0)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make one step. An episode that is done counts as terminated."""
        result = self._env.step(action)
        obs, reward, done, info = result if len(result) == 4 else (*result[:2], result[2] or result[3], result[4])
        return {"obs": obs, "ended": np.int64(0)}, float(reward), bool(done), False, info

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()


def _has_info(result: Any) -> bool:
    return isinstance(result, tuple) and len(cast("tuple[Any, ...]", result)) == 2 and isinstance(result[1], dict)
