"""Codex, of OpenAI."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    provider = {"name": "leyden", "base_url": start.base_url, "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    settings = ["model_provider=leyden", "web_search=disabled", "analytics.enabled=false"]
    settings += [f'model_providers.leyden.{name}="{value}"' for name, value in provider.items()]
    flags = [part for setting in settings for part in ("-c", setting)]
    return [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-m",
        start.model,
        *flags,
        start.prompt,
    ]


PROGRAM = HarnessProgram(
    name="codex",
    installer="npm",
    package="@openai/codex",
    version="0.171.0",
    program="codex",
    arguments=_arguments,
    dialect="responses",
    shell="exec_command",
    shell_arguments=lambda line: {"cmd": line},
    remarks="its hosted web search is switched off",
)
