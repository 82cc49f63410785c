"""The state machine: final means final, and only the latest attempt moves its rollout."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import IllegalTransition
from leyden.types import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    ROLLOUT_FINISHED,
    ROLLOUT_TRANSITIONS,
    AttemptStatus,
    RolloutConfig,
    RolloutStatus,
    attempt_after_span,
    check_attempt_transition,
    check_rollout_transition,
    rollout_after_attempt,
)

ATTEMPT_STATUSES: tuple[AttemptStatus, ...] = get_args(AttemptStatus)
ROLLOUT_STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)
CONFIGS = st.builds(
    RolloutConfig,
    max_attempts=st.integers(1, 4),
    retry_condition=st.lists(st.sampled_from(["failed", "timeout", "unresponsive"]), unique=True),
)


def test_every_status_has_its_row_in_the_tables() -> None:
    assert set(ATTEMPT_TRANSITIONS) == set(ATTEMPT_STATUSES)
    assert set(ROLLOUT_TRANSITIONS) == set(ROLLOUT_STATUSES)


def test_a_final_status_is_never_left_and_every_other_one_can_end() -> None:
    for table, finished in ((ATTEMPT_TRANSITIONS, ATTEMPT_FINISHED), (ROLLOUT_TRANSITIONS, ROLLOUT_FINISHED)):
        for status, following in table.items():
            assert (status in finished) == (not following)
            assert status not in following
            assert status in finished or following & finished


@given(st.sampled_from(ATTEMPT_STATUSES), st.sampled_from(ATTEMPT_STATUSES))
def test_an_attempt_is_refused_what_its_table_does_not_say(current: AttemptStatus, wanted: AttemptStatus) -> None:
    if wanted == current or wanted in ATTEMPT_TRANSITIONS[current]:
        check_attempt_transition("at-1", current, wanted)
    else:
        with pytest.raises(IllegalTransition, match=f"at-1.*{current}.*{wanted}"):
            check_attempt_transition("at-1", current, wanted)


@given(st.sampled_from(ROLLOUT_STATUSES), st.sampled_from(ROLLOUT_STATUSES))
def test_a_rollout_is_refused_what_its_table_does_not_say(current: RolloutStatus, wanted: RolloutStatus) -> None:
    if wanted == current or wanted in ROLLOUT_TRANSITIONS[current]:
        check_rollout_transition("ro-1", current, wanted)
    else:
        with pytest.raises(IllegalTransition, match=f"ro-1.*{current}.*{wanted}"):
            check_rollout_transition("ro-1", current, wanted)


@pytest.mark.parametrize("status", ATTEMPT_STATUSES)
def test_a_span_revives_what_is_not_over(status: AttemptStatus) -> None:
    after = attempt_after_span(status)
    assert after == (status if status in ATTEMPT_FINISHED else "running")
    check_attempt_transition("at-1", status, after)


@given(st.sampled_from(ROLLOUT_STATUSES), st.sampled_from(ATTEMPT_STATUSES), st.integers(1, 5), st.booleans(), CONFIGS)
def test_a_rollout_follows_its_latest_attempt_and_stays_where_it_ended(
    rollout: RolloutStatus, attempt: AttemptStatus, sequence: int, latest: bool, config: RolloutConfig
) -> None:
    after = rollout_after_attempt(rollout, attempt, attempt_sequence=sequence, is_latest=latest, config=config)
    interrupted = rollout_after_attempt(
        rollout, "failed", attempt_sequence=sequence, is_latest=latest, config=config, interrupted=True
    )
    assert interrupted == (rollout if rollout in ROLLOUT_FINISHED or not latest else "requeuing")
    if rollout in ROLLOUT_FINISHED or not latest:
        assert after == rollout
    elif attempt in ("preparing", "running", "succeeded"):
        assert after == attempt
    elif attempt == "cancelled":
        assert after == ("requeuing" if rollout == "requeuing" else "cancelled")
    else:
        again = rollout == "requeuing" or (attempt in config.retry_condition and sequence < config.max_attempts)
        assert after == ("requeuing" if again else "failed")


@given(
    CONFIGS,
    st.lists(st.sampled_from(["failed", "timeout", "cancelled", "unresponsive", "succeeded"]), min_size=5, max_size=5),
)
def test_a_rollout_always_comes_to_an_end_within_its_attempts(
    config: RolloutConfig, outcomes: list[AttemptStatus]
) -> None:
    status: RolloutStatus = "preparing"
    for sequence, outcome in enumerate(outcomes, 1):
        check_rollout_transition("ro-1", status, "preparing")
        status = rollout_after_attempt("preparing", outcome, attempt_sequence=sequence, is_latest=True, config=config)
        if status in ROLLOUT_FINISHED:
            assert sequence <= config.max_attempts
            return
    raise AssertionError("never ended")
