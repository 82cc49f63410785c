"""Life and death of the child process, and what importing the package costs."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

import leyden as ly
from leyden.engine import EmbeddedBackend, IsolatedBackend, OptimParams, SamplingParams
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import LOSSES
from leyden.types import TrainingSequence
from tests.contracts.engine import sequence_of
from tests.engine import tiny
from tests.engine.waiting import until_sampling

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


def child_of(pid: int) -> psutil.Process:
    """The engine process that `pid` started last; an earlier test of this process may have left one that is about to end."""
    children = [each for each in psutil.Process(pid).children() if "leyden.engine.serve" in each.cmdline()]
    return max(children, key=psutil.Process.create_time)


def gone(process: psutil.Process, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


async def test_a_killed_child_is_reported_with_how_it_ended(folder: Path):
    async with IsolatedBackend(folder) as backend:
        child = child_of(os.getpid())
        endless = asyncio.create_task(backend.sample([[1, i] for i in range(100)], SamplingParams(max_tokens=500)))
        await until_sampling(backend)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match=f"pid {child.pid}.*SIGKILL.*\n.*logits come from"):
            await endless
        with pytest.raises(EngineError, match="SIGKILL"):
            await backend.statistics()


@pytest.mark.slow
@pytest.mark.merge
async def test_stopping_is_quick_even_with_work_under_way(folder: Path):
    backend = IsolatedBackend(folder)
    await backend.start()
    child = child_of(os.getpid())
    endless = asyncio.create_task(backend.sample([[1, i] for i in range(100)], SamplingParams(max_tokens=500)))
    await until_sampling(backend)
    started = time.monotonic()
    await backend.stop()
    assert time.monotonic() - started < 2
    with pytest.raises(EngineError, match="stopped during sample"):
        await endless
    assert gone(child)


PARENT = """
import asyncio, os, signal, sys
from leyden.engine import IsolatedBackend
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would hand down "ignore"
async def main():
    await IsolatedBackend(sys.argv[1]).start()
    if sys.argv[2] == "fork" and os.fork() == 0:
        import time
        time.sleep(60)
    print("up", flush=True)
    while True:  # a process that was stopped may take a signal in another thread, which does not wake the main one
        await asyncio.sleep(0.1)
asyncio.run(main())
"""


@pytest.fixture
def parent(folder: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started a backend, in a process group of its own, as a terminal would make one."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    process.stdout.close()


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("parent", ["alone", "fork"], indirect=True)
def test_a_parent_that_is_killed_leaves_no_child(parent: subprocess.Popen[bytes]):
    child = child_of(parent.pid)
    parent.kill()
    parent.wait()
    assert gone(child)


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("parent", ["alone"], indirect=True)
def test_ctrl_c_does_not_reach_the_child_before_its_parent_ends(parent: subprocess.Popen[bytes]):
    child = child_of(parent.pid)
    os.kill(parent.pid, signal.SIGSTOP)
    os.killpg(parent.pid, signal.SIGINT)
    child.send_signal(signal.SIGINT)
    assert not gone(child, seconds=0.5)
    os.kill(parent.pid, signal.SIGCONT)
    assert parent.wait(timeout=10) != 0
    assert gone(child)


@pytest.mark.slow
@pytest.mark.merge
async def test_a_child_that_cannot_start_says_why(tmp_path: Path):
    backend = IsolatedBackend(tmp_path / "nothing")
    with pytest.raises(EngineError, match=r"there is no folder .* \(looked for "):
        await backend.start()
    with pytest.raises(EngineError, match="not running"):
        backend.endpoint()
    await backend.stop()


async def test_training_is_refused_without_the_control_key(folder: Path):
    async with EmbeddedBackend(folder, control_key="right") as backend:
        url = backend.endpoint().endpoint.replace("/v1", "/control/statistics")
        async with aiohttp.ClientSession() as session:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer no"}, 401),
                ({"Authorization": "Bearer right"}, 200),
            ):
                async with session.post(url, json={}, headers=headers) as answer:
                    assert answer.status == status
    async with EmbeddedBackend(folder) as backend:
        url = backend.endpoint().endpoint.replace("/v1", "/control/statistics")
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            assert answer.status == 404


def test_what_cannot_go_to_another_process_is_refused_at_once(folder: Path):
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        IsolatedBackend(tiny.model())
    with pytest.raises(ConfigError, match="tokenizer is a"):
        IsolatedBackend(folder, tokenizer=tiny.tokenizer())
    with pytest.raises(ConfigError, match="max_batch_rows"):
        IsolatedBackend(folder, max_batch_rows=0)
    with pytest.raises(TypeError, match="colour"):
        IsolatedBackend(folder, colour="red")


def test_importing_the_package_loads_no_model_library_and_no_server():
    code = "import leyden.engine, sys, json; print(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert not {"torch", "transformers", "safetensors", "numpy", "uvicorn", "starlette", "aiohttp"} & set(
        json.loads(output)
    )


_OWN_LOSS = """
from dataclasses import dataclass
from leyden.objectives.losses import Loss, LossTerms, register_loss

