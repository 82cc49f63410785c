"""Qlib's experiments of order execution: train and test the policy of a configuration file.

    python -m leyden.compat -m qlib.rl.contrib.train_onpolicy --config_path train.yml --run_backtest

This module reads a configuration as Qlib does: it ignores unknown keys, and data are pickled tables or data sets.
`leyden rl train` is the alternative that checks each key before it begins, and that resumes a run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from leyden.errors import ConfigError
from leyden.training import Callback, MetricsWriter
from leyden_compat.qlib.callbacks import Checkpoint, EarlyStopping
from leyden_compat.qlib.configuration import init_instance_by_config
from leyden_compat.qlib.log import CsvWriter
from leyden_compat.qlib.orders import (
    SingleAssetOrderExecutionSimple,
    load_handler_intraday_processed_data,
    make_order,
    read_orders,
)
from leyden_compat.qlib.tables import pandas
from leyden_compat.qlib.trainer import backtest, train

logger = logging.getLogger("leyden.compat.qlib.experiments")


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and `random`."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    cast(Any, torch).manual_seed(seed)


class LazyLoadDataset(Sequence[Any]):
    """The orders of a pickled table, or of all pickled tables of a directory.

    data_dir: has `backtest/<stock_id>.pkl`. The ticks of the first requested order's day stand for every day, as in
        Qlib.
    default_start_time_index, default_end_time_index: each order begins with the tick of the first index, and ends a
        minute after the beginning of the tick before the second index.
    """

    def __init__(
        self, data_dir: str, order_file_path: Path, default_start_time_index: int, default_end_time_index: int
    ) -> None:
        self._data_dir = Path(data_dir)
        self._orders: Any = read_orders(Path(order_file_path))
        self._first, self._end = default_start_time_index, default_end_time_index
        self._ticks: Any = None

    def __len__(self) -> int:
        return len(self._orders)

    def __getitem__(self, index: Any) -> Any:
        """Return order number `index`, from its first tick to the end of its last tick. Raise IndexError for a larger
        number.

        As in Qlib, the ticks of the first requested order's day stand for every day.
        """
        if index >= len(self):
            raise IndexError(f"there are {len(self)} orders, and none has the number {index}")
        row = self._orders.iloc[index]
        date = pandas().Timestamp(str(row["date"]))
        if self._ticks is None:
            day = load_handler_intraday_processed_data(
                self._data_dir, row["instrument"], date, [], [], backtest=True, index_only=True
            )
            self._ticks = day.today.index - date
        start, end = self._ticks[self._first], self._ticks[self._end - 1] + pandas().Timedelta(minutes=1)
        return make_order(row["instrument"], row["amount"], row["order_type"], date + start, date + end)


def train_and_test(
    env_config: Mapping[str, Any],
    simulator_config: Mapping[str, Any],
    trainer_config: Mapping[str, Any],
    data_config: Mapping[str, Any],
    state_interpreter: Any,
    action_interpreter: Any,
    policy: Any,
    reward: Any,
    run_training: bool,
    run_backtest: bool,
) -> None:
    """Train a policy on the orders in the folder `train`, and test it on those in `test`.

    The configurations are sections of Qlib's file. Raise ConfigError for a missing key, and for times that
    `data_granularity` does not divide.
    """
    source, granularity = data_config["source"], simulator_config.get("data_granularity", 1)
    first, end = source["default_start_time_index"], source["default_end_time_index"]
    if first % granularity or end % granularity:
        raise ConfigError(f"ticks {first} to {end} are minutes, which data_granularity={granularity} does not divide")
    orders = partial(_orders, source, first // granularity, end // granularity)
    simulator_fn = partial(
        SingleAssetOrderExecutionSimple,
        data_dir=Path(source["feature_root_dir"]),
        feature_columns_today=source["feature_columns_today"],
        feature_columns_yesterday=source["feature_columns_yesterday"],
        data_granularity=granularity,
        ticks_per_step=simulator_config["time_per_step"],
        vol_threshold=simulator_config["vol_limit"],
    )
    environments = {"finite_env_type": env_config["parallel_mode"], "concurrency": env_config["concurrency"]}
    if run_training:
        train(
            simulator_fn,
            state_interpreter,
            action_interpreter,
            orders("train"),
            policy,
            reward,
            vessel_kwargs={
                "episode_per_iter": trainer_config["episode_per_collect"],
                "update_kwargs": {
                    "batch_size": trainer_config["batch_size"],
                    "repeat": trainer_config["repeat_per_collect"],
                },
                "val_initial_states": orders("valid"),
            },
            trainer_kwargs={
                "max_iters": trainer_config["max_epoch"],
                "val_every_n_iters": trainer_config.get("val_every_n_epoch"),
                "callbacks": _callbacks(trainer_config),
                **environments,
            },
        )
    if run_backtest:
        table = CsvWriter(Path(trainer_config["checkpoint_path"]))
        parts = simulator_fn, state_interpreter, action_interpreter
        backtest(*parts, orders("test"), policy, table, reward, **environments)


def _orders(source: Mapping[str, Any], first: int, end: int, tag: str) -> LazyLoadDataset:
    """Return the orders in a folder (`train`, `valid` or `test`) of the data source."""
    return LazyLoadDataset(source["feature_root_dir"], Path(source["order_dir"]) / tag, first, end)


def _callbacks(trainer_config: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks of the configuration: with a `checkpoint_path`, metrics and checkpoints; with an
    `earlystop_patience`, early stopping on `val/pa`.
    """
    callbacks: list[Callback] = []
    if "checkpoint_path" in trainer_config:
        folder = Path(trainer_config["checkpoint_path"])
        interval = trainer_config.get("checkpoint_every_n_iters", 1)
        callbacks.append(MetricsWriter(folder))
        callbacks.append(Checkpoint(folder / "checkpoints", every_n_iters=interval, save_latest="copy"))
    if "earlystop_patience" in trainer_config:
        callbacks.append(EarlyStopping("val/pa", patience=trainer_config["earlystop_patience"]))
    return callbacks


