"""vLLM as the sampler beside our learner: the contract of engines, and how it fails.

The model has tied embeddings, which a plain reload leaves half stale: every test that publishes
would fail if the backend did not give the server an output head of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from leyden.engine import LoRA, OptimParams, PolicyBackend, SamplingParams, VLLMBackend
from leyden.engine.vllm.vllm_client import VLLMClient
from leyden.errors import EngineError
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence
from tests.contracts.engine import *  # noqa: F403
from tests.contracts.engine import sampled, stepped
from tests.engine import tiny
from tests.vllm.server import START_SECONDS

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tied"), template=tiny.TEMPLATE_WITH_TOOLS)


@dataclass(frozen=True)
class Started:
    """A backend that has started its own server, and whose learner is a child process."""

    backend: VLLMBackend
    sampled: list[float]
    """The log-probabilities of the server's first sample, before any test has pushed other weights."""
    of_learner: list[float]
    """Those of the learner, of the same tokens."""


@pytest.fixture(scope="module")
def started(policy_folder: Path) -> Iterator[Started]:
    backend = VLLMBackend(
        policy_folder,
        start_timeout_seconds=START_SECONDS,
        extra_arguments=["--enforce-eager"],
        environment={"OMP_NUM_THREADS": "1"},
    )

    async def start() -> Started:
        await backend.start()
        (sample,) = await backend.sample([[1, 50, 60]], SamplingParams(max_tokens=8, seed=1))
        response = sample.token_ids
        sequence = TrainingSequence([1, 50, 60, *response], [0.0] * 3 + [1.0] * len(response))
        return Started(backend, sample.logprobs, (await backend.forward([sequence])).logprobs[0][3:])

    yield asyncio.run(start())
    asyncio.run(backend.stop())


@pytest.fixture(scope="module")
def server_url(request: pytest.FixtureRequest) -> str:
    """The address of that server, or of one that runs already."""
    if url := os.environ.get("LEYDEN_TEST_VLLM"):
        return url
    return request.getfixturevalue("started").backend.endpoint().endpoint.removesuffix("/v1")


@pytest.fixture
def backend(policy_folder: Path, server_url: str) -> PolicyBackend:
    return VLLMBackend(policy_folder, url=server_url, isolate=False, threads=1)


@pytest.fixture
def logprob_tolerance() -> float:
    return TOLERANCE


def test_a_server_that_was_started_has_the_learners_weights_from_the_first_sample(started: Started):
    assert started.of_learner == pytest.approx(started.sampled, abs=TOLERANCE)


async def test_a_tied_head_that_a_reload_leaves_stale_ends_the_run_with_its_name(policy_folder: Path, server_url: str):
    """The fault of vLLM 0.32 on a CPU that the probes are for: the server answers 200 and samples from old weights."""
    async with VLLMBackend(policy_folder, url=server_url, isolate=False, threads=1) as backend:
        data = await sampled(backend)
    async with VLLMBackend(policy_folder, url=server_url, isolate=False, threads=1, untie=False) as stale:
        await stale.forward_backward(data, PPOLoss())
        await stale.optim_step(OptimParams(learning_rate=1e-2))
        with pytest.raises(
            EngineError, match=r"differ by up to .* It ignores: lm_head.weight\. The output head is tied"
        ):
            await stale.publish_weights()


async def test_a_server_whose_weights_another_program_changed_ends_the_run(running: VLLMBackend, server_url: str):
    await running.statistics()
    client = VLLMClient(server_url, None, most_at_once=1)
    await client.set_mark("default")
    await client.close()
    with pytest.raises(EngineError, match="started again, or another program"):
        await running.statistics()


async def test_a_version_is_published_between_two_requests_and_counted(running: VLLMBackend):
    long = asyncio.create_task(running.sample([[1, 5, 6]] * 4, SamplingParams(max_tokens=200, seed=1)))
    data = await sampled(running)
    await running.forward_backward(data, PPOLoss())
    await stepped(running, OptimParams(learning_rate=1e-2))
    assert {version for sample in await long for version in sample.policy_versions} == {0}
    assert running.policy_version == 1


