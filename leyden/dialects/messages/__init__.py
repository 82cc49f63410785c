"""Anthropic's messages API: the dialect, and its requests, answers and streams to chat and back."""

from leyden.dialects.messages.messages_dialect import MESSAGES, anthropic_error
from leyden.dialects.messages.request import DEFAULT_MAX_TOKENS

__all__ = ["DEFAULT_MAX_TOKENS", "MESSAGES", "anthropic_error"]
