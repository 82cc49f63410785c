"""Functions that the Responses API groups in a namespace, as functions of chat, which has no groups, and back.

A function of a namespace becomes `NAMESPACE__NAME`. A name that is longer than chat allows, has other characters, or
belongs to another function, too, gets a digest of namespace and name at its end. The names depend on the request's
tools alone, so every turn of a conversation has the same ones.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

from leyden._lib.json import Json, is_list, is_object

_MAX_CHARACTERS = 64
"""The most characters of a function's name in OpenAI's chat."""
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_DIGEST_CHARACTERS = 8


class ToolNames:
    """The names of one request's functions in chat, and in the Responses API."""

    def __init__(self, tools: Any) -> None:
        """tools: the field `tools` of a request. What is no tool is skipped; the translation refuses it."""
        given = [tool for tool in _list(tools) if is_object(tool)]
        groups = [tool for tool in given if tool.get("type") == "namespace"]
        pairs = {
            (str(group.get("name")), str(tool.get("name")))
            for group in groups
            for tool in _list(group.get("tools"))
            if is_object(tool)
        }
        self._pairs = pairs
        self._plain = [str(tool.get("name")) for tool in given if tool.get("type") != "namespace"]
        self._plain += [f"{namespace}__{name}" for namespace, name in pairs]
        self._of_chat = {self.in_chat(name, namespace): (namespace, name) for namespace, name in pairs}

    def in_chat(self, name: Any, namespace: Any) -> Any:
        """Return the name of a function in chat. Without a namespace it is its own.

        name, namespace: of a tool or of a call, which may be to a tool of an earlier turn.
        """
        if namespace is None:
            return name
        plain = f"{namespace}__{name}"
        n_same = self._plain.count(plain) - ((namespace, name) in self._pairs)
        if len(plain) <= _MAX_CHARACTERS and not _UNFIT.search(plain) and n_same == 0:
            return plain
        digest = sha256(json.dumps([namespace, name]).encode()).hexdigest()[:_DIGEST_CHARACTERS]
        return f"{_UNFIT.sub('_', plain)[: _MAX_CHARACTERS - _DIGEST_CHARACTERS - 1]}_{digest}"

    def named(self, name: Any) -> Json:
        """Return the fields of a call in the Responses API, given its name in chat: `name`, and perhaps `namespace`."""
        if name not in self._of_chat:
            return {"name": name}
        namespace, name = self._of_chat[name]
        return {"name": name, "namespace": namespace}


def _list(value: Any) -> list[Any]:
    return value if is_list(value) else []
