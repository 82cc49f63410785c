from .algorithm import VERL as VERL
from .config import make_config as make_config
from .daemon import AgentModeDaemon as AgentModeDaemon
from .dataset import AgentDataset as AgentDataset
from .dataset import LoadedDataset as LoadedDataset
from .running import run_ppo as run_ppo
from .trainer import AgentLightningTrainer as AgentLightningTrainer
