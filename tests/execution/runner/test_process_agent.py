"""Any program is an agent: what it is given, how its reward is read, and that nothing of it is left, however it ends."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.execution.runner import AttemptRecorder
from leyden.execution.runner.process import supervisor
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import Attempt, RolloutConfig, Span, get_reward_value, get_rewards_from_span, is_reward_span, semconv

ROOT = Path(__file__).parents[3]

needs_anthropic = pytest.mark.skipif(
    importlib.util.find_spec("anthropic") is None, reason="needs the anthropic package"
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


class Ran:
    """One attempt and its record."""

    def __init__(self, attempt: Attempt, spans: Sequence[Span]) -> None:
        self.attempt = attempt
        self.spans = spans

    @property
    def reason(self) -> str:
        return self.attempt.metadata["reason"]

    @property
    def reward(self) -> float | None:
        return ly.find_final_reward(self.spans)

    @property
    def process(self) -> Span:
        (span,) = [span for span in self.spans if span.name == semconv.PROCESS]
        return span

    @property
    def stdout(self) -> str:
        return str(self.process.attributes[semconv.PROCESS_STDOUT])


async def run_all(
    store: InMemoryLightningStore,
    agent: ly.LitAgent[Any],
    tasks: Sequence[Any] = (None,),
    *,
    config: RolloutConfig | None = None,
    recorders: Sequence[AttemptRecorder] = (),
) -> list[Ran]:
    rollouts = [await store.enqueue_rollout(task, config=config) for task in tasks]
    runner = ly.LitAgentRunner(max_rollouts=len(rollouts), concurrency=100)
    async with runner.run_context(agent=agent, store=store, recorders=recorders):
        await runner.iter()
    ran: list[Ran] = []
    for rollout in rollouts:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        assert attempt is not None
        ran.append(Ran(attempt, await store.query_spans(rollout.rollout_id)))
    return ran


async def run_one(store: InMemoryLightningStore, command: Sequence[str], task: Any = None, **options: Any) -> Ran:
    config = RolloutConfig(timeout_seconds=options.pop("timeout_seconds", None))
    (ran,) = await run_all(store, ly.ProcessAgent(command, **options), [task], config=config)
    return ran


def sh(line: str) -> list[str]:
    return ["sh", "-c", line]


def python(source: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(source)]


def processes_of(rollout_id: str) -> list[psutil.Process]:
    """Every process that was started for this rollout, wherever it went: its environment says so."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LEYDEN_ROLLOUT_ID") == rollout_id:
                found.append(process)
        except psutil.Error:
            continue
    return found


# ---- what a program is given ---------------------------------------------------------------------------------------------


async def test_the_task_is_on_standard_input_and_in_a_file(store: InMemoryLightningStore) -> None:
    task = {"question": "6 · 7 ⚡", "n": [1, None]}
    ran = await run_one(store, sh('cat; cat "$LEYDEN_TASK_FILE"'), task)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [task, task]
    assert (ran.attempt.status, ran.reward) == ("succeeded", 1.0)


async def test_a_task_of_megabytes_that_nobody_reads_holds_nothing_up(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, ["true"], "x" * 5_000_000, timeout_seconds=20)
    assert ran.attempt.status == "succeeded"


async def test_standard_input_may_be_empty_instead(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, ["cat"], "a task", task_on_stdin=False)
    assert ran.stdout == ""


