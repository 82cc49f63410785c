"""What the benchmark of pretrained models runs, run with a tiny model, and what it says of sides that are missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import real_model
from benchmarks.harness import PeerFailed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config: Any = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("work", ["decode:2", "shared", "gradient", "lora", "start"])
def test_every_work_is_measured_in_processes_of_its_own(work: str, tiny: Path, tmp_path: Path) -> None:
    for run in real_model.peers("gemma3", work, tiny, None, tmp_path).values():
        found = run()
        assert found["value"] > 0
        assert found["peak_mib"] > 0


def test_a_side_that_fails_is_dropped_and_the_others_are_compared() -> None:
    def fails() -> dict[str, Any]:
        raise PeerFailed("it is not there")

    answers = {"leyden": 4.0, "transformers": 2.0}
    sides = {
        name: partial(dict[str, Any], value=value, cpu_s=1.0, peak_mib=100 * value) for name, value in answers.items()
    }
    rows, memory = real_model.measure("tiny", "decode:8", {**sides, "llama.cpp": fails})
    assert [(row.row, row.peer_name, row.ratio) for row in rows] == [("tiny: decode, 8 at once", "transformers", 2.0)]
    assert memory == [["tiny: decode, 8 at once", "leyden", "400"], ["tiny: decode, 8 at once", "transformers", "200"]]


def test_sides_with_other_gradients_are_no_row() -> None:
    sides = {
        name: partial(dict[str, Any], value=1.0, cpu_s=1.0, peak_mib=1.0, grad_norm=norm)
        for name, norm in (("leyden", 1.0), ("trl", 1.1))
    }
    with pytest.raises(RuntimeError, match="do not do the same work"):
        real_model.measure("tiny", "gradient", sides)
