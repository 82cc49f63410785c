"""Code Puppy."""

import json

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    model = {
        "type": "custom_openai",
        "name": start.model,
        "custom_endpoint": {"url": start.base_url, "api_key": start.api_key},
        "context_length": 200_000,
    }
    start.write(".local/share/code_puppy/extra_models.json", json.dumps({start.model: model}))
    start.write(
        ".config/code_puppy/puppy.cfg",
        f"[puppy]\npuppy_name = leyden\nowner_name = leyden\nmodel = {start.model}\nyolo_mode = true\n",
    )
    return ["-p", start.prompt, "-m", start.model]


PROGRAM = HarnessProgram(
    name="code-puppy",
    installer="pip",
    package="code-puppy",
    version="0.0.946",
    program="code-puppy",
    arguments=_arguments,
    shell="shell",
    remarks="rewrites the model's answers, so that turns do not merge",
)
