"""The contract, on every backend and mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from leyden.engine import EmbeddedBackend, IsolatedBackend, PolicyBackend
from leyden.errors import ConfigError
from tests.contracts.engine import *  # noqa: F403
from tests.contracts.engine import chat
from tests.engine import tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"), template=tiny.TEMPLATE_WITH_TOOLS)


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


async def test_a_required_tool_is_called(running: PolicyBackend):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
    answer = await chat(running, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "count"
    assert call["function"]["arguments"] in ('{"n": 1}', '{"n": 2}')
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("kind", [EmbeddedBackend, IsolatedBackend])
def test_an_unknown_parser_of_tool_calls_is_refused_with_the_known_ones(kind: type[PolicyBackend], model_folder: Path):
    with pytest.raises(ConfigError, match="tool_parser is 'hermse'; did you mean 'hermes'"):
        kind(model_folder, tool_parser="hermse")
