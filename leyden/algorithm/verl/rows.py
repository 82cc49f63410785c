"""Convert scored rollouts to the padded rows of a verl batch.

`score_rollouts`, `make_rows`, `truncate_rows` and `row_tensors` run in this order. They do no I/O, and count dropped
rollouts and rows in a `Report`. Only `row_tensors` needs torch, and only `data_proto`, which makes verl's batch, needs
verl. The layout is verl's: prompts are padded on the left, responses on the right.

If all rows of a rollout are dropped, it gets one row without a trained token, because its reward counts in its group's
baseline, as it does in `PolicyGradient`.

Shapes: R rows, P prompt tokens, S response tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from leyden._lib.extras import import_optional
from leyden._lib.options import check_choice, check_number
from leyden.algorithm.policy_gradient.step_data import Group
from leyden.errors import NoTrainingData
from leyden.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", int, float)
Aggregation = Literal["trajectory", "transition"]
"""How the calls of a rollout become rows. "trajectory": consecutive calls, each of which continues the one before,
share a row. "transition": each call is a row, whose prompt repeats the calls before it."""

Overlong = Literal["drop", "cut"]
"""The treatment of a row whose response is too long. "drop": it is dropped. "cut": the response's end is cut off, which
changes nothing for the tokens before. A row whose prompt is too long is always dropped, because with a shorter prompt
the response would have other log-probabilities."""


@dataclass(frozen=True, slots=True)
class RewardedRollout:
    """One rollout with its reward."""

    group: str
    """The name of the rollout's group, which has all rollouts of one task; verl's `uid`."""
    rollout_id: str
    reward: float
    trajectories: tuple[Trajectory, ...]
    """Empty if the rollout only counts in its group's baseline."""


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """One sequence to train on, as verl has it: a prompt of any length and a response of S tokens."""

    group: str
    rollout_id: str
    reward: float
    prompt_ids: list[int]
    response_ids: list[int]
    """Shape (S,): all tokens from the first sampled one on, with those of the environment between two calls."""
    response_mask: list[int]
    """Shape (S,): 1 where the policy sampled the token."""
    logprobs: list[float]
    """Shape (S,): log-probability of each sampled token when it was drawn; 0.0 elsewhere."""
    n_calls: int = 1
    """The number of model calls in the row."""

    @property
    def n_trained(self) -> int:
        """The number of tokens that are trained on."""
        return sum(self.response_mask)


@dataclass(slots=True)
class Report:
    """Counts of a batch: its rollouts and rows, and how many were dropped, cut or added."""

    rollouts: int = 0
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    """The number of rollouts or rows that were dropped, by reason."""
    cut_tokens: int = 0
    """The number of trained tokens that were cut off at the ends of responses."""
    placeholders: int = 0
    """The number of rows without a trained token that carry the reward of a rollout that cannot be trained on."""

    def metrics(self, prefix: str = "leyden/") -> dict[str, float]:
        """Return the counts as metrics of verl's logger."""
        counts = {
            "rollouts": self.rollouts,
            "rows": self.rows,
            "dropped": self.dropped.total(),
            "cut_tokens": self.cut_tokens,
            "placeholder_rows": self.placeholders,
        }
        return {f"{prefix}{name}": float(value) for name, value in counts.items()}

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common(5))
        return f"{self.rollouts} rollouts gave {self.rows} rows" + (f"; dropped: {reasons}" if reasons else "")


# ---- rewards -------------------------------------------------------------------------------------


def score_rollouts(groups: Sequence[Group], names: Sequence[str] = ()) -> tuple[list[RewardedRollout], Report]:
    """Return the rollouts of all groups that have a finite reward, and a report that counts the others by reason.

    names: the name of each group; by default its number.
    """
    report = Report()
    scored: list[RewardedRollout] = []
    for number, group in enumerate(groups):
        name = names[number] if names else str(number)
        for rollout in group.rollouts:
            if not math.isfinite(rollout.reward):
                report.dropped[f"the reward is {rollout.reward}"] += 1
                continue
            trained = tuple(trajectory for trajectory in rollout.trajectories if trajectory.n_trained)
            scored.append(RewardedRollout(name, rollout.rollout_id, rollout.reward, trained))
    report.rollouts = len(scored)
    return scored, report


