"""`APO`: improve an agent's prompts by textual gradients and beam search (ProTeGi,
arXiv:2305.03495).

One step is one round: each branch runs a parent prompt on a few tasks, has a model criticise
what the agent did, and has a model rewrite the prompt. The new prompts and the beam are measured
on the same validation tasks, and the best of them are the next beam. All branches of a round run
at the same time. What depends on chance depends on the seed, the round and the branch alone,
answers of the reflection model are kept, and scores are kept by content, so a killed run
continues to the same end. The best prompts are measured on the whole validation set at the end.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.algorithm.apo.plan import DRAWS, Costs
from leyden.algorithm.apo.round import Round, ignored_warning, reflection_warnings
from leyden.algorithm.apo.search import Search
from leyden.algorithm.apo.writer import PromptWriter
from leyden.algorithm.base import Dataset
from leyden.algorithm.budget import Budget
from leyden.algorithm.evaluator import Score, Scores
from leyden.algorithm.iterative import IterativeAlgorithm
from leyden.algorithm.policy_gradient.batch import epoch_place
from leyden.algorithm.prompts.base import PromptOptimiser, gather_all
from leyden.algorithm.prompts.candidate import Branch, Candidate, names_to_improve, ranked
from leyden.algorithm.prompts.comparison import compare
from leyden.algorithm.prompts.options import check_shared_options
from leyden.algorithm.prompts.records import record_of
from leyden.algorithm.prompts.reflector import ReflectionCounts
from leyden.errors import BudgetExceeded, ConfigError
from leyden.loop import Metrics
from leyden.options import check_flag
from leyden.types import RolloutMode

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

_GRADIENT_MODEL, _EDIT_MODEL = "gpt-5-mini", "gpt-4.1-mini"
_STATE = "apo.json"


class APO(PromptOptimiser, IterativeAlgorithm):
    """Improves the prompt templates among the initial resources.

    Costs `beam_width * branch_factor * (2 * gradient_batch_size + val_batch_size)` rollouts a round
    and `2 * n_val` in all at most, and twice as many calls of the reflection models as a round has
    branches.

    async_openai_client: any OpenAI-compatible client, for the reflection models. None: models of
        the gateway, which records these calls with tokens and cost.
    gradient_model: the model that criticises. None: `gpt-5-mini` with a client, otherwise the one
        model that the gateway serves.
    apply_edit_model: the model that rewrites. None: `gpt-4.1-mini` with a client, otherwise the one
        model that the gateway serves.
    diversity_temperature: sampling temperature of the reflection models.
    gradient_batch_size: training tasks on which a branch runs its parent; twice as
        many if it solves all.
    val_batch_size: validation tasks on which all candidates are compared, the same in each round.
    beam_width: prompts that survive a round.
    branch_factor: new prompts of each prompt in the beam.
    beam_rounds: number of rounds.
    rollout_batch_timeout: seconds after which the unfinished rollouts of a batch count as failed.
    run_initial_validation: measure the first prompts on the whole validation set, before round 1.
    gradient_prompt_files, apply_edit_prompt_files: files with requests to the reflection models in
        place of Leyden's own; each branch uses one of them.
    resource_name: the prompt to improve; None: all prompts, and more often the ones whose
        edits have helped.
    agent_model: the gateway's model that agents are given as `main_llm` if no initial resource is a
        model; None: the one that the gateway serves.
    test_dataset: tasks on which the first and the best prompts are compared when
        all rounds are done.
    budget: limits the run's rollouts, tokens, cost and time.
    max_prompt_characters: the most characters of a prompt; a longer one is refused.
    agent_version, failed_reward: see `Evaluator`; None: what the trainer knows of the agent.
    seed: seed of the choice of tasks, parents and requests.
    """

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
        check_shared_options(
            client=async_openai_client,
            counts={
                "gradient_batch_size": gradient_batch_size,
                "val_batch_size": val_batch_size,
                "beam_width": beam_width,
                "branch_factor": branch_factor,
                "beam_rounds": beam_rounds,
                "max_prompt_characters": max_prompt_characters,
            },
            temperature=("diversity_temperature", diversity_temperature),
            names={
                "gradient_model": gradient_model,
                "apply_edit_model": apply_edit_model,
                "agent_model": agent_model,
                "resource_name": resource_name,
            },
            rollout_batch_timeout=rollout_batch_timeout,
            test_dataset=test_dataset,
            budget=budget,
            agent_version=agent_version,
            failed_reward=failed_reward,
            seed=seed,
        )
        check_flag("run_initial_validation", run_initial_validation)
        super().__init__(
            max_iters=beam_rounds, val_every_n_iters=1, validate_first=run_initial_validation, **loop_options
        )
        self.configure(
            async_openai_client,
            resource_name=resource_name,
            agent_model=agent_model,
            test_dataset=test_dataset,
            budget=budget,
            agent_version=agent_version,
            failed_reward=failed_reward,
            evaluation_seconds=rollout_batch_timeout,
        )
        has_client = async_openai_client is not None
        self.diversity_temperature = diversity_temperature
        self.gradient_batch_size, self.val_batch_size = gradient_batch_size, val_batch_size
        self.beam_width, self.branch_factor, self.beam_rounds = beam_width, branch_factor, beam_rounds
        self.rollout_batch_timeout, self.run_initial_validation = rollout_batch_timeout, run_initial_validation
        self.max_prompt_characters, self.seed = max_prompt_characters, seed
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
        """The validation tasks on which all candidates are compared."""
        self._names: list[str] = []
        """The prompts to improve, in turn."""
        self._costs = Costs(0, 0, 0, 0)
        self._search = Search(Candidate({}))
        self._round = Round()

    # ---- the loop's points -----------------------------------------------------------------------

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Validate data, prompts, models and budget, and start the search from
        the user's prompts.
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
        self._search = Search(
            Candidate(await self.open_services(initial, models=models, temperature=self.diversity_temperature))
        )
        self._costs = Costs(
            gradient=min(self.gradient_batch_size, len(train_dataset)),
            sample=size,
            val=len(val_dataset),
            test=0 if self.test_dataset is None else len(self.test_dataset),
        )
        self._costs.check(self.collector.budget.rollouts)

    async def step(self, iteration: int) -> Metrics:
        """Do one round: branch, measure, choose."""
        search, self._reflector.counts = self._search, ReflectionCounts()
        n_branches = self._affordable_branches(iteration)
        self._round = Round(planned=n_branches * self._costs.branch, known_rewards=search.extremes)
        parents = self._parents(iteration)
        branches = [
            self._branch(Branch(iteration, place), parents[place % len(parents)]) for place in range(n_branches)
        ]
        measurements = [self._try_to_measure(each, self._sample, iteration) for each in search.beam]
        found = [each for each in await gather_all([*branches, *measurements]) if isinstance(each, Candidate)]
        candidates = [each for each in (*search.beam, *found) if search.has(each, self._sample)]
        if not candidates:
            return self._end(iteration, f"no prompt was measured, because {self._round.exceeded}")
        candidates = ranked(candidates, {each.key: search.mean(each, self._sample) for each in candidates})
        new = [each for each in candidates if each.round == iteration + 1]
        self._report(iteration, candidates, len(new))
        await self._choose(iteration, candidates, new)
        metrics = {**self._metrics(), "branches": n_branches, "new_prompts": len(new)}
        if n_branches == 0:
            return self._end(iteration, "the budget has no room for another prompt", metrics)
        if self.collector.budget.seconds_left == 0:
            return self._end(iteration, "the time of the budget is over", metrics)
        return metrics

    async def validate(self, iteration: int) -> Metrics:
        """Return the reward of the best prompts on the tasks on which all prompts are compared.

        Before any prompts were compared, measure the first ones on the whole validation set.
        """
        search = self._search
        if search.best is None and await self._try_to_measure(search.first, range(len(self._val)), iteration):
            search.best = search.first
            await self.accept(search.first)
            await self._record(0, [search.first], accepted=search.first)
        return {} if search.best is None else {"reward": search.mean(search.best, self._sample)}

    async def save(self, path: Path) -> None:
        """Write the beam, the best prompts and their rewards."""
        state = {**self._search.as_json(), "spent": self.collector.budget.spent}
        (path / _STATE).write_text(json.dumps(state))

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote."""
        state = json.loads((path / _STATE).read_text())
        self.collector.budget.restore(state.pop("spent"))
        self._search = Search.from_json(state)
        self._best = self._search.best

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Do all rounds, measure the best prompts on the whole validation set, compare on the test
        set, and return a `PromptResult`.
        """
        await super().run(train_dataset, val_dataset)
        search, everything = self._search, range(len(self._val))
        if search.best is not None and await self._try_to_measure(search.best, everything, self.beam_rounds):
            first = search.first
            if search.has(first, everything) and search.mean(first) > search.mean(search.best):
                search.best = first  # the best ones were better on the compared tasks alone
                await self.accept(first)
        return await self.result(search.first, dict(search.rewards), n_compared=max(1, len(search.known) - 1))

    # ---- the parts of a round, for users and subclasses ------------------------------------------

    async def evaluate_prompt_on_batch(
        self, prompt: Candidate, tasks: Sequence[Any], mode: RolloutMode = "val", *, keep_until: int | None = None
    ) -> Scores:
        """Return the scores of a candidate on tasks; what is unfinished after
        `rollout_batch_timeout` counts as failed.
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
            self.progress(self._round.scores, max(self._round.scores, self._round.planned))
        return Scores(sorted(found, key=lambda score: score.task))

    async def compute_textual_gradient(
        self, prompt: Candidate, rollouts: Sequence[Score], *, name: str | None = None, place: Branch | None = None
    ) -> str | None:
        """Return a critique of a candidate's prompt by the gradient model; None if it wrote none.

        rollouts: what the agent did with it. name: of the prompt; None: the first to improve.
        place: under which the answer is kept for a resumed run; None: it is not kept.
        """
        return await self._writer.criticise(self._reflector, prompt, name or self._names[0], rollouts, place)

    async def textual_gradient_and_apply_edit(
        self, prompt: Candidate, rollouts: Sequence[Score], *, name: str | None = None, place: Branch | None = None
    ) -> Candidate | None:
        """Return a new candidate: the prompt, rewritten by the edit model after a critique; None if
        there is none to use.

        A text that lost or invented a placeholder, is too long or known is refused. The arguments
        are those of `compute_textual_gradient`.
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

    def _affordable_branches(self, iteration: int) -> int:
        """Return how many branches the rollouts that are left allow, at their highest cost.

        Tokens and cost allow about as many rollouts as they have paid for so far. A resumed round
        has as many branches as it began with.
        """
        wanted, left = self.beam_width * self.branch_factor, self.collector.budget.rollouts_expected
        if left is None:
            return wanted
        place = f"{iteration}/branches"
        if (decided := self._journal.get(place)) is None:
            decided = str(self._costs.affordable(wanted, left, self._search))
            self._journal.add(place, decided, purpose="budget")
        return int(decided)

    def _parents(self, iteration: int) -> list[Candidate]:
        """Return `beam_width` parents: the beam in random order, repeated if it has fewer."""
        beam = self._search.beam
        order = random.Random(f"{self.seed}/{iteration}/parents").sample(beam, len(beam))
        return [order[place % len(order)] for place in range(self.beam_width)]

    async def _branch(self, place: Branch, parent: Candidate) -> Candidate | None:
        """Run a parent, rewrite its prompt, and measure the new one; None if there is none."""
        slot = place.round * self.beam_width * self.branch_factor + place.branch
        size = self._costs.gradient
        n_slots = self.beam_rounds * self.beam_width * self.branch_factor
        name = self._search.name_to_improve(self._names, slot, f"{self.seed}/{place}")
        try:
            for draw in range(DRAWS):
                turns = range((draw * n_slots + slot) * size, (draw * n_slots + slot + 1) * size)
                tasks = [self._train[epoch_place(len(self._train), turn, self.seed)] for turn in turns]
                scores = await self.evaluate_prompt_on_batch(parent, tasks, "train", keep_until=place.round + 1)
                if not self._round.shows_nothing(scores):
                    break
            else:
                logger.info("round %d, branch %d: the prompt has solved all tasks", place.round + 1, place.branch + 1)
                return None
            child = await self.textual_gradient_and_apply_edit(parent, scores.scores, name=name, place=place)
        except BudgetExceeded as error:
            logger.info("round %d, branch %d: %s", place.round + 1, place.branch + 1, error)
            self._round.exceeded = str(error)
            return None
        if child is None or not await self._try_to_measure(child, self._sample, place.round):
            return None
        self._round.edits.append((name, parent.key, child.key))
        return child

    async def _try_to_measure(self, candidate: Candidate, tasks: Sequence[int], iteration: int) -> bool:
        """Have the candidate's rewards on validation tasks; return whether the budget was enough.

        Rewards that are there already cost nothing.
        """
        missing = [task for task in tasks if not self._search.has(candidate, [task])]
        if not missing:
            return True
        try:
            scores = await self.evaluate_prompt_on_batch(
                candidate, [self._val[task] for task in missing], keep_until=iteration + 1
            )
        except BudgetExceeded as error:
            logger.info("round %d: a prompt is not measured: %s", iteration + 1, error)
            self._round.exceeded = str(error)
            return False
        self._search.add(candidate, dict(zip(missing, scores.by_task, strict=True)))
        return True

    async def _choose(self, iteration: int, candidates: Sequence[Candidate], new: Sequence[Candidate]) -> None:
        """Make the next beam of the first candidates, and keep the first one if it
        beats the best one.
        """
        search, leader = self._search, candidates[0]
        before, search.beam = search.best, list(candidates[: self.beam_width])
        search.count_edits(self._round.edits, self._sample)
        if before is None:
            search.best = leader
        elif leader.key != before.key:
            rewards = [{task: search.rewards[each.key][task] for task in self._sample} for each in (before, leader)]
            comparison = compare(*rewards, n_compared=max(1, len(new)))
            if comparison.difference.mean > 0:
                self._round.comparison = comparison
                search.best = leader
                logger.info("round %d: a better prompt, by %s", iteration + 1, comparison)
        if search.best is leader:
            await self.accept(leader)
        await self._record(iteration + 1, new, accepted=leader if search.best is leader else None)
        search.forget_rest(candidates)

    async def _record(self, round_: int, measured: Sequence[Candidate], *, accepted: Candidate | None) -> None:
        search = self._search
        records = [
            record_of(
                each,
                await self.publish(each),
                search.rewards[each.key],
                kept=each in search.beam,
                accepted=each is accepted,
                comparison=self._round.comparison,
            )
            for each in measured
        ]
        await self.record(round_, records)

    def _end(self, iteration: int, why: str, metrics: Metrics | None = None) -> Metrics:
        """End the run after this round, with the best prompts so far."""
        logger.warning("the run ends after round %d with its best prompt: %s", iteration + 1, why)
        self._loop.stop()
        return metrics or self._metrics()

    def _report(self, iteration: int, candidates: Sequence[Candidate], n_new: int) -> None:
        """Warn of a round that could not work.

        Raise ReflectionFailed if the reflection models are away.
        """
        counts = self._reflector.counts
        warnings = reflection_warnings(iteration + 1, counts, n_new)
        if iteration == 0 and (ignored := ignored_warning(candidates, self._search, self._sample, self._names)):
            warnings.append(ignored)
        for warning in warnings:
            logger.warning("%s", warning)
        counts.check(f"round {iteration + 1}")

    def _metrics(self) -> Metrics:
        search = self._search
        leader = search.beam[0]
        rewards = {"reward": search.mean(leader, self._sample)} if search.has(leader, self._sample) else {}
        counts = {**self._round.metrics(), **self._reflector.counts.metrics()}
        return {**rewards, **counts, **self.collector.budget.metrics()}
