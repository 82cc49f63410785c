"""pi."""

import json

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    provider = {
        "baseUrl": start.base_url,
        "apiKey": "OPENAI_API_KEY",
        "api": "openai-completions",
        "models": [{"id": start.model}],
    }
    file = start.write(".pi/models.json", json.dumps({"providers": {"leyden": provider}}))
    start.env["PI_CODING_AGENT_DIR"] = str(file.parent)
    return ["--provider", "leyden", "--model", start.model, "-p", start.prompt, "--no-session"]


PROGRAM = HarnessProgram(
    name="pi",
    installer="npm",
    package="@mariozechner/pi-coding-agent",
    version="0.73.1",
    program="pi",
    arguments=_arguments,
    shell="bash",
    env={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
    remarks="a first prompt of about 5,000 tokens: fit for small models",
)
