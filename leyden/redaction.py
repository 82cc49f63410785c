"""Keep passwords and keys out of text that people, logs and stores get to see.

`redact` is the one rule. Leyden's errors apply it to their messages, `utils.text.storable` to the
text of foreign exceptions, and the command line to what it logs. It knows the forms in which
addresses carry credentials and the form of the gateway's keys, and no credential itself. To cover
another form, add a pattern here.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_SECRET_WORDS = ("password", "secret", "token", "key")

_LOGIN = re.compile(r"(://[^\s:/?#@]*):(?:[^\s/]*|(?!\d+/|[^\s/]*\])(?:(?!://)[^\s'\"])*)@")
"""`scheme://user:password@host`, in which the password may hold a colon, a slash or an at sign. A
port and a path are no password."""
_QUERY = re.compile(
    r"([?&](?:[a-z_-]*(?:password|passwd|token|secret|signature)|pwd|sig|apikey|(?:[a-z_-]*[_-])?key)=)[^\s&#'\"]+",
    re.I,
)
"""A parameter of a URL whose name says that its value is secret."""
_CONNECTION = re.compile(r"\b((?:ssl)?password\s*=\s*)(?!\.\.\.)(?:'(?:[^'\\]|\\.)*'|[^\s'\"&;,)]+)", re.I)
"""`password=...` in a connection string of libpq."""

_ATTEMPT_KEY = re.compile(r"(\bsk-leyden-\S+?\.)[0-9a-f]{40}\b")
"""An attempt's API key (`leyden.utils.attempt_key`). Its ids are kept, its signature is hidden."""

_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)(?!sk-leyden-)[^\s'\",;)]+", re.I)
"""The value of an HTTP header, as programs print it."""
_MEMBER = re.compile(
    r"(['\"](?:[a-z_-]*(?:password|secret|token)|[a-z_-]*api[_-]?key)['\"]\s*:\s*(['\"]))(?!\2).*?\2", re.I
)
"""A string value in JSON or in a Python dict whose key says that it is secret."""


def redact(text: str) -> str:
    """Return `text` with `***` in the place of each secret.

    Secrets are passwords and keys in an address, a connection string, an HTTP header, JSON or a
    dict, and the signature of an attempt's key.
    """
    if "sk-leyden-" in text:
        text = _ATTEMPT_KEY.sub(rf"\1{HIDDEN}", text)
    if "://" in text:
        text = _LOGIN.sub(rf"\1:{HIDDEN}@", text)
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
    folded = text.lower()
    if "password" in folded:
        text = _CONNECTION.sub(rf"\1{HIDDEN}", text)
    if "authorization" in folded:
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
    if any(word in folded for word in _SECRET_WORDS):
        text = _MEMBER.sub(rf"\1{HIDDEN}\2", text)
    return text
