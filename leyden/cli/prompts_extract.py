"""The work of `leyden prompts extract`: read recorded calls, find their prompts and tasks, and print or write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leyden._lib.formatting import figure, one_line
from leyden._lib.numbers import mean_of
from leyden.adapter.calls import model_calls
from leyden.algorithm.prompts.extraction import Conversation, ExtractedPrompt, conversation_of, extract_prompts
from leyden.cli.output import write_output
from leyden.store.base import LightningStore
from leyden.types import AttemptedRollout, PromptTemplate

_EXAMPLE_CHARACTERS = 60
_PAGE = 200  # rollouts whose spans are read at once


@dataclass(frozen=True, slots=True)
class Recorded:
    """The prompts of an agent, and the rollouts from which they were extracted."""

    prompts: Sequence[ExtractedPrompt]
    tasks: Sequence[Any]
    """The different inputs, in the order of the rollouts."""
    rewards: Sequence[float]
    n_rollouts: int
    n_calls: int

    def as_json(self) -> dict[str, Any]:
        prompts = [
            {**asdict(prompt), "rollouts": len(prompt.rollouts), "template": prompt.template.template}
            for prompt in self.prompts
        ]
        reward = mean_of(self.rewards) if self.rewards else None
        return {"rollouts": self.n_rollouts, "mean_reward": reward, "tasks": self.tasks, "prompts": prompts}

    def write(self, folder: Path) -> Iterator[Path]:
        """Write each prompt and the tasks to files of a folder, and yield their paths."""
        files = {f"{prompt.name}.txt": prompt.template.template for prompt in self.prompts}
        files["tasks.jsonl"] = "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in self.tasks)
        for name, text in files.items():
            write_output(folder / name, text)
            yield folder / name

    def shown(self, folder: Path | None) -> Iterator[str]:
        """Yield the lines of the result for a person.

        folder: where the files were written; None if they were not.
        """
        for prompt in self.prompts:
            count = f"{len(prompt.rollouts):,} of {self.n_rollouts:,} rollouts"
            yield f"--- {prompt.name}: {prompt.role} message from call {prompt.call + 1} on, in {count}"
            yield prompt.template.template
            if prompt.resource is not None:
                yield f"--- it comes from the resource {prompt.resource!r} already"
            elif prompt.placeholders:
                yield "---"
            for name, each in prompt.placeholders.items():
                examples = ", ".join(repr(one_line(text)[:_EXAMPLE_CHARACTERS]) for text in each.examples)
                yield f"{{{name}}} is {each.description}, such as {examples}"
            yield ""
        yield f"tasks     {len(self.tasks):,} different ones in {self.n_rollouts:,} rollouts"
        mean = (
            f"{figure(mean_of(self.rewards), 3)}, the mean of {len(self.rewards):,} rollouts" if self.rewards else None
        )
        yield f"reward    {mean or 'no rollout has one'}"
        hard_coded = [prompt for prompt in self.prompts if prompt.resource is None]
        if not hard_coded:
            return
        yield "\nTo have the prompts improved, give the agent a parameter `resources`, and send in place of the fixed text:"
        for prompt in hard_coded:
            values = ", ".join(f"{name}={each.expression or '...'}" for name, each in prompt.placeholders.items())
            yield f"    resources[{prompt.name!r}].format({values})"
        yield "Give the trainer the templates:\n    initial_resources={"
        for prompt in hard_coded:
            path = str((folder or Path("prompts")) / f"{prompt.name}.txt")
            yield f"        {prompt.name!r}: ly.PromptTemplate(template=Path({path!r}).read_text('utf-8')),"
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
    for resources_id in dict.fromkeys(rollout.resources_id for rollout in rollouts if rollout.resources_id is not None):
        resources = (await store.get_resources_by_id(resources_id)).resources
        templates |= {name: each for name, each in resources.items() if isinstance(each, PromptTemplate)}
    tasks = {json.dumps(each.task, sort_keys=True): each.task for each in conversations}
    rewards = [each.attempt.reward for each in rollouts if each.attempt.reward is not None]
    prompts = extract_prompts(conversations, templates)
    return Recorded(prompts, list(tasks.values()), rewards, len(rollouts), n_calls)