@dataclass(frozen=True, slots=True)
class {kind}(Loss):
    scale: float = 2.0

@register_loss({name!r}, {kind}, columns=("advantages",))
def objective(batch, constants):
    terms = constants.scale * batch.logprobs_N * batch.columns["advantages"]
    return LossTerms({terms})
"""


@pytest.fixture
def own_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes a module with a loss beside a script, imports it as the script does, and returns the loss's constants."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(name: str, terms: str = "terms", kind: str = "OwnLoss") -> Any:
        (tmp_path / f"loss_of_{name}.py").write_text(_OWN_LOSS.format(name=name, terms=terms, kind=kind))
        made.append(name)
        return getattr(importlib.import_module(f"loss_of_{name}"), kind)()

    yield make
    for name in made:
        LOSSES.pop(name)
        sys.modules.pop(f"loss_of_{name}")


def one_sequence() -> TrainingSequence:
    return sequence_of([1, 2, 3, 4], [0, -1.0, -1.0, -1.0], [1.0] * 4, [0, 1.0, 1.0, 1.0])


async def test_a_loss_in_a_module_beside_the_script_has_the_same_gradient_in_its_own_process(
    folder: Path, own_loss: Callable[..., Any]
):
    loss = own_loss("beside", 'terms, sums={"seen": terms.detach().sum()}')
    results: list[Any] = []
    for kind in (EmbeddedBackend, IsolatedBackend):
        async with kind(folder) as backend:
            result = await backend.forward_backward([one_sequence()], loss)
            results.append((result.loss, result.metrics["seen"], (await backend.optim_step(OptimParams())).grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


async def test_a_loss_that_the_engine_cannot_import_is_named_before_anything_is_sampled(
    folder: Path, own_loss: Callable[..., Any], tmp_path: Path
):
    loss = own_loss("gone")
    (tmp_path / "loss_of_gone.py").write_text("import nowhere\n")
    backend = IsolatedBackend(folder)
    ly.PolicyGradient(backend, n_steps=1, loss=loss)
    with pytest.raises(
        ConfigError, match=r"'loss_of_gone', the module of the loss 'gone': ModuleNotFoundError: .*nowhere"
    ):
        await backend.start()
    (tmp_path / "loss_of_gone.py").write_text("")
    with pytest.raises(ConfigError, match="'loss_of_gone' does not register the loss 'gone'"):
        await backend.start()


def test_a_loss_of_the_script_itself_is_refused_for_another_process(
    folder: Path, own_loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    loss = own_loss("main")
    monkeypatch.setattr(type(loss), "__module__", "__main__")
    ly.PolicyGradient(EmbeddedBackend(folder), n_steps=1, loss=loss)
    with pytest.raises(ConfigError, match="move OwnLoss and its function to a module beside the script"):
        ly.PolicyGradient(IsolatedBackend(folder), n_steps=1, loss=loss)


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ('terms, sums={"seen": terms}', r"sums\['seen'\] of shape \(3,\)"),
        ('terms, maxima={"seen": terms.amax(0, keepdim=True)}', r"maxima\['seen'\] of shape \(1,\)"),
        ('terms, sums={"seen": 1.0}', r"sums\['seen'\] of shape float"),
        ("terms.mean()", r"objective_N of shape \(\); it must have the shape \(3,\)"),
        ("terms[:, None]", r"objective_N of shape \(3, 1\)"),
        ("terms.detach()", "objective_N without a gradient"),
    ],
)
async def test_a_tensor_of_the_wrong_shape_is_named_with_its_loss(
    terms: str, says: str, folder: Path, own_loss: Callable[..., Any]
):
    async with EmbeddedBackend(folder) as backend:
        with pytest.raises(ConfigError, match=f"the loss 'shaped' returned {says}"):
            await backend.forward_backward([one_sequence()], own_loss("shaped", terms))
