"""Tasks on their way through verl's data loader: complete and as they were, or refused with the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leyden.algorithm.verl.dataset import AgentDataset, LoadedDataset
from leyden.errors import ConfigError


def test_tasks_come_back_as_they_were(tmp_path: Path) -> None:
    tasks = [{"secret": 3, "text": "line\nbreak"}, [1, 2], "plain", None]
    loaded = AgentDataset(str(LoadedDataset(tasks).write(tmp_path / "deep" / "tasks.jsonl")))
    assert [json.loads(loaded[place]["raw_prompt"]) for place in range(len(loaded))] == tasks
    assert [loaded[place]["index"] for place in range(len(loaded))] == [0, 1, 2, 3]
    assert len(AgentDataset([str(tmp_path / "deep" / "tasks.jsonl")] * 2, max_samples=5)) == 5


def test_an_incomplete_data_set_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl is damaged: line 2 is no JSON"):
        AgentDataset(str(file))
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl holds no task"):
        AgentDataset(str(file))
    with pytest.raises(ConfigError, match=r"absent\.jsonl does not exist; data\.train_files"):
        AgentDataset(str(tmp_path / "absent.jsonl"))


def test_a_task_that_is_no_json_value_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match="task 1 is no JSON value"):
        LoadedDataset([1, object()])
