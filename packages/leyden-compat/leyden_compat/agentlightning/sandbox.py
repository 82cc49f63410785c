# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Render Jinja templates that an optimiser or a model may have written.

Jinja's sandbox keeps a template from what is behind the values: no private attributes, no methods that change a value.
What it lacks is a limit on size; here no number above MOST_CHARACTERS may multiply, pad or repeat a text.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from leyden.errors import ConfigError
from leyden_compat.agentlightning.resources import MOST_CHARACTERS

_jinja: Any = importlib.import_module("jinja2.sandbox")  # the program's own dependency, as it is there
_SecurityError: Any = _jinja.SecurityError
_TemplateError: Any = importlib.import_module("jinja2.exceptions").TemplateError

_SIZED = ("batch", "center", "format", "indent", "slice", "string", "truncate", "wordwrap")
"""The filters that take a size."""


class _Environment(_jinja.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit on the numbers that make texts longer."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        super().__init__()
        for name in _SIZED:
            self.filters[name] = _limited(self.filters[name])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return a product, a power or a formatted text. Raise SecurityError for a large one."""
        if operator == "**" or not (_is_number(left) and _is_number(right)):
            _check_sizes((left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Return Jinja's safe `format` of a text. Raise SecurityError for a text with a large width."""
        _check_sizes((getattr(value, "__self__", None),))
        return super().wrap_str_format(value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method. Raise SecurityError for a large number."""
        _check_sizes((*args, *kwargs.values(), getattr(function, "__self__", None)))
        return super().call(context, function, *args, **kwargs)


def _limited(function: Any) -> Any:
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_sizes((*args, *kwargs.values()))
        return function(*args, **kwargs)

    for name, value in vars(function).items():  # Jinja marks filters that take the environment
        setattr(limited, name, value)
    return limited


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _check_sizes(values: tuple[Any, ...]) -> None:
    """Raise SecurityError for a number above the limit, and for a format with one."""
    for value in values:
        too_large = isinstance(value, int) and abs(value) > MOST_CHARACTERS
        if isinstance(value, str) and ("%" in value or "{" in value):
            numbers = re.findall(r"[%:.][^%{}]{0,3}?(\d+)", value)
            too_large = any(len(number) > 9 or int(number) > MOST_CHARACTERS for number in numbers)
        if too_large:
            raise _SecurityError(f"a template may not use {value!r:.50} as a size; the largest is {MOST_CHARACTERS}")


_ENVIRONMENT = _Environment()


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with the values. Raise ConfigError for one that is refused or faulty."""
    try:
        return _ENVIRONMENT.from_string(template).render(**values)
    except _TemplateError as error:
        raise ConfigError(f"the template {template[:60]!r} cannot be rendered: {error}") from error
