"""JSON schemas as people's tools have them: what a grammar holds, and what is refused by path and keyword."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden._lib.host.http import Refusal
from leyden.engine.grammar import GrammarConstraint, Grammars
from leyden.engine.schema import held_schema
from leyden.engine.tools import PARSERS
from leyden.engine.wire import ChatRequest, parse_request
from tests.engine import tiny

pytest.importorskip("llguidance")

FLAG: dict[str, Any] = {"type": "boolean"}
TOKENIZER = tiny.tokenizer(more=["<tool_call>", "</tool_call>"])
GRAMMARS = Grammars(TOKENIZER, n_vocabulary=len(TOKENIZER), eos_ids=frozenset([2]))


def an_object(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def either(one: Any, other: Any, **more: Any) -> dict[str, Any]:
    parts = [{"$ref": "#/$defs/One"}, {"$ref": "#/$defs/Other"}]
    return an_object({"p": {"oneOf": parts, **more}}, **{"$defs": {"One": one, "Other": other}})


def kind(value: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value, "default": value}, **properties}}


def constraints(schema: Any, n: int) -> list[GrammarConstraint]:
    """The constraints of a required call with arguments of a schema."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [tool], "n": n}
    body |= {"tool_choice": {"type": "function", "function": {"name": "f"}}}
    return GRAMMARS.constraints(parse_request(json.dumps(body).encode(), ChatRequest), PARSERS["hermes"])


def samples(schema: Any, n: int = 12) -> list[Any]:
    """Arguments that a policy without any sense writes under the grammar of a required call."""
    found: list[Any] = []
    draw = random.Random(0)
    for constraint in constraints(schema, n):
        ids: list[int] = []
        while len(ids) < 600:
            allowed = [token for token, may in enumerate(constraint.allowed()) if may]
            ends = [token for token in allowed if TOKENIZER.convert_ids_to_tokens(token) in ('"', "}", "]")]
            ids.append(draw.choice(ends if ends and draw.random() < 0.5 else allowed))
            if ids[-1] == 2:
                found.append(json.loads(TOKENIZER.decode(ids, skip_special_tokens=True).split("\n")[1])["arguments"])
                break
            constraint.accept(ids[-1])
    assert found
    return found


KEYWORDS = (
    *("enum", "const", "default", "examples", "properties", "patternProperties", "$defs", "definitions", "$ref", "$id"),
    *("type", "items", "anyOf", "allOf", "oneOf", "not", "if", "required", "additionalProperties", "uniqueItems"),
    *("format", "pattern", "minimum", "dependencies", "x-guidance", "a/b", "a b", ""),
)


def test_a_property_with_the_name_of_a_keyword_is_a_property() -> None:
    for name in KEYWORDS:
        assert {json.dumps(each) for each in samples(an_object({name: an_object({name: FLAG})}))} <= {
            json.dumps({name: {name: value}}) for value in (True, False)
        }
        pointer = name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")
        shared = an_object({"p": {"$ref": f"#/$defs/{pointer}"}}, **{"$defs": {name: an_object({"a": FLAG})}})
        assert all(each in ({"p": {"a": True}}, {"p": {"a": False}}) for each in samples(shared)), name


def test_values_are_values_whatever_they_look_like() -> None:
    value = {"properties": {"a": 1}, "required": [1], "uniqueItems": True}
    assert samples(an_object({"v": {"const": value}}))[0] == {"v": value}
    assert samples(an_object({"v": {"enum": [value], "default": {"not": 1}, "examples": [{"if": 1}]}}))[0] == {
        "v": value
    }


@pytest.mark.parametrize(
    "name",
    [
        *("path", "file-path", "password", "binary", "byte", "uri-reference", "regex", "json-pointer", "idn-email"),
        *("iri", "ipvanyaddress", "color", "int64", "decimal", "date", "uri", ["date"]),
    ],
)
def test_a_format_is_an_annotation(name: Any) -> None:
    for each in samples(an_object({"p": {"type": "string", "format": name, "maxLength": 2}})):
        assert len(each["p"]) <= 2
    assert samples(an_object({"p": {"type": "string", "format": name, "pattern": "^ab?$"}}))[0]["p"] in ("a", "ab")


