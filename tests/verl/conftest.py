"""Importing verl warns about much that is its own; every other warning is an error, as everywhere."""

import importlib
import os
import warnings

os.environ.update(
    VERL_PLATFORM="cpu",
    RAY_USAGE_STATS_ENABLED="0",
    VERL_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in (
        "examples.verl_cpu.cpu",  # registers the platform before verl looks for one
        "verl.trainer.ppo.ray_trainer",
        "verl.trainer.ppo.v1.utils",
    ):
        importlib.import_module(module)

import torch

torch.set_num_threads(1)
