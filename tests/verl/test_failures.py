"""What becomes of Ray's errors: one error that names the process, its reason and its last lines."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from leyden.algorithm.verl.failures import explained
from leyden.errors import ConfigError, EngineError, NoTrainingData

pytestmark = [pytest.mark.verl, pytest.mark.merge]
DEAD = "The actor is dead because its worker process has died.\nWorker exit type: SYSTEM_ERROR"


def died(*, ip: str) -> ActorDiedError:
    return ActorDiedError(
        ActorDiedErrorContext(
            class_name="CPUWorker", actor_id=b"\1" * 16, pid=4242, node_ip_address=ip, error_message=DEAD
        )
    )


def message_of(error: Exception, logs: Path | None = None, step: int | None = 3) -> str:
    """Return the message of the EngineError that an error becomes."""
    with pytest.raises(EngineError) as caught, explained(logs, lambda: (), lambda: step):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def test_a_process_that_raised_is_named_with_its_traceback() -> None:
    try:
        [][1]
    except IndexError as error:
        raised = RayTaskError(
            "train", traceback.format_exc(), error, proctitle="ray::WorkerDict.train", pid=77, ip="10.0.0.1"
        )
    first, *lines = message_of(raised.as_instanceof_cause()).splitlines()
    assert first == (
        "verl failed in step 3: WorkerDict.train (pid 77 on 10.0.0.1) raised IndexError: list index out of range; "
        "the last lines of its traceback:"
    )
    assert lines[-1] == "IndexError: list index out of range" and "\x1b" not in "".join(lines)


def test_a_process_that_died_is_named_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01000000-4242.out").write_text(":job_id:01000000\nepoch 1\n")
    (tmp_path / "worker-ab-01000000-4242.err").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "worker-cd-01000000-5.err").write_text("another's\n")
    first, *lines = message_of(died(ip=ray.util.get_node_ip_address()), tmp_path, step=None).splitlines()
    assert first.startswith("verl failed: CPUWorker (pid 4242 on ")
    assert first.endswith("has died. Worker exit type: SYSTEM_ERROR; the last lines of its log:")
    assert lines == [f"line {number}" for number in range(80, 100)]


@pytest.mark.parametrize("has_logs", [True, False])
def test_the_log_of_another_machine_is_said_to_be_there(tmp_path: Path, has_logs: bool) -> None:
    (tmp_path / "worker-ab-01000000-4242.err").write_text("of a process with the same pid here\n")
    lines = message_of(died(ip="10.9.9.9"), tmp_path if has_logs else None).splitlines()
    assert lines[-1] == "(none here; look for worker-*-4242.err in Ray's session folder on 10.9.9.9)"


def test_another_error_of_ray_is_named_too() -> None:
    assert "a process of Ray failed: GetTimeoutError: too slow" in message_of(GetTimeoutError("too slow"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Any, Path]]:
    """A class of actors on a small cluster, and the folder of the cluster's logs."""

    class Talker:  # here, so that Ray sends its code and need not import this module
        def __init__(self, good: bool = True) -> None:
            if not good:
                raise LookupError("no model")

        def die(self, words: str) -> None:
            print(words, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        def fail(self) -> None:
            raise LookupError("no such thing")

    context = ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray.remote(num_cpus=0)(Talker), Path(context.address_info["session_dir"]) / "logs"
    ray.shutdown()


@pytest.mark.timeout(240)
def test_an_actor_that_is_killed_is_named_with_its_last_words(cluster: tuple[Any, Path]) -> None:
    actors, logs = cluster
    with pytest.raises(EngineError) as caught, explained(logs, lambda: (), lambda: 2):
        ray.get(actors.remote().die.remote("the last words"))
    first, *lines = str(caught.value).splitlines()
    assert re.match(r"verl failed in step 2: \S*Talker \(pid \d+ on [\d.]+\) died: The actor died unexpectedly", first)
    assert first.endswith("the last lines of its log:") and lines == ["the last words"]


@pytest.mark.timeout(240)
def test_an_actor_that_raises_is_named_with_its_error(cluster: tuple[Any, Path]) -> None:
    actors, logs = cluster
    with pytest.raises(EngineError) as caught, explained(logs, lambda: (), lambda: 2):
        ray.get(actors.remote().fail.remote())
    first, *lines = str(caught.value).splitlines()
    assert re.match(
        r"verl failed in step 2: \S*Talker\.fail \(pid \d+ on [\d.]+\) raised LookupError: no such thing;", first
    )
    assert lines[-1] == "LookupError: no such thing"


@pytest.mark.timeout(240)
def test_an_actor_that_cannot_be_made_is_named_with_its_error(cluster: tuple[Any, Path]) -> None:
    actors, logs = cluster
    with pytest.raises(EngineError) as caught, explained(logs, lambda: (), lambda: None):
        ray.get(actors.remote(good=False).fail.remote())
    first, *lines = str(caught.value).splitlines()
    assert re.match(r"verl failed: \S*Talker.__init__ \(pid \d+ on [\d.]+\) raised LookupError: no model;", first)
    assert lines[-1] == "LookupError: no model"


@pytest.mark.timeout(240)
def test_a_server_that_died_is_the_cause_of_an_error_that_it_led_to(cluster: tuple[Any, Path]) -> None:
    actors, logs = cluster
    living, dead = actors.remote(), actors.remote()
    with pytest.raises(RayActorError):
        ray.get(dead.die.remote("the server's last words"))
    with pytest.raises(EngineError) as caught, explained(logs, lambda: (living, dead), lambda: 2):
        raise NoTrainingData("step 2 has nothing to train on")
    lines = str(caught.value).splitlines()
    assert re.match(r"verl failed in step 2, because \S*Talker \(pid \d+ on [\d.]+\) died: ", lines[0])
    assert lines[1:] == ["the server's last words", "It led to NoTrainingData: step 2 has nothing to train on"]
    with pytest.raises(NoTrainingData), explained(logs, lambda: (living,), lambda: 2):
        raise NoTrainingData("step 2 has nothing to train on")


@pytest.mark.parametrize("error", [ArithmeticError("enough"), ConfigError("leyden.mode is wrong")])
def test_an_error_of_the_trainer_itself_passes_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained(None, lambda: (), lambda: 3):
        raise error
    assert caught.value is error
