"""Programs that implement the interfaces of Agent Lightning run under the alias, and print what they print with the
original package. `tests/compat_peers` runs the same programs with the original.
"""

import asyncio
import enum
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

import leyden.compat
from leyden import types
from leyden.errors import ConfigError
from leyden_compat.agentlightning.own_store import OwnStore, as_native

leyden.compat.install()

import agentlightning as agl  # noqa: E402

from tests.compat import own_parts as parts  # noqa: E402
from tests.compat import own_traces as traces  # noqa: E402

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("program", ["own_parts", "own_bundles", "own_traces"])
async def test_a_program_with_parts_of_its_own_prints_what_it_prints_with_the_original(program: str) -> None:
    command = [sys.executable, "-m", "leyden.compat", str(HERE / f"{program}.py"), str(free_port())]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == (HERE / f"{program}.txt").read_text()


RESOURCES: dict[str, Any] = {
    "prompt": agl.PromptTemplate(template="{x}", engine="f-string"),
    "proxy": agl.ProxyLLM(endpoint="http://h/v1", model="m"),
    "llm": agl.LLM(endpoint="http://h/v1", model="m"),
}
KINDS = {"prompt": agl.PromptTemplate, "proxy": agl.ProxyLLM, "llm": agl.LLM}


def are_known(resources: Any) -> bool:
    return all(isinstance(resources[name], kind) for name, kind in KINDS.items())


async def test_what_comes_out_of_a_store_is_of_the_classes_that_a_program_knows() -> None:
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0)
    await server.start()
    try:
        client = agl.LightningStoreClient(server.endpoint)
        for store in (server.store, client):
            native = {
                name: getattr(types, type(each).__name__)(**each.model_dump()) for name, each in RESOURCES.items()
            }
            added = await store.add_resources(native)
            updated = await store.update_resources(added.resources_id, native)
            latest, known = await store.get_latest_resources(), await store.get_resources_by_id(added.resources_id)
            [queried] = await store.query_resources(resources_id=added.resources_id)
            for update in (added, updated, latest, known, queried):
                assert isinstance(update, agl.ResourcesUpdate) and are_known(update.resources)
            begun = await store.start_rollout(1)
            span = agl.Span.from_attributes(
                attributes={"a": 1}, rollout_id=begun.rollout_id, attempt_id=begun.attempt.attempt_id, sequence_id=1
            )
            fields = {**dict(span), "events": [types.SpanEvent(name="e", timestamp=1.0)]}
            stored = await store.add_span(agl.Span(**fields))
            [read] = await store.query_spans(begun.rollout_id)
            for each in (stored, read):
                assert isinstance(each, agl.Span) and isinstance(each.status, agl.types.TraceStatus)
                assert all(isinstance(event, agl.types.Event) for event in each.events) and each.events
        assert client.server_address == f"{server.endpoint}/v1/agl"
        assert isinstance(server, agl.LightningStore) and isinstance(client, agl.LightningStore)
        await client.close()
    finally:
        await server.stop()


def test_what_an_agent_and_an_algorithm_get_is_of_the_classes_that_a_program_knows() -> None:
    seen: list[Any] = []

    @agl.prompt_rollout
    def agent(task: Any, prompt_template: Any) -> float:
        seen.append((type(prompt_template), prompt_template.format(name=task)))
        return 1.0

    class Own(agl.LitAgent):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            seen.append(are_known(resources))
            return 1.0

    template = agl.PromptTemplate(template="Hello {{ name }}", engine="jinja")
    agl.Trainer(algorithm=agl.Baseline(), initial_resources={"p": template}, progress=False).dev(agent, ["Ada"])
    agl.Trainer(algorithm=agl.Baseline(), initial_resources=RESOURCES, progress=False).dev(Own(), [1])
    assert seen == [(agl.PromptTemplate, "Hello Ada"), True]


def test_the_hierarchy_of_classes_is_that_of_the_original() -> None:
    assert isinstance(agl.Baseline(), agl.FastAlgorithm) and issubclass(agl.APO, agl.Algorithm)
    assert issubclass(agl.FunctionalLitAgent, agl.LitAgent) and issubclass(agl.Hook, agl.ParallelWorkerBase)
    assert issubclass(agl.LitAgentRunner, agl.Runner) and issubclass(agl.OtelTracer, agl.ParallelWorkerBase)
    assert issubclass(agl.InterProcessExecutionStrategy, agl.ExecutionStrategy)
    assert not isinstance(agl.PromptTemplate(template="", engine="jinja"), agl.LLM)