async def test_a_program_runs_where_and_with_what_it_is_told(
    store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_STORE_TOKEN", "secret")
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("UNWANTED", "yes")
    line = 'pwd; echo "$ADDED $INHERITED ${UNWANTED-none} ${LEYDEN_STORE_TOKEN-none}"; echo "$LEYDEN_ROLLOUT_ID $LEYDEN_ATTEMPT_ID"'
    ran = await run_one(store, sh(line), cwd=tmp_path, env={"ADDED": "new", "UNWANTED": None})
    ids = f"{ran.attempt.rollout_id} {ran.attempt.attempt_id}"
    assert ran.stdout.splitlines() == [str(tmp_path), "new yes none none", ids]


@pytest.mark.parametrize("sandbox", ["none", "namespace", "/app"])
async def test_each_attempt_works_in_a_copy_of_a_folder_which_the_reward_reads(
    store: InMemoryLightningStore, tmp_path: Path, sandbox: str
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "name.txt").write_text(name)
    seen: list[Path] = []

    def reward(output: ly.ProcessOutput) -> float:
        assert output.folder is not None
        seen.append(output.folder)
        assert output.stdout.split() == ([sandbox] if sandbox == "/app" else [str(output.folder)])
        return float((output.folder / "name.txt").read_text() == f"{output.task}{output.task}")

    options: dict[str, Any] = {"sandbox": sandbox} if sandbox != "/app" else {"sandbox": "namespace", "cwd": "/app"}
    agent = ly.ProcessAgent(
        sh("pwd; cat name.txt name.txt > two; mv two name.txt"),
        reward=reward,
        folder=lambda task: tmp_path / task,
        **options,
    )
    ended = await run_all(store, agent, ["a", "b", "a"])
    assert [each.reward for each in ended] == [1.0] * 3
    assert len(set(seen)) == 3 and not any(path.exists() for path in seen)
    assert (tmp_path / "a" / "name.txt").read_text() == "a"


async def test_a_folder_that_is_not_there_is_named(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, ["true"], folder="/no/such/folder")
    assert "'/no/such/folder', which is no folder" in str(ran.reason)
    with pytest.raises(ConfigError, match="give one of them"):
        ly.ProcessAgent(["true"], folder="/tmp", cwd="/tmp")


async def test_links_of_a_folder_lead_to_its_copy_or_to_where_they_led(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    for file in (source / "own", tmp_path / "outside"):
        file.write_text(file.name)
    (source / "below" / "absolute").symlink_to(source / "own")
    (source / "below" / "relative").symlink_to("../own")
    (source / "folder").symlink_to(source / "below")
    (source / "out").symlink_to("../outside")
    (source / "gone").symlink_to("/no/such/file")
    os.mkfifo(source / "pipe")
    (source / "run").write_text("exit 0")
    (source / "run").chmod(0o750)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
        command = sh("ls; cat below/relative out; readlink gone; test -x run; echo changed > folder/absolute; cat own")
        ran = await run_one(store, command, folder=source)
    assert ran.stdout == "below\nfolder\ngone\nout\nown\nrun\nownoutside/no/such/file\nchanged\n", ran.reason
    assert (source / "own").read_text() == "own"


async def test_a_cancelled_attempt_leaves_nothing_of_a_copy_that_was_being_made(
    store: InMemoryLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copies = tmp_path / "source", tmp_path / "copies"
    for number in range(300):
        (source / str(number) / "a" / "b").mkdir(parents=True)
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    running = asyncio.ensure_future(run_one(store, ["true"], folder=source))
    while not list(copies.glob("leyden-*/work/*")):
        assert not running.done()
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    async with asyncio.timeout(20):
        while list(copies.glob("leyden-*")):  # noqa: ASYNC110 -- the test looks on from outside
            await asyncio.sleep(0.01)


async def test_a_subclass_makes_the_command_of_each_task(store: InMemoryLightningStore) -> None:
    class Greeter(ly.ProcessAgent):
        def prepare(self, task: Any, directory: Path, env: dict[str, str]) -> Sequence[str]:
            (directory / "greeting").write_text(task)
            env["WHERE"] = str(directory / "greeting")
            return [*self.command, f"cat $WHERE; echo; echo {task}"]

    agent = Greeter(["sh", "-c"], reward=lambda output: float(output.stdout == "hello\nhello\n"))
    (ran,) = await run_all(store, agent, ["hello"])
    assert ran.reward == 1.0
    assert ran.process.attributes[semconv.PROCESS_COMMAND][-1].endswith("echo hello")


async def test_its_folder_is_its_own_and_is_deleted(store: InMemoryLightningStore) -> None:
    line = 'echo made > "$LEYDEN_DIRECTORY/answer"; ls -ld "$LEYDEN_DIRECTORY"; ls "$LEYDEN_DIRECTORY"; echo "$LEYDEN_DIRECTORY"'
    seen: list[str] = []

    def reward(output: ly.ProcessOutput) -> float:
        seen.append((output.directory / "answer").read_text())
        return 0.5

    ran = await run_one(store, sh(line), reward=reward)
    mode, *names, folder = ran.stdout.splitlines()
    assert not os.path.exists(folder)  # noqa: ASYNC240, PTH110 -- nothing else runs in this loop
    assert mode.startswith("drwx------")
    assert names == ["answer", "resources.json", "task.json"]
    assert seen == ["made\n"]
    assert ran.reward == 0.5


CALL_PYTHON = """
import json, os, urllib.request
def post(url, body, **headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    return json.load(urllib.request.urlopen(request))
answer = post(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    {"model": os.environ["LEYDEN_MODEL"], "messages": [{"role": "user", "content": "hello"}]},
    authorization="Bearer " + os.environ["OPENAI_API_KEY"],
    traceparent=os.environ["TRACEPARENT"],
)
print(answer["choices"][0]["message"]["content"])
resources = json.load(open(os.environ["LEYDEN_RESOURCES_FILE"]))
assert resources["main"]["endpoint"] == os.environ["OPENAI_BASE_URL"], resources
assert resources["greeting"]["template"] == "Hello {name}!", resources
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
print(1.0)
"""

CALL_BY_KEY = CALL_PYTHON.replace(' + "/chat', '.split("/rollout/")[0] + "/v1/chat')

CALL_ANTHROPIC = """
import os
from anthropic import Anthropic
client = Anthropic(default_headers={"traceparent": os.environ["TRACEPARENT"]})
model = os.environ["LEYDEN_MODEL"]
message = client.messages.create(model=model, max_tokens=99, messages=[{"role": "user", "content": "hello"}])
print(message.content[0].text)
print(1.0)
"""

CALL_NODE = """
const { OPENAI_BASE_URL, OPENAI_API_KEY, LEYDEN_MODEL, TRACEPARENT } = process.env;
const answer = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { "content-type": "application/json", authorization: `Bearer ${OPENAI_API_KEY}`, traceparent: TRACEPARENT },
  body: JSON.stringify({ model: LEYDEN_MODEL, messages: [{ role: "user", content: "hello" }] }),
});
console.log((await answer.json()).choices[0].message.content);
console.log(1.0);
"""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(python(CALL_PYTHON), id="python"),
        pytest.param(python(CALL_BY_KEY), id="python that ignores the path of the base URL"),
        pytest.param([sys.executable, "-c", CALL_ANTHROPIC], id="anthropic", marks=needs_anthropic),
        pytest.param(["node", "--input-type=module", "-e", CALL_NODE], id="node", marks=needs_node),
    ],
)
async def test_a_program_calls_the_model_through_the_gateway_by_its_environment_alone(
    store: InMemoryLightningStore, command: list[str]
) -> None:
    gateway = ly.LLMProxy(store=store, token="sesame")
    async with FakeUpstream() as upstream, gateway as proxy:
        proxy.update_model_list([upstream.llm()])
        await store.add_resources(
            {"main": proxy.as_resource(), "greeting": ly.PromptTemplate(template="Hello {name}!")}
        )
        agent = ly.ProcessAgent(command, reward="last_line")
        (ran,) = await run_all(store, agent, config=RolloutConfig(require_model_call=True), recorders=[proxy])
    assert ran.attempt.status == "succeeded", ran.reason
    (call,) = [span for span in ran.spans if span.name == semconv.MODEL_CALL]
    assert (call.trace_id, call.parent_id) == (ran.process.trace_id, ran.process.span_id)
    assert ran.stdout.startswith(upstream.calls[0].text)
    assert call.tokens is not None and list(call.tokens.response_ids) == upstream.calls[0].response_ids


# ---- rewards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reward", "expected"),
    [
        ("exit 0", "exit_code", {"primary": 1.0}),
        ("exit 3", "exit_code", {"primary": 0.0}),
        ("echo thinking; echo 0.25; echo", "last_line", {"primary": 0.25}),
        ("echo .5", "last_line", {"primary": 0.5}),
        ("""echo '{"reward": -2}'""", "last_line", {"primary": -2.0}),
        ("""echo '{"rewards": {"speed": 1, "primary": 2}}'""", "last_line", {"primary": 2.0, "speed": 1.0}),
        (
            "echo 1 2 3; exit 7",
            lambda output: sum(map(int, output.stdout.split())) + output.exit_code,
            {"primary": 13.0},
        ),
    ],
)
async def test_the_reward_comes_from_where_it_was_said_to(
    store: InMemoryLightningStore, line: str, reward: Any, expected: dict[str, float]
) -> None:
    ran = await run_one(store, sh(line), reward=reward)
    assert ran.attempt.status == "succeeded", ran.reason
    assert [get_rewards_from_span(span) for span in ran.spans if is_reward_span(span)] == [expected]


