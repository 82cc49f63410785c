"""Runners on a Ray cluster: the contract, what dies, what finds no room, and that nothing is left behind.

One cluster of one node serves most tests; it counts two CPUs, whatever the machine has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden.errors import ConfigError, RunInterrupted, RunnerDied
from leyden.execution.ray import RayExecutionStrategy
from tests.contracts.strategy import *  # noqa: F403
from tests.contracts.strategy import MakeStrategy
from tests.execution import agents

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROOT = Path(__file__).parent.parent.parent
NODE = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}
AGAIN = ly.RolloutConfig(max_attempts=20, retry_condition=["failed"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        started = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": QUICK_TO_NOTICE})
        yield started
        started.shutdown()


@pytest.fixture
def make_strategy(cluster: Any) -> MakeStrategy:
    return lambda n_runners: RayExecutionStrategy(n_runners, address=cluster.address, num_cpus=0.5)


async def fit(agent: ly.LitAgent[Any], strategy: RayExecutionStrategy, **options: Any) -> None:
    """A run of a hundred tasks, in memory."""
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(150):
        options = {"algorithm": "baseline", "store": store, **options}
        await ly.Trainer(strategy=strategy, **options).afit(agent, list(range(100)))


# ---- what dies ---------------------------------------------------------------------------------------------------------


class Deaths:
    """An algorithm's work: some rollouts, then more of them while some of the runners' processes are killed."""

    def __init__(self, store: ly.LightningStore) -> None:
        self._store = store

    async def pids(self, number: int) -> set[int]:
        """Return the ids of the runners' processes, once `number` of them work."""
        seen: set[int] = set()
        while len(seen) < number:
            seen |= {int(reward) for reward in await self._finished(await self._enqueue(20, seconds=0.05))}
        return seen

    async def while_they_work(self, kill: Sequence[int]) -> None:
        """Kill these while every runner has rollouts under way."""
        first, rest = await self._enqueue(8, seconds=0.1), await self._enqueue(40, seconds=1.0)
        await self._finished(first)
        for pid in kill:
            os.kill(pid, signal.SIGKILL)
        await self._finished(rest)

    async def _enqueue(self, number: int, *, seconds: float) -> list[str]:
        rollouts = [await self._store.enqueue_rollout(seconds, config=AGAIN) for _ in range(number)]
        return [rollout.rollout_id for rollout in rollouts]

    async def _finished(self, rollout_ids: Sequence[str]) -> list[float]:
        assert len(await self._store.wait_for_rollouts(rollout_ids=rollout_ids)) == len(rollout_ids)
        spans = await self._store.query_spans_of(rollout_ids)
        return [ly.find_final_reward(spans[rollout_id]) or 0.0 for rollout_id in rollout_ids]


async def each_once(strategy: RayExecutionStrategy, algorithm: Any) -> Counter[str]:
    """Run `where` under this algorithm; every rollout succeeded in exactly one attempt. Why others failed."""
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(150):
        trainer = ly.Trainer(algorithm=algorithm, strategy=strategy, store=store, concurrency=4)
        await trainer.afit(agents.where, [0])
        rollouts = await store.query_rollouts()
        attempts = [await store.query_attempts(rollout.rollout_id) for rollout in rollouts]
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert {sum(attempt.status == "succeeded" for attempt in each) for each in attempts} == {1}
    return Counter(str(one.metadata.get("reason_kind")) for each in attempts for one in each if one.status == "failed")


async def test_an_actor_that_is_killed_is_started_again_and_each_rollout_is_done_once(cluster: Any) -> None:
    seen: list[set[int]] = []

    @ly.algo
    async def kill_one(*, store: ly.LightningStore, train_dataset: list[int]) -> None:
        deaths = Deaths(store)
        seen.append(await deaths.pids(2))
        await deaths.while_they_work(kill=list(seen[0])[:1])
        seen.append(await deaths.pids(2))

    failed = await each_once(RayExecutionStrategy(2, address=cluster.address), kill_one)
    assert failed.keys() & {"interrupted", "runner_died"}, "the death cost no attempt"  # one that was alone is to blame
    assert seen[1] - seen[0], "nobody took the dead one's place"


@pytest.mark.timeout(240)
async def test_a_node_that_is_killed_costs_no_rollout(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])
    raylet = node.all_processes["raylet"][0].process.pid
    seen: list[set[int]] = []

    @ly.algo
    async def kill_the_node(*, store: ly.LightningStore, train_dataset: list[int]) -> None:
        deaths = Deaths(store)
        before = {pid for pid in await deaths.pids(3) if psutil.Process(pid).ppid() == raylet}
        assert before, "no runner was on that node"
        await deaths.while_they_work(kill=[raylet])
        seen.append(before)
        seen.append(await deaths.pids(2))

    failed = await each_once(RayExecutionStrategy(3, address=cluster.address), kill_the_node)
    assert failed.keys() & {"interrupted", "runner_died"}, "the death cost no attempt"  # one that was alone is to blame
    assert not seen[0] & seen[1]
    cluster.remove_node(node, allow_graceful=False)


