"""OpenAI's Responses API: requests, answers and streams, to chat and back.

`previous_response_id` is for whoever keeps the earlier items: these functions see one whole request.
"""

from leyden.dialects.responses.answer import answer_from_chat, answer_to_chat
from leyden.dialects.responses.request import input_items, request_from_chat, request_to_chat
from leyden.dialects.responses.stream import EventsFromChat, EventsToChat

__all__ = [
    "EventsFromChat",
    "EventsToChat",
    "answer_from_chat",
    "answer_to_chat",
    "input_items",
    "request_from_chat",
    "request_to_chat",
]
