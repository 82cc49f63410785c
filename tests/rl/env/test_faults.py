"""Workers that are killed, that hang, and what is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from leyden.errors import ConfigError, SimulatorError
from leyden.rl.env import vectorize_env
from leyden.rl.env.factory import ENV_KINDS
from tests.rl.env.worlds import Unlucky, Walk, actions, factory, play

ROOT = Path(__file__).parents[3]
REMOTE = ["subproc", "shmem"]


def workers_of(venv: Any) -> list[Any]:
    return [worker.child.pid for worker in venv._workers]


@pytest.mark.parametrize("kind", REMOTE)
def test_a_worker_that_dies_names_its_seed_and_signal(kind: Any) -> None:
    with vectorize_env(factory(), kind, 2, seeds=[5, 6], workers=2) as venv:
        venv.reset()
        venv.step(actions(2))
        os.kill(workers_of(venv)[1], signal.SIGKILL)
        with pytest.raises(SimulatorError, match="SIGKILL") as caught:
            venv.step(actions(2))
        assert (caught.value.env_id, caught.value.seed_index, caught.value.step) == (1, 1, 1)
        assert [episode.seed_index for episode in play(venv)] == [0, 1]  # the seed was given back, the worker replaced


@pytest.mark.parametrize("kind", REMOTE)
def test_a_simulator_that_ends_its_process_is_skipped_and_its_neighbours_begin_again(kind: Any) -> None:
    items = [("", "", 6), ("die", "step", 6), ("", "", 6)]
    with vectorize_env(factory(Unlucky), kind, 3, seeds=items, workers=1, on_worker_error="skip") as venv:
        assert sorted(episode.seed_index for episode in play(venv)) == [0, 2]
        assert "exit code 3" in next(lost.reason for lost in venv.lost if lost.seed_index == 1)


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("place", ["construct", "step"])
def test_a_simulator_that_hangs_is_named_and_its_worker_replaced(kind: Any, place: str) -> None:
    items = [("", "", 6), ("hang", place, 6), ("", "", 6)]
    with vectorize_env(
        factory(Unlucky), kind, 3, seeds=items, workers=1, on_worker_error="skip", step_timeout_seconds=3
    ) as venv:
        before = workers_of(venv)
        assert sorted(episode.seed_index for episode in play(venv)) == [0, 2]
        assert before != workers_of(venv)
        guilty = [lost for lost in venv.lost if lost.reason.startswith("it took more than 3 s")]
        assert [(lost.env_id, lost.seed_index, lost.step) for lost in guilty] == [
            (1, 1, 0 if place == "construct" else 1)
        ]


def test_a_factory_that_raises_says_so_with_its_traceback() -> None:
    def broken() -> Any:
        raise OSError("no such market")

    with pytest.raises(SimulatorError, match="no such market"):
        vectorize_env(broken, "shmem", 2)


def test_a_factory_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to a worker"):
        vectorize_env(lambda: lock, "shmem", 2)  # type: ignore[arg-type, return-value]


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from leyden.rl.env import vectorize_env\nfrom tests.rl.env.worlds import factory\n"
        "vectorize_env(factory(), 'shmem', 2, seeds=[1])\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "if __name__ == '__main__'" in done.stderr and "ConfigError" in done.stderr


GUARDED = """
from leyden.rl.env import EnvWrapper, vectorize_env
from tests.rl.env.worlds import Position, Push, Sight, Walk, play
class Mine(Walk):
    pass
if __name__ == "__main__":
    make = lambda: EnvWrapper(Mine, Sight(), Push(), reward_fn=Position())
    for method in ("forkserver", "spawn", "fork"):
        with vectorize_env(make, "shmem", 2, seeds=range(3), start_method=method) as venv:
            print(method, len(play(venv)))
