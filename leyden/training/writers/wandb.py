"""`WandbWriter`: rows as the history of a Weights & Biases run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from leyden._lib.extras import import_optional
from leyden.training.metrics import EpisodeRow, LogLevel, Row, RowKind
from leyden.training.writers.log_writer import LogWriter


class WandbWriter(LogWriter):
    """Writes the numbers of each row to a Weights & Biases run, as `reward`, `val/reward` and `episode/reward`. W&B's
    step is the iteration, the number of ended episodes, or the step.

    project, name, config: of the run, as in `wandb.init`.
    mode: "online", "offline" (files in `dir`, which `wandb sync` uploads) or "disabled"; None: as `WANDB_MODE` says.
    dir: the folder of the run's files; None: W&B's own choice.
    rows: "stage", "episode" or "step".
    loglevel: write the values that a step logged at this level or above.

    Each new fit begins a run; a resumed fit continues with the same run id. Online, W&B refuses rows that are not newer
    than its last, so none is doubled. Offline, a resumed run gets its own folder, and rows that a killed process
    wrote after its checkpoint are in both folders. W&B writes in its own process, so a kill may lose the last
    rows. Strings and arrays are left out. Raise ConfigError without `wandb` (extra `wandb`).
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        rows: RowKind = "stage",
        loglevel: int = LogLevel.PERIODIC,
    ) -> None:
        super().__init__(rows=rows, loglevel=loglevel)
        self.project, self.name, self.mode, self.dir = project, name, mode, dir
        self.config = dict(config or {})
        self.run_id: str | None = None
        """W&B's id of the run, from `open` on."""
        self._wandb = import_optional("wandb", extra="wandb", needed_by="WandbWriter")
        self._run: Any = None
        self._resume: str | None = None

    @property
    def state_key(self) -> str:
        return f"wandbwriter:{self.project}"

    def open(self) -> None:
        resumed, self._resume = self._resume, None
        self.run_id = resumed or uuid.uuid4().hex[:8]
        # offline there is no server that could tell whether the run exists
        resume = "allow" if resumed and self.mode != "offline" else None
        self._run = self._wandb.init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=None if self.dir is None else str(self.dir),
            config=self.config,
            id=self.run_id,
            resume=resume,
            reinit="create_new",
        )

    def write(self, row: Row) -> None:
        """Hand the row's numbers to W&B, which sends them in the background."""
        # wandb wants steps that grow, and episodes end in another order than they begin in
        step = self.global_episode if isinstance(row, EpisodeRow) else row.number
        self._run.log(row.numbers(), step=step)

    def close(self) -> None:
        """End the run. W&B's own process may still be uploading when this returns; `wandb.teardown()` waits for it."""
        if self._run is not None:
            self._run.finish()
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run_id": self._resume or self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._resume = state["run_id"]
