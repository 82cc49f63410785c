"""Turn the rollouts of a recorded run into rows of a data set. `leyden dataset` writes them.

| format | a row is |
|---|---|
| `messages` | a conversation, as OpenAI's fine-tuning and TRL's `SFTTrainer` take it |
| `completion` | a conversation before its last answer, and that answer |
| `preference` | two rollouts of one group with equal prompts and unequal rewards, for `DPOTrainer` |
| `tokens` | the exact tokens of a trajectory, with the mask of those that the model sampled |
| `verifiers` | a rollout as the package verifiers saves it |

A row holds what the spans prove, and where it comes from (`provenance`). A rollout that cannot fill the format exactly
gives no row, and its id is noted with the reason. The module knows the store and the adapters, and no file. To add a
format, add it to `Format`, its row to `Rows._of_rollout`, and its columns to `dataset_file`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, Literal, cast, get_args

from leyden._lib.json import Json
from leyden.adapter import TraceToMessages, TraceToTriplet
from leyden.adapter.attributes import as_dict, as_list
from leyden.adapter.messages import RecordedConversation
from leyden.adapter.token_graph import TokenGraph
from leyden.adapter.trajectory import refusal
from leyden.errors import ConfigError
from leyden.store.base import LightningStore
from leyden.training.runs.recorded_runs import RecordedRun, iteration_of
from leyden.training.runs.rollouts import pages_of, read_rewards
from leyden.training.runs.where import Missing, Where
from leyden.types import AttemptedRollout, Rollout, Span
from leyden.types.run_record import algorithm_group

Format = Literal["messages", "completion", "preference", "tokens", "verifiers"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
COLUMNS: Final = (
    *("rollout", "mode", "status", "iteration", "reward", "rewards", "tokens", "prompt_tokens", "response_tokens"),
    *("cost", "seconds", "attempt", "group", "arm", "resources_version", "task", "metadata"),
)
"""The names that a condition may use. `tokens` are those of prompts and responses, as the gateway recorded them,
`attempt` is the number of the attempt, `task` and `metadata` are the rollout's."""
_NO_ANSWER = "no answer of the model to the agent was recorded"
_BATCH = 50
"""Rollouts whose spans are read at once."""


@dataclass(slots=True)
class Selection:
    """Which rollouts of a run are wanted. `left_out` fills while they are read.

    where: a condition on `COLUMNS`. Rollouts that did not succeed are left out unless it names `status`.
    modes: the modes that are left out unless the condition names `mode`.
    min_reward: the least reward; None: any, or none.
    reward: a dimension of the reward, or the source of feedback that counts as the reward; None: the primary reward.
    """

    where: str | None = None
    modes: tuple[str, ...] = ("val", "test")
    min_reward: float | None = None
    reward: str | None = None
    left_out: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    """The ids of the rollouts that gave no row, or fewer, by the reason."""

    async def pages(
        self, run: RecordedRun, store: LightningStore
    ) -> AsyncIterator[list[tuple[AttemptedRollout, float | None]]]:
        """Yield the wanted rollouts page by page, with their rewards.

        Raise ConfigError for a bad condition, and if no rollout has the reward `reward`.
        """
        where = None if self.where is None else Where(self.where, COLUMNS)
        reward_of = await read_rewards(store, self.reward)
        has_reward, names = self.reward is None, set[str]()
        async for page in pages_of(run, store):
            wanted = list[tuple[AttemptedRollout, float | None]]()
            for rollout in page:
                if rollout.group_id == algorithm_group(run.record.run_id):
                    continue  # what the algorithm asked, not the agent
                reward = reward_of(rollout)
                has_reward = has_reward or reward is not None
                names |= rollout.attempt.rewards.keys() if isinstance(rollout, AttemptedRollout) else set()
                if (reason := self._reason(rollout, reward, where)) is not None:
                    self.left_out[reason].append(rollout.rollout_id)
                else:
                    wanted.append((cast(AttemptedRollout, rollout), reward))
            yield wanted
        if not has_reward:
            names |= {each.source for each in await store.query_feedback(kind="reward", counted=True)}
            raise ConfigError(
                f"no rollout has the reward {self.reward!r}; there are: {', '.join(sorted(names)) or 'none'}; give one of "
                "them, or make one with leyden rescore"
            )

    def _reason(self, rollout: Rollout, reward: float | None, where: Where | None) -> str | None:
        """Return why a rollout is left out; None if it is wanted."""
        names = set[str]() if where is None else where.names
        if not rollout.finished or not isinstance(rollout, AttemptedRollout):
            return f"it is {rollout.status}" + " before its first attempt" * rollout.finished
        if "status" not in names and rollout.status != "succeeded":
            return f"it is {rollout.status}"
        if "mode" not in names and rollout.mode in self.modes:
            return f"its mode is {rollout.mode} (a condition that names mode decides itself)"
        if where is not None:
            try:
                held = where.decide(_columns(rollout, reward))
            except ConfigError as error:
                raise ConfigError(f"the condition {where.text!r}, at rollout {rollout.rollout_id}: {error}") from None
            if held is not True:
                return f"it has no {held.name}" if isinstance(held, Missing) else "the condition does not hold"
        if reward is None and (self.min_reward is not None or self.reward is not None):
            return "it has no reward" if self.reward is None else f"it has no reward {self.reward!r}"
        if self.min_reward is not None and cast(float, reward) < self.min_reward:
            return f"its reward is below {self.min_reward:g}"
        return None


