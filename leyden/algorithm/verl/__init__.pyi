from .daemon import AgentModeDaemon as AgentModeDaemon
from .dataset import AgentDataset as AgentDataset
from .dataset import LoadedDataset as LoadedDataset
from .verl_algorithm import VERL as VERL
from .verl_config import make_config as make_config
from .verl_run import run_ppo as run_ppo
from .verl_trainer import AgentLightningTrainer as AgentLightningTrainer
