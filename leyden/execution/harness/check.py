"""Try a harness: rollouts against a model that calls its shell tool once, and what was recorded of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from leyden._lib.json import Json
from leyden.adapter import turn_merges
from leyden.execution.harness.harness import Harness, HarnessProgram
from leyden.execution.runner import LitAgentRunner
from leyden.execution.runner.process import ProcessOutput
from leyden.gateway import LLMProxy
from leyden.store import open_store
from leyden.testing import FakeUpstream, Reply, ToolCall
from leyden.types import RolloutConfig, Span, semconv

ANSWER = "answer.txt"
TASK = f"Write the number 42 into the file {ANSWER} in your working directory, and nothing else."
_WRITTEN = "answer-written"
_LINE = f"echo 42 > {ANSWER}; echo {_WRITTEN}"


@dataclass(slots=True)
class Checked:
    """The record of a harness's rollouts against a fake model, counted."""

    rollouts: int
    wrote: int = 0
    """The rollouts in which the program ran the command that the model asked for."""
    served: int = 0
    """The calls that the model answered."""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The recorded calls: tokens of prompt and response, the error of one that failed, and why the tokens of
    another were refused."""
    wrong_ids: int = 0
    """The recorded calls whose response ids are not those of the model."""
    continued: int = 0
    merged: int = 0
    """The turns that continue an earlier call, and those of them whose ids do."""
    splits: list[str] = field(default_factory=list[str])
    """Why the others do not, each reason once."""
    foreign_spans: int = 0
    """The spans that the program itself sent."""
    output: str = ""
    """The end of what the program wrote, for a rollout that went wrong."""

    @property
    def trouble(self) -> str:
        """Why the harness is not fit for training; "" if it is."""
        if not self.served:
            return "it made no call to the address that it was given"
        if len(self.calls) < self.served:
            return f"{self.served - len(self.calls)} of {self.served} calls were not recorded"
        if self.wrong_ids or any(call["refused"] for call in self.calls):
            return "the tokens of some calls are not exact"
        if self.wrote < self.rollouts:
            return f"in {self.rollouts - self.wrote} of {self.rollouts} it did not run the command that the model asked for"
        return ""


def scripted_model(kind: HarnessProgram, line: str = "") -> Any:
    """Return the reply function of a model that asks for one line of shell, in the harness's way, and then ends.

    line: what to do besides writing the answer.
    """
    line += _LINE

    def reply(body: dict[str, Any]) -> str | Reply:
        tools: list[Json] = body.get("tools") or []
        names = [(tool.get("function") or tool).get("name") for tool in tools]
        turns: Any = body.get("messages") or body.get("input") or []
        seen = json.dumps(turns[-3:])  # the newest, because a system prompt has examples
        if _WRITTEN in seen.replace(line, "").replace(json.dumps(line)[1:-1], ""):
            return f"Done: {_WRITTEN}."
        if kind.shell in names:
            return Reply(calls=(ToolCall(kind.shell, json.dumps(kind.shell_arguments(line))),))
        return "ok" if kind.shell_text is None else kind.shell_text(line)

    return reply


async def check(
    kind: HarnessProgram, program: Path, *, timeout_seconds: float = 180.0, rollouts: int = 1, concurrency: int = 1
) -> Checked:
    """Run a harness against a fake model, and return what was recorded.

    timeout_seconds: for each rollout.
    """
    checked = Checked(rollouts)

    def reward(output: ProcessOutput) -> float:
        assert output.folder is not None
        file = output.folder / ANSWER
        wrote = file.exists() and file.read_text().strip() == "42"
        checked.wrote += wrote
        return float(wrote)

    async with (
        FakeUpstream(reply=scripted_model(kind)) as model,
        open_store("memory://") as store,
        LLMProxy(model_list=[model.llm()], store=store) as proxy,
    ):
        with TemporaryDirectory(prefix="leyden-") as folder:
            agent = Harness(kind.name, program=program, folder=folder, reward=reward)
            await store.add_resources({"llm": proxy.as_resource()})
            config = RolloutConfig(timeout_seconds=timeout_seconds)
            queued = [await store.enqueue_rollout(TASK, config=config) for _ in range(rollouts)]
            runner: LitAgentRunner[Any] = LitAgentRunner(max_rollouts=rollouts, concurrency=concurrency)
            async with runner.run_context(agent=agent, store=store):
                await runner.iter()
        truth = {call.response_id: list(call.response_ids) for call in model.calls}
        checked.served = len(model.calls)
        for rollout in queued:
            spans = await store.query_spans(rollout.rollout_id)
            merges = turn_merges(spans)
            checked.continued, checked.merged = checked.continued + merges.continued, checked.merged + merges.merged
            reasons = [f"{split.reason}: {split.detail}" for split in merges.splits]
            checked.splits += [reason for reason in dict.fromkeys(reasons) if reason not in checked.splits]
            for span in spans:
                _add(checked, span, truth)
    return checked


def _add(checked: Checked, span: Span, truth: Mapping[str, list[int]]) -> None:
    """Add what a span tells, beside the response ids that the model drew, by the id of the response."""
    attributes, tokens = span.attributes, span.tokens
    if span.name == semconv.PROCESS:
        ends = [str(attributes.get(name, ""))[-1500:] for name in (semconv.PROCESS_STDOUT, semconv.PROCESS_STDERR)]
        checked.output = "\n".join(end for end in ends if end)
    elif span.name == semconv.MODEL_CALL:
        if tokens is not None:
            drawn = truth.get(str(attributes.get(semconv.GEN_AI_RESPONSE_ID)))
            checked.wrong_ids += drawn != list(tokens.response_ids)
        failed = span.status.status_code == "ERROR"
        checked.calls.append(
            {
                "prompt_tokens": 0 if tokens is None else len(tokens.prompt_ids),
                "response_tokens": 0 if tokens is None else len(tokens.response_ids),
                "error": span.status.description if failed else None,
                "refused": None if failed else attributes.get(semconv.TOKENS_REFUSED),
            }
        )
    elif not span.name.startswith("leyden."):
        checked.foreign_spans += 1
