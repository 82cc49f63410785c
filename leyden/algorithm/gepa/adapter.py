"""The functions that the package `gepa` calls in its thread: evaluation, reflection, selection and callbacks.

Each method runs a method of `Evolution` in the algorithm's loop and waits for it. Only this module imports `gepa`. The
package has no types, so only this module needs `Any` for them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from leyden._lib.extras import import_optional
from leyden.algorithm.evaluator import Score
from leyden.algorithm.gepa.bridge import Bridge
from leyden.algorithm.gepa.reflective import objective_scores, reflective_record
from leyden.algorithm.prompts.proposed_prompts import Request
from leyden.types import PromptTemplate

logger = logging.getLogger(__name__)

Texts = Mapping[str, str]
"""A candidate in the form of `gepa`: texts by the name of the prompt."""


@dataclass(frozen=True, slots=True)
class Item:
    """A task: its data set, and its index there."""

    mode: Literal["train", "val"]
    index: int


@dataclass(frozen=True, slots=True)
class ReflectionTask:
    """A job for the reflection model: to write a new text of one prompt of a candidate."""

    texts: Texts
    """The candidate."""
    name: str
    """The name of the prompt."""
    request: Request
    """The request, with the examples that the model reads."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A new candidate that did better than its parent on the same training tasks."""

    texts: Texts
    before: Sequence[float]
    """The parent's rewards on these tasks."""
    after: Sequence[float]
    """The candidate's rewards on these tasks."""


class Evolution(Protocol):
    """The methods of `GEPA` that `gepa` calls through this module. The coroutines run in the algorithm's loop."""

    failed_reward: float
    """The reward of a rollout that failed."""

    def prompt(self, texts: Texts, name: str) -> PromptTemplate: ...
    def component(self) -> str: ...
    async def evaluate(self, items: Sequence[tuple[Texts, Sequence[Item]]]) -> list[list[Score]]: ...
    async def reflect(self, jobs: Sequence[ReflectionTask]) -> list[str | None]: ...
    async def race(self, proposals: Sequence[Proposal]) -> list[Sequence[int] | None]: ...
    def leader(self) -> Texts: ...
    async def add(self, texts: Texts, rewards: Mapping[int, float], parents: Sequence[int]) -> None: ...
    async def end_step(self, step: int) -> None: ...
    def is_over(self, step: int) -> bool: ...


def load_package() -> Any:
    """Import and return the package `gepa`. Raise MissingExtra if it is not installed."""
    return import_optional("gepa", extra="gepa", needed_by="GEPA")


def optimise(
    evolution: Evolution,
    bridge: Bridge,
    first: Texts,
    *,
    n_train: int,
    n_val: int,
    template: str | None,
    proposals_per_step: int,
    component_selection: str,
    candidate_selection: str,
    **options: Any,
) -> None:
    """Run `gepa.optimize` in the calling thread until `evolution.is_over`.

    first: the user's prompts.
    template: the reflection request; None: that of `gepa`.
    candidate_selection: "leader", or the name of a strategy of `gepa`.
    options: further arguments of `gepa.optimize`, of which `frontier_type` is required.
    """
    package = load_package()
    sampling = import_optional("gepa.strategies.proposal_sampling", extra="gepa", needed_by="GEPA")
    strategy = None if proposals_per_step == 1 else sampling.IndependentSampling(proposals_per_step)
    adapter = _GepaAdapter(
        evolution, bridge, package.EvaluationBatch, has_objectives=options["frontier_type"] != "instance"
    )
    policy = _policy()
    package.optimize(
        seed_candidate=dict(first),
        trainset=[Item("train", index) for index in range(n_train)],
        valset=[Item("val", index) for index in range(n_val)],
        adapter=adapter,
        reflection_strategy=_Reflection(evolution, bridge, template),
        selection_strategy=_Selection(evolution, bridge, policy),
        candidate_selection_strategy=_leader_selector(evolution)
        if candidate_selection == "leader"
        else candidate_selection,
        val_evaluation_policy=policy,
        sampling_strategy=strategy,
        module_selector=_BySuccess(evolution) if component_selection == "success" else component_selection,
        callbacks=[_Callbacks(evolution, bridge)],
        stop_callbacks=_Stopper(evolution),
        logger=SimpleNamespace(log=logger.debug),
        run_dir=None,  # its state is a pickle; ours is the store
        track_best_outputs=False,
        raise_on_exception=True,
        **options,
    )


