"""What LiteLLM's proxy records with in the gateway benchmark: one line of JSON for each call, appended to a file.

This is the least that a recording can be: prompt, answer and usage, no tokens, and one write that survives the process but not the
machine. The proxy finds `recorder` through its configuration (`callbacks: gateway_litellm.recorder`); RECORD_TO names the file.
"""

from __future__ import annotations

import os

import orjson
from litellm.integrations.custom_logger import CustomLogger


class FileRecorder(CustomLogger):
    """Appends each call."""

    def __init__(self):
        super().__init__()
        self._file = os.open(os.environ["RECORD_TO"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        """Called once for each call, a stream's after its end."""
        line = {
            "id": response_obj.id,
            "messages": kwargs["messages"],
            "content": response_obj.choices[0].message.content,
            "tokens": response_obj.usage.total_tokens,
            "start": start_time.timestamp(),
            "end": end_time.timestamp(),
        }
        os.write(self._file, orjson.dumps(line) + b"\n")


recorder = FileRecorder()
