"""`leyden rl`: training, resuming and testing from a configuration file, and files that are wrong."""

from __future__ import annotations

import csv
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from leyden.cli.app import app
from leyden.errors import ConfigError
from leyden_compat.order_execution.config import load_config, read_config
from tests.compat.order_execution.bars_of import write_days

PPO: dict[str, Any] = {
    "runtime": {"seed": 1},
    "env": {"concurrency": 2, "parallel_mode": "dummy"},
    "simulator": {"time_per_step": 3},
    "data": {"source": {"order_dir": "orders", "feature_root_dir": "bars"}},
    "state_interpreter": {
        "class": "FullHistoryStateInterpreter",
        "kwargs": {
            "max_step": 4,
            "data_ticks": 12,
            "data_dim": 1,
            "processed_data_provider": {
                "class": "BarsProcessedDataProvider",
                "kwargs": {"data_dir": "bars", "feature_columns_today": ["move"]},
            },
        },
    },
    "action_interpreter": {"class": "CategoricalActionInterpreter", "kwargs": {"values": 4, "max_step": 4}},
    "reward": {"class": "PAPenaltyReward", "kwargs": {"penalty": 10.0}},
    "network": {"class": "Recurrent", "kwargs": {"hidden_dim": 8, "output_dim": 8}},
    "policy": {"class": "PPO", "kwargs": {"lr": 0.001}},
    "trainer": {
        "max_epoch": 2,
        "val_every_n_epoch": 1,
        "episode_per_collect": 6,
        "batch_size": 16,
        "earlystop_patience": 9,
    },
}
TWAP = """
_base_: ppo.yaml
state_interpreter: {_delete_: true, class: DummyStateInterpreter}
action_interpreter: {_delete_: true, class: TwapRelativeActionInterpreter}
network: null
policy: {_delete_: true, class: AllOne}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with bars, orders, ppo.yaml and twap.yaml; the current one."""
    write_days(tmp_path)
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(PPO))
    (tmp_path / "twap.yaml").write_text(TWAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leyden(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["rl", *arguments], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def with_epochs(work: Path, name: str, epochs: int) -> str:
    (work / name).write_text(f"_base_: ppo.yaml\ntrainer: {{max_epoch: {epochs}}}\n")
    return name


def test_a_policy_is_trained_goes_on_and_is_tested_on_each_order_once(work: Path) -> None:
    said = leyden("train", "ppo.yaml", "--run-dir", "run")
    assert "trained: 2 iterations" in said
    leyden("train", with_epochs(work, "longer.yaml", 3), "--resume", "run")
    assert [row["iteration"] for row in rows(work / "run" / "train_result.csv")] == ["1", "2", "3"]
    assert (
        "pa" in rows(work / "run" / "validation_result.csv")[0]
        or "val/pa" in rows(work / "run" / "validation_result.csv")[0]
    )
    assert "4 orders" in leyden("backtest", "longer.yaml", "--run", "run")
    figures = json.loads(leyden("backtest", "longer.yaml", "--run", "run", "--json"))
    table = rows(work / "run" / "backtest.csv")
    assert [(row["order"], row["direction"], row["start_time"][:10]) for row in table] == [
        ("0", "sell", "2020-01-09"),
        ("1", "buy", "2020-01-10"),
        ("2", "sell", "2020-01-11"),
        ("3", "buy", "2020-01-12"),
    ]
    assert all(float(row["ffr"]) == pytest.approx(1.0) for row in table)
    assert figures["n_orders"] == 4
    assert figures["pa"] == pytest.approx(sum(float(row["pa"]) for row in table) / 4)


def test_twap_has_no_advantage_over_itself(work: Path) -> None:
    assert "price advantage +0.00 +- 0.00" in leyden("backtest", "twap.yaml", "--output", "twap.csv").replace(
        "-0.00", "+0.00"
    )
    assert len(rows(work / "twap.csv")) == 4


def test_a_policy_that_has_learned_nothing_is_not_tested(work: Path) -> None:
    with pytest.raises(ConfigError, match="learned nothing"):
        leyden("backtest", "ppo.yaml")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["train"], "give a configuration file, or --resume"),
        (["train", "missing.yaml"], "missing.yaml cannot be read"),
        (["train", "--resume", "nothing"], "nothing is no run"),
        (["train", "ppo.yaml", "--run-dir", "a", "--resume", "b"], "not both"),
        (["backtest", "ppo.yaml", "--run", "nothing"], "no such run"),
        (["backtest", "twap.yaml", "--orders", "later"], "none of later"),
    ],
)
def test_a_command_that_cannot_be_says_why(work: Path, arguments: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        leyden(*arguments)


@pytest.mark.parametrize(("option", "ratio"), [("", 8), (", repeat_per_collect: 3", 3)])
def test_the_replay_ratio_of_a_file_is_that_of_dqn(work: Path, option: str, ratio: int) -> None:
    (work / "dqn.yaml").write_text(
        "_base_: ppo.yaml\nnetwork: null\npolicy: {_delete_: true, class: DQN, kwargs: {lr: 0.001}}\n"
        f"trainer: {{batch_size: 4{option}}}\n"
    )
    leyden("train", "dqn.yaml", "--run-dir", "run")
    first = rows(work / "run" / "train_result.csv")[0]
    assert float(first["gradient_steps"]) == math.ceil(ratio * int(first["total_steps"]) / 4)


@pytest.mark.slow
@pytest.mark.merge
def test_training_needs_nothing_that_the_extra_does_not_install(work: Path) -> None:
    """A process in which the packages of other extras cannot be imported, as after `pip install 'leyden[rl]'`."""
    program = (
        "import sys\n"
        "for name in ('safetensors', 'transformers', 'pyarrow', 'pandas', 'tensorboard', 'stable_baselines3'):\n"
        "    sys.modules[name] = None\n"
        "from leyden.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "rl", "train", "ppo.yaml", "--run-dir", "run"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "trained: 2 iterations" in ended.stdout


def test_a_run_is_not_written_over(work: Path) -> None:
    (work / "run").mkdir()
    (work / "run" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already; continue it with --resume run"):
        leyden("train", "ppo.yaml", "--run-dir", "run")


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_bases_are_merged_and_deleted(work: Path) -> None:
    (work / "one.yaml").write_text("policy: {class: PPO, kwargs: {lr: 1, seed: 2}}\ntrainer: {max_epoch: 1}\n")
    (work / "two.json").write_text(json.dumps({"trainer": {"max_epoch": 9, "batch_size": 7}}))
    (work / "own.yaml").write_text("_base_: [one.yaml, two.json]\npolicy: {kwargs: {lr: 3}}\n")
    assert read_config("own.yaml") == {
        "policy": {"class": "PPO", "kwargs": {"lr": 3, "seed": 2}},
        "trainer": {"max_epoch": 1, "batch_size": 7},
    }
    (work / "own.yaml").write_text("_base_: one.yaml\npolicy: {kwargs: {_delete_: true, lr: 3}}\n")
    assert read_config("own.yaml")["policy"] == {"class": "PPO", "kwargs": {"lr": 3}}
    (work / "one.yaml").write_text("_base_: own.yaml\n")
    with pytest.raises(ConfigError, match="its own base"):
        read_config("own.yaml")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"trainr": {}}, "unknown key trainr; did you mean 'trainer'\\? possible: data, policy"),
        (
            {"env": {"concurency": 2}},
            "unknown key env.concurency; did you mean 'concurrency'\\? possible: concurrency, parallel_mode",
        ),
        ({"env": {"parallel_mode": "ray"}}, "env.parallel_mode is 'ray'; possible: dummy, thread"),
        ({"data": {"source": {"order_dir": None}}}, "data.source.order_dir is None; it must be a string"),
        ({"trainer": {"max_epoch": "ten"}}, "trainer.max_epoch is 'ten'; it must be a whole number"),
        ({"trainer": {"_delete_": True, "max_epoch": 1}}, "trainer.episode_per_collect is missing"),
        ({"policy": {"lr": 1}}, "unknown key policy.lr; possible: class, module_path, kwargs"),
        ({"policy": {"class": None}}, "policy.class is None"),
        ({"simulator": {"vol_limit": True}}, "simulator.vol_limit is True"),
        ({"network": "Recurrent"}, "network is 'Recurrent'; it must be a mapping"),
    ],
)
def test_a_wrong_key_is_named_with_its_file_and_what_is_possible(
    work: Path, change: dict[str, Any], fault: str
) -> None:
    (work / "wrong.yaml").write_text(yaml.safe_dump({"_base_": "ppo.yaml", **change}))
    with pytest.raises(ConfigError, match=fault) as caught:
        load_config("wrong.yaml")
    assert "wrong.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"reward": {"class": "PAReward", "kwargs": {}}},
            "reward.class='PAReward' is not known; did you mean 'PPOReward'.* names: AllOne.*or an import path",
        ),
        (
            {"reward": {"module_path": "no.such"}},
            "reward.module_path: cannot import 'no.such:PAPenaltyReward'.* needs no module_path",
        ),
        ({"reward": {"module_path": "leyden.rl.seed"}}, "'leyden.rl.seed' has no 'PAPenaltyReward'"),
        (
            {"reward": {"kwargs": {"penality": 1}}},
            "reward.kwargs: PAPenaltyReward has no option 'penality'; did you mean 'penalty'.* possible: penalty, scale",
        ),
        (
            {"action_interpreter": {"kwargs": {"_delete_": True}}},
            "action_interpreter.kwargs: CategoricalActionInterpreter needs values; add it to the file",
        ),
        ({"action_interpreter": {"kwargs": {"values": 0}}}, "action_interpreter: values is 0"),
        ({"runtime": {"use_cuda": True}, "network": None}, "use_cuda is true"),
        ({"trainer": {"val_every_n_epoch": None}}, "earlystop_patience needs validations"),
        (
            {"policy": {"_delete_": True, "class": "AllOne"}},
            "network has no use: AllOne takes none; set `network: null`",
        ),
        (
            {"policy": {"_delete_": True, "class": "AllOne"}, "network": None},
            "trainer.batch_size has no use: AllOne does not learn from it",
        ),
        (
            {"data": {"source": {"default_start_time_index": 1}}, "simulator": {"data_granularity": 3}},
            "multiple of simulator.data_granularity",
        ),
        ({"data": {"source": {"feature_root_dir": "nowhere"}}}, "no X.parquet or X.csv in nowhere"),
    ],
)
def test_a_component_that_cannot_be_made_is_named(work: Path, change: dict[str, Any], fault: str) -> None:
    (work / "wrong.yaml").write_text(yaml.safe_dump({"_base_": "ppo.yaml", **change}))
    with pytest.raises(ConfigError, match=fault):
        leyden("train", "wrong.yaml", "--run-dir", "run")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.yaml", "- 1", "no sections"),
        ("a.yaml", "a: [", "not written correctly"),
        ("a.toml", "", "no .yaml"),
        ("a.yaml", "trainer: {max_epoch: 1, batch_size: 2, max_epoch: 3}", "'max_epoch' stands twice in one mapping"),
        ("a.yaml", "trainer: {}\nenv: {}\ntrainer: {}", "'trainer' stands twice"),
        ("a.json", '{"trainer": {}, "trainer": {}}', "'trainer' stands twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(work: Path, name: str, content: str, fault: str) -> None:
    (work / name).write_text(content)
    with pytest.raises(ConfigError, match=fault):
        load_config(name)


def test_an_error_of_yaml_names_the_file_and_the_line(work: Path) -> None:
    (work / "a.yaml").write_text("env: {}\ntrainer: {a: [}\n")
    with pytest.raises(ConfigError, match=r'in ".*a\.yaml", line 2'):
        load_config("a.yaml")


# ---- processes -----------------------------------------------------------------------------------------------------------


def started(*arguments: str) -> subprocess.Popen[str]:
    program = "from leyden.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "rl", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended with {process.wait()} before it said {words!r}")


