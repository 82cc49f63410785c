"""verl as an algorithm: verl's trainer updates the policy, on one or many GPUs, and Leyden's runners, store and gateway
make its rollouts.

| module | has |
|---|---|
| `verl_algorithm.py` | `VERL`, the algorithm |
| `verl_config.py`, `defaults.yaml` | its configuration |
| `daemon.py` | `AgentModeDaemon`, which runs prompts as rollouts |
| `rows.py` | the functions that make a batch of rollouts |
| `dataset.py` | data sets in verl's form |
| `verl_run.py` | a whole run of verl's trainer |
| `verl_trainer.py`, `replica.py` | the trainer and the rollout engine for verl |
| `plugin.py` | registers the engines in each of verl's processes |

The package does not import verl, torch or Ray before they are needed. To support another version of verl, look at
`verl_trainer.py`, `replica.py` and `examples/verl_cpu`, which subclass verl's classes.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.algorithm.verl.daemon import AgentModeDaemon as AgentModeDaemon
    from leyden.algorithm.verl.dataset import AgentDataset as AgentDataset
    from leyden.algorithm.verl.dataset import LoadedDataset as LoadedDataset
    from leyden.algorithm.verl.verl_algorithm import VERL as VERL
    from leyden.algorithm.verl.verl_config import make_config as make_config
    from leyden.algorithm.verl.verl_run import run_ppo as run_ppo
    from leyden.algorithm.verl.verl_trainer import AgentLightningTrainer as AgentLightningTrainer
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__, extra="verl")
