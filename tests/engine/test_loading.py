"""What loading a model may do, and what it must not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.engine.loading import load_policy
from leyden.errors import ConfigError
from tests.engine import tiny

LOAD = """
import sys
from leyden.engine.loading import load_policy
from leyden.errors import EngineError
try:
    load_policy(sys.argv[1], None, device="cpu", dtype=None)
except EngineError as error:
    print(error)
else:
    print("loaded")
"""


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(tmp_path: Path) -> None:
    model, ran = tiny.make(tmp_path / "model"), tmp_path / "ran"
    (model / "evil.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import Qwen2Config as EvilConfig, Qwen2ForCausalLM as EvilModel\n"
    )
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    }
    (model / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model)], input="y\n" * 9, capture_output=True, text=True, timeout=50
    )
    assert "cannot load" in done.stdout, done.stderr
    assert "Do you wish to run the custom code" not in done.stdout + done.stderr
    assert not ran.exists()


def test_a_tokenizer_of_another_model_is_refused() -> None:
    larger = tiny.tokenizer(more=[f"<|tool {n}|>" for n in range(9)])
    with pytest.raises(
        ConfigError, match="the tokenizer has 268 tokens and the model knows 260, so it belongs to another"
    ):
        load_policy(tiny.model(), larger, device="cpu", dtype=None)
    assert load_policy(tiny.model(), tiny.tokenizer(), device="cpu", dtype=None).n_vocabulary == 260
