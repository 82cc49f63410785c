"""Environments: one simulator (`EnvWrapper`), or many over a finite set of seeds (`FiniteVectorEnv`).

    factory = lambda: EnvWrapper(Orders, state_interpreter, action_interpreter, reward_fn=reward)
    with vectorize_env(factory, "shmem", concurrency=8, seeds=SeedPlan(orders)) as venv:
        obs = venv.reset()
        while venv.alive.any():
            step = venv.step(actions(obs))
            if not venv.exhausted:
                venv.reset()
            obs = step.obs

Each seed begins one episode. Nothing here knows policies, buffers or training. `check_simulator` finds the errors of a
simulator. To add a kind of vectorised environment, subclass `FiniteVectorEnv` in a module here and add a line to
`ENV_KINDS` in `factory.py`.
"""

from leyden.rl.env.batch_env import BatchSimulator as BatchSimulator
from leyden.rl.env.batch_env import FiniteBatchVectorEnv as FiniteBatchVectorEnv
from leyden.rl.env.check import SimulatorReport as SimulatorReport
from leyden.rl.env.check import check_simulator as check_simulator
from leyden.rl.env.factory import FiniteEnvType as FiniteEnvType
from leyden.rl.env.factory import vectorize_env as vectorize_env
from leyden.rl.env.in_process import FiniteDummyVectorEnv as FiniteDummyVectorEnv
from leyden.rl.env.in_process import FiniteThreadVectorEnv as FiniteThreadVectorEnv
from leyden.rl.env.processes import FiniteShmemVectorEnv as FiniteShmemVectorEnv
from leyden.rl.env.processes import FiniteSubprocVectorEnv as FiniteSubprocVectorEnv
from leyden.rl.env.vector import FiniteVectorEnv as FiniteVectorEnv
from leyden.rl.env.vector import VectorStep as VectorStep
from leyden.rl.env.wrapper import EnvWrapper as EnvWrapper
from leyden.rl.env.wrapper import EnvWrapperStatus as EnvWrapperStatus
from leyden.rl.env.wrapper import InfoDict as InfoDict
