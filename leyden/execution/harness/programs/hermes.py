"""Hermes Agent, of Nous Research."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    lines = ["model:", f"  default: {start.model}", "  provider: custom", f"  base_url: {start.base_url}"]
    start.write(".hermes/config.yaml", "\n".join([*lines, f"  api_key: {start.api_key}", ""]))
    start.env["HERMES_HOME"] = str(start.home / ".hermes")
    return ["--yolo", "-z", start.prompt]


PROGRAM = HarnessProgram(
    name="hermes",
    installer="pip",
    package="hermes-agent",
    version="0.19.0",
    program="hermes",
    arguments=_arguments,
    shell="terminal",
)
