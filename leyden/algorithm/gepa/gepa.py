"""`GEPA`: improve an agent's prompts by reflection and a Pareto front over tasks (arXiv:2507.19457).

The search is that of the package `gepa`, which runs in its own thread. A resource is a *component* in its words, and a
rollout a *trajectory*. Every rollout and every answer of the reflection model is recorded, and all random choices
follow from the seed. So a run that was killed starts again from its seed, uses the recorded answers until it reaches
the point of the kill, and ends with the same prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_choice, check_flag, check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.budget import Budget
from leyden.algorithm.evaluator import Score
from leyden.algorithm.gepa import adapter
from leyden.algorithm.gepa.adapter import Item, Proposal, ReflectionTask, Texts
from leyden.algorithm.gepa.bridge import Bridge, Stopped
from leyden.algorithm.gepa.race import Race, common_stages, stages
from leyden.algorithm.own_metrics import means_of
from leyden.algorithm.prompts.candidate import Branch, Candidate, name_to_improve, names_to_improve
from leyden.algorithm.prompts.comparison import Comparison, PromptResult, compare
from leyden.algorithm.prompts.prompt_optimiser import PromptOptimiser, check_counts, check_texts, gather_all
from leyden.algorithm.prompts.proposed_prompts import proposed_prompt
from leyden.algorithm.prompts.records import record_of
from leyden.algorithm.prompts.reflector import ReflectionCounts
from leyden.algorithm.prompts.texts import braced, placeholders_of
from leyden.errors import BudgetExceeded, ConfigError
from leyden.statistics import EffectModel
from leyden.types import PromptTemplate

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

_MODEL = "gpt-5-mini"
_FAILED_STEPS = 3
"""The run ends after this many steps in a row in which all reflection calls failed."""


class GEPA(PromptOptimiser):
    """Improves the prompt templates among the initial resources. Needs the extra `gepa`.

    A step runs a candidate (the parent) on a few training tasks, lets a model read the rollouts and rewrite one of its
    prompts, and runs the new candidate on the same tasks. If the new one did better, it is measured on the validation
    set. The parent is one that is the best on some validation task, or the best candidate so far.

    async_openai_client: any OpenAI-compatible client, for the reflection model. None: a model of the gateway, which
        records these calls with tokens and cost.
    reflection_model: the model that rewrites. None: `gpt-5-mini` with a client, otherwise the one model that the
        gateway serves.
    reflection_temperature: sampling temperature of the reflection model.
    reflection_prompt_file: the request to the reflection model, with `<curr_param>` for the prompt and `<side_info>`
        for the rollouts; None: the request of the package `gepa`.
    max_steps: number of steps.
    proposals_per_step: the number of new candidates of a step, which are written and measured at the same time.
    minibatch_size: the number of training tasks on which a candidate and its parent are compared.
    candidate_selection: how the parent is chosen. "pareto", "current_best", "epsilon_greedy" and "top_k_pareto" are
        strategies of the package `gepa`, which measure candidates on the whole validation set, unless the race stops
        them. "leader": the best candidate so far is always the parent, and a new one is measured on a quarter, half or
        all of the validation set, until it is ahead of the leader or below it.
    component_selection: which of several prompts of a candidate is rewritten. "round_robin" takes each in turn.
        "success" prefers prompts whose rewriting has raised the reward, by Thompson sampling. "all" rewrites each, with
        a call of the reflection model for each.
    frontier: what a candidate can be the best in: an "instance" (a task), an "objective" (a dimension of the reward),
        "hybrid" (both) or "cartesian" (each dimension of each task). With "leader", only "instance" is possible. The
        race uses only the primary reward.
    use_merge: also join two candidates that improved different prompts; not with "leader".
    race_error: the probability with which a candidate as good as the best may be stopped before it is measured on the
        whole validation set; None: no candidate is stopped.
    reward_range: the lowest and the highest reward of the agent. A training batch with only the highest reward teaches
        nothing, and is skipped.
    rollout_batch_timeout: seconds after which the unfinished rollouts of a batch count as failed.
    resource_name: the prompt to improve; None: all.
    agent_model: the gateway's model that agents are given as `main_llm` if no initial resource is a model; None: the
        one that the gateway serves.
    test_dataset: tasks on which the first and the best prompts are compared at the end.
    budget: limits the run's rollouts, tokens, cost and time.
    max_prompt_characters: the most characters of a prompt; a longer one is refused.
    agent_version: a text that changes whenever the agent's results may change, so that rewards of equal prompts are
        reused; None: the version that the trainer finds.
    failed_reward: the reward of a rollout that failed, and, with another `frontier` than "instance", of one whose
        reward lacks a dimension that the rewards of others have, in that dimension.
    seed: seed of the choice of tasks and parents, and of the order of validation tasks.
    """

    holds_runners = True  # until the address of this process's gateway is in the store, which queued rollouts need

    resumable = True

    steps_option = "max_steps"

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "max_steps": ("max_steps",),
        "rollout_batch_timeout": ("rollout_batch_timeout",),
    }

    def __init__(
        self,
        async_openai_client: AsyncOpenAI | None = None,
        *,
        reflection_model: str | None = None,
        reflection_temperature: float = 1.0,
        reflection_prompt_file: str | Path | None = None,
        max_steps: int = 50,
        proposals_per_step: int = 1,
        minibatch_size: int = 3,
        candidate_selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto", "leader"] = "pareto",
        component_selection: Literal["round_robin", "success", "all"] = "round_robin",
        frontier: Literal["instance", "objective", "hybrid", "cartesian"] = "instance",
        use_merge: bool = False,
        race_error: float | None = 0.05,
        reward_range: tuple[float, float] = (0.0, 1.0),
        rollout_batch_timeout: float = 3600.0,
        resource_name: str | None = None,
        agent_model: str | None = None,
        test_dataset: Dataset[Any] | None = None,
        budget: Budget | None = None,
        max_prompt_characters: int = 20_000,
        agent_version: str | None = None,
        failed_reward: float = 0.0,
        seed: int = 0,
    ) -> None:
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
        )
        if self.reward_range is None:
            raise ConfigError("reward_range is None; give the lowest and the highest reward, as (0.0, 1.0)")
        check_counts(max_steps=max_steps, proposals_per_step=proposals_per_step, minibatch_size=minibatch_size)
        check_number("reflection_temperature", reflection_temperature, at_least=0)
        check_texts(reflection_model=reflection_model)
        check_number("race_error", race_error, above=0, at_most=0.5, or_none="no race")
        check_flag("use_merge", use_merge)
        selections = ("pareto", "current_best", "epsilon_greedy", "top_k_pareto", "leader")
        check_choice("candidate_selection", candidate_selection, selections)
        if use_merge and candidate_selection == "leader":
            raise ConfigError(
                "use_merge=True joins candidates of a Pareto front, and candidate_selection='leader' keeps none; "
                "give candidate_selection='pareto'"
            )
        check_choice("component_selection", component_selection, ("round_robin", "success", "all"))
        check_choice("frontier", frontier, ("instance", "objective", "hybrid", "cartesian"))
        if frontier != "instance" and candidate_selection == "leader":
            raise ConfigError(
                f"frontier={frontier!r} chooses parents from a front, and candidate_selection='leader' keeps none; "
                "give candidate_selection='pareto'"
            )
        self._race_range = self.reward_range
        self.reflection_model = reflection_model or (_MODEL if async_openai_client is not None else None)
        self.reflection_temperature = reflection_temperature
        self.max_steps, self.proposals_per_step, self.minibatch_size = max_steps, proposals_per_step, minibatch_size
        self.candidate_selection, self.component_selection = candidate_selection, component_selection
        self.frontier, self.use_merge = frontier, use_merge
        self.race_error = race_error
        self._template = None if reflection_prompt_file is None else _request_template(Path(reflection_prompt_file))

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> PromptResult:
        """Search until all steps are done or the budget is spent, and return the best prompts. Raise ConfigError if the
        budget does not even measure the first prompts.
        """
        adapter.load_package()
        self._begin(train_dataset, val_dataset)
        initial = dict(self.get_initial_resources() or {})
        self._names = names_to_improve(initial, self.resource_name, algorithm="GEPA")
        models = (self.reflection_model,)
        self._first = Candidate(
            await self.open_services(initial, models=models, temperature=self.reflection_temperature)
        )
        self._candidates[self._key(self._texts(self._first))] = self._first
        limit = self.collector.budget.rollouts
        if limit is not None and limit < len(self._val):
            raise ConfigError(
                f"budget has {limit:,} rollouts, and measuring the first prompts takes {len(self._val):,}; "
                "give more, or a smaller val_dataset"
            )
        self.announce_ready()
        await self._search_and_choose()
        await self.collector.release(self.max_steps + 1)
        return await self.result(
            self._first,
            {**self._rewards},
            n_compared=max(1, len(self._rewards) - 1),
            expected_reward=self._expected_rewards().get((self._best or self._first).key),
        )

    def _begin(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        if train_dataset is None or not len(train_dataset):
            raise ConfigError("GEPA needs tasks to learn from; pass a train_dataset with at least one")
        if val_dataset is None or not len(val_dataset):
            raise ConfigError("GEPA needs tasks to compare prompts on; pass a val_dataset with at least one")
        if len(val_dataset) == 1:
            logger.warning("the validation set has one task, too few to compare prompts; give at least ten")
        self._train, self._val = train_dataset, val_dataset
        self._candidates: dict[str, Candidate] = {}
        """All candidates that were ever written, by `_key`."""
        self._pool: list[Candidate] = []
        """Candidates that were measured and not stopped, in the order of the package `gepa`."""
        self._rewards: dict[str, dict[int, float]] = {}
        """Rewards of the candidates in the pool on validation tasks, by the candidate's key; at the end, of all that
        have one."""
        self._all_rewards: dict[str, dict[Item, float]] = {}
        """Rewards of all candidates that ran, by key; a parent comes before its children."""
        self._parents: dict[str, Sequence[str]] = {}
        """The keys of each rewritten candidate's parent, and of both parents of a candidate in the pool that the
        package has merged."""
        self._own: list[dict[str, float]] = []
        """The agent's own numbers of each rollout since the last row of metrics."""
        self._step, self._failed_steps, self._stopped_early = 0, 0, 0
        self._is_racing = self.race_error is not None
        self._choices = 0
        self._stages = common_stages(len(val_dataset), f"{self.seed}/stages")
        self._edits: dict[str, tuple[int, int]] = {}
        """For each prompt's name: the number of its rewritings, and of those whose candidate beat its parent."""

    async def _search_and_choose(self) -> None:
        """The search cannot spend the rollouts that measure the leader on the rest of the validation set."""
        budget = self.collector.budget
        reserved = 0
        if budget.rollouts is not None and self.candidate_selection == "leader":
            first_stage = self._stages[0]
            reserved = min(budget.rollouts, 2 * len(self._val) - len(first_stage)) - len(self._val)
            budget.rollouts -= reserved
        await self._search()
        if budget.rollouts is not None:
            budget.rollouts += reserved
        if self._best is not None:
            try:
                await self._choose(self._best)
            except BudgetExceeded as error:
                logger.warning("the best prompts are not measured on the whole validation set: %s", error)

    async def _choose(self, leader: Candidate) -> None:
        """Accept the candidate with the highest expected reward. It is measured on the whole validation set before, if
        the budget allows that. With the new rewards another one may be ahead, and is measured next.
        """
        candidates = {each.key: each for each in self._candidates.values()}
        for key, found in self._all_rewards.items():  # races have stopped some of them
            if rewards := {item.index: reward for item, reward in found.items() if item.mode == "val"}:
                self._rewards.setdefault(key, rewards)
        best, n_tasks = leader, len(self._val)
        while True:
            expected, left = self._expected_rewards(), self.collector.budget.left
            possible = [key for key in expected if left is None or n_tasks - len(self._rewards.get(key, ())) <= left]
            best = candidates[max(possible, key=expected.__getitem__, default=leader.key)]
            if not await self._complete(best, range(n_tasks)):
                break
        if best.key != leader.key:
            await self.accept(best)
        comparison = None
        if best.key != leader.key:
            rewards, n_compared = self._rewards, max(1, len(self._rewards) - 1)
            comparison = compare(rewards[leader.key], rewards[best.key], n_compared=n_compared)
        # Above the numbers of all candidates in the pool, also in a run with a larger budget.
        number = self.max_steps * self.proposals_per_step + self._step + 1
        await self._record(number, best, comparison, accepted=True)

    async def _record(
        self, number: int, candidate: Candidate, comparison: Comparison | None, *, accepted: bool
    ) -> None:
        """number: orders the history of the run.
        comparison: with the best candidate before it; None if there was none.
        """
        rewards = self._rewards[candidate.key]
        record = record_of(
            candidate,
            await self.publish(candidate),
            reward=_mean(rewards),
            tasks=len(rewards),
            kept=True,
            accepted=accepted,
            comparison=comparison,
        )
        await self.record(number, [record])

    async def _search(self) -> None:
        bridge = Bridge(asyncio.get_running_loop())
        thread = asyncio.ensure_future(asyncio.to_thread(self._run_package, bridge))
        try:
            await asyncio.shield(thread)
        finally:
            bridge.stop()
            await asyncio.wait([thread])
        if isinstance(bridge.error, BudgetExceeded):
            logger.warning("the run ends after step %d with its best prompt: %s", self._step, bridge.error)
        elif bridge.error is not None:
            raise bridge.error

    def _run_package(self, bridge: Bridge) -> None:
        try:
            adapter.optimise(
                self,
                bridge,
                self._texts(self._first),
                n_train=len(self._train),
                n_val=len(self._val),
                template=self._template,
                proposals_per_step=self.proposals_per_step,
                component_selection=self.component_selection,
                candidate_selection=self.candidate_selection,
                frontier_type=self.frontier,
                reflection_minibatch_size=min(self.minibatch_size, len(self._train)),
                perfect_score=self._race_range[1],
                use_merge=self.use_merge,
                seed=self.seed,
            )
        except Stopped:
            pass  # `bridge.error` says why

    # ---- what the package calls ------------------------------------------------------------------

    def prompt(self, texts: Texts, name: str) -> PromptTemplate:
        return self._candidate(texts).prompts[name]

    def component(self) -> str:
        self._choices += 1
        return name_to_improve(self._names, self._edits, self._choices - 1, f"{self.seed}/{self._choices}")

    async def evaluate(self, items: Sequence[tuple[Texts, Sequence[Item]]]) -> list[list[Score]]:
        return await gather_all([self._scores(self._candidate(texts), tasks) for texts, tasks in items])

    async def reflect(self, jobs: Sequence[ReflectionTask]) -> list[str | None]:
        self._reflector.counts = counts = ReflectionCounts()
        found = await gather_all([self._rewrite(job, place) for place, job in enumerate(jobs)])
        if counts.errors:
            shown = "; ".join(f"{count} x {error}" for error, count in counts.errors.most_common(3))
            logger.warning("step %d: %d reflection calls failed: %s", self._step + 1, counts.errors.total(), shown)
        elif counts.refused:
            logger.warning("step %d: no prompt that can be used: %s", self._step + 1, counts.last_problem)
        self._failed_steps = self._failed_steps + 1 if counts.errors.total() == counts.calls > 0 else 0
        if self._failed_steps >= _FAILED_STEPS:
            counts.check(f"the last {_FAILED_STEPS} steps")
        return found

    async def race(self, proposals: Sequence[Proposal]) -> list[Sequence[int] | None]:
        """Let the proposals run their validation races at the same time. Return for each the tasks on which it was
        measured, with which it enters the pool; None if it was stopped.
        """
        return await gather_all([self._validated(proposal) for proposal in proposals])

    def leader(self) -> Texts:
        return self._texts(self._best or self._first)

    async def add(self, texts: Texts, rewards: Mapping[int, float], parents: Sequence[int]) -> None:
        """Add a candidate that was measured on validation tasks to the pool. Accept it if it is the best one, and write
        its record to the store.

        rewards: its rewards by validation task.
        parents: the indices of its parents in the pool; two if the package has merged it.
        """
        candidate = self._candidate(texts)
        before = self._best
        if len(parents) > 1:
            self._parents[candidate.key] = [self._pool[each].key for each in parents]
        self._pool.append(candidate)
        self._rewards[candidate.key] = dict(rewards)
        is_best = before is None
        if before is not None:  # on the tasks on which both were measured
            of_best = self._rewards[before.key]
            is_best = sum(reward - of_best[task] for task, reward in rewards.items() if task in of_best) > 0
        comparison = None
        if is_best:
            await self.accept(candidate)
            if before is not None:
                comparison = compare(self._rewards[before.key], rewards, n_compared=max(1, len(self._pool) - 1))
                logger.info("step %d: a better prompt, by %s", self._step + 1, comparison)
        await self._record(len(self._pool) - 1, candidate, comparison, accepted=is_best)

    async def end_step(self, step: int) -> None:
        self._step = step
        best = self._best
        reward = {} if best is None else {"reward": _mean(self._rewards[best.key])}
        counts = {"candidates": len(self._pool), "stopped_early": self._stopped_early}
        spent = {**self._reflector.counts.metrics(), **self.collector.budget.metrics()}
        self.get_run().report({**reward, **counts, **means_of(self._own), **spent}, iteration=step)
        self._reflector.counts, self._own = ReflectionCounts(), []
        await self.step_ended(step, lambda: not self.is_over(step))

    def is_over(self, step: int) -> bool:
        return step >= self.max_steps or self.collector.budget.seconds_left == 0

    # ---- one candidate ---------------------------------------------------------------------------

    async def _scores(self, candidate: Candidate, items: Sequence[Item]) -> list[Score]:
        """Return the scores of a candidate. The first reward outside the range that races assume ends their tests."""
        mode = items[0].mode
        tasks = [(self._train if mode == "train" else self._val)[item.index] for item in items]
        found = await self.evaluator.evaluate(
            await self.publish(candidate),
            tasks,
            mode=mode,
            deadline_seconds=self.rollout_batch_timeout,
            keep_until=self.max_steps + 1,
        )
        if not self.check_rewards(found.scores, "validation races are switched off"):
            self._is_racing = False
        self._own += [score.own for score in found.scores]
        self._all_rewards.setdefault(candidate.key, {}).update(zip(items, found.by_task, strict=True))
        return list(found.scores)

    async def _rewrite(self, job: ReflectionTask, place: int) -> str | None:
        """Return a new text of a prompt; None if no answer can be used. `place`: the job's index in the step."""
        parent, prompt = self._candidate(job.texts), self.prompt(job.texts, job.name)
        question = f"{job.request.text}\n\n{self._rules(prompt)}"

        def check(answer: str) -> tuple[str | None, str]:
            text, problem = proposed_prompt(answer, prompt, job.request, max_characters=self.max_prompt_characters)
            if text is not None and self._key({**job.texts, job.name: text}) in self._candidates:
                return None, "this prompt was tried before"
            return text, problem

        kept_at = f"{self._step}/{place}/{job.name}/{parent.key}"
        text = await self._reflector.ask("reflection", self.reflection_model, question, check, place=kept_at)
        self._count_edit(job.name, 1, 0)
        if text is None:
            return None
        version = await self.publish(parent)
        child = parent.edit(
            job.name,
            text,
            place=Branch(self._step, place),
            parent=(version.resources_id, version.version),
            reason="",
        )
        self._candidates[self._key(self._texts(child))] = child
        self._parents[child.key] = [parent.key]
        return text

    async def _validated(self, proposal: Proposal) -> Sequence[int] | None:
        """Measure a proposal in a race against the best candidate. Return the tasks on which it was measured; None if
        it has lost.

        Without a race, return all tasks, on which the package `gepa` then measures it.
        """
        candidate = self._candidate(proposal.texts)
        before, after = figure(sum(proposal.before)), figure(sum(proposal.after))
        reason = f"on {len(proposal.after)} training tasks, the sum of rewards rose from {before} to {after}"
        self._candidates[self._key(proposal.texts)] = replace(candidate, reason=reason)
        if candidate.edited is not None:
            self._count_edit(candidate.edited, 0, 1)
        everything = range(len(self._val))
        has_leader = self.candidate_selection == "leader"
        if self._best is None or not (has_leader or self._is_racing):
            return everything
        best, front = self._best, None
        if not has_leader:
            pool = [self._rewards[each.key] for each in self._pool]
            front = {task: max(rewards[task] for rewards in pool) for task in pool[0]}
        error = self.race_error if self._is_racing else None
        race = Race(self._rewards[best.key], front, error, self._race_range, len(everything))
        order = self._stages if has_leader else stages(len(everything), f"{self.seed}/race/{candidate.key}")
        for stage in order:
            scores, _ = await gather_all(
                [self._scores(candidate, [Item("val", task) for task in stage]), self._complete(best, stage)]
            )
            if not self._is_racing:
                if not has_leader:
                    return everything
                race.error = None  # a reward is outside of the range on which the test relies
            race.add({task: score.reward for task, score in zip(stage, scores, strict=True)})
            if len(race.rewards) == len(everything) or (has_leader and race.is_ahead):
                break
            if race.is_lost:
                self._stopped_early += 1
                logger.info("step %d: a prompt is stopped after %d tasks", self._step + 1, len(race.rewards))
                return None
        return list(race.rewards)

    async def _complete(self, candidate: Candidate, tasks: Sequence[int]) -> list[Score]:
        rewards = self._rewards.setdefault(candidate.key, {})
        missing = [task for task in tasks if task not in rewards]
        scores = await self._scores(candidate, [Item("val", task) for task in missing]) if missing else []
        rewards.update((task, score.reward) for task, score in zip(missing, scores, strict=True))
        return scores

    def _expected_rewards(self) -> dict[str, float]:
        """Return the expected reward of each candidate that ran, by key, given the rewards of all candidates. The order
        of the sums, and so the result, does not depend on the order in which rollouts have ended.
        """
        candidates = [each for each in self._candidates.values() if each.key in self._all_rewards]
        candidates.sort(key=lambda each: (each.round, each.branch, each.key))
        edits: dict[str, set[int]] = {}
        for index, candidate in enumerate(candidates):
            inherited = [edits[parent] for parent in self._parents.get(candidate.key, ()) if parent in edits]
            edits[candidate.key] = set[int]().union(*inherited, [] if candidate is self._first else [index])
        rewards = [
            dict(sorted(self._all_rewards[key].items(), key=lambda found: (found[0].mode, found[0].index)))
            for key in edits
        ]
        seen = [reward for each in rewards for reward in each.values()]
        if not seen:
            return {}
        limits = min(self._race_range[0], *seen), max(self._race_range[1], *seen)
        model = EffectModel([sorted(each) for each in edits.values()], rewards, len(edits), limits=limits)
        return dict(zip(edits, model.expected_rewards(), strict=True))

    def _count_edit(self, name: str, written: int, better: int) -> None:
        before = self._edits.get(name, (0, 0))
        self._edits[name] = (before[0] + written, before[1] + better)

    def _rules(self, prompt: PromptTemplate) -> str:
        placeholders = braced(placeholders_of(prompt), prompt)
        keep = f"Keep exactly these placeholders, and add none: {placeholders}. " if placeholders != "none" else ""
        return (
            f"{keep}Braces that are text are doubled: {{{{ and }}}}. "
            f"The new instruction has at most {self.max_prompt_characters} characters."
        )

    # ---- candidates and texts --------------------------------------------------------------------

    def _texts(self, candidate: Candidate) -> dict[str, str]:
        return {name: candidate.prompts[name].template for name in self._names}

    def _key(self, texts: Texts) -> str:
        return "\x1f".join(texts[name] for name in self._names)

    def _candidate(self, texts: Texts) -> Candidate:
        """Return the candidate with these texts; a new one if the package has merged two candidates."""
        found = self._candidates.get(self._key(texts))
        if found is None:
            prompts = {
                name: prompt.model_copy(update={"template": texts.get(name, prompt.template)})
                for name, prompt in self._first.prompts.items()
            }
            found = Candidate(prompts, self._step + 1, reason="joined from two candidates")
            self._candidates[self._key(texts)] = found
        return found


def _mean(rewards: Mapping[int, float]) -> float:
    return mean_of(rewards.values())


def _request_template(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the request {str(path)!r} cannot be read: {error}") from error
    for field in ("<curr_param>", "<side_info>"):
        if field not in text:
            raise ConfigError(f"the request {str(path)!r} lacks {field}; it needs <curr_param> and <side_info>")
    return text
