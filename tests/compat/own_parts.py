"""Implements each interface of Agent Lightning 0.3, and prints what its parts see. The tests run it with the original
package and under the alias, and compare what it prints.
"""

import asyncio
import contextlib
import logging
import threading
import time

import agentlightning as agl
from agentlightning.store.base import UNSET
from agentlightning.tracer.base import get_active_tracer, with_active_tracer_context
from agentlightning.types import AttemptedRollout, TraceStatus

seen = []
FINISHED = ("succeeded", "failed", "cancelled")


class OwnStore(agl.LightningStore):
    """A store of dicts, with some of the interface's methods and no others."""

    def __init__(self):
        self.rollouts, self.attempts, self.spans, self.resources = {}, {}, {}, {}
        self.queue, self.latest, self.lock = [], None, threading.Lock()

    @property
    def capabilities(self):
        return {"thread_safe": True, "async_safe": True, "zero_copy": False, "otlp_traces": False}

    async def enqueue_rollout(self, input, mode=None, resources_id=None, config=None, metadata=None):
        rollout_id = f"mine-{len(self.rollouts)}"
        fields = {"input": input, "mode": mode, "resources_id": resources_id or self.latest, "metadata": metadata or {}}
        self.rollouts[rollout_id] = agl.Rollout(rollout_id=rollout_id, start_time=time.time(), **fields)
        self.queue.append(rollout_id)
        return self.rollouts[rollout_id]

    async def dequeue_rollout(self, worker_id=None):
        with self.lock:
            if not self.queue:
                return None
            rollout_id = self.queue.pop(0)
        attempt = agl.Attempt(
            rollout_id=rollout_id,
            attempt_id=f"at-{rollout_id}",
            sequence_id=1,
            start_time=time.time(),
            worker_id=worker_id,
        )
        self.attempts[rollout_id] = attempt
        self.rollouts[rollout_id].status = "preparing"
        return AttemptedRollout(**dict(self.rollouts[rollout_id]), attempt=attempt)

    async def query_rollouts(self, *, status_in=None, rollout_id_in=None, **options):
        return [
            rollout
            for rollout in self.rollouts.values()
            if (status_in is None or rollout.status in status_in)
            and (rollout_id_in is None or rollout.rollout_id in rollout_id_in)
        ]

    async def get_rollout_by_id(self, rollout_id):
        return self.rollouts.get(rollout_id)

    async def wait_for_rollouts(self, *, rollout_ids, timeout=None):
        end = time.time() + (1e9 if timeout is None else timeout)
        while True:
            done = [self.rollouts[each] for each in rollout_ids if self.rollouts[each].status in FINISHED]
            if len(done) == len(rollout_ids) or time.time() >= end:
                return done
            await asyncio.sleep(0.01)

    async def query_attempts(self, rollout_id, **options):
        return [self.attempts[rollout_id]]

    async def update_attempt(
        self, rollout_id, attempt_id, status=UNSET, worker_id=UNSET, last_heartbeat_time=UNSET, metadata=UNSET
    ):
        if status is not UNSET:
            self.attempts[rollout_id].status = self.rollouts[rollout_id].status = status
        return self.attempts[rollout_id]

    async def get_next_span_sequence_id(self, rollout_id, attempt_id):
        return len(self.spans.get(rollout_id, [])) + 1

    async def add_span(self, span):
        seen.append(f"store: a span {isinstance(span, agl.Span)} {type(span.status).__name__} {span.sequence_id}")
        self.spans.setdefault(span.rollout_id, []).append(span)
        return span

    async def query_spans(self, rollout_id, attempt_id=None, **options):
        return self.spans.get(rollout_id, [])

    async def update_resources(self, resources_id, resources):
        self.latest, now = resources_id, time.time()
        fields = {"create_time": now, "update_time": now, "version": 1, "resources": resources}
        self.resources[resources_id] = agl.ResourcesUpdate(resources_id=resources_id, **fields)
        return self.resources[resources_id]

    async def get_resources_by_id(self, resources_id):
        return self.resources.get(resources_id)

    async def get_latest_resources(self):
        return self.resources.get(self.latest)

    async def update_worker(self, worker_id, heartbeat_stats=UNSET):
        return agl.Worker(worker_id=worker_id)

    def mine(self):
        return "a method of its own"


class CountingStore(agl.InMemoryLightningStore):
    """A store of the package with one method overridden, by the parameters of the interface."""

    async def enqueue_rollout(self, input, mode=None, resources_id=None, config=None, metadata=None):
        seen.append(f"counting store: {input} {mode}")
        return await super().enqueue_rollout(input, mode, resources_id, config, {"counted": True})

    async def update_attempt(self, rollout_id, attempt_id, status=UNSET, worker_id=UNSET, **options):
        seen.append(f"counting store: {status}")
        return await super().update_attempt(rollout_id, attempt_id, status, worker_id)


class OwnStrategy(agl.ExecutionStrategy):
    """The runner in a thread, the algorithm here."""

    def execute(self, algorithm, runner, store):
        seen.append(f"strategy: begins on {type(store).__name__}")
        stop = agl.ThreadingEvent()
        thread = threading.Thread(target=lambda: asyncio.run(runner(store, 0, stop)))
        thread.start()
        try:
            asyncio.run(algorithm(store, stop))
        finally:
            stop.set()
            thread.join()
        seen.append("strategy: done")


