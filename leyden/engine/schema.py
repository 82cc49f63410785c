"""Bring JSON schemas into the form that a grammar can hold, or refuse them by path and keyword.

Schemas come from pydantic, zod and MCP servers, in any draft. Annotations, and formats that are unknown here, are
dropped, because they restrict nothing. Keywords of older drafts become those of 2020-12, and a few keywords become
others that say the same. Any other keyword that no grammar can hold is refused:
`tools[0].function.parameters.properties.p: uniqueItems`.

Pure functions. `properties` and its like map names to schemas, so a property may have the name of a keyword. `grammar`
compiles the result.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final, cast
from urllib.parse import quote, unquote, urljoin

from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.engine.refusal import bad_request, shown

_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that map names to schemas."""
_DEFINITIONS: Final = ("$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with a list of schemas."""
_SINGLE: Final = ("items", "additionalProperties")
"""Keywords with one schema."""
_IN_PLACE: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas describe the same value as the schema that has them."""
_VALUES: Final = (
    *("$ref", "type", "enum", "const", "required", "minProperties", "maxProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems"),
)
"""Keywords whose values are no schemas."""
_FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are held. Others are annotations."""
_OF_TEXT: Final = ("pattern", "minLength", "maxLength", "enum", "const")
"""Keywords beside which a format is not held, because both together may admit no text."""
_NOT_HELD: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("uniqueItems",), (False,)),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "propertyNames"), (True, {}, {"type": "string"})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("not", "if", "contains", "$dynamicRef", "$recursiveRef"), ()),
}
"""Keywords that no grammar here can hold, with the values that restrict nothing."""
_MAX_REFERENCES: Final = 16
"""The most references that follow each other. More are a circle."""
_RESERVED: Final = re.compile(r"[^\w$-]")


def held_schema(schema: Json, where: str) -> Json:
    """Return a schema that a grammar can hold and that admits nothing that the given one forbids.

    An object that names its properties has no others, unless it has `additionalProperties`. JSON Schema allows others
    by default, and a weak policy would invent them without end. An object that several schemas describe together stays
    open, because none of them knows the others' properties.

    where: the schema's path in the request, for error messages.
    Raise Refusal, with the path and the keyword, for a schema that cannot be held.
    """
    try:
        schema = _with_pointers(schema)
        return _Schema(schema).rewritten(schema, "#", where, combined=False)
    except RecursionError as error:
        raise bad_request(f"{where} is nested too deeply", param=_field(where), code="bad_schema") from error


def faulty_keyword(schema: Any, where: str, fails: Callable[[Any], bool], definitions: Json | None = None) -> str:
    """Return the path and the keyword that keep a schema from being compiled: those of its deepest part that fails by
    itself.

    fails: returns whether a schema cannot be compiled.
    definitions: those of the whole schema, of which this one is a part; None: it is the whole.
    """
    if not isinstance(schema, dict):
        return where
    given = cast(Json, schema)
    shared = {name: given[name] for name in _DEFINITIONS if name in given} if definitions is None else definitions
    for path, part in _parts(given):
        if isinstance(part, dict) and fails({**cast(Json, part), **shared}):
            return faulty_keyword(part, where + path, fails, shared)
    for name in given:
        if name not in _DEFINITIONS and not fails({**{key: given[key] for key in given if key != name}, **shared}):
            return f"{where}: {name}"
    return where


def resolved(root: Json, schema: Any) -> Any:
    """Return the definition in `root` to which a schema refers, or the schema itself if it refers to none; None if
    there is no such definition.
    """
    for _ in range(_MAX_REFERENCES):
        reference = cast(Json, schema).get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not _is_pointer(reference):
            return cast(Any, schema)
        schema = _target(root, reference)
    return None


