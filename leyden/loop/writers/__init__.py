"""Writers: where the rows of a training loop go.

A writer gets one `MetricsRow` at a time and knows neither loop nor vessel. To add one, subclass `LogWriter` and implement `write`; one
that keeps a file also says in `state_dict` how much of it a checkpoint covers, and cuts the file there when a run is resumed.
"""

from leyden.loop.writers.base import LogWriter
from leyden.loop.writers.console import ConsoleWriter
from leyden.loop.writers.csv import CsvWriter
from leyden.loop.writers.jsonl import JsonlWriter

__all__ = ["ConsoleWriter", "CsvWriter", "JsonlWriter", "LogWriter"]
