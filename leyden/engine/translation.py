"""Serve the APIs that are translated to chat: Anthropic's messages and OpenAI's responses.

The translation is that of `leyden.dialects`, which the gateway uses, too. The module knows requests and the messages of
ASGI; no model and no queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from leyden._lib.host.http import Message, Send, send_reply
from leyden.dialects import CHAT, DIALECTS, Dialect, Translation, WrongType, check_types, parse_request, split_events
from leyden.engine.refusal import bad_request
from leyden.errors import Untranslatable

TRANSLATED: Final[Mapping[str, Dialect]] = {
    f"/v1/{dialect.path}": dialect for dialect in DIALECTS.values() if dialect.translates and dialect is not CHAT
}
"""Dialects by path."""
COUNTED: Final[Mapping[str, Dialect]] = {
    f"/v1/{dialect.count_path}": dialect for dialect in TRANSLATED.values() if dialect.count_path
}
"""Dialects by the path that counts the tokens of a prompt."""


def read_translation(body: bytes, dialect: Dialect) -> Translation:
    """Return the translation of a request to chat and of its response back. Raise Refusal, which names the field, for a
    request that chat cannot express.
    """
    try:
        request = parse_request(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not JSON: {error}") from error
    if not isinstance(model := request.get("model"), str):
        raise bad_request("'model' must be a string", param="model")
    try:
        check_types(request, dialect.field_types)
        return Translation(dialect, CHAT, body, request, model=model, record_tokens=False)
    except (WrongType, Untranslatable) as error:
        raise bad_request(str(error), param=error.field) from error


class TranslatedSend:
    """Sends the response to a chat request in the dialect of the client."""

    def __init__(self, translation: Translation, send: Send) -> None:
        self._translation = translation
        self._send = send
        self._stream = translation.stream() if translation.streams else None
        self._buffer = bytearray()

    async def __call__(self, message: Message) -> None:
        """Send one message of the response. Raise Refusal for a whole response that the dialect cannot express."""
        more = message.get("more_body", False)
        self._buffer += message.get("body", b"")
        if self._stream is not None:
            if message["type"] == "http.response.body":
                parts = [self._stream.feed(event, data) for event, data in split_events(self._buffer)]
                body = b"".join(parts if more else [*parts, self._stream.close(bytes(self._buffer))])
                message = {"type": "http.response.body", "body": body, "more_body": more}
            await self._send(message)
        elif message["type"] == "http.response.body" and not more:
            try:
                _, body, _ = self._translation.answer(bytes(self._buffer))
            except Untranslatable as error:
                raise bad_request(
                    f"the response cannot be expressed in this API: {error}", param=error.field
                ) from error
            await send_reply(self._send, body)
