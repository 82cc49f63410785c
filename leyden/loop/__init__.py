"""The training loop, for LLM agents and simulator agents alike.

Lives here: `TrainLoop` (order of stages, hooks, counters), `Callback` and the callbacks that ship,
directory checkpoints, metrics, writers, and signals that end a run well. It knows no store, no
agent, no model and no tensor: what is trained is a `Vessel` (step and validate, and save and load
or state_dict and load_state_dict), synchronous or not.

    checkpoint = Checkpoint("run/checkpoints")
    writers = [CsvWriter("run/metrics.csv")]
    loop = TrainLoop(max_iters=100, callbacks=[checkpoint, ProgressBar()], writers=writers)
    with graceful_interrupts(loop.stop):
        await loop.arun(vessel, resume=checkpoint.latest())

To add a callback, subclass `Callback` (each hook says when it is called); to add a writer, subclass
`LogWriter` and implement `write`. Both are passed to the loop; nothing needs to be registered.
"""

from leyden.loop.callbacks import Callback, EarlyStopping, MetricsWriter, Progress
from leyden.loop.checkpoint import CheckpointStore, SavedCheckpoint, open_checkpoint
from leyden.loop.checkpoint_callback import Checkpoint
from leyden.loop.interrupt import graceful_interrupts
from leyden.loop.metrics import (
    EpisodeRow,
    EpisodeStats,
    LogCollector,
    LogLevel,
    Metrics,
    MetricsAggregator,
    MetricsRow,
    MetricValue,
    Row,
    Stage,
    StepRow,
)
from leyden.loop.progress_bar import ProgressBar
from leyden.loop.pth import SavedFile
from leyden.loop.state_files import StatefulVessel
from leyden.loop.train_loop import Resumable, TrainLoop, Vessel
from leyden.loop.writers import (
    ConsoleWriter,
    CsvWriter,
    JsonlWriter,
    LogBuffer,
    LogWriter,
    MlflowWriter,
    PickleWriter,
    TensorboardWriter,
    WandbWriter,
    read_pickled_rows,
)

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointStore",
    "ConsoleWriter",
    "CsvWriter",
    "EarlyStopping",
    "EpisodeRow",
    "EpisodeStats",
    "JsonlWriter",
    "LogBuffer",
    "LogCollector",
    "LogLevel",
    "LogWriter",
    "MetricValue",
    "Metrics",
    "MetricsAggregator",
    "MetricsRow",
    "MetricsWriter",
    "MlflowWriter",
    "PickleWriter",
    "Progress",
    "ProgressBar",
    "Resumable",
    "Row",
    "SavedCheckpoint",
    "SavedFile",
    "Stage",
    "StatefulVessel",
    "StepRow",
    "TensorboardWriter",
    "TrainLoop",
    "Vessel",
    "WandbWriter",
    "graceful_interrupts",
    "open_checkpoint",
    "read_pickled_rows",
]
