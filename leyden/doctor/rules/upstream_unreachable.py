"""The server of the model, or another one that the agent needs, does not accept connections."""

from leyden.doctor.messages import Kind, rule_of_messages

_REFUSED = (
    r"connection (?:refused|reset|aborted)|cannot connect to host|no route to host|network is unreachable"
    r"|name or service not known|name resolution|nodename nor servname|ConnectError\b|ConnectTimeout"
)

RULE = rule_of_messages(
    "upstream-unreachable",
    Kind(
        pattern=r"APIConnectionError|cannot reach http\S+ for model|upstream_unreachable|litellm\S*ConnectionError",
        cause="the model's server cannot be reached",
        remedy="Start the server, or correct its address: api_base in LLMProxy(model_list=...), or endpoint of the LLM "
        "resource. `curl ADDRESS/models` shows whether it answers.",
    ),
    Kind(
        pattern=rf"^(?!.*Store(?:Error|Away))(?:.*\b)?(?:{_REFUSED})",
        cause="a server that the agent calls cannot be reached",
        remedy="Start the server whose address the message names, or correct the address in the agent.",
    ),
    explains=("upstream-refuses", "server-does-not-start"),
)
