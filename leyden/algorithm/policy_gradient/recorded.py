"""`SFT` and `DPO`: train a policy on rollouts that a store holds.

Pure functions of rewards and groups (`best_of_groups`, `pairs_of_groups`) choose the rollouts once, at the start. Only
the rollouts of the validation set are run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from leyden._lib.options import check_choice, check_number
from leyden.algorithm.algorithm import Dataset
from leyden.algorithm.iterative import Metrics
from leyden.algorithm.policy_gradient.policy_algorithm import PolicyAlgorithm, make_reference
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, explanation
from leyden.algorithm.policy_gradient.step_data import (
    RolloutData,
    StepRollout,
    Weighting,
    check_weighting,
    epoch_place,
    weighted,
)
from leyden.algorithm.policy_gradient.token_rows import read_token_rows
from leyden.engine.policy_backend import Learner, PolicyBackend
from leyden.errors import ConfigError, NoTrainingData
from leyden.objectives.losses import CrossEntropyLoss, DPOLoss, dpo_weights
from leyden.store.base import LightningStore
from leyden.training.runs.recorded_runs import open_run
from leyden.training.runs.rollouts import read_rewards
from leyden.types import AttemptedRollout

logger = logging.getLogger(__name__)

_PAGE = 1000
"""How many rollouts are read from the store in one call."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RecordedReward:
    """A recorded rollout that succeeded, with its group and its reward."""

    rollout_id: str
    group: str
    """The rollout's group id; if it has none, its task as text."""
    reward: float


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The ids of two rollouts of one group."""

    chosen: str
    """The rollout with the higher reward."""
    rejected: str
    """The rollout with the lower reward."""


def best_of_groups(rollouts: Iterable[RecordedReward], *, min_reward: float | None = None) -> list[str]:
    """Return the id of the best rollout of each group, the earliest of equally good ones.

    min_reward: groups whose best rollout has a lower reward are left out; None: none are.
    """
    best: dict[str, RecordedReward] = {}
    for rollout in rollouts:
        if rollout.group not in best or rollout.reward > best[rollout.group].reward:
            best[rollout.group] = rollout
    return [each.rollout_id for each in best.values() if min_reward is None or each.reward >= min_reward]


def pairs_of_groups(rollouts: Iterable[RecordedReward], *, min_margin: float = 0.0) -> list[PreferencePair]:
    """Return the best and the worst rollout of each group whose rewards differ by more than `min_margin`."""
    groups: dict[str, list[RecordedReward]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    pairs: list[PreferencePair] = []
    for members in groups.values():
        best, worst = max(members, key=lambda each: each.reward), min(members, key=lambda each: each.reward)
        if best.reward - worst.reward > min_margin:
            pairs.append(PreferencePair(best.rollout_id, worst.rollout_id))
    return pairs


class RecordedAlgorithm(PolicyAlgorithm, Generic[Item]):
    """Base class of algorithms that train a policy on recorded rollouts. Override `choose` and `learn`.

    source: the store with the rollouts, or the run (its folder, its name or "latest"), or a file of tokens that `leyden
        dataset` wrote (.jsonl or .parquet). None: the store of this run, with rollouts of other runs.
    query: filters of `LightningStore.query_rollouts`, such as `{"mode_in": ["train"]}`. Only rollouts that succeeded
        with a reward are learned from.
    reward: a dimension of the reward, or the name of a rescoring (`leyden rescore`), in place of the primary reward.
    items_per_step: how many rollouts, or pairs, each optimizer step learns from.
    weighting: how tokens share the loss: "rollout", "token", or a number of tokens (`Weighting`).
    options: further options of `PolicyAlgorithm` and `IterativeAlgorithm`.
    """

    holds_runners_until_request = True

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        source: LightningStore | str | Path | None = None,
        query: Mapping[str, Any] | None = None,
        reward: str | None = None,
        items_per_step: int = 64,
        weighting: Weighting = "rollout",
        **options: Any,
    ) -> None:
        check_number("items_per_step", items_per_step, at_least=1, whole=True)
        check_weighting(weighting)
        super().__init__(backend, **options)
        self.source, self.query, self.reward = source, dict(query or {}), reward
        self._file = _file_of(source)
        for name, value in {"query": query, "reward": reward}.items():
            if value and self._file is not None:
                raise ConfigError(f"{name}={value!r} has no effect on the rows of {source}; give it to leyden dataset")
        self._rows: dict[str, RolloutData] = {}
        self.items_per_step = items_per_step
        self.weighting: Weighting = weighting
        self._items: Sequence[Item] = ()
        self._has_warned = False

    @abstractmethod
    def choose(self, rollouts: Iterable[RecordedReward]) -> Sequence[Item]:
        """Return the training items (rollouts or pairs), in an order that depends on `rollouts` alone."""

    @abstractmethod
    async def learn(self, items: Sequence[Item], store: LightningStore, iteration: int) -> Metrics:
        """Make one optimizer step on some items."""

    async def setup(self, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None) -> None:
        """Start the policy, and choose the training items. Raise NoTrainingData if there are none."""
        if train_dataset is not None:
            logger.warning(
                "train_dataset is used by nothing, because %s learns from recorded rollouts alone; pass None in its place, "
                "and tasks to measure the policy on as val_dataset",
                type(self).__name__,
            )
        await super().setup(train_dataset, val_dataset)
        if self._file is not None:
            rollouts = await asyncio.to_thread(self._read_file, self._file)
        else:
            async with self._open_source() as store:
                rollouts = await self._recorded(store)
        self._items = self.choose(rollouts)
        logger.info("%d recorded rollouts with a reward, %d items to learn from", len(rollouts), len(self._items))
        if not self._items:
            raise NoTrainingData(
                f"{type(self).__name__} finds nothing to learn from: {len(rollouts):,} recorded rollouts with a reward "
                f"match query={self.query!r}; give source= the run that recorded them, or relax the options"
            )

    async def step(self, iteration: int) -> Metrics:
        """Learn from the next items. Each epoch is a shuffled pass over all of them."""
        started = time.perf_counter()
        places = range(iteration * self.items_per_step, (iteration + 1) * self.items_per_step)
        chosen = [self._items[epoch_place(len(self._items), place, self.seed)] for place in places]
        went_back = await self._after_due_fall()
        async with self._open_source() as store:
            metrics = await self._watched(iteration, self.learn(chosen, store, iteration))
        return {"items": len(chosen), **went_back, **metrics, "update_seconds": time.perf_counter() - started}

    @contextlib.asynccontextmanager
    async def _open_source(self) -> AsyncGenerator[LightningStore]:
        """Yield the store with the recorded rollouts. If it is that of a run, open it here and close it at the end."""
        if self._file is not None or self.source is None:
            yield self.get_store()
            return
        if isinstance(self.source, LightningStore):
            yield self.source
            return
        run = await asyncio.to_thread(open_run, self.source)
        async with run.open_store() as store:
            yield store

    async def _recorded(self, store: LightningStore) -> list[RecordedReward]:
        """Return the rollouts that succeeded with a reward and match the query, in the order in which they were
        enqueued.

        Rollouts of this run are left out: they are its validation, and a resumed run would have more of them.
        """
        found: list[RecordedReward] = []
        offset, run_id = 0, self.get_run().run_id
        reward_of = await read_rewards(store, self.reward)
        while page := await store.query_rollouts(**self.query, limit=_PAGE, offset=offset):
            found += [
                RecordedReward(
                    each.rollout_id, each.group_id or json.dumps(each.input, sort_keys=True, default=str), reward
                )
                for each in page
                if isinstance(each, AttemptedRollout) and each.status == "succeeded" and each.run_id != run_id
                if (reward := reward_of(each)) is not None
            ]
            offset += len(page)
        return found

    def _read_file(self, path: Path) -> list[RecordedReward]:
        """Keep the trajectories of a file's rows by rollout, and return the rollouts with a reward, in their order."""
        found: dict[str, RecordedReward] = {}
        for row in read_token_rows(path):
            of = row.provenance
            if of.reward is not None:
                key = f"{of.run}/{of.rollout}"  # two runs may have given one id
                rollout = RecordedReward(key, f"{of.run}/{of.group or of.task}", of.reward)
                if found.setdefault(key, rollout) != rollout:
                    raise ConfigError(
                        f"{path} has rows of rollout {key} with different rewards, groups or tasks; make it anew"
                    )
                self._rows.setdefault(key, RolloutData(key, of.reward)).trajectories.append(row.trajectory())
        return list(found.values())

    async def _read(self, rollout_ids: Iterable[str], store: LightningStore) -> dict[str, StepRollout]:
        """Return the rollouts that can be trained on, by id. Warn the first time that one cannot."""
        if self._file is not None:
            return {rollout_id: StepRollout.of(self._rows[rollout_id]) for rollout_id in rollout_ids}
        counts, reader = RolloutCounts(), replace(self._reader(), temperature=None)
        spans_of = await store.query_spans_of(sorted(set(rollout_ids)))
        read = {rollout_id: reader.trajectories(spans, counts) for rollout_id, spans in spans_of.items()}
        found = {
            rollout_id: StepRollout.of(RolloutData(rollout_id, 0.0, trajectories))
            for rollout_id, trajectories in read.items()
            if trajectories
        }
        if counts.refused_calls and not self._has_warned:
            self._has_warned = True
            logger.warning("some recorded rollouts cannot be trained on, and are left out. %s", explanation(counts))
        return found

    def _nothing_learned(self, iteration: int) -> Metrics:
        """Return the metrics of a step without an update. Raise NoTrainingData if no item has given an update yet."""
        if not self.backend.policy_version and iteration + 1 >= len(self._items) / self.items_per_step:
            raise NoTrainingData(
                "none of the recorded rollouts can be trained on (the log has the reason); they must have been sampled "
                "through the gateway, from a model with this tokenizer"
            )
        return {"optimizer_steps": 0, "policy_version": self.backend.policy_version}


