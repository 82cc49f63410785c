"""The languages in which programs talk to models: OpenAI's chat, completions, responses and embeddings, Anthropic's messages.

Pure functions of JSON values and bytes: no I/O, no knowledge of agents, engines or the gateway. Chat is the hub. Each other
dialect translates its requests and answers to chat and back, whole and as a stream; a field that
has no counterpart raises `Untranslatable`, which names it. Unknown fields survive.

- `base`: what a dialect is, and the table of them;
- `passage`: one call on its way between two dialects;
- `chat`: request token ids and log-probabilities, hide them from clients, assemble them
  from streams;
- `messages`, `responses`: the translations, in `request`, `answer` and `stream`;
- `checks`: refuse malformed requests before any model sees them;
- `encoding`, `errors`, `fields`: JSON and events as bytes, errors for each kind of client, reading fields.

To add a dialect, write its six translations and the table of its fields, and put a line into `base.DIALECTS`.
"""

from leyden.dialects.base import DIALECTS, Dialect, DialectName
from leyden.dialects.chat import Hidden, StreamAssembler, echoes, prepare, usage, visible
from leyden.dialects.checks import WrongType, check_types, parse_request
from leyden.dialects.encoding import DONE, Json, dump, named_event, parse, split_events, sse_event
from leyden.dialects.errors import anthropic_error, openai_error
from leyden.dialects.passage import Passage, PassageStream

__all__ = [
    "DIALECTS",
    "DONE",
    "Dialect",
    "DialectName",
    "Hidden",
    "Json",
    "Passage",
    "PassageStream",
    "StreamAssembler",
    "WrongType",
    "anthropic_error",
    "check_types",
    "dump",
    "echoes",
    "named_event",
    "openai_error",
    "parse",
    "parse_request",
    "prepare",
    "split_events",
    "sse_event",
    "usage",
    "visible",
]
