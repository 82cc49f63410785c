"""`FewShot`: an algorithm written with `@algo`, explained in docs/algorithm-zoo/few-shot.md."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number
from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import message_text
from leyden.algorithm.decorator import FunctionalAlgorithm, algo
from leyden.algorithm.evaluator import Evaluator, Score
from leyden.algorithm.prompts.candidate import names_to_improve
from leyden.algorithm.prompts.comparison import PromptResult, compare
from leyden.algorithm.prompts.records import best_label
from leyden.algorithm.prompts.texts import problem_with
from leyden.errors import ConfigError, NoTrainingData
from leyden.types import PromptTemplate


def FewShot(  # noqa: N802 -- it is used like the algorithms that are classes
    *,
    n_candidates: int = 16,
    n_demonstrations: int = 4,
    instructions: Sequence[str] = (),
    min_reward: float = 1.0,
    resource_name: str | None = None,
    seed: int = 0,
) -> FunctionalAlgorithm:
    """Return a search of instructions and demonstrations by successive halving (arXiv:1502.07943).

    n_candidates: prompts that are compared.
    n_demonstrations: most demonstrations in one prompt.
    instructions: further templates with the placeholders of the given prompt, tried in turn.
    min_reward: a rollout with at least this reward is a demonstration.
    resource_name: the prompt to improve; None: the first.
    seed: of the choice of demonstrations.
    """
    check_number("n_candidates", n_candidates, at_least=2, whole=True)
    check_number("n_demonstrations", n_demonstrations, at_least=1, whole=True)
    check_number("min_reward", min_reward)

    @algo
    async def few_shot(
        *, evaluator: Evaluator, store: Any, initial_resources: Any, train_dataset: Any, val_dataset: Any
    ) -> PromptResult:
        resources, train, val = dict(initial_resources or {}), list(train_dataset or ()), list(val_dataset or ())
        if not train or not val:
            raise ConfigError("FewShot needs a train_dataset and a val_dataset, each with at least one task")
        name = names_to_improve(resources, resource_name, algorithm="FewShot")[0]
        first, evaluator.watched_prompts = resources[name], [name]
        for text in instructions:
            if problem := problem_with(text, first, max_characters=len(text)):
                raise ConfigError(f"the instruction {text!r:.80} cannot be used: {problem}")
        resources = dict(await few_shot.with_model(resources))

        async def scores(text: str, tasks: Sequence[Any], mode: Any = "val") -> Sequence[Score]:
            version = await evaluator.publish({**resources, name: PromptTemplate(template=text)})
            return (await evaluator.evaluate(version, tasks, mode=mode)).scores

        solved = [each for each in await scores(first.template, train, "train") if each.reward >= min_reward]
        shown = [text for each in solved if (text := _demonstration(each, train)) is not None]
        if not shown and not instructions:
            raise NoTrainingData(
                f"no training task was solved with a reward of at least {min_reward:g} by a recorded model call: "
                "give easier tasks, a lower min_reward, or instructions="
            )
        rng, texts = random.Random(seed), dict.fromkeys(templates := [first.template, *instructions])
        for number in range(8 * n_candidates if shown else 0):
            chosen = rng.sample(shown, rng.randint(1, min(n_demonstrations, len(shown))))
            texts["\n\n".join([*chosen, templates[number % len(templates)]])] = None
        # Successive halving: each round doubles the validation tasks and keeps the better half of the prompts.
        left, size = list(texts)[:n_candidates], max(1, len(val) // 4)
        while len(left) > 1:
            found = await asyncio.gather(*(scores(text, val[:size]) for text in left))
            sums = {text: sum(score.reward for score in each) for text, each in zip(left, found, strict=True)}
            keep = 1 if size >= len(val) else max(1, len(left) // 2)
            left, size = sorted(left, key=lambda text: -sums[text])[:keep], min(len(val), 2 * size)
        both = await asyncio.gather(scores(first.template, val), scores(left[0], val))
        before, after = ({each.task: each.reward for each in found} for found in both)
        change = compare(before, after, n_compared=min(n_candidates, len(texts)) - 1)
        is_better, reward = change.difference.mean > 0, max(mean_of(before.values()), mean_of(after.values()))
        best = PromptTemplate(template=left[0]) if is_better else first
        version = await evaluator.publish({**resources, name: best})
        await store.set_label(best_label(few_shot.get_run().run_id), version.resources_id, version.version)
        return PromptResult({name: best}, version.resources_id, version.version, reward, change if is_better else None)

    return few_shot


def _demonstration(score: Score, tasks: Sequence[Any]) -> str | None:
    calls = [each for each in model_calls(score.result.spans if score.result else []) if each.output_messages]
    if score.failed or not calls or calls[-1].failed:
        return None
    answer = message_text(calls[-1].output_messages[0].get("content"))
    return PromptTemplate.escape(f"Task: {json.dumps(tasks[score.task], ensure_ascii=False)}\nAnswer: {answer}")
