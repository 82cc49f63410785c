"""smolagents' command line."""

from leyden.execution.harness.harness import HarnessProgram, Start


def _arguments(start: Start) -> list[str]:
    options = ["--model-type", "OpenAIModel", "--model-id", start.model, "--api-base", start.base_url]
    return [start.prompt, *options, "--api-key", start.api_key, "--tools", "--imports", "os"]


PROGRAM = HarnessProgram(
    name="smolagents",
    installer="pip",
    package="smolagents",
    version="1.26.0",
    program="smolagent",
    arguments=_arguments,
    shell_text=lambda line: f'<code>\nimport os\nos.system({line!r})\nfinal_answer("answer-written")\n</code>',
    requirements=("openai==3.57.0",),
    remarks="the model writes Python, which runs in the program",
)
