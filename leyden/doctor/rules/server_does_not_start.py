"""A server or a cluster that the run needs does not start: vLLM, Ray, the gateway, the policy's process."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "server-does-not-start",
    Kind(
        pattern=r"no Ray cluster|Ray cannot be started|Ray's node did not start|place on the Ray cluster|address of a larger cluster",
        cause="the Ray cluster does not start, or has no room",
        remedy="Check `ray status`. Ask for fewer runners or less of each (num_cpus=0.1 is enough for agents that wait), or "
        "give the address of a cluster that has room.",
        command="ray status",
    ),
    Kind(
        pattern=r"vLLM server .*(?:ended|does not serve|was killed)",
        cause="the vLLM server has ended",
        remedy="The message has the last lines of its log and, if it is known, the cause. Too little GPU memory and a "
        "version that does not fit the driver are the usual ones.",
    ),
    Kind(
        pattern=r"gateway could not start|the gateway on \S+ ended|does not serve http|(?:server|policy|engine)\b.* ended with exit code",
        cause="a server of the run does not start, or has ended",
        remedy="The message has its last lines.",
    ),
)
