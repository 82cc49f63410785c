"""Data sets in verl's form: `AgentDataset` reads tasks from files, `LoadedDataset` takes a list.

verl's own data sets make prompts of their rows. Agents make their prompts themselves, so a row here is the task as
JSON, which passes verl's data loader and reaches the agent unchanged. verl creates `AgentDataset` itself
(`data.custom_cls`), so that it can restore its data loader from a checkpoint. It accepts only subclasses of torch's
`Dataset`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from leyden._lib.atomic import private_directory, write_file
from leyden._lib.extras import import_optional
from leyden._lib.json import unique_object
from leyden.errors import ConfigError

Item = dict[str, Any]


class LoadedDataset(Dataset[Item]):
    """Tasks of a list as rows of verl. Each task must be a JSON value.

    source: the name under which verl reports the validation of these tasks.
    Raise ConfigError for a task that is no JSON value, with its place.
    """

    def __init__(self, tasks: Sequence[Any], *, source: str = "leyden") -> None:
        self._source = source
        self._texts = [_as_json(place, tasks[place]) for place in range(len(tasks))]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> Item:
        return {"raw_prompt": self._texts[place], "index": place, "data_source": self._source, "reward_model": {}}

    def write(self, path: Path) -> Path:
        """Write the tasks as JSON lines, which `AgentDataset` reads, and return the path."""
        private_directory(path.parent)
        write_file(path, "".join(f"{text}\n" for text in self._texts))
        return path


class AgentDataset(LoadedDataset):
    """Tasks of JSON Lines or Parquet files as rows of verl, which calls the class with these parameters.

    data_files: a path, or several. Each row of a Parquet file is a task, an object with the columns as its keys.
    max_samples: the number of tasks to use, from the first on; -1: all.
    The other parameters are verl's, and have no effect.
    Raise ConfigError, naming the line, for a file that is missing, empty or damaged.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any = None,
        processor: Any = None,
        config: Any = None,
        max_samples: int = -1,
        **_: Any,
    ) -> None:
        files = [data_files] if isinstance(data_files, str) else [str(file) for file in data_files]
        tasks = [task for file in files for task in _read(Path(file).expanduser())]
        super().__init__(tasks if max_samples < 0 else tasks[:max_samples])


def _read(file: Path) -> list[Any]:
    if not file.is_file():
        raise ConfigError(
            f"the data set {file} does not exist; data.train_files and data.val_files name JSONL or Parquet files"
        )
    tasks = list(_parquet(file) if file.suffix == ".parquet" else _json_lines(file))
    if not tasks:
        raise ConfigError(f"the data set {file} holds no task")
    return tasks


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line, object_pairs_hook=unique_object)
            except ValueError as error:
                raise ConfigError(f"the data set {file} is damaged: line {number} is no JSON ({error})") from error


def _parquet(file: Path) -> Iterator[Any]:
    parquet = import_optional("pyarrow.parquet", extra="export", needed_by="AgentDataset")
    try:
        yield from parquet.read_table(file).to_pylist()
    except OSError as error:
        raise ConfigError(f"the data set {file} is damaged: {error}") from error
    except ValueError as error:  # pyarrow's ArrowInvalid is one
        raise ConfigError(f"the data set {file} is no Parquet file: {error}") from error


def _as_json(place: int, task: Any) -> str:
    if hasattr(task, "model_dump"):
        task = task.model_dump(mode="json")
    try:
        return json.dumps(task, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task {place} is no JSON value ({error}); verl passes tasks as JSON") from error