SECRETS = [
    ("f-string", "{x.__class__}"),
    ("f-string", "{x.__init__.__globals__[os].environ[PATH]}"),
    ("f-string", "{x[real]}"),
    ("f-string", "{x:>50000000}"),
    ("f-string", "{x:.50000000f}"),
    ("f-string", "{x:{width}}"),
    ("jinja", "{{ cycler.__init__.__globals__.os.popen('id').read() }}"),
    ("jinja", "{{ ''.__class__.__mro__ }}"),
    ("jinja", "{{ 'x' * 50000000 }}"),
    ("jinja", "{{ '%50000000d' % 1 }}"),
    ("jinja", "{{ 'x'.ljust(50000000) }}"),
    ("jinja", "{{ 'x' | center(50000000) }}"),
    ("jinja", "{{ '%50000000d' | format(1) }}"),
    ("jinja", "{{ '{:>50000000}'.format(1) }}"),
    ("jinja", "{{ 10 ** 5000000 }}"),
    ("jinja", "{{ values.append(1) }}"),
]


@pytest.mark.parametrize(("engine", "template"), SECRETS)
def test_a_template_reaches_nothing_behind_its_values_and_makes_no_giant(engine: Any, template: str) -> None:
    prompt = agl.PromptTemplate(template=template, engine=engine)
    with pytest.raises(ConfigError):
        prompt.format(x=1.0, width=50_000_000, values=[])


@pytest.mark.parametrize(
    ("engine", "template", "text"),
    [
        ("f-string", "{task[question]} {price:.2f} {x!r:>5} {{}}", "why 1.50   'a' {}"),
        ("f-string", "{items[0]}", "7"),
        (
            "jinja",
            "{% for item in items %}{{ item * 2 }}{% endfor %} {{ task.question|upper }} {{ '%.1f' % price }}",
            "14 WHY 1.5",
        ),
        ("jinja", "{{ 'x' * 3 }}{{ 'a'|center(3) }}{{ '%s is 5000000' % x }}", "xxx a a is 5000000"),
    ],
)
def test_an_ordinary_template_is_rendered(engine: Any, template: str, text: str) -> None:
    values = {"task": {"question": "why"}, "price": 1.5, "x": "a", "items": [7]}
    assert agl.PromptTemplate(template=template, engine=engine).format(**values) == text


async def test_a_new_name_of_an_argument_takes_precedence_over_the_old_one() -> None:
    store = agl.InMemoryLightningStore()
    first, second = await store.enqueue_rollout(1), await store.enqueue_rollout(2)
    await store.update_rollout(second.rollout_id, status="failed")
    ids = {"status": ["queuing"], "rollout_ids": [first.rollout_id]}
    assert list(await store.query_rollouts(**ids)) == [first]
    assert await store.query_rollouts(**ids, status_in=["failed"]) == []
    assert [each.input for each in await store.query_rollouts(status=["queuing"], status_in=["failed"])] == [2]
    assert await store.query_rollouts(**ids, rollout_id_in=[]) == []
    with pytest.warns(DeprecationWarning, match="is deprecated; write"):
        trainer = agl.Trainer(
            n_workers=3, n_runners=2, max_tasks=5, max_rollouts=4, triplet_exporter={}, progress=False
        )
    assert (trainer.n_runners, trainer.max_rollouts) == (2, 4)


async def test_a_page_is_a_list_and_a_limit_of_zero_is_empty() -> None:
    store = agl.InMemoryLightningStore()
    rollouts = [await store.enqueue_rollout(number) for number in range(3)]
    page = await store.query_rollouts()
    assert page == rollouts and rollouts == page and page != [] and page[1:] == rollouts[1:]
    assert page + rollouts == rollouts + page == [*rollouts, *rollouts] and [*page] == rollouts
    assert [each["input"] for each in json.loads(page.model_dump_json())["items"]] == [0, 1, 2]
    assert await store.query_spans(rollouts[0].rollout_id) == [] and isinstance(page, agl.PaginatedResult)
    for query in (store.query_rollouts, store.query_resources, store.query_workers):
        assert len(await query(limit=0)) == 0
    for ask in (store.query_spans, store.query_attempts):
        assert (await ask(rollouts[0].rollout_id, limit=0)).limit == 0
    empty = await store.query_rollouts(limit=0, offset=1)
    assert (empty.total, empty.limit, empty.offset) == (3, 0, 1)


