"""The languages in which programs talk to models: OpenAI's chat, completions, responses and
embeddings, Anthropic's messages.

Pure functions of JSON values and bytes: no I/O, no knowledge of agents, engines or the gateway.
Chat is the hub. Each other dialect translates its requests and answers to chat and back, whole and
as a stream; a field that has no counterpart raises `Untranslatable`, which names it. Unknown fields
survive.

- `dialect`: the class `Dialect`, and the protocols of its parts;
- `base`: the table of all dialects;
- `openai`: chat, completions and embeddings;
- `passage`: one call on its way between two dialects;
- `chat`: request token ids and log-probabilities, hide them from clients, assemble them from
  streams;
- `messages`, `responses`: a package each, with its dialect and its translations;
- `checks`: refuse malformed requests before any model sees them;
- `encoding`, `fields`: JSON and events as bytes, reading fields.

To add a dialect, write a package with its `Dialect`, and add it to the table in `base`. Nothing
else knows which dialects there are.
"""

from leyden.dialects.base import DIALECTS, dialect_of_client
from leyden.dialects.chat import Hidden, StreamAssembler, echoes, prepare, usage, visible
from leyden.dialects.checks import WrongType, check_types, parse_request
from leyden.dialects.dialect import Dialect
from leyden.dialects.encoding import DONE, Json, dump, named_event, parse, split_events, sse_event
from leyden.dialects.messages import anthropic_error
from leyden.dialects.openai import CHAT, openai_error
from leyden.dialects.passage import Passage, PassageStream

__all__ = [
    "CHAT",
    "DIALECTS",
    "DONE",
    "Dialect",
    "Hidden",
    "Json",
    "Passage",
    "PassageStream",
    "StreamAssembler",
    "WrongType",
    "anthropic_error",
    "check_types",
    "dialect_of_client",
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