async def test_a_coroutine_function_may_judge_the_outputs(store: InMemoryLightningStore) -> None:
    async def reward(output: ly.ProcessOutput) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"primary": float(output.stdout), "errors": float(output.stderr_bytes)}

    ran = await run_one(store, sh("echo 4; echo xy >&2"), reward=reward)
    assert ran.reward == 4.0


async def test_what_a_reward_function_raises_is_the_reason(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, sh("echo four"), reward=lambda output: float(output.stdout))
    assert ran.attempt.status == "failed"
    assert "ValueError: could not convert string to float: 'four" in ran.reason


@needs_curl
async def test_rewards_are_posted_with_curl(store: InMemoryLightningStore) -> None:
    line = """
        curl -sS -d '{"reward": 0.1}' "$LEYDEN_REWARD_URL"
        curl -sS -d 0.5 "$LEYDEN_REWARD_URL"
        curl -sS -d '{"rewards": {"speed": 3, "primary": 0.75}}' "$LEYDEN_REWARD_URL"
        for bad in nonsense '{"reward": "x"}' '{"rewards": {"a": 1, "b": 2}}' NaN '[1]' '{"rewards": {}}' null; do
            curl -sS -o /dev/null -w '%{http_code} ' -d "$bad" "$LEYDEN_REWARD_URL"
        done
        curl -sS -o /dev/null -w '%{http_code} ' "$LEYDEN_REWARD_URL"
        curl -sS -o /dev/null -w '%{http_code} ' -H 'content-encoding: gzip' -d 1 "$LEYDEN_REWARD_URL"
        head -c 17000000 /dev/zero | curl -sS -o /dev/null -w '%{http_code} ' --data-binary @- "$LEYDEN_REWARD_URL"
        curl -sS -o /dev/null -w '%{http_code} ' -d 1 "$LEYDEN_REWARD_URL/nowhere"
        """
    ran = await run_one(store, sh(line), reward="event")
    assert ran.attempt.status == "succeeded", ran.reason
    rewards = [get_rewards_from_span(span) for span in ran.spans if is_reward_span(span)]
    assert rewards == [{"primary": 0.1}, {"primary": 0.5}, {"primary": 0.75, "speed": 3.0}]
    assert {span.parent_id for span in ran.spans if is_reward_span(span)} == {ran.process.span_id}
    *answers, refused = ran.stdout.splitlines()
    assert json.loads(answers[2]) == {"recorded": {"primary": 0.75, "speed": 3.0}}
    assert refused.split() == ["400"] * 7 + ["405", "400", "413", "404"]


