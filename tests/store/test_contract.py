"""Every store keeps the contract of `LightningStore`."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.contracts.store")

from tests.contracts.store import *  # noqa: E402, F403