def main(config: Mapping[str, Any], run_training: bool, run_backtest: bool) -> None:
    """Run the experiment of a configuration.

    Raise ConfigError for a key that is missing.
    """
    if not (run_training or run_backtest):
        logger.warning("neither training nor a backtest was asked for, so nothing was done")
        return
    _run(_with_sections(config), run_training, run_backtest)


class _Section(dict[str, Any]):
    """A mapping of a configuration that raises ConfigError for a missing key."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"the configuration has no key {key!r}; add it")


def _with_sections(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return _Section({name: _with_sections(part) for name, part in cast("Mapping[str, Any]", value).items()})


def _run(config: Mapping[str, Any], run_training: bool, run_backtest: bool) -> None:
    """Build the parts of a Qlib experiment from its configuration, then train and backtest."""
    if "seed" in config["runtime"]:
        seed_everything(config["runtime"]["seed"])
    sys.path.extend(config["env"].get("extra_module_paths", []))
    state_interpreter, action_interpreter, reward = (
        init_instance_by_config(config[part]) for part in ("state_interpreter", "action_interpreter", "reward")
    )
    spaces = {"obs_space": state_interpreter.observation_space}
    parts = {**spaces, "action_space": action_interpreter.action_space}
    if "network" in config:
        network = init_instance_by_config(config["network"], **spaces)
        parts["network"] = network.cuda() if config["runtime"].get("use_cuda", False) else network
    policy = init_instance_by_config(config["policy"], **parts)
    train_and_test(
        config["env"],
        config["simulator"],
        config["trainer"],
        config["data"],
        state_interpreter,
        action_interpreter,
        policy,
        reward,
        run_training,
        run_backtest,
    )


def run_command() -> None:
    """Run the experiment that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m qlib.rl.contrib.train_onpolicy")
    parser.add_argument("--config_path", required=True, help="the configuration, a file of YAML")
    parser.add_argument("--no_training", action="store_true", help="do not train")
    parser.add_argument("--run_backtest", action="store_true", help="test the policy on the orders of `test`")
    options = parser.parse_args()
    config = yaml.safe_load(Path(options.config_path).read_text(encoding="utf-8"))
    main(config, run_training=not options.no_training, run_backtest=options.run_backtest)