EVERYDAY: dict[str, tuple[Any, Any]] = {
    "annotations": (
        an_object(
            {
                "p": FLAG
                | {
                    "title": "P",
                    "description": "d",
                    "default": 3,
                    "examples": [1],
                    "nullable": True,
                    "deprecated": True,
                }
                | {"readOnly": True, "contentEncoding": "base64", "example": "x", "x-order": 1, "enumNames": ["a"]}
            },
            **{
                "$schema": "http://example.org/schema",
                "$id": "not a uri",
                "$comment": "c",
                "x-guidance": {"lenient": True},
            },
        ),
        lambda v: v in ({"p": True}, {"p": False}),
    ),
    "draft 4 bounds": (
        an_object(
            {"p": {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": True}}
        ),
        lambda v: v == {"p": 4},
    ),
    "draft 3 required": (
        {"type": "object", "properties": {"p": FLAG | {"required": True}, "q": FLAG | {"required": False}}},
        lambda v: "p" in v and v.keys() <= {"p", "q"},
    ),
    "draft 7 tuples": (
        an_object({"p": {"type": "array", "items": [FLAG, {"const": 1}], "additionalItems": False, "minItems": 2}}),
        lambda v: v["p"] in ([True, 1], [False, 1]),
    ),
    "counted properties": (
        {"type": "object", "additionalProperties": FLAG, "minProperties": 1, "maxProperties": 2},
        lambda v: 1 <= len(v) <= 2 and all(type(each) is bool for each in v.values()),
    ),
    "pattern properties": (
        an_object({"p": {"type": "object", "patternProperties": {"^x": FLAG}, "additionalProperties": False}}),
        lambda v: all(name[0] == "x" for name in v["p"]),
    ),
    "listed property names": (
        an_object({"p": {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": FLAG}}),
        lambda v: v["p"].keys() <= {"a"},
    ),
    "property names with a pattern": (
        an_object({"p": {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": FLAG}}),
        lambda v: all(name[0] == "a" for name in v["p"]),
    ),
    "no unevaluated properties": (
        {"type": "object", "properties": {"a": FLAG}, "unevaluatedProperties": False},
        lambda v: v.keys() <= {"a"},
    ),
    "unique items of at most one": (
        an_object({"p": {"type": "array", "items": FLAG, "uniqueItems": True, "maxItems": 1}}),
        lambda v: len(v["p"]) <= 1,
    ),
    "a discriminated union": (
        either(kind("a", x=FLAG), kind("b", x=FLAG), discriminator={"propertyName": "kind"}),
        lambda v: v["p"]["kind"] in ("a", "b") and v["p"].keys() <= {"kind", "x"},
    ),
    "one of two objects": (
        either(an_object({"a": FLAG}), an_object({"b": FLAG})),
        lambda v: list(v["p"]) in (["a"], ["b"]),
    ),
    "one of two types": (either({"type": "null"}, FLAG), lambda v: v["p"] in (None, True, False)),
    "inheritance": (
        an_object(
            {"p": {"allOf": [{"$ref": "#/$defs/Base"}, an_object({"b": FLAG})]}, "q": {"$ref": "#/$defs/Other"}},
            **{"$defs": {"Base": an_object({"a": FLAG}), "Other": an_object({"c": FLAG})}},
        ),
        lambda v: {"a", "b"} <= v["p"].keys() and v["q"].keys() == {"c"},
    ),
    "a reference within allOf": (
        an_object(
            {"p": {"allOf": [{"$ref": "#/$defs/Base"}], "default": {}}}, **{"$defs": {"Base": an_object({"a": FLAG})}}
        ),
        lambda v: v["p"].keys() == {"a"},
    ),
    "one of two required": (
        {"type": "object", "properties": {"a": FLAG, "b": FLAG}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        lambda v: v and v.keys() <= {"a", "b"},
    ),
    "recursion": (
        an_object({"a": FLAG, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        lambda v: v.keys() == {"a", "next"} and (v["next"] is None or v["next"].keys() == {"a", "next"}),
    ),
    "a record of zod": (
        an_object(
            {
                "p": {
                    "type": "object",
                    "propertyNames": {"type": "string", "minLength": 2, "maxLength": 3},
                    "additionalProperties": FLAG,
                    "minProperties": 1,
                    "maxProperties": 1,
                }
            }
        ),
        lambda v: all(2 <= len(name) <= 3 for name in v["p"]),
    ),
    "a record of zod by pattern and format": (
        an_object(
            {
                "p": {
                    "type": "object",
                    "propertyNames": {"type": "string", "format": "uuid", "pattern": "^[ab]{2}$"},
                    "additionalProperties": FLAG,
                    "minProperties": 1,
                    "maxProperties": 1,
                }
            }
        ),
        lambda v: all(set(name) <= {"a", "b"} for name in v["p"]),
    ),
    "any type, and a multiple, of draft 3": (
        an_object({"p": {"type": "any", "enum": [1, "a"]}, "q": {"type": "integer", "divisibleBy": 5, "maximum": 50}}),
        lambda v: v["p"] in (1, "a") and v["q"] % 5 == 0,
    ),
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_schemas_of_everyday_are_held(name: str) -> None:
    schema, holds = EVERYDAY[name]
    for each in samples(schema):
        assert holds(each), each


NOT_HELD: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": FLAG, "uniqueItems": True},
    "not": {"type": "integer", "not": {"const": 3}},
    "if": {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": FLAG},
    "propertyNames": {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedItems": {"type": "array", "prefixItems": [FLAG], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "pattern": {"type": "string", "pattern": r"(a)\1"},
    "type": {"type": "STRING"},
    "$ref": {"$ref": "#/$defs/nowhere"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "properties": {"type": "object", "properties": ["a"]},
    "required": {"type": "object", "properties": {"a": FLAG}, "required": [["a"], 3]},
    "anyOf": {"anyOf": {"a": 1}},
}


@pytest.mark.parametrize("keyword", NOT_HELD)
def test_what_cannot_be_held_is_refused_by_path_and_keyword(keyword: str) -> None:
    inner = {"type": "array", "items": an_object({"a b": NOT_HELD[keyword], "fine": FLAG})}
    where = f'tools[0].function.parameters.properties.list.items.properties["a b"]: {keyword} cannot be enforced'
    with pytest.raises(Refusal) as refused:
        samples(an_object({"list": inner}))
    assert where in str(refused.value)
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    "definition",
    [
        {"$ref": "#/$defs/node"},
        {"description": "itself", "anyOf": [{"$ref": "#/$defs/node"}]},
        {"allOf": [{"$ref": "#/$defs/other"}]},
        an_object({"next": {"$ref": "#/$defs/node"}}),
        {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/other"}},
    ],
)
def test_a_value_without_end_is_refused_by_the_reference_to_it(definition: Any) -> None:
    schema = an_object({"a": FLAG, "tree": {"$ref": "#/$defs/node"}})
    with pytest.raises(Refusal, match=r"tools\[0\].function.parameters.properties.tree: \$ref cannot be enforced"):
        samples({**schema, "$defs": {"node": definition, "other": {"$ref": "#/$defs/node"}}})
    ending = {"anyOf": [definition, FLAG]}
    held_schema({**schema, "$defs": {"node": ending, "other": {"$ref": "#/$defs/node"}}}, "schema")


def test_values_that_restrict_nothing_are_no_reason_to_refuse() -> None:
    nothing: dict[str, Any] = {
        "uniqueItems": False,
        "unevaluatedProperties": True,
        "dependentRequired": {},
        "if": {"const": 1},
    }
    assert held_schema({"type": "object", **nothing, "propertyNames": {"type": "string"}}, "schema") == {
        "type": "object"
    }


JUNK: list[Any] = [None, True, 3, "x", [], {}, [3], {"a": 1}, [[{}]], {"$ref": 3}, {"$ref": "#/$defs/circle"}]


@pytest.mark.parametrize(
    "keyword", [*NOT_HELD, "allOf", "items", "prefixItems", "enum", "const", "additionalProperties"]
)
def test_a_malformed_schema_is_refused_or_held_and_never_an_error(keyword: str) -> None:
    defs = {"circle": {"$ref": "#/$defs/circle"}}
    for value in JUNK:
        for more in ({}, {"properties": {"a": FLAG}}, {"oneOf": [{"properties": {"a": value}}, 3]}):
            with contextlib.suppress(Refusal):
                constraints({**more, keyword: value, "$defs": defs}, n=1)


def test_null_is_no_keyword() -> None:
    nothing = dict.fromkeys(("type", "required", "uniqueItems", "not", "additionalProperties", "format", "enum"))
    assert samples({"properties": {"a": FLAG | {"default": None, "not": None}}, **nothing})[0].keys() <= {"a"}
    assert samples(an_object({"a": {"const": None}}))[0] == {"a": None}


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(Refusal, match="schema is nested too deeply"):
        held_schema(schema, "schema")


def test_an_argument_has_the_type_that_its_schema_means() -> None:
    """Qwen3-Coder writes arguments as text, and the schema says what they are."""
    means: dict[str, Any] = {
        "number": {"$ref": "#/$defs/level"},
        "listed": {"enum": [5, 6]},
        "only": {"const": 5},
        "all": {"allOf": [{"$ref": "#/$defs/level"}]},
        "text": {"enum": ["5", "6"]},
        "free": {},
        "circle": {"$ref": "#/$defs/circle"},
        "odd": {"anyOf": "x", "type": {"a": 1}},
    }
    defs = {"level": {"type": "integer"}, "circle": {"$ref": "#/$defs/circle"}}
    written = "".join(f"<parameter={name}>\n5\n</parameter>\n" for name in means)
    found = PARSERS["qwen3_coder"].read(
        f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>",
        {"f": {"type": "object", "properties": means, "$defs": defs}},
        final=True,
    )
    assert not isinstance(found, str)
    assert found.calls[0].arguments == {
        **dict.fromkeys(("number", "listed", "only", "all"), 5),
        **dict.fromkeys(("text", "free", "circle", "odd"), "5"),
    }
    assert not isinstance(
        PARSERS["qwen3_coder"].read("<function=f></function>", {"f": {"properties": [1]}}, final=True), str
    )


ENDLESS: dict[str, dict[str, Any]] = {
    "an anchor": an_object({"p": {"$ref": "#a"}}, **{"$anchor": "a"}),
    "a dynamic anchor": an_object({"p": {"$ref": "#a"}}, **{"$dynamicAnchor": "a"}),
    "a dynamic reference": an_object({"p": {"$dynamicRef": "#a"}}, **{"$dynamicAnchor": "a"}),
    "a recursive reference": an_object({"p": {"$recursiveRef": "#"}}, **{"$recursiveAnchor": True}),
    "an id": an_object({"p": {"$ref": "http://h/s"}}, **{"$id": "http://h/s"}),
    "a relative id": an_object({"p": {"$ref": "s"}}, **{"$id": "http://h/s"}),
    "a pointer from an id": an_object({"p": {"$ref": "s#/properties/p"}}, **{"$id": "http://h/s"}),
    "an id within": {"$ref": "t", "$id": "http://h/s", "$defs": {"t": an_object({"p": {"$ref": "t"}}, **{"$id": "t"})}},
    "an encoded pointer": {"$ref": "#/$defs/a%20b", "$defs": {"a b": an_object({"p": {"$ref": "#/$defs/a%20b"}})}},
    "an element of a list": {"anyOf": [an_object({"p": {"$ref": "#/anyOf/0"}})]},
    "anchors that refer to each other": {
        "$ref": "#a",
        "$defs": {"a": {"$anchor": "a", "$ref": "#b"}, "b": {"$anchor": "b", "$ref": "#a"}},
    },
    "elements of a list": an_object({"p": {"type": "array", "minItems": 1, "items": {"$ref": "#/properties/p"}}}),
    "a tuple": an_object({"p": {"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#/properties/p"}]}}),
    "names that are free": an_object(
        {"p": {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}}
    ),
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_a_circle_that_no_value_ends_is_refused_by_its_reference(schema: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"Ref|ref") as refused:
        constraints(schema, 1)
    assert (refused.value.status, refused.value.code) == (400, "bad_schema")
    assert "ends, because each holds another" in refused.value.message


@pytest.mark.parametrize(
    "name",
    ["an anchor", "a dynamic anchor", "a dynamic reference", "a recursive reference", "an id", "a relative id"],
)
def test_a_circle_that_a_value_may_end_is_held(name: str) -> None:
    schema = {**ENDLESS[name], "required": []}
    values = samples(schema)
    assert values
    assert all(value.keys() <= {"p"} for value in values)


def test_references_by_any_name_hold_what_they_refer_to() -> None:
    digit = {"$id": "http://h/digit", "$anchor": "d", "enum": [1, 2]}
    for reference in ("http://h/digit", "digit", "digit#d", "#/$defs/a%20b%25", "http://h/root#/$defs/a%20b%25"):
        schema = an_object({"p": {"$ref": reference}}, **{"$id": "http://h/root", "$defs": {"a b%": digit}})
        assert {value["p"] for value in samples(schema)} == {1, 2}, reference


def test_a_fault_within_a_circle_of_definitions_is_named() -> None:
    recursive = {"anyOf": [], "properties": {"p": {"$ref": "#/$defs/a"}}}
    with pytest.raises(Refusal, match="cannot be enforced by a grammar") as refused:
        constraints({"$ref": "#/$defs/a", "$defs": {"a": recursive}}, 1)
    assert refused.value.status == 400


@pytest.mark.parametrize("n", [3000])
def test_long_chains_of_definitions_are_read_in_time_that_grows_with_their_length(n: int) -> None:
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"title": "t"}]} for i in range(n)}
    for defs in (chain, dict(reversed(chain.items()))):
        began = time.process_time()
        held_schema({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{n}": {"type": "string"}}}, "schema")
        assert time.process_time() - began < 5.0


_KEYS = st.sampled_from(["a", "b", "c d", "x/y", "p%q"])
_REFERENCES = st.sampled_from(
    [
        "#",
        "#/$defs/a",
        "#/$defs/b",
        "#/$defs/c%20d",
        "#/$defs/x~1y",
        "#a",
        "#b",
        "s",
        "http://h/s",
        "#/anyOf/0",
        "?",
        "::[",
    ]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named, listed = st.dictionaries(_KEYS, inner, max_size=2), st.lists(inner, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("properties", "$defs", "definitions"), named),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), listed),
        **dict.fromkeys(("$ref", "$dynamicRef"), _REFERENCES),
        **dict.fromkeys(("$anchor", "$dynamicAnchor"), st.sampled_from(["a", "b", "", 3])),
        "$id": st.sampled_from(["http://h/s", "s", "urn:x:y", "::[", 5]),
        "type": st.sampled_from(["object", "array", ["object", "array"], ["object", "null"]]),
        "required": st.lists(_KEYS, max_size=2),
        "items": inner | listed,
        "additionalProperties": inner,
        "minItems": st.integers(0, 2),
        "minProperties": st.integers(0, 2),
        "propertyNames": inner,
    }
    return st.fixed_dictionaries({}, optional=keywords)


_SCHEMAS = st.recursive(st.sampled_from([{}, True, False, {"type": "string"}, {"const": 1}]), _nested, max_leaves=8)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=_nested(_SCHEMAS), definitions=st.dictionaries(_KEYS, _SCHEMAS, max_size=3))
def test_any_schema_is_held_or_refused(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    began = time.process_time()
    with contextlib.suppress(Refusal):
        constraint = constraints({**schema, "$defs": definitions}, 1)[0]
        for _ in range(50):
            allowed = [token for token, may in enumerate(constraint.allowed()) if may]
            assert allowed
            if allowed == [2]:
                break
            constraint.accept(allowed[-1])
    assert time.process_time() - began < 10.0
