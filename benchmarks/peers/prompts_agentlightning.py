"""The APO of agentlightning 0.3.0 on a world of `PromptSim`: a peer's half of `benchmarks/prompts.py`.

The package's algorithm and store run unchanged on an event loop whose time is simulated, so that its waiting and polling count and
cost nothing. Sixteen workers take rollouts from the store as soon as one is enqueued. Three things are replaced: its clock, the
renderer of its requests, which starts a Node process for each, and the validator of messages, which the package makes anew for each
message and which is made once here. Each request is rendered by it once, with marks, which are then filled in; `check()` compares
the results.

Runs in the environment `bench-prompts`. Takes `{"family": ..., "seed": ...}` a line and prints the run as JSON.
"""

# The package is in the environment `bench-prompts`, so its names are unknown here.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import selectors
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise each start asks the network for a table of prices
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import agentlightning as agl
import agentlightning.adapter.messages as messages
import agentlightning.algorithm.apo.apo as apo
import poml
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Span

from benchmarks.peers.prompts_world import (
    BUDGET,
    LIMIT,
    N_TRAIN,
    N_VAL,
    REFLECTION_SECONDS,
    SHARE,
    SLOTS,
    Spent,
    Trace,
    measure,
)

BEAM_WIDTH, BRANCH_FACTOR = 1, 2
"""As for Leyden's APO. With the package's defaults, 4 and 4, a round takes half of the budget."""


# ---- simulated time ------------------------------------------------------------------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        self._loop.skip(timeout)
        return super().select(0)


# ---- the package's requests ----------------------------------------------------------------------------------------------


class Requests:
    """Renders the package's request files as `poml.poml` does, with one process for each file and number of spans."""

    def __init__(self) -> None:
        self._rendered: dict[tuple[str, ...], str] = {}

    def poml(self, path: Path, *, context: dict[str, Any], format: str) -> dict[str, Any]:
        experiments: Sequence[Any] = context.get("experiments", ())
        marks = {name: f"MARK-{name}" for name in ("prompt_template", "critique") if name in context}
        values = {mark: context[name] for name, mark in marks.items()}
        marked: list[dict[str, Any]] = []
        for place, each in enumerate(experiments):
            # as JSON, strings stand in quotation marks, which are replaced too
            spans = [f"MARK-span-{place}-{number}-" for number in range(len(each["spans"]))]
            marked.append(
                {
                    "status": f"MARK-status-{place}-",
                    "final_reward": f"MARK-reward-{place}-",
                    "messages": {"mark": f"MARK-messages-{place}-"},
                    "spans": [{"mark": mark} for mark in spans],
                }
            )
            values[f"MARK-status-{place}-"] = each["status"]
            values[f"MARK-reward-{place}-"] = _number(each["final_reward"])
            values[json.dumps({"mark": f"MARK-messages-{place}-"}, separators=(",", ":"))] = _json(each["messages"])
            for mark, span in zip(spans, each["spans"], strict=True):
                values[json.dumps({"mark": mark}, separators=(",", ":"))] = _json(span)
        key = (str(path), *(str(len(each["spans"])) for each in experiments))
        if key not in self._rendered:
            given = {**marks, **({"experiments": marked} if experiments else {})}
            self._rendered[key] = json.dumps(poml.poml(path, context=given, format="openai_chat"))
        rendered = json.loads(self._rendered[key])
        for message in rendered["messages"]:
            for mark, value in values.items():
                message["content"] = message["content"].replace(mark, value)
        return rendered


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _number(value: float | None) -> str:
    """Return a number as JavaScript writes it."""
    return "null" if value is None else f"{value:g}"


# ---- the optimiser -------------------------------------------------------------------------------------------------------


class _Over(Exception):
    """The run is over."""


class _Store(InMemoryLightningStore):
    """Counts rollouts, and tells the workers of each.

    at_budget: called when the rollouts of the budget were requested. is_over: asked before each one after those.
    """

    def __init__(self, at_budget: Callable[[], None], is_over: Callable[[], bool]) -> None:
        super().__init__()
        self.queued: asyncio.Queue[None] = asyncio.Queue()
        self.requested = 0
        self._at_budget, self._is_over = at_budget, is_over

    async def enqueue_rollout(self, *args: Any, **kwargs: Any) -> Any:
        if self.requested == BUDGET:
            self._at_budget()
        if self.requested >= BUDGET and (self.requested == LIMIT or self._is_over()):
            raise _Over
        self.requested += 1
        rollout = await super().enqueue_rollout(*args, **kwargs)
        self.queued.put_nowait(None)
        return rollout


class _APO(apo.APO[Any]):
    trace: Trace
    name: str
    _noted: str | None = None

    def best(self) -> dict[str, str]:
        """Return the best prompts so far."""
        return {**self.trace.sim.initial_prompts, self.name: self.get_best_prompt().template}

    def note(self) -> None:
        """Note the best prompts, if they are new ones."""
        self.trace.clock.end = asyncio.get_running_loop().time()
        best = self.best()
        if best[self.name] != self._noted:
            self._noted = best[self.name]
            self.trace.best(best)

    def note_budget(self) -> None:
        """Note what was found when the budget was spent."""
        self.note()
        trace = self.trace
        trace.spent = Spent(trace.rollouts, trace.reflections, trace.clock.end, self.best(), self._history_best_score)

    def is_there(self) -> bool:
        """Return whether any best prompts so far came to the wanted share of the optimum."""
        return any(truth >= SHARE for _, _, truth in self.trace.curve)

    def _sample_parent_prompts(self, beam: Any, round_num: int) -> Any:
        self.note()
        return super()._sample_parent_prompts(beam, round_num)

    async def _update_best_prompt(self, *args: Any, **kwargs: Any) -> None:
        await super()._update_best_prompt(*args, **kwargs)
        self.note()


