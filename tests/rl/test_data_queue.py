"""A data queue hands out each item once, whoever takes part and whoever dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from leyden.errors import ConfigError, SimulatorError
from leyden.rl.data_queue import DataQueue
from leyden.rl.env import vectorize_env
from leyden.rl.producers import start_producers
from tests.rl.consumers import (
    Broken,
    Deadly,
    Slow,
    hold_one,
    hold_one_with_a_helper,
    outlive,
    put_and_mark,
    take_all,
    take_one_and_end,
)
from tests.rl.env.worlds import factory, play

ROOT = Path(__file__).parents[2]


def consumer(method: str, target: Any, queue: Any) -> tuple[Any, Any]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(queue, theirs))
    process.start()
    theirs.close()
    return process, ours


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_share_a_queue_get_each_item_once(method: str) -> None:
    with DataQueue(range(20), shuffle=True) as queue:
        consumers = [consumer(method, take_all, queue) for _ in range(3)]
        taken = [results.recv() for _, results in consumers]
        for process, _ in consumers:
            process.join()
            assert process.exitcode == 0
        assert queue.exhausted
    assert sorted(item for one in taken for item in one) == list(range(20))


def test_what_a_killed_process_held_is_handed_out_again() -> None:
    with DataQueue(range(6), shuffle=False, timeout_seconds=10) as queue:
        process, results = consumer("forkserver", hold_one, queue)
        assert results.recv() == [0, 1]
        process.kill()
        process.join()
        deadline = time.monotonic() + 5
        rest: list[int] = []
        while 1 not in rest and time.monotonic() < deadline:  # until the end of its connection is noticed
            rest += list(queue)
        assert sorted(rest) == [1, 2, 3, 4, 5]


@pytest.mark.faults
@pytest.mark.merge
def test_what_a_killed_process_held_is_handed_out_again_while_its_fork_lives_on() -> None:
    with DataQueue(range(3), shuffle=False, timeout_seconds=10) as queue:
        process, results = consumer("forkserver", hold_one_with_a_helper, queue)
        item, helper = results.recv()
        process.kill()
        process.join()
        deadline = time.monotonic() + 5
        rest: list[int] = []
        try:
            while item not in rest and time.monotonic() < deadline:  # until the end of its connection is noticed
                rest += list(queue)
        finally:
            os.kill(helper, signal.SIGKILL)
        assert sorted(rest) == [0, 1, 2]


CROWDED = """
import os, resource, time
from tests.rl.consumers import take_late, take_one_and_end
from tests.rl.test_data_queue import consumer
from leyden.rl.data_queue import DataQueue
with DataQueue(range(3), shuffle=False) as queue:
    _, results = consumer("fork", take_late, queue)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", 0))
    except OSError:
        time.sleep(0.5)
    for descriptor in held:
        os.close(descriptor)
    _, others = consumer("fork", take_one_and_end, queue)
    print(results.poll(5), others.poll(5))
