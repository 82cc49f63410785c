"""Constrain responses to a form: required tool calls, or JSON by a schema.

A grammar determines which tokens may come next; the decoder samples among those. llguidance, an
optional package, follows the grammar, which is written in its dialect of Lark.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping
from typing import Any, cast

from leyden.engine.refusal import bad_request
from leyden.engine.tools import ToolParser
from leyden.engine.wire import ChatRequest
from leyden.errors import EngineError
from leyden.extras import how_to_install

Json = dict[str, Any]

_REMEMBERED = 64
"""The number of compiled grammars that are cached, because agents use few schemas again and
again."""
_ONE_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of JSON as chat templates write it. A weak policy that may choose its white space
can write it without end."""
_VALUES = ("const", "default", "enum", "examples")
"""Keywords of a JSON schema that hold values, and no schemas."""


class GrammarConstraint:
    """The state of a grammar within one response."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Return one byte for each token of the vocabulary, 0 where the token may not come next.

        Raise EngineError if the grammar has become too large to follow.
        """
        mask: bytes = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise EngineError(
                f"the response's grammar cannot be followed: {self._matcher.get_error()}; simplify the JSON schema or the tools' "
                "parameters"
            )
        return mask

    def accept(self, token: int) -> None:
        """Advance past a token that was sampled."""
        self._matcher.consume_token(token)


class Grammars:
    """Compiles and caches grammars for one tokenizer. `constraints` may be called from several
    threads.
    """

    def __init__(self, tokenizer: Any, *, n_vocabulary: int, eos_ids: frozenset[int]) -> None:
        # A tokenizer may have tokens that the model has no weights for; those are never sampled.
        self._source = (tokenizer, max(n_vocabulary, len(tokenizer)), sorted(eos_ids))
        self._tokenizer: Any = None
        self._lock = threading.Lock()
        self._compiled = functools.lru_cache(_REMEMBERED)(self._compile)
        self._special: Mapping[str, int] = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items()
        }

    def constraints(self, request: ChatRequest, parser: ToolParser | None) -> list[GrammarConstraint]:
        """Return a constraint for each choice of a request that is `constrained`.

        parser: the form of the model's tool calls; None if it has none.
        Raise Refusal if a schema cannot be enforced. The first call can take a second, and each new
        grammar some milliseconds.
        """
        grammar = self._grammar(request, parser)
        with self._lock:
            matcher = self._compiled(grammar)
            return [GrammarConstraint(matcher.deep_copy()) for _ in range(request.n)]

    def _grammar(self, request: ChatRequest, parser: ToolParser | None) -> str:
        """Return the text of the Lark grammar that a response must follow: a JSON object of the
        schema, tool calls, or either.
        """
        rules: dict[str, str] = {}
        starts: list[str] = []
        if request.json_schema is not None:
            rules["object"] = _rule(request.json_schema)
            starts.append("object")
        if request.may_call:
            assert parser is not None, "the request was checked"
            rules |= self._calls(request, parser)
            starts.append("calls")
        rules = {"start": " | ".join(starts), **rules}
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())

    def _calls(self, request: ChatRequest, parser: ToolParser) -> dict[str, str]:
        """Return the grammar rules for calls of the allowed tools, in the model's own form of tool
        calls. Raise Refusal if that form has no grammar.
        """
        schemas = {name: request.schemas[name] for name in request.callable_tools}
        many = request.parallel_tool_calls and len(request.callable_tools) == len(request.tools)
        arguments = {name: _rule({"type": "object", **schema}) for name, schema in schemas.items()}
        rules = parser.grammar(arguments, self._literal, many=many)
        if rules is None:
            raise bad_request(
                f"tool calls in the form {parser.name!r} cannot be enforced here; "
                f"use tool_choice='auto' and no JSON response_format",
                param="tool_choice",
            )
        return rules

    def _literal(self, text: str) -> str:
        """Return a text as a literal of the grammar: as a token if the tokenizer has a special
        token for it, because the grammar's text does not match special tokens.
        """
        number = self._special.get(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    def _compile(self, grammar: str) -> Any:
        """Return llguidance's matcher of the grammar. Raise Refusal if llguidance is missing or
        cannot use the tokenizer or the schema.
        """
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise bad_request(
                f"a required tool call or a JSON response needs llguidance, which is missing where the engine runs; "
                f"{how_to_install('grammar')}",
                code="no_grammar",
            ) from error
        if self._tokenizer is None:
            tokenizer, n_vocabulary, eos_ids = self._source
            try:
                self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=n_vocabulary, eos_token=eos_ids)
            except ValueError as error:
                raise bad_request(
                    f"this model's tokenizer cannot be constrained by a grammar: {error}; use tool_choice='auto' and no "
                    "JSON response_format",
                    code="no_grammar",
                ) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise bad_request(f"the schema cannot be followed: {matcher.get_error()}", code="bad_schema")
        return matcher


def _rule(schema: Json) -> str:
    """Return the grammar's rule for a JSON value that follows the schema."""
    return f"%json {json.dumps({**_closed(schema), 'x-guidance': _ONE_FORM})}"


def _closed(schema: Any) -> Any:
    """Return the schema with `additionalProperties` false for each object that names its properties
    and does not mention others.

    JSON Schema allows other properties by default. A weak policy would invent them without end.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, dict) or "allOf" in schema:  # one part of `allOf` cannot know the others' properties
        return cast(Any, schema)
    given = cast(Json, schema)
    closed = {name: value if name in _VALUES else _closed(value) for name, value in given.items()}
    properties = given.get("properties")
    if isinstance(properties, dict) and set(given.get("required") or ()) <= set(cast(Json, properties)):
        closed.setdefault("additionalProperties", False)
    return closed
