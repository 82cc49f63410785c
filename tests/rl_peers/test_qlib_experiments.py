"""Qlib's experiments of order execution, on data in the format of Qlib's own example, which Qlib's own code makes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from leyden_compat.qlib.orders import HandlerIntradayProcessedData

PROGRAMS = Path(__file__).parents[1] / "compat" / "qlib_programs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": ""}
"""Of programs that use Qlib itself: without the folder that `leyden.compat` adds to PYTHONPATH."""
FEATURES = ["$high", "$low", "$open", "$close", "$volume"]
YESTERDAY = [f"{name}_1" for name in FEATURES]
DATE = pd.Timestamp("2021-07-05")


def run(*command: object, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        text=True,
        capture_output=True,
        check=False,
        env=ENVIRONMENT,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the folder `data`."""
    folder = tmp_path_factory.mktemp("experiment")
    run("-W", "ignore", PROGRAMS / "experiment_data.py", folder / "data", folder=folder)
    return folder


def experiment(folder: str, provider: str = "qlib.rl.data.native", **changes: Any) -> dict[str, Any]:
    """Return the configuration of an experiment, with the keys of Qlib's example."""
    execution = "qlib.rl.order_execution"
    columns = {"feature_columns_today": FEATURES, "feature_columns_yesterday": YESTERDAY}
    source = {"data_dir": "./data/pickle/", **columns, "backtest": False}
    described = {"class": "HandlerProcessedDataProvider", "module_path": provider, "kwargs": source}
    observed = {"data_dim": 5, "data_ticks": 48, "max_step": 8, "processed_data_provider": described}
    values = {"values": 4, "max_step": 8}
    return {
        "simulator": {"data_granularity": 5, "time_per_step": 30, "vol_limit": None},
        "env": {"concurrency": 4, "parallel_mode": "dummy"},
        "action_interpreter": {
            "class": "CategoricalActionInterpreter",
            "kwargs": values,
            "module_path": f"{execution}.interpreter",
        },
        "state_interpreter": {
            "class": "FullHistoryStateInterpreter",
            "kwargs": observed,
            "module_path": f"{execution}.interpreter",
        },
        "reward": {
            "class": "PAPenaltyReward",
            "kwargs": {"penalty": 4.0, "scale": 0.01},
            "module_path": f"{execution}.reward",
        },
        "data": {
            "source": {
                "order_dir": "./data/orders",
                "feature_root_dir": "./data/pickle/",
                "feature_columns_today": ["$close0", "$volume0"],
                "feature_columns_yesterday": [],
                "total_time": 240,
                "default_start_time_index": 0,
                "default_end_time_index": 235,
                "proc_data_dim": 5,
            },
            "num_workers": 0,
            "queue_size": 20,
        },
        "network": {"class": "Recurrent", "module_path": f"{execution}.network"},
        "policy": {"class": "PPO", "kwargs": {"lr": 0.0001}, "module_path": f"{execution}.policy"},
        "runtime": {"seed": 42, "use_cuda": False},
        "trainer": {
            "max_epoch": 2,
            "repeat_per_collect": 2,
            "earlystop_patience": 50,
            "episode_per_collect": 16,
            "batch_size": 32,
            "val_every_n_epoch": 1,
            "checkpoint_path": f"./{folder}",
            "checkpoint_every_n_iters": 1,
        },
        **changes,
    }


def train_on_policy(data: Path, config: dict[str, Any], *options: str) -> list[dict[str, str]]:
    """Run a configuration, and return the rows of its backtest."""
    output = data / config["trainer"]["checkpoint_path"]
    file = data / f"{output.name}.yml"
    file.write_text(yaml.safe_dump(config))
    command = ["-m", "leyden.compat", "-m", "qlib.rl.contrib.train_onpolicy", "--config_path", file.name]
    run("-W", "ignore", *command, "--run_backtest", *options, folder=data)
    with (output / "result.csv").open(newline="") as table:
        return list(csv.DictReader(table))


@pytest.mark.parametrize(("backtest", "columns"), [(True, ["$close0", "$volume0"]), (False, FEATURES + YESTERDAY)])
def test_pickled_data_sets_are_read_as_qlib_reads_them(data: Path, backtest: bool, columns: list[str]) -> None:
    theirs = "import sys, pandas as pd; from qlib.rl.data.native import HandlerIntradayProcessedData as Data; "
    theirs += (
        "given = eval(sys.argv[1]); Data('data/pickle', 'SH600000', pd.Timestamp(given[0]), given[1], [], given[2])"
    )
    run("-W", "ignore", "-c", f"{theirs}.today.to_pickle('theirs.pkl')", (str(DATE), columns, backtest), folder=data)
    ours = HandlerIntradayProcessedData(data / "data/pickle", "SH600000", DATE, columns, [], backtest)
    assert ours.today.shape == (48, len(columns))
    assert np.isfinite(ours.today.to_numpy()).all()
    pd.testing.assert_frame_equal(ours.today, pd.read_pickle(data / "theirs.pkl"))


@pytest.mark.parametrize("provider", ["qlib.rl.data.native", "leyden_compat.qlib.orders"])
def test_a_configuration_of_qlib_trains_saves_and_backtests(data: Path, provider: str) -> None:
    folder = provider.replace(".", "-")
    rows = train_on_policy(data, experiment(folder, provider))
    assert len(rows) == 20  # five days, two stocks, both sides
    assert all(float(row["ffr"]) == pytest.approx(1.0, abs=1e-6) for row in rows)
    saved = sorted(path.name for path in (data / folder / "checkpoints").iterdir())
    assert saved == ["001.pth", "002.pth", "latest.pth"]
    assert (data / folder / "train_result.csv").exists()
    restored = experiment(f"{folder}-again", provider)
    restored["policy"]["kwargs"]["weight_file"] = f"{folder}/checkpoints/latest.pth"
    assert sorted(map(str, train_on_policy(data, restored, "--no_training"))) == sorted(map(str, rows))


def test_the_backtest_of_an_installed_pyqlib_is_its_own_program(data: Path) -> None:
    said = run("-W", "ignore", "-m", "leyden.compat", "-m", "qlib.rl.contrib.backtest", "--help", folder=data)
    assert "--use_simulator" in said


def test_twap_of_a_configuration_has_no_price_advantage(data: Path) -> None:
    execution = "qlib.rl.order_execution"
    parts = {
        "action_interpreter": {"class": "TwapRelativeActionInterpreter", "module_path": f"{execution}.interpreter"},
        "state_interpreter": {"class": "DummyStateInterpreter", "module_path": f"{execution}.interpreter"},
        "policy": {"class": "AllOne", "module_path": f"{execution}.policy"},
    }
    config = experiment("twap", **parts)
    del config["network"]
    config["simulator"]["time_per_step"] = 5
    rows = train_on_policy(data, config, "--no_training")
    assert len(rows) == 20
    assert all(float(row["pa"]) == pytest.approx(0.0, abs=1e-3) for row in rows)