SEND_SPANS = """
import gzip, json, os, urllib.request
_, trace_id, parent_id, _ = os.environ["TRACEPARENT"].split("-")
def attributes(text):
    return [{"key": k, "value": {"stringValue": v}} for k, v in (pair.split("=") for pair in text.split(","))]
def group(span_id, resource):
    span = {"traceId": trace_id, "spanId": span_id, "parentSpanId": parent_id, "name": "think", "kind": 1,
            "startTimeUnixNano": "1000000000", "endTimeUnixNano": "2000000000"}
    return {"resource": {"attributes": attributes(resource)}, "scopeSpans": [{"spans": [span]}]}
body = {"resourceSpans": [
    group("00000000000000aa", os.environ["OTEL_RESOURCE_ATTRIBUTES"]),
    group("00000000000000bb", "leyden.rollout_id=ro-other,leyden.attempt_id=at-other"),
]}
for pack in (bytes, gzip.compress):  # twice, as an exporter does that was not answered in time
    headers = {"content-type": "application/json", "content-encoding": "identity" if pack is bytes else "gzip"}
    request = urllib.request.Request(os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces", pack(json.dumps(body).encode()), headers)
    print(json.load(urllib.request.urlopen(request))["partialSuccess"]["rejectedSpans"])
"""


async def test_spans_of_the_program_land_in_its_attempt_and_in_no_other(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, python(SEND_SPANS))
    assert ran.attempt.status == "succeeded", ran.reason
    assert ran.stdout.split() == ["1", "1"], ran.process.attributes[semconv.PROCESS_STDERR]
    (span,) = [span for span in ran.spans if span.name == "think"]
    assert (span.span_id, span.trace_id, span.parent_id) == (
        "00000000000000aa",
        ran.process.trace_id,
        ran.process.span_id,
    )


