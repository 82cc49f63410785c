"""`FewShot`: search demonstrations and instructions together, as a short algorithm to copy from.

Demonstrations are tasks that the agent has solved, with the model's answers. Candidates are an
instruction with some demonstrations each; successive halving (arXiv:1502.07943) measures all on few
validation tasks, keeps the better half, and measures that on twice as many. It knows prompts and
rewards, not models. The docs build it step by step: docs/algorithm-zoo/few-shot.md.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leyden.adapter.calls import model_calls
from leyden.adapter.chat import message_text
from leyden.algorithm.base import Dataset
from leyden.algorithm.decorator import FunctionalAlgorithm
from leyden.algorithm.evaluator import Evaluator, Score
from leyden.errors import ConfigError, NoTrainingData
from leyden.options import check_number
from leyden.store.base import LightningStore
from leyden.types import LLM, NamedResources, PromptTemplate


@dataclass(frozen=True, slots=True)
class FewShotResult:
    """The outcome of a run: `RunSummary.result`."""

    prompt: PromptTemplate
    """The best prompt, demonstrations included."""
    reward: float
    """Its mean over all validation tasks."""
    first_reward: float
    """The mean of the prompt that the user gave, over the same tasks."""
    resources_id: str
    """The resources that have it."""
    version: int


class FewShot(FunctionalAlgorithm):
    """Search instructions and demonstrations together (as DSPy's bootstrap search does,
    arXiv:2310.03714, section 4).

    n_candidates: prompts that are compared; the given one is always among them.
    n_demonstrations: most demonstrations in one prompt.
    instructions: further templates with the placeholders of the given prompt, tried in turn.
    min_reward: a rollout with at least this reward is a demonstration.
    resource_name: the prompt to improve; None: the only one.
    seed: seed of the choice of demonstrations.
    """

    def __init__(
        self,
        *,
        n_candidates: int = 16,
        n_demonstrations: int = 4,
        instructions: Sequence[str] = (),
        min_reward: float = 1.0,
        resource_name: str | None = None,
        seed: int = 0,
    ) -> None:
        check_number("n_candidates", n_candidates, at_least=2, whole=True)
        check_number("n_demonstrations", n_demonstrations, at_least=1, whole=True)
        check_number("min_reward", min_reward)
        check_number("seed", seed, whole=True)
        super().__init__(self._search)
        self.n_candidates, self.n_demonstrations = n_candidates, n_demonstrations
        self.instructions = tuple(PromptTemplate(template=text) for text in instructions)
        self.min_reward, self.resource_name, self.seed = min_reward, resource_name, seed

    async def _search(
        self,
        *,
        evaluator: Evaluator,
        store: LightningStore,
        initial_resources: NamedResources | None,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> FewShotResult:
        name, first = self._given_prompt(initial_resources or {})
        train, val = _tasks("train_dataset", train_dataset), _tasks("val_dataset", val_dataset)
        resources = await self._with_model(initial_resources or {})
        evaluator.watched_prompts = [name]

        async def mean_reward(prompt: PromptTemplate, tasks: Sequence[Any]) -> float:
            return (await evaluator.evaluate(await evaluator.publish({**resources, name: prompt}), tasks)).mean

        solved = await evaluator.evaluate(await evaluator.publish(resources), train, mode="train")
        demonstrations = [self._demonstration(score, train) for score in solved.scores]
        candidates = self._candidates(first, [text for text in demonstrations if text is not None])
        size = max(1, len(val) // 4)
        while len(candidates) > 1:
            means = await asyncio.gather(*(mean_reward(each, val[:size]) for each in candidates))
            ranked = sorted(range(len(candidates)), key=lambda place: -means[place])  # the earlier one of equals
            keep = 1 if size >= len(val) else max(1, len(candidates) // 2)
            candidates, size = [candidates[place] for place in ranked[:keep]], min(len(val), 2 * size)
        reward, first_reward = await asyncio.gather(mean_reward(candidates[0], val), mean_reward(first, val))
        best = candidates[0] if reward > first_reward else first
        update = await evaluator.publish({**resources, name: best})
        await store.set_label("few_shot/best", update.resources_id, update.version)
        return FewShotResult(best, max(reward, first_reward), first_reward, update.resources_id, update.version)

    async def _with_model(self, resources: NamedResources) -> NamedResources:
        """Return the resources with the gateway's model under `main_llm`, if they have no model:
        its calls are recorded.
        """
        proxy = self.get_llm_proxy()
        if proxy is None or any(isinstance(each, LLM) for each in resources.values()):
            return resources
        return {**resources, "main_llm": await self.publish_endpoint(proxy.as_resource())}

    def _given_prompt(self, resources: NamedResources) -> tuple[str, PromptTemplate]:
        prompts = {name: each for name, each in resources.items() if isinstance(each, PromptTemplate)}
        name = self.resource_name or next(iter(prompts), None)
        if name not in prompts or (self.resource_name is None and len(prompts) > 1):
            raise ConfigError(
                f"FewShot improves one prompt; the initial resources have {', '.join(prompts) or 'none'}: "
                "give Trainer(initial_resources={'prompt': PromptTemplate(...)}) or FewShot(resource_name=...)"
            )
        wanted = set(prompts[name].placeholders)
        for instruction in self.instructions:
            if set(instruction.placeholders) != wanted:
                raise ConfigError(
                    f"the instruction {instruction.template!r:.80} has the placeholders {sorted(instruction.placeholders)}; "
                    f"the prompt {name!r} has {sorted(wanted)}"
                )
        return name, prompts[name]

    def _demonstration(self, score: Score, tasks: Sequence[Any]) -> str | None:
        """Return a solved task with the model's last answer, as text for a template; None if
        it was not solved.
        """
        if score.result is None or score.failed or score.reward < self.min_reward:
            return None
        calls = [call for call in model_calls(score.result.spans) if not call.failed and call.output_messages]
        if not calls:
            return None
        answer = message_text(calls[-1].output_messages[0].get("content"))
        return PromptTemplate.escape(f"Task: {json.dumps(tasks[score.task], ensure_ascii=False)}\nAnswer: {answer}")

    def _candidates(self, first: PromptTemplate, demonstrations: Sequence[str]) -> list[PromptTemplate]:
        if not demonstrations and not self.instructions:
            raise NoTrainingData(
                f"no training task was solved with a reward of at least {self.min_reward:g} by a recorded model call, "
                "so there is nothing to demonstrate; give easier tasks, a lower min_reward, or instructions="
            )
        chance, templates = random.Random(self.seed), (first, *self.instructions)
        found = {each.template: each for each in templates}
        for number in range(8 * self.n_candidates):
            if len(found) >= self.n_candidates or not demonstrations:
                break
            count = chance.randint(1, min(self.n_demonstrations, len(demonstrations)))
            shown = "\n\n".join(chance.sample(demonstrations, count))
            text = f"{shown}\n\n{templates[number % len(templates)].template}"
            found.setdefault(text, PromptTemplate(template=text))
        return list(found.values())[: self.n_candidates]


def _tasks(name: str, dataset: Dataset[Any] | None) -> list[Any]:
    if dataset is None or not len(dataset):
        raise ConfigError(f"FewShot needs a {name} with at least one task")
    return [dataset[place] for place in range(len(dataset))]
