"""Data sets of a recorded run load in `datasets` as they are, and TRL's trainers make a step on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from typer.testing import CliRunner

import leyden as ly
import leyden.cli
from leyden.cli.app import app
from leyden.errors import ConfigError
from leyden.training.runs.dataset_file import open_rows

MODEL = Path(leyden.cli.__file__).parent / "project" / "model"
TOOLS = [  # with different parameters, which a column of structs would mix
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"properties": {of: {}}}}}
    for name, of in (("get_weather", "city"), ("say", "text"))
]


@ly.llm_rollout
async def agent(task: dict[str, Any], llm: ly.LLM) -> float:
    """The reward is the share of the city's letters that the model's words have."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is the weather in {task['city']}?"}]
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            body = {"model": llm.model, "messages": messages, "tools": TOOLS, **llm.sampling_parameters}
            async with session.post(f"{llm.endpoint}/chat/completions", json=body) as answered:
                answered.raise_for_status()
                message = (await answered.json())["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]})
            if messages[-1]["role"] != "tool":
                break
    words = json.dumps(messages[1:])
    return sum(letter in words for letter in task["city"]) / len(task["city"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of data sets of one run, each as JSON Lines and as Parquet."""
    folder = tmp_path_factory.mktemp("data_sets")
    backend = ly.EmbeddedBackend(MODEL, device="cpu", max_length=512, seed=1)
    optim = ly.OptimParams(learning_rate=1e-9)
    algorithm = ly.GRPO(backend, n_steps=1, tasks_per_step=8, rollouts_per_task=8, max_tokens=64, optim=optim)
    cities = zip(("Oslo", "Rome", "Lima", "Cairo"), (1, "a", [None, "b"], {"c": 1}), strict=True)
    tasks = [{"city": city, "of several types": more} for city, more in cities]
    ly.Trainer(algorithm=algorithm, run_dir=folder / "run").fit(agent, tasks)
    for name, options in FORMATS.items():
        for suffix in ("jsonl", "parquet"):
            given = ["dataset", str(folder / "run"), "--output", str(folder / f"{name}.{suffix}"), *options]
            said = CliRunner().invoke(app, given)
            assert said.exit_code == 0, said.output
    return folder


FORMATS = {
    "messages": (),
    "completion": ("--format", "completion", "--every-answer"),
    "preference": ("--format", "preference", "--between"),
    "tokens": ("--format", "tokens"),
    "verifiers": ("--format", "verifiers"),
}


def load(folder: Path, name: str) -> Dataset:
    return load_dataset(
        "json", data_files=str(folder / f"{name}.jsonl"), split="train", cache_dir=str(folder / "cache")
    )


def plain(value: Any) -> Any:
    """Return a value without None in objects, which a column has for a missing key, and without the last digits of
    floats, which `datasets` rounds where a file has objects of several types.
    """
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 14) if isinstance(value, float) else value


@pytest.mark.parametrize("name", FORMATS)
def test_a_data_set_loads_as_it_was_written(folder: Path, name: str) -> None:
    written = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert len(written) > 4
    loaded = list(load(folder, name))
    assert plain(loaded) == plain(written)
    parquet = load_dataset(
        "parquet", data_files=str(folder / f"{name}.parquet"), split="train", cache_dir=str(folder / "cache")
    )
    texts = {"tools", "tool_defs", "info", "metrics"}
    read = [{key: json.loads(row[key]) if key in texts else row[key] for key in row} for row in parquet]
    assert plain(read) == plain(written)


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(path),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "max_length": 512,
        **more,
    }


@pytest.mark.parametrize("name", ["messages", "completion", "tokens"])
def test_the_sft_trainer_makes_a_step(folder: Path, tmp_path: Path, name: str) -> None:
    rows, model = load(folder, name), AutoModelForCausalLM.from_pretrained(MODEL)
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**options(tmp_path, completion_only_loss=name == "completion")),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    prepared = trainer.train_dataset[0]
    if name == "tokens":  # the loss is of exactly the sampled tokens
        masked = [
            id if mask else -100 for id, mask in zip(rows[0]["input_ids"], rows[0]["assistant_masks"], strict=True)
        ]
        assert (prepared["input_ids"], prepared["labels"]) == (rows[0]["input_ids"], masked)
    assert math.isfinite(trainer.train().training_loss)


def test_the_dpo_trainer_makes_a_step(folder: Path, tmp_path: Path) -> None:
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(MODEL),
        args=DPOConfig(**options(tmp_path)),
        train_dataset=load(folder, "preference"),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=1e-4), "policy and reference are one"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
        {"role": "user", "content": "a", "weight": 1},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "index": 0}]},
    ],
)
def test_what_a_column_cannot_hold_exactly_is_refused_and_no_file_is_left(tmp_path: Path, message: Any) -> None:
    def write_both() -> None:
        with open_rows(tmp_path / "rows.parquet", "messages") as write:
            write({"messages": [{"role": "user", "content": "a"}], "provenance": {"rollout": "ro-0"}})
            write({"messages": [message], "provenance": {"rollout": "ro-1"}})

    with pytest.raises(ConfigError, match=r"cannot hold a row exactly, of .*ro-[01].*give a path that ends in \.jsonl"):
        write_both()
    assert list(tmp_path.iterdir()) == []
