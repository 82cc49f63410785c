"""What the tests against vLLM share: one server for all of them, the truth about its model, and a gateway in front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from tests.gateway.caller import Caller, new_caller
from tests.vllm.server import MODEL, START_SECONDS, VllmServer
from tests.vllm.tiny import Truth, make

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(2 * START_SECONDS))  # the first one waits for server and learner


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    server = getattr(item, "funcargs", {}).get("vllm")
    if report.failed and isinstance(server, VllmServer):
        report.sections.append((f"the end of vLLM's log, {server.log}", server.tail()))
    return report


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make(folder)
    return folder


@pytest.fixture(scope="session")
def truth(model_folder: Path) -> Truth:
    return Truth(model_folder)


@pytest.fixture(scope="session")
def vllm(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with VllmServer(model_folder, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@pytest.fixture
async def proxy(vllm: VllmServer, store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[UpstreamModel(MODEL, vllm.endpoint)], store=store) as proxy:
        yield proxy


@pytest.fixture
async def caller(proxy: LLMProxy, store: InMemoryLightningStore) -> AsyncIterator[Caller]:
    caller = await new_caller(proxy, store)
    async with caller.client:
        yield caller


@pytest.fixture(autouse=True)
def streams_that_keep_their_ids(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """This vLLM loses no ids in streams, and nothing makes the gateway think so."""
    yield
    assert "loses token ids" not in caplog.text
