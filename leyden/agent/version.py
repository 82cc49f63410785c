"""Identify an agent's code by a version, so that results of other code are not taken for its own.

The version covers the code and values that `agent_version` lists. It does not cover imported modules, the model behind
the agent, files that it reads, or values that default arguments and class bodies compute.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import re
import symtable
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

from pydantic import BaseModel

from leyden.agent.decorator import FunctionalLitAgent
from leyden.agent.lit_agent import LitAgent

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_BY_SOURCE = (type, typing.TypeVar, ModuleType, logging.Logger)
"""Types of values that the source describes completely, so that their value is left out."""


def agent_version(agent: LitAgent[Any]) -> str | None:
    """Return the agent's module, qualified name and a digest of its code; None if these do not determine what the agent
    does.

    The digest covers the function or class, and every function, class and import at the top of its module that it uses,
    directly or not. It covers the values of the module's variables that they use, at the time of the call. Comments and
    formatting do not count.

    None for a function that keeps variables of an enclosing function, an instance with own attributes, a callable
    object, code that uses a variable of its module whose value is no JSON, pydantic model, regular expression, type or
    logger, and code whose source cannot be read (a notebook's, for example).
    """
    code = agent.function if isinstance(agent, FunctionalLitAgent) else type(agent)
    if inspect.isfunction(code):
        is_known = code.__closure__ is None
    else:
        is_known = inspect.isclass(code) and not agent.__getstate__()
    if not is_known:
        return None
    try:
        content = "\n".join(_used(code))
    except (OSError, TypeError, ValueError, SyntaxError, KeyError, RecursionError):
        return None  # the source is missing or is no whole statement, or a value has no text
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{code.__module__}.{code.__qualname__}@{digest[:16]}"


def _used(code: Any) -> list[str]:
    """Return what determines a function or class, as sorted texts. Raise TypeError for a variable that has no text."""
    module = sys.modules[code.__module__]
    own = _definition(code)
    statements = _statements(inspect.getsource(module))
    found: dict[str, None] = {ast.dump(own): None}
    waiting: list[ast.AST] = [own]
    while waiting:
        # The module-level names that the code refers to, in nested functions and classes too. `symtable` reads source
        # only, so the tree is written out again.
        top = symtable.symtable(ast.unparse(waiting.pop()), "module", "exec")
        names, tables = {each.get_name() for each in top.get_symbols()}, list(top.get_children())
        while tables:
            table = tables.pop()
            names |= {each.get_name() for each in table.get_symbols() if each.is_global()}
            tables += table.get_children()
        for name in names:
            binding = statements.get(name, ())
            if not all(isinstance(each, _DEFINITIONS) for each in binding) and name in vars(module):
                value = vars(module)[name]
                is_source = isinstance(value, _BY_SOURCE) or typing.get_origin(value) is not None
                text = "by its source" if is_source else json.dumps(value, default=_plain)
                found[f"{name} = {text}"] = None
            for each in binding:
                if (text := ast.dump(each)) not in found:
                    found[text] = None
                    waiting.append(each)
    return sorted(found)


@lru_cache(maxsize=16)
def _definition(code: Any) -> ast.Module:
    # cached, because a run asks twice: for its runners and for its algorithm
    return ast.parse(textwrap.dedent(inspect.getsource(code)))


@lru_cache(maxsize=16)
def _statements(source: str) -> Mapping[str, Sequence[ast.stmt]]:
    statements: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(source).body:
        head = statement
        if isinstance(head, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            head = copy(head)
            head.body = [ast.Pass()]  # a body binds no name of the module, and takes long to unparse
        for each in symtable.symtable(ast.unparse(head), "module", "exec").get_symbols():
            if each.is_assigned() or each.is_imported():
                statements.setdefault(each.get_name(), []).append(statement)
    return statements


def _plain(value: Any) -> Any:
    """Return a JSON substitute for a pydantic model or a pattern. Raise TypeError for another value."""
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, value.model_dump(mode="json")]
    if isinstance(value, re.Pattern):
        pattern = cast("re.Pattern[Any]", value)
        return repr((pattern.pattern, pattern.flags))
    raise TypeError(f"{type(value).__name__} has no text that equal values share")
