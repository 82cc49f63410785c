"""A package, a program or a resource is missing, or a component cannot be built."""

from leyden.doctor.messages import Kind, rule_of_messages

RULE = rule_of_messages(
    "missing-package",
    Kind(
        pattern=r"no module named|ModuleNotFoundError|MissingExtra|install the extra|this Python has no|cannot import name",
        cause="a package is missing where the code runs",
        remedy="Install it into the environment of the process that the message names; an extra of Leyden's as "
        "pip install 'leyden[EXTRA]'.",
    ),
    Kind(
        pattern=r"program could not be started|the command (?:was not found|cannot be executed)|FileNotFoundError.*command",
        cause="the agent's program cannot be started",
        remedy="Install the program, and give its full path, or a PATH that has it.",
    ),
    Kind(
        pattern=r"MissingResource|needs a resource of kind",
        cause="the agent needs a resource that it is not given",
        remedy="Give it with Trainer(initial_resources=...), or use an algorithm that makes one.",
    ),
    Kind(
        pattern=r"cannot be (?:built|pickled)|could not be (?:built|imported)|has no option '",
        cause="a component cannot be built",
        remedy="Correct the option or the import path that the message names.",
    ),
    explains=("server-does-not-start",),
)
