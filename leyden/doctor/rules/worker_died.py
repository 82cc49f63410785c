"""Processes that the run needs have died: runners, workers of an environment, the policy's process."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "worker-died",
    Kind(
        pattern=r"(?:runner|worker) \d+ was killed by SIGKILL|was killed by SIGKILL",
        cause="a process of the run was killed (SIGKILL), as the system does when memory runs out",
        remedy="If nobody killed it, lower n_runners or concurrency, or let the agent hold less memory. "
        "`dmesg` names what the system has killed.",
    ),
    Kind(
        pattern=r"runner_died|the process of runner \d+|RunnerDied|worker \d+ is started again|its worker (?:died|ended)"
        r"|the (?:policy|engine)'s process",
        cause="the processes in which agents run die",
        remedy="Look at the agent for os._exit, a crash of native code, and signals; its output stands above the message "
        "in the terminal. The strategy shm shows the error in one process.",
    ),
    explains=("stuck-environment",),
)
