"""Configuration files as plain data: YAML 1.2, TOML and JSON, with the line of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyden._lib.config_file import parse_value, read_config_file
from leyden.errors import ConfigError


def written(folder: Path, text: str, name: str = "train.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E5", 3e5),
        ("-2e+3", -2e3),
        ("+.5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("010", 10),
        ("0o10", 8),
        ("0xff", 255),
        ("-.inf", -float("inf")),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("'1e-4'", "1e-4"),
        ("agent.py:agent", "agent.py:agent"),
        ("[1e-4, {a: b}]", [1e-4, {"a": "b"}]),
    ],
)
def test_a_value_of_the_command_line_is_what_yaml_1_2_says(text: str, value: Any):
    found = parse_value(text, name="--set x")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n", "holds a list"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4: the name 'c' a second time"),
        ("a:\n\tb: 1\n", "line 2: a tab"),
        ("a: [1, 2\nb: 3\n", "is no YAML"),
        ("a: 1\n1: b\n", "line 2: the name '1', which is no text"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: the tag"),
        ("a: !mine {b: 1}\n", "line 1: the tag"),
        ("a: &x\n  b: *x\n", "an anchor that stands within itself"),
        ("a: 1\n---\nb: 2\n", "is no YAML"),
        ("a: \x07\n", "is no YAML"),
        ("a: !!int x\n", "which is no int"),
        ("a: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("a: &l [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("lmnopqr", "mnopqrs", strict=True)
        ), "more than 50,000 values"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_config_file(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.toml", "a = 1\na = 2\n", "is no TOML.*line 2"),
        ("t.toml", "", "is empty"),
        ("t.json", '{"a": 1, "a": 2}', "'a' stands twice"),
        ("t.json", '{"a": 1,\n}', "line 2 is no JSON"),
        ("t.txt", "a: 1", "must end in .yaml"),
    ],
)
def test_other_formats_are_refused_in_the_same_way(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_config_file(written(tmp_path, text, name))


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4")
    (tmp_path / "large.yaml").write_bytes(b"#" * 1_000_001)
    for name, message in {
        "none.yaml": "No such file",
        "folder.yaml": "is no file",
        "latin.yaml": "is not UTF-8",
        "large.yaml": "larger than 1,000,000",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_config_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.yaml", "a: 1\nb:\n  c:\n    - x\n    - d: 2\n"),
        ("t.toml", 'a = 1\n\n[b]\nc = ["x", {d = 2}]\n'),
        ("t.json", '{\n\t"a": 1,\n\t"b": {\n\t\t"c": ["x",\n\t\t\t{"d": 2}]}}'),
    ],
)
def test_a_value_is_found_by_its_line(tmp_path: Path, name: str, text: str):
    file = read_config_file(written(tmp_path, text, name))
    assert file.content == {"a": 1, "b": {"c": ["x", {"d": 2}]}}
    line = {"t.yaml": 5, "t.toml": 4, "t.json": 5}[name]
    assert file.where(("b", "c", "1", "d")) == f"{tmp_path / name}, line {line}"
    assert file.where(("nothing",)) == str(tmp_path / name) if name == "t.toml" else True


def test_anchors_and_merges_are_read_and_what_stands_in_a_mapping_wins(tmp_path: Path):
    file = read_config_file(written(tmp_path, "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [*x, {a: 9, c: 4}]}\n"))
    assert file.content["y"] == {"a": 1, "b": 3} and file.content["z"] == {"a": 1, "b": 2, "c": 4}
