"""Collects by hand with tianshou's Collector: environments of the old gym, and an EnvWrapper over a DataQueue."""

import sys
from collections import Counter
from pathlib import Path

import gym
import numpy as np
from qlib.constant import INF
from qlib.rl.interpreter import ActionInterpreter, StateInterpreter
from qlib.rl.simulator import Simulator
from qlib.rl.utils.data_queue import DataQueue
from qlib.rl.utils.env_wrapper import EnvWrapper, InfoDict
from qlib.rl.utils.finite_env import check_nan_observation, generate_nan_observation, vectorize_env
from qlib.rl.utils.log import ConsoleWriter, CsvWriter, LogCollector, LogLevel, LogWriter
from tianshou.data import Batch, Collector
from tianshou.policy import BasePolicy


class Ones(BasePolicy):
    def forward(self, batch, state=None, **kwargs):
        return Batch(act=np.ones(len(batch), int))

    def learn(self, batch, **kwargs):
        return {}


class Part(gym.Env):
    """Its share of the numbers 0 to 19, then the NaN observation."""

    def __init__(self, rank):
        self.observation_space, self.action_space = gym.spaces.Box(0, 100, (1,)), gym.spaces.Discrete(2)
        self.numbers = iter(range(rank, 20, 4))

    def reset(self):
        self.number = next(self.numbers, None)
        if self.number is None:
            return generate_nan_observation(self.observation_space)
        self.steps = 0
        return np.array([self.number], np.float32)

    def step(self, action):
        self.steps += 1
        done = self.steps > self.number % 3
        return np.array([self.number], np.float32), 1.0, done, {"log": {}, "number": self.number}


class Tracker(LogWriter):
    def __init__(self):
        super().__init__()
        self.steps, self.ended = Counter(), []

    def on_env_step(self, env_id, obs, rew, done, info):
        super().on_env_step(env_id, obs, rew, done, info)
        self.steps[info["number"]] += 1
        if done:
            self.ended.append(info["number"])


class Walk(Simulator[int, float, float]):
    def __init__(self, initial, **kwargs):
        super().__init__(initial, **kwargs)
        self.value = float(initial)

    def step(self, action):
        self.value += action
        self.env.logger.add_scalar("twice", np.array(2 * self.value))

    def get_state(self):
        return self.value

    def done(self):
        return self.value % 1 > 0.25


class AsItIs(StateInterpreter[float, np.ndarray]):
    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)

    def interpret(self, state):
        return np.array([state], np.float32)


class Tenth(ActionInterpreter[float, int, float]):
    action_space = gym.spaces.Discrete(2)

    def interpret(self, state, action):
        return action / 10


def parts(kind):
    from qlib.rl.utils.finite_env import FiniteDummyVectorEnv, FiniteShmemVectorEnv, FiniteSubprocVectorEnv

    classes = {"dummy": FiniteDummyVectorEnv, "shmem": FiniteShmemVectorEnv, "subproc": FiniteSubprocVectorEnv}
    tracker = Tracker()
    venv = classes[kind](tracker, [lambda rank=rank: Part(rank) for rank in range(4)])
    with venv.collector_guard():
        Collector(Ones(), venv).collect(n_step=INF * 4)
    assert sorted(tracker.ended) == list(range(20)), tracker.ended
    assert all(steps == number % 3 + 1 for number, steps in tracker.steps.items())
    assert tracker.global_episode == 20
    venv.close()


def queue(kind, folder):
    with DataQueue(list(range(10)), shuffle=False) as seeds:

        def make():
            return EnvWrapper(Walk, AsItIs(), Tenth(), seeds, logger=LogCollector(LogLevel.DEBUG))

        writer = CsvWriter(folder, loglevel=LogLevel.DEBUG)
        venv = vectorize_env(make, kind, 3, [writer, ConsoleWriter(total_episodes=10)])
        with venv.collector_guard():
            Collector(Ones(), venv).collect(n_episode=INF * len(venv))
        venv.close()
    lines = (folder / "result.csv").read_text().splitlines()
    assert len(lines) == 11 and {"twice", "reward", "steps_per_episode"} <= set(lines[0].split(",")), lines


def alone():
    env = EnvWrapper(Walk, AsItIs(), Tenth(), [5])
    obs = env.reset()
    assert obs.tolist() == [5.0]
    obs, reward, done, info = env.step(1)
    assert (reward, done, dict(info["aux_info"] or {})) == (0.0, False, {})
    assert info["log"]["reward"].tolist() == [LogLevel.PERIODIC, 0.0]
    assert isinstance(InfoDict(log={}, aux_info={}), dict)
    assert check_nan_observation(env.reset())
    try:
        env.reset()
    except RuntimeError:
        return
    raise AssertionError("a dead environment was reset")


if __name__ == "__main__":
    parts(sys.argv[2])
    queue(sys.argv[2], Path(sys.argv[1]))
    alone()
    print("done", sys.argv[2])
