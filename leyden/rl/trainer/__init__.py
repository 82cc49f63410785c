"""Training: vessels (what is trained, and how), the trainer that runs them, and two functions for the usual case.

It knows policies, environments and the loop of `leyden.loop`; no algorithm. To train in another
way, write a vessel. The callbacks that `qlib.rl.trainer` has are importable from here too.
"""

from leyden.loop import Checkpoint, EarlyStopping, MetricsWriter
from leyden.rl.trainer.api import backtest, train
from leyden.rl.trainer.trainer import Trainer
from leyden.rl.trainer.vessel import SeedIteratorNotAvailable, TrainingVessel, TrainingVesselBase

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "MetricsWriter",
    "SeedIteratorNotAvailable",
    "Trainer",
    "TrainingVessel",
    "TrainingVesselBase",
    "backtest",
    "train",
]
