"""A simulator of one's own, and a policy that learns to run it.

It keeps a room near 20 degrees with a heater of three settings.

python examples/rl_custom_simulator.py
"""

import numpy as np
from gymnasium import spaces

from leyden.rl import PPO, ActionInterpreter, Reward, Simulator, StateInterpreter, Trainer, TrainingVessel

WANTED = 20.0


class Room(Simulator):
    """One winter's day in steps of 15 minutes; the initial state is the temperature outside."""

    def __init__(self, outside: float) -> None:
        self.outside, self.inside, self.steps = outside, outside + 5.0, 0

    def step(self, action: float) -> None:
        self.inside += 0.1 * (self.outside - self.inside) + action
        self.steps += 1

    def get_state(self) -> tuple[float, float]:
        return self.inside, self.outside

    def done(self) -> bool:
        return self.steps == 96


class Thermometers(StateInterpreter):
    observation_space = spaces.Box(-5.0, 5.0, (2,), np.float32)

    def interpret(self, simulator_state: tuple[float, float]) -> np.ndarray:
        return np.clip((np.array(simulator_state, np.float32) - WANTED) / 10.0, -5.0, 5.0)


class Heater(ActionInterpreter):
    action_space = spaces.Discrete(3)

    def interpret(self, simulator_state: tuple[float, float], action: int) -> float:
        return (0.0, 1.5, 4.0)[action]


class Comfort(Reward):
    def reward(self, simulator_state: tuple[float, float]) -> float:
        self.log("degrees_off", abs(simulator_state[0] - WANTED))
        return -abs(simulator_state[0] - WANTED) / 10.0


def main(max_iters: int = 30) -> Trainer:
    outside = np.random.default_rng(0).uniform(-15.0, 10.0, 200).tolist()
    policy = PPO(
        None, Thermometers.observation_space, Heater.action_space, lr=1e-3, discount_factor=0.95, gae_lambda=0.9
    )
    vessel = TrainingVessel(
        simulator_fn=Room, state_interpreter=Thermometers(), action_interpreter=Heater(), policy=policy, reward=Comfort(),
        train_initial_states=outside[:150], val_initial_states=outside[150:], episode_per_iter=20,
        update_kwargs={"batch_size": 240, "repeat": 4},
    )  # fmt: skip
    trainer = Trainer(max_iters=max_iters, val_every_n_iters=5, finite_env_type="dummy", concurrency=4)
    trainer.fit(vessel)
    return trainer


if __name__ == "__main__":
    main()
