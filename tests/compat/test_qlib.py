"""Programs written for `qlib.rl` run under their own imports."""

import os
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from leyden.errors import CheckpointError, ConfigError
from leyden.training import Callback
from leyden_compat.qlib import experiments, parts
from leyden_compat.qlib import trainer as qlib
from leyden_compat.qlib.checkpoint import convert_checkpoint, read_checkpoint
from leyden_compat.qlib.environment import EnvWrapper
from leyden_compat.qlib.policy import PPO
from leyden_compat.qlib.spaces import as_gymnasium, check_nan_observation, generate_nan_observation
from leyden_compat.qlib.vector import FiniteDummyVectorEnv
from tests.rl.parts import vessel_of

PROGRAMS = Path(__file__).parent / "qlib_programs"


def run(program: str, folder: Path, kind: str) -> str:
    command = [sys.executable, "-m", "leyden.compat", str(PROGRAMS / f"{program}.py"), str(folder), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_a_program_trains_saves_and_backtests_with_qlibs_ppo(tmp_path: Path, kind: str) -> None:
    assert f"done {kind}" in run("simple", tmp_path, kind)


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("kind", ["dummy", "subproc", "shmem"])
def test_an_environment_of_the_old_gym_may_observe_what_its_space_lacks(tmp_path: Path, kind: str) -> None:
    assert f"done {kind}" in run("any_observation", tmp_path, kind)


class Once(parts.Simulator):
    """Ends after one step."""

    def __init__(self, number: int) -> None:
        self.number, self.stepped = number, False

    def step(self, action: int) -> None:
        self.stepped = True

    def get_state(self) -> int:
        return self.number

    def done(self) -> bool:
        return self.stepped


class Number(parts.StateInterpreter):
    observation_space = spaces.Discrete(100)

    def interpret(self, simulator_state: int) -> int:
        return simulator_state


class Act(parts.ActionInterpreter):
    action_space = spaces.Discrete(2)

    def interpret(self, simulator_state: int, action: int) -> int:
        return action


def test_environments_with_seeds_of_their_own_run_them_all() -> None:
    venv = FiniteDummyVectorEnv(
        None, [lambda first=first: EnvWrapper(Once, Number(), Act(), [first, 7]) for first in (1, 2)]
    )
    seen: list[list[int]] = []
    with venv.collector_guard():
        while True:
            seen.append(venv.reset(np.arange(2)).tolist())
            venv.step(np.ones(2, int), np.arange(2))
    assert seen == [[1, 2], [7, 7]]


def test_a_nan_observation_is_recognised_in_any_space() -> None:
    space = spaces.Dict(
        {
            "camera": spaces.Tuple((spaces.Box(0, 1, (2, 2)), spaces.Box(0, 1, ()))),
            "task": spaces.Discrete(5),
            "checks": spaces.MultiBinary(3),
            "levers": spaces.MultiDiscrete((5, 2)),
        }
    )
    assert check_nan_observation(generate_nan_observation(space))
    assert not check_nan_observation(space.sample())
    assert as_gymnasium(space) is space


def qlib_state(network: torch.nn.Module, n_actions: int) -> dict[str, object]:
    """Return a state as Qlib's trainer saves it: tianshou's PPO, and NumPy numbers in the loggers."""
    weights: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in network.state_dict().items():
        weights[f"actor.extractor.{name}"] = weights[f"critic.extractor.{name}"] = value
    for name, shape in (("actor.layer_out.0", (n_actions, 8)), ("critic.value_out", (1, 8))):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.randn(shape), torch.randn(shape[0])
    weights |= {f"_actor_critic.{name}": value for name, value in list(weights.items())}
    buffer = {"active_env_ids": {0, 1}, "aggregated_metrics": defaultdict(float, {"reward": np.float64(2.5)})}
    return {
        "vessel": {"policy": weights},
        "callbacks": {"earlystopping": {"wait": 0, "best": np.float64(1.0)}},
        "loggers": {"logbuffer": buffer},
        "should_stop": True,
        "current_iter": 7,
        "current_episode": 340,
        "current_stage": "val",
        "metrics": {"reward": np.float64(2.5)},
    }


def test_a_checkpoint_of_qlib_becomes_weights_of_ppo(tmp_path: Path) -> None:
    from gymnasium import spaces

    def network() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU())

    state = qlib_state(network(), 4)
    torch.save(state, tmp_path / "007.pth")
    read = convert_checkpoint(tmp_path / "007.pth", tmp_path / "weights.pth")
    assert (read.iteration, read.episode, read.metrics) == (7, 340, {"reward": 2.5})

    policy = PPO(network(), spaces.Box(-9, 9, (3,)), spaces.Discrete(4), 1e-3, weight_file=tmp_path / "weights.pth")
    policy.eval()
    weights = read.weights
    obs = torch.randn(50, 3)
    features = torch.relu(obs @ weights["actor.extractor.0.weight"].T + weights["actor.extractor.0.bias"])
    logits = features @ weights["actor.layer_out.0.weight"].T + weights["actor.layer_out.0.bias"]
    assert policy({"obs": obs.numpy()}).act.tolist() == logits.argmax(1).tolist()


class Malicious:
    """Calls `os.system` when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_a_checkpoint_that_would_execute_code_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"vessel": {"policy": {}}, "extra": Malicious()}, "bad.pth")
    with pytest.raises(CheckpointError, match=r"posix\.system"):
        read_checkpoint("bad.pth")
    assert not Path("executed").exists()
    torch.save({"metrics": {}}, "empty.pth")
    with pytest.raises(CheckpointError, match="holds no weights"):
        read_checkpoint("empty.pth")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint("absent.pth")


def test_a_missing_key_of_an_experiment_is_named_and_a_programs_own_key_error_is_not() -> None:
    with pytest.raises(ConfigError, match="no key 'env'"):
        experiments.main({"runtime": {}}, run_training=True, run_backtest=False)
    broken = {"class": "tests.compat.test_qlib.Broken"}
    with pytest.raises(KeyError, match="mine"):
        experiments.main({"runtime": {}, "env": {}, "state_interpreter": broken}, run_training=True, run_backtest=False)


class Broken:
    """A user's class whose constructor fails."""

    def __init__(self) -> None:
        raise KeyError("mine")


@pytest.mark.parametrize("every", [None, 9])
def test_states_to_validate_on_without_an_interval_are_not_used_as_in_qlib(every: int | None) -> None:
    """A program for Qlib may also end its run by a callback alone."""
    seen: list[str] = []

    class Noting(Callback):
        def on_train_end(self, loop: Any, vessel: Any) -> None:
            seen.append("train")
            if len(seen) == 2:
                loop.stop()

        def on_validate_start(self, loop: Any, vessel: Any) -> None:
            seen.append("val")

    for max_iters in (2, None):
        seen.clear()
        qlib.Trainer(max_iters=max_iters, val_every_n_iters=every, finite_env_type="dummy", callbacks=[Noting()]).fit(
            vessel_of(episode_per_iter=2)
        )
        assert seen == ["train", "train"]
