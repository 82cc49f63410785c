"""The example that runs anywhere: the commands of its page as they are typed there, only shorter.

Two machines are two addresses of this one: all of 127.0.0.0/8 is. What a command needs to be short is appended to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import leyden as ly
from leyden.trainer.component_registry import ExecutionStrategyRegistry
from leyden.training.runs import open_run
from leyden.types import Worker, semconv

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "several-machines.md").read_text()
MACHINE_A = "127.0.0.2"
SHORT = "--steps 1 --held-out 10"
ROLLOUTS = 120 + 2 * 10
EXTRAS = ("torch", "transformers", "openai")


def commands(place: str) -> list[str]:
    """The lines of the blocks that the page says are for `place`."""
    blocks = re.findall(rf"^<!-- {place} -->\n\n```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def environment() -> dict[str, str]:
    """A new shell's, in which `python` is this one, and no thread of the model's library takes a core from another."""
    from tests.docs.snippets import shell_environment  # which not every group's environment can import

    return shell_environment() | {"OMP_NUM_THREADS": "1"}


def shell(*lines: str) -> list[str]:
    """A shell that runs them; the last one takes its place, so that signals reach it."""
    *first, last = lines
    return ["bash", "-c", "\n".join([*first, f"exec env {last}"]).replace("machine-a", MACHINE_A)]


def run(*lines: str) -> str:
    """What the commands print. They succeed."""
    for name in EXTRAS:
        pytest.importorskip(name)
    done = subprocess.run(shell(*lines), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


async def read() -> tuple[Sequence[ly.Rollout], dict[str, list[ly.Span]], Sequence[Worker]]:
    """What the newest run has kept: rollouts, their spans, workers."""
    async with open_run("latest").open_store() as store:
        rollouts = await store.query_rollouts()
        spans = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
        return rollouts, spans, await store.query_workers()


def check(said: str, *, processes: bool, at_most: int) -> None:
    """The run that was just made was a whole one, and its runners lived where they should.

    processes: one for each runner, else one for all.
    """
    rollouts, spans, workers = asyncio.run(read())
    before, after = (
        statistics.mean(
            ly.find_final_reward(spans[rollout.rollout_id]) or 0.0
            for rollout in rollouts
            if rollout.mode == "val" and rollout.metadata["step"] == step
        )
        for step in (0, 1)
    )
    assert f"won: {before:.2f} before, {after:.2f} after 120 games" in said
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * ROLLOUTS
    for of_one in spans.values():
        assert {span.name for span in of_one} >= {semconv.MODEL_CALL}
        assert ly.find_final_reward(of_one) in (0.0, 1.0)
    assert {rollout.attempt.worker_id for rollout in rollouts if isinstance(rollout, ly.AttemptedRollout)} <= {
        worker.worker_id for worker in workers
    }
    pids = {worker.heartbeat_stats["pid"] for worker in workers if worker.heartbeat_stats}
    assert 1 <= len(workers) <= at_most
    assert len(pids) == (len(workers) if processes else 1)


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory that looks like the repository's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in [name for name in os.environ if name.startswith(("LEYDEN_", "AGL_"))]:
        monkeypatch.delenv(name)


slowly = [pytest.mark.slow, pytest.mark.timeout(240)]  # each loads torch in a process, and plays 140 games


EVERY_STRATEGY = [
    pytest.param(name, marks=[pytest.mark.ray, slowly[1]] if name == "ray" else slowly)
    for name in ExecutionStrategyRegistry
]


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_the_same_agent_is_trained_under_every_strategy(strategy: str) -> None:
    typed = "python examples/anywhere/train.py" + ("" if strategy == "shm" else f" --strategy {strategy}")
    assert strategy == "ray" or typed in commands("here")
    check(run(f"{typed} {SHORT}"), processes=strategy != "shm", at_most=2)


@pytest.mark.parametrize(
    ("name", "runners"), [pytest.param("small", 4, marks=slowly), pytest.param("large", 8, marks=slowly)]
)
def test_a_configuration_for_training_trains(name: str, runners: int) -> None:
    typed = f"python examples/anywhere/configurations.py {name}"
    assert typed in commands("here")
    check(run(f"{typed} {SHORT}"), processes=name == "large", at_most=runners)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_configuration_for_development_plays_each_game_once_and_keeps_nothing() -> None:
    said = run(next(line for line in commands("here") if line.endswith(" development")))
    assert "rollouts: 10 succeeded" in said
    assert not Path(".leyden").exists()


@contextlib.contextmanager
def the_others(*lines: str, ports: tuple[int, int]) -> Iterator[None]:
    """The other machine at work: its command runs until the algorithm has ended, and then ends well by itself."""
    if sys.platform != "linux":
        pytest.skip("only Linux has all of 127.0.0.0/8")
    for name in EXTRAS:
        pytest.importorskip(name)
    for port in ports:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            pytest.skip(f"port {port}, which the commands use, is taken here")
    with subprocess.Popen(
        shell(*lines), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as others:
        try:
            yield
            said, _ = others.communicate(timeout=30)  # half of what they would wait for an algorithm that is away
        except BaseException:
            others.kill()
            raise
    assert others.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_machines_train_together_with_the_commands_of_the_page() -> None:
    secret = commands("on each machine")
    [algorithm], [runners] = commands("on machine-a"), commands("on the others")
    with the_others(*secret, runners, ports=(9999, 10000)):
        check(run(*secret, f"{algorithm} {SHORT}"), processes=True, at_most=16)


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.timeout(240)
def test_the_algorithms_machine_dies_and_the_run_goes_on_with_the_runners_that_are_there() -> None:
    secret = commands("on each machine")
    [algorithm], [runners] = (
        [line.replace("configurations.py machines", "train.py --strategy cs") for line in commands(place)]
        for place in ("on machine-a", "on the others")
    )
    again = f"{algorithm} --steps 3 --held-out 10 --run-dir .leyden/run"
    with the_others(*secret, runners, ports=(4747, 4748)):
        with subprocess.Popen(shell(*secret, again), env=environment(), stderr=subprocess.PIPE, text=True) as first:
            assert first.stderr is not None
            assert any(line.startswith("iteration 1/3") for line in first.stderr), "it ended before its first step"
            first.kill()
        said = run(*secret, f"{again} --resume")
    assert "rollouts: 380 succeeded" in said
    assert "after 360 games" in said
    rollouts, spans, _ = asyncio.run(read())
    assert len({(rollout.mode, rollout.metadata["step"], rollout.metadata["place"]) for rollout in rollouts}) == 380
    assert all(ly.find_final_reward(of_one) in (0.0, 1.0) for of_one in spans.values())


def test_the_configurations_of_the_page_are_those_of_the_program() -> None:
    source = (ROOT / "examples" / "anywhere" / "configurations.py").read_text()
    written = dict(re.findall(r'^    "(\w+)": \{(.*)\},$', source, re.MULTILINE))
    as_arguments = [re.sub(r'"(\w+)": ', r"\1=", options) for options in written.values()]
    assert as_arguments == [
        "n_runners=1, dev=True",
        'n_runners=4, strategy="shm"',
        'n_runners=8, strategy="cs"',
        "n_runners=16, port=9999",
    ]
    for options in as_arguments:
        assert f"`{options}`" in PAGE


def test_every_variable_of_the_strategy_is_on_the_page() -> None:
    source = (ROOT / "leyden" / "execution" / "client_server.py").read_text()
    read = set(re.findall(r'_variable\("(\w+)"\)', source))
    assert read
    for name in read:
        assert f"| `LEYDEN_{name}` | `AGL_{name}` |" in (ROOT / "docs" / "execution.md").read_text()
