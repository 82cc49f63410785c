"""What loading a model may do, and what it must not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.cli.model_option import ModelOption
from leyden.engine import EmbeddedBackend, SamplingParams
from leyden.engine.loading import load_policy
from leyden.errors import ConfigError, EngineError
from leyden.types import TrainingSequence
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
@pytest.mark.merge
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


def test_a_folder_that_is_misspelled_is_answered_with_the_nearest_model_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny.make(tmp_path / "model")
    (tmp_path / "mode").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, end in (("modle", "did you mean 'model'?"), ("gpt2", "give the folder of a model")):
        with pytest.raises(EngineError, match=rf"(?s)cannot load '{name}' \(there is no folder.*; {re.escape(end)}$"):
            load_policy(name, None, device="cpu", dtype=None)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    larger = tiny.tokenizer(more=[f"<|tool {n}|>" for n in range(9)])
    with pytest.raises(
        ConfigError, match="the tokenizer has 268 tokens and the model knows 260, so it belongs to another"
    ):
        load_policy(tiny.model(), larger, device="cpu", dtype=None)
    assert load_policy(tiny.model(), tiny.tokenizer(), device="cpu", dtype=None).n_vocabulary == 260


def _longrope(*, switch: int) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    return {**rope, "factor": 4.0, "original_max_position_embeddings": switch}


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "rope", "length"),
    [
        ("phi3", _longrope(switch=32), 32),
        ("phi3", _longrope(switch=4096), 96),
        ("llama", _DYNAMIC, 96),
        ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 96),
        ("gemma3_text", {"full_attention": _longrope(switch=64), "sliding_attention": {"rope_type": "default"}}, 64),
    ],
)
async def test_no_sequence_is_longer_than_the_rotary_embedding_has_one_set_of_angles(
    kind: str, rope: dict[str, Any], length: int
) -> None:
    more = {"original_max_position_embeddings": rope.get("original_max_position_embeddings"), "head_dim": 32}
    model = tiny.model(kind, rope_parameters=rope, max_position_embeddings=96, **more)
    with pytest.raises(ConfigError, match=f"give at most {length}$"):
        await EmbeddedBackend(model, max_length=length + 1).start()
    async with EmbeddedBackend(model) as backend:
        (response,) = await backend.sample([[1, 50, 60]], SamplingParams(max_tokens=600, temperature=0.7, seed=3))
        ids = [1, 50, 60, *response.token_ids]
        assert len(ids) == length or response.finish_reason == "stop"
        sampled = response.logprobs
        sequence = TrainingSequence(ids, [0.0] * 3 + [1.0] * len(sampled))
        trained = (await backend.forward([sequence], temperature=0.7)).logprobs[0][3:]
    assert trained == pytest.approx(sampled, abs=1e-4)
    with torch.no_grad():
        for at in range(3, len(ids), 7):
            alone = model(input_ids=torch.tensor([ids[:at]]), use_cache=False).logits[0, -1] / 0.7
            assert float(alone.log_softmax(-1)[ids[at]]) == pytest.approx(sampled[at - 3], abs=1e-4)


def _adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    (folder / "adapter_model.safetensors").touch()
    return folder


def _made(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: at / "Q4.GGUF", "there is no file "),
        (lambda at: _made(at, "a-00001-of-2.gguf", "tokenizer.json"), "holds a GGUF file; give "),
        (lambda at: _made(at, "model.safetensors") / "model.safetensors", "is a file of weights, not a model's folder"),
        (lambda at: _made(at, "pytorch_model.bin") / "pytorch_model.bin", "is a file of weights, not a model's folder"),
        (lambda at: _made(at, "config.json") / "config.json", "is a file, not a model's folder"),
        (
            _adapter,
            "the folder of an adapter; give its base model (Qwen/Qwen3-0.6B), and the folder as lora={'adapter'",
        ),
        (lambda at: _made(at, "config.json", "tokenizer.json"), "has a config.json and no weights"),
        (lambda at: _made(at, "model/config.json"), "has no config.json, so it is no model's folder; give "),
        (_made, "has no config.json, so it is no model's folder; give a folder that save_pretrained wrote"),
    ],
)
async def test_a_path_that_is_no_folder_of_a_model_is_named_for_what_it_is(
    make: Any, says: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "given")
    for source in (path, str(path)):
        with pytest.raises(EngineError, match=re.escape(says)):
            await EmbeddedBackend(source).start()
    with pytest.raises(ConfigError, match=re.escape(says)):
        ModelOption.of(f"policy={path}")