def _target(root: Any, reference: str) -> Any:
    """Return the schema at a JSON pointer; None if there is none."""
    for key in reference.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            parts = cast(list[Any], root)
            root = parts[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(parts) else None
        else:
            root = cast(Json, root).get(key) if isinstance(root, dict) else None
    return root


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def cannot_be_held(fault: str, why: str = "") -> Refusal:
    """Return the refusal of a schema.

    fault: path and keyword.
    why: the reason, if it is known.
    """
    return bad_request(
        f"{fault} cannot be enforced by a grammar{why and f' ({why})'}; simplify the schema, or send tool_choice='auto' and no "
        "JSON schema as response_format",
        param=_field(fault),
        code="bad_schema",
    )


def _field(where: str) -> str:
    return re.split(r"[.\[:]", where)[0]


def _parts(schema: Json) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly below a schema, each with its path from there."""
    for name in _MAPS:
        if isinstance(below := schema.get(name), dict):
            for key, part in cast(Json, below).items():
                yield f".{name}{_step(key)}", part
    for name in _LISTS:
        if isinstance(parts := schema.get(name), list):
            for index, part in enumerate(cast(list[Any], parts)):
                yield f".{name}[{index}]", part
    for name in _SINGLE:
        if isinstance(part := schema.get(name), dict):
            yield f".{name}", part


def _step(key: str) -> str:
    return f"[{shown(key)}]" if _RESERVED.search(key) or not key else f".{key}"


def _pointer(*keys: str) -> str:
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)


def _below(schema: Json) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly below a schema, each with the keys that lead to it."""
    for name in (*_MAPS, *_LISTS, *_SINGLE, "additionalItems"):
        part: Any = schema.get(name)
        if name in _MAPS and isinstance(part, dict):
            yield from (((name, key), each) for key, each in cast(Json, part).items())
        elif isinstance(part, list):
            yield from (((name, str(index)), each) for index, each in enumerate(cast(list[Any], part)))
        elif isinstance(part, dict):
            yield (name,), cast(Any, part)


def _references_in(schema: Any) -> Iterator[str]:
    """Yield the references of a schema and of the schemas below it."""
    if isinstance(schema, dict):
        given = cast(Json, schema)
        if isinstance(reference := given.get("$ref"), str):
            yield reference
        for _, part in _below(given):
            yield from _references_in(part)


def _with_pointers(root: Json) -> Json:
    """Return a schema whose references by `$id`, `$anchor` and `$dynamicAnchor` are JSON pointers from its root. A
    reference that leads nowhere stays as it is.
    """
    pointers: dict[str, str] = {"": "#"}
    """Pointers by URI."""
    n_dynamic: Counter[str] = Counter()
    """How many schemas have a dynamic anchor. A reference to the only one is a plain one."""
    n_resources = 0

    def base_of(given: Json, base: str) -> str:
        own = given.get("$id")
        return urljoin(base, own).removesuffix("#") if isinstance(own, str) else base

    def read(schema: Any, pointer: str, base: str) -> None:
        nonlocal n_resources
        if not isinstance(schema, dict):
            return
        given = cast(Json, schema)
        own = base_of(given, base)
        if own != base:
            n_resources += pointer != "#"
            pointers.setdefault(own, pointer)
            base = own
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := given.get(name), str):
                pointers.setdefault(f"{base}#{anchor}", pointer)
                n_dynamic[anchor] += name == "$dynamicAnchor"
        for keys, part in _below(given):
            read(part, f"{pointer}/{_pointer(*keys)}", base)

    def pointer_to(reference: str, base: str) -> str | None:
        url, _, fragment = reference.partition("#")
        url, fragment = urljoin(base, url) if url else base, unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return pointers.get(f"{url}#{fragment}")
        start = pointers.get(url)
        return None if start is None else start + fragment

    def replaced(schema: Any, base: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        given = cast(Json, schema)
        base = base_of(given, base)
        found = {name: value for name, value in given.items() if name not in _OF_REFERENCES}
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = given.get(name)
            pointer = pointer_to(reference, base) if isinstance(reference, str) else None
            several = n_dynamic[str(reference).rpartition("#")[2]] > 1 if name == "$dynamicRef" else n_resources > 0
            if pointer is not None and (name == "$ref" or not (several or "$ref" in given)):
                found.pop(name)
                found["$ref"] = pointer
        for name in (*_MAPS, *_LISTS, *_SINGLE, "additionalItems"):
            part: Any = given.get(name)
            if name in _MAPS and isinstance(part, dict):
                found[name] = {key: replaced(each, base) for key, each in cast(Json, part).items()}
            elif isinstance(part, list):
                found[name] = [replaced(each, base) for each in cast(list[Any], part)]
            elif isinstance(part, dict):
                found[name] = replaced(part, base)
        return found

    read(root, "#", "")
    return replaced(root, "")


_OF_REFERENCES: Final = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
"""Keywords that name a schema for references, and say nothing else."""


class _Schema:
    """A schema with its definitions, while it is rewritten."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._combined: set[str] = set()
        """The references to schemas that describe a value together with others."""
        self._references: set[str] = set()
        self._follow: defaultdict[str, list[str]] = defaultdict(list)
        """The references that are combined if the schema at a pointer is."""
        self._read(root, "#", (), combined=False)
        left = list(self._combined)
        while left:
            found = [each for each in self._follow.pop(left.pop(), ()) if each not in self._combined]
            self._combined.update(found)
            left += found
        self._ending: set[str] = set()
        """The references to schemas that some finite value satisfies."""
        mentioned_by: defaultdict[str, set[str]] = defaultdict(set)
        for reference in self._references:
            for each in _references_in(_target(root, reference)):
                mentioned_by[each].add(reference)
        left = sorted(self._references)
        while left:
            reference = left.pop()
            if reference not in self._ending and self._ends(_target(root, reference)):
                self._ending.add(reference)
                left += mentioned_by[reference]

    def _read(self, schema: Any, pointer: str, above: tuple[str, ...], *, combined: bool) -> None:
        """Note the references below a schema, and which of them are combined with other schemas.

        above: the pointers of the schemas that describe the same value and hold this one.
        combined: whether one of them combines schemas.
        """
        if not isinstance(schema, dict):
            return
        given = cast(Json, schema)
        chain = (*above, pointer)
        combined = combined or _combines(given)
        if isinstance(reference := given.get("$ref"), str):
            if _is_pointer(reference):
                self._references.add(reference)
            if combined:
                self._combined.add(reference)
            for each in chain:
                self._follow[each].append(reference)
        for keys, part in _below(given):
            in_place = keys[0] in _IN_PLACE
            self._read(part, f"{pointer}/{_pointer(*keys)}", chain if in_place else (), combined=in_place and combined)

    def _ends(self, schema: Any) -> bool:
        """Return whether a finite value can satisfy a schema, as far as its references are known to end."""
        if not isinstance(schema, dict):
            return schema is not False
        given = cast(Json, schema)
        reference = given.get("$ref")
        if isinstance(reference, str) and _is_pointer(reference) and reference not in self._ending:
            return False
        for name, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = given.get(name)
            if isinstance(parts, list) and parts and not enough(map(self._ends, cast(list[Any], parts))):
                return False
        types = _types(given)
        if "const" in given or "enum" in given or not types or types - {"object", "array"}:
            return True
        return ("object" in types and self._object_ends(given)) or ("array" in types and self._array_ends(given))

    def _object_ends(self, given: Json) -> bool:
        properties, required = given.get("properties"), given.get("required")
        named = cast(Json, properties) if isinstance(properties, dict) else {}
        wanted = (
            [name for name in cast(list[Any], required) if isinstance(name, str)] if isinstance(required, list) else []
        )
        if not all(self._ends(named[name]) for name in wanted if name in named):
            return False
        least = given.get("minProperties")
        if not isinstance(least, int) or least <= len(wanted) or isinstance(given.get("patternProperties"), dict):
            return True
        free = [part for name, part in named.items() if name not in wanted]
        return self._ends(given.get("additionalProperties", True)) or any(map(self._ends, free))

    def _array_ends(self, given: Json) -> bool:
        least, items = given.get("minItems"), given.get("items", True)
        if not isinstance(least, int) or least < 1:
            return True
        first = cast(Any, items if isinstance(items, list) else given.get("prefixItems"))
        prefix = cast(list[Any], first)[:least] if isinstance(first, list) else []
        rest = given.get("additionalItems", True) if isinstance(items, list) else items
        return all(map(self._ends, prefix)) and (len(prefix) == least or self._ends(rest))

    def rewritten(self, schema: Any, pointer: str, where: str, *, combined: bool) -> Any:
        """Return one schema in the form that a grammar can hold.

        pointer: the JSON pointer by which others refer to it.
        combined: whether other schemas describe the same value.
        """
        if not isinstance(schema, dict):
            return schema
        combined = combined or pointer in self._combined
        given = self._to_draft_2020(cast(Json, schema), where)
        reference = given.get("$ref")
        if isinstance(reference, str) and reference in self._references - self._ending:
            raise cannot_be_held(f"{where}: $ref", f"no value of {reference!r} ends, because each holds another")
        below = combined or _combines(given)
        found: Json = {}
        for name, value in given.items():
            here = f"{where}.{name}"
            if name in _MAPS and isinstance(value, dict):
                found[name] = {
                    key: self.rewritten(part, f"{pointer}/{_pointer(name, key)}", here + _step(key), combined=False)
                    for key, part in cast(Json, value).items()
                }
            elif name in _LISTS and isinstance(value, list):
                found[name] = [
                    self.rewritten(
                        part, f"{pointer}/{name}/{index}", f"{here}[{index}]", combined=below and name in _IN_PLACE
                    )
                    for index, part in enumerate(cast(list[Any], value))
                ]
            elif name in _SINGLE:
                found[name] = self.rewritten(value, f"{pointer}/{name}", here, combined=False)
            elif name == "$ref" and isinstance(value, str) and _is_pointer(value):
                found[name] = quote(value, safe="#/~$")  # as the compiler reads references
            elif name in _VALUES or name in _MAPS or name in _LISTS:
                found[name] = value
        if not combined and _is_closed(given):
            found.setdefault("additionalProperties", False)
        key = self._discriminator(given)
        if key is not None:
            found["oneOf"] = [{"allOf": [part, {"required": [key]}]} for part in found["oneOf"]]
        if "anyOf" not in found and (key is not None or self._excludes(given.get("oneOf"), closed=not below)):
            found["anyOf"] = found.pop("oneOf")
        return found

    def _to_draft_2020(self, schema: Json, where: str) -> Json:
        """Return a schema with the keywords of draft 2020-12 and without annotations. Raise Refusal for a keyword that
        cannot be held.
        """
        given = {name: value for name, value in schema.items() if value is not None or name == "const"}
        if given.get("format") not in _FORMATS or any(name in given for name in _OF_TEXT):
            given.pop("format", None)
        for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(given.get(bound), bool) and given.pop(bound) and limit in given:
                given[bound] = given.pop(limit)
        if isinstance(given.get("items"), list):
            given["prefixItems"] = given.pop("items")
            if "additionalItems" in given:
                given["items"] = given["additionalItems"]
        if given.get("type") == "any":  # of draft 3
            del given["type"]
        if "divisibleBy" in given:  # of draft 3
            given.setdefault("multipleOf", given.pop("divisibleBy"))
        if isinstance(given.get("required"), bool):  # of draft 3: the object that has the property reads it
            del given["required"]
        if isinstance(properties := given.get("properties"), dict):
            parts = cast(Json, properties).items()
            wanted = [
                name for name, part in parts if isinstance(part, dict) and cast(Json, part).get("required") is True
            ]
            required: Any = given.get("required", [])
            if wanted and isinstance(required, list):
                others = cast(list[Any], required)
                given["required"] = [*others, *(name for name in wanted if name not in others)]
        if given.get("unevaluatedProperties") is False and not any(
            name in given for name in (*_IN_PLACE, "$ref", "if")
        ):
            given.setdefault("additionalProperties", given.pop("unevaluatedProperties"))
        if isinstance(most := given.get("maxItems"), int) and most <= 1:
            given.pop("uniqueItems", None)
        if "then" not in given and "else" not in given:
            given.pop("if", None)
        if given.get("minContains") == 0 and "maxContains" not in given:
            given.pop("contains", None)
        self._name_properties(given)
        for name, neutral in _NOT_HELD.items():
            if name in given and not any(given[name] == each for each in neutral):
                raise cannot_be_held(f"{where}: {name}")
        return given

    def _name_properties(self, given: Json) -> None:
        """Replace `propertyNames` that lists names or has a pattern by the properties of these names."""
        names = resolved(self._root, given.get("propertyNames"))
        if not isinstance(names, dict) or given.get("properties") or given.get("patternProperties"):
            return
        rule = {name: value for name, value in cast(Json, names).items() if name in _VALUES and name != "type"}
        if "pattern" in rule or rule.get("format") not in _FORMATS:
            rule.pop("format", None)  # an annotation
        part = given.get("additionalProperties", True)
        match rule:
            case {"enum": [*listed], **rest} if not rest:
                replaced: Json = {"properties": {name: part for name in listed if isinstance(name, str)}}
            case {"const": str() as only, **rest} if not rest:
                replaced = {"properties": {only: part}}
            case {"pattern": str() as pattern, **rest} if not rest:
                replaced = {"patternProperties": {pattern: part}}
            case _ if rule and not rule.keys() - {"minLength", "maxLength"}:
                least, most = rule.get("minLength", 0), rule.get("maxLength", "")
                replaced = {"patternProperties": {rf"^[\s\S]{{{least},{most}}}$": part}}
            case _:
                return
        del given["propertyNames"]
        given |= {**replaced, "additionalProperties": False}

    def _alternatives(self, given: Any) -> list[Json]:
        """Return the alternatives of a `oneOf`, with definitions in place of references; [] unless all are objects."""
        parts = [resolved(self._root, part) for part in cast(list[Any], given)] if isinstance(given, list) else []
        return parts if all(isinstance(part, dict) for part in parts) else []

    def _discriminator(self, schema: Json) -> str | None:
        """Return a property that all alternatives of a `oneOf` have, each with its own values; None if there is none.
        An object that has it satisfies one alternative at most.
        """
        parts = self._alternatives(schema.get("oneOf"))
        maps = [cast(Json, names) for part in parts if isinstance(names := part.get("properties"), dict)]
        if not maps or len(maps) != len(parts):
            return None
        for key in maps[0]:
            values = [_values(resolved(self._root, names.get(key))) for names in maps]
            if all(values) and sum(map(len, values)) == len(set[str]().union(*values)):
                return key
        return None

    def _excludes(self, given: Any, *, closed: bool) -> bool:
        """Return whether no value can satisfy two alternatives of a `oneOf`: they have other types, or each requires a
        property that the other one, being closed, does not have.

        closed: whether the alternatives are closed if they name their properties.
        """
        parts = self._alternatives(given)
        if not parts:
            return False
        referred = [cast(Json, part).get("$ref") for part in cast(list[Any], given)]
        closed = closed and not self._combined.intersection(each for each in referred if isinstance(each, str))

        def differ(one: Json, other: Json) -> bool:
            types = _types(one), _types(other)
            if all(types) and not types[0] & types[1]:
                return True
            if not (closed and _is_closed(one) and _is_closed(other)):
                return False
            pairs = ((one, other), (other, one))
            return all(set(a.get("required") or ()) - set(b["properties"]) for a, b in pairs)

        return all(differ(one, other) for index, one in enumerate(parts) for other in parts[:index])


def _values(schema: Any) -> set[str]:
    """Return the values that a schema lists, as JSON; an empty set if it lists none."""
    if not isinstance(schema, dict):
        return set()
    given = cast(Json, schema)
    listed: Any = [given["const"]] if "const" in given else given.get("enum")
    return (
        {json.dumps(value, sort_keys=True) for value in cast(list[Any], listed)} if isinstance(listed, list) else set()
    )


def _types(schema: Json) -> set[str]:
    """Return the types that a schema names; an empty set if it names none."""
    named: Any = schema.get("type")
    found = {str(each) for each in (cast(list[Any], named) if isinstance(named, list) else [named]) if each is not None}
    return found | {"number"} if "integer" in found else found


def _combines(schema: Json) -> bool:
    """Return whether a schema and others, by `allOf`, `anyOf`, `oneOf` or `$ref`, describe one value together."""
    places = [name for name in (*_IN_PLACE, "$ref") if name in schema]
    parts: Any = schema.get("allOf")
    several = isinstance(parts, list) and len(cast(list[Any], parts)) > 1
    return several or len(places) > 1 or (bool(places) and isinstance(schema.get("properties"), dict))


def _is_closed(schema: Any) -> bool:
    """Return whether an object has exactly the properties that its schema names, because it does not mention others."""
    if not isinstance(schema, dict):
        return False
    given = cast(Json, schema)
    names: Any = given.get("properties")
    required: Any = given.get("required") or []
    if not isinstance(names, dict) or "$ref" in given or given.get("additionalProperties", False) is not False:
        return False
    if not isinstance(required, list) or not all(isinstance(n, str) and n in names for n in cast(list[Any], required)):
        return False
    lists: list[Any] = [given[name] for name in _IN_PLACE if name in given]
    parts = [part for each in lists if isinstance(each, list) for part in cast(list[Any], each)]
    return all(_adds_nothing(part, cast(Json, names)) for part in parts)


def _adds_nothing(part: Any, names: Json) -> bool:
    """Return whether a part of `allOf`, `anyOf` or `oneOf` names no property beyond `names`, the whole schema's."""
    if not isinstance(part, dict):
        return True
    given = cast(Json, part)
    if any(name in given for name in (*_IN_PLACE, "$ref")):
        return False
    named: Any = given.get("properties")
    return not isinstance(named, dict) or set(cast(Json, named)) <= set(names)
