"""Compare the peers' public functions and classes with those of the alias.

`differences` returns, for each function, class and method of the inventory that the alias serves, what a call written for
the newest release that has it could meet: a parameter that is missing, that stands at another place, that has another
default, or that is required here alone. For a class it also returns the attributes and properties that are missing, and
the base classes of which it is no subclass. What the alias has beside the peer's is no difference. `INSTEAD` says for
each difference what to write; `make_names_table` puts it into the page for people who migrate.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leyden_compat.agentlightning.table import MODULES as AGENT_LIGHTNING
from leyden_compat.finder import ForeignModule, load
from leyden_compat.qlib.table import MODULES as QLIB

HERE = Path(__file__).parent
CONSTANTS = {"logging.INFO": "20"}
"""Values of the names that stand for defaults in the peer's source code."""
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_AGENT_LIGHTNING: dict[str, str] = {
    "APO.compute_textual_gradient APO.evaluate_prompt_on_batch APO.get_rollout_results APO.get_seed_prompt_template "
    "APO.textual_gradient_and_apply_edit": "Subclass `leyden.APO` and override its own steps: `help(leyden.APO)` lists them.",
    "APO.run Baseline.run": "An algorithm asks for the store and the gateway: `self.get_store()`, `self.get_llm_proxy()`.",
    "AgentOpsTracer.instrument AgentOpsTracer.uninstrument WeaveTracer.instrument WeaveTracer.uninstrument": (
        "Leave this out: a tracer instruments while a trace is open."
    ),
    "Algorithm.get_client": "Work with the store: `self.get_store()`; a task server is `leyden.legacy.AgentLightningServer`.",
    "DummySpanRecordingContext OtelSpanRecordingContext.get_otel_span WeaveSpanRecordingContext": (
        "Let `tracer.operation_context(name)` make it, and read `get_recorded_span()`."
    ),
    "LoadedDataset instantiate_component": "Give it by place.",
    "AgentDataset.filter_overlong_prompts LoadedDataset.dataframe": (
        "Leave this out: the data set of verl 0.9 reads its own settings, and `dataset[index]` its tasks."
    ),
    "AgentModeDaemon AgentModeDaemon.adapter AgentModeDaemon.backend_llm_server_addresses AgentModeDaemon.image_base_dir "
    "AgentModeDaemon.is_train AgentModeDaemon.llm_proxy AgentModeDaemon.llm_timeout_seconds "
    "AgentModeDaemon.mini_batch_size AgentModeDaemon.mode AgentModeDaemon.pad_token_id AgentModeDaemon.processor "
    "AgentModeDaemon.proxy_port AgentModeDaemon.reward_fillna_value AgentModeDaemon.run_until_all_finished "
    "AgentModeDaemon.server AgentModeDaemon.server_port AgentModeDaemon.store AgentModeDaemon.tokenizer "
    "AgentModeDaemon.trace_aggregator AgentModeDaemon.train_information AgentModeDaemon.train_rollout_n": (
        "VERL makes the daemon from its configuration; pass a subclass as `VERL(daemon_cls=...)`, and override `run_batch`."
    ),
    "LLMProxy.restart": "Call `restart()`: the port stays.",
    "LLMProxy.server_launcher LLMProxy.server_launcher_args": "Read `proxy.host` and `proxy.port`.",
    "LegacyAgentRunner TrainerLegacy": "Call its methods; `isinstance` and `issubclass` with the new bases say no.",
    "LightningSpanProcessor LightningSpanProcessor.attempt_id LightningSpanProcessor.disable_store_submission "
    "LightningSpanProcessor.rollout_id LightningSpanProcessor.spans LightningSpanProcessor.store "
    "LightningSpanProcessor.with_context": "Open a trace with `OtelTracer`, and read `get_last_trace()`.",
    "SharedMemoryExecutionStrategy": "The algorithm is in the main thread unless you give `main_thread`.",
    "TraceToMessages.get_tool_calls": "Call `leyden.adapter.read_tool_call(span)` for each span.",
    "OperationContext.tracer": "Call `get_active_tracer()`.",
    "TraceTree": "An empty tuple stands for no children.",
    "TraceTree.extract_prompt_image_urls TraceTree.find_llm_calls TraceTree.match_rewards TraceTree.maybe_reward_dict "
    "TraceTree.span_to_triplet TraceTree.to_trajectory": "Call `TracerTraceToTriplet(...).adapt(spans)`.",
    "WeaveTracer.complete_call_callback WeaveTracer.complete_call_handler WeaveTracer.convert_call_to_span "
    "WeaveTracer.partial_call_callback WeaveTracer.partial_call_handler WeaveTracer.weave_user_settings": (
        "Read the spans of `get_last_trace()`."
    ),
    "main": "Call `agentlightning.verl.entrypoint.main()`, which reads the command line.",
    "build_component": "Leave the texts of its errors out.",
}
_BY_PLACE = "Give it by place, as Qlib's own code does."
_QLIB: dict[str, str] = {
    "Callback.load_state_dict Callback.on_fit_end Callback.on_fit_start Callback.on_iter_end Callback.on_iter_start "
    "Callback.on_test_end Callback.on_test_start Callback.on_train_end Callback.on_train_start Callback.on_validate_end "
    "Callback.on_validate_start Checkpoint.on_fit_end Checkpoint.on_iter_end EarlyStopping.load_state_dict "
    "EarlyStopping.on_fit_start EarlyStopping.on_validate_end MetricsWriter.on_train_end MetricsWriter.on_validate_end": (
        "Name the parameters of your own methods as you like: they are given by place."
    ),
    "CategoricalActionInterpreter.interpret CurrentStepStateInterpreter.interpret DummyStateInterpreter.interpret "
    "EnvWrapper.step FullHistoryStateInterpreter.interpret GymSpaceValidationError GymSpaceValidationError.x LogBuffer.load_state_dict "
    "LogCollector.add_any LogCollector.add_array LogCollector.add_scalar LogCollector.add_string "
    "LogWriter.load_state_dict LogWriter.on_env_reset LogWriter.on_env_step SingleAssetOrderExecutionSimple.step "
    "Trainer.load_state_dict TrainingVesselBase.load_state_dict TwapRelativeActionInterpreter.interpret is_invalid": _BY_PLACE,
    "ActionInterpreter AllOne CategoricalActionInterpreter CurrentStepStateInterpreter DummyStateInterpreter "
    "FullHistoryStateInterpreter LogBuffer PAPenaltyReward PPOReward RewardCombination StateInterpreter "
    "TwapRelativeActionInterpreter": (
        "Ask `isinstance` with the base in `leyden.rl`, or for a method: classes that Leyden has itself are no subclasses of "
        "the wrappers that programs subclass."
    ),
    "DataQueue.dataset DataQueue.producer_num_workers DataQueue.repeat DataQueue.shuffle": (
        "Keep what you gave the queue."
    ),
    "EarlyStopping.best_weights EarlyStopping.monitor_op": "Read `early_stopping.state_dict()`.",
    "MetricsWriter.train_records MetricsWriter.valid_records": "Read the files that it writes.",
    "SingleAssetOrderExecutionSimple.feature_columns_today SingleAssetOrderExecutionSimple.feature_columns_yesterday "
    "SingleAssetOrderExecutionSimple.market_price SingleAssetOrderExecutionSimple.market_vol "
    "SingleAssetOrderExecutionSimple.market_vol_limit": "Read the simulator's state: `get_state()`.",
    "DataQueue.done DataQueue.put": "Iterate over the queue, which ends by itself; add items with `put(item, timeout_seconds=...)`.",
    "EarlyStopping.get_monitor_value": "Log the value in a reward or simulator, and give its name as `monitor`.",
    "EnvWrapper.render": "Leave `mode` out.",
    "LogBuffer.log_episode": "Read `log_buffer.episode_metrics()` in its callback.",
    "SingleAssetOrderExecutionSimple": "An empty tuple stands for no columns.",
    "TrainingVessel": "None stands for 20,000 transitions of tianshou's policies; PPO's buffer grows.",
}
INSTEAD: dict[str, dict[str, str]] = {"agentlightning": _AGENT_LIGHTNING, "qlib": _QLIB}
"""What to write instead, by the places (in one text) that the sentence is for."""