class _GepaAdapter:
    """The adapter of `gepa`: runs rollouts, and makes examples of them for the reflection model."""

    propose_new_texts: None = None
    """Declared, because `gepa` proposes nothing for an adapter without this name."""

    def __init__(
        self, evolution: Evolution, bridge: Bridge, evaluation_batch: Callable[..., Any], *, has_objectives: bool
    ) -> None:
        self._evolution, self._bridge, self._new_batch = evolution, bridge, evaluation_batch
        self._has_objectives = has_objectives
        self._objectives: dict[str, None] = {}
        """The names of all objectives so far, in the order in which they first occurred."""

    def evaluate(self, batch: list[Item], candidate: Texts, capture_traces: bool = False) -> Any:
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: list[tuple[Texts, list[Item]]]) -> list[Any]:
        """Return an evaluation batch of `gepa` for each item (texts, tasks). All items run at the same time."""
        found = self._bridge.call(self._evolution.evaluate(items))
        return [
            self._new_batch(
                outputs=[None] * len(scores),
                scores=[score.reward for score in scores],
                trajectories=scores,
                objective_scores=objective_scores(scores, self._objectives, self._evolution.failed_reward)
                if self._has_objectives
                else None,
            )
            for scores in found
        ]

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the evaluated rollouts as examples, by the name of each prompt to rewrite."""
        return {
            name: [
                reflective_record(score, self._evolution.prompt(candidate, name)) for score in eval_batch.trajectories
            ]
            for name in components_to_update
        }


class _Reflection:
    """The reflection strategy of `gepa`: asks for all new texts of a step at the same time."""

    def __init__(self, evolution: Evolution, bridge: Bridge, template: str | None) -> None:
        self._evolution, self._bridge, self._template = evolution, bridge, template
        wording = import_optional("gepa.strategies.instruction_proposal", extra="gepa", needed_by="GEPA")
        module = import_optional("gepa.proposer.reflective_mutation.reflection_lm", extra="gepa", needed_by="GEPA")
        self._signature, self._new_proposal = wording.InstructionProposalSignature, module.ReflectionProposal

    def reflect(self, candidate: Texts, dataset: Mapping[str, Any], components: list[str]) -> tuple[Any, _Reflection]:
        return self.reflect_many([(candidate, dataset, components)])[0]

    def reflect_many(self, jobs: list[tuple[Texts, Mapping[str, Any], list[str]]]) -> list[tuple[Any, _Reflection]]:
        """Return a proposal for each job (texts, examples by prompt, prompts to rewrite). All reflections run at the
        same time. `gepa` wants each proposal with the reflection strategy of the next step, which is always this
        object.
        """
        asked = [
            (place, ReflectionTask(candidate, name, self._request(candidate[name], dataset[name])))
            for place, (candidate, dataset, components) in enumerate(jobs)
            for name in components
            if dataset.get(name)
        ]
        texts = self._bridge.call(self._evolution.reflect([job for _, job in asked]))
        proposals = [self._new_proposal(new_texts={}) for _ in jobs]
        for (place, job), text in zip(asked, texts, strict=True):
            if text is not None:
                proposals[place].new_texts[job.name] = text
        return [(proposal, self) for proposal in proposals]

    def _request(self, prompt: str, records: Sequence[Mapping[str, Any]]) -> Request:
        question = self._signature.prompt_renderer(
            {
                "current_instruction_doc": prompt,
                "dataset_with_feedback": list(records),
                "prompt_template": self._template,
            }
        )
        return Request(self._template or self._signature.default_prompt_template, question)


class _BySuccess:
    """A module selector for `gepa`, which chooses the prompt to rewrite by the success of earlier edits."""

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution

    def __call__(self, *about_the_parent: Any, **more: Any) -> list[str]:
        return [self._evolution.component()]


def _leader_selector(evolution: Evolution) -> Any:
    base = import_optional("gepa.proposer.reflective_mutation.base", extra="gepa", needed_by="GEPA")

    class Leader(base.CandidateSelector):
        def select_candidate_idx(self, state: Any) -> int:
            return state.program_candidates.index(dict(evolution.leader()))

    return Leader()


def _policy() -> Any:
    """Return a validation policy for `gepa`: a candidate is added to the pool with its rewards on the next tasks in
    `waiting`, where `_Selection` puts them, or on all tasks if there are none.
    """
    module = import_optional("gepa.strategies.eval_policy", extra="gepa", needed_by="GEPA")

    class Measured(module.FullEvaluationPolicy):
        def __init__(self) -> None:
            self.waiting: deque[Sequence[int]] = deque()

        def get_eval_batch(self, loader: Any, state: Any, target_program_idx: int | None = None) -> list[int]:
            return list(self.waiting.popleft() if self.waiting else loader.all_ids())

    return Measured()


class _Selection:
    """`gepa`'s selection strategy: proposals that did better on training tasks run the validation race."""

    def __init__(self, evolution: Evolution, bridge: Bridge, policy: Any) -> None:
        self._evolution, self._bridge, self._policy = evolution, bridge, policy

    def select(self, proposals: list[Any], state: Any, acceptance_criterion: Any) -> list[Any]:
        """Return the proposals that are better on their minibatch and then win their race on validation tasks. The
        package asks `_policy` next which tasks each of them was measured on.
        """
        better = [each for each in proposals if acceptance_criterion.should_accept(each, state)]
        if not better:
            return []
        entries = [
            Proposal(each.candidate, each.subsample_scores_before or (), each.subsample_scores_after or ())
            for each in better
        ]
        measured = self._bridge.call(self._evolution.race(entries))
        self._policy.waiting.extend(tasks for tasks in measured if tasks is not None)
        return [each for each, tasks in zip(better, measured, strict=True) if tasks is not None]


class _Callbacks:
    """Callbacks of `gepa`, which report accepted candidates and the end of each step."""

    def __init__(self, evolution: Evolution, bridge: Bridge) -> None:
        self._evolution, self._bridge = evolution, bridge

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        rewards: dict[int, float] = dict(event["scores_by_val_id"])
        self._bridge.call(self._evolution.add(dict(event["candidate"]), rewards, list(event["parent_ids"])))

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        self._bridge.call(self._evolution.end_step(int(event["iteration"])))


class _Stopper:
    """A stop callback of `gepa`, which ends the search when all steps are done or the budget's time is over."""

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution

    def __call__(self, state: Any) -> bool:
        return self._evolution.is_over(int(state.i) + 1)
