"""Training: vessels (what is trained, and how), the trainer that runs them, and two functions for the usual case.

It knows policies, environments and the loop of `leyden.loop`; no algorithm. To train in another way, write a vessel.
"""

from leyden.rl.trainer.api import backtest, train
from leyden.rl.trainer.trainer import Trainer
from leyden.rl.trainer.vessel import SeedIteratorNotAvailable, TrainingVessel, TrainingVesselBase

__all__ = ["SeedIteratorNotAvailable", "Trainer", "TrainingVessel", "TrainingVesselBase", "backtest", "train"]
