"""The JSON schema of the files of `leyden run`, for editors: the registries' names, with the options of each.

It is made of the constructors' annotations and docstrings, so it has what this version and the installed distributions
accept. A component that cannot be imported, because its extra is missing, is listed without its options.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError

from leyden._lib.annotations import is_data, members_of, options_of
from leyden._lib.components import component_names, find_component
from leyden.cli.run_parts import DATA, OLD_NAMES, registry_of
from leyden.errors import MissingExtra

_PLAIN: Mapping[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}
_CALLABLE: Any = collections.abc.Callable
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)
_IMPORT_PATH: dict[str, Any] = {"type": "string", "pattern": "[.:/]"}
_OTHER_TYPE: dict[str, Any] = {"type": "object", "properties": {"type": _IMPORT_PATH}, "required": ["type"]}
_GIVEN_BY_PARTS = ("network", "obs_space", "action_space")
"""Arguments of a policy that come from the other parts of its vessel."""


def run_schema() -> dict[str, Any]:
    """Return the schema, in the dialect 2020-12."""
    from leyden.agent import LitAgent
    from leyden.algorithm import Algorithm
    from leyden.trainer import Trainer

    made = _Schema()
    named = {**_OTHER_TYPE, "properties": {"type": {"anyOf": [{"enum": sorted(DATA)}, _IMPORT_PATH]}}}
    data = {"anyOf": [{"type": "string"}, {"type": "array"}, named, {"type": "null"}]}
    trainer = made.options(Trainer, without=(*OLD_NAMES, "algorithm"))
    training = {
        "agent": {"anyOf": [{"type": "string"}, made.of(LitAgent)]},
        "train": data,
        "val": data,
        "algorithm": {"anyOf": [made.of(Algorithm), {"type": "null"}]},
        "trainer": {"anyOf": [trainer, {"type": "null"}]},
    }
    halves = [{"properties": training, "required": ["agent"], "additionalProperties": False}]
    try:
        from leyden.rl import Trainer as SimulatorTrainer
        from leyden.rl import TrainingVessel

        vessel = made.options(TrainingVessel)
        vessel["properties"] |= {
            "type": _IMPORT_PATH,
            **{f"{stage}_initial_states": data for stage in ("train", "val", "test")},
        }
        parts = {"vessel": vessel, "trainer": made.options(SimulatorTrainer)}
        halves.append({"properties": parts, "required": ["vessel"], "additionalProperties": False})
    except MissingExtra:  # the schema of this installation has agents only
        pass
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A file of leyden run",
        "type": "object",
        "anyOf": halves,
        "$defs": made.defs,
    }


class _Schema:
    def __init__(self) -> None:
        self.defs: dict[str, Any] = {}
        """The schemas of classes, by their names."""

    def of(self, annotation: Any) -> dict[str, Any]:
        """Return the schema of an annotation; an empty one, which takes anything, where it says nothing."""
        members = members_of(annotation)
        takes_specs = any(isinstance(each, type) and registry_of(each) for each in members)
        plain = (str, *_MAPPINGS, _CALLABLE)
        shown = [each for each in members if not (takes_specs and (get_origin(each) or each) in plain)]
        schemas = [self._of_member(each) for each in shown]
        if {} in schemas:
            return {}
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _of_member(self, kind: Any) -> dict[str, Any]:
        origin: Any = get_origin(kind) or kind
        arguments = get_args(kind)
        if kind in (Any, object):
            return {}
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin in _LISTS:
            return {
                "type": "array",
                "items": self.of(arguments[0]) if arguments and len(set(arguments) - {...}) == 1 else {},
            }
        if origin in _MAPPINGS:
            return {"type": "object", "additionalProperties": self.of(arguments[1]) if len(arguments) > 1 else {}}
        if origin in (_CALLABLE, type):
            return {"anyOf": [_IMPORT_PATH, _OTHER_TYPE]}
        if origin is Annotated or not isinstance(origin, type) or issubclass(cast("type[Any]", origin), BaseModel):
            return self._by_pydantic(kind)
        found = cast("type[Any]", origin)
        if issubclass(found, enum.Enum):
            return {"enum": [each.value for each in found]}
        return {} if getattr(found, "_is_protocol", False) else self._of_class(found)

    def _by_pydantic(self, kind: Any) -> dict[str, Any]:
        try:
            schema = TypeAdapter(kind).json_schema(ref_template="#/$defs/{model}")
        except PydanticUserError:  # a type that JSON does not have
            return {}
        self.defs.update(schema.pop("$defs", {}))
        return schema

    def _of_class(self, kind: type) -> dict[str, Any]:
        """Return a reference to the schema of a class: the names and the options of its components, or its own."""
        if kind.__name__ not in self.defs:
            self.defs[kind.__name__] = {}  # a class may have itself among its options
            registry = registry_of(kind)
            if registry:
                names = component_names(registry)
                components = [self._component(name, registry) for name in names]
                self.defs[kind.__name__] = {"anyOf": [{"enum": names}, _IMPORT_PATH, *components, _OTHER_TYPE]}
            elif is_data(kind):
                self.defs[kind.__name__] = self.options(kind)
            else:
                own = [] if inspect.isabstract(kind) else [self.options(kind)]
                self.defs[kind.__name__] = {"anyOf": [_IMPORT_PATH, *own, _OTHER_TYPE]}
        return {"$ref": f"#/$defs/{kind.__name__}"}

    def _component(self, name: str, registry: Any) -> dict[str, Any]:
        schema: dict[str, Any]
        try:
            schema = self.options(find_component(name, registry), without=OLD_NAMES)
        except Exception as error:  # noqa: BLE001 -- of another distribution, or with a missing extra
            schema = {"type": "object", "properties": {}, "description": str(error)}
        schema["properties"] = {"type": {"const": name}, **schema["properties"]}
        schema["required"] = ["type", *(each for each in schema.get("required", []) if each not in _GIVEN_BY_PARTS)]
        return schema

    def options(self, target: Callable[..., Any], *, without: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the schema of a mapping with the options of a class or function."""
        known, is_open = options_of(target)
        texts = _descriptions(target)
        properties: dict[str, Any] = {}
        for name, option in known.items():
            if name not in without:
                schema = self.of(option.annotation)
                properties[name] = {**schema, "description": texts[name]} if name in texts else schema
        required = [name for name in properties if known[name].default is inspect.Parameter.empty]
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": is_open}
        return {**schema, "required": required} if required else schema


def _descriptions(target: Any) -> dict[str, str]:
    """Return the descriptions of options in docstrings, in which they stand as `name: text` or `name, name: text`."""
    found: dict[str, str] = {}
    for each in target.__mro__[:-1] if isinstance(target, type) else [target]:
        for text in (
            inspect.getdoc(each) if "__doc__" in vars(each) else "",
            inspect.getdoc(vars(each).get("__init__")),
        ):
            for names, description in re.findall(r"^([a-z]\w*(?:, [a-z]\w*)*): (.+(?:\n {4}.+)*)", text or "", re.M):
                for name in names.split(", "):
                    found.setdefault(name, " ".join(description.split()))
    return found
