"""The work of `leyden prompts extract`: read recorded calls, find their prompts and tasks, and
print or write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden._lib.formatting import figure, one_line
from leyden._lib.numbers import mean_of
from leyden.adapter.calls import model_calls
from leyden.algorithm.prompts.extraction import (
    Conversation,
    ExtractedPrompt,
    conversation_of,
    extract_prompts,
    formatting_call,
)
from leyden.algorithm.usage import fixed_pieces
from leyden.cli.output import write_output
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout, PromptTemplate

_EXAMPLE_CHARACTERS = 60
_PAGE = 200
"""Rollouts whose spans are read at once."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded calls, rewards and prompts of an agent's rollouts."""

    conversations: Sequence[Conversation]
    n_calls: int
    """Model calls of all rollouts."""
    rewards: Sequence[float]
    """The final reward of each rollout that has one."""
    templates: dict[str, PromptTemplate]
    """The prompts that the rollouts were given as resources, by name."""
    prompts: Sequence[ExtractedPrompt]

    @property
    def tasks(self) -> list[Any]:
        """The different inputs, in the order of the rollouts."""
        return list({json.dumps(each.task, sort_keys=True): each.task for each in self.conversations}.values())

    def resource_of(self, prompt: ExtractedPrompt) -> str | None:
        """Return the name of the resource that a prompt comes from; None if it is hard-coded.

        A prompt comes from a resource if it has all pieces of the template between placeholders.
        """
        found = " ".join(prompt.template.template.replace("{{", "{").replace("}}", "}").split())
        for name, template in self.templates.items():
            pieces = fixed_pieces(template)
            if pieces and all(piece in found for piece in pieces):
                return name
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the counts, tasks and prompts as JSON data."""
        return {
            "rollouts": len(self.conversations),
            "mean_reward": mean_of(self.rewards) if self.rewards else None,
            "tasks": self.tasks,
            "prompts": [
                {
                    "name": prompt.name,
                    "role": prompt.role,
                    "call": prompt.call,
                    "rollouts": len(prompt.rollouts),
                    "template": prompt.template.template,
                    "placeholders": {
                        name: {
                            "expression": each.expression,
                            "description": each.description,
                            "examples": list(each.examples),
                        }
                        for name, each in prompt.placeholders.items()
                    },
                    "resource": self.resource_of(prompt),
                }
                for prompt in self.prompts
            ],
        }

    def write(self, folder: Path) -> Iterator[Path]:
        """Write each prompt and the tasks to files of a folder, and yield their paths."""
        files = {f"{prompt.name}.txt": prompt.template.template for prompt in self.prompts}
        files["tasks.jsonl"] = "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in self.tasks)
        for name, text in files.items():
            write_output(folder / name, text)
            yield folder / name

    def shown(self, folder: Path | None) -> str:
        """Return the whole result as text for a person.

        folder: where the files were written; None if they were not.
        """
        lines: list[str] = []
        for prompt in self.prompts:
            lines += [*self._shown_prompt(prompt), ""]
        lines.append(f"tasks     {len(self.tasks):,} different ones in {len(self.conversations):,} rollouts")
        reward = "no rollout has one"
        if self.rewards:
            reward = f"{figure(mean_of(self.rewards), 3)}, the mean of {len(self.rewards):,} rollouts"
        lines.append(f"reward    {reward}")
        hard_coded = [prompt for prompt in self.prompts if self.resource_of(prompt) is None]
        return "\n".join([*lines, *(_change(hard_coded, folder) if hard_coded else [])])

    def _shown_prompt(self, prompt: ExtractedPrompt) -> Iterator[str]:
        """Yield the lines that show a prompt: where it is used, its template and its
        placeholders.
        """
        count = f"{len(prompt.rollouts):,} of {len(self.conversations):,} rollouts"
        yield f"--- {prompt.name}: {prompt.role} message from call {prompt.call + 1} on, in {count}"
        yield prompt.template.template
        if (resource := self.resource_of(prompt)) is not None:
            yield f"--- it comes from the resource {resource!r} already"
        elif prompt.placeholders:
            yield "---"
        for name, each in prompt.placeholders.items():
            examples = ", ".join(repr(one_line(text)[:_EXAMPLE_CHARACTERS]) for text in each.examples)
            yield f"{{{name}}} is {each.description}, such as {examples}"


def _change(prompts: Sequence[ExtractedPrompt], folder: Path | None) -> Iterator[str]:
    """Yield lines that say how to change the agent, so that its prompts can be improved.

    folder: where the prompts were written; None if they were not.
    """
    yield "\nTo have the prompts improved, give the agent a parameter `resources`, and send in place of the fixed text:"
    for prompt in prompts:
        yield f"    {formatting_call(prompt)}"
    yield "Give the trainer the templates:"
    yield "    initial_resources={"
    for prompt in prompts:
        path = (folder or Path("prompts")) / f"{prompt.name}.txt"
        yield f"        {prompt.name!r}: ly.PromptTemplate(template=Path({str(path)!r}).read_text('utf-8')),"
    yield "    }"
    if folder is None:
        yield "--out prompts writes these files, and the tasks."


async def read_recorded(store: LightningStore, run_id: str, limit: int) -> Recorded:
    """Read up to `limit` of a run's newest finished rollouts, and find their prompts."""
    newest = await store.query_rollouts(
        run_id=run_id, status_in=["succeeded", "failed"], sort_by="start_time", sort_order="desc", limit=limit
    )
    rollouts = [each for each in reversed(newest) if isinstance(each, AttemptedRollout)]
    conversations: list[Conversation] = []
    n_calls = 0
    for start in range(0, len(rollouts), _PAGE):
        page = rollouts[start : start + _PAGE]
        spans = await store.query_spans_of([rollout.rollout_id for rollout in page])
        for rollout in page:
            calls = model_calls(spans[rollout.rollout_id])
            n_calls += len(calls)
            conversations.append(conversation_of(rollout.input, calls))
    templates: dict[str, PromptTemplate] = {}
    for resources_id in dict.fromkeys(rollout.resources_id for rollout in rollouts):
        if resources_id is not None:
            update = await store.get_resources_by_id(resources_id)
            templates.update(
                (name, each) for name, each in update.resources.items() if isinstance(each, PromptTemplate)
            )
    rewards = [each.attempt.reward for each in rollouts if each.attempt.reward is not None]
    return Recorded(conversations, n_calls, rewards, templates, extract_prompts(conversations))
