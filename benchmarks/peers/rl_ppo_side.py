"""One side of the PPO benchmark: the same training iteration by Leyden, Stable-Baselines3 or tianshou.

    python rl_ppo_side.py leyden | leyden-stack | sb3 | tianshou

`leyden` steps the bare Gymnasium environment, as the peers do; `leyden-stack` is what users of `Trainer` have: finite seeds, a simulator,
interpreters that validate, a reward, a value logged in each step and the trainer's means over episodes.

Commands come as lines of JSON on the standard input: {"do": "iterate"} is 8,000 steps and an update, and answers the steps and the CPU
seconds of both parts.
"""

from __future__ import annotations

import json
import sys
import time

import gymnasium
import numpy as np
import torch

ENVS = 4
STEPS = 8_000
EPISODE = 200
BATCH, EPOCHS = 250, 4
LR, DISCOUNT, LAMBDA, CLIP, VF, ENT, NORM = 3e-4, 0.99, 0.95, 0.2, 0.5, 0.0, 0.5


class Simulator(gymnasium.Env):
    """16 numbers that wander; reward is bounded and depends on the action."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (16,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.noise = np.random.default_rng(0).normal(size=(EPISODE + 1, 16)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.state = self.noise[0].copy()
        return self.state, {}

    def step(self, action):
        reward = 1.0 if (self.state[0] > 0) == bool(action) else 0.0
        self.t += 1
        self.state = 0.9 * self.state + self.noise[self.t]
        return self.state, reward, self.t >= EPISODE, False, {}


class Leyden:
    def __init__(self):
        from leyden.rl.collector import Collector
        from leyden.rl.policy import PPO

        venv = self.environments()
        self.policy = PPO(
            None,
            venv.observation_space,
            venv.action_space,
            lr=LR,
            discount_factor=DISCOUNT,
            gae_lambda=LAMBDA,
            eps_clip=CLIP,
            vf_coef=VF,
            ent_coef=ENT,
            max_grad_norm=NORM,
            reward_normalization=False,
            value_clip=False,
        )
        self.buffer = self.policy.make_buffer(STEPS, ENVS)
        self.collector = Collector(self.policy, venv, self.buffer)

    def environments(self):
        from leyden.rl import vectorize_env

        return vectorize_env(Simulator, concurrency=ENVS)

    def collect(self):
        return self.collector.collect(n_episode=STEPS // EPISODE).n_steps

    def learn(self):
        self.policy.update(self.buffer, batch_size=BATCH, repeat=EPOCHS)


class LeydenStack(Leyden):
    def environments(self):
        from leyden.rl import ActionInterpreter, EnvWrapper, FiniteDummyVectorEnv, Reward, SeedPlan, StateInterpreter
        from leyden.rl import Simulator as BaseSimulator
        from leyden.training import LogBuffer

        spaces = Simulator()

        class Core(BaseSimulator):
            """The environment of `Simulator`; the initial state says which of its numbers comes first."""

            noise = spaces.noise

            def __init__(self, initial):
                self.t, self.first = 0, initial
                self.state = self.noise[initial].copy()
                self.right = 0.0

            def step(self, action):
                self.right = 1.0 if (self.state[0] > 0) == bool(action) else 0.0
                self.t += 1
                self.state = 0.9 * self.state + self.noise[(self.first + self.t) % (EPISODE + 1)]
                self.env.logger.add_scalar("right", self.right)

            def get_state(self):
                return self

            def done(self):
                return self.t >= EPISODE

        class Observation(StateInterpreter):
            observation_space = spaces.observation_space

            def interpret(self, simulator_state):
                return simulator_state.state

        class Action(ActionInterpreter):
            action_space = spaces.action_space

            def interpret(self, simulator_state, action):
                return action

        class Right(Reward):
            def reward(self, simulator_state):
                return simulator_state.right

        def make():
            return EnvWrapper(Core, Observation(), Action(), reward_fn=Right())

        plan = SeedPlan(range(EPISODE), repeat=-1, shuffle=True)
        return FiniteDummyVectorEnv(
            LogBuffer(lambda on_episode, on_collect, log_buffer: None), [make] * ENVS, seeds=plan
        )


class Sb3:
    """`learn` collects and updates in one; the update is timed by itself."""

    def __init__(self):
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        self.model = PPO(
            "MlpPolicy",
            DummyVecEnv([Simulator] * ENVS),
            learning_rate=LR,
            n_steps=STEPS // ENVS,
            batch_size=BATCH,
            n_epochs=EPOCHS,
            gamma=DISCOUNT,
            gae_lambda=LAMBDA,
            clip_range=CLIP,
            vf_coef=VF,
            ent_coef=ENT,
            max_grad_norm=NORM,
            policy_kwargs={"net_arch": [64, 64]},
            device="cpu",
            verbose=0,
        )
        _, self.callback = self.model._setup_learn(STEPS)

    def collect(self):
        before = self.model.num_timesteps
        assert self.model.collect_rollouts(
            self.model.env, self.callback, self.model.rollout_buffer, n_rollout_steps=self.model.n_steps
        )
        return self.model.num_timesteps - before

    def learn(self):
        self.model.train()


class Tianshou:
    def __init__(self):
        from tianshou.algorithm import PPO
        from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
        from tianshou.algorithm.optim import AdamOptimizerFactory
        from tianshou.data import Collector, VectorReplayBuffer
        from tianshou.env import DummyVectorEnv
        from tianshou.utils.net.common import Net
        from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
        from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

        self._within, self._train = policy_within_training_step, torch_train_mode
        env = Simulator()

        def body():
            return Net(state_shape=(16,), hidden_sizes=[64, 64], activation=torch.nn.Tanh)

        policy = ProbabilisticActorPolicy(
            actor=DiscreteActor(preprocess_net=body(), action_shape=2, softmax_output=False),
            dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
            action_space=env.action_space,
            observation_space=env.observation_space,
            action_scaling=False,
        )
        self.algorithm = PPO(
            policy=policy,
            critic=DiscreteCritic(preprocess_net=body()),
            optim=AdamOptimizerFactory(lr=LR),
            eps_clip=CLIP,
            vf_coef=VF,
            ent_coef=ENT,
            max_grad_norm=NORM,
            gae_lambda=LAMBDA,
            gamma=DISCOUNT,
            max_batchsize=BATCH,
        )
        self.collector = Collector(
            self.algorithm, DummyVectorEnv([Simulator] * ENVS), VectorReplayBuffer(STEPS, ENVS), exploration_noise=True
        )
        self.collector.reset()

    def collect(self):
        self.collector.reset_buffer(keep_statistics=True)
        with self._within(self.algorithm.policy):
            return self.collector.collect(n_step=STEPS).n_collected_steps

    def learn(self):
        with self._within(self.algorithm.policy), self._train(self.algorithm):
            self.algorithm.update(self.collector.buffer, batch_size=BATCH, repeat=EPOCHS)


def main():
    torch.set_num_threads(1)
    side = {"leyden": Leyden, "leyden-stack": LeydenStack, "sb3": Sb3, "tianshou": Tianshou}[sys.argv[1]]()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        assert json.loads(line)["do"] == "iterate"
        began = time.process_time()
        steps = side.collect()
        collected = time.process_time()
        side.learn()
        ended = time.process_time()
        answer = {"steps": int(steps), "collect_cpu_s": collected - began, "learn_cpu_s": ended - collected}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
