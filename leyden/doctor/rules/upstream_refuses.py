"""The server of the model answers with errors, or too late."""

from leyden.doctor.messages import Kind, rule_of_messages


def _status(status: str) -> str:
    """Return a pattern of the forms in which clients of models and the gateway report a status."""
    return rf"error code: {status}|answered {status}\b"


_OTHERS = r"[45]\d\d"
"""Statuses in the forms of general HTTP clients, which may be those of any server."""

RULE = rule_of_messages(
    "upstream-refuses",
    Kind(
        pattern=rf"{_status('40[13]')}|AuthenticationError|PermissionDeniedError|invalid[_ ]api[_ ]key|incorrect api key",
        cause="the model's server rejects the key",
        remedy="Give a key that is valid for this server and model: api_key in LLMProxy(model_list=...) or in the LLM "
        "resource, or the variable that the server's client reads.",
    ),
    Kind(
        pattern=rf"^(?!.*the attempt has spent)(?:.*(?:{_status('429')}|RateLimitError|too many requests|rate limit|quota))",
        cause="the model's server takes no more requests: its rate limit or quota is used up",
        remedy="Run fewer rollouts at once (n_runners, concurrency), let the client retry (max_retries), or raise the "
        "limit with the provider.",
    ),
    Kind(
        pattern=r"the attempt has spent its",
        cause="attempts use up what the gateway grants each of them",
        remedy="Raise LLMProxy(attempt_limits=...), or let the agent end earlier.",
    ),
    Kind(
        pattern=rf"{_status('504')}|did not answer within|APITimeoutError|request timed out|did not count in time"
        r"|the attempt ended before the answer was whole",
        cause="the model's server answers too late",
        remedy="Run fewer rollouts at once, ask for fewer tokens, or raise timeout_seconds of LLMProxy and of the agent's "
        "client. The server's own log says whether it hangs.",
    ),
    Kind(
        pattern=rf"{_status('5[0-9][0-9]')}|InternalServerError|ServiceUnavailable|upstream_(?:garbage|incomplete|failed)"
        r"|broke off|sent more than .* in answer to one call|answered with a stream that was not requested",
        cause="the model's server fails",
        remedy="Look at the server's own log, and start it again. If it answers what is no answer of a model, correct the "
        "endpoint.",
    ),
    Kind(
        pattern=rf"{_status('40[45]')}",
        cause="the model's server does not know the address that was called",
        remedy="Correct the endpoint: the base URL of an OpenAI-compatible server ends in /v1.",
    ),
    Kind(
        pattern=rf"\bHTTP(?: Error)? {_OTHERS}\b|status(?: code)?[:= ]+{_OTHERS}\b|\b{_OTHERS} (?:client|server) error"
        rf"|error '{_OTHERS}|ResponseError: {_OTHERS}\b|ReadTimeout",
        cause="a server that the agent calls answers with errors",
        remedy="Read the status: 401 and 403 are the key, 404 the address, 429 the rate, 5xx and time-outs the server itself.",
    ),
    explains=("stuck-agent",),
)