@pytest.fixture
async def forgetful(server_url: str) -> AsyncIterator[str]:
    """A server in front of vLLM that loses token ids."""

    async def forward(request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, server_url + request.path_qs, data=await request.read(),
                            headers={"Content-Type": "application/json"}) as answer,
        ):  # fmt: skip
            body = (await answer.read()).replace(b'"token_ids"', b'"forgotten"')
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_server_that_reports_no_token_ids_is_refused(policy_folder: Path, forgetful: str):
    with pytest.raises(EngineError, match=r"no token ids.*return_token_ids"):
        await VLLMBackend(policy_folder, url=forgetful, isolate=False).start()


async def test_a_model_that_the_server_does_not_serve_is_refused_with_the_served_ones(
    policy_folder: Path, server_url: str
):
    with pytest.raises(EngineError, match=r"serves 'policy' and not 'other'.*--served-model-name"):
        await VLLMBackend(policy_folder, url=server_url, model_name="other", isolate=False).start()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads a name of the past
async def test_adapters_need_a_server_with_adapters(policy_folder: Path, server_url: str):
    pytest.importorskip("peft")
    with pytest.raises(EngineError, match="--enable-lora"):
        await VLLMBackend(policy_folder, url=server_url, isolate=False, lora=LoRA(rank=4)).start()


async def test_the_transfer_of_weights_needs_a_server_that_was_started_for_it(policy_folder: Path, server_url: str):
    with pytest.raises(EngineError, match=r"--weight-transfer-config .*transfer=\"folder\" needs neither"):
        await VLLMBackend(policy_folder, url=server_url, isolate=False, transfer="ipc").start()


def written(exchange: Path) -> list[Path]:
    """The folders through which weights passed."""
    return sorted(path for path in exchange.glob("*/*") if path.is_dir())


async def test_weights_pass_by_vllms_own_transfer(policy_folder: Path, tmp_path: Path):
    """The way on a GPU, with an engine that maps memory of the CPU in the place of CUDA's."""
    backend = VLLMBackend(
        policy_folder,
        threads=1,
        transfer="ipc",
        exchange_dir=tmp_path,
        start_timeout_seconds=START_SECONDS,
        extra_arguments=["--enforce-eager", "--worker-extension-cls", "tests.vllm.cpu_transfer.Extension"],
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    async with backend:
        before = await sampled(backend)
        await backend.forward_backward(before, PPOLoss())
        await stepped(backend, OptimParams(learning_rate=1e-2))
        after = await sampled(backend)
        of_learner = (await backend.forward(after)).logprobs
        assert written(tmp_path) == []
    assert backend.policy_version == 1
    for sequence, logprobs in zip(after, of_learner, strict=True):
        of_server = [
            value for value, weight in zip(sequence.columns["logprobs"], sequence.weights, strict=True) if weight
        ]
        assert of_server == pytest.approx([value for value in logprobs if value], abs=TOLERANCE)
    assert [sequence.columns["logprobs"] for sequence in before] != [sequence.columns["logprobs"] for sequence in after]


async def test_a_server_that_has_too_little_memory_does_not_come_up_and_names_the_setting(policy_folder: Path):
    options: dict[str, Any] = {"start_timeout_seconds": START_SECONDS, "extra_arguments": ["--enforce-eager"]}
    with pytest.raises(
        EngineError, match=r"ended with exit code 1; [\s\S]*Cause: not enough memory\. Lower kv_cache_gib"
    ):
        await VLLMBackend(policy_folder, isolate=False, threads=1, kv_cache_gib=100_000, **options).start()


async def test_a_server_that_dies_ends_the_run_with_its_last_lines(started: Started):
    """The last test: it kills the server that the others use."""
    server: Any = vars(started.backend)["_running"].server
    os.killpg(server._command.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while server._obituary is None:  # noqa: ASYNC110 -- a thread notes it
            await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match=r"vLLM server \(pid \d+\) was killed by SIGKILL; the last lines"):
        await started.backend.statistics()