# ---- rows ----------------------------------------------------------------------------------------


def make_rows(rollouts: Sequence[RewardedRollout], level: Aggregation = "trajectory") -> list[SequenceRow]:
    """Return the rows of all rollouts that have a trained token, in the order of the rollouts and their calls.

    level: whether a row holds a trajectory or one call (`Aggregation`).
    """
    check_choice("level", level, ("trajectory", "transition"))
    return [
        row
        for rollout in rollouts
        for trajectory in rollout.trajectories
        for row in (
            [_row(rollout, trajectory, trajectory.call_spans)]
            if level == "trajectory"
            else [_row(rollout, trajectory, [span]) for span in trajectory.call_spans]
        )
        if row.n_trained
    ]


def _row(rollout: RewardedRollout, trajectory: Trajectory, calls: Sequence[tuple[int, int]]) -> SequenceRow:
    """Return the row that holds consecutive calls of a trajectory.

    calls: (start, end) indices of the calls' response tokens. Tokens between two calls are in the row, with mask 0.
    """
    start, end = calls[0][0], calls[-1][1]
    return SequenceRow(
        group=rollout.group,
        rollout_id=rollout.rollout_id,
        reward=rollout.reward,
        prompt_ids=trajectory.token_ids[:start],
        response_ids=trajectory.token_ids[start:end],
        response_mask=trajectory.loss_mask[start:end],
        logprobs=trajectory.logprobs[start:end],
        n_calls=len(calls),
    )


# ---- truncation ----------------------------------------------------------------------------------


def truncate_rows(
    rows: Sequence[SequenceRow],
    rollouts: Sequence[RewardedRollout],
    report: Report,
    *,
    max_prompt_length: int,
    max_response_length: int,
    overlong: Overlong = "drop",
    pad_id: int = 0,
) -> list[SequenceRow]:
    """Return the rows that fit, and a placeholder for each rollout without one. Count dropped rows, cut tokens and
    placeholders in `report`.

    overlong: what is done with a row whose response is too long (`Overlong`).
    pad_id: the token of a placeholder's prompt and response.
    Raise NoTrainingData if no row has a trained token.
    """
    check_choice("overlong", overlong, ("drop", "cut"))
    for name, limit in (("max_prompt_length", max_prompt_length), ("max_response_length", max_response_length)):
        check_number(name, limit, at_least=1, whole=True)
    kept: dict[str, list[SequenceRow]] = {rollout.rollout_id: [] for rollout in rollouts}
    for row in rows:
        fitting = _fit(row, report, max_prompt_length, max_response_length, overlong)
        if fitting is not None:
            kept[row.rollout_id].append(fitting)
    if not any(kept.values()):
        raise NoTrainingData(
            f"no row of {len(rollouts)} rollouts can be trained on: {report}. Raise data.max_prompt_length "
            f"({max_prompt_length}) or data.max_response_length ({max_response_length}), or look at the failed rollouts"
        )
    for rollout in rollouts:
        if not kept[rollout.rollout_id]:
            report.placeholders += 1
            kept[rollout.rollout_id].append(placeholder_row(rollout, pad_id))
    found = [row for rollout in rollouts for row in kept[rollout.rollout_id]]
    report.rows = len(found)
    return found


def _fit(
    row: SequenceRow, report: Report, max_prompt: int, max_response: int, overlong: Overlong
) -> SequenceRow | None:
    """Return the row, cut to `max_response` if `overlong` is "cut", or None if it must be dropped."""
    if len(row.prompt_ids) > max_prompt:
        report.dropped[f"the prompt is longer than max_prompt_length={max_prompt}"] += 1
        return None
    if len(row.response_ids) <= max_response:
        return row
    if overlong == "drop" or not any(row.response_mask[:max_response]):
        report.dropped[f"the response is longer than max_response_length={max_response}"] += 1
        return None
    report.cut_tokens += sum(row.response_mask[max_response:])
    return replace(
        row,
        response_ids=row.response_ids[:max_response],
        response_mask=row.response_mask[:max_response],
        logprobs=row.logprobs[:max_response],
    )


def placeholder_row(rollout: RewardedRollout, pad_id: int) -> SequenceRow:
    """Return a row without a trained token that carries a rollout's reward."""
    return SequenceRow(rollout.group, rollout.rollout_id, rollout.reward, [pad_id], [pad_id], [0], [0.0], n_calls=0)


