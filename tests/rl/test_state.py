"""States as files: what comes back is what was written, and nothing but data is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import CheckpointError
from leyden.rl.state import read_state, write_state

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.text(max_size=5) | st.integers() | st.sampled_from(["$tensor", "$items"])
STATES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(KEYS, inner, max_size=3),
)


@given(STATES)
def test_plain_values_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("state")
    write_state(path, state)
    assert read_state(path) == state


def test_tensors_and_arrays_come_back_to_the_bit(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": torch.Generator().get_state(),
        "arrays": [np.arange(6, dtype=np.uint32).reshape(2, 3), np.float32(math.pi), np.zeros((0, 4)), np.array(3.5)],
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    }
    write_state(tmp_path, state)
    read = read_state(tmp_path)
    assert all(torch.equal(tensor, read["model"][name]) for name, tensor in model.state_dict().items())
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(read["optimizer"])
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(again.state_dict()["state"][0]["exp_avg"], moments)
    assert torch.equal(read["generator"], state["generator"])
    for array, other in zip(state["arrays"], read["arrays"], strict=True):
        assert np.array_equal(array, other)
        assert np.shape(array) == np.shape(other)
    assert read["arrays"][0].dtype == np.uint32
    assert torch.equal(read["half"], state["half"])


@pytest.mark.parametrize(
    ("state", "place"),
    [({"a": [1, object()]}, r"object at a\[1\]"), ({"a": {(1, 2): 3}}, "key"), ({"b": np.array(["x"])}, "at b")],
)
def test_what_no_state_holds_is_named(tmp_path: Path, state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        write_state(tmp_path, state)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, {"weights": torch.ones(100)})
    file = tmp_path / "tensors.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_state(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": 99, "state": None}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_state(tmp_path)