TABLES: dict[str, Mapping[str, ForeignModule]] = {"agentlightning": AGENT_LIGHTNING, "qlib": QLIB}


def inventory(package: str) -> dict[str, Any]:
    """Return the inventory that `make_inventory` wrote for a package."""
    return json.loads((HERE / f"{package}.json").read_text())


@functools.cache
def differences(package: str) -> dict[str, str]:
    """Return the differences by "name" of a function or class, or "Class.method"."""
    found: dict[str, str] = {}
    for module, names in inventory(package)["modules"].items():
        for name, described in names.items():
            target = TABLES[package][module].names.get(name)
            if isinstance(target, str) and described["kind"] != "value":
                for place, peers, ours in callables(name, described, load(target)):
                    if faults := compare(peers, ours):
                        found.setdefault(place, "; ".join(faults))
                for place, fault in attributes(name, described, load(target)):
                    found.setdefault(place, fault)
                if (faults := bases(package, described, load(target))) and faults[0] not in found.get(name, ""):
                    found[name] = "; ".join([*([found[name]] if name in found else []), *faults])
    return dict(sorted(found.items()))


def attributes(name: str, described: dict[str, Any], ours: Any) -> Iterator[tuple[str, str]]:
    """Yield (place, fault) for the attributes of a class that instances lack here."""
    if not isinstance(ours, type) or hasattr(ours, "__getattr__"):
        return
    plain = [member for member, signature in described.get("members", {}).items() if not signature]
    fields = {*getattr(ours, "model_fields", ()), *(key for kind in ours.__mro__ for key in annotated(kind))}
    for attribute in (*plain, *described.get("attributes", ())):
        if not (attribute in fields or hasattr(ours, attribute) or is_attribute(ours, attribute)):
            yield f"{name}.{attribute}", "missing"


