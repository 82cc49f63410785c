"""One side of the benchmark of environments: the same simulator in one library's vectorised environment.

    python rl_env_side.py SIDE N_ENVS

SIDE: `raw`, `leyden-KIND`, `gymnasium-KIND`, `sb3-KIND` or `tianshou-KIND`. Commands come as lines of JSON on the standard input, each is
answered by one line; the process stays, so that short slices of all sides can take turns:

    {"do": "run", "steps": N}     about N steps of environments: {"steps", "seconds"}; the caller reads the CPU time of its processes

The simulator: 16 floats, episodes of 200 steps, fixed actions. Leyden's goes through its whole stack: finite seeds, interpreters that
validate, a reward, a value that is logged in each step, episodes added up and told to a writer. The others drive the bare environment.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

SIZE, LENGTH = 16, 200


class Core:
    """The simulator itself, for all sides."""

    def __init__(self, number: int = 0):
        self.x = np.full(SIZE, 0.01 * (number % 7), np.float32)
        self.steps = 0

    def step(self, push: float) -> float:
        self.x = self.x * np.float32(0.99) + np.float32(push)
        self.steps += 1
        return float(self.x[0])


def gym_env():
    import gymnasium

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

        def reset(self, *, seed=None, options=None):
            self.core = Core()
            return self.core.x, {}

        def step(self, action):
            reward = self.core.step(action[0])
            return self.core.x, reward, self.core.steps >= LENGTH, False, {}

    return Env()


class Raw:
    def __init__(self, n):
        self.n, self.env = n, gym_env()
        self.env.reset()

    def run(self, rounds, actions):
        env = self.env
        for _ in range(rounds):
            for action in actions:
                if env.step(action)[2]:
                    env.reset()


class Leyden:
    def __init__(self, kind, n):
        from gymnasium import spaces

        from leyden.rl.env import EnvWrapper, FiniteBatchVectorEnv, vectorize_env
        from leyden.rl.parts import ActionInterpreter, Reward, Simulator, StateInterpreter
        from leyden.rl.seed import SeedPlan

        class Sim(Simulator):
            def __init__(self, initial):
                self.core = Core(initial)

            def step(self, action):
                self.value = self.core.step(action)
                self.env.logger.add_scalar("value", self.value)

            def get_state(self):
                return self.core

            def done(self):
                return self.core.steps >= LENGTH

        class State(StateInterpreter):
            observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)

            def interpret(self, simulator_state):
                return simulator_state.x

        class Action(ActionInterpreter):
            action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

            def interpret(self, simulator_state, action):
                return action[0]

        class Value(Reward):
            def reward(self, simulator_state):
                return float(simulator_state.x[0])

        class Writer:
            wants_steps = False
            episodes = 0

            def log_episode(self, episode):
                self.episodes += 1

            def on_env_reset(self, env_id, obs):
                pass

        class Many:
            num_envs = n
            observation_space, action_space = State.observation_space, Action.action_space

            def __init__(self):
                self.x, self.steps = np.zeros((n, SIZE), np.float32), np.zeros(n, np.int64)
                self.no = np.zeros(n, bool)

            def reset(self, indices, items):
                self.x[indices] = np.float32(0.01) * (np.array(items, np.float32) % 7)[:, None]
                self.steps[indices] = 0
                return self.x[indices]

            def step(self, actions):
                self.x *= np.float32(0.99)
                self.x += actions[:, :1]
                self.steps += 1
                return self.x, self.x[:, 0], self.steps >= LENGTH, self.no

        plan, writer = SeedPlan(range(100_000), repeat=-1, shuffle=True), Writer()
        if kind == "batch":
            self.venv = FiniteBatchVectorEnv(Many(), writer, seeds=plan)
        else:
            make = lambda: EnvWrapper(Sim, State(), Action(), reward_fn=Value())  # noqa: E731
            self.venv = vectorize_env(make, kind, n, writer, seeds=plan)
        self.venv.reset()

    def run(self, rounds, actions):
        venv = self.venv
        for _ in range(rounds):
            venv.step(actions)
            if not venv.alive.all():
                venv.reset()


class Gymnasium:
    def __init__(self, kind, n):
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        self.venv = SyncVectorEnv([gym_env] * n) if kind == "sync" else AsyncVectorEnv([gym_env] * n)
        self.venv.reset()

    def run(self, rounds, actions):
        for _ in range(rounds):
            self.venv.step(actions)


class StableBaselines:
    def __init__(self, kind, n):
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

        self.venv = DummyVecEnv([gym_env] * n) if kind == "dummy" else SubprocVecEnv([gym_env] * n)
        self.venv.reset()

    def run(self, rounds, actions):
        for _ in range(rounds):
            self.venv.step(actions)


class Tianshou:
    def __init__(self, kind, n):
        from tianshou.env import DummyVectorEnv, ShmemVectorEnv, SubprocVectorEnv

        kinds = {"dummy": DummyVectorEnv, "subproc": SubprocVectorEnv, "shmem": ShmemVectorEnv}
        self.venv = kinds[kind]([gym_env] * n)
        self.venv.reset()

    def run(self, rounds, actions):
        for _ in range(rounds):
            _, _, terminated, truncated, _ = self.venv.step(actions)
            if (ended := terminated | truncated).any():
                self.venv.reset(np.flatnonzero(ended))


SIDES = {"leyden": Leyden, "gymnasium": Gymnasium, "sb3": StableBaselines, "tianshou": Tianshou}


def main():
    library, _, kind = sys.argv[1].partition("-")
    n = int(sys.argv[2])
    side = Raw(n) if library == "raw" else SIDES[library](kind, n)
    actions = np.full((n, 2), 0.001, np.float32)
    side.run(100, actions)
    for line in sys.stdin:
        rounds = max(1, json.loads(line)["steps"] // n)
        began = time.perf_counter()
        side.run(rounds, actions)
        print(json.dumps({"steps": rounds * n, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
