"""Leyden's replacement for each public name of `agentlightning` 0.2.0 to 0.3.0, by module.

Some packages of Agent Lightning repeat the names of their modules; `_PACKAGES` lists these modules. A test compares the
table with `tests/compat/agentlightning.json`, an inventory of the released wheels, so that no name is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from leyden_compat.agentlightning import answers as say
from leyden_compat.agentlightning.answers import missing
from leyden_compat.finder import ForeignModule, MissingName

Names = dict[str, str | MissingName]

_HERE = "leyden_compat.agentlightning"


def _same(module: str, names: str) -> Names:
    return {name: f"{module}:{name}" for name in names.split()}


def _wrapped(module: str, names: str) -> Names:
    return _same(f"{_HERE}.{module}", names)


_VERL_MAIN = "leyden.algorithm.verl.__main__:main"

_MODULES: dict[str, Names] = {
    "adapter.base": {
        **_wrapped("adapter", "Adapter TraceAdapter OtelTraceAdapter"),
    },
    "adapter.triplet": {
        **_same("leyden.adapter", "RewardMatchPolicy TraceTree"),
        **_wrapped("adapter", "LlmProxyTraceToTriplet TraceToTripletBase TracerTraceToTriplet"),
        "Transition": MissingName(
            "use the triplets of an adapter: triplet.prompt.token_ids, triplet.response.token_ids."
        ),
    },
    "adapter.messages": {
        **_wrapped("adapter", "TraceToMessages"),
        **_same("leyden.adapter", "OpenAIMessages"),
        **missing(
            "leyden.adapter.model_calls(spans) returns the messages of every model call.",
            "convert_to_openai_messages group_genai_dict",
        ),
    },
    "algorithm.apo.apo": {
        **_wrapped("algorithm", "APO RolloutResultForAPO batch_iter_over_dataset"),
        "VersionedPromptTemplate": MissingName(say.APO_PARTS),
        **missing(say.POML, "APPLY_EDIT_PROMPT_FILES GRADIENT_PROMPT_FILES"),
    },
    "algorithm.base": _wrapped("interfaces", "Algorithm"),
    "algorithm.decorator": {
        **_wrapped("interfaces", "FunctionalAlgorithm algo"),
        **missing(
            say.PROTOCOLS,
            "AlgorithmFunc AlgorithmFuncAsync AlgorithmFuncAsyncFallback AlgorithmFuncAsyncFull AlgorithmFuncAsyncLike "
            "AlgorithmFuncAsyncOnlyDataset AlgorithmFuncAsyncOnlyStore AlgorithmFuncSync AlgorithmFuncSyncFallback "
            "AlgorithmFuncSyncFull AlgorithmFuncSyncLike AlgorithmFuncSyncOnlyDataset AlgorithmFuncSyncOnlyStore AsyncFlag",
        ),
    },
    "algorithm.fast": {**_wrapped("interfaces", "FastAlgorithm"), **_wrapped("algorithm", "Baseline")},
    "algorithm.utils": _wrapped("algorithm", "batch_iter_over_dataset with_llm_proxy with_store"),
    "algorithm.verl.interface": _wrapped("algorithm", "VERL"),
    "cli": _wrapped("cli", "main"),
    "cli.agentops_server": {"main": MissingName(say.AGENTOPS_SERVICE)},
    "cli.prometheus": missing(say.PROMETHEUS, "create_prometheus_app ensure_prometheus_dir main"),
    "cli.store": {"main": f"{_HERE}.cli:store_main"},
    "cli.vllm": {"main": MissingName(say.VLLM)},
    "client": _same("leyden.legacy", "AgentLightningClient DevTaskLoader"),
    "config": _wrapped("config", "CliConfigurable lightning_cli nullable_float nullable_int nullable_str"),
    "emitter.annotation": _wrapped("emitter", "OperationContext emit_annotation operation"),
    "emitter.exception": _wrapped("emitter", "emit_exception"),
    "emitter.message": _wrapped("emitter", "emit_message get_message_value"),
    "emitter.object": _wrapped("emitter", "emit_object encode_object get_object_value"),
    "emitter.reward": {
        **_wrapped(
            "emitter", "RewardDimension emit_reward find_final_reward get_reward_value get_rewards_from_span reward"
        ),
        **_same("leyden.types", "find_reward_spans is_reward_span"),
        **_wrapped("emitter", "RewardSpanData"),
    },
    "emitter.utils": _wrapped("otel", "get_tracer"),
    "env_var": _wrapped("env_var", "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var"),
    "execution.base": {
        **_same("leyden.execution", "AlgorithmBundle RunnerBundle"),
        **_wrapped("interfaces", "ExecutionStrategy"),
        "resolve_managed_store_flag": MissingName(
            "use env_var.resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE)."
        ),
    },
    "execution.client_server": _wrapped("serving", "ClientServerExecutionStrategy"),
    "execution.events": _wrapped("interfaces", "ExecutionEvent MultiprocessingEvent ThreadingEvent"),
    "execution.inter_process": _wrapped("serving", "InterProcessExecutionStrategy"),
    "execution.shared_memory": _wrapped("serving", "SharedMemoryExecutionStrategy"),
    "instrumentation": {
        "AGENTOPS_INSTALLED": MissingName('use importlib.util.find_spec("agentops").'),
        "AGENTOPS_LANGCHAIN_INSTALLED": MissingName('use importlib.util.find_spec("langchain").'),
        "LITELLM_INSTALLED": MissingName('use importlib.util.find_spec("litellm").'),
        "VLLM_INSTALLED": MissingName('use importlib.util.find_spec("vllm").'),
        "WEAVE_INSTALLED": MissingName('use importlib.util.find_spec("weave").'),
        **_wrapped("instruments", "instrument_all uninstrument_all"),
    },
    "instrumentation.agentops": {
        **_wrapped("instruments", "instrument_agentops uninstrument_agentops enable_agentops_service"),
        **missing(
            say.AGENTOPS_SERVICE,
            "AgentOpsServerManager BypassableAuthenticatedOTLPExporter BypassableOTLPMetricExporter "
            "BypassableOTLPSpanExporter BypassableV3Client BypassableV4Client agentops_local_server",
        ),
    },
    "instrumentation.agentops_langchain": {
        **_wrapped("instruments", "instrument_agentops_langchain uninstrument_agentops_langchain"),
        **missing(say.INSTRUMENT, "langgraph_entry on_chain_start original_on_chain_start"),
    },
    "instrumentation.litellm": {
        **_wrapped("instruments", "instrument_litellm uninstrument_litellm"),
        **missing(say.LITELLM, "original_set_attributes patched_set_attributes"),
    },
    "instrumentation.vllm": missing(
        say.VLLM,
        "ChatCompletionResponsePatched chat_completion_full_generator instrument_vllm "
        "original_chat_completion_full_generator uninstrument_vllm",
    ),
    "instrumentation.weave": missing(
        say.WEAVE,
        "InMemoryWeaveTraceServer get_entity_project_from_project_name_factory get_username "
        "init_weave_get_server_factory instrument_weave uninstrument_weave",
    ),
    "litagent.litagent": _wrapped("agent", "LitAgent is_v0_1_rollout_api"),
    "litagent.decorator": {
        **_wrapped("agent", "FunctionalLitAgent llm_rollout prompt_rollout rollout"),
        **missing(
            say.PROTOCOLS,
            "FunctionalLitAgentFunc LlmRolloutFunc LlmRolloutFuncAsync2 LlmRolloutFuncAsync3 LlmRolloutFuncSync2 "
            "LlmRolloutFuncSync3 PromptRolloutFunc PromptRolloutFuncAsync2 PromptRolloutFuncAsync3 "
            "PromptRolloutFuncSync2 PromptRolloutFuncSync3",
        ),
    },
    "llm_proxy": {
        **_wrapped("serving", "LLMProxy ModelConfig get_active_llm_proxy set_active_llm_proxy"),
        **missing(
            say.MIDDLEWARE,
            "AddLogprobs AddReturnTokenIds MessageInspectionMiddleware RolloutAttemptMiddleware StreamConversionMiddleware",
        ),
        **missing(say.LITELLM, "LightningOpenTelemetry LightningSpanExporter initialize_llm_callbacks initialize"),
        "get_global_store": MissingName("the store belongs to the gateway: proxy.get_store()."),
    },
    "logging": _wrapped("logs", "DATE_FORMAT DEFAULT_FORMAT configure_logger setup setup_module"),
    "runner.agent": _wrapped("agent", "LitAgentRunner"),
    "runner.base": _wrapped("interfaces", "Runner"),
    "runner.legacy": _same("leyden.legacy", "LegacyAgentRunner"),
    "semconv": _wrapped(
        "semconv",
        "AGL_ANNOTATION AGL_EXCEPTION AGL_MESSAGE AGL_OBJECT AGL_OPERATION AGL_REWARD AGL_VIRTUAL "
        "LightningResourceAttributes LightningSpanAttributes LinkAttributes LinkPydanticModel RewardAttributes "
        "RewardPydanticModel",
    ),
    "server": {
        "ServerDataStore": MissingName("a server keeps its tasks in a store; open one with leyden.open_store(url)."),
        **_same("leyden.legacy", "AgentLightningServer"),
    },
    "store.base": {
        **_wrapped("interfaces", "LightningStore"),
        **_same("leyden.types", "UNSET Unset"),
        **_wrapped("store", "LightningStoreCapabilities LightningStoreStatistics is_finished is_queuing is_running"),
    },
    "store.client_server": {
        **_wrapped("store", "LightningStoreClient LightningStoreServer"),
        **missing(
            say.REQUESTS,
            "API_AGL_PREFIX API_V1_AGL_PREFIX API_V1_PREFIX AddResourcesRequest CachedStaticFiles DequeueManyRolloutsRequest "
            "DequeueRolloutRequest EnqueueManyRolloutsRequest NextSequenceIdRequest NextSequenceIdResponse PydanticUnset "
            "QueryAttemptsRequest QueryResourcesRequest QueryRolloutsRequest QuerySpansRequest QueryWorkersRequest RolloutId "
            "RolloutRequest StartAttemptRequest UpdateAttemptRequest UpdateRolloutRequest UpdateWorkerRequest "
            "WaitForRolloutsRequest",
        ),
        **missing('Leyden logs as "leyden"; use logging.getLogger("leyden").', "client_logger server_logger"),
    },
    "store.collection_based": missing(
        say.COLLECTIONS,
        "COLLECTION_STORE_ALL_METHODS COLLECTION_STORE_PUBLIC_METHODS CollectionBasedLightningStore "
        "get_current_store_methods healthcheck_before tracked",
    ),
    "store.memory": {
        **_wrapped("store", "InMemoryLightningStore"),
        "estimate_model_size": MissingName("Leyden's memory store evicts nothing; limit it with leyden.Retention."),
    },
    "store.mongo": {
        "MongoLightningStore": MissingName(
            'open PostgreSQL instead: leyden.open_store("postgresql://user@host/database").'
        )
    },
    "store.sqlite": _same("leyden.store", "SqliteLightningStore"),
    "store.threading": {"LightningStoreThreaded": f"{_HERE}.store:threaded"},
    "store.utils": {
        "LATENCY_BUCKETS": MissingName(say.METRICS),
        "UpdateAttemptStatus": MissingName(say.PROTOCOLS),
        "UpdateRolloutStatus": MissingName(say.PROTOCOLS),
        **missing(
            "the process that owns a store checks health on a schedule; `await store.sweep()` does it now.",
            "healthcheck scan_unhealthy_rollouts",
        ),
        **missing(
            "leyden.types.rollout_after_attempt says what an attempt's status makes of its rollout.",
            "propagate_status rollout_status_from_attempt",
        ),
    },
    "tracer.base": {"T_func": MissingName(say.PROTOCOLS), "BaseTracer": f"{_HERE}.tracer:Tracer"}
    | _wrapped("tracer", "Tracer clear_active_tracer get_active_tracer set_active_tracer with_active_tracer_context"),
    "tracer.agentops": {
        **_wrapped("tracer", "AgentOpsTracer"),
        "LightningSpanProcessor": "leyden.tracing:LightningSpanProcessor",
    },
    "tracer.dummy": {
        "DummySpanRecordingContext": f"{_HERE}.tracer:RecordingContext",
        **_wrapped("tracer", "DummyTracer"),
    },
    "tracer.http": {
        "HttpTracer": MissingName(
            "leyden.OtelTracer notes a model call of any HTTP client, and the gateway (leyden.LLMProxy) records its content."
        )
    },
    "tracer.otel": {
        **_wrapped("tracer", "OtelTracer STORE_WRITE_TIMEOUT_SECONDS"),
        "LightningSpanProcessor": "leyden.tracing:LightningSpanProcessor",
        "OtelSpanRecordingContext": f"{_HERE}.tracer:RecordingContext",
        "to_otel_status_code": MissingName("use opentelemetry.trace.StatusCode[name]."),
    },
    "tracer.triplet": {
        **_wrapped("adapter", "TripletExporter"),
        **_same("leyden.adapter", "RewardMatchPolicy TraceTree"),
    },
    "tracer.weave": {
        **_wrapped("tracer", "WeaveTracer"),
        "WeaveSpanRecordingContext": f"{_HERE}.tracer:RecordingContext",
        **missing(
            say.WEAVE, "WeaveTracerManagedTraceServer get_timestamp_or_throw op_name_to_func_name random_project_name"
        ),
    },
    "trainer.init_utils": {
        **_same("leyden.trainer", "build_component instantiate_component instantiate_from_spec load_class"),
        "OptionalDefaults": MissingName(say.PROTOCOLS),
    },
    "trainer.legacy": _same("leyden.legacy.trainer_legacy", "TrainerLegacy"),
    "trainer.registry": _same("leyden.trainer.component_registry", "ExecutionStrategyRegistry"),
    "trainer.trainer": {**_wrapped("trainer", "Trainer"), "ComponentSpec": MissingName(say.PROTOCOLS)},
    "types.core": {
        **_same(
            "leyden.types",
            "Attempt AttemptStatus AttemptedRollout EnqueueRolloutRequest Rollout RolloutConfig "
            "RolloutMode RolloutStatus TaskInput Worker WorkerStatus",
        ),
        **_wrapped("interfaces", "Hook ParallelWorkerBase"),
        **_wrapped("types", "Dataset FilterField FilterOptions PaginatedResult RolloutRawResult SortOptions Triplet"),
        **_wrapped("agent", "RolloutRawResultLegacy"),
        **_same("leyden.legacy", "GenericResponse RolloutLegacy Task TaskIfAny"),
    },
    "types.resources": {
        **_same("leyden.types", "LLM NamedResources Resource ResourceUnion"),
        **_wrapped("resources", "PromptTemplate ProxyLLM ResourcesUpdate"),
    },
    "types.tracer": {
        **_same("leyden.types", "AttributeValue Attributes"),
        **_wrapped(
            "types",
            "Event Link OtelResource Span SpanContext SpanCoreFields SpanLike SpanRecordingContext StatusCode TraceState "
            "TraceStatus convert_timestamp extract_extra_fields",
        ),
        **_wrapped("semconv", "SpanAttributeNames SpanNames"),
    },
    "utils.id": {"generate_id": "leyden_compat.agentlightning.instruments:generate_id"},
    "utils.metrics": {
        **_wrapped(
            "metrics",
            "ConsoleMetricsBackend LabelDict LabelKey MetricsBackend MultiMetricsBackend PrometheusMetricsBackend",
        ),
        **missing(say.METRICS, "get_prometheus_registry setup_multiprocess_prometheus shutdown_metrics"),
    },
    "utils.otel": _wrapped(
        "otel",
        "check_attributes_sanity extract_links_from_attributes extract_tags_from_attributes filter_and_unflatten_attributes "
        "filter_attributes flatten_attributes format_exception_attributes full_qualified_name get_span_processors get_tracer "
        "get_tracer_provider make_link_attributes make_tag_attributes query_linked_spans sanitize_attribute_value "
        "sanitize_attributes sanitize_list_attribute_sanity unflatten_attributes",
    ),
    "utils.otlp": missing(
        "a server of Leyden takes OpenTelemetry's own exporters at /v1/traces; use those.",
        "LightningStoreOTLPExporter PROTOBUF_CT handle_otlp_export spans_from_proto",
    ),
    "utils.server_launcher": {
        **_wrapped("serving", "LaunchMode PythonServerLauncherArgs"),
        **missing(
            say.SERVERS,
            "ChildEvent GunicornApp PythonServerLauncher noop_context run_gunicorn run_uvicorn_asyncio "
            "run_uvicorn_subprocess run_uvicorn_thread shutdown_uvicorn_server",
        ),
    },
    "utils.system_snapshot": {"system_snapshot": f"{_HERE}.instruments:system_snapshot"},
    "utils": {},
    "verl": {},
    "verl.__main__": {"main": _VERL_MAIN},
    "verl.async_server": missing(say.VLLM, "PatchedvLLMServer"),
    "verl.daemon": {
        **_same("leyden.algorithm.verl", "AgentModeDaemon"),
        **missing(say.VERL_ROWS, "get_left_padded_ids_and_attention_mask get_right_padded_ids_and_attention_mask"),
        **missing(say.VERL_TOKENS, "ids_startswith log_mismatch_detail"),
    },
    "verl.dataset": _same("leyden.algorithm.verl", "AgentDataset LoadedDataset"),
    "verl.entrypoint": {
        "TaskRunner": MissingName(say.VERL_RUN),
        "run_ppo": MissingName(say.VERL_RUN_PPO),
        "main": _VERL_MAIN,
    },
    "verl.trainer": {
        "AgentLightningTrainer": MissingName(
            say.VERL_TRAINER, module="leyden.algorithm.verl.verl_trainer", needs="verl"
        ),
        "compute_data_metrics": MissingName(say.VERL_METRICS),
    },
}

_PACKAGES: dict[str, str] = {
    "adapter": "adapter.base adapter.triplet adapter.messages",
    "algorithm": "algorithm.base algorithm.decorator algorithm.fast algorithm.apo.apo algorithm.verl.interface",
    "algorithm.apo": "algorithm.apo.apo",
    "algorithm.verl": "algorithm.verl.interface",
    "emitter": "emitter.annotation emitter.exception emitter.message emitter.object emitter.reward",
    "execution": "execution.base execution.client_server execution.events execution.inter_process execution.shared_memory",
    "litagent": "litagent.litagent litagent.decorator",
    "reward": "emitter.reward",
    "runner": "runner.agent runner.base runner.legacy",
    "store": "store.base store.client_server store.collection_based store.memory store.mongo store.sqlite store.threading",
    "tracer": "tracer.base tracer.agentops tracer.dummy tracer.otel tracer.triplet tracer.weave",
    "trainer": "trainer.trainer trainer.init_utils trainer.legacy",
    "types": "types.core types.resources types.tracer",
    "verl": "verl.async_server verl.daemon verl.dataset verl.entrypoint verl.trainer",
    "": "adapter algorithm client config emitter env_var execution litagent llm_proxy runner server store tracer trainer types",
}
"""Packages of Agent Lightning, and the modules whose names they repeat. The empty name is `agentlightning` itself."""

_EXTRA: dict[str, Names] = {
    "emitter.reward": {
        **_wrapped("emitter", "emit_annotation"),
        **_wrapped("semconv", "AGL_ANNOTATION LightningSpanAttributes RewardPydanticModel SpanNames"),
        **_wrapped("otel", "filter_and_unflatten_attributes get_tracer"),
        **_wrapped("types", "SpanCoreFields SpanLike"),
        **_wrapped("emitter", "operation"),
    },
    "algorithm.base": _wrapped("interfaces", "algo"),
    "runner": {"AgentRunnerV2": f"{_HERE}.agent:LitAgentRunner"},
    "runner.agent": {"AgentRunnerV2": f"{_HERE}.agent:LitAgentRunner"},
    "": {
        "__version__": f"{_HERE}.instruments:VERSION",
        "configure_logger": f"{_HERE}.logs:configure_logger",
        "setup_logging": f"{_HERE}.logs:setup",
        "setup_module_logging": f"{_HERE}.logs:setup_module",
    },
}
"""Names of other modules that a module imports, and that programs may import from it."""

_MISSING_MODULES: dict[str, str] = {
    "store.collection": say.COLLECTIONS,
    "store.collection.base": say.COLLECTIONS,
    "store.collection.memory": say.COLLECTIONS,
    "store.collection.mongo": say.COLLECTIONS,
}
"""Modules that Leyden does not have. Importing one raises an error with this text."""


def _modules() -> Mapping[str, ForeignModule]:
    """Return the table of Agent Lightning's modules.

    A name in `_MODULES` takes precedence over one that its package repeats from a part or that is in `_EXTRA`.
    """
    tables = {name: dict(names) for name, names in _MODULES.items()}
    for package, parts in _PACKAGES.items():
        joined: Names = {}
        for part in parts.split():
            joined |= tables[part]
        tables[package] = joined | tables.get(package, {})
    for module, names in _EXTRA.items():
        tables[module] = names | tables[module]
    modules = {f"agentlightning.{name}".rstrip("."): ForeignModule(names) for name, names in tables.items()}
    return modules | {
        f"agentlightning.{name}": ForeignModule(instead=sentence) for name, sentence in _MISSING_MODULES.items()
    }


MODULES: Mapping[str, ForeignModule] = MappingProxyType(_modules())