def state_of(run: Path, iteration: int) -> tuple[dict[str, bytes], list[dict[str, str]]]:
    """The vessel's files in a checkpoint, and the rows of training without their times."""
    folder = run / "checkpoints" / f"step-{iteration:06d}"
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "vessel").rglob("*"))
        if path.is_file()
    }
    assert any(name.endswith((".safetensors", ".npz")) for name in files)
    timeless = [
        {name: value for name, value in row.items() if name != "seconds"} for row in rows(run / "train_result.csv")
    ]
    return files, timeless


@pytest.mark.faults
@pytest.mark.merge
def test_a_killed_run_ends_as_one_that_was_not(work: Path) -> None:
    config = with_epochs(work, "long.yaml", 8)
    leyden("train", config, "--run-dir", "whole")
    with started("train", config, "--run-dir", "killed") as process:
        until(process, "iteration 3/8")
        process.kill()
    leyden("train", "--resume", "killed")
    assert state_of(work / "killed", 8) == state_of(work / "whole", 8)


@pytest.mark.faults
@pytest.mark.merge
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(work: Path) -> None:
    with started("train", with_epochs(work, "long.yaml", 5000), "--run-dir", "run") as process:
        until(process, "iteration 1/5000")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 130
    assert "Continue with: leyden rl train --resume run" in said
    assert "Traceback" not in said
    done = len(rows(work / "run" / "train_result.csv"))
    leyden("train", with_epochs(work, "short.yaml", done + 1), "--resume", "run")
    assert len(rows(work / "run" / "train_result.csv")) == done + 1
