"""Read a configuration file (YAML, TOML or JSON) as plain data, with the line of each value.

YAML is read as its version 1.2 defines it: `1e-4` is a number, and `on`, `no` and `010` are what they look like. A name
that stands twice, a tag, an anchor within itself and anchors that expand to very much are refused. This module knows no
option. To read another format, add its suffix and a function to `_READERS`.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import yaml

from leyden._lib.json import is_object, unique_object
from leyden.errors import ConfigError

_MAX_BYTES: Final = 1_000_000
_MAX_VALUES: Final = 50_000
"""The most values after the anchors are expanded."""
_TAG: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of a configuration file."""

    path: Path
    content: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])
    """The line of each value by its path, where it is known. An index of a list is a part of the path."""

    def where(self, path: tuple[str, ...]) -> str:
        """Return the file, and the line of the value or of the nearest one around it."""
        known = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        return str(self.path) if known is None else f"{self.path}, line {known}"


def read_config_file(path: Path) -> ConfigFile:
    """Return the content of a file. Raise ConfigError, with the line where it is known, for one that cannot be read, is
    empty or larger than 1 MB, or holds something other than a mapping.
    """
    if (read := _READERS.get(path.suffix)) is None:
        raise ConfigError(f"{path}: the name of a configuration must end in {', '.join(_READERS)}")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES:,} bytes; keep data in files of their own")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None
    lines: dict[tuple[str, ...], int] = {}
    try:
        content = read(text, str(path), lines)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    if content is None:
        raise ConfigError(f"{path} is empty")
    if not is_object(content):
        raise ConfigError(f"{path} holds a {type(content).__name__}; it must be a mapping of options by name")
    return ConfigFile(path, content, lines)


def parse_value(text: str, *, name: str) -> Any:
    """Return the value that a text has in YAML, such as 0.1, `[1, 2]` or `{rank: 8}`; None for an empty text.

    name: what the text is, for the message of the ConfigError that a wrong one raises.
    """
    try:
        return _read_yaml(text, name, {})
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None


# ---- YAML ----------------------------------------------------------------------------------------


class _Yaml12(yaml.SafeLoader):
    """Resolves plain texts by the core schema of YAML 1.2, with underscores in numbers, and merge keys of 1.1."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 -- the base class declares an attribute of instances


_NUMBER_STARTS = list("-+0123456789.")
for _tag, _pattern, _starts in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", _NUMBER_STARTS),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?", _NUMBER_STARTS),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _NUMBER_STARTS),
    ("merge", "<<", ["<"]),
):
    cast(Any, _Yaml12).add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"^(?:{_pattern})$"), _starts)


def _read_yaml(text: str, name: str, lines: dict[tuple[str, ...], int]) -> Any:
    loader = None
    try:
        loader = _Yaml12(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = "" if mark is None else f", line {mark.line + 1}"
        if "\\t" in (error.problem or ""):
            raise ConfigError(f"{name}{at}: a tab stands where YAML wants spaces; indent with spaces") from None
        raise ConfigError(f"{name}{at} is no YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return None if node is None else _Construction(name, lines).value(node, ())


class _Construction:
    """Makes plain data of YAML's nodes."""

    def __init__(self, name: str, lines: dict[tuple[str, ...], int]) -> None:
        self._name, self._lines = name, lines
        self._open: list[yaml.Node] = []
        """The nodes around the current one."""
        self._n_values = 0

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        self._n_values += 1
        if self._n_values > _MAX_VALUES:
            raise ConfigError(f"{self._name} has more than {_MAX_VALUES:,} values, with its anchors expanded")
        if any(node is each for each in self._open):
            raise self._refused(node, "an anchor that stands within itself")
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
                return [self.value(each, (*path, str(index))) for index, each in enumerate(node.value)]
            if not isinstance(node, yaml.ScalarNode):
                raise self._refused(node, f"the tag {node.tag!r}, which is not read")
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    found = self.value(source, path)
                    if not is_object(found):
                        raise self._refused(source, "`<<` with something other than a mapping")
                    merged.update(found)
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
                written = key.value if isinstance(key, yaml.ScalarNode) else "..."
                raise self._refused(key, f"the name {written!r}, which is no text; put it in quotes")
            if key.value in made:
                raise self._refused(key, f"the name {key.value!r} a second time in one mapping; keep one")
            self._lines[*path, key.value] = key.start_mark.line + 1
            made[key.value] = self.value(value, (*path, key.value))
        return {**merged, **made}

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        try:
            match kind:
                case "str":
                    return str(text)
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    digits = text.replace("_", "")
                    return int(digits, 0) if digits.lower().startswith(("0x", "0o")) else int(digits)
                case "float":
                    return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.replace("_", "").lower()))
                case _:
                    raise self._refused(node, f"the tag {node.tag!r}, which is not read")
        except (ValueError, KeyError):
            raise self._refused(node, f"{text[:80]!r}, which is no {kind}") from None

    def _refused(self, node: yaml.Node, what: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {node.start_mark.line + 1}: {what}")


# ---- TOML and JSON -------------------------------------------------------------------------------

_TOML_TABLE = re.compile(r"\s*\[{1,2}([^\]]+)\]")
_TOML_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")


def _read_toml(text: str, name: str, lines: dict[tuple[str, ...], int]) -> Any:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is no TOML: {error}") from None
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _TOML_TABLE.match(line)) is not None:
            table = _toml_path(found[1])
            lines.setdefault(table, number)
        elif (found := _TOML_KEY.match(line)) is not None:
            lines.setdefault((*table, *_toml_path(found[1])), number)
    return content or None


def _toml_path(text: str) -> tuple[str, ...]:
    return tuple(part.strip(" \"'") for part in text.split("."))


def _read_json(text: str, name: str, lines: dict[tuple[str, ...], int]) -> Any:
    if not text.strip():
        return None
    try:
        content = json.loads(text, object_pairs_hook=unique_object)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}, line {error.lineno} is no JSON: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    with contextlib.suppress(ConfigError):  # JSON is YAML but for tabs, so the lines are found in the same way
        _read_yaml(text.replace("\t", " "), name, lines)
    return content


_READERS: Final[dict[str, Callable[[str, str, dict[tuple[str, ...], int]], Any]]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}
