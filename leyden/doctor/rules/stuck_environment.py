"""A simulator hangs or fails, or a data queue is stuck."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "stuck-environment",
    Kind(
        pattern=r"not returned for \S+ s\b|took more than \S+ s and was killed|takes more than .* s to make|step_timeout_seconds",
        cause="an environment hangs",
        remedy="Look at the simulator's step and reset for a wait that never ends. With 'subproc' or 'shmem', "
        "step_timeout_seconds ends a call that hangs, and on_worker_error='skip' leaves its episode out.",
    ),
    Kind(
        pattern=r"data queue was closed|DataQueueClosed|producers of the data queue died",
        cause="the data queue of the simulators is stuck or was closed",
        remedy="Use the queue inside its `with` block, and read all of it there. An item that its producer cannot read is "
        "named in the message.",
    ),
    Kind(
        pattern=r"SimulatorError|environment \d+ failed|environments? of worker \d+ could not",
        cause="a simulator fails",
        remedy="The message names environment, seed and step; run that seed alone in this process "
        "(vectorize_env(..., 'dummy')).",
    ),
)
