"""Run rollouts of a harness whose model sends subagents, fills the context, refuses and breaks off, and print the
roles of its calls beside the model's own log as JSON. Run without a network, by test_roles.py.

The truth is the model's: it knows what it was asked by marks that it plants itself, and by the harness's own words,
which `HABITS` has, read from its requests by hand.

Arguments: the harness, the path of its command, how many rollouts at most, and after how many seconds no more begin.
"""

import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leyden as ly
from leyden import semconv
from leyden.adapter import call_roles
from leyden.adapter.calls import model_calls
from leyden.execution.harness import HarnessProgram, harness_program
from leyden.testing import FakeUpstream, Misbehaviour, Reply, ToolCall
from leyden.types import RolloutConfig

AT_ONCE = 4


def nothing(_: Path, __: dict[str, str]) -> None: ...


@dataclass(frozen=True)
class Habits:
    """How a harness sends subagents, asks for titles and summaries, and is made to ask for a summary early."""

    subagent: Callable[[str], tuple[str, Mapping[str, Any]]] | None = None
    """The tool call that sends a subagent with a prompt."""
    wait: Callable[[str], tuple[str, Mapping[str, Any]]] | None = None
    """The tool call that waits for it, of the text of the results."""
    title: str | None = None
    """Words of the instructions of a call for a title."""
    summary: str | None = None
    """Words of the instructions, or of the last message, of a call for a summary."""
    big: int = 0
    """Bytes of output that make it ask for a summary."""
    window: int = 0
    """Characters of a prompt beyond which the model refuses, for a harness that asks for a summary only then."""
    survives_cuts: bool = True
    """Whether it goes on after a stream that broke off; else only its last answer does."""
    prepare: Callable[[Path, dict[str, str]], None] = nothing
    arguments: tuple[str, ...] = ()


def opencode_limits(home: Path, env: dict[str, str]) -> None:
    models = {"fake": {"limit": {"context": 75_000, "output": 2_000}}}
    env["OPENCODE_CONFIG_CONTENT"] = json.dumps({"provider": {"leyden": {"models": models}}})


def claude_limits(home: Path, env: dict[str, str]) -> None:
    env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = "125000"


def qwen_limits(home: Path, env: dict[str, str]) -> None:
    file = home / ".qwen" / "settings.json"
    chat = {"model": {"chatCompression": {"contextPercentageThreshold": 0.75}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | chat))


def pi_limits(home: Path, env: dict[str, str]) -> None:
    file = home / ".pi" / "models.json"
    providers = json.loads(file.read_text())
    providers["providers"]["leyden"]["models"][0]["contextWindow"] = 24_000
    file.write_text(json.dumps(providers))
    (home / ".pi" / "settings.json").write_text('{"compaction": {"reserveTokens": 4000, "keepRecentTokens": 1000}}')


def hermes_limits(home: Path, env: dict[str, str]) -> None:
    file = home / ".hermes" / "config.yaml"
    file.write_text(file.read_text() + "  context_length: 120000\ncompression:\n  threshold: 0.5\n")


def continue_limits(home: Path, env: dict[str, str]) -> None:
    file = home / "continue.yaml"
    settings = json.loads(file.read_text())
    settings["models"][0]["defaultCompletionOptions"] = {"contextLength": 9_000, "maxTokens": 1_000}
    file.write_text(json.dumps(settings))


