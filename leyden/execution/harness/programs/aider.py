"""aider."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    flags = ["--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    flags += ["--no-show-release-notes", "--no-detect-urls", "--no-gitignore", "--no-pretty", "--map-tokens", "0"]
    return [*flags, "--model", f"openai/{start.model}", "--edit-format", "whole", "--message", start.prompt]


PROGRAM = HarnessProgram(
    name="aider",
    installer="pip",
    package="aider-chat",
    version="0.86.2",
    program="aider",
    arguments=_arguments,
    shell_text=lambda line: f"answer.txt\n```\n{line.split()[1]}\n```\n",
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    remarks="no tools: the model writes whole files in its answer",
)