FLOOD = """
import json, os, urllib.request
spans = [
    {"traceId": "0" * 31 + "1", "spanId": f"{n:016x}", "name": "sql.execute", "startTimeUnixNano": "1", "endTimeUnixNano": "2",
     "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}}] if n % 10 == 0 else []}
    for n in range(1, 51)
]
reward = [{"key": "agentlightning.reward.0.name", "value": {"stringValue": "primary"}},
          {"key": "agentlightning.reward.0.value", "value": {"doubleValue": 0.25}}]
spans.append({**spans[0], "spanId": "f" * 16, "name": "agentlightning.annotation", "attributes": reward})
marks = [pair.split("=") for pair in os.environ["OTEL_RESOURCE_ATTRIBUTES"].split(",")]
resource = {"attributes": [{"key": name, "value": {"stringValue": value}} for name, value in marks]}
body = json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}).encode()
url = os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces"
urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}))
"""


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, 50), ({"spans": "model"}, 5), ({"max_spans": 7}, 7), ({"spans": "model", "max_spans": 2}, 2)],
)
async def test_of_a_programs_spans_those_that_are_wanted_are_kept_and_the_others_counted(
    store: InMemoryLightningStore, options: dict[str, Any], kept: int
) -> None:
    ran = await run_one(store, python(FLOOD), **options)
    assert ran.process.attributes[semconv.PROCESS_EXIT_CODE] == 0, ran.process.attributes
    assert sum(span.name == "sql.execute" for span in ran.spans) == kept
    assert ran.process.attributes.get(semconv.SPANS_LEFT_OUT, 0) == 50 - kept
    assert [get_reward_value(span) for span in ran.spans if span.name == "agentlightning.annotation"] == [0.25]


async def test_an_address_answers_only_while_its_attempt_runs(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, sh('echo "$LEYDEN_REWARD_URL"'))
    request = urllib.request.Request(ran.stdout.strip(), b"1.0")
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=10)
    with caught.value as answer:
        assert answer.code == 404
        assert b"no attempt is running" in answer.read()


# ---- ends that are no result ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "reason"),
    [
        (["no-such-program"], {}, "could not be started: command 'no-such-program': No such file"),
        (["true"], {"cwd": "/no/such/folder"}, "could not be started: cwd '/no/such/folder': No such file"),
        (sh("no-such-program"), {}, "exited with code 127: the command was not found; its stderr ends: "),
        (sh("kill -9 $$"), {}, "was killed by SIGKILL, which Leyden did not send"),
        (
            sh("echo before >&2; kill -SEGV $$"),
            {"reward": lambda _: 1.0},
            "was killed by SIGSEGV; its stderr ends: before",
        ),
        (python("import os; os.abort()"), {}, "was killed by SIGABRT"),
        (python("import os; os._exit(4)"), {"reward": "last_line"}, "exited with code 4"),
        (python("import sys; sys.exit('wrong')"), {"reward": "event"}, "exited with code 1; its stderr ends: wrong"),
        (sh("echo 1; echo done"), {"reward": "last_line"}, "ended with the line 'done'"),
        (sh("echo 1; echo '{}'"), {"reward": "last_line"}, "ended with the line '{}'"),
        (sh("echo nan"), {"reward": "last_line"}, "is nan, which is no finite number"),
        (["true"], {"reward": "last_line"}, "wrote nothing to its standard output"),
        (["true"], {"reward": "event"}, "ended without a reward: with reward='event' it posts one"),
    ],
)
async def test_an_end_that_is_no_result_is_a_failed_attempt_that_says_what_happened(
    store: InMemoryLightningStore, command: list[str], options: dict[str, Any], reason: str
) -> None:
    ran = await run_one(store, command, **options)
    assert ran.attempt.status == "failed"
    assert reason in ran.reason
    assert ran.reward is None


async def test_a_program_that_leaks_memory_is_ended_with_its_children_and_named(store: InMemoryLightningStore) -> None:
    leak = """
        import os
        os.fork(); os.fork()  # four of them, none of which is large alone
        kept = []
        while sum(map(len, kept)) < 60_000_000:
            kept.append(bytearray(b"x") * 1_000_000)
        import signal; signal.pause()
        """
    ran = await run_one(store, python(leak), memory_bytes=150_000_000, timeout_seconds=30)
    assert ran.attempt.status == "failed"
    assert "was ended: its processes together held more than memory_bytes=150,000,000; raise the limit" in ran.reason
    assert int(str(ran.process.attributes[semconv.PROCESS_MEMORY_BYTES])) > 150_000_000
    assert processes_of(ran.attempt.rollout_id) == []