"""


@pytest.mark.faults
@pytest.mark.merge
def test_consumers_are_let_in_again_when_the_process_may_open_files_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CROWDED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=50
    )
    assert done.stdout == "True True\n"


def test_a_process_that_ends_by_itself_is_done_with_its_last_item() -> None:
    with DataQueue(range(3), shuffle=False) as queue:
        process, results = consumer("forkserver", take_one_and_end, queue)
        assert results.recv() == [0]
        process.join()
        assert list(queue) == [1, 2]


@pytest.mark.parametrize("n_producers", [1, 2])
def test_producers_read_ahead_in_order_and_in_processes_of_their_own(n_producers: int) -> None:
    with DataQueue(Slow(9), shuffle=False, repeat=2, producer_num_workers=n_producers, queue_maxsize=4) as queue:
        taken = list(queue)
    assert [index for index, _ in taken] == [*range(9), *range(9)]
    readers = {pid for _, pid in taken}
    assert len(readers) == n_producers and os.getpid() not in readers


def test_reading_ahead_is_bounded_and_goes_on_for_ever_if_asked(tmp_path: Path) -> None:
    class Counting(Slow):
        def __getitem__(self, index: Any) -> tuple[int, int]:
            (tmp_path / f"{index}-{time.monotonic_ns()}").touch()
            return super().__getitem__(index)

    with DataQueue(Counting(3), repeat=-1, producer_num_workers=2, queue_maxsize=5, seed=1) as queue:
        for _ in range(10):
            queue.get()
        assert not queue.exhausted
        read, before = -1, -2
        while read != before:  # until the producers have nothing to do
            time.sleep(0.1)
            before, read = read, len(list(tmp_path.iterdir()))
        assert read == 10 + 5


@pytest.mark.faults
@pytest.mark.merge
def test_a_producer_that_is_killed_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    dataset = Slow(12, mark=tmp_path / "mark")
    with DataQueue(dataset, shuffle=False, producer_num_workers=2, queue_maxsize=6) as queue:
        assert [index for index, _ in queue] == list(range(12))
    assert (tmp_path / "mark").exists()


@pytest.mark.faults
@pytest.mark.merge
def test_an_item_that_always_kills_its_producer_is_named() -> None:
    with DataQueue(Deadly(3), shuffle=False, producer_num_workers=1) as queue:
        assert queue.get()[0] == 0
        with pytest.raises(
            SimulatorError, match=r"died 3 times while they read item 1; the last one ended with exit code 7"
        ):
            queue.get()


@pytest.mark.parametrize("n_producers", [0, 1])
def test_an_item_that_cannot_be_read_raises_where_it_is_asked_for_and_is_not_lost(n_producers: int) -> None:
    with DataQueue(Broken(3), shuffle=False, producer_num_workers=n_producers, queue_maxsize=1) as queue:
        assert queue.get()[0] == 0
        with pytest.raises(OSError, match="full of holes"):
            queue.get()
        assert not queue.exhausted


def test_waiting_for_an_item_ends_with_the_time_out_and_says_what_is_read() -> None:
    with DataQueue(Slow(2, seconds=60), producer_num_workers=1, timeout_seconds=0.1, shuffle=False) as queue:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"reading items \[0"):
            queue.get()
        with pytest.raises(TimeoutError):
            queue.get(block=False)
        assert time.monotonic() - began < 20
    assert time.monotonic() - began < 40  # a read that hangs does not keep the queue from closing


def test_items_that_are_put_come_first_and_the_end_is_marked() -> None:
    queue: DataQueue[Any] = DataQueue([], queue_maxsize=2)
    queue.put("a")
    queue.put("b")
    with pytest.raises(TimeoutError, match="queue_maxsize"):
        queue.put("c", timeout_seconds=0.01)
    assert queue.get() == "a"
    late = threading.Timer(0.05, queue.put, ["c"])
    done = threading.Timer(0.15, queue.mark_as_done)
    late.start()
    done.start()
    assert list(queue) == ["b", "c"]
    with pytest.raises(StopIteration):
        queue.get()
    with pytest.raises(ConfigError, match="after mark_as_done"):
        queue.put("d")
    late.join()
    done.join()


def test_another_process_may_put_items() -> None:
    queue: DataQueue[Any] = DataQueue(())
    queue.put("first")
    with queue:
        process, _ = consumer("forkserver", put_and_mark, queue)
        assert list(queue) == ["first", 0, 1, 2]
        process.join()


def test_marking_the_end_stops_an_endless_queue() -> None:
    with DataQueue(range(4), repeat=-1) as queue:
        assert len([queue.get() for _ in range(9)]) == 9
        queue.mark_as_done()
        assert list(queue) == []


def everything_started() -> tuple[int, int, int]:
    me = psutil.Process()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("leyden-queue")]
    return me.num_fds(), len(me.children(recursive=True)), len(ours)


def test_cleaning_up_leaves_no_process_thread_or_descriptor() -> None:
    def use() -> None:
        with DataQueue(Slow(50), producer_num_workers=2) as queue:
            process, results = consumer("forkserver", take_one_and_end, queue)
            results.recv()
            process.join()
            process.close()
            results.close()
            queue.get()

    use()  # starts the forkserver
    before = everything_started()
    use()
    assert everything_started() == before
    assert before[2] == 0


def test_a_queue_that_was_closed_says_so_and_goes_on_when_it_is_opened_again() -> None:
    queue = DataQueue(Slow(6), shuffle=False, producer_num_workers=1, queue_maxsize=4)
    with queue:
        assert queue.get()[0] == 0
        with pytest.raises(ConfigError, match="active already"):
            queue.activate()
    with pytest.raises(ConfigError, match="in `with`"):
        queue.get()
    with queue:
        assert [index for index, _ in queue] == [1, 2, 3, 4, 5]


def test_a_process_that_outlives_the_queue_is_told() -> None:
    with DataQueue(range(5), repeat=-1) as queue:
        process, results = consumer("forkserver", outlive, queue)
        results.recv()
    assert "has left its `with`" in results.recv()
    process.join()


def test_a_queue_goes_to_other_processes_only_while_it_is_active() -> None:
    import pickle

    with pytest.raises(ConfigError, match="while it is active"):
        pickle.dumps(DataQueue(range(3)))
    with DataQueue(range(3)) as queue:
        assert pickle.loads(pickle.dumps(queue)) is queue


@pytest.mark.parametrize("kind", ["dummy", "shmem"])
def test_a_vector_environment_draws_from_producers_too(kind: Any) -> None:
    with (
        DataQueue(range(11), producer_num_workers=1, queue_maxsize=3) as queue,
        vectorize_env(factory(), kind, 3, seeds=queue) as venv,
    ):
        assert sorted(episode.seed_index for episode in play(venv)) == list(range(11))
        assert venv.exhausted


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="queue_maxsize is -1"):
        DataQueue(range(3), 1, True, 0, -1)
    with pytest.raises(ConfigError, match="producer_num_workers is -2"):
        DataQueue(range(3), 1, True, -2)


PROGRAM = """
import sys, time
from leyden.rl.data_queue import DataQueue
from tests.rl.consumers import Slow
if __name__ == "__main__":
    queue = DataQueue(Slow(50), producer_num_workers=2).activate()
    queue.get()
    print(*(producer.child.pid for producer in queue._local.producers), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(60)
"""


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("how", ["ends", "wait"])
def test_producers_end_with_a_program_that_forgets_its_queue_or_is_killed(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, script, how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    producers: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # the program may have ended by now
            producers.append(psutil.Process(pid))
    if how == "wait":
        program.kill()
    assert program.wait(20) == (-9 if how == "wait" else 0)
    program.stdout.close()
    assert len(pids) == 2
    _, alive = psutil.wait_procs(producers, timeout=10)
    assert not alive


def test_a_forgotten_queue_is_closed() -> None:
    queue = DataQueue(range(3)).activate()
    assert queue.get() in range(3)
    del queue
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("leyden-queue")]


def test_producers_that_close_while_one_is_being_replaced_are_ended() -> None:
    (producer,) = start_producers([1, 2], 1)
    producer.child.close()  # the next one is not started yet
    producer.close()
    producer.reap()
