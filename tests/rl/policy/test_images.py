"""Images of bytes are divided by 255 by their space, in every policy and for every network; other observations are not."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from leyden.rl.collector import Collector
from leyden.rl.policy import DQN, PPO
from tests.rl.support import vectorized

torch.set_num_threads(1)
IMAGE = spaces.Box(0, 255, (4, 4, 3), np.uint8)
FRAMES = spaces.Box(0, 255, (2, 4, 4, 3), np.uint8)
GREY = spaces.Box(0, 255, (4, 4), np.uint8)
ACTIONS = spaces.Discrete(4)


class Quadrants(gymnasium.Env[Any, Any]):
    """Four steps; the brighter quadrant of a noisy image says which of four actions is rewarded by 1/4. The optimum is 1."""

    def __init__(self, shape: tuple[int, ...]):
        self.observation_space, self.action_space = spaces.Box(0, 255, shape, np.uint8), ACTIONS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.n = 0
        return self._image(), {}

    def step(self, action: Any):
        reward = float(action == self.right) / 4
        self.n += 1
        return self._image(), reward, self.n == 4, False, {}

    def _image(self):
        image = self.np_random.integers(0, 64, self.observation_space.shape, dtype=np.uint8)
        self.right = int(self.np_random.integers(4))
        row, column = divmod(self.right, 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 160
        return image


@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8)])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "make", [partial(DQN, exploration=(1.0, 0.05, 1000), target_update_freq=50, discount_factor=0.5), PPO]
)
def test_it_learns_from_raw_images(make, seed, shape):
    venv = vectorized(Quadrants, 4, seeds=range(1000 * seed, 1000 * seed + 400), shape=shape)
    policy = make(None, venv.observation_space, ACTIONS, lr=1e-3, seed=seed)
    buffer = policy.make_buffer(5000 if isinstance(policy, DQN) else None, 4)
    collector = Collector(policy, venv, buffer)
    for _ in range(20):
        collector.collect(n_episode=16)
        policy.update(buffer, batch_size=64, repeat=8)
    venv.use_seeds(range(90_000, 90_050))
    assert Collector(policy, venv).collect(explore=False).metrics["reward"] >= 0.97


class Seeing(nn.Module):
    """Keeps the observations that it was last given."""

    output_dim = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, obs):
        self.seen = obs
        first = obs
        while not isinstance(first, torch.Tensor):
            first = next(iter(first.values())) if isinstance(first, dict) else first[0]
        return self.weight.expand(len(first), 2)


def seen_by(kind: Any, space: Any, obs: Any) -> Any:
    network = Seeing()
    kind(network, space, ACTIONS, lr=1e-3).act(obs, explore=False)
    return network.seen


@pytest.mark.parametrize("kind", [DQN, PPO])
@pytest.mark.parametrize("space", [IMAGE, FRAMES, GREY])
def test_a_network_of_ones_own_gets_images_from_0_to_1(kind, space):
    obs = np.stack([space.low, space.high, np.full(space.shape, 51, np.uint8)])
    seen = seen_by(kind, space, obs)
    assert seen.dtype == torch.float32
    assert seen.shape == obs.shape
    assert torch.equal(seen, torch.from_numpy(obs).float() / 255)


@pytest.mark.parametrize("kind", [DQN, PPO])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0.0, 1.0, (4, 4, 3), np.float32),
        spaces.Box(0.0, 255.0, (4, 4, 3), np.float32),
        spaces.Box(0, 10, (7, 7, 3), np.uint8),
        spaces.Box(1, 255, (4, 4, 3), np.uint8),
        spaces.Box(0, 255, (128,), np.uint8),
        spaces.Box(0, 255, (4, 4, 3), np.int16),
    ],
)
def test_other_observations_are_left_alone(kind, space):
    obs = space.sample()[None]
    seen = seen_by(kind, space, obs)
    assert seen.dtype == torch.from_numpy(obs).dtype
    assert np.array_equal(seen.numpy(), obs)


@pytest.mark.parametrize("kind", [DQN, PPO])
def test_only_the_images_among_several_observations_are_scaled(kind):
    row = spaces.Box(0, 255, (3,), np.uint8)
    space = spaces.Dict({"camera": IMAGE, "more": spaces.Tuple((row, GREY))})
    obs = {"camera": IMAGE.high[None], "more": (row.high[None], GREY.high[None])}
    seen = seen_by(kind, space, obs)
    assert seen["camera"].max() == seen["camera"].min() == 1
    assert seen["more"][0].tolist() == [[255, 255, 255]]
    assert seen["more"][1].max() == 1


@pytest.mark.parametrize("kind", [DQN, PPO])
def test_restored_policies_weight_files_copies_and_the_bare_module_scale_alike(kind, tmp_path):
    policy = kind(None, IMAGE, ACTIONS, lr=1e-3, seed=3)
    obs = np.stack([IMAGE.sample() for _ in range(5)])

    def outputs(module: Any) -> torch.Tensor:
        found = module(torch.from_numpy(obs))
        return (found[0] if isinstance(found, tuple) else found).detach()

    wanted = outputs(policy.module)
    torch.save(policy.state_dict(), tmp_path / "policy.pt")
    restored = kind(None, IMAGE, ACTIONS, lr=1e-3, seed=4)
    restored.load_state_dict(policy.state_dict())
    loaded = kind(None, IMAGE, ACTIONS, lr=1e-3, seed=5, weight_file=tmp_path / "policy.pt")
    others = [restored.module, loaded.module, copy.deepcopy(policy.module)]
    if policy.__class__ is DQN:
        others.append(policy.target)
    assert all(torch.equal(outputs(module), wanted) for module in others)
    flat = kind(None, spaces.Box(0.0, 1.0, (4, 4, 3), np.float32), ACTIONS, lr=1e-3, weight_file=tmp_path / "policy.pt")
    scaled = flat.module(torch.from_numpy(obs).float() / 255)
    assert torch.equal((scaled[0] if isinstance(scaled, tuple) else scaled).detach(), wanted)
