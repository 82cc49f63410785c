"""The APIs that programs call models with: OpenAI's chat, completions, responses and embeddings, and Anthropic's
messages.

Pure functions of JSON values and bytes: no I/O, no knowledge of agents, engines or the gateway. Chat is the hub. Each
other dialect translates its requests and answers to chat and back, whole and as a stream. A field that has no
counterpart raises `Untranslatable`, which names the field. Unknown fields are kept.

- `dialect`: the class `Dialect`, and the protocols of its parts;
- `all_dialects`: the table of all dialects;
- `openai`: chat, completions and embeddings;
- `translation`: one call between a client of one dialect and a server of another;
- `chat_dialect`: request token ids and log-probabilities, hide them from clients, assemble streams;
- `chat_reader`: answers and chunks of chat servers, read into one form;
- `ordering`: tool calls of a stream, one after the other;
- `sampling`: the sampling parameters, and the values that change nothing;
- `pinned_sampling`: sampling that an attempt's address sets in place of the program's own;
- `messages`, `responses`: a package each, with its dialect and its translations;
- `request_checks`: refuse malformed requests before any model sees them;
- `encoding`, `fields`: JSON and events as bytes, reading fields.

To add a dialect, write a package with its `Dialect`, and add it to the table in `all_dialects`. No other module lists
the dialects.
"""

from leyden.dialects.all_dialects import DIALECTS as DIALECTS
from leyden.dialects.all_dialects import dialect_of_client as dialect_of_client
from leyden.dialects.chat_dialect import Hidden as Hidden
from leyden.dialects.chat_dialect import StreamAssembler as StreamAssembler
from leyden.dialects.chat_dialect import echoes as echoes
from leyden.dialects.chat_dialect import prepare as prepare
from leyden.dialects.chat_dialect import usage as usage
from leyden.dialects.chat_dialect import visible as visible
from leyden.dialects.dialect import Dialect as Dialect
from leyden.dialects.encoding import DONE as DONE
from leyden.dialects.encoding import dump as dump
from leyden.dialects.encoding import named_event as named_event
from leyden.dialects.encoding import parse as parse
from leyden.dialects.encoding import split_events as split_events
from leyden.dialects.encoding import sse_event as sse_event
from leyden.dialects.messages import anthropic_error as anthropic_error
from leyden.dialects.openai import CHAT as CHAT
from leyden.dialects.openai import openai_error as openai_error
from leyden.dialects.request_checks import WrongType as WrongType
from leyden.dialects.request_checks import check_types as check_types
from leyden.dialects.request_checks import parse_request as parse_request
from leyden.dialects.translation import TranslatedStream as TranslatedStream
from leyden.dialects.translation import Translation as Translation
