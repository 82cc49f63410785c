"""`TensorboardWriter`: rows as scalars in an event file, which `tensorboard --logdir` shows."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any, Final

from leyden._lib.extras import import_optional
from leyden.training.metrics import LogLevel, Row, RowKind
from leyden.training.writers.appending import AppendingWriter

_FILE: Final = "events.out.tfevents.0000000000.leyden"
"""TensorBoard finds files with "tfevents" in their names. A fixed time lets a resume find it too."""
_VERSION: Final = "brain.Event:2"


class TensorboardWriter(AppendingWriter):
    """Writes the numbers of each row as the scalars `reward`, `val/reward` and `episode/reward`. TensorBoard's step is
    the iteration, the episode or the step.

    log_dir: the directory of the run, which gets one event file, always of the same name.
    rows: "stage", "episode" or "step".
    loglevel: write the values that a step logged at this level or above.
    axis: the name of a number in the row to use as the step instead, such as "total_steps" for curves over environment
        steps. Rows without that number are left out.

    TensorBoard keeps 32 bits of a scalar. Strings and arrays are left out. A new run replaces the file; a resumed one
    cuts it after the events that its checkpoint counts, so nothing is doubled. Raise ConfigError without the package
    `tensorboard` (extra `tensorboard`). TensorFlow is not needed.
    """

    def __init__(
        self,
        log_dir: str | Path,
        *,
        rows: RowKind = "stage",
        loglevel: int = LogLevel.PERIODIC,
        axis: str | None = None,
    ) -> None:
        super().__init__(Path(log_dir) / _FILE, rows=rows, loglevel=loglevel)
        self.axis = axis
        extra = {"extra": "tensorboard", "needed_by": "TensorboardWriter"}
        self._event = import_optional("tensorboard.compat.proto.event_pb2", **extra).Event
        self._summary = import_optional("tensorboard.compat.proto.summary_pb2", **extra).Summary
        self._record_writer = import_optional("tensorboard.summary.writer.record_writer", **extra).RecordWriter

    @property
    def state_key(self) -> str:
        return f"tensorboardwriter:{self.path.parent.name}"

    def header(self) -> bytes:
        return self._record(self._event(wall_time=time.time(), file_version=_VERSION))

    def encode(self, row: Row) -> bytes:
        """Return an event with all numbers of the row; no bytes for a row without `axis`."""
        step: Any = row.number if self.axis is None else row.flat().get(self.axis)
        if not isinstance(step, int | float):
            return b""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.numbers().items()]
        return self._record(self._event(wall_time=time.time(), step=int(step), summary=self._summary(value=values)))

    def _record(self, event: Any) -> bytes:
        framed = io.BytesIO()
        self._record_writer(framed).write(event.SerializeToString())
        return framed.getvalue()
