"""The training loop, for LLM agents and simulator agents alike.

Lives here: `TrainLoop` (order of stages, hooks, counters), `Callback` and the callbacks that ship, directory
checkpoints, metrics, writers, the handling of signals that end a run, and what a run writes and reads (`runs/`). The
loop knows no store, no agent, no model and no tensor. It trains a `Vessel`: an object, synchronous or not, with the
methods step and validate, and save and load or state_dict and load_state_dict.

    checkpoint = Checkpoint("run/checkpoints")
    writers = [CsvWriter("run/metrics.csv")]
    loop = TrainLoop(max_iters=100, callbacks=[checkpoint, ProgressBar()], writers=writers)
    with graceful_interrupts(loop.stop):
        await loop.arun(vessel, resume=checkpoint.latest())

To add a callback, subclass `Callback` (each hook says when it is called); to add a writer, subclass `LogWriter` and
implement `write`. Both are passed to the loop; nothing needs to be registered.
"""

from leyden.training.callbacks import Callback as Callback
from leyden.training.callbacks import EarlyStopping as EarlyStopping
from leyden.training.callbacks import MetricsWriter as MetricsWriter
from leyden.training.callbacks import Progress as Progress
from leyden.training.checkpoint import CheckpointStore as CheckpointStore
from leyden.training.checkpoint import SavedCheckpoint as SavedCheckpoint
from leyden.training.checkpoint import open_checkpoint as open_checkpoint
from leyden.training.checkpoint_callback import Checkpoint as Checkpoint
from leyden.training.interrupt import graceful_interrupts as graceful_interrupts
from leyden.training.metrics import EpisodeRow as EpisodeRow
from leyden.training.metrics import EpisodeStats as EpisodeStats
from leyden.training.metrics import LogCollector as LogCollector
from leyden.training.metrics import LogLevel as LogLevel
from leyden.training.metrics import Metrics as Metrics
from leyden.training.metrics import MetricsAggregator as MetricsAggregator
from leyden.training.metrics import MetricsRow as MetricsRow
from leyden.training.metrics import MetricValue as MetricValue
from leyden.training.metrics import Row as Row
from leyden.training.metrics import Stage as Stage
from leyden.training.metrics import StepRow as StepRow
from leyden.training.progress_bar import ProgressBar as ProgressBar
from leyden.training.pth import SavedFile as SavedFile
from leyden.training.state_files import StatefulVessel as StatefulVessel
from leyden.training.train_loop import Resumable as Resumable
from leyden.training.train_loop import TrainLoop as TrainLoop
from leyden.training.train_loop import Vessel as Vessel
from leyden.training.writers import ConsoleWriter as ConsoleWriter
from leyden.training.writers import CsvWriter as CsvWriter
from leyden.training.writers import JsonlWriter as JsonlWriter
from leyden.training.writers import LogBuffer as LogBuffer
from leyden.training.writers import LogWriter as LogWriter
from leyden.training.writers import MlflowWriter as MlflowWriter
from leyden.training.writers import PickleWriter as PickleWriter
from leyden.training.writers import TensorboardWriter as TensorboardWriter
from leyden.training.writers import WandbWriter as WandbWriter
from leyden.training.writers import read_pickled_rows as read_pickled_rows
