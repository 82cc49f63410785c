"""Write the text that a reflection model reads about rollouts, and check the prompts that it proposes.

Pure functions, which know prompts and finished rollouts, no model, no store and no optimiser.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from leyden._lib.formatting import figure
from leyden._lib.text import as_json
from leyden.adapter.transcript import transcript_lines
from leyden.algorithm.evaluator import Score
from leyden.errors import ConfigError
from leyden.types import PromptTemplate

_TASK_CHARACTERS = 2000
_MESSAGE_CHARACTERS = 2000
_ROLLOUT_CHARACTERS = 8000
_OTHER_ENGINES = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
"""Matches the expressions and tags that Jinja and POML replace."""
_STRAY = {"jinja": re.compile(r"\{\{|\{%|\{#"), "poml": re.compile(r"\{\{|\}\}|\{%|%\}|\{#|#\}")}
"""Marks that must not be left beside expressions and tags, because they change how the text around them is read. Jinja
reads a closing mark that nothing has opened as text."""
_SECONDS = re.compile(r"  \d+\.\d\d s(?=  |\Z)")
"""A duration in a transcript: it differs in every run and says nothing about the prompt."""


def rollouts_as_text(scores: Sequence[Score]) -> str:
    """Return the agent's calls and the reward on each task as text for the reflection model."""
    return "\n".join(_rollout_as_text(number, score) for number, score in enumerate(scores, 1))


def _rollout_as_text(number: int, score: Score) -> str:
    """Return the text about one rollout: task, transcript, reward and failure, each cut if it is very long. Of a long
    conversation the middle is left out, because an agent of several turns succeeds or fails at the end. Durations are
    removed, because they differ in every run.
    """
    head = f'<run number="{number}" reward="{figure(score.reward)}">'
    lines = [head]
    if score.result is not None:
        task = score.result.rollout.input
        lines.append("task: " + _cut(task if isinstance(task, str) else as_json(task), _TASK_CHARACTERS))
        spans = [span for span in score.result.spans if span.name]
        lines += [_SECONDS.sub("", line) for line in transcript_lines(spans, max_characters=_MESSAGE_CHARACTERS)]
    if score.reason is not None:
        lines.append(f"failed: {_cut(score.reason, _MESSAGE_CHARACTERS)}")
    text = "\n".join(lines)
    if len(text) > _ROLLOUT_CHARACTERS:
        half = _ROLLOUT_CHARACTERS // 2
        text = f"{text[:half]}\n... ({len(text) - 2 * half:,} characters left out) ...\n{text[-half:]}"
    return text + "\n</run>"


def shown_text(text: str) -> str:
    """Return a text for the reflection model, cut if it is very long."""
    return _cut(text, _MESSAGE_CHARACTERS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text):,} characters in all)"


# ---- prompts -------------------------------------------------------------------------------------


def problem_with(text: str, prompt: PromptTemplate, *, max_characters: int) -> str | None:
    """Return why a text cannot replace a prompt, as a sentence for the model that wrote it; None if it can.

    The new prompt must have the same placeholders, because the agent fills in the same values.
    """
    if not text:
        return "it is empty"
    if len(text) > max_characters:
        return f"it has {len(text):,} characters, and at most {max_characters:,} are possible"
    if text == prompt.template.strip():
        return "it is the current prompt without any change"
    wanted = placeholders_of(prompt)
    try:
        found = placeholders_of(prompt.model_copy(update={"template": text}))
    except ConfigError as error:
        return str(error)
    if lost := sorted(wanted - found):
        return f"it lacks the placeholder {braced(lost, prompt)}"
    if invented := sorted(found - wanted):
        possible = braced(wanted, prompt)
        return f"it has the placeholder {braced(invented, prompt)}, which gets no value; possible: {possible}"
    return None if prompt.engine == "f-string" else _problem_with_tags(text, prompt)


def _problem_with_tags(text: str, prompt: PromptTemplate) -> str | None:
    """Return why a text cannot replace a template of Jinja or POML, whose tags it must repeat in order; else None."""
    wanted, found = _tags(prompt.template), _tags(text)
    if found != wanted:
        return f"its tags are {' '.join(found) or 'none'}, and must be {' '.join(wanted) or 'none'}, in this order"
    if new := sorted(_strays(text, prompt.engine) - _strays(prompt.template, prompt.engine)):
        return f"it has {new[0]} outside of a placeholder or tag"
    return None


def _tags(template: str) -> list[str]:
    return [each for each in _OTHER_ENGINES.findall(template) if each.startswith("{%")]


def _strays(template: str, engine: str) -> set[str]:
    return set(_STRAY[engine].findall(_OTHER_ENGINES.sub("", template)))


def placeholders_of(prompt: PromptTemplate) -> set[str]:
    """Return the names of a template's placeholders. For another engine than `f-string`, return its expressions and
    tags as they are written.

    Raise ConfigError for a template that cannot be formatted.
    """
    return set(prompt.placeholders if prompt.engine == "f-string" else _OTHER_ENGINES.findall(prompt.template))


def braced(names: Collection[str], prompt: PromptTemplate) -> str:
    """Return placeholders as the template writes them: `{task}, {tone}`."""
    written = names if prompt.engine != "f-string" else [f"{{{name}}}" for name in names]
    return ", ".join(sorted(written)) or "none"
