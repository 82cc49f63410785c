"""A server of the run, or of its agent, cannot listen, because another one has its port."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "port-taken",
    Kind(
        pattern=r"address already in use|EADDRINUSE|port \S+ is (?:already )?(?:in use|taken|allocated)|only one usage of each",
        cause="a port is taken by another server, perhaps by another trainer",
        remedy="Leave the port out for a free one, or give each trainer its own: port= of LLMProxy, server_port= of the "
        "strategy, port= of the Trainer. End a server that an earlier run has left.",
        command="ss -ltnp",
    ),
    Kind(
        pattern=r"cannot listen on|permission denied.*\bbind|cannot assign requested address",
        cause="a server cannot listen on its address",
        remedy="Give a host of this machine and a port above 1023.",
    ),
    explains=("store-away", "server-does-not-start", "upstream-unreachable"),
)
