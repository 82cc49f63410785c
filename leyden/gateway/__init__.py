"""The gateway: a proxy between agents and models that records every call.

An agent calls the gateway as it would call OpenAI's or Anthropic's API. The base URL carries the ids of its rollout and
attempt. The gateway passes the request on to the model's server, and translates it if the server speaks another
dialect. It passes the response back as it arrives, and then records the call as one span, to the exact token.

The modules:

- `proxy`: `LLMProxy`, its options, and the start and stop of its server thread;
- `asgi`: headers and error replies;
- `gateway_app`: the routes, and the check of each caller's key;
- `exchange`: one call under way;
- `relay`: sends a call to a model, and the response back;
- `transport`, `litellm_transport`: how a request reaches a server;
- `attempts`: which attempts may call;
- `upstream`: the models behind the gateway;
- `prices`: what the tokens of models cost;
- `gate`, `limits`: hold calls up while weights change, refuse calls beyond a limit;
- `balance`: which server of a model takes a call;
- `upstream_metrics`: counts and latencies of the servers;
- `buffering`: which servers lose token ids when they stream;
- `call_replay`: recorded calls that answer in the model's place;
- `retries`: calls that a client sends again;
- `responses`: the earlier turns of the Responses API, while an attempt lasts;
- `record`: one call as one span, and the proof of its tokens;
- `prefixes`: which earlier call each prompt continues;
- `recorder`, `spool`, `dead_letters`: the queue between the response and the store, and its files;
- `gateway_workers`: the gateway in several processes;
- `hosted`: the gateway in the process of the engine;
- `remote`: a gateway that another process runs;
- `control`: commands to a running gateway.

The gateway knows neither agents nor algorithms nor engines: it is given a store and a list of models. The wire formats
are in `leyden.dialects`; add a dialect there. To record more of a call, extend `record.span_of`.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.gateway.control import GatewayState as GatewayState
    from leyden.gateway.control import RemoteGateway as RemoteGateway
    from leyden.gateway.limits import AttemptLimits as AttemptLimits
    from leyden.gateway.prices import Price as Price
    from leyden.gateway.prices import Prices as Prices
    from leyden.gateway.proxy import LLMProxy as LLMProxy
    from leyden.gateway.remote import FoundGateways as FoundGateways
    from leyden.gateway.remote import control_key_of as control_key_of
    from leyden.gateway.upstream import UpstreamModel as UpstreamModel
    from leyden.gateway.upstream_metrics import UpstreamStatus as UpstreamStatus
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__)
