"""A run's configuration is JSON, hides secrets, and costs little."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from leyden._lib.components import KeepsArguments, arguments_of
from leyden.algorithm import Baseline
from leyden.cli.demo import WEIGHTS
from leyden.errors import ConfigError
from leyden.training.runs.recorded_runs import read_failures, read_rows
from leyden.training.runs.run_description import (
    changed_options,
    command_of,
    describe,
    describe_dataset,
    describe_model,
    describe_program,
    weights_of,
    without_secrets,
)


class Endless(Sequence[int]):
    """A data set of any length."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return index


class Broken(Endless):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("the file is gone")


class Task(BaseModel):
    question: str


def test_the_digest_of_data_is_of_its_content() -> None:
    one = describe_dataset([{"a": 1, "b": 2}, Task(question="x")])
    assert one == describe_dataset(({"b": 2, "a": 1}, Task(question="x")))
    assert one["digest"] != describe_dataset([{"a": 1, "b": 2}, Task(question="y")])["digest"]
    assert describe_dataset([object()]) == describe_dataset([object()]), "no address of memory is in a digest"


def test_the_cost_of_a_digest_is_bounded_and_says_so() -> None:
    long = Endless(10_000_000)
    described = describe_dataset(long)
    assert (described["length"], described["digested_items"], long.read) == (10_000_000, 10_000, 10_000)
    assert describe_dataset(Broken(3)) == {"length": 3, "digest": None, "digested_items": 0}


def test_an_algorithm_remembers_what_it_was_made_with() -> None:
    class Mine(Baseline):
        def __init__(self, flavour: str, **options: Any) -> None:
            super().__init__(**options)

    assert arguments_of(Mine("sweet", n_epochs=3)) == {"flavour": "sweet", "n_epochs": 3}
    assert arguments_of(Baseline(n_epochs=2))["n_epochs"] == 2
    assert arguments_of(object()) == {}


@dataclass
class Optim:
    rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    extra: dict[str, int] = field(default_factory=lambda: {"a": 1})


class Plain(BaseModel):
    question: str
    hint: str = "none"


class Engine(KeepsArguments):
    def __init__(self, model: str, *, rank: int = 8) -> None: ...


class Base(KeepsArguments):
    def __init__(self, *, seed: int = 0, optim: Optim | None = None, **more: Any) -> None: ...


HALF = Optim(rate=0.5)


class Made(Base):
    """Passes most of its options on, as algorithms do."""

    def __init__(
        self, engine: Any = None, *, steps: int = 8, loss: Optim = HALF, api_key: str = "", **options: Any
    ) -> None:
        super().__init__(**options)


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"steps": 8, "seed": 0, "loss": Optim(rate=0.5)}, {}),
        ({"steps": 9, "seed": 3}, {"a.steps": 9, "a.seed": 3}),
        ({"loss": Optim()}, {"a.loss.rate": 1e-4}),
        ({"optim": Optim(rate=3e-4)}, {"a.optim": f"{__name__}.Optim", "a.optim.rate": 3e-4}),
        ({"optim": Optim()}, {"a.optim": f"{__name__}.Optim"}),
        ({"optim": Optim(extra={"b": 2})}, {"a.optim": f"{__name__}.Optim", "a.optim.extra": {"b": 2}}),
        ({"optim": Optim(extra={"a": 1, "b": 2})}, {"a.optim": f"{__name__}.Optim", "a.optim.extra.b": 2}),
        ({"engine": {"type": "vllm", "model": Path("m")}}, {"a.engine.type": "vllm", "a.engine.model": "m"}),
        ({"engine": Engine("m", rank=8)}, {"a.engine": f"{__name__}.Engine", "a.engine.model": "m"}),
        (
            {"engine": Engine("m", rank=4)},
            {"a.engine": f"{__name__}.Engine", "a.engine.model": "m", "a.engine.rank": 4},
        ),
        ({"engine": Plain(question="x")}, {"a.engine": f"{__name__}.Plain", "a.engine.question": "x"}),
        ({"engine": Optim}, {"a.engine": f"{__name__}.Optim"}),
        ({"engine": {}, "more": 1}, {"a.engine": {}, "a.more": 1}),
        ({"api_key": "hush"}, {"a.api_key": "***"}),
        ({"engine": np.zeros(3)}, {"a.engine": "numpy.ndarray"}),
    ],
)
def test_the_options_that_are_no_defaults_are_known_by_their_paths(
    options: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert changed_options(Made(**options), "a") == changed
    json.dumps(changed)


def test_of_an_object_that_remembers_nothing_no_option_is_made_up() -> None:
    assert arguments_of(Path("a")) == arguments_of(3.0) == arguments_of(Endless(3)) == {}
    assert changed_options(Endless(3), "a") == {}


def test_two_long_texts_that_begin_alike_are_told_apart() -> None:
    one, other = describe("x" * 600), describe("x" * 599 + "y")
    assert one != other and len(one) == len(other) == 500


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/v/bin/python", "train.py", "--lr", "3e-4"], "cd '/a b' && /v/bin/python train.py --lr 3e-4"),
        (["/v/bin/python", "-m", "my.train"], "cd '/a b' && /v/bin/python -m my.train"),
        (["/v/bin/python", "/v/bin/leyden", "eval", "a b:c"], "cd '/a b' && leyden eval 'a b:c'"),
    ],
)
def test_the_command_of_a_run_can_be_pasted(words: list[str], command: str) -> None:
    config = {"program": "/a b/train.py", "command": words, "cwd": "/a b"}
    assert command_of(config) == command
    assert command_of({**config, "program": None}) is None, "an interactive session"
    assert command_of({"program": "/a b/train.py", "argv": words[1:]}) is None, "a run of an earlier version"


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (float("nan"), "nan"),
        ({"api_key": "hush", "max_tokens": 4, "tokens": ["a"]}, {"api_key": "***", "max_tokens": 4, "tokens": ["a"]}),
        ("postgresql://me:hush@host/db", "postgresql://me:***@host/db"),
        (Path("a/b"), "a/b"),
        (Baseline, "leyden.algorithm.fast.Baseline"),
        (object(), "builtins.object"),
    ],
)
def test_a_value_is_described_as_json(value: Any, described: Any) -> None:
    assert describe(value) == described
    json.dumps(describe(value), allow_nan=False)


