"""Environments whose observations the declared space does not have, collected by hand: `any_observation.py FOLDER KIND...`."""

import sys
from functools import partial

import gymnasium
import numpy as np
from qlib.rl.utils.finite_env import (
    FiniteDummyVectorEnv,
    FiniteShmemVectorEnv,
    FiniteSubprocVectorEnv,
    generate_nan_observation,
)
from qlib.rl.utils.log import LogWriter

KINDS = {"dummy": FiniteDummyVectorEnv, "subproc": FiniteSubprocVectorEnv, "shmem": FiniteShmemVectorEnv}


class Part(gymnasium.Env):
    """Its share of the numbers 0 to 9, as dicts in a space of one integer, then the NaN observation."""

    def __init__(self, rank):
        self.observation_space, self.action_space = gymnasium.spaces.Discrete(255), gymnasium.spaces.Discrete(2)
        self.numbers = iter(range(rank, 10, 3))

    def reset(self):
        if (number := next(self.numbers, None)) is None:
            return generate_nan_observation(self.observation_space)
        self.state = {"number": number, "view": (np.full(2, float(number)), np.zeros((2, 3)))}
        return self.state

    def step(self, action):
        return self.state, 1.0, True, {"number": self.state["number"]}


class Seen(LogWriter):
    def __init__(self):
        super().__init__()
        self.begun, self.stepped = [], []

    def on_env_reset(self, env_id, obs):
        super().on_env_reset(env_id, obs)
        self.begun.append(obs["number"])

    def on_env_step(self, env_id, obs, rew, done, info):
        super().on_env_step(env_id, obs, rew, done, info)
        assert obs["view"][0].tolist() == [info["number"]] * 2
        self.stepped.append(info["number"])


def collect(kind):
    seen = Seen()
    venv = KINDS[kind](seen, [partial(Part, rank) for rank in range(3)])
    assert venv.observation_space == [gymnasium.spaces.Discrete(255)] * 3
    with venv.collector_guard():
        obs, ids = venv.reset(), np.arange(3)
        while True:
            assert all(set(one) == {"number", "view"} for one in obs), obs
            venv.step(np.zeros(len(ids), int), ids)
            obs = venv.reset(ids)
    venv.close()
    return sorted(seen.begun), sorted(seen.stepped)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        assert collect(name) == (list(range(10)), list(range(10))), name
        print("done", name)