async def test_of_fifty_megabytes_the_head_and_the_tail_are_kept_and_no_more_is_held(
    store: InMemoryLightningStore,
) -> None:
    flood = """
        import os, sys
        print("first"); sys.stdout.write("x" * 50_000_000); print(); print(0.5, flush=True)
        pages = open(f"/proc/{os.getppid()}/statm").read().split()[1]
        sys.stderr.write(str(int(pages) * os.sysconf("SC_PAGE_SIZE")))
        """
    ran = await run_one(store, python(flood), reward="last_line", output_bytes=10_000)
    assert ran.reward == 0.5
    assert ran.stdout.startswith("first\nxxx")
    assert "bytes left out" in ran.stdout
    assert len(ran.stdout) < 10_100
    assert ran.process.attributes[semconv.PROCESS_STDOUT_BYTES] == 50_000_000 + len("first\n\n0.5\n")
    assert int(str(ran.process.attributes[semconv.PROCESS_STDERR])) < 30_000_000, "bytes that the supervisor held"


async def test_a_program_that_closes_its_output_is_waited_for(store: InMemoryLightningStore) -> None:
    closes = """
        import os, time
        os.close(1); os.close(2); time.sleep(0.2)
        open(os.environ["LEYDEN_DIRECTORY"] + "/late", "w").close()
        os._exit(3)
        """
    ran = await run_one(
        store, python(closes), reward=lambda output: output.exit_code + (output.directory / "late").exists()
    )
    assert ran.reward == 4.0


# ---- nothing is left ----------------------------------------------------------------------------------------------------

FAMILY = """
import os, signal, sys, urllib.request
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here, say_here = os.pipe()
for kind in ("child", "session", "orphan"):
    if os.fork() == 0:
        if kind != "child":
            os.setsid()
        if kind == "session":
            os.fork()
        if kind == "orphan" and os.fork():
            os._exit(0)
        os.write(say_here, b"x")
        while True:
            signal.pause()
heard = 0
while heard < 4:
    heard += len(os.read(here, 4))
if sys.argv[1] == "post":
    urllib.request.urlopen(os.environ["LEYDEN_REWARD_URL"], b"1")
elif sys.argv[1] == "write":
    open(os.environ["READY"], "w").close()
else:
    print(1)
    sys.exit()
while True:
    signal.pause()
"""
"""A child, another in a session of its own with a child, and an orphan; none of them heeds SIGTERM. Then they are announced."""
N_FAMILY = 5


def family(announce: str) -> list[str]:
    return [*python(FAMILY), announce]


async def family_of(store: InMemoryLightningStore, rollout_id: str) -> list[psutil.Process]:
    """The processes of a rollout, once its program has posted that all of them are there."""
    async with aclosing(store.watch_spans(after=None)) as spans:
        async for span in spans:
            if is_reward_span(span):
                return processes_of(rollout_id)
    raise AssertionError


@pytest.mark.parametrize("end", ["timeout", "cancelled"])
async def test_the_whole_family_ends_with_its_attempt(store: InMemoryLightningStore, end: str) -> None:
    agent = ly.ProcessAgent(family("post"))
    config = RolloutConfig(timeout_seconds=2.0 if end == "timeout" else None)
    rollout = await store.enqueue_rollout(None, config=config)
    runner = ly.LitAgentRunner(max_rollouts=1)
    async with runner.run_context(agent=agent, store=store):
        work = asyncio.create_task(runner.iter())
        started = await asyncio.wait_for(family_of(store, rollout.rollout_id), 20)
        assert len(started) == N_FAMILY
        if end == "cancelled":
            work.cancel()
        await asyncio.wait({work})
    assert not [process for process in started if process.is_running()]
    assert processes_of(rollout.rollout_id) == []
    ran = Ran(await store.get_attempt_by_id(rollout.rollout_id, "latest"), await store.query_spans(rollout.rollout_id))
    assert ran.process.attributes[semconv.PROCESS_CAUSE] == "request"
    if end == "timeout":
        assert ran.attempt.status == "timeout"


async def test_what_a_program_leaves_behind_ends_with_it(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, family("leave"), reward="last_line", timeout_seconds=30)
    assert (ran.attempt.status, ran.reward) == ("succeeded", 1.0)
    assert processes_of(ran.attempt.rollout_id) == []


async def test_a_program_that_kills_its_supervisor_ends_with_it(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, sh("sleep 300 & setsid sleep 300 & kill -9 $PPID; sleep 300"), timeout_seconds=30)
    assert ran.attempt.status == "failed"
    assert "its supervisor ended without a report, with the exit status -9" in ran.reason
    assert processes_of(ran.attempt.rollout_id) == []


