"""One side of the benchmark of learning: one run of PPO by Leyden or Stable-Baselines3, from its seed to its last evaluation.

    python rl_learning_side.py leyden | sb3

Commands come as lines of JSON on the standard input: {"do": "train", "task": "CartPole-v1", "seed": 0} answers, for each iteration, the
environment steps so far and the mean reward over the held-out reset seeds, and the CPU seconds of the training alone.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv

ENVS = 4
HELD_OUT = range(1_000_000, 1_000_020)
"""Reset seeds of the evaluation; training draws others."""
EPOCHS, CLIP, LAMBDA, VF, ENT, NORM, ADAM_EPS = 10, 0.2, 0.95, 0.5, 0.0, 0.5, 1e-8


@dataclass(frozen=True)
class Task:
    env: type[gymnasium.Env]
    limit: int
    steps: int
    """Of the environment, in all."""
    iteration: int
    """Environment steps between two updates."""
    batch: int
    lr: float
    discount: float

    def make(self):
        """The environment in the form that both libraries' Gaussians expect: actions in [-1, 1]."""
        env = gymnasium.wrappers.TimeLimit(self.env(), self.limit)
        box = isinstance(env.action_space, gymnasium.spaces.Box)
        return gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1)) if box else env


TASKS = {
    "CartPole-v1": Task(CartPoleEnv, 500, 50_000, 2048, 64, 3e-4, 0.99),
    "Pendulum-v1": Task(PendulumEnv, 200, 100_000, 4000, 80, 1e-3, 0.9),
}


def leyden(task: Task, seed: int):
    """Through simulator, interpreters and reward, `TrainingVessel` and `Trainer`, as users write it."""
    from leyden.rl import PPO, ActionInterpreter, Reward, Simulator, StateInterpreter, Trainer, TrainingVessel

    class Core(Simulator):
        """One episode; the initial state is the seed of the environment's reset."""

        def __init__(self, initial):
            self.core = task.env()
            self.obs, _ = self.core.reset(seed=int(initial))
            self.reward, self.ended, self.steps = 0.0, False, 0

        def step(self, action):
            self.obs, self.reward, self.ended, _, _ = self.core.step(action)
            self.steps += 1

        def get_state(self):
            return self

        def done(self):
            return self.ended

        def truncated(self):
            return not self.ended and self.steps == task.limit

    example = task.env()

    class Observation(StateInterpreter):
        observation_space = example.observation_space

        def interpret(self, simulator_state):
            return simulator_state.obs

    class Action(ActionInterpreter):
        action_space = example.action_space

        def interpret(self, simulator_state, action):
            return action

    class Own(Reward):
        def reward(self, simulator_state):
            return float(simulator_state.reward)

    class Vessel(TrainingVessel):
        """A collect has as many episodes as make about `iteration` steps, by the length of the last ones."""

        steps, cpu_s = 0, 0.0

        def train(self, vector_env):
            began, before = time.process_time(), self.episode_per_iter
            metrics = super().train(vector_env)
            self.cpu_s += time.process_time() - began
            self.steps += round(before * metrics["steps_per_episode"])
            self.episode_per_iter = max(ENVS, round(task.iteration / metrics["steps_per_episode"]))
            return metrics

        def validate(self, vector_env):
            metrics = super().validate(vector_env)
            curve.append([self.steps, metrics["reward"]])
            self.trainer.should_stop = self.steps >= task.steps
            return metrics

    curve: list[list[float]] = []
    policy = PPO(
        None,
        Observation.observation_space,
        Action.action_space,
        lr=task.lr,
        discount_factor=task.discount,
        gae_lambda=LAMBDA,
        eps_clip=CLIP,
        vf_coef=VF,
        ent_coef=ENT,
        max_grad_norm=NORM,
        reward_normalization=False,
        value_clip=False,
        seed=seed,
    )
    vessel = Vessel(
        simulator_fn=Core,
        state_interpreter=Observation(),
        action_interpreter=Action(),
        reward=Own(),
        policy=policy,
        train_initial_states=range(100_000),
        val_initial_states=HELD_OUT,
        episode_per_iter=task.iteration // (task.limit if task.env is PendulumEnv else 22),
        buffer_size=task.steps,
        update_kwargs={"batch_size": task.batch, "repeat": EPOCHS},
        seed=seed,
    )
    trainer = Trainer(max_iters=1000, val_every_n_iters=1, finite_env_type="dummy", concurrency=ENVS, progress=False)
    trainer.fit(vessel)
    return curve, vessel.cpu_s


def sb3(task: Task, seed: int):
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    held_out = [task.make() for _ in HELD_OUT]
    curve: list[list[float]] = []
    evaluating = 0.0

    def evaluate(model):
        nonlocal evaluating
        began = time.process_time()
        alive, obs = list(range(len(held_out))), [e.reset(seed=s)[0] for e, s in zip(held_out, HELD_OUT, strict=True)]
        total = 0.0
        while alive:
            actions, _ = model.predict(np.stack([obs[at] for at in alive]), deterministic=True)
            still = []
            for at, action in zip(alive, actions, strict=True):
                obs[at], reward, terminated, truncated, _ = held_out[at].step(action)
                total += float(reward)
                if not (terminated or truncated):
                    still.append(at)
            alive = still
        curve.append([model.num_timesteps, total / len(held_out)])
        evaluating += time.process_time() - began

    class Evaluate(BaseCallback):
        """A rollout begins when the update before it is done."""

        def _on_step(self):
            return True

        def _on_rollout_start(self):
            if self.num_timesteps:
                evaluate(self.model)

    model = PPO(
        "MlpPolicy",
        DummyVecEnv([lambda: Monitor(task.make())] * ENVS),
        learning_rate=task.lr,
        n_steps=task.iteration // ENVS,
        batch_size=task.batch,
        n_epochs=EPOCHS,
        gamma=task.discount,
        gae_lambda=LAMBDA,
        clip_range=CLIP,
        vf_coef=VF,
        ent_coef=ENT,
        max_grad_norm=NORM,
        policy_kwargs={"net_arch": [64, 64], "optimizer_kwargs": {"eps": ADAM_EPS}},
        device="cpu",
        seed=seed,
        verbose=0,
    )
    began = time.process_time()
    model.learn(task.steps, callback=Evaluate())
    cpu_s = time.process_time() - began - evaluating
    evaluate(model)
    return curve, cpu_s


def main():
    torch.set_num_threads(1)
    side = {"leyden": leyden, "sb3": sb3}[sys.argv[1]]
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        task = TASKS[asked["task"]]
        curve, cpu_s = side(task, asked["seed"])
        answer = {"curve": curve, "cpu_s": cpu_s, "steps": task.steps, "iteration": task.iteration}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
