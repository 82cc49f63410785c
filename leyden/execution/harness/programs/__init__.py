"""What is known of each harness: a module each. To add one, write its module and a line here."""

from typing import Final

from leyden.execution.harness.harness import HarnessProgram
from leyden.execution.harness.programs import (
    aider,
    claude_code,
    cline,
    code_puppy,
    codex,
    continue_cli,
    gptme,
    hermes,
    mini_swe_agent,
    opencode,
    pi,
    qwen_code,
    smolagents,
    unsupported,
)

PROGRAMS: Final[dict[str, HarnessProgram]] = {
    each.name: each
    for each in (
        claude_code.PROGRAM,
        codex.PROGRAM,
        opencode.PROGRAM,
        pi.PROGRAM,
        qwen_code.PROGRAM,
        mini_swe_agent.PROGRAM,
        aider.PROGRAM,
        gptme.PROGRAM,
        cline.PROGRAM,
        continue_cli.PROGRAM,
        hermes.PROGRAM,
        code_puppy.PROGRAM,
        smolagents.PROGRAM,
        *unsupported.PROGRAMS,
    )
}
"""All harnesses by name: first those that work, in the order in which they are listed."""
