"""gptme."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    return [
        "--non-interactive",
        "--no-confirm",
        "--model",
        f"openai/{start.model}",
        "--tools",
        "shell,patch,save",
        start.prompt,
    ]


PROGRAM = HarnessProgram(
    name="gptme",
    installer="pip",
    package="gptme",
    version="0.35.1",
    program="gptme",
    arguments=_arguments,
    shell_text=lambda line: f"```shell\n{line}\n```",
    remarks="changes its system prompt, so that some turns do not merge; tools are code blocks in the text; it asks "
    "gpt-5-mini for a name, and goes on without the answer",
)