def rollout_scales(trained: Sequence[tuple[str, int]]) -> list[float]:
    """Return for each row R / (rollouts * trained tokens of its rollout), shape (R,); 0.0 for a row of a rollout that
    is not trained on.

    If the advantages are multiplied by these factors, verl's `seq-mean-token-sum` averages over rollouts, for a policy
    loss that is homogeneous in the advantages (PPO's clipped one, GSPO, CISPO). Rollouts without a trained token do not
    count, as in `PolicyGradient`.

    trained: the rollout's id and the number of trained tokens of each row.
    """
    n_trained: Counter[str] = Counter()
    for rollout_id, count in trained:
        n_trained[rollout_id] += count
    n_rollouts = sum(count > 0 for count in n_trained.values())
    of_rows = [n_trained[rollout_id] for rollout_id, _ in trained]
    return [len(trained) / (n_rollouts * count) if count else 0.0 for count in of_rows]


# ---- tensors -------------------------------------------------------------------------------------


def row_tensors(
    rows: Sequence[SequenceRow], *, pad_id: int, prompt_length: int | None = None, response_length: int | None = None
) -> dict[str, Tensor]:
    """Return the tensors of R rows by verl's names, on the CPU. Prompts are padded on the left to P tokens, responses
    on the right to S tokens.

    prompts (R, P), responses (R, S), input_ids, attention_mask and position_ids (R, P + S), response_mask,
    rollout_log_probs, token_level_scores (R, S), and rollout_scales (R,).

    A row's score is its rollout's reward, at its last token. verl's GRPO takes the score of the last row for the whole
    rollout; its other estimators take each row as a sample. Multiply the advantages by `rollout_scales`: then the mean
    over rows of (sum over a row's tokens) is the mean over rollouts of (mean over the rollout's tokens).

    pad_id: the token of the padding.
    prompt_length, response_length: the lengths to pad to; None: the longest one.
    """
    import torch

    width_P = prompt_length or max(len(row.prompt_ids) for row in rows)
    width_S = response_length or max(len(row.response_ids) for row in rows)

    def left(values: Sequence[list[int]], padding: int) -> Tensor:
        return torch.tensor([[padding] * (width_P - len(each)) + each for each in values], dtype=torch.int64)

    def right(values: Sequence[list[Number]], padding: Number) -> Tensor:
        padded = [each + [padding] * (width_S - len(each)) for each in values]
        return torch.tensor(padded, dtype=torch.int64 if isinstance(padding, int) else torch.float32)

    prompts_RP = left([row.prompt_ids for row in rows], pad_id)
    responses_RS = right([row.response_ids for row in rows], pad_id)
    used_RP = left([[1] * len(row.prompt_ids) for row in rows], 0)
    used_RS = right([[1] * len(row.response_ids) for row in rows], 0)
    attention = torch.cat([used_RP, used_RS], dim=1)
    return {
        "prompts": prompts_RP,
        "responses": responses_RS,
        "input_ids": torch.cat([prompts_RP, responses_RS], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": right([row.response_mask for row in rows], 0),
        "rollout_log_probs": right([row.logprobs for row in rows], 0.0),
        "token_level_scores": right([[0.0] * (len(row.response_ids) - 1) + [row.reward] for row in rows], 0.0),
        "rollout_scales": torch.tensor(
            rollout_scales([(row.rollout_id, row.n_trained) for row in rows]), dtype=torch.float32
        ),
    }


def data_proto(rows: Sequence[SequenceRow], **padding: Any) -> Any:
    """Return rows as verl's `DataProto`: the tensors, and `uid` (the group), `rollout_ids` and `__num_turns__`.

    padding: the options of `row_tensors`.
    Raise MissingExtra if verl is not installed.
    """
    import numpy as np

    protocol = import_optional("verl.protocol", extra="verl", needed_by="data_proto")
    return protocol.DataProto.from_dict(
        tensors=row_tensors(rows, **padding),
        non_tensors={
            "uid": np.array([row.group for row in rows], dtype=object),
            "rollout_ids": np.array([row.rollout_id for row in rows], dtype=object),
            "__num_turns__": np.array([row.n_calls for row in rows], dtype=np.int32),
        },
    )