class _Client:
    """The reflection model."""

    def __init__(self, trace: Trace) -> None:
        self.chat = self.completions = self
        self._trace = trace

    async def create(self, *, messages: list[dict[str, Any]], **options: Any) -> Any:
        self._trace.reflections += 1
        text = "\n\n".join(message["content"] for message in messages)
        answer = self._trace.sim.reflect(text, replica=self._trace.reflections)
        await asyncio.sleep(REFLECTION_SECONDS)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=answer))])


async def _work(store: _Store, trace: Trace) -> None:
    """Run rollouts, one at a time."""
    while True:
        await store.queued.get()
        rollout = await store.dequeue_rollout()
        assert rollout is not None and rollout.resources_id is not None
        update = await store.get_resources_by_id(rollout.resources_id)
        assert update is not None
        prompts = {**trace.sim.initial_prompts, **{name: each.template for name, each in update.resources.items()}}
        attempt = trace.sim.attempt(prompts, rollout.input)
        trace.rollouts += 1
        await asyncio.sleep(trace.seconds(prompts, rollout.input))
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        if not math.isinf(attempt.seconds):
            chats = [
                _chat(prompts[name], rollout.input, text) for name, text in zip(prompts, attempt.answers, strict=True)
            ]
            reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": attempt.reward}
            for number, attributes in enumerate([*chats, reward]):
                await store.add_span(Span.from_attributes(attributes=attributes, sequence_id=number, **ids))
        await store.update_attempt(*ids.values(), status="failed" if math.isinf(attempt.seconds) else "succeeded")


def _chat(prompt: str, task: Any, answer: str) -> dict[str, Any]:
    messages = [
        ("prompt.0", "system", prompt),
        ("prompt.1", "user", task["text"]),
        ("completion.0", "assistant", answer),
    ]
    return {
        f"gen_ai.{place}.{field}": value
        for place, role, text in messages
        for field, value in (("role", role), ("content", text))
    }


async def _optimise(trace: Trace, seed: int) -> tuple[dict[str, str], float]:
    random.seed(seed)
    algorithm: Any = _APO(_Client(trace), beam_width=BEAM_WIDTH, branch_factor=BRANCH_FACTOR, beam_rounds=1000)
    algorithm.trace, algorithm.name = trace, next(iter(trace.sim.initial_prompts))
    prompts = {
        name: agl.PromptTemplate(template=text, engine="f-string") for name, text in trace.sim.initial_prompts.items()
    }
    adapter = agl.TraceToMessages()
    store = _Store(algorithm.note_budget, algorithm.is_there)
    algorithm.set_store(store)
    algorithm.set_adapter(adapter)
    algorithm.set_initial_resources(prompts)
    workers = [asyncio.create_task(_work(store, trace)) for _ in range(SLOTS)]
    running = asyncio.ensure_future(algorithm.run(trace.sim.tasks(N_TRAIN), trace.sim.tasks(N_VAL, start=100)))
    await asyncio.wait([running, *workers], return_when=asyncio.FIRST_COMPLETED)
    for each in (running, *workers):
        if not each.done():
            each.cancel()
        elif not isinstance(each.exception(), _Over):
            each.result()
    algorithm.note()
    return algorithm.best(), algorithm._history_best_score


def optimise(trace: Trace, seed: int) -> tuple[dict[str, str], float]:
    """Run the package's APO until it comes to 95 % of the optimum or to `LIMIT`, at least until its budget is spent.

    Return its best prompts and their mean reward on the validation set.
    """
    loop = VirtualLoop()
    apo.time = SimpleNamespace(time=loop.time)
    try:
        return loop.run_until_complete(_optimise(trace, seed))
    finally:
        loop.close()


def check() -> None:
    """Compare the requests with those of the package's own renderer."""
    chat = [{"role": "system", "content": 'Say "a" & <b>.'}, {"role": "assistant", "content": "Not solved.\nSorry."}]
    spans = [{"attributes": {"gen_ai.prompt.0.content": "x"}, "n": 1}, {"reward": 0.5}]
    ran = [{"status": "succeeded", "final_reward": reward, "messages": chat, "spans": spans} for reward in (0.0, 1.0)]
    context = {
        "experiments": ran,
        "prompt_template": "You answer.\nGreet the customer's name.",
        "critique": "- cold\n- slow",
    }
    for paths, names in ((apo.GRADIENT_PROMPT_FILES, ("experiments",)), (apo.APPLY_EDIT_PROMPT_FILES, ("critique",))):
        given = {name: context[name] for name in ("prompt_template", *names)}
        for path in paths:
            found, own = (render(path, context=given, format="openai_chat") for render in (Requests().poml, poml.poml))
            assert found == own, path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print is no answer
    apo.poml = Requests()
    messages.TypeAdapter = functools.cache(messages.TypeAdapter)
    for line in sys.stdin:
        asked = json.loads(line)
        run = measure("agentlightning 0.3.0 APO", optimise, asked["family"], asked["seed"])
        print(json.dumps(vars(run)), file=answers, flush=True)


if __name__ == "__main__":
    check() if "--check" in sys.argv else main()
