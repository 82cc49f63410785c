"""Conditions on recorded rollouts, such as `reward >= 0.5 and task.city in ["Oslo", "Rome"]`.

The language is a part of Python's expressions: names, `task.field` and `task["a field"]`, numbers, texts, lists,
comparisons, `in`, `and`, `or`, `not`. Nothing is called or computed. A value that a rollout lacks makes a comparison
unknown, as NULL does in SQL, so that neither a condition nor its opposite holds; `== None` asks for it. Numbers, texts
and booleans are different kinds: `1 == True` does not hold, and `"a" < 1` is an error.

The module knows values and no store. To add an operator, add it to `_ORDERS` or to `_compare`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from leyden._lib.json import is_list, is_object
from leyden.errors import ConfigError

_MAX_CHARACTERS = 5000
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's names of values."""
_ORDERS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_EQUALS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
_READ = (
    *(ast.expr_context, ast.boolop, ast.cmpop, ast.Not, ast.USub, ast.Constant, ast.Name, ast.List, ast.Tuple),
    *(ast.UnaryOp, ast.Attribute, ast.Subscript, ast.BoolOp, ast.Compare),
)
"""The parts of a tree that conditions have."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that the rollout lacks."""

    name: str


class Where:
    """A condition on the columns of a rollout.

    text: the expression.
    columns: the names that it may use.
    Raise ConfigError for an expression that is not of the language, or that uses another name.
    """

    def __init__(self, text: str, columns: tuple[str, ...]) -> None:
        self.text = text
        try:
            if len(text) > _MAX_CHARACTERS:
                raise ValueError(f"it is longer than {_MAX_CHARACTERS:,} characters")
            self._tree = ast.parse(text.strip(), mode="eval").body
            used = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(
                f"the condition {text!r:.200} cannot be read: {getattr(error, 'msg', None) or error}; write it like "
                "reward >= 0.5 and task.city == 'Oslo'"
            ) from None
        self.names = {node.id for node in used} - _WORDS.keys()
        if unknown := sorted(self.names - set(columns)):
            raise ConfigError(f"the condition {text!r:.200} names {unknown[0]!r}; there are: {', '.join(columns)}")
        self._check(self._tree)

    def _check(self, tree: ast.expr) -> None:
        """Raise ConfigError for anything that `_value` does not read."""
        for node in ast.walk(tree):
            read = isinstance(node, _READ)
            if isinstance(node, ast.Constant):
                read = isinstance(node.value, str | int | float | None)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                read = isinstance(node.operand, ast.Constant) and type(node.operand.value) in (int, float)
            if not read:
                shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
                raise ConfigError(
                    f"the condition {self.text!r:.200} has {shown!r:.80}; use comparisons of columns with values, in, and, "
                    "or, not"
                )

    def decide(self, columns: Mapping[str, Any]) -> bool | Missing:
        """Return whether the condition holds; what is missing if that makes it unknown.

        columns: a value for each name; None for a value that the rollout lacks.
        Raise ConfigError if values of different kinds are put in order, or a part is no condition.
        """
        try:
            return self._truth(self._tree, columns)
        except RecursionError:
            raise ConfigError("it is nested too deep; write it with fewer parts") from None

    def _truth(self, node: ast.expr, columns: Mapping[str, Any]) -> bool | Missing:
        found = self._value(node, columns)
        if not isinstance(found, bool | Missing):
            raise ConfigError(f"{ast.unparse(node)!r:.80} is {found!r:.80} and no condition; compare it with a value")
        return found

    def _value(self, node: ast.expr, columns: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in _WORDS:
                return _WORDS[name]
            case ast.Name(id=name):
                return Missing(name) if columns[name] is None else columns[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                found = [self._value(item, columns) for item in items]
                return next((each for each in found if isinstance(each, Missing)), found)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
                return -cast(float, value)
            case ast.UnaryOp(operand=operand):
                found = self._truth(operand, columns)
                return found if isinstance(found, Missing) else not found
            case ast.Attribute(value=of, attr=key):
                return _part(self._value(of, columns), key, node)
            case ast.Subscript(value=of, slice=key):
                return _part(self._value(of, columns), self._value(key, columns), node)
            case ast.BoolOp(op=op, values=parts):
                found = [self._truth(part, columns) for part in parts]
                decides = isinstance(op, ast.Or)  # one True decides an `or`, one False an `and`
                if any(each is decides for each in found):
                    return decides
                return next((each for each in found if isinstance(each, Missing)), not decides)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self._value(each, columns) for each in (left, *others)]
                held = [_compare(op, *pair) for op, *pair in zip(ops, values, values[1:], strict=False)]
                if False in held:
                    return False
                return next((each for each in held if isinstance(each, Missing)), True)
            case _:
                raise AssertionError(ast.dump(node))  # `_check` has refused it


def _part(of: Any, key: Any, node: ast.expr) -> Any:
    """Return the part of an object or a list; Missing if it has none or null there."""
    if isinstance(of, Missing):
        return of
    found = None
    if is_object(of):
        found = of.get(key) if isinstance(key, str) else None
    elif is_list(of) and type(key) is int and -len(of) <= key < len(of):
        found = of[key]
    return Missing(ast.unparse(node)) if found is None else found


def _compare(op: ast.cmpop, left: Any, right: Any) -> bool | Missing:
    if isinstance(op, _EQUALS) and (left is None or right is None):
        other = right if left is None else left
        return (other is None or isinstance(other, Missing)) == isinstance(op, (ast.Eq, ast.Is))
    lacks = next((each for each in (left, right) if isinstance(each, Missing)), None)
    if lacks is not None:
        return lacks
    if isinstance(op, _EQUALS):
        return _equal(left, right) == isinstance(op, (ast.Eq, ast.Is))
    if isinstance(op, ast.In | ast.NotIn):
        if isinstance(left, str) and isinstance(right, str | dict):
            found = left in right
        elif is_list(right):
            found = any(_equal(left, each) for each in right)
        else:
            raise ConfigError(f"{left!r:.80} cannot be in {right!r:.80}; give a list, or two texts")
        return found == isinstance(op, ast.In)
    kinds = {_kind(left), _kind(right)}
    if len(kinds) > 1 or not kinds <= {float, str}:
        raise ConfigError(
            f"{left!r:.80} and {right!r:.80} have no order; compare numbers with numbers, texts with texts"
        )
    return _ORDERS[type(op)](left, right)  # pyright: ignore[reportArgumentType] -- `_check` let no other operator pass


def _kind(value: object) -> type[object]:
    return float if type(value) is int else type(value)


def _equal(left: Any, right: Any) -> bool:
    """Return whether two values of JSON are equal, which values of different kinds never are."""
    if is_list(left) and is_list(right):
        return len(left) == len(right) and all(map(_equal, left, right))
    if is_object(left) and is_object(right):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return _kind(left) is _kind(right) and left == right
