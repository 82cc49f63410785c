"""Adapters (LoRA) that `publish_weights` pushes to a real vLLM server.

The server samples with them, and the run ends if it does not load one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from leyden.engine import LoRA, OptimParams, SamplingParams, VLLMBackend
from leyden.errors import EngineError
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence
from tests.contracts.engine import chat, logprobs_of, sampled
from tests.engine import tiny
from tests.vllm.server import START_SECONDS

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft reads a name of the past
]
TOLERANCE = 1e-4
ADAPTERS = LoRA(rank=4, alpha=8)
PROMPT = [1, 50, 60]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("base"), template=tiny.TEMPLATE_WITH_TOOLS)


@pytest.fixture(scope="module")
def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMBackend]:
    """A backend that has started a server of its own, with the flags for adapters."""
    backend = VLLMBackend(
        model,
        lora=ADAPTERS,
        exchange_dir=tmp_path_factory.mktemp("exchange"),
        start_timeout_seconds=START_SECONDS,
        extra_arguments=["--enforce-eager"],
        environment={"OMP_NUM_THREADS": "1"},
    )
    asyncio.run(backend.start())
    yield backend
    asyncio.run(backend.stop())


async def learned(backend: VLLMBackend) -> int:
    """Train on samples of the server, publish, and return the version."""
    await backend.forward_backward(await sampled(backend), PPOLoss())
    await backend.optim_step(OptimParams(learning_rate=3e-2))
    return await backend.publish_weights()


async def difference_from_learner(backend: VLLMBackend) -> float:
    """Return the largest difference between the server's log-probabilities of a sample and the learner's."""
    (sample,) = await backend.sample([PROMPT], SamplingParams(max_tokens=12, seed=3))
    n_prompt, n_sampled = len(PROMPT), len(sample.token_ids)
    sequence = TrainingSequence([*PROMPT, *sample.token_ids], [0.0] * n_prompt + [1.0] * n_sampled)
    wanted = (await backend.forward([sequence])).logprobs[0][n_prompt:]
    return max(abs(a - b) for a, b in zip(sample.logprobs, wanted, strict=True))


async def test_the_server_samples_with_the_adapters_of_each_push(started: VLLMBackend, tmp_path: Path):
    assert await difference_from_learner(started) < TOLERANCE
    first = await logprobs_of(started, PROMPT, 6)
    assert await learned(started) == 1
    await started.save_state(tmp_path / "state")
    second = await logprobs_of(started, PROMPT, 6)
    assert abs(second[0] - first[0]) > 100 * TOLERANCE
    assert await difference_from_learner(started) < TOLERANCE

    assert await learned(started) == 2
    third = await logprobs_of(started, PROMPT, 6)
    assert abs(third[0] - second[0]) > 100 * TOLERANCE
    assert await difference_from_learner(started) < TOLERANCE

    await started.load_state(tmp_path / "state")
    assert await logprobs_of(started, PROMPT, 6) == pytest.approx(second, abs=TOLERANCE)
    assert (await chat(started))["model"] == "policy"  # what an agent calls


async def test_a_push_holds_adapters_alone(started: VLLMBackend, model: Path):
    (folder,) = vars(started)["_running"].published
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names and "model.safetensors" not in names
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size < (model / "model.safetensors").stat().st_size / 2


@pytest.fixture
async def deaf(started: VLLMBackend) -> AsyncIterator[str]:
    """A server in front of vLLM that lets one adapter pass, and accepts others without loading them."""
    url, n_loads = started.endpoint().endpoint.removesuffix("/v1"), 0

    async def forward(request: web.Request) -> web.Response:
        nonlocal n_loads
        if n_loads and request.path.endswith("_lora_adapter"):
            return web.Response(text="Success.")
        n_loads += request.path == "/v1/load_lora_adapter"
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path_qs, data=await request.read(),
                            headers={"Content-Type": "application/json"}) as answer,
        ):  # fmt: skip
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_adapters_that_the_server_does_not_load_end_the_run_with_their_names(model: Path, deaf: str):
    async with VLLMBackend(model, url=deaf, lora=ADAPTERS, isolate=False, threads=1) as backend:
        with pytest.raises(EngineError, match=r"differ by up to .* It ignores: .*lora_A.*leave lora out"):
            await learned(backend)
