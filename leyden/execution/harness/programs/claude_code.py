"""Claude Code, of Anthropic."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    start.env["CLAUDE_CODE_TMPDIR"] = start.env["TMPDIR"]
    return ["-p", start.prompt, "--model", start.model, "--dangerously-skip-permissions", "--output-format", "json"]


PROGRAM = HarnessProgram(
    name="claude-code",
    installer="npm",
    package="@anthropic-ai/claude-code",
    version="2.1.197",
    program="claude",
    arguments=_arguments,
    dialect="messages",
    shell="Bash",
    shell_arguments=lambda line: {"command": line, "description": "run a line"},
    env={
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
    },
    remarks="its first prompt has about 77,000 tokens with tools",
)
