"""mini-SWE-agent."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    return ["-y", "--exit-immediately", "-m", f"openai/{start.model}", "-t", start.prompt]


PROGRAM = HarnessProgram(
    name="mini-swe-agent",
    installer="pip",
    package="mini-swe-agent",
    version="2.4.6",
    program="mini",
    arguments=_arguments,
    shell="bash",
    env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    remarks="ends when the model prints COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
