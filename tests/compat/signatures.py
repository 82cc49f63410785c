"""Compare the parameters of the peers' public functions and methods with those of the alias.

`differences` returns, for each function, class and method of the inventory that the alias serves, what a call written for
the newest release that has it could meet: a parameter that is missing, that stands at another place, that has another
default, or that is required here alone. Parameters that the alias has beside the peer's are no difference. `INSTEAD`
says for each difference what to write; `make_names_table` puts it into the page for people who migrate.
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

from leyden.compat.agentlightning.table import MODULES as AGENT_LIGHTNING
from leyden.compat.finder import ForeignModule, load
from leyden.compat.qlib.table import MODULES as QLIB

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
    "ExecutionEvent.clear ThreadingEvent.clear": "A stop signal stays set; make a new one.",
    "FunctionalAlgorithm LoadedDataset algo instantiate_component": "Give it by place.",
    "LLMProxy.restart": "Call `restart()`: the port stays.",
    "LightningSpanProcessor LightningSpanProcessor.attempt_id LightningSpanProcessor.disable_store_submission "
    "LightningSpanProcessor.rollout_id LightningSpanProcessor.spans LightningSpanProcessor.store "
    "LightningSpanProcessor.with_context": "Open a trace with `OtelTracer`, and read `get_last_trace()`.",
    "LightningStore.add_otel_span LightningStore.otlp_traces_endpoint LightningStore.query_rollouts": (
        "A store of your own needs neither; the stores that the alias serves have them."
    ),
    "ParallelWorkerBase.run Runner.run": "Call `await runner.iter()` or `await runner.step(task)`.",
    "SharedMemoryExecutionStrategy": "The algorithm is in the main thread unless you give `main_thread`.",
    "TraceToMessages.get_tool_calls": "Call `leyden.adapter.read_tool_call(span)` for each span.",
    "TraceTree": "An empty tuple stands for no children.",
    "TraceTree.extract_prompt_image_urls TraceTree.find_llm_calls TraceTree.match_rewards TraceTree.maybe_reward_dict "
    "TraceTree.span_to_triplet TraceTree.to_trajectory": "Call `TracerTraceToTriplet(...).adapt(spans)`.",
    "WeaveTracer.complete_call_callback WeaveTracer.complete_call_handler WeaveTracer.convert_call_to_span "
    "WeaveTracer.partial_call_callback WeaveTracer.partial_call_handler": "Read the spans of `get_last_trace()`.",
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
    "EnvWrapper.step FullHistoryStateInterpreter.interpret GymSpaceValidationError LogBuffer.load_state_dict "
    "LogCollector.add_any LogCollector.add_array LogCollector.add_scalar LogCollector.add_string "
    "LogWriter.load_state_dict LogWriter.on_env_reset LogWriter.on_env_step SingleAssetOrderExecutionSimple.step "
    "Trainer.load_state_dict TrainingVesselBase.load_state_dict TwapRelativeActionInterpreter.interpret is_invalid": _BY_PLACE,
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
    return dict(sorted(found.items()))


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
    sources = [source_of(kind) for kind in owner.__mro__ if kind.__module__.startswith("leyden.")]
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
