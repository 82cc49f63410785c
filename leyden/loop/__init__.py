"""The training loop, for LLM agents and simulator agents alike.

Lives here: `TrainLoop` (order of stages, hooks, counters), `Callback` and the callbacks that ship,
directory checkpoints, metrics, writers, and the handling of signals that end a run. It knows no
store, no agent, no model and no tensor. It trains a `Vessel`: an object, synchronous or not, with
the methods step and validate, and save and load or state_dict and load_state_dict.

    checkpoint = Checkpoint("run/checkpoints")
    writers = [CsvWriter("run/metrics.csv")]
    loop = TrainLoop(max_iters=100, callbacks=[checkpoint, ProgressBar()], writers=writers)
    with graceful_interrupts(loop.stop):
        await loop.arun(vessel, resume=checkpoint.latest())

To add a callback, subclass `Callback` (each hook says when it is called); to add a writer, subclass
`LogWriter` and implement `write`. Both are passed to the loop; nothing needs to be registered.
"""

from leyden.loop.callbacks import Callback as Callback
from leyden.loop.callbacks import EarlyStopping as EarlyStopping
from leyden.loop.callbacks import MetricsWriter as MetricsWriter
from leyden.loop.callbacks import Progress as Progress
from leyden.loop.checkpoint import CheckpointStore as CheckpointStore
from leyden.loop.checkpoint import SavedCheckpoint as SavedCheckpoint
from leyden.loop.checkpoint import open_checkpoint as open_checkpoint
from leyden.loop.checkpoint_callback import Checkpoint as Checkpoint
from leyden.loop.interrupt import graceful_interrupts as graceful_interrupts
from leyden.loop.metrics import EpisodeRow as EpisodeRow
from leyden.loop.metrics import EpisodeStats as EpisodeStats
from leyden.loop.metrics import LogCollector as LogCollector
from leyden.loop.metrics import LogLevel as LogLevel
from leyden.loop.metrics import Metrics as Metrics
from leyden.loop.metrics import MetricsAggregator as MetricsAggregator
from leyden.loop.metrics import MetricsRow as MetricsRow
from leyden.loop.metrics import MetricValue as MetricValue
from leyden.loop.metrics import Row as Row
from leyden.loop.metrics import Stage as Stage
from leyden.loop.metrics import StepRow as StepRow
from leyden.loop.progress_bar import ProgressBar as ProgressBar
from leyden.loop.pth import SavedFile as SavedFile
from leyden.loop.state_files import StatefulVessel as StatefulVessel
from leyden.loop.train_loop import Resumable as Resumable
from leyden.loop.train_loop import TrainLoop as TrainLoop
from leyden.loop.train_loop import Vessel as Vessel
from leyden.loop.writers import ConsoleWriter as ConsoleWriter
from leyden.loop.writers import CsvWriter as CsvWriter
from leyden.loop.writers import JsonlWriter as JsonlWriter
from leyden.loop.writers import LogBuffer as LogBuffer
from leyden.loop.writers import LogWriter as LogWriter
from leyden.loop.writers import MlflowWriter as MlflowWriter
from leyden.loop.writers import PickleWriter as PickleWriter
from leyden.loop.writers import TensorboardWriter as TensorboardWriter
from leyden.loop.writers import WandbWriter as WandbWriter
from leyden.loop.writers import read_pickled_rows as read_pickled_rows
