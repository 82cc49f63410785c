"""`WandbWriter`: rows as the history of a Weights & Biases run."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from leyden.extras import import_optional
from leyden.loop.metrics import EpisodeRow, LogLevel, Row, RowKind
from leyden.loop.writers.base import LogWriter


class WandbWriter(LogWriter):
    """The numbers of each row, as `reward`, `val/reward`, `episode/reward`; the step is the
    iteration, the episode's count, or the step's.

    project, name, config: of the run, see `wandb.init`.
    mode: "online", "offline" (files under `dir`, to be uploaded by `wandb sync`), "disabled"; None:
        what `WANDB_MODE` says. A new fit is a new run. A resumed one continues with the same run
        id. W&B orders a history by step and refuses what is not newer, so online no row is doubled;
        offline a resumed run has a folder of its own, and what the killed process wrote after its
        checkpoint is in both. wandb's own process writes: rows of the last moment can be lost by a
        kill. Strings and arrays are left out. Raise ConfigError without `wandb` (extra `wandb`).
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
        """The name of the state in a checkpoint: one for each project."""
        return f"wandbwriter:{self.project}"

    def open(self) -> None:
        """Begin a run, or continue the run of the loaded state."""
        resumed, self._resume = self._resume, None
        self.run_id = resumed or uuid.uuid4().hex[:8]
        # only a server knows whether there is something to resume
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
        # episodes end in another order than they begin in; wandb wants steps that grow
        step = self.global_episode if isinstance(row, EpisodeRow) else row.number
        self._run.log(row.numbers(), step=step)

    def close(self) -> None:
        """End the run; W&B's service process has everything, and writes or uploads the rest within
        moments (`wandb.teardown()` waits).
        """
        if self._run is not None:
            self._run.finish()
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Return the writer's state, with the id of the run."""
        return {**super().state_dict(), "run_id": self._resume or self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `open` continue the run that `state` names."""
        super().load_state_dict(state)
        self._resume = state["run_id"]