def annotated(kind: type) -> Mapping[str, Any]:
    return vars(kind).get("__annotations__", {})


def bases(package: str, described: dict[str, Any], ours: Any) -> list[str]:
    """Return the public base classes of a class of the peer that its counterpart here does not have."""
    if not isinstance(ours, type):
        return []
    served = {
        name: target
        for foreign in TABLES[package].values()
        for name, target in foreign.names.items()
        if isinstance(target, str)
    }
    names = [base.partition("[")[0] for base in described.get("bases", ())]
    known = [(name, load(served[name])) for name in names if name in served]
    return list(
        dict.fromkeys(
            f"no subclass of `{name}`" for name, base in known if isinstance(base, type) and not is_below(ours, base)
        )
    )


def is_below(ours: type, base: type) -> bool:
    """Return whether a class is a subclass, as far as Python can say: of a protocol with attributes it cannot."""
    try:
        return issubclass(ours, base)
    except TypeError:
        return True


def callables(name: str, described: dict[str, Any], ours: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, the peer's signature, our callable) of a function, or of a class and its methods."""
    if described["signature"]:
        yield name, described["signature"].replace("(self, ", "("), ours
    if isinstance(ours, type) and not hasattr(ours, "__getattr__"):
        for member, signature in described.get("members", {}).items():
            if signature and not (signature == "(self)" and is_attribute(ours, member)):
                yield f"{name}.{member}", signature.replace("(cls, ", "("), inspect.getattr_static(ours, member, None)


def is_attribute(owner: type, name: str) -> bool:
    """Return whether instances have a property or an attribute of this name."""
    if isinstance(inspect.getattr_static(owner, name, None), property):
        return True
    sources = [source_of(kind) for kind in owner.__mro__ if kind.__module__.startswith(("leyden.", "leyden_compat."))]
    return any(re.search(rf"self\.{name}\b[^=\n]*= ", source) for source in sources)


@functools.cache
def source_of(kind: type) -> str:
    return inspect.getsource(kind)


def compare(peers: str, ours: Any) -> list[str]:
    """Return what a call with the peer's parameters meets here, in words."""
    if ours is None:
        return ["missing"]
    here = inspect.signature(getattr(ours, "__func__", ours)).parameters.values()
    have = [parameter for parameter in here if parameter.name not in ("self", "cls")]
    by_name = {parameter.name: parameter for parameter in have}
    places = [parameter.name for parameter in have if parameter.kind in BY_PLACE]
    kinds = {parameter.kind for parameter in have}
    there = parameters(peers)
    takes_all = "**" in peers
    known = {name for name, _, _ in there}
    faults: list[str] = []
    renamed: set[str] = set()
    for place, (name, is_placed, default) in enumerate(there):
        at_place = places[place] if is_placed and place < len(places) else None
        if name not in by_name:
            if at_place is not None and at_place not in known:
                renamed.add(at_place)
                faults.append(f"`{name}` is called `{at_place}`")
            elif inspect.Parameter.VAR_KEYWORD not in kinds:
                faults.append(f"no `{name}`")
            continue
        if is_placed and at_place != name and inspect.Parameter.VAR_POSITIONAL not in kinds:
            faults.append(f"`{name}` by name only" if name not in places else f"`{name}` at another place")
        value = by_name[name].default
        if default is not None and value is inspect.Parameter.empty:
            faults.append(f"`{name}` is required")
        elif default is not None and not is_same(value, default):
            faults.append(f"`{name}={default}` is `{name}={value!r}`")
    faults += [
        f"`{parameter.name}` is required"
        for parameter in have
        if not takes_all
        and parameter.name not in known | renamed
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in (*BY_PLACE, inspect.Parameter.KEYWORD_ONLY)
    ]
    return faults


def is_same(value: Any, default: str) -> bool:
    """Return whether a default is the one that the peer's source code has."""
    named = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
    return default == named or CONSTANTS.get(default, default) == named


def parameters(signature: str) -> list[tuple[str, bool, str | None]]:
    """Return (name, whether it may be given by place, default as text), without `self`, `*args` and `**kwargs`."""
    [function] = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    placed = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(placed) - len(arguments.defaults)) + arguments.defaults
    found = [
        *((argument.arg, True, default) for argument, default in zip(placed, defaults, strict=True)),
        *((a.arg, False, default) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)),
    ]
    return [
        (name, is_placed, None if default is None else ast.unparse(default))
        for name, is_placed, default in found
        if name != "self"
    ]


if __name__ == "__main__":
    for package in TABLES:
        for place, faults in differences(package).items():
            print(f"{package}, {place}: {faults}")
