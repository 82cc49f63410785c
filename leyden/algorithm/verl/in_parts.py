"""`BatchInParts`: the steps of a batch one by one, under the names of Agent Lightning's daemon.

`AgentModeDaemon.run_batch` does all of them in one call, which Leyden's trainer uses. A trainer
that was written for Agent Lightning calls these methods instead, in the order in which they are
defined. The module knows batches and rows, no store.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.algorithm.verl.rows import Report, SequenceRow, data_proto, pad_rows
from leyden.errors import ConfigError
from leyden.loop import Metrics
from leyden.types import RolloutMode


@dataclass(slots=True)
class RolloutBatch:
    """The result of one batch of prompts: rows of its rollouts, and metrics."""

    rows: list[SequenceRow] = field(default_factory=list[SequenceRow])
    """The rows that fit, and a row without a trained token for each rollout that has none."""
    sessions: list[int] = field(default_factory=list[int])
    """For each row, the number of its rollout among the rollouts of its prompt."""
    metrics: Metrics = field(default_factory=dict[str, Any])


class BatchInParts(ABC):
    """Base class of a daemon with separate methods to set up a batch, run it, and return its
    result.

    Call them from one thread, which is not that of the daemon's event loop.
    """

    _tasks: Sequence[str] = ()
    _batch_mode: RolloutMode = "train"
    made: RolloutBatch | None = None
    """The result of the newest batch; None until it has finished."""
    _steps: int = 0
    """The number of training batches so far."""
    options: Any
    """The daemon's options (`DaemonOptions`)."""

    @abstractmethod
    def set_up_servers(self, addresses: Sequence[str]) -> None:
        """Route the gateway to verl's servers."""

    @abstractmethod
    def run_batch(
        self, uids: Sequence[str], tasks: Sequence[str], *, step: int, mode: RolloutMode, n: int
    ) -> RolloutBatch:
        """Run each task `n` times, and return the rows when all rollouts have finished."""

    @abstractmethod
    def start(self) -> None:
        """Start the daemon's own server, if it has one."""

    def set_up_data_and_server(
        self, data: Mapping[str, Sequence[Any]], server_addresses: Sequence[str], is_train: bool = True
    ) -> None:
        """Set the tasks of a batch, and route the gateway to verl's servers.

        data: columns of equal length; each row is a task, an object with the columns as its keys.
        server_addresses: the servers, as HOST:PORT.
        is_train: whether the batch is for training, not for validation.
        Raise ConfigError for columns of unequal length.
        """
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"the columns of a batch must have one length, and have {lengths}")
        columns = [[(name, value) for value in column] for name, column in data.items()]
        self._tasks = [json.dumps(dict(row)) for row in zip(*columns, strict=True)]
        self._batch_mode, self.made = "train" if is_train else "val", None
        self._steps += is_train
        self.set_up_servers(server_addresses)

    def run_until_all_finished(self) -> None:
        """Run the tasks, and return when all rollouts have finished. Raise ConfigError if no tasks
        were set.
        """
        if not self._tasks:
            raise ConfigError("the daemon has no tasks; call set_up_data_and_server first")
        n = self.options.rollouts_per_task if self._batch_mode == "train" else 1
        uids = [str(place) for place in range(len(self._tasks))]
        self.made = self.run_batch(uids, self._tasks, step=self._steps, mode=self._batch_mode, n=n)

    def get_test_metrics(self) -> Metrics:
        """Return the metrics of a validation batch. Raise ConfigError if none has finished."""
        return self._result("val").metrics

    def get_train_data_batch(
        self, max_prompt_length: int, max_response_length: int, device: Any, global_steps: int
    ) -> tuple[Any, Metrics]:
        """Return a training batch as verl's `DataProto`, padded to these lengths, and its metrics.

        device: where its tensors are put.
        global_steps: is written to its `meta_info`.
        Raise ConfigError if no training batch has finished, and for a length that is shorter than a
        row: the daemon's own limits may be larger.
        """
        made = self._result("train")
        longest = max(len(row.prompt_ids) for row in made.rows), max(len(row.response_ids) for row in made.rows)
        if longest[0] > max_prompt_length or longest[1] > max_response_length:
            raise ConfigError(
                f"max_prompt_length={max_prompt_length} and max_response_length={max_response_length} are less than the "
                f"longest row ({longest[0]} and {longest[1]} tokens); give those of the daemon's options"
            )
        padded = pad_rows(
            made.rows,
            Report(),
            pad_id=self.options.pad_id,
            prompt_length=max_prompt_length,
            response_length=max_response_length,
        )
        batch = data_proto(padded).to(device)
        batch.meta_info["global_steps"] = global_steps
        return batch, made.metrics

    def clear_data_and_server(self) -> None:
        """Forget the batch. The gateway keeps its servers until others are set."""
        self._tasks, self.made = (), None

    def _result(self, mode: RolloutMode) -> RolloutBatch:
        """Return the finished batch. Raise ConfigError if there is none of this mode."""
        if self.made is None or self._batch_mode != mode:
            raise ConfigError(
                f"the daemon has no finished batch of {mode!r}; call set_up_data_and_server and run_until_all_finished"
            )
        return self.made