def _file_of(source: object) -> Path | None:
    """Return the file of rows that a source names; None if it names a run or a store."""
    if isinstance(source, str | Path) and Path(source).suffix in (".jsonl", ".parquet"):
        return Path(source)
    return None


class SFT(RecordedAlgorithm[str]):
    """Supervised fine-tuning on recorded rollouts: maximises the likelihood of the tokens that the policy sampled in
    them.

    loss = mean over rollouts of (mean over the rollout's sampled tokens of -log p). With the best rollout of each
    group, it is rejection-sampling fine-tuning (RAFT, arXiv:2304.06767, section 3).

    select: "best" learns from the best rollout of each group, "all" from every rollout.
    min_reward: rollouts with a lower reward are left out; None: none are.
    options: further options of `RecordedAlgorithm`, such as `source`.
    """

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        select: Literal["best", "all"] = "best",
        min_reward: float | None = None,
        **options: Any,
    ) -> None:
        check_choice("select", select, ("best", "all"))
        check_number("min_reward", min_reward, or_none="no lower limit")
        super().__init__(backend, **options)
        self.select, self.min_reward = select, min_reward
        self.loss = CrossEntropyLoss()
        self.backend.check_loss(self.loss)

    def choose(self, rollouts: Iterable[RecordedReward]) -> Sequence[str]:
        """Return the ids of the rollouts that are imitated."""
        if self.select == "best":
            return best_of_groups(rollouts, min_reward=self.min_reward)
        return [each.rollout_id for each in rollouts if self.min_reward is None or each.reward >= self.min_reward]

    async def learn(self, items: Sequence[str], store: LightningStore, iteration: int) -> Metrics:
        """Make one optimizer step that raises the likelihood of some rollouts."""
        found = await self._read(items, store)
        rollouts = [found[rollout_id] for rollout_id in items if rollout_id in found]
        if not rollouts:
            return self._nothing_learned(iteration)
        return await self._optimise([weighted(rollouts, self.weighting)], self.loss, iteration)


