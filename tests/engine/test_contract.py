"""The contract, on every backend and mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from leyden.engine import EmbeddedBackend, IsolatedBackend, PolicyBackend
from tests.contracts.engine import *  # noqa: F403
from tests.engine import tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["embedded", "deterministic", "isolated"])
def backend(request: pytest.FixtureRequest, model_folder: Path) -> PolicyBackend:
    if request.param == "isolated":
        return IsolatedBackend(model_folder)
    return EmbeddedBackend(model_folder, deterministic=request.param == "deterministic")


@pytest.fixture(scope="module")
def child(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[IsolatedBackend, Path]]:
    """One child process for all tests (it takes seconds to import torch), and its first state."""
    backend, first = IsolatedBackend(model_folder), tmp_path_factory.mktemp("first")
    asyncio.run(backend.start())
    asyncio.run(backend.save_state(first))
    yield backend, first
    asyncio.run(backend.stop())


@pytest.fixture
def shared_child(request: pytest.FixtureRequest, backend: PolicyBackend) -> tuple[IsolatedBackend, Path] | None:
    return request.getfixturevalue("child") if isinstance(backend, IsolatedBackend) else None


@pytest.fixture
async def running(
    backend: PolicyBackend, shared_child: tuple[IsolatedBackend, Path] | None
) -> AsyncIterator[PolicyBackend]:
    if shared_child is None:
        async with backend:
            yield backend
    else:
        child, first = shared_child
        await child.load_state(first)
        yield child
