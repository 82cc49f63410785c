"""Harnesses that cannot be used, and why."""

from leyden.execution.harness.harness import HarnessProgram

_BINARY = (
    "its package holds no program: it downloads a binary when it is installed, from a host that is no package index"
)
_PYTHON = "it has no version for Python 3.11"

PROGRAMS = (
    HarnessProgram(
        name="gemini-cli",
        installer="npm",
        package="@google/gemini-cli",
        version="0.61.0",
        unsupported="it speaks Google's API alone, which Leyden does not",
    ),
    HarnessProgram(name="crush", installer="npm", package="@charmland/crush", version="", unsupported=_BINARY),
    HarnessProgram(
        name="goose", installer="npm", package="goose", version="", unsupported="the name holds another project"
    ),
    HarnessProgram(name="kimi", installer="pip", package="kimi-cli", version="", unsupported=_PYTHON),
    HarnessProgram(name="vibe", installer="pip", package="mistral-vibe", version="", unsupported=_PYTHON),
    HarnessProgram(name="openhands", installer="pip", package="openhands", version="", unsupported=_PYTHON),
    HarnessProgram(
        name="deepagents",
        installer="pip",
        package="deepagents-cli",
        version="0.3.0",
        unsupported="this version only deploys agents, and runs none",
    ),
)
