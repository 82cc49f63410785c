"""OpenAI's Responses API: the dialect, and its requests, answers and streams to chat and back.

The translations need a whole request. The gateway keeps the earlier items of a conversation, and first puts them in
place of `previous_response_id`.
"""

from leyden.dialects.responses.responses_dialect import RESPONSES

__all__ = ["RESPONSES"]
