"""Cline's command line."""

import json

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": start.api_key, "model": start.model, "baseUrl": start.base_url}
    providers = {name: {"settings": settings, "tokenSource": "manual", "updatedAt": "2026-01-01T00:00:00.000Z"}}
    file = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": providers}
    start.write(".cline/data/settings/providers.json", json.dumps(file))
    return ["-P", name, "-m", start.model, "--json", start.prompt]


PROGRAM = HarnessProgram(
    name="cline",
    installer="npm",
    package="cline",
    version="3.0.65",
    program="cline",
    arguments=_arguments,
    shell="run_commands",
    shell_arguments=lambda line: {"commands": [line]},
)
