"""A data set is a list of JSON values, or it is refused by name before the run, with the remedy."""

import collections
import dataclasses
import datetime
import decimal
import json
import math
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@dataclasses.dataclass
class Question:
    text: str
    level: int = 1


class Reversed:
    """A data set that is no list, as those of Hugging Face are none."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Any:
        return self.tasks[-1 - index]


def seen_by_the_agent(dataset: Any, algorithm: Any = "baseline") -> list[Any]:
    tasks: list[Any] = []

    @ly.rollout
    async def keep(task: Any) -> float:
        tasks.append(task)
        return 1.0

    ly.Trainer(algorithm=algorithm, store="memory").fit(keep, dataset)
    return tasks


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


CYCLE: dict[str, Any] = {}
CYCLE["me"] = CYCLE


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((task for task in [1]), r"is a generator; give a list of tasks: list\(tasks\)"),
        (iter([1]), r"is a list_iterator; give a list of tasks: list\(tasks\)"),
        ({"a": 1}.values(), r"is a dict_values; give a list of tasks: list\(tasks\)"),
        ({1, 2}, r"is a set; give a list of tasks: sorted\(tasks\)"),
        ({"q": ["a"], "n": [1]}, r"is a dict; give a list of tasks, such as \[dict\(zip\(columns, row\)\)"),
        ({"q": "a"}, r"is a dict; give a list of tasks: \[task\] for one task"),
        ({"train": Reversed(1)}, r"is a dict; give a list of tasks: one of its parts, such as \['train'\]"),
        ("tasks.jsonl", r"is a str; .*json.loads\(line\)"),
        (b"tasks", "is a bytes; give a list of tasks"),
        (np.array([1, 2]), r"is a numpy ndarray; give a list of tasks: .tolist\(\)"),
        (torch.tensor([1, 2]), r"is a torch Tensor; give a list of tasks: .tolist\(\)"),
        (7, "is a int; give a list"),
    ],
)
def test_what_only_looks_like_a_data_set_is_refused_with_the_remedy(dataset: Any, message: str) -> None:
    for algorithm in ("baseline", ly.algo(lambda *, train_dataset: None)):
        with pytest.raises(ConfigError, match=f"train_dataset {message}"):
            seen_by_the_agent(dataset, algorithm)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"n": math.nan}, ", field n is nan, which is no finite number; leave the field out, or give None"),
        ({"a": [{"b": -math.inf}]}, r", field a\[0\].b is -inf"),
        ({"a b": [np.float32("nan")]}, r", field \['a b'\]\[0\] is nan"),
        ({"t": datetime.datetime(2026, 1, 2)}, r", field t is datetime.*; give its isoformat\(\)"),
        ({"t": np.datetime64("2026-01-02")}, ", field t is .*which JSON does not have"),
        ({"b": b"x"}, ", field b is b'x' .*; give a text, such as its base64"),
        ({"s": {1}}, r", field s is \{1\} .*; give a sorted list"),
        ({"v": np.array([1, 2])}, r", field v has 2 elements, .*; give its tolist\(\)"),
        ({"d": decimal.Decimal(1) / 3}, ", field d is Decimal.* which a float would round"),
        ({"x": {1: "a"}}, r", field x has the key 1 \(a int\); keys of JSON objects are strings"),
        (1j, r" is 1j \(a complex\), which JSON does not have; JSON has None"),
        (Question("a", level=object()), ", field level is <object"),  # pyright: ignore[reportArgumentType]
        (nested(129), " is nested deeper than 128 levels"),
        (CYCLE, " is nested deeper than 128 levels"),
        (10**4300, " is a number of more than 4,300 digits; give it as a string"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_task_that_is_no_json_is_named_with_its_field_before_the_run(task: Any, message: str) -> None:
    for dataset in ([1, task], (1, task), Reversed(task, 1)):
        with pytest.raises(ConfigError, match=f"^task 1 of train_dataset{message}"):
            seen_by_the_agent(dataset)


def test_a_number_of_any_library_and_a_tuple_reach_the_agent_as_json_has_them() -> None:
    point = collections.namedtuple("Point", "x y")
    given = [
        {"n": np.int64(2), "f": np.float32(0.5), "b": np.bool_(True), "d": decimal.Decimal("0.1")},
        torch.tensor(3),
        (1, (2, 3)),
        point(1, 2),
        np.str_("text"),
        Question("a"),
        nested(128),
        10**4299,
    ]
    expected = [
        {"n": 2, "f": 0.5, "b": True, "d": 0.1},
        3,
        [1, [2, 3]],
        [1, 2],
        "text",
        {"text": "a", "level": 1},
        nested(128),
        10**4299,
    ]
    for dataset in (given, Reversed(*reversed(given))):
        seen = seen_by_the_agent(dataset)
        assert seen == expected
        assert json.dumps(seen) == json.dumps(expected)  # True is no 1 here


def test_half_a_surrogate_pair_in_a_task_reaches_the_agent() -> None:
    given = ["cut \ud83d emoji", {"key \ud83d": ["\udc00"]}]
    assert seen_by_the_agent(given) == given


async def test_a_store_names_the_part_of_an_input_that_is_no_json() -> None:
    async with ly.InMemoryLightningStore() as store:
        for value in (math.nan, object(), np.array([1, 2])):
            with pytest.raises(ConfigError, match=r"^the input of a rollout, field a\[1\] "):
                await store.enqueue_rollout({"a": [0, value]})
        rollout = await store.enqueue_rollout({"a": np.float32(0.5), "b": "\ud83d", "c": np.int64(7)})
        assert (await store.get_rollout_by_id(rollout.rollout_id)).input == {"a": 0.5, "b": "\ud83d", "c": 7}
