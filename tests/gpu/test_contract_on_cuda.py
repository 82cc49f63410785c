"""The engine's contract where torch finds an NVIDIA GPU, which is then the default device."""

import pytest

from tests.engine.test_contract import *  # noqa: F403


@pytest.fixture
def logprob_tolerance() -> float:
    return 1e-3
