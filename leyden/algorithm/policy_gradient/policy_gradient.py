"""`PolicyGradient`: sample groups of rollouts, compare the rollouts of each group, and update the policy.

A step enqueues groups of rollouts, waits for them, reads their spans, and trains on them. The rollouts' ids are derived
from the run and the group's number, so enqueuing again makes no second rollout, and a step of a killed process
continues where it was. Every token keeps the log-probability and the version of the weights with which it was sampled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from leyden._lib import ids
from leyden._lib.options import check_choice, check_number
from leyden.adapter import FEW_MERGED
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.collector import CollectedRollout
from leyden.algorithm.iterative import Metrics
from leyden.algorithm.policy_gradient.forking import ForkCounts, add_returns, requests_of_forks
from leyden.algorithm.policy_gradient.group_stream import CollectedGroup, GroupStream
from leyden.algorithm.policy_gradient.policy_algorithm import PolicyAlgorithm, make_reference
from leyden.algorithm.policy_gradient.preparation import Preparation
from leyden.algorithm.policy_gradient.rollout_metrics import gpu_use, group_metrics, mean, rollout_metrics
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, RolloutReader, explanation
from leyden.algorithm.policy_gradient.signal import SignalWatch
from leyden.algorithm.policy_gradient.step_data import (
    Group,
    StepData,
    StepRollout,
    Weighting,
    build_step,
    check_weighting,
    epoch_place,
    has_signal,
    minibatches,
    successes,
)
from leyden.engine.policy_backend import LOGITS_NOT_FINITE, OptimParams, PolicyBackend
from leyden.errors import CheckpointError, ConfigError, NoTrainingData
from leyden.objectives.advantages import Advantages, find_estimator, make_advantages
from leyden.objectives.losses import KL_ESTIMATORS, CrossEntropyLoss, Loss, PolicyLoss, ValueLoss, find_loss, make_loss
from leyden.types import LLM, EnqueueRolloutRequest, TrainingSequence, semconv

logger = logging.getLogger(__name__)

_MANY_DIVERGED = 0.1
"""If a larger share of forks leaves the record, a warning explains one of them."""
_IMITATION = CrossEntropyLoss()
"""The loss of the steps that imitate successes (`sft_steps`)."""
_COLLECTION_FILE = "collection.json"
"""The file of a checkpoint that lists the groups under way."""


@dataclass(slots=True)
class _Collected:
    """The groups of one step, with counts of their rollouts."""

    groups: list[Group] = field(default_factory=list[Group])
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    forks: ForkCounts = field(default_factory=ForkCounts)
    staleness: list[int] = field(default_factory=list[int])
    """For each group, the number of steps between its enqueuing and this step."""
    stale: int = 0
    """The number of groups that were cancelled because they were too old."""


class PolicyGradient(PolicyAlgorithm):
    """Optimises a policy on groups of rollouts with any number of model calls.

    Each step samples `tasks_per_step` groups of `rollouts_per_task` rollouts, estimates advantages, and minimises a
    loss of the tokens that the policy sampled. The named settings (`GRPO`, `PPO`,
    ...) are this algorithm with other options. The default is GRPO (arXiv:2402.03300) with the clip
    range of DAPO (arXiv:2503.14476): loss = mean over rollouts of (mean over the rollout's tokens), so each rollout
    weighs the same however many turns it took.

    backend: the policy.
    tasks_per_step: the number of groups in a step.
    rollouts_per_task: the number of rollouts in a group. All rollouts of a group have one task.
    sft_steps: the first steps imitate successes in place of comparing: they maximise the likelihood of the step's
        rollouts with at least `success_reward` (RAFT, arXiv:2304.06767, section 3), with the same minibatches and
        epochs. The later steps go on with the weights and the optimizer.
    minibatch_size: about how many rollouts each optimizer step uses. None: all rollouts of the step.
    epochs: passes over the step's rollouts.
    advantages: estimator of the advantages, by name (`leyden.objectives.ESTIMATORS`) or constants
        (`GAEAdvantages(lam=0.95)`).
    loss: the loss of the sampled tokens, by name (`leyden.objectives.LOSSES`) or constants (`PPOLoss(clip_high=0.2)`).
    weighting: how tokens share the loss: "rollout", "token", or a number of tokens (`Weighting`).
    max_staleness: the number of steps after its enqueuing for which a group may be trained on. With 0, a step waits for
        its own rollouts. Otherwise the rollouts of later steps run while the policy is trained, and a step takes the
        groups that finish first. An older group is cancelled and counted.
    max_groups_per_step: replace groups without signal by further ones, up to this many groups in a step (dynamic
        sampling, DAPO, arXiv:2503.14476, section 3.2). None: no further groups.
    kl_in_reward: coefficient of a penalty, subtracted from each reward: an estimate of KL(policy / reference), summed
        over the rollout's sampled tokens.
    kl_in_reward_estimator: estimator of the KL divergence in the reward: "k1", "k2" or "k3"
        (`leyden.objectives.losses.kl`); None: "k1".
    reference: the frozen policy that a KL term compares with. None: a second backend like `backend`, if there is such a
        term.
    critic: a separate model that estimates values, for an estimator that needs them. None: the value head of `backend`.
    critic_optim: parameters of the critic's optimizer; None: `optim`.
    options: further options of `PolicyAlgorithm` and `IterativeAlgorithm`.
    """

    holds_runners_until_request = True

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **{name: ("optim", "critic_optim") for name in PolicyAlgorithm.changeable if name.startswith("optim.")},
        "temperature": ("temperature", "sampling_parameters"),
        "max_tokens": ("max_tokens", "sampling_parameters"),
        "timeout_seconds": ("timeout_seconds", "rollout_config"),
        "rollouts_per_task": ("rollouts_per_task", "minibatch_size"),
        **{name: (name,) for name in ("minibatch_size", "epochs", "kl_in_reward", "max_groups_per_step")},
    }

    fixed_options: ClassVar[Mapping[str, str]] = {
        **PolicyAlgorithm.fixed_options,
        "tasks_per_step": "the order of the tasks and the ids of rollouts follow from it",
        "max_staleness": "the rollouts that are under way follow from it",
        "seed": "the order of the tasks and the ids of rollouts follow from it",
    }

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        tasks_per_step: int = 8,
        rollouts_per_task: int = 16,
        sft_steps: int = 0,
        minibatch_size: int | None = None,
        epochs: int = 1,
        advantages: Advantages | str = "grpo",
        loss: Loss | str = "ppo",
        weighting: Weighting = "rollout",
        max_staleness: int = 0,
        max_groups_per_step: int | None = None,
        kl_in_reward: float = 0.0,
        kl_in_reward_estimator: str | None = None,
        reference: PolicyBackend | None = None,
        critic: PolicyBackend | None = None,
        critic_optim: OptimParams | None = None,
        **options: Any,
    ) -> None:
        for name, count in (
            ("tasks_per_step", tasks_per_step),
            ("rollouts_per_task", rollouts_per_task),
            ("epochs", epochs),
        ):
            check_number(name, count, at_least=1, whole=True)
        check_number("minibatch_size", minibatch_size, at_least=1, whole=True, or_none="all rollouts of the step")
        check_number("max_staleness", max_staleness, at_least=0, whole=True)
        check_number("sft_steps", sft_steps, at_least=0, whole=True)
        check_number(
            "max_groups_per_step", max_groups_per_step, at_least=tasks_per_step, whole=True, or_none="no further groups"
        )
        check_number("kl_in_reward", kl_in_reward, at_least=0)
        if kl_in_reward_estimator is not None:
            check_choice("kl_in_reward_estimator", kl_in_reward_estimator, KL_ESTIMATORS)
            if not kl_in_reward:
                raise ConfigError(
                    f"kl_in_reward_estimator is {kl_in_reward_estimator!r}, and kl_in_reward is 0; set kl_in_reward, or "
                    "kl_estimator in the constants of the loss"
                )
        check_weighting(weighting)
        self.advantages = make_advantages(advantages) if isinstance(advantages, str) else advantages
        self.loss = make_loss(loss) if isinstance(loss, str) else loss
        find_estimator(self.advantages)  # refuses anything but constants
        super().__init__(backend, **options)
        self.backend.check_loss(self.loss)
        if sft_steps > self.max_iters:
            raise ConfigError(
                f"sft_steps is {sft_steps} and n_steps is {self.max_iters}; n_steps counts all steps, those that imitate "
                "included"
            )
        if sft_steps:
            self.backend.check_loss(_IMITATION)
        self.sft_steps = sft_steps
        if rollouts_per_task < self.advantages.min_group:
            raise ConfigError(
                f"rollouts_per_task is {rollouts_per_task}; a group needs at least {self.advantages.min_group} to compare"
            )
        self.tasks_per_step, self.rollouts_per_task = tasks_per_step, rollouts_per_task
        self.minibatch_size = minibatch_size or tasks_per_step * rollouts_per_task
        self.epochs = epochs
        self.weighting: Weighting = weighting
        self.max_staleness, self.max_groups_per_step = max_staleness, max_groups_per_step or tasks_per_step
        if kl_in_reward and self.advantages.forks_per_call:
            raise ConfigError(
                f"kl_in_reward is {kl_in_reward}, and the rewards of forks have no such penalty; set kl_coefficient in "
                "the constants of the loss"
            )
        self.kl_in_reward, self.kl_in_reward_estimator = kl_in_reward, kl_in_reward_estimator or "k1"
        self.reference = self._checked_reference(reference)
        self.critic, self.critic_optim = self._checked_critic(critic), critic_optim or self.optim
        self._own_critic = None if self.critic is self.backend else self.critic
        if critic_optim is not None and self._own_critic is None:
            raise ConfigError(
                f"critic_optim is {critic_optim!r}, and there is no critic of its own to optimise; give critic=, or leave "
                "critic_optim out"
            )
        """The critic if it is a separate model, with its own optimizer."""
        self._other_backends = [each for each in (self.reference, self._own_critic) if each is not None]
        self._greedy_resources_id = ""
        self._watch = self._new_watch()
        self._train: Dataset[Any] = ()
        self._next_group: int | None = None
        """The number of the next group to enqueue; None: the first group of the step under way."""
        self._waiting: dict[int, int] = {}
        """The step at which each group was enqueued, by the group's number, for the groups that were under way when the
        loaded checkpoint was written."""
        self._generations: dict[int, int] = {}
        """How often a group was sampled again, by its number; a missing group never was."""
        self._stream: GroupStream | None = None
        self._warned_of_split_turns = self._warned_of_forks = False

    # ---- the loop's points -----------------------------------------------------------------------

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Start the policy, and a reference and a critic if options need them. Raise ConfigError without tasks."""
        if train_dataset is None or not len(train_dataset):
            raise ConfigError(f"{type(self).__name__} needs tasks to train on; pass a train_dataset with at least one")
        self._train = train_dataset
        self._watch = self._new_watch()
        self._next_group, self._waiting, self._generations, self._stream = None, {}, {}, None
        await super().setup(train_dataset, val_dataset)

    async def _publish_policies(self, llm: LLM, since: str) -> None:
        await super()._publish_policies(llm, since)
        if self.advantages.uses_baseline:
            greedy = llm.model_copy(update={"sampling_parameters": {**self.sampling_parameters, "temperature": 0.0}})
            self._greedy_resources_id = await self._publish_policy(f"greedy policy{since}", greedy)

    def credit_assignment(self) -> dict[str, Any]:
        constants = {each.name: getattr(self.advantages, each.name) for each in fields(self.advantages)}
        options = ("rollouts_per_task", "failed_reward", "temperature", "kl_in_reward", "sft_steps", "max_staleness")
        return {
            "advantages": find_estimator(self.advantages).name,
            "constants": constants,
            **{name: getattr(self, name) for name in options},
            "replaces_groups": self.max_groups_per_step > self.tasks_per_step,
        }

    def changeable_options(self) -> dict[str, tuple[str, ...]]:
        constants = {f"loss.{each.name}": ("loss",) for each in fields(self.loss)}
        return {**super().changeable_options(), **constants}

    def check_change(self, changed: Any) -> None:
        super().check_change(changed)
        if changed.reference is not None and self.reference is None:
            raise ConfigError(
                "a KL term compares with a reference, and this run has none, because no term needed one when it began; it takes a "
                "new run"
            )
        names = ("sampling_parameters", "rollout_config", "rollouts_per_task")
        if self.max_staleness and any(getattr(self, name) != getattr(changed, name) for name in names):
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, so rollouts of later steps are under way with the value before; it takes "
                "a new run"
            )

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        if self.advantages.forks_per_call:  # as many as the rollouts have calls
            return None
        of_group = self.rollouts_per_task + self.advantages.uses_baseline
        validation = super().planned_rollouts(n_train, n_val) or 0
        return self.max_iters * self.max_groups_per_step * of_group + validation

    async def teardown(self) -> None:
        """Stop waiting for rollouts, and stop the policy, the reference and the critic."""
        async with contextlib.AsyncExitStack() as stack:  # an error of one does not keep the others running
            stack.push_async_callback(super().teardown)
            if self._stream is not None:
                stack.push_async_callback(self._stream.close)

    async def step(self, iteration: int) -> Metrics:
        """Sample the groups of a step (from 0), and train on them. Raise NoTrainingData if no call has tokens."""
        started = time.perf_counter()
        went_back = await self._after_due_fall()
        collected = await self._collect(iteration)
        counts, sampled = collected.counts, time.perf_counter()
        if fall := self._fall_of(iteration, collected):
            went_back = await self._after_fall(fall)
        is_left_out = bool(fall and (went_back or self.ends_early))  # nothing is learned from what a fallen policy did
        if not is_left_out and not any(
            rollout.trajectories for group in collected.groups for rollout in group.rollouts
        ):
            raise NoTrainingData(
                f"step {iteration + 1} has nothing to train on. {explanation(counts)}. See such rollouts with `leyden show "
                "latest --failed` or --worst, mend the agent, and start again"
            )
        if counts.refused_calls:
            logger.warning("step %d does not train on all of its rollouts. %s", iteration + 1, explanation(counts))
        self._warn_of_split_turns(counts)
        self._warn_of_forks(collected.forks)
        data = build_step(collected.groups, self.advantages, keep_flat=self._has_other_terms or self.kl_in_reward > 0)
        imitates = iteration < self.sft_steps
        imitated = successes(collected.groups, self.success_reward) if imitates else []
        if is_left_out:
            updated = {"optimizer_steps": 0, "policy_version": self.backend.policy_version, **went_back}
        else:
            self._warn(
                self._watch.look(
                    iteration + 1,
                    rewards=counts.rewards,
                    flat=not imitated and 0 < data.flat_groups == len(collected.groups) - data.small_groups,
                    n_groups=data.flat_groups,
                    answers=counts.answers,
                    fall=fall,
                )
            )
            if self._collapse.is_best():
                await self._keep(iteration)
            update = self._imitate(iteration, imitated) if imitates else self._update(iteration, data)
            updated = {**went_back, **await self._watched(iteration, update)}
        return {
            **rollout_metrics(counts, seconds=sampled - started, success_reward=self.success_reward),
            **group_metrics(collected.groups, size=self.rollouts_per_task, success_reward=self.success_reward),
            "groups": len(collected.groups),
            "flat_groups": data.flat_groups,
            "small_groups": data.small_groups,
            "stale_groups": collected.stale,
            "staleness": mean(collected.staleness),
            **(collected.forks.metrics() if self.advantages.forks_per_call else {}),
            **updated,
            "update_seconds": time.perf_counter() - sampled,
            **gpu_use(),
        }

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        """Write the states of the policy and the critic, and the numbers of the groups under way.

        Return a function to await until the policy's files are written; None if they are already.
        """
        written = await super().save(path)
        if self._own_critic is not None:
            await self._own_critic.save_state(path / "critic")
        groups = {} if self._stream is None else self._stream.groups
        waiting = self._waiting | {number: group.step for number, group in groups.items()}
        state = {"next_group": self._next_group, "waiting": waiting, "generations": self._generations}
        (path / _COLLECTION_FILE).write_text(json.dumps(state))
        return written

    async def load(self, path: Path) -> None:
        """Restore the policy, the critic, and the numbers of the groups that were under way, from a checkpoint. Raise
        CheckpointError if it cannot be read.
        """
        await super().load(path)
        if self._own_critic is not None:
            await self._own_critic.load_state(path / "critic")
        file = path / _COLLECTION_FILE
        if not file.exists():
            return
        try:
            found = json.loads(file.read_text())
            self._next_group = found["next_group"]
            self._waiting = {int(number): int(step) for number, step in found["waiting"].items()}
            self._generations = {int(number): int(n) for number, n in found["generations"].items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _fall_of(self, iteration: int, collected: _Collected) -> str:
        """Return how the policy has fallen, by the rollouts of a step; an empty text if it has not."""
        counts = collected.counts
        if any(LOGITS_NOT_FINITE in reason for reason in counts.failures):
            self._collapse.broken = f"step {iteration + 1}: {LOGITS_NOT_FINITE}"
            return self._collapse.broken
        return self._collapse.look(
            iteration + 1,
            [[rollout.reward for rollout in group.rollouts] for group in collected.groups],
            n_answers=counts.answers.n,
            n_distinct=len(counts.answers.distinct),
        )

    async def _save_weights(self, path: Path) -> None:
        await super()._save_weights(path)
        if self._own_critic is not None:
            await self._own_critic.save_state(path / "critic")

    async def _load_best(self) -> None:
        """Drop what the fallen policy has begun, and give all models their best weights."""
        await self._give_up_waiting(self.max_iters + self.max_staleness + 1)
        if self._stream is not None:
            await self._stream.drop(list(self._stream.groups))
        await super()._load_best()
        if self._own_critic is not None:
            await self._own_critic.load_state(self._best / "critic")
        self._watch = self._new_watch()

    async def finish(self) -> None:
        """Warn of a run that could not learn, and write the trained model to the run's directory."""
        self._warn(self._watch.end(self.max_iters))
        await super().finish()

    # ---- options ---------------------------------------------------------------------------------

    @property
    def _has_other_terms(self) -> bool:
        """Whether a term of the loss gives a gradient even if all advantages are 0: a KL or an entropy term."""
        loss = self.loss
        return isinstance(loss, PolicyLoss) and (loss.kl_coefficient != 0 or loss.entropy_coefficient != 0)

    def _checked_reference(self, given: PolicyBackend | None) -> PolicyBackend | None:
        """Return the frozen policy, a new one if a term needs it. Raise ConfigError for one that no term needs."""
        is_needed = self.kl_in_reward > 0 or "reference_logprobs" in find_loss(self.loss).columns_of(self.loss)
        if not is_needed and given is not None:
            raise ConfigError(
                f"reference is a {type(given).__name__}, and nothing compares with it; "
                "set kl_in_reward, or kl_coefficient in the constants of the loss"
            )
        return given if given is not None or not is_needed else make_reference(self.backend)

    def _checked_critic(self, given: PolicyBackend | None) -> PolicyBackend | None:
        """Raise ConfigError for a critic that is not needed, has no value head, or does not fit the loss."""
        if not self.advantages.uses_values:
            if given is not None:
                raise ConfigError(
                    f"critic is a {type(given).__name__}, and advantages={self.advantages!r} needs no values; "
                    "leave critic out, or use advantages='gae'"
                )
            return None
        critic = given or self.backend
        if not critic.capabilities.values:
            raise ConfigError(
                f"advantages={self.advantages!r} needs values, and {type(critic).__name__} has no value head; make it "
                "with value_head=True, or give critic=EmbeddedBackend(MODEL, value_head=True)"
            )
        if (critic is self.backend) != self.loss.uses_values:
            raise ConfigError(
                "a value head of the policy is trained by the loss, and a critic by itself: use "
                "loss=PPOLoss(value_coefficient=0.5) without a critic, or value_coefficient=0 with one"
            )
        return critic

    def _new_watch(self) -> SignalWatch:
        return SignalWatch(self.optim.learning_rate * self._rate_scale, self.sampling_parameters.get("max_tokens"))

    def _warn_of_split_turns(self, counts: RolloutCounts) -> None:
        split = counts.split_turn
        if self._warned_of_split_turns or split is None or counts.merged_turns >= FEW_MERGED * counts.continued_turns:
            return
        self._warned_of_split_turns = True
        logger.warning(
            "%d of %d turns are trained on as sequences of their own, because their tokens do not continue those before. "
            "For example %s",
            counts.continued_turns - counts.merged_turns,
            counts.continued_turns,
            split,
        )

    def _warn_of_forks(self, counts: ForkCounts) -> None:
        """Log once that a rollout cannot be forked, or that many forks differ from their records."""
        if self._warned_of_forks:
            return
        if counts.unnumbered:
            self._warned_of_forks = True
            logger.warning(
                "%d rollouts cannot be forked, because their calls have no %s; use the adapter TraceToTriplet, which is "
                "the default, and let the agent's calls go through the gateway",
                counts.unnumbered,
                semconv.CALL_INDEX,
            )
        if len(counts.diverged) > _MANY_DIVERGED * counts.forks:
            self._warned_of_forks = True
            logger.warning(
                "%d of %d forks asked something else than the rollout that they repeat, and are left out: the agent's own "
                "code is not deterministic. For example %s",
                len(counts.diverged),
                counts.forks,
                counts.diverged[0],
            )

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            logger.warning("%s", warning)

    # ---- rollouts --------------------------------------------------------------------------------

    async def _collect(self, iteration: int) -> _Collected:
        """Take finished groups until enough of them have signal, or `max_groups_per_step` are taken. Groups of later
        steps are enqueued meanwhile, as `max_staleness` allows.
        """
        collected, n_signal = _Collected(), 0
        collected.stale = await self._give_up_waiting(iteration)
        stream = self._open_stream(iteration)
        too_old = [number for number, group in stream.groups.items() if group.step < iteration - self.max_staleness]
        await stream.drop(too_old)
        collected.stale += len(too_old)
        reader = self._reader()
        while (missing := min(self.tasks_per_step - n_signal, self.max_groups_per_step - len(collected.groups))) > 0:
            for taken in await self._take(stream, missing, iteration):
                group = self._read(taken.results, collected.counts, reader)
                forks = [result for result in taken.forks or () if result is not None]
                add_returns(group, forks, collected.forks, failed_reward=self.failed_reward)
                collected.groups.append(group)
                collected.staleness.append(iteration - taken.step)
                n_signal += self._has_signal(group, iteration)
        return collected

    async def _give_up_waiting(self, iteration: int) -> int:
        too_old = [number for number, step in self._waiting.items() if step < iteration - self.max_staleness]
        requests = [request for number in too_old for request in self._requests_of(number)]
        await self.collector.enqueue(requests)  # a repeat, after which they are the collector's
        await self.collector.cancel([str(request.rollout_id) for request in requests])
        for number in too_old:
            del self._waiting[number]
        return len(too_old)

    def _open_stream(self, iteration: int) -> GroupStream:
        """The first call makes the stream, with the groups that were under way in the loaded checkpoint."""
        if self._stream is None:
            collect = partial(self._results, on_progress=self._show_progress)
            self._stream = GroupStream(self.collector, self._requests_of, collect, self._forks_of)
            for number, step in sorted(self._waiting.items()):
                self._stream.enqueue([number], step=step, keep_until=step + 1 + self.max_staleness)
            self._waiting = {}
        if self._next_group is None:
            self._next_group = iteration * self.tasks_per_step
        return self._stream

    async def _take(self, stream: GroupStream, count: int, iteration: int) -> list[CollectedGroup]:
        """Enqueue groups for this step and `max_staleness` further ones, wait until `count` groups have finished, and
        take them.

        If every rollout of the taken groups had failed before the run was resumed, all of them are sampled again, under
        other ids, because the cause may have been fixed since.
        """
        assert self._next_group is not None
        steps_ahead = min(self.max_staleness, self.max_iters - 1 - iteration)
        keep_until = iteration + 1 + self.max_staleness
        new = max(0, count + steps_ahead * self.tasks_per_step - len(stream.groups))
        stream.enqueue(range(self._next_group, self._next_group + new), step=iteration, keep_until=keep_until)
        self._next_group += new
        while True:
            taken = await stream.take(count)
            results = [result for group in taken for result in group.results]
            if not all(each is not None and each.cached and each.status in ("failed", "cancelled") for each in results):
                return taken
            numbers = [group.number for group in taken]
            self._generations |= {number: self._generations.get(number, 0) + 1 for number in numbers}
            stream.enqueue(numbers, step=iteration, keep_until=keep_until)

    def _requests_of(self, number: int) -> list[EnqueueRolloutRequest]:
        """If the estimator has a baseline, the last request is for the greedily decoded rollout."""
        step, place_in_step = divmod(number, self.tasks_per_step)
        generation = self._generations.get(number, 0)
        task = self._train[epoch_place(len(self._train), number, self.seed)]
        group_id = ids.derived_id("gr", self.get_run().run_id, step, place_in_step, generation)
        first = place_in_step * self.rollouts_per_task
        places: list[tuple[int | str, dict[str, Any]]] = [
            (place, {}) for place in range(first, first + self.rollouts_per_task)
        ]
        if self.advantages.uses_baseline:
            places.append((f"greedy {place_in_step}", {"resources_id": self._greedy_resources_id}))
        return [
            self._request("train", step, place, task, generation=generation, group_id=group_id, **changes)
            for place, changes in places
        ]

    def _forks_of(self, collected: CollectedGroup) -> list[EnqueueRolloutRequest]:
        if not self.advantages.forks_per_call or collected.step < self.sft_steps:
            return []
        group = self._read(collected.results, RolloutCounts(), self._reader())
        results = [result for result in collected.results if result is not None]
        return requests_of_forks(group, results, self.advantages, resources_id=self._resources_id)

    def _show_progress(self) -> None:
        """The stream may hold rollouts of later steps too, so the number is limited to those of this step."""
        groups = () if self._stream is None else self._stream.groups.values()
        done = sum(result is not None for group in groups for result in group.results)
        total = self.tasks_per_step * (self.rollouts_per_task + self.advantages.uses_baseline)
        self.progress(min(done, total), total)

    def _read(
        self, collected: Sequence[CollectedRollout | None], counts: RolloutCounts, reader: RolloutReader
    ) -> Group:
        """Return a group with the data of its rollouts, and count them in `counts`. If the estimator has a baseline,
        the last rollout is the greedy one: its reward is the baseline, and it is neither trained on nor counted.
        """
        results = [result for result in collected if result is not None]
        baseline = None
        if self.advantages.uses_baseline:
            greedy = reader.read(results.pop(), RolloutCounts())
            baseline = None if greedy is None else greedy.reward
        read = [reader.read(result, counts) for result in results]
        return Group([rollout for rollout in read if rollout is not None], baseline)

    def _has_signal(self, group: Group, iteration: int) -> bool:
        if iteration < self.sft_steps:
            return bool(successes([group], self.success_reward))
        return has_signal(group, self.advantages)

    # ---- the gradient ----------------------------------------------------------------------------

    async def _imitate(self, iteration: int, rollouts: Sequence[StepRollout]) -> Metrics:
        """Make optimizer steps that raise the likelihood of the iteration's successes; no step if there is none."""
        if not rollouts:
            return {"imitated": 0, "optimizer_steps": 0, "policy_version": self.backend.policy_version}
        metrics = await self._optimise(self._minibatches(rollouts, iteration), _IMITATION, iteration)
        return {"imitated": len(rollouts), **metrics}

    async def _update(self, iteration: int, data: StepData) -> Metrics:
        """Make the optimizer steps of one iteration (`epochs` passes over its minibatches), publish the weights, and
        return metrics. Without sequences to train on, change nothing. Without a gradient of the policy's loss, train
        only a separate critic.
        """
        unchanged: Metrics = {"optimizer_steps": 0, "policy_version": self.backend.policy_version}
        if not data.trained:
            return unchanged
        started = time.perf_counter()
        preparation = Preparation(
            self.backend,
            self.loss,
            self.advantages,
            self.temperature,
            self.reference,
            self.critic,
            self.kl_in_reward,
            self.kl_in_reward_estimator,
        )
        prepared = await preparation.prepare(data)
        trained = time.perf_counter()
        # Steps with a gradient of 0 would move the weights on by Adam's momentum, and no clip range
        # would limit that, because the objective is 0 for every ratio.
        has_signal = any(map(any, (rollout.advantages for rollout in data.trained)))
        metrics = (
            await self._optimise(self._minibatches(data.trained, iteration), self.loss, iteration)
            if has_signal or self._has_other_terms or self.loss.uses_values
            else unchanged
        )
        critic_losses: list[float] = []
        if (critic := self._own_critic) is not None:
            for batch in self._minibatches(data.trained, iteration):
                critic_losses.append((await critic.forward_backward(batch, ValueLoss())).loss)
                await critic.optim_step(self._scaled(self.critic_optim, iteration))
        seconds = time.perf_counter() - trained
        return {
            **metrics,
            **({"critic_loss": mean(critic_losses)} if critic_losses else {}),
            **prepared,
            **({"trained_tokens_per_second": tokens / seconds} if (tokens := metrics.get("trained_tokens")) else {}),
            "prepare_seconds": trained - started,
        }

    def _minibatches(self, rollouts: Sequence[StepRollout], iteration: int) -> Iterator[list[TrainingSequence]]:
        size, weighting = self.minibatch_size, self.weighting
        for epoch in range(self.epochs):
            yield from minibatches(
                rollouts, size=size, seed=self.seed, step=iteration, epoch=epoch, weighting=weighting
            )