class DPO(RecordedAlgorithm[PreferencePair]):
    """Direct preference optimisation on recorded rollouts (DPO, arXiv:2305.18290, eq. 7).

    loss = mean over pairs of -log sigmoid(beta (log(p(w) / ref(w)) - log(p(l) / ref(l)))), where w is the best and l
    the worst rollout of a group, and the log-probabilities are sums over all tokens that the policy sampled in a
    rollout, however many calls it made.

    beta: how strongly the policy is held near the reference; above 0.
    label_smoothing: the assumed share of pairs whose better rollout is in truth the worse one (conservative DPO); 0 to
        0.5.
    min_margin: the rewards of a pair must differ by more than this.
    reference: the frozen policy; None: a second backend like `backend`.
    options: further options of `RecordedAlgorithm`, such as `source`. `weighting` has no effect.
    """

    def __init__(
        self,
        backend: PolicyBackend | Mapping[str, Any],
        *,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        min_margin: float = 0.0,
        reference: PolicyBackend | None = None,
        **options: Any,
    ) -> None:
        check_number("min_margin", min_margin, at_least=0)
        super().__init__(backend, **options)
        self.min_margin = min_margin
        self.loss = DPOLoss(beta=beta, label_smoothing=label_smoothing)
        self.backend.check_loss(self.loss)
        self.reference = reference or make_reference(self.backend)
        self._other_backends = [self.reference]

    def choose(self, rollouts: Iterable[RecordedReward]) -> Sequence[PreferencePair]:
        """Return the best and the worst rollout of each group."""
        return pairs_of_groups(rollouts, min_margin=self.min_margin)

    async def learn(self, items: Sequence[PreferencePair], store: LightningStore, iteration: int) -> Metrics:
        """Make one optimizer step on some pairs.

        A forward pass gives the log-probabilities, and they give the weight of each pair in the gradient
        (`dpo_weights`). So the two rollouts of a pair need not be in one batch.
        """
        found = await self._read((each for pair in items for each in (pair.chosen, pair.rejected)), store)
        pairs = [pair for pair in items if pair.chosen in found and pair.rejected in found]
        if not pairs:
            return self._nothing_learned(iteration)
        rollouts = [found[rollout_id] for pair in pairs for rollout_id in (pair.chosen, pair.rejected)]
        policy = await self._rollout_logprobs(self.backend, rollouts)
        reference = await self._rollout_logprobs(self.reference, rollouts)
        dpo = dpo_weights(
            policy[::2],
            policy[1::2],
            reference[::2],
            reference[1::2],
            beta=self.loss.beta,
            label_smoothing=self.loss.label_smoothing,
        )
        signed = [sign * weight for weight in dpo.weights_P for sign in (1.0, -1.0)]
        sequences = [
            replace(sequence, weights=weights, columns={"coefficients": [coefficient] * len(weights)})
            for rollout, coefficient in zip(rollouts, signed, strict=True)
            for sequence, trajectory in zip(rollout.sequences, rollout.data.trajectories, strict=True)
            for weights in [[mask / len(pairs) for mask in trajectory.loss_mask]]
        ]
        metrics = await self._optimise([sequences], self.loss, iteration)
        return {**metrics, "loss": dpo.loss, "pairs": len(pairs), "accuracy": dpo.accuracy, "margin": dpo.margin}

    async def _rollout_logprobs(self, learner: Learner, rollouts: Sequence[StepRollout]) -> list[float]:
        sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
        found = iter((await learner.forward(sequences, temperature=self.temperature)).logprobs)
        return [math.fsum(value for _ in rollout.sequences for value in next(found)) for rollout in rollouts]
