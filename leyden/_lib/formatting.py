"""Numbers, durations and texts as a person reads them in one line of a terminal.

Every line that Leyden prints about a run shows its numbers by `figure`.
"""

from __future__ import annotations

import math
import re
from typing import IO

_OBEYED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")
"""Characters that a terminal would obey: control characters other than tabs and line breaks, marks that reverse the
direction of text, lone surrogates."""


def figure(value: float | str, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, without trailing zeros.

    Whole numbers keep all of their digits, with thousands separators. Numbers below 0.001 are in scientific notation,
    so that a learning rate of 0.0001 reads `1e-04` instead of `0.0001` and one of 0.00001 never reads `0.0000`. A text
    is returned in one line.
    """
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, int):
        return f"{value:,d}"
    if not math.isfinite(value):
        return f"{value:g}"
    if not value:  # also -0.0
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if exponent < -3 or exponent >= 12:  # beyond these, zeros and separators are hard to count
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{_without_zeros(mantissa)}e{power}"
    return _without_zeros(f"{value:,.{max(0, digits - 1 - exponent)}f}")


def duration(seconds: float) -> str:
    """Return a duration in the form `0:59`, `1:01` or `1:02:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def size(n_bytes: float) -> str:
    """Return a number of bytes in the form `950 B`, `1.2 MB` or `15 GB`, in powers of 1,000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while n_bytes >= 999.5 and len(units) > 1:
        n_bytes /= 1000
        del units[0]
    return f"{figure(float(n_bytes), 2 if n_bytes < 99.5 else 3)} {units[0]}"


def one_line(text: str) -> str:
    """Return the text without line breaks and control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def harmless(text: str) -> str:
    """Return the text without characters that a terminal obeys, each replaced by `�`.

    Line breaks and tabs stay. The texts of models, agents and tasks may hold escape sequences, which retitle a
    terminal, write to its clipboard, or hide what stands there.
    """
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def is_on_terminal(stream: IO[str] | None) -> bool:
    """Return whether a stream is a terminal; False for a stream that is missing or closed."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def printable_on(stream: IO[str], text: str) -> str:
    """Return the text as a stream can show it: `harmless` on a terminal, with `?` for what its encoding lacks."""
    if is_on_terminal(stream):
        text = harmless(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        text = text.encode(encoding, "replace").decode(encoding)
    return text


def shortened(text: str, width: int) -> str:
    """Return the text in at most `width` characters; the end of a longer one is replaced by `…`."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def _without_zeros(number: str) -> str:
    return number.rstrip("0").rstrip(".") if "." in number else number
