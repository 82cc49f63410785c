"""Outcomes of attempts and rollouts: rewards, tokens, cost and failures, kept in columns as spans arrive.

Each span that carries a reward or is a recorded model call updates its attempt's columns. A rollout gets the values of
its latest attempt when it finishes, and again if a reward arrives later. Filters, orders and summaries read one index
of finished rollouts and no span. To add a measure, add columns by a migration, two queries, and a line in `_QUERIES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leyden._lib.options import check_number
from leyden.store.sql.body.lookup import run_key
from leyden.store.sql.body.rollout_filter import RolloutFilter, check_measure
from leyden.store.sql.transaction import SpanTarget, Transaction
from leyden.types import (
    ROLLOUT_FINISHED,
    Attempt,
    Histogram,
    Measure,
    MeasureSummary,
    RolloutSummary,
    Span,
    Spending,
    get_reward_value,
    get_rewards_from_span,
    semconv,
)
from leyden.types.checks import json_text
from leyden.types.run_record import algorithm_group

NO_OUTCOME = (None, "", 0, 0, None, None, 0)
"""The outcome columns of an attempt that has just begun, in the order of `attempt_columns`."""
_RECORDED_CALLS = frozenset({semconv.MODEL_CALL, semconv.EMBEDDINGS})
"""The names of spans that the gateway records for calls."""
_MAX_TOKENS = 2**53
"""A span with more tokens is wrong, and counts none, so that sums do not overflow."""
_MAX_BINS = 1000
_QUERIES: Mapping[Measure, tuple[str, str]] = {
    "reward": ("summarise_reward", "histogram_of_reward"),
    "tokens": ("summarise_tokens", "histogram_of_tokens"),
    "cost": ("summarise_cost", "histogram_of_cost"),
    "seconds": ("summarise_seconds", "histogram_of_seconds"),
}
"""The queries that summarise a measure and count its histogram."""


def add_to_outcome(tx: Transaction, target: SpanTarget, spans: Sequence[Span]) -> None:
    """Update the attempt's columns with its new spans, and the rollout's if it has finished with this attempt."""
    changed = False
    for span in spans:
        if span.name in _RECORDED_CALLS:
            _add_call(target, span)
            changed = True
        if span.sequence_id >= target.reward_span and (reward := get_reward_value(span)) is not None:
            target.reward = reward
            target.rewards = json_text(get_rewards_from_span(span), "the rewards of a span")
            target.reward_span = span.sequence_id
            changed = True
    if not changed:
        return
    outcome = (target.reward, target.rewards, target.reward_span, target.prompt_tokens, target.response_tokens)
    tx.put("set_outcome", (*outcome, target.cost, target.unpriced_calls, target.rollout, target.attempt))
    if target.rollout_status in ROLLOUT_FINISHED and target.attempt == target.attempts:
        tokens = target.prompt_tokens + target.response_tokens
        tx.run("follow_outcome", seq=target.rollout, reward=target.reward, tokens=tokens, cost=target.cost)


def _add_call(target: SpanTarget, span: Span) -> None:
    """Add the tokens and the cost of a recorded model call. A replayed one took none."""
    said = span.attributes
    if said.get(semconv.REPLAYED) is True:
        return
    target.prompt_tokens += _count(said.get(semconv.GEN_AI_INPUT_TOKENS))
    target.response_tokens += _count(said.get(semconv.GEN_AI_OUTPUT_TOKENS))
    cost = said.get(semconv.COST)
    if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < math.inf:
        target.cost = (target.cost or 0.0) + cost
    elif span.status.status_code == "OK" or semconv.COST_UNKNOWN in said:
        target.unpriced_calls += 1


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else 0


def sum_spending(tx: Transaction, run_id: str) -> Spending:
    run = run_key(tx, run_id)
    row = tx.one("sum_spending", run=run, algorithm=algorithm_group(run_id))
    assert row is not None
    attempts, prompt_tokens, response_tokens, *costs, unpriced_calls = row
    known = [cost for cost in costs if cost is not None]
    return Spending(
        attempts=attempts,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        cost=math.fsum(known) if known else None,
        unpriced_calls=unpriced_calls,
    )


def failure_of(attempt: Attempt) -> str:
    """Return why an attempt that ended without success failed: its kind of reason, or its status without one."""
    kind = attempt.metadata.get("reason_kind")
    return kind if isinstance(kind, str) and 0 < len(kind) <= 200 else attempt.status


def summarise_rollouts(
    tx: Transaction, matching: RolloutFilter, *, measures: Sequence[Measure] = ("reward",), bins: int = 20
) -> RolloutSummary:
    """Count finished rollouts by status and failure, and summarise each measure with a histogram.

    The database groups rows by index, so the cost grows with the matching rollouts, not with their spans.
    """
    check_number("bins", bins, at_least=1, at_most=_MAX_BINS, whole=True)
    for measure in measures:
        check_measure("measures", measure)
    _, filters = matching.conditions()
    tx.expect(None)  # perhaps many rows
    always: list[str] = []
    parameters = filters.parameters
    if matching.run_id is not None:
        always.append("r.run = :run")
        parameters["run"] = run_key(tx, matching.run_id)
    where = filters.sql(*always, begins="AND")
    summary = RolloutSummary(finished=0)
    for measure in measures or (None,):
        query = "count_outcomes" if measure is None else _QUERIES[measure][0]
        # In the order of the index, so that the groups need no sorting.
        rows = tx.page(query, f"{where} GROUP BY r.run, r.status, r.failure", parameters)
        if not summary.finished:
            for status, failure, count, *_ in rows:
                summary.finished += count
                summary.by_status[status] = summary.by_status.get(status, 0) + count
                if failure is not None:
                    summary.by_failure[failure] = summary.by_failure.get(failure, 0) + count
        found = [row[3:] for row in rows if len(row) > 3 and row[3]]
        if measure is not None and found:
            count = sum(row[0] for row in found)
            lowest, highest = float(min(row[2] for row in found)), float(max(row[3] for row in found))
            mean = min(max(math.fsum(row[1] for row in found) / count, lowest), highest)
            summary.measures[measure] = MeasureSummary(
                count=count,
                mean=mean,
                minimum=lowest,
                maximum=highest,
                histogram=_histogram(tx, measure, where, parameters, (lowest, highest), count, bins),
            )
    return summary


def _histogram(
    tx: Transaction,
    measure: Measure,
    where: str,
    parameters: Mapping[str, object],
    ends: tuple[float, float],
    count: int,
    bins: int,
) -> Histogram:
    """Count the values of a measure in bins of equal width between the lowest and the highest.

    Equal values, and values whose range is too large or too small to be divided, are in one bin.

    ends: the lowest and the highest value.
    count: the number of values.
    """
    lowest, highest = ends
    width = (highest - lowest) / bins
    if not (0 < width < math.inf and 1 / width < math.inf):
        return Histogram(edges=[lowest, highest], counts=[count])
    given = {**parameters, "lowest": lowest, "bins_per_unit": 1 / width}
    # One text with a character for each value: chr(1 + the number of its bin)
    [[bins_of_values]] = tx.page(_QUERIES[measure][1], f"{where} AND r.{measure} IS NOT NULL", given)
    counts = [bins_of_values.count(chr(1 + index)) for index in range(bins)]
    counts[-1] += bins_of_values.count(chr(1 + bins))  # the highest value belongs to the last bin
    return Histogram(edges=[lowest + index * width for index in range(bins)] + [highest], counts=counts)
