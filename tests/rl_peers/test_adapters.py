"""Policies of Stable-Baselines3 and tianshou 2 act under our collector as they do in their own library."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from leyden.errors import ConfigError
from leyden.rl.collector import Collector
from leyden.rl.env import vectorize_env
from leyden.rl.policy import AllOne, Sb3Policy, TianshouPolicy

torch.set_num_threads(1)
OBS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def collected(policy, environment: str = "CartPole-v1"):
    with vectorize_env(environment, concurrency=3, seeds=range(5)) as venv:
        result = Collector(policy, venv).collect(explore=False)
    assert result.n_episodes == 5
    return result


@pytest.mark.parametrize(
    ("name", "environment"), [("PPO", "CartPole-v1"), ("DQN", "CartPole-v1"), ("SAC", "Pendulum-v1")]
)
def test_a_stable_baselines3_model_acts_as_it_predicts(name, environment):
    import stable_baselines3

    model = getattr(stable_baselines3, name)("MlpPolicy", environment, seed=0, device="cpu")
    policy = Sb3Policy(model)
    obs = OBS[:, : policy.observation_space.shape[0]]
    assert np.array_equal(policy.act(obs, explore=False).actions, model.predict(obs, deterministic=True)[0])
    assert len({tuple(np.ravel(policy.act(obs, explore=True).actions)) for _ in range(6)}) > (name == "PPO")
    collected(policy, environment)
    other = Sb3Policy(getattr(stable_baselines3, name)("MlpPolicy", environment, seed=1, device="cpu"))
    other.load_state_dict(policy.state_dict())
    assert np.array_equal(other.act(obs, explore=False).actions, policy.act(obs, explore=False).actions)


def test_what_a_stable_baselines3_model_learns_is_seen_at_once():
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", "CartPole-v1", seed=0, device="cpu", n_steps=128, learning_rate=1e-2)
    policy = Sb3Policy(model)
    before = policy.act(OBS, explore=False).actions
    model.learn(512)
    after = policy.act(OBS, explore=False).actions
    assert not np.array_equal(after, before)
    assert np.array_equal(after, model.predict(OBS, deterministic=True)[0])


def discrete_actor_policy(deterministic_eval: bool = True):
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import DiscreteActor

    env = gymnasium.make("CartPole-v1")
    net = Net(state_shape=env.observation_space.shape, hidden_sizes=[16])
    actor = DiscreteActor(preprocess_net=net, action_shape=2, softmax_output=False)
    return ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=env.action_space,
        observation_space=env.observation_space,
        deterministic_eval=deterministic_eval,
        action_scaling=False,
    )


def test_a_tianshou_actor_acts_as_its_forward_does():
    from tianshou.data import Batch

    theirs = discrete_actor_policy()
    theirs.eval()
    policy = TianshouPolicy(theirs)
    with torch.no_grad():
        wanted = theirs(Batch(obs=OBS, info=Batch())).act.numpy()
    assert np.array_equal(policy.act(OBS, explore=False).actions, wanted)
    assert len({tuple(policy.act(OBS, explore=True).actions) for _ in range(6)}) > 1
    collected(policy)
    assert theirs.is_within_training_step is False
    other = TianshouPolicy(discrete_actor_policy())
    other.load_state_dict(policy.state_dict())
    assert np.array_equal(other.act(OBS, explore=False).actions, wanted)


def test_a_tianshou_q_policy_explores_as_its_epsilon_says():
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.utils.net.common import Net

    env = gymnasium.make("CartPole-v1")
    theirs = DiscreteQLearningPolicy(
        model=Net(state_shape=env.observation_space.shape, action_shape=2, hidden_sizes=[16]),
        action_space=env.action_space,
        observation_space=env.observation_space,
        eps_training=1.0,
        eps_inference=0.0,
    )
    policy = TianshouPolicy(theirs)
    greedy = policy.act(OBS, explore=False).actions
    assert np.array_equal(policy.act(OBS, explore=False).actions, greedy)
    many = np.repeat(OBS[:1], 2000, axis=0)
    assert np.mean(policy.act(many, explore=True).actions != greedy[0]) == pytest.approx(0.5, abs=0.05)
    collected(policy)


def test_what_is_no_policy_is_refused():
    space = spaces.Discrete(2)
    with pytest.raises(ConfigError, match="not AllOne"):
        Sb3Policy(AllOne(space, space))
    with pytest.raises(ConfigError, match="not dict"):
        TianshouPolicy({})