def test_a_circle_has_an_end() -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    json.dumps(describe(circle))


def test_models_differ_by_their_configuration_and_their_files(tmp_path: Path) -> None:
    def folder(name: str, content: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
        return tmp_path / name

    one, moved, other = folder("one", "{}"), folder("moved", "{}"), folder("other", "[]")
    assert describe_model(one)["digest"] == describe_model(moved)["digest"] != describe_model(other)["digest"]
    assert describe_model("hub/name") == {"name": "hub/name", "digest": None}


@pytest.mark.parametrize("line", ['{"iter', "[1]", '{"iteration": 1}', "\0\0"])
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1, "stage": "train", "seconds": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .* is damaged: .*; remove the line"):
        read_rows(tmp_path / "metrics.jsonl")


def test_failures_of_a_later_version_are_read_and_damaged_ones_are_named(tmp_path: Path) -> None:
    whole = {"rollout_id": "a", "attempt_id": None, "reason_kind": None, "reason": "b", "time": 1.0, "later": 1}
    path = tmp_path / "failures.jsonl"
    path.write_text(f"{json.dumps(whole)}\n\n")
    assert [failure.reason for failure in read_failures(path)] == ["b"]
    path.write_text('{"rollout_id": "a"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* is damaged: missing 4 .*'attempt_id'"):
        read_failures(path)


@pytest.mark.parametrize(
    "option",
    [
        {"headers": {"Authorization": "Basic s3cret", "X-Api-Key": "s3cret"}},
        {"apiKey": "s3cret", "accessToken": "s3cret", "passphrase": "s3cret"},
        {"env": {"PGPASSWORD": "s3cret", "DB_PASS": "s3cret"}},
        {"passwords": ["s3cret"], "auth": ("user", "s3cret"), "key": b"s3cret"},
        {"model": "http://h/?token=s3cret", "note": "the key is sk-proj-s3cret0000000000000000"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_with_a_secret_is_recorded_without_it(option: dict[str, Any]) -> None:
    assert "s3cret" not in json.dumps(describe(option))


def test_options_that_are_no_secrets_are_recorded() -> None:
    options = {"max_tokens": 16, "tokenizer": "tiny", "monkey": "Max", "stop_tokens": ["a"], "keyword": "x"}
    counts = {"n_key": 3, "maxToken": 5, "price_per_token": 0.5, "pad_token": 2, "use.min_auth": 1}
    switches = {"token": True, "auth": False, "key": None, "secret": 0}
    for each in (options, counts, switches):
        assert describe(each) == without_secrets(each) == each


@pytest.mark.parametrize(
    "option",
    [
        {"token": 12345},
        {"db.password": 12345.0, "next_key": 12345},
        {"passwords": [12345], "n_key": "12345", "keys": {"api_key": 12345}},
        {"credentials": {"user": {"name": 12345}, "pin": "12345"}},
    ],
    ids=lambda option: next(iter(option)),
)
def test_a_number_under_a_secret_name_is_hidden_and_its_place_is_known(option: dict[str, Any]) -> None:
    hidden: list[list[str]] = []
    assert "12345" not in json.dumps([describe(option), without_secrets(option, hidden=hidden)])
    assert len(hidden) == json.dumps(option).count("12345")
    for path in hidden:
        held: Any = option
        for part in path:
            held = held[int(part) if isinstance(held, list) else part]
        assert str(held).startswith("12345")


@pytest.mark.parametrize(
    "words",
    [
        ["--pass", "s3cret"],
        ["--auth=s3cret"],
        ["model.api_key=s3cret"],
        ["+llm.apiKey=s3cret"],
        ["--set=store.token=s3cret"],
        ["--set=store={url: x, token: s3cret}"],
        ["-sstore.token=[s3cret"],
        ["--sweep=store=[{password: s3cret}]"],
    ],
    ids=str,
)
def test_an_argument_with_a_secret_is_recorded_without_it(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--tokenizer", "tiny", "data=x"])
    argv = describe_program()["argv"]
    assert "s3cret" not in json.dumps(argv)
    assert argv[-3:] == ["--tokenizer", "tiny", "data=x"]


def test_an_argument_that_counts_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--n_key=3", "--set=max_token=0.5", "token="]
    monkeypatch.setattr(sys, "argv", words)
    assert describe_program()["argv"] == words


def test_the_weights_of_a_model_are_counted_before_it_is_loaded(tmp_path: Path) -> None:
    n_trained, n_weights = weights_of(WEIGHTS) or (0, 0)
    assert n_trained == n_weights == describe_model(WEIGHTS)["n_weights"] > 100_000
    assert weights_of("hub/name") is None and weights_of(tmp_path) is None and weights_of(object()) is None


def test_frozen_weights_are_not_counted_as_trained() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    assert weights_of(model) == (3, 11)
