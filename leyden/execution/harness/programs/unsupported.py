"""Harnesses that cannot be used, and why, by the packages as they were in November 2026."""

from typing import Literal

from leyden.execution.harness.harness import HarnessProgram


def _unsupported(name: str, installer: Literal["npm", "pip"], package: str, version: str, why: str) -> HarnessProgram:
    return HarnessProgram(name=name, installer=installer, package=package, version=version, unsupported=why)


PROGRAMS = (
    _unsupported(
        "gemini-cli", "npm", "@google/gemini-cli", "0.61.0", "it speaks Google's API alone, which Leyden does not"
    ),
    _unsupported(
        "crush",
        "npm",
        "@charmland/crush",
        "0.96.1",
        "its package holds no program: it downloads one from github.com when it is installed",
    ),
    _unsupported(
        "goose",
        "npm",
        "goose",
        "0.0.3",
        "the names hold other projects: npm's goose adds brackets to Go, the Python index's goose-ai prints a name",
    ),
    _unsupported(
        "kimi",
        "pip",
        "kimi-cli",
        "1.52.0",
        "its last version starts no agent: it names a successor, which is in no package index",
    ),
    _unsupported("vibe", "pip", "mistral-vibe", "3.0.3", "it needs Python 3.12, where it was not tried"),
    _unsupported(
        "openhands",
        "pip",
        "openhands",
        "1.16.0",
        "it needs Python 3.12, where it was not tried; for 3.11 the name holds a placeholder, 0.0.0",
    ),
    _unsupported(
        "deepagents",
        "pip",
        "deepagents-cli",
        "0.3.0",
        "it deploys agents and runs none; its successor deepagents-code was not tried",
    ),
)
