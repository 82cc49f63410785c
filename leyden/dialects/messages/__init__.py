"""Anthropic's messages API: requests, answers and streams, to chat and back."""

from leyden.dialects.messages.answer import answer_from_chat, answer_to_chat
from leyden.dialects.messages.request import DEFAULT_MAX_TOKENS, request_from_chat, request_to_chat
from leyden.dialects.messages.stream import EventsFromChat, EventsToChat

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "EventsFromChat",
    "EventsToChat",
    "answer_from_chat",
    "answer_to_chat",
    "request_from_chat",
    "request_to_chat",
]
