"""Continue's command line."""

import json

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    model = {
        "name": start.model,
        "provider": "openai",
        "model": start.model,
        "apiBase": start.base_url,
        "apiKey": start.api_key,
    }
    settings = {"name": "leyden", "version": "1.0.0", "schema": "v1", "models": [model | {"roles": ["chat"]}]}
    file = start.write("continue.yaml", json.dumps(settings))  # JSON is YAML
    return ["-p", start.prompt, "--config", str(file), "--auto"]


PROGRAM = HarnessProgram(
    name="continue",
    installer="npm",
    package="@continuedev/cli",
    version="1.5.47",
    program="cn",
    arguments=_arguments,
    shell="Bash",
    env={"CONTINUE_TELEMETRY_ENABLED": "0"},
)