async def test_a_program_that_heeds_sigterm_may_say_goodbye(store: InMemoryLightningStore) -> None:
    ran = await run_one(store, sh("trap 'echo goodbye; exit 0' TERM; echo ready; sleep 300"), timeout_seconds=0.5)
    assert ran.attempt.status == "timeout"
    assert ran.stdout == "ready\ngoodbye\n"


async def test_a_hundred_run_at_once_and_no_one_hurts_another(store: InMemoryLightningStore) -> None:
    line = """
        read -r n
        case $((n % 4)) in
            0) kill -9 $$ ;;
            1) exit 1 ;;
            2) sleep 300 & exit 0 ;;
        esac
        """
    ran = await run_all(store, ly.ProcessAgent(sh(line)), list(range(100)))
    assert [one.attempt.status for one in ran] == ["failed", "succeeded", "succeeded", "succeeded"] * 25
    assert [one.reward for one in ran] == [None, 0.0, 1.0, 1.0] * 25


RUNNER = """
import asyncio, os, signal, sys
import leyden as ly

async def main(ready, fork):
    async with ly.open_store("memory://") as store:
        rollout = await store.enqueue_rollout(None)
        agent = ly.ProcessAgent(sys.argv[3:], env={"READY": ready})
        runner = ly.LitAgentRunner(max_rollouts=1)
        print(rollout.rollout_id, flush=True)
        async with runner.run_context(agent=agent, store=store):
            work = asyncio.create_task(runner.iter())
            await asyncio.to_thread(lambda: open(ready).read())
            if fork and os.fork() == 0:  # it holds the runner's end of every pipe
                signal.pause()
            print("up", flush=True)
            await work

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize("fork", ["", "fork"], ids=["alone", "with a fork that holds its pipes"])
def test_a_runner_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path, fork: str) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(ready), fork, *family("write")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    started: list[psutil.Process] = []
    try:
        assert runner.stdout is not None
        rollout_id = runner.stdout.readline().strip()
        assert runner.stdout.readline() == "up\n"
        started = psutil.Process(runner.pid).children(recursive=True)
        running = [process for process in started if process.status() != psutil.STATUS_ZOMBIE]
        forks = {process for process in running if RUNNER in process.cmdline()}
        assert len(forks) == bool(fork)
        assert len(processes_of(rollout_id)) == N_FAMILY
        assert len(list(tmp_path.glob("leyden-*"))) == 1
        runner.kill()
        runner.wait()
        _, alive = psutil.wait_procs({*started} - forks, timeout=10)
        assert alive == []
        assert list(tmp_path.glob("leyden-*")) == []
    finally:
        for process in started:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        runner.kill()
        runner.communicate()


# ---- the agent as an object ----------------------------------------------------------------------------------------------


async def test_it_travels_to_other_processes(store: InMemoryLightningStore) -> None:
    agent = ly.ProcessAgent(["true"], reward=lambda output: 2.0 + float(output.exit_code or 0))
    (ran,) = await run_all(store, cloudpickle.loads(cloudpickle.dumps(agent)))
    assert ran.reward == 2.0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"command": "node agent.js"}, r"\['node', 'agent.js'\]"),
        ({"command": []}, "the program first"),
        ({"command": ["a", 1]}, "list of strings"),
        ({"command": ["a\0b"]}, "list of strings"),
        ({"reward": "exit"}, "'exit_code', 'last_line', 'event'"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"output_bytes": 10}, "output_bytes is 10"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        ly.ProcessAgent(**{"command": ["true"], **options})


def test_a_sandbox_without_the_limit_that_marks_processes_can_run_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(limit: int, value: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")  # what Python makes of EPERM, which gVisor answers

    monkeypatch.setattr(resource, "setrlimit", refuse)
    supervisor._drop_mark()


# ---- sampling ------------------------------------------------------------------------------------------------------------

ASK = """
import json, os, sys, urllib.request
body = {"model": "fake", **json.loads(sys.argv[2])}
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/{sys.argv[1]}", json.dumps(body).encode(),
    {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
)
print(urllib.request.urlopen(request).status)
"""
TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("route", "asked", "used"),
    [
        ("chat/completions", {"messages": TURN}, {"temperature": 0.5, "max_tokens": 8}),
        (
            "chat/completions",
            {"messages": TURN, "temperature": 1.3, "top_p": 0.8, "top_k": 20, "max_completion_tokens": 16_384},
            {"temperature": 0.5, "max_completion_tokens": 8},
        ),
        ("chat/completions", {"messages": TURN, "max_tokens": 3}, {"temperature": 0.5, "max_tokens": 3}),
        ("chat/completions", {"messages": TURN, "max_tokens": -1}, {"temperature": 0.5, "max_tokens": 8}),
        (
            "chat/completions",
            {"messages": TURN, "n_predict": 900, "max_new_tokens": 3},
            {"temperature": 0.5, "max_tokens": 8, "n_predict": 8, "max_new_tokens": 3},
        ),
        ("messages", {"messages": TURN, "max_tokens": 32_000, "top_k": 5}, {"temperature": 0.5, "max_tokens": 8}),
        (
            "responses",
            {"input": "hi", "top_p": 0.9, "max_output_tokens": 9},
            {"temperature": 0.5, "max_completion_tokens": 8},
        ),
        ("responses", {"input": "hi"}, {"temperature": 0.5, "max_completion_tokens": 8}),
    ],
)
async def test_the_sampling_of_a_program_is_that_of_its_resource(
    store: InMemoryLightningStore, route: str, asked: dict[str, Any], used: dict[str, Any]
) -> None:
    names = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
    async with FakeUpstream() as upstream, ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        for pinned in (True, False):
            llm = proxy.as_resource(sampling_parameters={"temperature": 0.5, "max_tokens": 8, "stop": ["x"]})
            await store.add_resources({"llm": llm})
            ran = await run_one(store, [*python(ASK), route, json.dumps(asked)], pin_sampling=pinned)
            assert ran.stdout == "200\n", ran.process.attributes
            sent = {name: value for name, value in upstream.requests[-1].items() if name in names}
            if pinned:
                assert sent == used
                (call,) = [span for span in ran.spans if span.name == semconv.MODEL_CALL]
                recorded = json.loads(str(call.attributes.get(semconv.REQUEST_FIELDS, "{}")))
                assert {
                    name: asked[name] for name in asked if name not in ("messages", "input")
                }.items() <= recorded.items()
                assert call.attributes["gen_ai.request.temperature"] == 0.5
            else:
                assert sent.get("temperature") == asked.get("temperature")


async def test_a_client_may_escape_the_pins_of_its_address(store: InMemoryLightningStore) -> None:
    async with FakeUpstream() as upstream, ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        started = await store.start_rollout("t")
        root = proxy.as_resource().get_base_url(started.rollout_id, started.attempt.attempt_id).removesuffix("v1")
        url = f"{root}sampling%2Ctemperature%3D0.0%2Cmax_tokens%3D8.0/v1/chat/completions"
        body = json.dumps({"model": "fake", "messages": TURN, "temperature": 1.0, "top_p": 0.5}).encode()
        sent = urllib.request.Request(url, body, {"content-type": "application/json"})
        assert (await asyncio.to_thread(urllib.request.urlopen, sent)).status == 200
        used = upstream.requests[-1]
        assert (used["temperature"], used["max_tokens"], "top_p" in used) == (0.0, 8, False)


async def test_a_program_that_leaves_the_path_of_its_address_out_is_pinned_by_its_key(
    store: InMemoryLightningStore,
) -> None:
    ask = ASK.replace("{os.environ['OPENAI_BASE_URL']}", "{os.environ['OPENAI_BASE_URL'].partition('/rollout')[0]}/v1")
    for token in (None, "a;token"):
        async with (
            FakeUpstream() as upstream,
            ly.LLMProxy(model_list=[upstream.llm()], store=store, token=token) as proxy,
        ):
            llm = proxy.as_resource(sampling_parameters={"temperature": 0.5, "max_tokens": 8})
            await store.add_resources({"llm": llm})
            asked = {"messages": TURN, "temperature": 1.3, "max_tokens": 16_384}
            ran = await run_one(store, [*python(ask), "chat/completions", json.dumps(asked)])
            assert ran.stdout == "200\n", ran.process.attributes
            assert (upstream.requests[-1]["temperature"], upstream.requests[-1]["max_tokens"]) == (0.5, 8)
            assert [span.name for span in ran.spans].count(semconv.MODEL_CALL) == 1


async def test_pins_that_cannot_be_read_are_refused(store: InMemoryLightningStore) -> None:
    async with FakeUpstream() as upstream, ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        llm = proxy.as_resource()
        for pins in ("temperature=x", "temperature=nan", "top_k=3", "temperature=1,temperature=0", "temperature=-1"):
            url = f"{llm.get_base_url('r', 'a').removesuffix('v1')}sampling,{pins}/v1/chat/completions"
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(urllib.request.urlopen, url, b"{}")
            assert refused.value.code == 404 and b"pins sampling" in refused.value.read()
