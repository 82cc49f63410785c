"""Train and backtest policies of order execution, for `leyden rl train` and `leyden rl backtest`.

This module builds the components of a configuration and gives them to a `Trainer`. For another kind of simulator, write
such a module, or use `Trainer` itself.
"""

from __future__ import annotations

import csv
import inspect
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from leyden.errors import ConfigError
from leyden.rl.policy.policies import NonLearnablePolicy
from leyden.rl.trainer.api import backtest
from leyden.rl.trainer.rl_trainer import Trainer
from leyden.rl.trainer.vessel import TrainingVessel
from leyden.training import Callback, Checkpoint, EarlyStopping, EpisodeStats, LogWriter, MetricsWriter
from leyden_compat.order_execution.config import RunConfig
from leyden_compat.order_execution.data import load_orders
from leyden_compat.order_execution.objects import Order
from leyden_compat.order_execution.simulator import SingleAssetOrderExecutionSimple

_STEPS_OF_A_DAY = 240
"""The steps of an episode that buffers have room for if no interpreter has a `max_step`."""


@dataclass(frozen=True)
class TrainResult:
    """The state of a training run when it ended."""

    iterations: int
    finished: bool
    """Whether the run made all its iterations, or its validation stopped it early; False after a signal."""
    metrics: dict[str, Any]
    """The metrics of the last iteration."""


@dataclass(frozen=True)
class BacktestResult:
    """The means of a backtest over its orders."""

    n_orders: int
    pa: float
    """The mean price advantage, in basis points."""
    pa_standard_error: float
    """The standard error of `pa`, in basis points; NaN for one order."""
    ffr: float
    """The mean fulfilled fraction of the orders."""


