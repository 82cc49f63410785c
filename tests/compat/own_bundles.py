"""Calls strategies of Agent Lightning by hand, with bundles of its own, and prints what comes back.

The tests run it with the original package and under the alias, and compare what it prints.
"""

import asyncio
import logging
import sys

import agentlightning as agl


async def algorithm(store, event):
    rollouts = [await store.enqueue_rollout({"n": number}) for number in range(4)]
    done = []
    while len(done) < len(rollouts):
        await asyncio.sleep(0.02)
        done = await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in rollouts], timeout=0.0)
    print("algorithm:", {each.status for each in done}, isinstance(store, agl.LightningStore), event.is_set())


async def runner(store, worker_id, event):
    while not event.is_set():
        rollout = await store.dequeue_rollout(worker_id=f"own-{worker_id}")
        if rollout is None:
            await asyncio.sleep(0.01)
        else:
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")


async def failing_algorithm(store, event):
    raise ValueError("the algorithm's own")


async def failing_runner(store, worker_id, event):
    raise KeyError("the runner's own")


def main(port):
    logging.disable(logging.CRITICAL)
    for strategy in (
        agl.SharedMemoryExecutionStrategy(n_runners=2, main_thread="algorithm"),
        agl.ClientServerExecutionStrategy(n_runners=2, server_port=port, graceful_timeout=3.0),
    ):
        store = agl.InMemoryLightningStore(thread_safe=True)
        result = strategy.execute(algorithm, runner, store)
        statuses = [each.status for each in asyncio.run(store.query_rollouts())]
        print(type(strategy).__name__, strategy.alias, strategy.n_runners, result, statuses)
    print(strategy.main_process, strategy.graceful_timeout, strategy.terminate_timeout, strategy.allowed_exit_codes)
    for name, its_algorithm, its_runner in (
        ("algorithm", failing_algorithm, runner),
        ("runner", algorithm, failing_runner),
    ):
        try:
            shm = agl.SharedMemoryExecutionStrategy(main_thread="algorithm", graceful_delay=0.5)
            shm.execute(its_algorithm, its_runner, agl.InMemoryLightningStore())
        except (ValueError, KeyError) as error:
            print(f"a failing {name}:", type(error).__name__, error)
    for options in ({"main_process": "runner", "n_runners": 2}, {"main_process": "both"}):
        try:
            agl.ClientServerExecutionStrategy(**options)
        except ValueError:
            print("ValueError")


if __name__ == "__main__":
    main(int(sys.argv[1]))
