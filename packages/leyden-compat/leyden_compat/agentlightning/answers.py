"""The texts of errors for names of Agent Lightning that Leyden lacks: what to write instead."""

from __future__ import annotations

from typing import Final

from leyden_compat.finder import MissingName

COLLECTIONS: Final = (
    "Leyden's stores keep their rows in SQL; subclass leyden.store.LightningStore for a store of your own, "
    'or open PostgreSQL with leyden.open_store("postgresql://...").'
)
LITELLM: Final = (
    "the gateway (leyden.LLMProxy) records calls itself, without LiteLLM and its callbacks; leave this out."
)
MIDDLEWARE: Final = (
    "the gateway (leyden.LLMProxy) adds token ids and log-probabilities and converts streams by itself; leave this out."
)
METRICS: Final = (
    "every server of Leyden reports its metrics at /metrics, and `leyden.Monitor` watches them; leave tracker= out."
)
PROMETHEUS: Final = "every server of Leyden reports its metrics at /metrics, so no command is needed."
SERVERS: Final = (
    "serve an ASGI app with uvicorn; Leyden's own servers start and stop with `await server.start()` "
    "and `await server.stop()`."
)
REQUESTS: Final = (
    "the models of requests over REST are private here; use leyden.LightningStoreClient, or the JSON "
    "that docs/rest.md lists."
)
AGENTOPS_SERVICE: Final = (
    "AgentOpsTracer records AgentOps's spans here and calls no AgentOps service, so nothing needs to be bypassed."
)
INSTRUMENT: Final = (
    "a tracer instruments the clients that are installed while a trace is open; choose them with "
    "leyden.OtelTracer(instrumentation=[...])."
)
WEAVE: Final = "leyden.WeaveTracer puts its own client in the place of Weave's; open a trace with it instead."
VLLM: Final = (
    "vLLM 0.10.2 and newer return token ids when the gateway asks for them; start vLLM unpatched and "
    "give its address to leyden.LLMProxy."
)
VERL_METRICS: Final = (
    "leyden.VERL reports verl's own metrics; to compute them yourself, call "
    "verl.trainer.ppo.metric_utils.compute_data_metrics."
)
VERL_ROWS: Final = (
    "leyden.algorithm.verl.rows.row_tensors pads prompts on the left and responses on the right, and makes the tensors "
    "of a batch."
)
VERL_RUN: Final = (
    "train with leyden.VERL(config), which runs verl's driver in this process, so Ray needs no task for it."
)
VERL_RUN_PPO: Final = (
    "leyden.algorithm.verl.verl_run.run_ppo has other parameters, a configuration and a daemon; train with "
    "leyden.VERL(config), which calls it."
)
VERL_TOKENS: Final = (
    "leyden.adapter.TraceToTrajectory compares the recorded tokens of a rollout's calls, and a call that does not "
    "continue another one begins a row of its own; leave this out."
)
VERL_TRAINER: Final = (
    "it is leyden.algorithm.verl.AgentLightningTrainer, which overrides the hooks of verl 0.9's PPOTrainerSync and "
    "so needs that package; pass a subclass as VERL(trainer_cls=...)."
)
POML: Final = "APO's requests are text templates here; see leyden.algorithm.apo for the arguments that replace them."
APO_PARTS: Final = (
    "leyden.APO keeps its candidates in the store; read them with `leyden prompts`, or apo.get_best_prompt()."
)
PROTOCOLS: Final = "this is a type for annotations only; annotate the function with collections.abc.Callable."


def missing(instead: str, names: str) -> dict[str, str | MissingName]:
    """Return a table in which each of the names raises an error with this text.

    names: separated by spaces.
    """
    return {name: MissingName(instead) for name in names.split()}
