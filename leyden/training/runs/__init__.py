"""Runs as data: the configuration of a run, its metrics, and how it ended.

Lives here: `Run`, which an algorithm reports to; the recorder, which writes a run's folder and its rows in the store;
and the reader, which opens a running, finished or crashed run from either. The package knows the store and the rows of
a training loop, and no algorithm, trainer or agent: a trainer attaches a recorder to a `Run` and describes its parts in
`config`.

A run folder holds `run.json` (`folder.py` says which fields), `metrics.jsonl` (a row for each stage), `failures.jsonl`
(a line for each failed rollout), `run.log`, and beside them the store, `checkpoints/` and `model/`.

To record something more about a run, add it to the configuration (`run_description.py`). To show something more, add it
to `RunMetrics`, which every reader of a run uses.
"""

from leyden.training.runs.recorded_runs import FailedRollout as FailedRollout
from leyden.training.runs.recorded_runs import RecordedRun as RecordedRun
from leyden.training.runs.recorded_runs import RunState as RunState
from leyden.training.runs.recorded_runs import list_runs as list_runs
from leyden.training.runs.recorded_runs import open_run as open_run
from leyden.training.runs.rescoring import RecordedRollout as RecordedRollout
from leyden.training.runs.run import Run as Run
from leyden.training.runs.run_metrics import RewardMetrics as RewardMetrics
from leyden.training.runs.run_metrics import RunMetrics as RunMetrics
from leyden.training.runs.summary import RunSummary as RunSummary
