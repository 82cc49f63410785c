"""Trains a policy of tianshou with two networks of its own, validates, saves, resumes and tests."""

import sys
from pathlib import Path

import torch
from gym import spaces
from qlib.config import C
from qlib.log import set_log_with_config
from qlib.rl.interpreter import ActionInterpreter, StateInterpreter
from qlib.rl.reward import Reward
from qlib.rl.simulator import Simulator
from qlib.rl.trainer import Checkpoint, EarlyStopping, MetricsWriter, Trainer, TrainingVessel
from qlib.rl.trainer.callbacks import Callback
from qlib.rl.utils import ConsoleWriter, CsvWriter
from tianshou.policy import PPOPolicy
from torch import nn


class Guess(Simulator):
    """Right is action 0. An episode has three steps."""

    def __init__(self, *args, **kwargs):
        self.right, self.n = 0, 0

    def step(self, action):
        self.right, self.n = int(action == 0), self.n + 1
        if self.done():
            self.env.logger.add_scalar("acc", self.right * 100)

    def get_state(self):
        return {"right": self.right, "n": self.n}

    def done(self):
        return self.n == 3


class State(StateInterpreter):
    observation_space = spaces.Dict({"right": spaces.Discrete(2), "n": spaces.Discrete(4)})

    def interpret(self, simulator_state):
        return simulator_state


class Action(ActionInterpreter):
    @property
    def action_space(self):
        return spaces.Discrete(2)

    def interpret(self, simulator_state, action):
        return action


class AtTheEnd(Reward):
    def reward(self, simulator_state):
        return float(simulator_state["right"]) if self.env.status["done"] else 0.0


class Net(nn.Module):
    def __init__(self, n_outputs, softmax):
        super().__init__()
        self.layer, self.softmax = nn.Linear(2, n_outputs), softmax

    def forward(self, obs, state=None, **kwargs):
        rows = torch.as_tensor([[float(n), 1.0] for n in obs["n"]])
        out = self.layer(rows)
        return (torch.softmax(out, -1), state) if self.softmax else out


class SeesTheTrainer(Callback):
    def on_train_end(self, trainer, vessel):
        assert vessel.trainer.current_stage == "train"
        assert set(trainer.named_callbacks()) >= {"checkpoint", "seesthetrainer"}
        assert trainer.metrics["acc"] == trainer.loggers[-1].collect_metrics()["acc"]


def ppo():
    actor, critic = Net(2, True), Net(1, False)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.05)
    return PPOPolicy(actor, critic, optimizer, torch.distributions.Categorical, action_space=Action().action_space)


def vessel(policy):
    return TrainingVessel(
        simulator_fn=Guess,
        state_interpreter=State(),
        action_interpreter=Action(),
        policy=policy,
        train_initial_states=list(range(20)),
        val_initial_states=list(range(20)),
        test_initial_states=list(range(60)),
        reward=AtTheEnd(),
        episode_per_iter=40,
        update_kwargs={"repeat": 5, "batch_size": 32},
    )


def main(folder, kind):
    set_log_with_config(C.logging_config)
    torch.manual_seed(0)
    checkpoint = Checkpoint(folder / "saved", every_n_iters=1)
    trainer = Trainer(
        max_iters=3,
        val_every_n_iters=1,
        finite_env_type=kind,
        loggers=[ConsoleWriter(10), CsvWriter(folder)],
        callbacks=[
            EarlyStopping("val/reward", patience=5, restore_best_weights=True),
            MetricsWriter(folder),
            checkpoint,
            SeesTheTrainer(),
        ],
    )
    own = vessel(ppo())
    trainer.fit(own)
    assert (trainer.current_iter, trainer.current_episode) == (3, 120), (trainer.current_iter, trainer.current_episode)
    assert abs(trainer.metrics["acc"] - trainer.metrics["reward"] * 100) < 1e-4
    trainer.test(own)
    print("accuracy", trainer.metrics["acc"])
    assert trainer.metrics["acc"] > 80

    saved = folder / "saved"
    assert (saved / "latest.pth").readlink() == saved / "003.pth"
    trainer.load_state_dict(torch.load(saved / "001.pth", weights_only=False))
    assert (trainer.current_iter, trainer.current_episode) == (1, 40)
    trainer.fit(own, ckpt_path=saved / "001.pth")
    assert trainer.current_iter == 3

    fresh = ppo()
    fresh.load_state_dict(Trainer.get_policy_state_dict(saved / "latest.pth"))
    assert (folder / "result.csv").read_text().startswith("reward,")
    print("done", kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
