"""Importing the peers warns about much that is theirs; every other warning is an error, as everywhere."""

import os
import warnings

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl.trainer.dpo_trainer
    import trl.trainer.grpo_trainer
    import trl.trainer.rloo_trainer
    import trl.trainer.sft_trainer  # noqa: F401 -- imported before the tests, which need them
    import verl.trainer.ppo.core_algos  # noqa: F401 -- as above

import torch

torch.set_num_threads(1)
