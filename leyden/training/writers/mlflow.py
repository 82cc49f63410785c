"""`MlflowWriter`: rows as metrics of an MLflow run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from leyden._lib.extras import import_optional
from leyden.errors import CheckpointError, ConfigError
from leyden.training.metrics import LogLevel, Row, RowKind
from leyden.training.writers.log_writer import LogWriter


class MlflowWriter(LogWriter):
    """Writes the numbers of each row to an MLflow run, as the metrics `reward`, `val/reward` and `episode/reward`.
    MLflow's step is the iteration, the episode or the step.

    experiment: the experiment's name; it is created if it is missing.
    tracking_uri: `sqlite:///runs.db` or a server's address; None: MLflow's own choice (`MLFLOW_TRACKING_URI`, or a
        database in the current folder).
    run_name, tags: of a new run.
    rows: "stage", "episode" or "step".
    loglevel: write the values that a step logged at this level or above.

    Each new fit begins a run; a resumed fit continues its run. MLflow cannot remove points, so those after the
    checkpoint stay, and no point is written twice for a metric and step. Strings and arrays are left out. `close` marks
    the run as FINISHED.
    Raise ConfigError without `mlflow-skinny` (extra `mlflow`), and CheckpointError if the run to continue is not in the
    store.
    """

    def __init__(
        self,
        experiment: str = "leyden",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        rows: RowKind = "stage",
        loglevel: int = LogLevel.PERIODIC,
    ) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self.tags = dict(tags or {})
        self.run_id: str | None = None
        """MLflow's id of the run, from `open` on."""
        self._mlflow = import_optional("mlflow", extra="mlflow", needed_by="MlflowWriter")
        self._client: Any = None
        self._resume: str | None = None
        self._resumed = False
        self._known: dict[str, set[int]] = {}
        """The steps that a resumed run had when it was opened, by metric."""

    @property
    def state_key(self) -> str:
        return f"mlflowwriter:{self.experiment}"

    def open(self) -> None:
        """Begin a run, or continue the run of the loaded state.

        Raise ConfigError if the store cannot be used, CheckpointError if it lacks the run.
        """
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
            self._client.search_experiments(max_results=1)
        except Exception as error:  # each kind of store raises its own errors
            raise ConfigError(
                f"MlflowWriter cannot use the store {self.tracking_uri or 'of MLflow'!r}: {error}"
            ) from error
        self._resumed, self._known = self._resume is not None, {}
        if self._resume is None:
            found = self._client.get_experiment_by_name(self.experiment)
            experiment_id = found.experiment_id if found else self._client.create_experiment(self.experiment)
            self.run_id = self._client.create_run(experiment_id, run_name=self.run_name, tags=self.tags).info.run_id
            return
        self.run_id, self._resume = self._resume, None
        try:
            self._client.update_run(self.run_id, status="RUNNING")
        except self._mlflow.exceptions.MlflowException as error:
            raise CheckpointError(
                f"the checkpoint's MLflow run {self.run_id!r} is not in {self.tracking_uri or 'the store'}: {error}; "
                "give MlflowWriter the store that it was in, or leave the writer out"
            ) from error

    def write(self, row: Row) -> None:
        """Write the points that MLflow does not have yet, and wait until they are stored."""
        now = int(time.time() * 1000)
        point = self._mlflow.entities.Metric
        numbers = {name: value for name, value in row.numbers().items() if row.number not in self._steps_of(name)}
        if numbers:
            points = [point(name, float(value), now, row.number) for name, value in numbers.items()]
            self._client.log_batch(self.run_id, metrics=points, synchronous=True)

    def close(self) -> None:
        if self._client is not None and self.run_id is not None:
            self._client.set_terminated(self.run_id, "FINISHED")
        self._client = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run_id": self._resume or self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resume = state["run_id"]

    def _steps_of(self, name: str) -> set[int]:
        if not self._resumed:
            return set()
        if name not in self._known:
            self._known[name] = {point.step for point in self._client.get_metric_history(self.run_id, name)}
        return self._known[name]
