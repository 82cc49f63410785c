"""The gateway: the recorded road from an agent to a model.

An agent calls the gateway as it would call OpenAI's or Anthropic's API. The base URL carries the
ids of its rollout and attempt. The gateway passes the request on to the model's server, and
translates it if the server speaks another dialect. It passes the response back as it arrives, and
then records the call as one span, to the exact token.

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
- `upstream_metrics`: counts and latencies of the servers;
- `buffering`: whose streams lose token ids;
- `replay`: recorded calls that answer in the model's place;
- `retries`: calls that a client sends again;
- `responses`: the earlier turns of the Responses API, while an attempt lasts;
- `record`: from one call to one span, and the proof of its tokens;
- `prefixes`: which earlier call each prompt continues;
- `recorder`: the queue between the response and the store;
- `workers`: the gateway in several processes;
- `hosted`: the gateway in the process of the engine;
- `remote`: a gateway that another process runs;
- `refusal`: the gateway's own errors.

The gateway knows neither agents nor algorithms nor engines: it is given a store and a list of
models. The wire formats are in `leyden.dialects`; add a dialect there. To record more of a call,
extend `record.span_of`.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
