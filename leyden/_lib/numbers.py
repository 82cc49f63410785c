"""Read one number from a value of any library: rewards, feedback, metrics, parts of tasks.

A number is a Python number, or a value of another library that holds exactly one: `np.float32(1)`, `np.bool_(True)`,
`torch.tensor(0.5)`, `np.array([2.0])`, `Decimal("0.1")`. A text, a date and a complex number are none. The module
imports no numeric library; it asks values what they hold.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

from leyden._lib.text import describe_error, shown


def as_number(value: object) -> int | float:
    """Return the number that a value is, as an int, a float or a bool, which counts as 1 or 0.

    NaN and infinity are numbers here; `finite_number` refuses them.
    Raise ValueError for any other value and for one that no float can hold. The message continues a sentence about the
    value: "is 'high' (a str), which is no number".
    """
    if type(value) is float or (type(value) is int and -(2**63) <= value < 2**63):  # nearly always
        return value
    if isinstance(value, int):
        return value if value is True or value is False else _checked(int(value))
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | bytes | bytearray | complex) or value is None:
        raise ValueError(f"is {shown(value)}, which is no number")
    given = cast(Any, value)
    kind: type = type(value)
    if getattr(getattr(given, "dtype", None), "kind", "f") in "mMcSUVT":  # dates, complex numbers, texts, records
        raise ValueError(f"is {shown(value)}, which is no number")
    if hasattr(kind, "fill_value") and hasattr(kind, "mask") and bool(given.mask.any()):
        raise ValueError("is masked, so it holds no number")
    if callable(getattr(given, "item", None)):
        if getattr(given, "shape", None) != () and (count := _count(given)) not in (None, 1):
            raise ValueError(f"has {count} elements, not one number (take their mean, for example)")
        held = _converted(given, given.item)
        if not callable(getattr(held, "item", None)):  # NumPy's longdouble returns itself
            return as_number(held)
    if hasattr(kind, "__index__"):
        return _checked(_converted(given, lambda: operator.index(given)))
    if hasattr(kind, "__float__"):
        number = _converted(given, lambda: float(given))
        if math.isinf(number) and given not in (math.inf, -math.inf):
            raise ValueError(f"is {shown(value)}, more than a float can hold")
        return number
    raise ValueError(f"is {shown(value)}, which is no number")


def finite_number(value: object) -> float:
    """Return the number that a value is, as a float. Raise ValueError as `as_number` does, and for NaN and infinity."""
    number = value if type(value) is float else float(as_number(value))
    if not math.isfinite(number):
        raise ValueError(f"is {number}, which is no finite number")
    return number


def exact_number(value: object) -> int | float:
    """Return the finite number that a value is, if a float holds all of its digits or parts. Raise ValueError as
    `finite_number` does, and for a Decimal or a Fraction that would be rounded. A whole number may have any length.
    """
    if isinstance(value, int):
        return value if value is True or value is False else int(value)
    number = as_number(value)
    finite_number(number)
    if (isinstance(value, Decimal) and Decimal(repr(number)) != value) or (
        isinstance(value, Fraction) and Fraction(number) != value
    ):
        raise ValueError(f"is {shown(value)}, which a float would round")
    return number


def _checked(number: int) -> int:
    if abs(number) > sys.float_info.max:
        raise ValueError(f"is a whole number of {number.bit_length():,} bits, more than a float can hold")
    return number


def _converted(value: object, convert: Callable[[], Any]) -> Any:
    try:
        return convert()
    except OverflowError:
        raise ValueError(f"is {shown(value)}, more than a float can hold") from None
    except Exception as error:
        raise ValueError(f"is {shown(value)}, which is no number: {describe_error(error)}") from error


def _count(array: Any) -> int | None:
    try:
        return math.prod(int(size) for size in array.shape)
    except Exception:  # noqa: BLE001 -- no shape, or one of another meaning
        return None


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of at least one number, also where their sum is beyond the range of floats.

    The mean is NaN if a value is, or if infinite values have both signs.
    """
    found = list(values)
    try:
        return math.fsum(found) / len(found)
    except OverflowError:  # halved often enough for as many values as a list can hold
        return math.ldexp(math.fsum(math.ldexp(value, -64) for value in found) / len(found), 64)
    except ValueError:
        return math.nan
