"""`APO`: improve an agent's prompts by textual gradients (ProTeGi, arXiv:2305.03495) and Thompson sampling.

One step is one round. A model criticises the worst rollouts of each prompt in the beam, and a model rewrites the
prompt. Then the effect of each edit on the reward is estimated from all rewards so far (`EffectModel`). Each candidate
that runs is the best one according to effects that are drawn from their posterior distribution, joined with the best
edits of others (`joining.py`). So a round can add several edits to a prompt, spends few rollouts on bad ones, and
removes an edit that turns out to be useless. The leading candidate replaces the best one if it is ahead after both ran
the same validation tasks. At the end, the best prompts are measured on the whole validation set.

All work of a stage runs at the same time. Random choices depend on the seed, the round and the branch alone, and
answers of the reflection models and scores are stored, so a run that was killed continues to the same end.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leyden._lib.numbers import mean_of
from leyden._lib.options import check_flag, check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.apo.joining import edit_prices, join_edits
from leyden.algorithm.apo.plan import Costs
from leyden.algorithm.apo.round import Round, ignored_warning, reflection_warnings
from leyden.algorithm.apo.search import Search
from leyden.algorithm.apo.writer import PromptWriter
from leyden.algorithm.budget import Budget
from leyden.algorithm.evaluator import Score, Scores
from leyden.algorithm.iterative import IterativeAlgorithm
from leyden.algorithm.own_metrics import means_of
from leyden.algorithm.policy_gradient.step_data import epoch_place
from leyden.algorithm.prompts.candidate import Branch, Candidate, name_to_improve, names_to_improve
from leyden.algorithm.prompts.comparison import Rewards, compare
from leyden.algorithm.prompts.prompt_optimiser import PromptOptimiser, check_counts, check_texts, gather_all
from leyden.algorithm.prompts.records import record_of
from leyden.algorithm.prompts.reflector import ReflectionCounts
from leyden.errors import BudgetExceeded, CheckpointError, ConfigError
from leyden.training import Metrics
from leyden.types import RolloutMode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

_GRADIENT_MODEL, _EDIT_MODEL = "gpt-5-mini", "gpt-4.1-mini"
_STATE = "apo.json"


class APO(PromptOptimiser, IterativeAlgorithm):
    """Improves the prompt templates among the initial resources.

    Costs at most `stages_per_round * candidates_per_stage * gradient_batch_size + val_batch_size` rollouts a round,
    once `2 * (n_val + gradient_batch_size)`, and twice as many calls of the reflection models as a round has
    branches if each first answer can be used.

    async_openai_client: any OpenAI-compatible client, for the reflection models. None: models of the gateway, which
        records these calls with tokens and cost.
    gradient_model: the model that criticises. None: `gpt-5-mini` with a client, otherwise the one model that the
        gateway serves.
    apply_edit_model: the model that rewrites. None: `gpt-4.1-mini` with a client, otherwise the one model that the
        gateway serves.
    diversity_temperature: sampling temperature of the reflection models.
    gradient_batch_size: the number of training tasks that a candidate runs in a stage, the same tasks for all. At most
        two thirds are tasks whose runs the critics of the round have read.
    critic_runs: the number of runs that a critic reads, those first that the fewest critics have read. None:
        `gradient_batch_size`.
    val_batch_size: the number of validation tasks on which a candidate is compared with the best one before it replaces
        it.
    beam_width: the number of prompts that a round rewrites, the best of those that ran in the round before.
    branch_factor: the number of new prompts from each prompt in the beam.
    beam_rounds: number of rounds.
    candidates_per_stage: how many candidates are chosen and run at a time. None: as many as a round has branches,
        `beam_width * branch_factor`.
    stages_per_round: how often a round chooses candidates and runs them, each time after all rewards of the time
        before. More stages need fewer rounds, and so less time, because the reflection models are slower than most
        agents; but they need more rollouts.
    reward_range: the lowest and the highest reward of the agent; None: unknown. A prompt with the highest reward on all
        its tasks is not rewritten. A reward outside the range is logged as a warning.
    rollout_batch_timeout: seconds after which the unfinished rollouts of a batch count as failed.
    run_initial_validation: measure the first prompts on the whole validation set, before round 1.
    gradient_prompt_files, apply_edit_prompt_files: files with requests to the reflection models in place of Leyden's
        own; each branch uses one of them.
    resource_name: the prompt to improve; None: all prompts, those more often whose edits have helped.
    agent_model: the gateway's model that agents are given as `main_llm` if no initial resource is a model; None: the
        one that the gateway serves.
    test_dataset: tasks on which the first and the best prompts are compared when all rounds are done.
    budget: limits the run's rollouts, tokens, cost and time.
    max_prompt_characters: the most characters of a prompt; a longer one is refused.
    agent_version, failed_reward: see `Evaluator`; None: what the trainer knows of the agent.
    seed: seed of the choice of tasks, edits and requests.
    """

    steps_option = "beam_rounds"

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "max_iters": (),
        "val_every_n_iters": (),
        "beam_rounds": ("beam_rounds", "max_iters"),
        "rollout_batch_timeout": ("rollout_batch_timeout",),
    }

    def __init__(
        self,
        async_openai_client: AsyncOpenAI | None = None,
        *,
        gradient_model: str | None = None,
        apply_edit_model: str | None = None,
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        critic_runs: int | None = None,
        candidates_per_stage: int | None = None,
        stages_per_round: int = 1,
        reward_range: tuple[float, float] | None = None,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        gradient_prompt_files: Sequence[str | Path] | None = None,
        apply_edit_prompt_files: Sequence[str | Path] | None = None,
        resource_name: str | None = None,
        agent_model: str | None = None,
        test_dataset: Dataset[Any] | None = None,
        budget: Budget | None = None,
        max_prompt_characters: int = 20_000,
        agent_version: str | None = None,
        failed_reward: float = 0.0,
        seed: int = 0,
        **loop_options: Any,
    ) -> None:
        check_counts(
            gradient_batch_size=gradient_batch_size,
            val_batch_size=val_batch_size,
            beam_width=beam_width,
            branch_factor=branch_factor,
            beam_rounds=beam_rounds,
            stages_per_round=stages_per_round,
        )
        check_number("diversity_temperature", diversity_temperature, at_least=0)
        check_texts(gradient_model=gradient_model, apply_edit_model=apply_edit_model)
        super().__init__(
            async_openai_client,
            reward_range=reward_range,
            rollout_batch_timeout=rollout_batch_timeout,
            resource_name=resource_name,
            agent_model=agent_model,
            test_dataset=test_dataset,
            budget=budget,
            max_prompt_characters=max_prompt_characters,
            agent_version=agent_version,
            failed_reward=failed_reward,
            seed=seed,
            max_iters=beam_rounds,
            val_every_n_iters=1,
            validate_first=run_initial_validation,
            **loop_options,
        )
        check_flag("run_initial_validation", run_initial_validation)
        check_number("critic_runs", critic_runs, at_least=1, whole=True, or_none="gradient_batch_size")
        wanted = "as many as a round has branches"
        check_number("candidates_per_stage", candidates_per_stage, at_least=1, whole=True, or_none=wanted)
        has_client = async_openai_client is not None
        self.diversity_temperature = diversity_temperature
        self.gradient_batch_size, self.val_batch_size = gradient_batch_size, val_batch_size
        self.beam_width, self.branch_factor, self.beam_rounds = beam_width, branch_factor, beam_rounds
        self.critic_runs = critic_runs or gradient_batch_size
        self.candidates_per_stage = candidates_per_stage or beam_width * branch_factor
        self.stages_per_round = stages_per_round
        self.run_initial_validation = run_initial_validation
        self._writer = PromptWriter(
            gradient_model=gradient_model or (_GRADIENT_MODEL if has_client else None),
            apply_edit_model=apply_edit_model or (_EDIT_MODEL if has_client else None),
            critique_files=gradient_prompt_files,
            edit_files=apply_edit_prompt_files,
            max_characters=max_prompt_characters,
            seed=seed,
        )
        self._train: Dataset[Any] = ()
        self._val: Dataset[Any] = ()
        self._sample: list[int] = []
        """The validation tasks on which candidates are compared with the best one."""
        self._names: list[str] = []
        """The prompts to improve, in turn."""
        self._costs = Costs(0, 0, 0, 0)
        self._search = Search([Candidate({})])
        self._round = Round()
        self._read_tasks: list[int] = []
        """The training tasks whose runs the critics of this round read."""
        self._has_warned = False

    # ---- the loop's points -----------------------------------------------------------------------

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Check data sets, prompts, models and budget, and set the search to the user's prompts. Raise ConfigError if
        one of them is missing or too small.
        """
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("APO needs tasks to learn from; pass a train_dataset with at least one")
        if val_dataset is None or not len(val_dataset):
            raise ConfigError("APO needs tasks to compare prompts on; pass a val_dataset with at least one")
        self._train, self._val = train_dataset, val_dataset
        size = min(self.val_batch_size, len(val_dataset))
        self._sample = sorted(random.Random(f"{self.seed}/val").sample(range(len(val_dataset)), size))
        if len(val_dataset) == 1:
            logger.warning("the validation set has one task, too few to compare prompts; give at least ten")
        initial = dict(self.get_initial_resources() or {})
        self._names = names_to_improve(initial, self.resource_name, algorithm="APO")
        models = (self._writer.gradient_model, self._writer.apply_edit_model)
        first = Candidate(await self.open_services(initial, models=models, temperature=self.diversity_temperature))
        self._search, self._has_warned = Search([first]), False
        self._costs = Costs(
            gradient=min(self.gradient_batch_size, len(train_dataset)),
            sample=size,
            val=len(val_dataset),
            test=0 if self.test_dataset is None else len(self.test_dataset),
        )
        self._costs.check(self.collector.budget.rollouts)

    async def step(self, iteration: int) -> Metrics:
        """Do one round: rewrite the beam, run the most promising candidates, compare the leading one with the best."""
        search, self._reflector.counts = self._search, ReflectionCounts()
        n_runs = self._affordable_runs(iteration)
        self._round = Round(planned=n_runs * self._costs.gradient + self._costs.first + 2 * self._costs.sample)
        if n_runs == 0:
            return self._end(iteration, "the budget has no room for another prompt")
        n_branches = min(self.beam_width * self.branch_factor, n_runs)
        n_new = await self._rewrite(iteration, n_branches)
        if not search.measured:
            return self._end(iteration, f"no prompt was measured, because {self._round.exceeded}")
        drawn = await self._run_drawn(iteration, n_runs)
        self._report(iteration, n_new)
        await self._choose(iteration, drawn)
        metrics = {**self._metrics(), "branches": n_branches, "new_prompts": n_new}
        if self.collector.budget.seconds_left == 0:
            return self._end(iteration, "the time of the budget is over", metrics)
        return metrics

    async def validate(self, iteration: int) -> Metrics:
        """Return the reward of the best prompts on the validation tasks on which candidates are compared. If there are
        none yet, measure the first prompts on the whole validation set.
        """
        search, own = self._search, dict[str, float]()
        if search.best is None and await self._try_to_measure(0, "val", range(len(self._val)), iteration):
            await self._accept(0)
            await self._record(0, [0])
            own = means_of(self._round.own)
        return {} if search.best is None else {"reward": self._mean(search.best, self._sample), **own}

    async def save(self, path: Path) -> None:
        state = {"search": self._search.as_json(), "spent": self.collector.budget.spent}
        (path / _STATE).write_text(json.dumps(state))

    async def load(self, path: Path) -> None:
        """Restore the search and the spent budget from a checkpoint. Raise CheckpointError for an older version's."""
        state = json.loads((path / _STATE).read_text())
        if "read" not in state.get("search", {}):
            raise CheckpointError(f"{path} was written by an older Leyden; start a new run, whose scores are reused")
        self.collector.budget.restore(state["spent"])
        self._search = Search.from_json(state["search"])
        if self._search.best is not None:
            self._best = self._search.candidates[self._search.best]

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Do all rounds, measure the best prompts on the whole validation set, compare them with the user's prompts on
        the test set, and return a `PromptResult`.
        """
        await super().run(train_dataset, val_dataset)
        search, everything = self._search, range(len(self._val))
        if search.best is not None and await self._try_to_measure(search.best, "val", everything, self.beam_rounds):
            has_first = len(search.val[0]) == len(everything)
            if has_first and self._mean(0, everything) >= self._mean(search.best, everything):
                await self._accept(0)  # the best ones were better on the compared tasks alone
        rewards: dict[str, Rewards] = {
            candidate.key: search.val[place] for place, candidate in enumerate(search.candidates)
        }
        return await self.result(
            search.candidates[0],
            rewards,
            n_compared=max(1, len(search.measured) - 1),
            expected_reward=search.expected_reward(self.reward_range if self._is_in_range else None),
        )

    # ---- the parts of a round, for users and subclasses ------------------------------------------

    async def evaluate_prompt_on_batch(
        self, prompt: Candidate, tasks: Sequence[Any], mode: RolloutMode = "val", *, keep_until: int | None = None
    ) -> Scores:
        """Return a candidate's scores on tasks. Rollouts unfinished after `rollout_batch_timeout` count as failed.

        mode, keep_until: as of `Evaluator.scores`.
        """
        found: list[Score] = []
        async for score in self.evaluator.scores(
            await self.publish(prompt),
            tasks,
            mode=mode,
            deadline_seconds=self.rollout_batch_timeout,
            keep_until=keep_until,
        ):
            found.append(score)
            self._round.scores += 1
            self._round.failed += score.failed
            self._round.own.append(score.own)
            self.progress(self._round.scores, max(self._round.scores, self._round.planned))
        self.check_rewards(found, "the range is not used from now on")
        return Scores(sorted(found, key=lambda score: score.task))

    async def compute_textual_gradient(
        self, prompt: Candidate, rollouts: Sequence[Score], *, name: str | None = None, place: Branch | None = None
    ) -> str | None:
        """Return a critique of a candidate's prompt by the gradient model; None if it wrote none.

        rollouts: rollouts of the agent with this candidate.
        name: the name of the prompt; None: the first one to improve.
        place: the position in the search under which the answer is kept for a resumed run; None: it is not kept.
        """
        return await self._writer.criticise(self._reflector, prompt, name or self._names[0], rollouts, place)

    async def textual_gradient_and_apply_edit(
        self, prompt: Candidate, rollouts: Sequence[Score], *, name: str | None = None, place: Branch | None = None
    ) -> Candidate | None:
        """Return a new candidate with the prompt rewritten by the edit model after a critique; None if no text can be
        used.

        A text is refused if it has lost or invented a placeholder, is too long, or was tried before. The arguments are
        those of `compute_textual_gradient`.
        """
        name = name or self._names[0]
        critique = await self.compute_textual_gradient(prompt, rollouts, name=name, place=place)
        if critique is None:
            return None
        resources = await self.publish(prompt)
        version = (resources.resources_id, resources.version)
        known = self._search.known
        return await self._writer.rewrite(self._reflector, prompt, name, critique, place, version=version, known=known)

    # ---- one round -------------------------------------------------------------------------------

    def _affordable_runs(self, iteration: int) -> int:
        """Return how many candidates the budget allows in all stages of this round together, at their mean cost so far.

        The decision is written to the journal, so that a resumed round has as many candidates as before.
        """
        wanted, left = self.candidates_per_stage * self.stages_per_round, self.collector.budget.rollouts_expected
        if left is None:
            return wanted
        place = f"{iteration}/branches"
        if (decided := self._journal.get(place)) is None:
            decided = str(self._costs.affordable(wanted, left, self._search))
            self._journal.add(place, decided, purpose="budget")
        return int(decided)

    def _turns(self, start: int, count: int) -> list[int]:
        return [epoch_place(len(self._train), turn, self.seed) for turn in range(start, start + count)]

    async def _rewrite(self, iteration: int, n_branches: int) -> int:
        search = self._search
        if not search.train[0]:
            await self._try_to_measure(0, "train", self._turns(0, self._costs.first), iteration)
        parents = [search.beam[branch % len(search.beam)] for branch in range(n_branches)]
        places = [Branch(iteration, branch) for branch in range(n_branches)]
        read = [self._read(*each) for each in zip(places, parents, strict=True)]
        self._read_tasks = list(dict.fromkeys(task for tasks in read for task in tasks))
        children = await gather_all([self._branch(*each) for each in zip(places, parents, read, strict=True)])
        pairs = zip(children, parents, strict=True)
        return sum(search.add(child, parent) for child, parent in pairs if child is not None)

    async def _run_drawn(self, iteration: int, n_runs: int) -> list[int]:
        """Run at most `n_runs` promising candidates, and make the best the next beam. Return the ones that ran."""
        search, ran = self._search, dict[int, None]()
        for stage, start in enumerate(range(0, n_runs, self.candidates_per_stage)):
            drawn = await self._draw(iteration, stage, min(self.candidates_per_stage, n_runs - start))
            batch = self._batch(iteration, stage)
            await gather_all([self._try_to_measure(index, "train", batch, iteration) for index in drawn])
            ran.update(dict.fromkeys(drawn))
        # The user's prompt, if the budget allowed none of the drawn candidates to run.
        search.beam = search.ranked([index for index in ran if search.train[index]])[: self.beam_width] or [0]
        return list(ran)

    def _batch(self, iteration: int, stage: int) -> list[int]:
        """Return some training tasks whose runs the round's critics have read, because an edit shows there first what
        it is worth, and new ones.
        """
        size = self._costs.gradient
        n_read = size * 2 // 3
        read = self._read_tasks[stage * n_read : (stage + 1) * n_read]
        new = self._turns(self._costs.first + (iteration * self.stages_per_round + stage) * size, size)
        return [*read, *(task for task in new if task not in read)][:size]

    async def _draw(self, iteration: int, stage: int, count: int) -> list[int]:
        """Return the numbers of the candidates that run next, at most `count`, by Thompson sampling.

        For each, draw the effects of all edits, take the candidate that is the best with these effects, and join it
        with the edits that are worth their length.
        """
        search, model, drawn = self._search, self._search.effects(), list[int]()
        rng, prices = random.Random(f"{self.seed}/{iteration}/{stage}"), edit_prices(search, model.deviation)
        for branch in range(count):
            effects = model.draw(rng)
            best_first = sorted(range(len(search.candidates)), key=lambda index: -effects.value(search.edits[index]))
            joined = join_edits(search, best_first[0], effects, prices, max_characters=self.max_prompt_characters)
            version = await self.publish(search.candidates[joined.parent])
            candidate = joined.candidate(
                search,
                Branch(iteration, stage * self.candidates_per_stage + branch),
                (version.resources_id, version.version),
            )
            search.add(candidate, joined.parent, joined.edits)
            index = [each.key for each in search.candidates].index(candidate.key)
            if index in drawn:
                index = next((each for each in best_first if each not in drawn), None)
            drawn += [] if index is None else [index]
        return drawn

    def _read(self, place: Branch, parent: int) -> list[int]:
        """Return the training tasks whose runs by `parent` a branch's critic reads, and count them as read."""
        highest = self.reward_range[1] if self.reward_range and self._is_in_range else None
        tasks = self._search.worst_tasks(parent, self.critic_runs, f"{self.seed}/{place}", highest=highest)
        counts = self._search.read[parent]
        counts.update({task: counts.get(task, 0) + 1 for task in tasks})
        return tasks

    async def _branch(self, place: Branch, parent: int, tasks: Sequence[int]) -> Candidate | None:
        search, candidate = self._search, self._search.candidates[parent]
        slot = place.round * self.beam_width * self.branch_factor + place.branch
        successes = search.successes() if len(self._names) > 1 else {}
        name = name_to_improve(self._names, successes, slot, f"{self.seed}/{place}")
        if not tasks:
            logger.info("round %d, branch %d: the prompt has solved all tasks", place.round + 1, place.branch + 1)
            return None
        try:
            seen = await self.evaluator.evaluate(  # these rollouts are in the store
                await self.publish(candidate),
                [self._train[task] for task in tasks],
                mode="train",
                deadline_seconds=self.rollout_batch_timeout,
                keep_until=self.beam_rounds + 1,
            )
            return await self.textual_gradient_and_apply_edit(candidate, seen.scores, name=name, place=place)
        except BudgetExceeded as error:
            logger.info("round %d, branch %d: %s", place.round + 1, place.branch + 1, error)
            self._round.exceeded = str(error)
            return None

    async def _try_to_measure(self, index: int, mode: RolloutMode, tasks: Sequence[int], iteration: int) -> bool:
        """Measure a candidate on tasks for which it has no reward yet. Return whether the budget was enough."""
        data, rewards = (self._train, self._search.train) if mode == "train" else (self._val, self._search.val)
        missing = [task for task in dict.fromkeys(tasks) if task not in rewards[index]]
        if not missing:
            return True
        keep_until = self.beam_rounds + 1 if mode == "train" else iteration + 1  # a critic may read it later
        try:
            scores = await self.evaluate_prompt_on_batch(
                self._search.candidates[index], [data[task] for task in missing], mode, keep_until=keep_until
            )
        except BudgetExceeded as error:
            logger.info("round %d: a prompt is not measured: %s", iteration + 1, error)
            self._round.exceeded = str(error)
            return False
        rewards[index].update(zip(missing, scores.by_task, strict=True))
        return True

    async def _choose(self, iteration: int, drawn: Sequence[int]) -> None:
        """Compare the most promising candidate with the best so far on validation tasks. Accept it if it is ahead."""
        search, before = self._search, self._search.best
        leader = search.ranked(search.measured)[0]
        if leader != before:
            compared = [leader] if before is None else [leader, before]
            have = await gather_all([self._try_to_measure(each, "val", self._sample, iteration) for each in compared])
            if all(have) and search.ranked(compared)[0] == leader:
                if before is not None:
                    rewards = [{task: search.val[each][task] for task in self._sample} for each in (before, leader)]
                    comparison = compare(*rewards, n_compared=max(1, len(search.measured) - 1))
                    self._round.comparison = comparison
                    logger.info("round %d: a better prompt, by %s", iteration + 1, comparison)
                await self._accept(leader)
        ran = {*drawn, leader, *([0] if iteration == 0 else [])}
        await self._record(iteration + 1, [place for place in search.measured if place in ran])

    async def _accept(self, index: int) -> None:
        self._search.best = index
        await self.accept(self._search.candidates[index])

    async def _record(self, round_: int, indices: Sequence[int]) -> None:
        search, values = self._search, self._search.bounded_values()
        records = [
            record_of(
                search.candidates[index],
                await self.publish(search.candidates[index]),
                reward=values[index],
                tasks=len(search.rewards(index)),
                kept=index in search.beam,
                accepted=index == search.best,
                comparison=self._round.comparison,
            )
            for index in indices
        ]
        await self.record(round_, records)

    def _mean(self, index: int, tasks: Sequence[int]) -> float:
        rewards = self._search.val[index]
        return mean_of(rewards[task] for task in tasks)

    def _end(self, iteration: int, why: str, metrics: Metrics | None = None) -> Metrics:
        logger.warning("the run ends after round %d with its best prompt: %s", iteration + 1, why)
        self._loop.stop()
        return metrics or self._metrics()

    def _report(self, iteration: int, n_new: int) -> None:
        counts = self._reflector.counts
        warnings = reflection_warnings(iteration + 1, counts, n_new)
        if not self._has_warned and (ignored := ignored_warning(self._search, self._names)):
            self._has_warned = True
            warnings.append(ignored)
        for warning in warnings:
            logger.warning("%s", warning)
        counts.check(f"round {iteration + 1}")

    def _metrics(self) -> Metrics:
        measured = self._search.measured
        values = self._search.bounded_values() if measured else []
        rewards = {"reward": max(values[index] for index in measured)} if measured else {}
        counts = {**self._round.metrics(), **self._reflector.counts.metrics()}
        return {**rewards, **counts, **self.collector.budget.metrics()}