def test_a_version_of_resources_needs_no_times_as_in_0_2() -> None:
    update = agl.ResourcesUpdate(resources_id="r", resources=RESOURCES)
    assert (update.resources_id, update.version) == ("r", 1) and are_known(update.resources)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Options:
    level: int | None
    names: list[str] | None
    rate: Optional[float]  # noqa: UP045 -- the form that 0.3 reads
    mode: Literal["a", 2] = "a"
    colour: Colour = Colour.RED
    flag: bool | None = None
    sizes: list[int] = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("", Options(None, None, None)),
        ("--options.level 3 --options.rate 0.5", Options(3, None, 0.5)),
        ("--options.level none --options.flag no --options.mode 2", Options(None, None, None, 2, flag=False)),
        ("--options.names a b --options.colour blue", Options(None, ["a", "b"], None, colour=Colour.BLUE)),
        ("--options.colour BLUE --options.sizes 1 2", Options(None, None, None, colour=Colour.BLUE, sizes=[1, 2])),
        ("--options.flag null", Options(None, None, None)),
    ],
)
def test_a_command_line_gives_values_of_any_type(
    monkeypatch: pytest.MonkeyPatch, arguments: str, options: Options
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments.split()])
    assert agl.lightning_cli(Options) == options and agl.lightning_cli() == ()


@pytest.mark.parametrize("arguments", ["--options.mode b", "--options.colour green", "--options.level x"])
def test_a_command_line_with_a_value_of_another_type_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments.split()])
    with pytest.raises(SystemExit):
        agl.lightning_cli(Options)


def test_a_store_of_leyden_is_used_as_it_is_and_one_of_the_program_through_its_interface() -> None:
    class Counting(agl.InMemoryLightningStore):
        async def enqueue_rollout(self, *args: Any, **options: Any) -> Any:
            return await super().enqueue_rollout(*args, **options)

    class Named(agl.InMemoryLightningStore):
        name = "no method of the interface"

    for store in (agl.InMemoryLightningStore(), Named()):
        assert as_native(store) is store
    for store in (Counting(), agl.LightningStore()):
        adapted = as_native(store)
        assert isinstance(adapted, OwnStore) and as_native(adapted) is adapted


async def test_a_claim_that_is_undone_returns_to_a_store_of_the_program() -> None:
    class Requeued(agl.LightningStore):
        def __init__(self) -> None:
            self.states: list[str] = []

        async def dequeue_rollout(self, worker_id: str | None = None) -> Any:
            await asyncio.sleep(0)
            if self.states:
                return None
            self.states.append("claimed")
            attempt = agl.Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=1.0)
            return agl.AttemptedRollout(rollout_id="r", input=1, start_time=1.0, attempt=attempt)

        async def update_rollout(self, rollout_id: str, *args: Any, **fields: Any) -> Any:
            self.states.append(fields["status"])
            return agl.Rollout(rollout_id=rollout_id, input=1, start_time=1.0)

    original: Any = Requeued()
    store = as_native(original)
    claiming = asyncio.ensure_future(store.dequeue_many_rollouts(claim_id="c", timeout_seconds=5.0))
    while "c" not in store._claims:  # noqa: ASYNC110 -- a few turns of this loop
        await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    await store.undo_claim("c")
    assert original.states == ["claimed", "requeuing"]


def structured(*, with_its_call: bool) -> list[Any]:
    """The spans of LangChain's `with_structured_output`: the call's own name is not that of a chat
    completion; another instrumentation may record the call below it once more.
    """
    said = [("user", "q1")]
    inner = traces.call(5, said, "{}", "c1", [1, 2], [3], parent=3)
    outer = traces.call(3, said, "{}", "c1", [1, 2], [3], name="chat_model.llm", parent=2)
    chain = traces.span(2, "RunnableSequence.chain", {})
    return [traces.ROOT, chain, outer, *([inner] if with_its_call else []), traces.reward(6, primary=1.0)]


