"""Qwen Code."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    start.env["OPENAI_MODEL"] = start.model
    start.write(
        ".qwen/settings.json", '{"general": {"disableAutoUpdate": true}, "privacy": {"usageStatisticsEnabled": false}}'
    )
    return ["-y", "-p", start.prompt, "--auth-type", "openai"]


PROGRAM = HarnessProgram(
    name="qwen-code",
    installer="npm",
    package="@qwen-code/qwen-code",
    version="0.15.10",
    program="qwen",
    arguments=_arguments,
    shell="run_shell_command",
    shell_arguments=lambda line: {"command": line, "description": "run a line", "is_background": False},
    remarks="its first prompt has about 77,000 tokens with tools",
)
