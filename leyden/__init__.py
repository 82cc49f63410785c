"""Leyden trains agents.

It records what an agent does, keeps the record in a durable store, and turns it into better agents.

Public names are resolved when they are first used, so that `import leyden` loads no torch, no web framework and no
model library.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

__version__ = "0.1.0"
if TYPE_CHECKING:
    from leyden._lib.host.asgi import ConnectionLimits as ConnectionLimits
    from leyden._lib.logs import configure_logger as configure_logger
    from leyden._lib.logs import setup_logging as setup_logging
    from leyden.adapter import LlmProxyTraceToTriplet as LlmProxyTraceToTriplet
    from leyden.adapter import RewardMatchPolicy as RewardMatchPolicy
    from leyden.adapter import TraceAdapter as TraceAdapter
    from leyden.adapter import TracerTraceToTriplet as TracerTraceToTriplet
    from leyden.adapter import TraceToMessages as TraceToMessages
    from leyden.adapter import TraceToTrajectory as TraceToTrajectory
    from leyden.adapter import TraceToTriplet as TraceToTriplet
    from leyden.adapter import TraceTree as TraceTree
    from leyden.agent import LitAgent as LitAgent
    from leyden.agent import llm_rollout as llm_rollout
    from leyden.agent import prompt_rollout as prompt_rollout
    from leyden.agent import rollout as rollout
    from leyden.agent.emitter import emit_annotation as emit_annotation
    from leyden.agent.emitter import emit_exception as emit_exception
    from leyden.agent.emitter import emit_message as emit_message
    from leyden.agent.emitter import emit_object as emit_object
    from leyden.agent.emitter import emit_reward as emit_reward
    from leyden.agent.emitter import operation as operation
    from leyden.algorithm import APO as APO
    from leyden.algorithm import DPO as DPO
    from leyden.algorithm import GEPA as GEPA
    from leyden.algorithm import GRPO as GRPO
    from leyden.algorithm import PPO as PPO
    from leyden.algorithm import RLOO as RLOO
    from leyden.algorithm import SFT as SFT
    from leyden.algorithm import VERL as VERL
    from leyden.algorithm import Algorithm as Algorithm
    from leyden.algorithm import Baseline as Baseline
    from leyden.algorithm import Budget as Budget
    from leyden.algorithm import CollectedRollout as CollectedRollout
    from leyden.algorithm import DrGRPO as DrGRPO
    from leyden.algorithm import Evaluator as Evaluator
    from leyden.algorithm import FastAlgorithm as FastAlgorithm
    from leyden.algorithm import FewShot as FewShot
    from leyden.algorithm import IterativeAlgorithm as IterativeAlgorithm
    from leyden.algorithm import PolicyAlgorithm as PolicyAlgorithm
    from leyden.algorithm import PolicyGradient as PolicyGradient
    from leyden.algorithm import RateFinder as RateFinder
    from leyden.algorithm import REINFORCEpp as REINFORCEpp
    from leyden.algorithm import ReMax as ReMax
    from leyden.algorithm import RolloutCollector as RolloutCollector
    from leyden.algorithm import Score as Score
    from leyden.algorithm import Scores as Scores
    from leyden.algorithm import VinePPO as VinePPO
    from leyden.algorithm import algo as algo
    from leyden.algorithm import call_advantages as call_advantages
    from leyden.algorithm import fork_requests as fork_requests
    from leyden.algorithm import fork_returns as fork_returns
    from leyden.algorithm import rollout_id_at as rollout_id_at
    from leyden.algorithm import rollout_id_of as rollout_id_of
    from leyden.engine import EmbeddedBackend as EmbeddedBackend
    from leyden.engine import IsolatedBackend as IsolatedBackend
    from leyden.engine import LoRA as LoRA
    from leyden.engine import OptimParams as OptimParams
    from leyden.engine import PolicyBackend as PolicyBackend
    from leyden.engine import learning_rate_at as learning_rate_at
    from leyden.errors import LeydenError as LeydenError
    from leyden.execution import ExecutionStrategy as ExecutionStrategy
    from leyden.execution import SharedMemoryExecutionStrategy as SharedMemoryExecutionStrategy
    from leyden.execution.client_server import ClientServerExecutionStrategy as ClientServerExecutionStrategy
    from leyden.execution.harness import Harness as Harness
    from leyden.execution.process_strategy import InterProcessExecutionStrategy as InterProcessExecutionStrategy
    from leyden.execution.ray import RayExecutionStrategy as RayExecutionStrategy
    from leyden.execution.runner import Hook as Hook
    from leyden.execution.runner import Judge as Judge
    from leyden.execution.runner import LitAgentRunner as LitAgentRunner
    from leyden.execution.runner import Runner as Runner
    from leyden.execution.runner.process import ProcessAgent as ProcessAgent
    from leyden.execution.runner.process import ProcessOutput as ProcessOutput
    from leyden.execution.sandbox import Sandbox as Sandbox
    from leyden.execution.task_folders import HarborTasks as HarborTasks
    from leyden.gateway import LLMProxy as LLMProxy
    from leyden.monitor import Monitor as Monitor
    from leyden.objectives.losses import PPOLoss as PPOLoss
    from leyden.store import InMemoryLightningStore as InMemoryLightningStore
    from leyden.store import LightningStore as LightningStore
    from leyden.store import LightningStoreClient as LightningStoreClient
    from leyden.store import LightningStoreServer as LightningStoreServer
    from leyden.store import PostgresLightningStore as PostgresLightningStore
    from leyden.store import SqliteLightningStore as SqliteLightningStore
    from leyden.store import open_store as open_store
    from leyden.tracing import AgentOpsTracer as AgentOpsTracer
    from leyden.tracing import DummyTracer as DummyTracer
    from leyden.tracing import LightningSpanProcessor as LightningSpanProcessor
    from leyden.tracing import OtelTracer as OtelTracer
    from leyden.tracing import Tracer as Tracer
    from leyden.tracing import WeaveTracer as WeaveTracer
    from leyden.trainer import Trainer as Trainer
    from leyden.trainer import register_component as register_component
    from leyden.training import Callback as Callback
    from leyden.training import Checkpoint as Checkpoint
    from leyden.training import ConsoleWriter as ConsoleWriter
    from leyden.training import CsvWriter as CsvWriter
    from leyden.training import EarlyStopping as EarlyStopping
    from leyden.training import ProgressBar as ProgressBar
    from leyden.training import TrainLoop as TrainLoop
    from leyden.types import LLM as LLM
    from leyden.types import Attempt as Attempt
    from leyden.types import AttemptedRollout as AttemptedRollout
    from leyden.types import EnqueueRolloutRequest as EnqueueRolloutRequest
    from leyden.types import NamedResources as NamedResources
    from leyden.types import PromptTemplate as PromptTemplate
    from leyden.types import ProxyLLM as ProxyLLM
    from leyden.types import Retention as Retention
    from leyden.types import Rollout as Rollout
    from leyden.types import RolloutConfig as RolloutConfig
    from leyden.types import Span as Span
    from leyden.types import Trajectory as Trajectory
    from leyden.types import Triplet as Triplet
    from leyden.types import find_final_reward as find_final_reward
    from leyden.types import semconv as semconv
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__)