@pytest.mark.parametrize("with_its_call", [True, False])
def test_a_call_for_structured_output_is_one_triplet_and_one_conversation(with_its_call: bool) -> None:
    spans = structured(with_its_call=with_its_call)
    [triplet] = agl.TracerTraceToTriplet().adapt(spans)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"], triplet.reward) == ([1, 2], [3], 1.0)
    [entry] = agl.TraceToMessages().adapt(spans)
    assert [message["role"] for message in entry["messages"]] == ["user", "assistant"]


def test_an_answer_in_two_spans_is_one_triplet_and_one_conversation() -> None:
    spans = traces.TURNS["one answer in two spans"]
    assert len(agl.TracerTraceToTriplet().adapt(spans)) == len(agl.TraceToMessages().adapt(spans)) == 1


def test_several_turns_are_a_conversation_each_and_an_image_stays_a_part() -> None:
    first, second = agl.TraceToMessages().adapt(traces.TURNS["two turns"])
    assert [message["content"] for message in second["messages"]] == ["q1", "a1", "q2", "a2"]
    assert second["messages"][: len(first["messages"])] == first["messages"]
    [entry] = agl.TraceToMessages().adapt(traces.TURNS["an image"])
    assert entry["messages"][0]["content"] == [traces.TEXT, traces.IMAGE]


async def test_failed_rollouts_are_counted_as_failed_and_have_no_reward() -> None:
    @agl.rollout
    def agent(task: int) -> float:
        if task:
            raise ValueError("the agent's own")
        return 1.0

    store = agl.InMemoryLightningStore()
    trainer = agl.Trainer(algorithm=agl.Baseline(), store=store, progress=False)
    summary = await asyncio.to_thread(trainer.dev, agent, [0, 1, 1])
    assert (summary.rollouts["succeeded"], summary.rollouts["failed"]) == (1, 2)
    for rollout in await store.query_rollouts():
        rewards = [agl.find_final_reward(await store.query_spans(rollout.rollout_id))]
        assert rewards == [1.0 if rollout.status == "succeeded" else None]


class Doubling(agl.InMemoryLightningStore):
    """A store with one method overridden."""

    async def enqueue_rollout(self, input: Any, mode: Any = None, *args: Any, **options: Any) -> Any:
        return await super().enqueue_rollout(2 * input, mode, *args, **options)


class Half(agl.LitAgent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return task / 2


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
async def test_an_overridden_method_of_a_store_is_called_under_each_strategy(strategy: Any) -> None:
    store, tracer = Doubling(), agl.OtelTracer()
    with tracer.lifespan(store):  # a tracer that has been used keeps no store that cannot be pickled
        pass
    trainer = agl.Trainer(
        algorithm=agl.Baseline(), store=store, strategy=strategy, tracer=tracer, n_runners=1, progress=False
    )
    summary = await asyncio.to_thread(trainer.fit, Half(), [1, 2])
    assert trainer.store is store and summary.reward.last == 1.5 and summary.rollouts["succeeded"] == 2
    assert sorted(rollout.input for rollout in await store.query_rollouts()) == [2, 4]


@pytest.mark.parametrize("kind", [parts.OwnStore, Doubling])
async def test_the_rollouts_that_an_algorithm_adds_to_its_own_store_are_counted(kind: Any) -> None:
    store = kind()
    await store.update_resources("first", {"prompt": RESOURCES["prompt"]})
    await store.enqueue_rollout(9)
    earlier = await store.dequeue_rollout("other")
    await store.update_attempt(earlier.rollout_id, earlier.attempt.attempt_id, status="succeeded")

    @agl.algo
    async def adds(*, store: Any, train_dataset: Any) -> None:
        added = [await store.enqueue_rollout(task) for task in train_dataset]
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in added], timeout=30)

    trainer = agl.Trainer(algorithm=adds, store=store, progress=False)
    summary = await asyncio.to_thread(trainer.fit, Half(), [1, 2])
    assert summary.rollouts["succeeded"] == 2