"""


@pytest.mark.slow
@pytest.mark.merge
def test_classes_of_a_script_travel_by_every_start_method(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GUARDED)
    done = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["forkserver 3", "spawn 3", "fork 3"]


def left_behind() -> tuple[int, int, int]:
    """Descriptors, child processes, and shared memory that is mapped. The memory has no name, so /dev/shm cannot have it."""
    me = psutil.Process()
    gc.collect()
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().count("leyden-env") if maps.exists() else 0
    return me.num_fds(), len(me.children(recursive=True)), mapped


@pytest.mark.parametrize("kind", REMOTE)
def test_nothing_is_left_behind_by_closing_or_by_forgetting(kind: Any) -> None:
    play(vectorize_env(factory(), kind, 3, seeds=range(3)))  # starts the forkserver
    before = left_behind()
    for turn in range(4):
        venv = vectorize_env(factory(), kind, 3, seeds=range(5))
        venv.reset()
        venv.step(actions(3))
        if turn % 2:
            venv.close()
        del venv
    assert left_behind() == before


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("kind", ENV_KINDS)
def test_twenty_openings_leave_memory_level_too(kind: Any) -> None:
    def once() -> None:
        with vectorize_env(factory(), kind, 6, seeds=range(30)) as venv:
            play(venv)

    for _ in range(5):
        once()
    before, memory = left_behind(), psutil.Process().memory_info().rss
    for _ in range(20):
        once()
    assert left_behind() == before
    assert psutil.Process().memory_info().rss - memory < 2 * 2**20


@pytest.mark.faults
@pytest.mark.merge
def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nfrom leyden.rl.env import vectorize_env\nfrom tests.rl.env.worlds import Unlucky, factory\n"
        "if __name__ == '__main__':\n"
        "    venv = vectorize_env(factory(Unlucky), 'shmem', 2, seeds=[('hang', 'construct', 1), ('', '', 1)], workers=2)\n"
        "    print(*[worker.child.pid for worker in venv._workers], flush=True)\n"
        "    venv.reset()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("workers", range(1, 9))
def test_every_seed_is_finished_exactly_once_while_workers_are_killed_at_random(kind: Any, workers: int) -> None:
    luck = random.Random(workers)
    finished: list[int] = []
    with vectorize_env(
        factory(Walk), kind, 8, seeds=range(60), workers=workers, on_worker_error="retry", max_retries=50
    ) as venv:
        venv.reset()
        kills = 0
        while venv.alive.any():
            if kills < 12 and luck.random() < 0.3:
                os.kill(luck.choice(workers_of(venv)), signal.SIGKILL)
                kills += 1
            step = venv.step(actions(8))
            for info in step.infos.values():
                if "episode" in info:
                    episode = info["episode"]
                    finished.append(episode.seed_index)
                    positions = [episode.seed_index + 0.25 * at for at in range(1, episode.length + 1)]
                    assert episode.length == 3 + episode.seed_index % 7
                    assert episode.reward == pytest.approx(np.sum(positions))
            if not venv.alive.all() and not venv.exhausted:
                venv.reset()
        assert kills >= 3
        assert len(venv.lost) > 0
    assert sorted(finished) == list(range(60))


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("kind", REMOTE)
def test_a_worker_killed_while_it_steps_loses_no_seed(kind: Any) -> None:
    items = [("", "", 6)] * 6
    with vectorize_env(factory(Slow), kind, 4, seeds=items, workers=2, on_worker_error="retry", max_retries=20) as venv:
        stop = threading.Event()

        def killer() -> None:
            luck = random.Random(0)
            for _ in range(6):
                if stop.wait(0.15):
                    return
                # This thread may look while a worker is replaced: then there is no process, or it has no number yet.
                with suppress(ProcessLookupError, AttributeError, ValueError):
                    if (victim := luck.choice(workers_of(venv))) is not None:
                        os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=killer)
        thread.start()
        episodes = play(venv)
        stop.set()
        thread.join()
    assert sorted(episode.seed_index for episode in episodes) == list(range(6))


class Slow(Unlucky):
    def step(self, action: float) -> None:
        threading.Event().wait(0.03)
        super().step(action)
