"""The environment of a program: variables, and two files in a private folder.

To add a variable, add a line to `variables`. The module knows resources and addresses, and starts no process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from opentelemetry import trace as otel_trace

from leyden._lib.host.orphans import RUNNER_MARK
from leyden.dialects.pinned_sampling import pinned_part
from leyden.execution.runner.process.endpoint import AttemptReports
from leyden.execution.runner.process.program import DIRECTORY
from leyden.execution.sandbox import harmless_variables
from leyden.tracing.instrumentation import CallRoute
from leyden.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, semconv

_NOT_INHERITED = ("LEYDEN_STORE_TOKEN", RUNNER_MARK)
"""Variables of the runner that the program must not have. The first would let an agent change other records. By the
second the runner's parent would kill the program before its supervisor can end it."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The private folder of an attempt, with its task and its resources in JSON."""

    path: Path

    @property
    def task(self) -> Path:
        return self.path / "task.json"

    @property
    def resources(self) -> Path:
        """The file with the resources by name, each model with the attempt's own address."""
        return self.path / "resources.json"

    def write(self, task: Any, resources: NamedResources) -> None:
        """Write both files. Raise TypeError for a task that is no JSON value."""
        self.task.write_text(json.dumps(task, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
        plain = {name: resource.model_dump(mode="json") for name, resource in resources.items()}
        self.resources.write_text(json.dumps(plain) + "\n")


def own_resources(resources: NamedResources, rollout: AttemptedRollout, *, pin_sampling: bool) -> NamedResources:
    """Return the resources with the attempt's own address in place of the gateway's, which may pin their sampling."""
    own = dict(resources)
    for name, each in resources.items():
        if isinstance(each, ProxyLLM):
            llm = each.with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
            part = pinned_part(llm.sampling_parameters) if pin_sampling else ""
            key = f"{llm.api_key};{part.removesuffix('/')}" if part and llm.api_key else llm.api_key
            address = f"{llm.endpoint.removesuffix('v1')}{part}v1"
            own[name] = llm.model_copy(update={"endpoint": address, "api_key": key})
    return own


def variables(
    folder: Folder,
    resources: NamedResources,
    rollout: AttemptedRollout,
    reports: AttemptReports,
    changes: Mapping[str, str | None],
    *,
    sandboxed: bool = False,
) -> dict[str, str]:
    """Return the program's environment: this process's variables (of which a sandbox has only harmless ones), then the
    first model's, the attempt's, and last the user's changes, in which None removes a variable. TRACEPARENT makes the
    spans that the program sends to the OTLP endpoint children of the span that is current in the caller.
    """
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    merged: dict[str, str | None] = {**(harmless_variables(inherited) if sandboxed else inherited)}
    if llm := next((resource for resource in resources.values() if isinstance(resource, LLM)), None):
        route = CallRoute(*ids, base_url=llm.endpoint, api_key=llm.api_key)
        merged |= {**route.environment(), "LEYDEN_MODEL": llm.model}
    step = otel_trace.get_current_span().get_span_context()
    marks = [
        f"{name}={quote(each, safe='')}"
        for name, each in zip((semconv.ROLLOUT_ID, semconv.ATTEMPT_ID), ids, strict=True)
    ]
    others = os.environ.get("OTEL_RESOURCE_ATTRIBUTES")
    merged |= {
        "LEYDEN_ROLLOUT_ID": rollout.rollout_id,
        "LEYDEN_ATTEMPT_ID": rollout.attempt.attempt_id,
        DIRECTORY: str(folder.path),
        "LEYDEN_TASK_FILE": str(folder.task),
        "LEYDEN_RESOURCES_FILE": str(folder.resources),
        "LEYDEN_REWARD_URL": reports.reward_url,
        "TRACEPARENT": f"00-{step.trace_id:032x}-{step.span_id:016x}-01",
        "OTEL_EXPORTER_OTLP_ENDPOINT": reports.url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        # ours last, because the last of two equal names counts
        "OTEL_RESOURCE_ATTRIBUTES": ",".join([others, *marks] if others else marks),
    }
    merged |= changes
    return {name: value for name, value in merged.items() if value is not None}