class OrdersWriter(LogWriter):
    """Writes a CSV file with a row for each order: the order, then the logged values of its episode.

    The rows are kept in memory, and the file is written by `close`.
    path: the file.
    orders: by the index of their seeds.
    """

    def __init__(self, path: Path, orders: Sequence[Order]) -> None:
        super().__init__()
        self.path, self.orders = path, orders
        self.rows: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        """Begin an empty table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = {}

    def log_episode(self, episode: EpisodeStats) -> None:
        """Add the row of an order."""
        index = episode.seed_index
        assert index is not None  # orders are handed out by index
        order = self.orders[index]
        self.rows[index] = {
            "order": index,
            "stock_id": order.stock_id,
            "direction": order.direction.name.lower(),
            "start_time": order.start_time,
            "end_time": order.end_time,
            "order_amount": order.amount,
            "steps": episode.length,
            "reward": episode.reward,
            **{
                name: value
                for name, value in episode.logs.items()
                if name not in ("reward", "steps_per_episode", "direction")
            },
        }

    def write(self, row: Any) -> None:
        """Ignore the rows of stages."""

    def close(self) -> None:
        """Write the collected rows to the file, in the order of their index."""
        columns = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        with self.path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, restval="")
            table.writeheader()
            table.writerows(self.rows[index] for index in sorted(self.rows))

    def column(self, name: str) -> list[float]:
        """Return a column of numbers, one for each order, in the order of the file."""
        return [float(row[name]) for _, row in sorted(self.rows.items())]


def train_orders(
    config: RunConfig, run_dir: Path, *, resume: bool = False, callbacks: Iterable[Callback] = ()
) -> TrainResult:
    """Train, and write the record of the run, checkpoints and tables of metrics to `run_dir`.

    A signal ends the run after the current stage, and keeps it.
    resume: continue from the newest checkpoint in `run_dir`, if there is one.
    callbacks: called in addition to those that write tables and checkpoints.
    Raise ConfigError for an impossible configuration, before anything has begun.
    """
    agent = _ConfiguredAgent(config)
    options = config.trainer
    validates = options.val_every_n_epoch is not None
    if options.earlystop_patience is not None and not validates:
        raise ConfigError("trainer.earlystop_patience needs validations; give trainer.val_every_n_epoch")
    checkpoint = Checkpoint(run_dir / "checkpoints", every_n_iters=options.checkpoint_every_n_iters)
    stopping = None
    if options.earlystop_patience is not None:
        stopping = EarlyStopping(monitor="val/pa", patience=options.earlystop_patience)
    chosen = [*callbacks, MetricsWriter(run_dir), *([stopping] if stopping else []), checkpoint]
    vessel = TrainingVessel(
        simulator_fn=agent.simulator_fn,
        state_interpreter=agent.state_interpreter,
        action_interpreter=agent.action_interpreter,
        policy=agent.policy,
        reward=agent.reward,
        train_initial_states=agent.orders("train"),
        val_initial_states=agent.orders("valid") if validates else None,
        buffer_size=options.buffer_size or max(20_000, options.episode_per_collect * agent.max_step),
        episode_per_iter=options.episode_per_collect,
        update_kwargs=agent.update_kwargs,
        seed=config.runtime.seed,
    )
    trainer = Trainer(
        max_iters=options.max_epoch,
        val_every_n_iters=options.val_every_n_epoch,
        callbacks=chosen,
        finite_env_type=config.env.parallel_mode,
        concurrency=config.env.concurrency,
        run_dir=run_dir,
        progress=False,  # the caller shows the run
    )
    trainer.fit(vessel, resume=resume)
    early = (
        stopping is not None
        and options.earlystop_patience is not None
        and stopping.wait >= max(1, options.earlystop_patience)
    )
    return TrainResult(trainer.current_iter, early or trainer.current_iter >= options.max_epoch, dict(trainer.metrics))


def backtest_orders(config: RunConfig, checkpoint: Path | None, output: Path, *, tag: str = "test") -> BacktestResult:
    """Execute each order of a data set once, and write a row for each to the CSV file `output`.

    checkpoint: takes the policy from a run's directory, a directory of checkpoints, or one checkpoint; None: the policy
        of the configuration, which must be one that does not learn.
    tag: the data set in `data.source.order_dir`: `train`, `valid` or `test`.
    """
    agent = _ConfiguredAgent(config)
    if checkpoint is not None:
        inside = checkpoint / "checkpoints"
        agent.policy.load_state_dict(Trainer.get_policy_state_dict(inside if inside.is_dir() else checkpoint))
    elif agent.policy.state_dict():
        raise ConfigError(
            f"a {type(agent.policy).__name__} that has learned nothing would be tested; name its run or checkpoint (--run)"
        )
    orders = agent.orders(tag)
    writer = OrdersWriter(output, orders)
    backtest(
        simulator_fn=agent.simulator_fn,
        state_interpreter=agent.state_interpreter,
        action_interpreter=agent.action_interpreter,
        initial_states=orders,
        policy=agent.policy,
        logger=writer,
        reward=agent.reward,
        finite_env_type=config.env.parallel_mode,
        concurrency=config.env.concurrency,
    )
    advantages = writer.column("pa")
    spread = float(np.std(advantages, ddof=1)) / math.sqrt(len(advantages)) if len(advantages) > 1 else math.nan
    return BacktestResult(len(advantages), float(np.mean(advantages)), spread, float(np.mean(writer.column("ffr"))))


class _ConfiguredAgent:
    """The components that a configuration describes. Making them seeds the process's generators."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        sys.path.extend(path for path in config.env.extra_module_paths if path not in sys.path)
        _seed(config.runtime.seed)
        source, simulator = config.data.source, config.simulator
        for name in ("default_start_time_index", "default_end_time_index"):
            index = getattr(source, name)
            if index is not None and index % simulator.data_granularity:
                raise ConfigError(
                    f"data.source.{name} is {index}; it must be a multiple of simulator.data_granularity, {simulator.data_granularity}"
                )
        self.simulator_fn = partial(
            SingleAssetOrderExecutionSimple,
            data_dir=source.feature_root_dir,
            feature_columns_today=source.feature_columns_today,
            feature_columns_yesterday=source.feature_columns_yesterday,
            data_granularity=simulator.data_granularity,
            ticks_per_step=simulator.time_per_step,
            vol_threshold=simulator.vol_limit,
        )
        self.state_interpreter = config.state_interpreter.build("state_interpreter")
        self.action_interpreter = config.action_interpreter.build("action_interpreter")
        self.reward = config.reward.build("reward") if config.reward else None
        self.policy = self._policy()

    def _policy(self) -> Any:
        """Return the policy of the configuration, with its network if it has one.

        Raise ConfigError for a network if the policy takes none.
        """
        config = self.config
        obs_space = self.state_interpreter.observation_space
        if config.network and not config.policy.takes("network", where="policy"):
            raise ConfigError(f"network has no use: {config.policy.class_} takes none; set `network: null`")
        network = config.network.build("network", obs_space=obs_space) if config.network else None
        if config.runtime.use_cuda:
            network = _on_cuda(network)
        return config.policy.build(
            "policy",
            network=network,
            obs_space=obs_space,
            action_space=self.action_interpreter.action_space,
            seed=config.runtime.seed,
        )

    @property
    def max_step(self) -> int:
        """The most steps of an episode: the `max_step` of an interpreter, else 240."""
        known = [getattr(each, "max_step", None) for each in (self.state_interpreter, self.action_interpreter)]
        return next((steps for steps in known if steps), _STEPS_OF_A_DAY)

    @property
    def update_kwargs(self) -> dict[str, Any]:
        """The options of the file for the policy's `update`.

        Raises ConfigError for an option that the policy does not take.
        """
        options, policy = self.config.trainer, self.policy
        wanted = {"batch_size": options.batch_size, "repeat": options.repeat_per_collect}
        given = {name: value for name, value in wanted.items() if value is not None}
        taken = inspect.signature(policy.update).parameters.values()
        anything = any(each.kind is each.VAR_KEYWORD for each in taken) and not isinstance(policy, NonLearnablePolicy)
        unused = [] if anything else [name for name in given if name not in {each.name for each in taken}]
        if options.buffer_size is not None and isinstance(policy, NonLearnablePolicy):
            unused.append("buffer_size")
        if unused:
            key = {"repeat": "repeat_per_collect"}.get(unused[0], unused[0])
            raise ConfigError(f"trainer.{key} has no use: {type(policy).__name__} does not learn from it; leave it out")
        return given

    def orders(self, tag: str) -> list[Order]:
        """Return the orders of a data set, `train`, `valid` or `test`. Raise ConfigError if it is missing."""
        source, granularity = self.config.data.source, self.config.simulator.data_granularity
        end = source.default_end_time_index
        root = Path(source.order_dir)
        found = [path for path in (root / tag, root / f"{tag}.csv", root / f"{tag}.parquet") if path.exists()]
        if len(found) != 1:
            state = (
                "both " + " and ".join(path.name for path in found)
                if found
                else f"none of {tag}, {tag}.csv, {tag}.parquet"
            )
            raise ConfigError(f"data.source.order_dir {root} has {state}; it must have one of them")
        return load_orders(
            found[0],
            source.feature_root_dir,
            start_time_index=source.default_start_time_index // granularity,
            end_time_index=None if end is None else end // granularity,
        )


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed)
    cast(Any, torch).manual_seed(seed)


def _on_cuda(network: Any) -> Any:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("runtime.use_cuda is true, and torch finds no CUDA device; set it to false")
    if network is None:
        raise ConfigError("runtime.use_cuda is true, and there is no network; give one, such as {class: Recurrent}")
    return network.cuda()
