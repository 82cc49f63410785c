"""Writers: where the rows of a training loop go.

A writer gets one row at a time (of a stage, an episode or a step) and knows neither loop nor vessel. To add one,
subclass `LogWriter` and implement `write`. A writer of a file also returns in `state_dict` how much of the file a
checkpoint covers, and cuts the file there when a run is resumed; `AppendingWriter` does both. Packages such as wandb
are imported when their writer is made.
"""

from leyden.training.writers.appending import JsonlWriter as JsonlWriter
from leyden.training.writers.buffer import LogBuffer as LogBuffer
from leyden.training.writers.console import ConsoleWriter as ConsoleWriter
from leyden.training.writers.csv import CsvWriter as CsvWriter
from leyden.training.writers.log_writer import LogWriter as LogWriter
from leyden.training.writers.mlflow import MlflowWriter as MlflowWriter
from leyden.training.writers.pickle import PickleWriter as PickleWriter
from leyden.training.writers.pickle import read_pickled_rows as read_pickled_rows
from leyden.training.writers.tensorboard import TensorboardWriter as TensorboardWriter
from leyden.training.writers.wandb import WandbWriter as WandbWriter
