"""The gateway: the recorded road from an agent to a model.

An agent calls the gateway as it would call any OpenAI-compatible server; the base URL carries the ids of its rollout
and attempt. The gateway passes the bytes on to the model, passes the answer back as it comes, and writes down behind
the answer what was said, to the exact token, as one span for each call.

What lives here:

- `proxy`: `LLMProxy`, the options and the life of the server thread;
- `server`, `asgi`: HTTP;
- `app`: the routes, and the way of one call;
- `attempts`: which attempts may call;
- `upstream`: the models behind the gateway;
- `wire`: what is known of OpenAI's formats (what to ask for, what to hide again, how to put a stream together);
- `record`: from one call to one span, and the proof of its tokens;
- `recorder`: the queue between the answer and the store;
- `refusal`: errors in the shape that OpenAI clients read.

It knows neither agents nor algorithms nor engines: it is given a store and a list of models.

To speak another format, describe it as a `wire.Dialect`. To record more of a call, see `record.span_of`.
"""

from leyden.gateway.proxy import LLMProxy
from leyden.gateway.upstream import UpstreamModel

__all__ = ["LLMProxy", "UpstreamModel"]