def _columns(rollout: AttemptedRollout, reward: float | None) -> Json:
    attempt = rollout.attempt
    seconds = None if attempt.end_time is None else attempt.end_time - attempt.start_time
    counted = attempt.prompt_tokens + attempt.response_tokens > 0  # 0: no call was recorded by the gateway
    return {
        "rollout": rollout.rollout_id,
        "mode": rollout.mode,
        "status": rollout.status,
        "iteration": iteration_of(rollout),
        "reward": reward,
        "rewards": attempt.rewards,
        "tokens": attempt.prompt_tokens + attempt.response_tokens if counted else None,
        "prompt_tokens": attempt.prompt_tokens if counted else None,
        "response_tokens": attempt.response_tokens if counted else None,
        "cost": attempt.cost,
        "seconds": seconds,
        "attempt": attempt.sequence_id,
        "group": rollout.group_id,
        "arm": rollout.arm,
        "resources_version": rollout.resources_version,
        "task": rollout.input,
        "metadata": rollout.metadata,
    }


_Part = tuple[AttemptedRollout, float, RecordedConversation]
"""A rollout with its reward and its only conversation."""


@dataclass(slots=True)
class Rows:
    """The rows of a run in one format.

    every_answer: `messages` and `completion` have a row for each answer of the model; otherwise for the last one of
        each branch of a conversation.
    margin: the rewards of a pair differ by more than this.
    between: pairs may have messages between the answers that the model did not write, such as tool results. TRL would
        train on them as on answers.
    """

    run: RecordedRun
    selection: Selection
    format: Format
    every_answer: bool = False
    margin: float = 0.0
    between: bool = False
    _examples: dict[str, int] = field(default_factory=dict[str, int])
    _run_id: str = ""

    async def read(
        self, store: LightningStore, on_progress: Callable[[int], None] = lambda _: None
    ) -> AsyncIterator[Json]:
        """Yield the rows, in the order of the rollouts; pairs in the order of their groups.

        on_progress: called with the number of rollouts that were read.
        """
        self._run_id = self.run.record.run_id
        groups, done = defaultdict[str, list[tuple[str, float]]](list), 0
        async for page in self.selection.pages(self.run, store):
            for start in range(0, len(page), _BATCH) if self.format != "preference" else ():
                batch = page[start : start + _BATCH]
                spans = await store.query_spans_of([rollout.rollout_id for rollout, _ in batch])
                for rollout, reward in batch:
                    for row in self._of_rollout(rollout, reward, spans[rollout.rollout_id]):
                        yield row
                on_progress(done := done + len(batch))
            for rollout, reward in page if self.format == "preference" else ():
                if reward is None:
                    self._leave_out("it has no reward", rollout.rollout_id)
                else:
                    groups[rollout.group_id or _json(rollout.input)].append((rollout.rollout_id, reward))
        for members in groups.values():
            rewards = [reward for _, reward in members]
            if max(rewards) - min(rewards) <= self.margin:
                self._leave_out("the rewards of its group differ too little", *(each for each, _ in members))
                continue
            for row in await self._pairs(dict(members), store):
                yield row
            on_progress(done := done + len(members))

    def _leave_out(self, reason: str, *rollout_ids: str) -> None:
        self.selection.left_out[reason].extend(rollout_ids)

    def _of_rollout(self, rollout: AttemptedRollout, reward: float | None, spans: Sequence[Span]) -> Iterator[Json]:
        if self.format == "tokens":
            yield from self._of_tokens(rollout, reward, spans)
            return
        if self.format == "verifiers" and reward is None:
            self._leave_out("it has no reward", rollout.rollout_id)
            return
        found = self._conversations(rollout, spans, one=self.format == "verifiers")
        for each in found:
            if self.format == "messages":
                row = {"messages": each.messages, **_tools(each)}
            elif self.format == "completion":
                row = {"prompt": each.messages[:-1], "completion": each.messages[-1:], **_tools(each)}
            else:
                row = self._of_verifiers(rollout, cast(float, reward), each)
            yield {**row, "provenance": self._provenance(rollout, reward, each)}

    def _conversations(
        self, rollout: AttemptedRollout, spans: Sequence[Span], *, one: bool
    ) -> list[RecordedConversation]:
        """Return the conversations that are exactly what the model read and wrote. Note why others are left out.

        one: return none if there are several.
        """
        found = TraceToMessages().conversations(spans, every_answer=self.every_answer)
        reasons = [each.inexact for each in found if each.inexact] if found else [_NO_ANSWER]
        if one and len(found) > 1:
            reasons = [f"it has {len(found)} conversations, and a row of the format has one"]
        for reason in reasons:
            self._leave_out(reason, rollout.rollout_id)
        return [each for each in found if each.inexact is None] if not one or len(found) == 1 else []

    def _of_tokens(self, rollout: AttemptedRollout, reward: float | None, spans: Sequence[Span]) -> Iterator[Json]:
        """Yield a row for each trajectory of a rollout. If one call cannot be trained on, there is none, because the
        others would be credited with what that call did.
        """
        triplets = TraceToTriplet().adapt(spans)
        refused = [reason for triplet in triplets if (reason := refusal(triplet)) is not None]
        graph = TokenGraph()
        for triplet in triplets if not refused else ():
            graph.add(triplet)
        found = graph.trajectories()
        if not found:
            self._leave_out(refused[0] if refused else _NO_ANSWER, rollout.rollout_id)
        for each in found:
            calls = [triplets[number].metadata for number in each.call_numbers]
            yield {
                "input_ids": each.token_ids,
                "assistant_masks": each.loss_mask,
                "logprobs": each.logprobs,
                "provenance": self._source(
                    rollout,
                    reward,
                    [str(call["span_id"]) for call in calls],
                    model=calls[-1].get("model"),
                    versions=[] if each.policy_versions is None else list(each.policy_versions),
                ),
            }

    def _of_verifiers(self, rollout: AttemptedRollout, reward: float, of: RecordedConversation) -> Json:
        messages = [_verifiers_message(message) for message in of.messages]
        answer = as_dict(rollout.input).get("answer")
        functions = [as_dict(tool.get("function")) for tool in of.tools or ()]
        return {
            "example_id": self._examples.setdefault(rollout.group_id or _json(rollout.input), len(self._examples)),
            "prompt": messages[: of.prompt_length],
            "completion": messages[of.prompt_length :],
            "answer": answer if isinstance(answer, str) else "",
            "info": {"task": rollout.input},
            "reward": reward,
            "metrics": rollout.attempt.rewards,
            "is_completed": rollout.status == "succeeded",
            "is_truncated": False,  # a row with an answer that was cut off is left out
            "tool_defs": [{"description": "", "parameters": {}, **each} for each in functions],
        }

    async def _pairs(self, members: dict[str, float], store: LightningStore) -> list[Json]:
        """Return a pair for each prompt of a group: its best and its worst rollout, the earliest of equal ones."""
        rollouts = await store.query_rollouts(rollout_id_in=list(members))
        spans, by_prompt = await store.query_spans_of(list(members)), defaultdict[str, list[_Part]](list)
        for rollout in cast(Sequence[AttemptedRollout], rollouts):
            for each in self._conversations(rollout, spans[rollout.rollout_id], one=True):
                prompt = _json([each.tools, each.messages[: each.prompt_length]])
                by_prompt[prompt].append((rollout, members[rollout.rollout_id], each))
        rows = list[Json]()
        for parts in by_prompt.values():
            best, worst = max(parts, key=itemgetter(1)), min(parts, key=itemgetter(1))
            ids = [rollout.rollout_id for rollout, *_ in parts]
            if best[1] - worst[1] <= self.margin:
                self._leave_out("no rollout of its group has the same prompt and another reward", *ids)
                continue
            pair = {best[0].rollout_id, worst[0].rollout_id}
            self._leave_out(
                "it is neither the best nor the worst of its group", *(each for each in ids if each not in pair)
            )
            row = self._pair(best, worst)
            if isinstance(row, str):
                self._leave_out(row, *pair)
            else:
                rows.append(row)
        return rows

    def _pair(self, chosen: _Part, rejected: _Part) -> Json | str:
        """Return a pair whose prompt ends where the two conversations part, or why there is none."""
        one, other = chosen[2].messages, rejected[2].messages
        both = zip(one, other, strict=False)
        parted = next((number for number, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
        tails = one[parted:], other[parted:]
        if not all(tail and tail[0].get("role") == "assistant" for tail in tails):
            return "the two conversations do not part at an answer of the model"
        if not self.between and any(message.get("role") != "assistant" for tail in tails for message in tail):
            return "there are messages between its answers that the model did not write (--between allows them)"
        return {
            "prompt": one[:parted],
            "chosen": tails[0],
            "rejected": tails[1],
            **_tools(chosen[2]),
            "margin": chosen[1] - rejected[1],
            "provenance": {"chosen": self._provenance(*chosen), "rejected": self._provenance(*rejected)},
        }

    def _provenance(self, rollout: AttemptedRollout, reward: float | None, of: RecordedConversation) -> Json:
        versions = [each for call in of.calls if call.tokens for each in call.tokens.policy_versions or ()]
        spans = [call.span.span_id for call in of.calls]
        return self._source(rollout, reward, spans, model=of.calls[-1].model, versions=versions)

    def _source(
        self, rollout: AttemptedRollout, reward: float | None, spans: list[str], *, model: Any, versions: Sequence[int]
    ) -> Json:
        return {
            "run": self._run_id,
            "rollout": rollout.rollout_id,
            "attempt": rollout.attempt.attempt_id,
            "mode": rollout.mode,
            "iteration": iteration_of(rollout),
            "group": rollout.group_id,
            "task": _json(rollout.input),
            "reward": reward,
            "reward_name": self.selection.reward or "primary",
            "model": model,
            "policy_versions": [min(versions), max(versions)] if versions else None,
            "resources_id": rollout.resources_id,
            "resources_version": rollout.resources_version,
            "spans": spans,
        }


def _json(value: Any) -> str:
    """Return a value of any type as text, because a column of a data set has one type."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _tools(of: RecordedConversation) -> Json:
    return {"tools": of.tools} if of.tools else {}


def _verifiers_message(message: Json) -> Json:
    calls = [as_dict(call) for call in as_list(message.get("tool_calls"))]
    flat = [_json({"id": call.get("id"), **as_dict(call.get("function"))}) for call in calls]
    return {**message, "content": message.get("content") or "", **({"tool_calls": flat} if flat else {})}
