"""The agent is a program that does not call its model, or that was replaced while the run worked."""

from leyden.doctor.evidence import Evidence
from leyden.doctor.messages import Kind, rule_of_messages
from leyden.doctor.rule import Finding, Rule
from leyden.types.semconv import PROCESS

_BY_MESSAGES = rule_of_messages(
    "harness",
    Kind(
        pattern=r"never called the model through the gateway",
        cause="the agent's program does not call the model that it is given",
        remedy="Give its client the address and key of the attempt (OPENAI_BASE_URL and OPENAI_API_KEY in its "
        "environment), and look at its output.",
    ),
    Kind(
        pattern=r"is not the program of the beginning any more",
        cause="the program was replaced while the run worked: it updated itself, or was installed anew",
        remedy="Install the tested version, and turn its updates off; `leyden harness list` names the version.",
    ),
)


def _find(run: Evidence) -> Finding | None:
    finding = _BY_MESSAGES.find(run)
    is_program = any(span.name == PROCESS for each in run.failed for span in each.spans)
    return finding if is_program or (finding is not None and "replaced" in finding.cause) else None


RULE = Rule("harness", _find, explains=_BY_MESSAGES.explains)
