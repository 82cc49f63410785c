"""Trains Qlib's PPO on a bucket that is emptied step by step, checkpoints it, and calls it by hand."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from qlib.rl.interpreter import ActionInterpreter, StateInterpreter
from qlib.rl.order_execution import PPO
from qlib.rl.reward import Reward
from qlib.rl.simulator import Simulator
from qlib.rl.trainer import Checkpoint, backtest, train
from qlib.rl.utils import ConsoleWriter, CsvWriter
from torch import nn
from torch.utils.data import Dataset


class State(NamedTuple):
    value: float
    last: float


class Bucket(Simulator[float, State, float]):
    def __init__(self, initial: float, nsteps: int, **kwargs) -> None:
        super().__init__(initial)
        self.value, self.last, self.left = float(initial), 0.0, nsteps

    def step(self, action: float) -> None:
        assert 0.0 <= action <= self.value
        self.last, self.left = action, self.left - 1

    def get_state(self) -> State:
        return State(self.value, self.last)

    def done(self) -> bool:
        return self.left == 0


class Value(StateInterpreter[State, np.ndarray]):
    def interpret(self, state: State) -> np.ndarray:
        return np.array([state.value], dtype=np.float32)

    @property
    def observation_space(self) -> spaces.Box:
        return spaces.Box(0, np.inf, shape=(1,), dtype=np.float32)


class Part(ActionInterpreter[State, int, float]):
    def __init__(self, n_value: int) -> None:
        self.n_value = n_value

    @property
    def action_space(self) -> spaces.Discrete:
        return spaces.Discrete(self.n_value + 1)

    def interpret(self, simulator_state: State, action: int) -> float:
        assert 0 <= action <= self.n_value
        return simulator_state.value * (action / self.n_value)


class Taken(Reward[State]):
    def reward(self, simulator_state: State) -> float:
        return simulator_state.last / simulator_state.value


class FullyConnected(nn.Module):
    def __init__(self, dims) -> None:
        super().__init__()
        self.output_dim = dims[-1]
        pairs = zip([1, *dims[:-1]], dims, strict=True)
        self.fc = nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Positions(Dataset):
    def __init__(self, positions) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> float:
        return self.positions[index]


folder, kind = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
value, part, reward = Value(), Part(10), Taken()
policy = PPO(FullyConnected([16, 8]), value.observation_space, part.action_space, lr=0.01)
data = Positions([1.0, 5.0, 10.0])
train(
    simulator_fn=lambda position: Bucket(position, 10),
    state_interpreter=value,
    action_interpreter=part,
    policy=policy,
    reward=reward,
    initial_states=data,
    trainer_kwargs={
        "max_iters": 3,
        "finite_env_type": kind,
        "callbacks": [Checkpoint(dirpath=folder / "checkpoints", every_n_iters=1, save_latest="copy")],
    },
    vessel_kwargs={"update_kwargs": {"batch_size": 16, "repeat": 1}, "episode_per_iter": 6},
)
saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
assert saved == ["001.pth", "002.pth", "003.pth", "latest.pth"], saved
assert torch.load(folder / "checkpoints" / "latest.pth")["current_iter"] == 3

simulator = Bucket(100.0, 10)
state = simulator.get_state()
out = policy({"obs": np.array([value.interpret(state)])})
act = float(part.interpret(state, out.act))
simulator.step(act)
print(f"Action = {act:.6f}, Reward = {float(reward(simulator.get_state())):.6f}.")

backtest(
    lambda position: Bucket(position, 10),
    value,
    part,
    data,
    policy,
    [ConsoleWriter(total_episodes=3), CsvWriter(folder)],
    reward,
    kind,
)
assert len((folder / "result.csv").read_text().splitlines()) == 4
print("done", kind)