class OwnTracer(agl.Tracer):
    """A tracer that notes what is emitted and records nothing."""

    def __init__(self):
        super().__init__()
        self.opened, self.noted = [], []

    @with_active_tracer_context
    @contextlib.asynccontextmanager
    async def trace_context(self, name=None, *, store=None, rollout_id=None, attempt_id=None):
        self.opened.append(name == rollout_id)
        yield self

    def get_last_trace(self):
        return []

    def create_span(self, name, attributes=None, timestamp=None, status=None):
        self.noted.append((name, sorted(attributes or {}), status is None))
        done = status or TraceStatus(status_code="OK")
        return agl.SpanCoreFields(name=name, status=done, attributes=attributes or {}, start_time=1.0, end_time=1.0)


class OwnAdapter(agl.TraceAdapter):
    def adapt(self, source):
        seen.append(f"adapter: {len(source)} {all(isinstance(span, agl.Span) for span in source)}")
        return []


class OwnHook(agl.Hook):
    async def on_rollout_start(self, *, agent, runner, rollout):
        seen.append(f"hook: begins {rollout.input} {isinstance(rollout, AttemptedRollout)}")

    async def on_rollout_end(self, *, agent, runner, rollout, spans):
        seen.append(f"hook: ends {rollout.input} {isinstance(runner.get_store(), agl.LightningStore)}")


class OwnRunner(agl.Runner):
    """A runner with a loop of its own."""

    def init(self, agent, *, hooks=None, **options):
        self.agent, self.hooks = agent, hooks

    def init_worker(self, worker_id, store, **options):
        self.worker_id, self.store = worker_id, store

    async def iter(self, *, event=None):
        while not event.is_set():
            rollout = await self.store.dequeue_rollout(worker_id="own")
            if rollout is None:
                await asyncio.sleep(0.01)
                continue
            resources = (await self.store.get_resources_by_id(rollout.resources_id)).resources
            seen.append(f"runner: {self.agent.rollout(rollout.input, resources, rollout)} {type(self.store).__name__}")
            await self.store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")

    def teardown_worker(self, worker_id, *args, **options):
        seen.append("runner: worker torn down")

    def teardown(self, *args, **options):
        seen.append("runner: torn down")


def own_emitter(text):
    get_active_tracer().create_span("own.event", {"text": text})


class OwnAgent(agl.LitAgent):
    def rollout(self, task, resources, rollout):
        prompt = resources["prompt"]
        seen.append(f"agent: {isinstance(prompt, agl.PromptTemplate)} {prompt.format(x=task)}")
        if task == 3:
            raise ValueError("the agent's own")
        if get_active_tracer() is not None:
            agl.emit_message(f"message {task}")
            own_emitter("event")
        return task / 2


class OwnAlgorithm(agl.Algorithm):
    async def run(self, train_dataset=None, val_dataset=None):
        store = self.get_store()
        update = await store.update_resources("first", self.get_initial_resources())
        rollouts = [
            await store.enqueue_rollout(task, mode="train", resources_id=update.resources_id) for task in train_dataset
        ]
        done = await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in rollouts], timeout=60)
        for rollout in sorted(done, key=lambda each: each.input):
            spans = await store.query_spans(rollout.rollout_id)
            seen.append(f"algorithm: {rollout.input} {rollout.status} {agl.find_final_reward(spans)}")
            self.get_adapter().adapt(spans)


def trainer(store, strategy, algorithm, **options):
    tracer = OwnTracer()
    options.setdefault("runner", agl.LitAgentRunner(tracer, poll_interval=0.02, interval_jitter=0.0))
    made = agl.Trainer(
        algorithm=algorithm,
        store=store,
        strategy=strategy,
        tracer=tracer,
        adapter=OwnAdapter(),
        initial_resources={"prompt": agl.PromptTemplate(template="<{x}>", engine="f-string")},
        **options,
    )
    return made, tracer


def show(title, *values, ordered=True):
    """Print what was seen. ordered: whether the program itself says what comes first."""
    print("#", title, *values)
    for line in seen if ordered else sorted(seen):
        print(line)
    seen.clear()


def main():
    logging.disable(logging.CRITICAL)
    store = OwnStore()
    made, tracer = trainer(store, OwnStrategy(), OwnAlgorithm(), hooks=OwnHook())
    made.fit(OwnAgent(), [1, 2, 3])
    show("fit, all parts", made.store is store, store.mine(), tracer.opened, tracer.noted)

    store = OwnStore()
    made, _ = trainer(store, OwnStrategy(), agl.Baseline(polling_interval=0.05))
    made.dev(OwnAgent(), [1, 2], val_dataset=[3])
    show(
        "dev, the package's algorithm",
        sorted((each.input, each.mode, each.status) for each in store.rollouts.values()),
        ordered=False,
    )

    for kind in (OwnStore, CountingStore):
        store, shm = kind(), agl.SharedMemoryExecutionStrategy(main_thread="algorithm")
        made, _ = trainer(store, shm, agl.Baseline(polling_interval=0.05))
        made.fit(OwnAgent(), [1, 2])
        found = asyncio.run(store.query_rollouts())
        show(
            "fit, the package's strategy", sorted((each.input, each.mode, each.status) for each in found), ordered=False
        )

    made, _ = trainer(OwnStore(), OwnStrategy(), OwnAlgorithm(), runner=OwnRunner())
    made.fit(OwnAgent(), [4])
    show("fit, a runner", made.n_runners)

    made, _ = trainer(OwnStore(), OwnStrategy(), agl.Baseline(polling_interval=0.05))
    made.dev(OwnAgent())
    show("dev without data")

    base = agl.LightningStore()
    for call in (base.get_latest_resources(), base.enqueue_rollout(1), base.query_spans("ro-1")):
        try:
            asyncio.run(call)
        except NotImplementedError:
            print("NotImplementedError")


if __name__ == "__main__":
    main()