async def test_an_agent_that_ends_its_process_again_and_again_stops_the_run(cluster: Any) -> None:
    with pytest.raises(RunnerDied, match="died 5 times in a row"):
        await fit(agents.die, RayExecutionStrategy(address=cluster.address), concurrency=1)


async def test_a_runner_is_started_so_often_as_its_option_says(cluster: Any) -> None:
    strategy = RayExecutionStrategy(address=cluster.address, max_restarts=1)
    with pytest.raises(RunnerDied, match=r"is not restarted by Ray \(max_restarts=1\)"):
        await fit(agents.die, strategy, concurrency=1)


async def test_what_cannot_be_made_anew_in_the_actor_is_said_with_the_actors_traceback(cluster: Any) -> None:
    with pytest.raises(RunnerDied, match=r"could not start(.|\n)*ZeroDivisionError: made anew"):
        await fit(agents.double, RayExecutionStrategy(address=cluster.address), hooks=agents.Broken())


# ---- room --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need", [{"num_cpus": 64}, {"resources": {"antenna": 1}}])
async def test_runners_that_fit_on_no_node_are_reported_and_stop_the_run(
    cluster: Any, need: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    strategy = RayExecutionStrategy(address=cluster.address, placement_seconds=1.0, **need)
    with pytest.raises(RunnerDied, match=r"found no place on the Ray cluster in 1 s: each runner needs (.|\n)*CPU=2"):
        await fit(agents.double, strategy)
    assert "the cluster has room for 0" in caplog.text


async def test_runners_beyond_the_clusters_room_are_reported_and_the_others_work(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await fit(agents.double, RayExecutionStrategy(3, address=cluster.address))
    assert "3 runners with CPU=1 each, and the cluster has room for 2" in caplog.text


async def test_a_cluster_of_our_own_that_is_too_small_is_an_error_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"2 runners with CPU=9999 each, and the cluster has room for 0; its nodes have: CPU="
    ):
        await fit(agents.double, RayExecutionStrategy(2, num_cpus=9999))
    assert (
        "RAY_AUTH_MODE" not in os.environ
    )  # which a process would refuse other clusters by: see the test after the next


async def test_no_cluster_at_the_address_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match=r"127.0.0.1:1'(.|\n)*ray start --head"):
        await fit(agents.double, RayExecutionStrategy(address="127.0.0.1:1"))


async def test_a_second_address_is_an_error_where_the_process_is_connected(cluster: Any) -> None:
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with pytest.raises(ConfigError, match="connected to a Ray cluster already"):
            await fit(agents.double, RayExecutionStrategy(address=cluster.address))
        await fit(agents.double, RayExecutionStrategy())
        assert ray.is_initialized()
    finally:
        ray.shutdown()


# ---- a cluster of our own ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, subprocess, sys, time
import leyden as ly

FACTOR = 2.0

@ly.rollout
def hang(task: int) -> float:
    child = subprocess.Popen(["sleep", "600"])
    print(f"started {os.getpid()} {child.pid}\\n", end="", flush=True)  # in one piece: the other may be a thread beside this
    time.sleep(600)
    return 1.0

@ly.rollout
async def double(task: int) -> float:
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    return FACTOR * task

strategy = {"type": "ray", "n_runners": 2, "num_cpus": 0.1, "drain_seconds": 0.5}
trainer = ly.Trainer(algorithm="baseline", strategy=strategy, store="memory", progress=False)
print(trainer.fit({"hang": hang, "double": double}[sys.argv[1]], [1, 2]))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, with a short name: sockets are in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def start_script(tmp_path: Path, folder: Path, agent: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # what actors print is printed again by a thread of Ray's in the script, which leaves it in the buffer of a pipe
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, str(script), agent],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.timeout(240)
def test_a_script_starts_a_cluster_and_says_nothing_of_it(tmp_path: Path, folder: Path) -> None:
    process = start_script(tmp_path, folder, "double")
    output, errors = process.communicate(timeout=120)
    assert "rollouts: 2 succeeded" in output.splitlines() and not errors
    assert list(folder.iterdir()) == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_script_that_is_stopped(tmp_path: Path, folder: Path, number: signal.Signals) -> None:
    process = start_script(tmp_path, folder, "hang")
    processes = begun(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGKILL:  # Ray's own agents look for their node for a minute
        processes = [one for one in processes if not one.name().endswith("Agent")]
    else:
        assert RunInterrupted.__name__ in errors
        assert list(folder.iterdir()) == []
    assert psutil.wait_procs(processes, timeout=30)[1] == [], errors


def begun(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All of the script's processes, once both agents run."""
    assert process.stdout is not None
    for _ in range(2):
        assert "started" in process.stdout.readline(), process.communicate(timeout=60)[1]
    return psutil.Process(process.pid).children(recursive=True)
