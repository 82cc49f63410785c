"""Constrain responses to a form: required tool calls, or JSON by a schema.

A grammar determines which tokens may come next; the decoder samples among those. llguidance, an optional package,
follows the grammar, which is written in its dialect of Lark.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from leyden._lib.extras import how_to_install
from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.engine.refusal import bad_request
from leyden.engine.schema import cannot_be_held, faulty_keyword, held_schema
from leyden.engine.tools import ToolParser
from leyden.engine.wire import ChatRequest

_REMEMBERED = 64
"""The number of compiled grammars that are cached, because agents use few schemas again and again."""
_OF_CONTENT = "response_format.json_schema.schema"
"""The path of the content's schema in a request."""
_SEARCH_SECONDS = 1.0
"""The seconds after which the search for a faulty keyword gives up, because it compiles every part of a schema."""
_ONE_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of JSON as chat templates write it. A weak policy that may choose its white space can write it
without end."""


class GrammarConstraint:
    """The state of a grammar within one response."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """Return one byte for each token of the vocabulary, 0 where the token may not come next.

        Raise Refusal if the grammar has become too large to follow.
        """
        mask: bytes = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            fault, *_ = str(self._matcher.get_error()).splitlines() or [""]  # its further lines are llguidance's state
            raise bad_request(
                f"the response's grammar cannot be followed: {fault}; simplify the JSON schema or the tools' parameters",
                code="bad_schema",
            )
        return mask

    def accept(self, token: int) -> None:
        """Advance past a token that was sampled."""
        self._matcher.consume_token(token)


class Grammars:
    """Compiles and caches grammars for one tokenizer. `constraints` may be called from several threads."""

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
        Raise Refusal if a schema cannot be enforced. The first call can take a second, and each new grammar some
        milliseconds.
        """
        schemas = _schemas(request)
        grammar = self._grammar(request, parser, schemas)
        with self._lock:
            try:
                matcher = self._compiled(grammar)
            except _Uncompilable as error:
                raise self._refusal(schemas, str(error)) from error
            return [GrammarConstraint(matcher.deep_copy()) for _ in range(request.n)]

    def _refusal(self, schemas: Mapping[str, Json], message: str) -> Refusal:
        """Return the refusal of a grammar that cannot be compiled, which names the keyword that is at fault."""

        until = time.monotonic() + _SEARCH_SECONDS

        def fails(schema: Json) -> bool:
            if time.monotonic() > until:
                raise TimeoutError
            return bool(self._matcher(f"start: {_rule(schema)}").is_error())

        found = re.search("failed to compile JSON schema: (.*)", message)
        for where, schema in schemas.items():
            why = found[1].rstrip(":") if found else ""
            try:
                if fails(schema):
                    return cannot_be_held(faulty_keyword(schema, where, fails), why)
            except TimeoutError:
                return cannot_be_held(where, why)
        return bad_request(f"the response's grammar cannot be compiled: {message}", code="bad_schema")

    def _grammar(self, request: ChatRequest, parser: ToolParser | None, schemas: Mapping[str, Json]) -> str:
        """Return the Lark grammar that a response must follow: a JSON object of the schema, tool calls, or either."""
        rules: dict[str, str] = {}
        starts: list[str] = []
        if request.json_schema is not None:
            rules["object"] = _rule(schemas[_OF_CONTENT])
            starts.append("object")
        if request.may_call:
            assert parser is not None, "the request was checked"
            rules |= self._calls(request, parser, schemas)
            starts.append("calls")
        rules = {"start": " | ".join(starts), **rules}
        return "\n".join(f"{name}: {rule}" for name, rule in rules.items())

    def _calls(self, request: ChatRequest, parser: ToolParser, schemas: Mapping[str, Json]) -> dict[str, str]:
        """Return the grammar rules for calls of the allowed tools, in the model's own form of tool calls. Raise Refusal
        if that form has no grammar.
        """
        arguments = {name: _rule(schemas[_of_tool(request, name)]) for name in request.callable_tools}
        rules = parser.grammar(arguments, self._literal, many=request.may_call_often)
        if rules is None:
            raise bad_request(
                f"tool calls in the form {parser.name!r} cannot be enforced here; "
                f"use tool_choice='auto' and no JSON response_format",
                param="tool_choice",
            )
        return rules

    def _literal(self, text: str) -> str:
        """Return a text as a literal of the grammar: as a token if the tokenizer has a special token for it, because
        the grammar's text does not match special tokens.
        """
        number = self._special.get(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    def _compile(self, grammar: str) -> Any:
        """Return llguidance's matcher of the grammar. Raise _Uncompilable if there is none."""
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise _Uncompilable(matcher.get_error())
        return matcher

    def _matcher(self, grammar: str) -> Any:
        """Return llguidance's matcher of a grammar, which may have an error."""
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
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)


class _Uncompilable(ValueError):
    """Raised for a grammar that llguidance cannot compile. The message is llguidance's."""


def _schemas(request: ChatRequest) -> dict[str, Json]:
    """Return the schemas of a request's grammar, as it can hold them, by their path in the request. Raise Refusal for
    one that cannot be held.
    """
    found: dict[str, Json] = {}
    if request.json_schema is not None:
        found[_OF_CONTENT] = held_schema(request.json_schema, _OF_CONTENT)
    for name in request.callable_tools if request.may_call else ():
        where, schema = _of_tool(request, name), request.schemas[name]
        types: Any = schema.get("type") or "object"
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise cannot_be_held(f"{where}: type", "the arguments of a call are an object")
        found[where] = held_schema({**schema, "type": "object"}, where)
    return found


def _of_tool(request: ChatRequest, name: str) -> str:
    index = next(index for index, tool in enumerate(request.tools) if tool["function"]["name"] == name)
    return f"tools[{index}].function.parameters"


def _rule(schema: Json) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_FORM})}"
