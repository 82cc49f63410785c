"""Training: vessels (what is trained, and how), the trainer that runs them, and two functions for the usual case.

It knows policies, environments and the loop of `leyden.loop`; no algorithm. To train in another
way, write a vessel. The callbacks that `qlib.rl.trainer` has are importable from here too.
"""

from leyden.extras import missing_extra
from leyden.loop import Checkpoint, EarlyStopping, MetricsWriter

try:
    from leyden.rl.trainer.api import backtest, train
    from leyden.rl.trainer.trainer import Trainer
    from leyden.rl.trainer.vessel import SeedIteratorNotAvailable, TrainingVessel, TrainingVesselBase
except ImportError as error:
    raise missing_extra(error, extra="rl", needed_by=__name__) from None

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