HABITS = {
    "opencode": Habits(
        subagent=lambda text: ("task", {"description": "count", "prompt": text, "subagent_type": "general"}),
        title="You are a title generator",
        summary="You are a context summarization agent",
        big=25_000,
        prepare=opencode_limits,
    ),
    "claude-code": Habits(
        subagent=lambda text: ("Agent", {"description": "count", "prompt": text, "subagent_type": "general-purpose"}),
        summary="CRITICAL: Respond with TEXT ONLY",
        big=29_000,
        prepare=claude_limits,
    ),
    "qwen-code": Habits(
        subagent=lambda text: ("agent", {"description": "count", "prompt": text, "subagent_type": "general-purpose"}),
        summary="You are the component that summarizes internal chat history",
        big=20_000,
        survives_cuts=False,
        prepare=qwen_limits,
    ),
    "codex": Habits(
        subagent=lambda text: ("multi_agent_v1__spawn_agent", {"message": text}),
        wait=lambda said: (
            "multi_agent_v1__wait_agent",
            {"targets": re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", said)[-1:]},
        ),
        summary="CONTEXT CHECKPOINT COMPACTION",
        big=9_000,
        arguments=("-c", "model_auto_compact_token_limit=52000"),
    ),
    "pi": Habits(summary="context summarization assistant", big=20_000, window=40_000, prepare=pi_limits),
    "cline": Habits(
        subagent=lambda text: ("spawn_agent", {"systemPrompt": "You count lines.", "task": text}), survives_cuts=False
    ),
    "hermes": Habits(
        subagent=lambda text: ("delegate_task", {"goal": text}),
        title="Generate a short, descriptive title",
        summary="You are a summarization agent",
        big=20_000,
        prepare=hermes_limits,
    ),
    "continue": Habits(summary="prior to compaction", big=20_000, prepare=continue_limits),
}


ROLES_OF = {"title": "auxiliary", "summary": "compaction"}


class Configured(ly.Harness):
    def prepare(self, task: Any, directory: Path, env: dict[str, str]) -> Sequence[str]:
        command = super().prepare(task, directory, env)
        HABITS[self.kind.name].prepare(directory / "home", env)
        return command


@dataclass
class Script:
    """What the model does in one conversation, step by step; a step whose answer is lost is done again."""

    steps: list[str]
    done: int = 0
    waits: int = 0


def flat(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or [])


@dataclass
class Model:
    """The answers of the model of one harness, its faults, and its log."""

    kind: HarnessProgram
    draw: random.Random
    scripts: dict[str, Script] = field(default_factory=dict[str, Script])
    log: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The kind and the role of each answer, in the order in which they were served."""
    cut: set[int] = field(default_factory=set[int])
    """The requests whose answers break off."""
    used: set[str] = field(default_factory=set[str])
    """The summaries that the prompt of a later answer has."""
    last_fault: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def habits(self) -> Habits:
        return HABITS[self.kind.name]

    def asked(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """Return what a request is, and the mark of its conversation."""
        messages = body["messages"]
        system = "\n".join(flat(each) for each in messages if each["role"] in ("system", "developer"))
        others = "\n".join(flat(each) for each in messages if each["role"] not in ("system", "developer"))
        found = re.search(r"(SUB)?TASK-\d+(-\d+)?", others)
        mark = "" if found is None else found[0]
        habits = self.habits
        if habits.title and habits.title in system:
            return "title", mark
        if habits.summary and habits.summary in system + flat(messages[-1]):
            return "summary", mark
        return ("subagent" if mark.startswith("SUB") else "agent" if mark else "unknown"), mark

    def fault(self, body: dict[str, Any]) -> Misbehaviour | None:
        what, mark = self.asked(body)
        if what in ("agent", "subagent") and self.last_fault.pop(mark, None) is None and self.draw.random() < 0.3:
            script = self.scripts.get(mark)
            is_last = what == "agent" and script is not None and script.steps[script.done :] in ([], ["ends"])
            may_cut = self.habits.survives_cuts or is_last
            kind = self.last_fault[mark] = self.draw.choice(["refused", "cut"] if may_cut else ["refused"])
            if kind == "refused":
                return Misbehaviour(status=self.draw.choice([500, 503, 529]))
            self.cut.add(id(body))
            return Misbehaviour(close_after_chunks=self.draw.randint(1, 6))
        return None

    def reply(self, body: dict[str, Any]) -> Reply:
        what, mark = self.asked(body)
        said = "".join(map(flat, body["messages"]))
        if self.habits.window and what == "agent" and len(said) > self.habits.window:
            raise ValueError(f"the maximum context length is {self.habits.window} tokens; the prompt has {len(said)}")
        is_cut = id(body) in self.cut
        self.cut.discard(id(body))
        if what in ("agent", "subagent") and not is_cut:
            self.used.update(re.findall(r"SUM-\d+", said))
        self.log.append(("cut stream", "discarded") if is_cut else (what, ROLES_OF.get(what, what)))
        if what == "title":
            return Reply(f"Fixing {mark} of the parser")
        if what == "summary":
            text = f"{mark}: the user wants the failing test in parser.py mended. SUM-{len(self.log)}: nothing is changed yet."
            return Reply(f"<summary>{text}</summary>" if self.draw.random() < 0.7 else text)
        if what == "unknown":
            return Reply("ok")
        script = self.scripts.setdefault(mark, self.new_script(mark))
        step = script.steps[min(script.done, len(script.steps) - 1)]
        answer = self.step(step, script, mark, body)
        if not is_cut and step != "waits":
            script.done += 1
        if is_cut and not answer.text:  # some chunks, so that there is a stream to cut
            answer = Reply("I look at the next part of the file.", calls=answer.calls)
        return answer

    def new_script(self, mark: str) -> Script:
        if mark.startswith("SUB"):
            return Script([*["shell"] * self.draw.randint(0, 2), "found"])
        steps = ["shell"] * self.draw.randint(1, 2)
        steps += ["sends", "waits", "shell"] if self.habits.subagent else []
        steps += ["sends", "waits"] if self.habits.subagent and self.draw.random() < 0.6 else []
        steps += ["big", "big", "shell"] if self.habits.big else []
        return Script([*[each for each in steps if self.habits.wait or each != "waits"], "ends"])

    def step(self, step: str, script: Script, mark: str, body: Mapping[str, Any]) -> Reply:
        number = script.done
        said = self.draw.choice(["", "", f"I do step {number} of {mark} now."])
        if step == "ends":
            return Reply(f"Done with {mark}: the test passes.")
        if step == "found":
            words = [f"{mark} found {self.draw.randint(1000, 9999)} lines in parser.py.", f"{mark}: nothing found."]
            return Reply(self.draw.choice([*words, f'{{"mark": "{mark}", "lines": {self.draw.randint(10, 99)}}}']))
        if step == "sends" and self.habits.subagent:
            text = f"SUB{mark}-{number}: count the lines of parser.py and report them."
            name, arguments = self.habits.subagent(text)
            return Reply(said, calls=(ToolCall(name, json.dumps(arguments)),))
        if step == "waits" and self.habits.wait:
            last = flat(body["messages"][-1])
            script.waits += 1
            if script.waits % 2 == 0 or script.waits > 20:
                script.done += 1
                return self.step(script.steps[script.done], script, mark, body)
            name, arguments = self.habits.wait(last)
            return Reply(said, calls=(ToolCall(name, json.dumps(arguments)),))
        line = f"echo step-{number}-of-{mark}"
        if step == "big":
            line += f"; head -c {self.habits.big} /dev/zero | tr '\\0' x | fold -w 100"
        return Reply(said, calls=(ToolCall(self.kind.shell, json.dumps(self.kind.shell_arguments(line))),))


async def some(name: str, program: str, first: int) -> dict[str, Any]:
    """Run four rollouts at once, the first of which has this number."""
    kind = harness_program(name)
    model = Model(kind, random.Random(f"{name} {first}"))
    async with (
        FakeUpstream(reply=model.reply, fault=model.fault) as server,
        ly.open_store("memory://") as store,
        ly.LLMProxy(model_list=[server.llm()], store=store) as proxy,
    ):
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            agent = Configured(
                name, program=program, folder=folder, arguments=HABITS[name].arguments, reward=lambda _: 1.0
            )
            await store.add_resources({"llm": proxy.as_resource()})
            config = RolloutConfig(timeout_seconds=240)
            tasks = [f"TASK-{first + number}: mend the failing test in parser.py." for number in range(AT_ONCE)]
            queued = [await store.enqueue_rollout(task, config=config) for task in tasks]
            runner = ly.LitAgentRunner[Any](max_rollouts=AT_ONCE, concurrency=AT_ONCE)
            async with runner.run_context(agent=agent, store=store):
                await runner.iter()
        truth = {call.response_id: said for call, said in zip(server.calls, model.log, strict=True)}
        for call in server.calls:  # a summary with which the harness did nothing more is no part of a conversation
            found = re.search(r"SUM-\d+", call.text)
            if found and truth[call.response_id][0] == "summary" and found[0] not in model.used:
                truth[call.response_id] = ("unused summary", "auxiliary")
        kinds, wrong, failed = defaultdict[str, list[int]](lambda: [0, 0]), list[str](), list[str]()
        seen, recorded = set[str](), 0
        for rollout in queued:
            spans = await store.query_spans(rollout.rollout_id)
            calls = model_calls(spans)
            recorded += sum(each.name == semconv.MODEL_CALL for each in spans)
            again = {each.attributes.get(semconv.RETRY_OF) for each in spans}
            kinds["sent again"][1] += sum(each.span_id in again for each in spans)
            kinds["sent again"][0] += sum(
                each.span_id in again and each.status.status_code == "ERROR" for each in spans
            )
            (attempt,) = await store.query_attempts(rollout.rollout_id)
            failed += [str(attempt.metadata.get("reason"))] * (attempt.status != "succeeded")
            for call, found in zip(calls, call_roles(calls, spans), strict=True):
                id_ = str(call.span.attributes.get(semconv.GEN_AI_RESPONSE_ID))
                what, role = truth.get(id_, ("refused", "discarded"))
                seen.add(id_)
                kinds[what][1] += 1
                kinds[what][0] += found.role == role
                if found.role != role:
                    last, answer = flat(call.input_messages[-1]), str((call.output_messages or [{}])[0])
                    turns = "".join(each["role"][0] for each in call.input_messages)
                    wrong.append(f"{rollout.input[:8]} {what} is {found}: {turns} {last[-150:]!r} -> {answer[:150]}")
        return {
            "rollouts": AT_ONCE,
            "failed": failed,
            "kinds": Counter({kind: each[1] for kind, each in kinds.items()}),
            "right": Counter({kind: each[0] for kind, each in kinds.items()}),
            "wrong": wrong,
            "lost": sum(id_ not in seen for id_ in truth),
            "requests": len(server.requests),
            "recorded": recorded,
        }


async def main(name: str, program: str, rollouts: int, seconds: float) -> dict[str, Any]:
    began, total = time.monotonic(), await some(name, program, 0)
    while total["rollouts"] < rollouts and time.monotonic() < began + seconds:
        more = await some(name, program, total["rollouts"])
        total = {each: value + more[each] for each, value in total.items()}
    return total


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))))
