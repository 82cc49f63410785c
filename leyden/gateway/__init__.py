"""The gateway: the recorded road from an agent to a model.

An agent calls the gateway as it would call OpenAI's or Anthropic's API; the base URL carries the ids of its rollout and
attempt. The gateway passes the bytes on to the model, or translates them where the model's server speaks another dialect,
passes the answer back as it comes, and then records the call as one span, to the exact token.

What lives here:

- `proxy`: `LLMProxy`, the options and the life of the server thread;
- `asgi`: HTTP;
- `app`: the routes, and who may call;
- `exchange`: one call under way;
- `relay`: the way of one call to a model and back;
- `transport`, `litellm_transport`: how a request reaches a server;
- `attempts`: which attempts may call;
- `upstream`: the models behind the gateway;
- `gate`, `limits`: what holds calls up or refuses them;
- `balance`: which server of a model takes a call;
- `figures`: counts and latencies of the servers;
- `buffering`: whose streams lose token ids;
- `replay`: recorded calls that answer in the model's place;
- `retries`: calls that a client sends again;
- `responses`: the earlier turns of the Responses API, while an attempt lasts;
- `record`: from one call to one span, and the proof of its tokens;
- `prefixes`: which earlier call each prompt goes on from;
- `recorder`: the queue between the answer and the store;
- `workers`: the gateway in several processes;
- `hosted`: the gateway in the process of the engine;
- `remote`: a gateway that another process runs;
- `refusal`: the gateway's own errors.

It knows neither agents nor algorithms nor engines: it is given a store and a list of models. The formats are in
`leyden.dialects`; to speak another one, describe it there. To record more of a call, see `record.span_of`.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
