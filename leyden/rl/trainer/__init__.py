"""Training: vessels (a policy and how it is trained), the trainer, and two functions for the usual case.

Nothing here knows an algorithm: policies learn, and the loop is that of `leyden.training`. To train in another way,
subclass `TrainingVesselBase`. The callbacks that Qlib has in `qlib.rl.trainer` can be imported from here too.
"""

from leyden._lib.extras import missing_extra
from leyden.training import Checkpoint, EarlyStopping, MetricsWriter

try:
    from leyden.rl.trainer.api import backtest, train
    from leyden.rl.trainer.rl_trainer import Trainer
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
