"""opencode."""

import json

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "leyden",
        "options": {"baseURL": start.base_url, "apiKey": start.api_key},
        "models": {start.model: {"name": start.model}},
    }
    settings = {"provider": {"leyden": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    start.write(".config/opencode/opencode.json", json.dumps(settings))
    return ["run", "-m", f"leyden/{start.model}", start.prompt]


PROGRAM = HarnessProgram(
    name="opencode",
    installer="npm",
    package="opencode-ai",
    version="1.18.33",
    program="opencode",
    arguments=_arguments,
    shell="bash",
    shell_arguments=lambda line: {"command": line, "description": "run a line"},
    env={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    remarks="asks for a title besides the task",
)
