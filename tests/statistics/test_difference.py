"""The betting e-process on a difference of means: exact expectations on small cases, simulated error rates, and wrong variants."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from leyden.errors import ConfigError
from leyden.statistics import FRACTIONS, Evidence, average_log_e, observe_difference, observe_rank, weighted_difference
from leyden.statistics.difference import ArmTotals
from leyden.statistics.ranks import RankHistory

Observe = Callable[..., Evidence]
SHARES = (0.05, 0.1, 0.5, 0.8)


def expected_growth(observe: Observe, evidence: Evidence, share: float, means: tuple[float, float], **options: float):
    """Expected factor of each bet's capital after one request with values 0 and 1, over all four outcomes."""
    treated_mean, control_mean = means
    growth = [0.0] * len(FRACTIONS)
    for treated, value in itertools.product((True, False), (0.0, 1.0)):
        mean = treated_mean if treated else control_mean
        chance = (share if treated else 1 - share) * (mean if value else 1 - mean)
        after = observe(evidence, treated=treated, value=value, share=share, **options)
        for place, (new, old) in enumerate(zip(after.log_capitals, evidence.log_capitals, strict=True)):
            growth[place] += chance * math.exp(new - old)
    return growth


def histories() -> list[Evidence]:
    numbers = random.Random(1)
    found = [Evidence()]
    for length in (1, 3, 40):
        evidence = Evidence()
        for _ in range(length):
            evidence = observe_difference(
                evidence, treated=numbers.random() < 0.3, value=numbers.choice((0.0, 0.4, 1.0)), share=0.3
            )
        found.append(evidence)
    return found


def violates_the_null(observe: Observe) -> bool:
    """Whether some bet grows in expectation under some null hypothesis of the small cases."""
    worst = 0.0
    for evidence, share, margin in itertools.product(histories(), SHARES, (-0.1, 0.0, 0.2)):
        for control in (0.1, 0.5, 0.9):
            for treated in {max(0.0, min(1.0, control + margin)), max(0.0, min(1.0, control + margin) - 0.3), 0.0}:
                if treated <= control + margin + 1e-12:
                    growth = expected_growth(observe, evidence, share, (treated, control), margin=margin)
                    worst = max(worst, *growth)
    return worst > 1 + 1e-9


def crossing_chance(observe: Observe, share: float, mean: float, error: float, depth: int) -> float:
    """Exact probability that the e-process reaches 1 / error within `depth` requests, both means equal."""

    def chance_from(evidence: Evidence, left: int) -> float:
        if evidence.log_e >= math.log(1 / error):
            return 1.0
        if not left:
            return 0.0
        return sum(
            (share if treated else 1 - share)
            * (mean if value else 1 - mean)
            * chance_from(observe(evidence, treated=treated, value=value, share=share), left - 1)
            for treated, value in itertools.product((True, False), (0.0, 1.0))
        )

    return chance_from(Evidence(), depth)


def share_ignored(evidence: Evidence, *, treated: bool, value: float, share: float, margin: float = 0.0) -> Evidence:
    """Wrong: the difference is weighted as if both arms had equal traffic."""
    return observe_difference(evidence, treated=treated, value=value, share=0.5, margin=margin)


def peeks_at_the_value(
    evidence: Evidence, *, treated: bool, value: float, share: float, margin: float = 0.0
) -> Evidence:
    """Wrong: the centre has seen the value that it is subtracted from."""
    seen = (
        replace(evidence, treated=evidence.treated.plus(value))
        if treated
        else replace(evidence, control=evidence.control.plus(value))
    )
    return observe_difference(seen, treated=treated, value=value, share=share, margin=margin)


def keeps_the_best_bet(
    evidence: Evidence, *, treated: bool, value: float, share: float, margin: float = 0.0
) -> Evidence:
    """Wrong: every bet continues with the capital of the best one."""
    after = observe_difference(evidence, treated=treated, value=value, share=share, margin=margin)
    best = max(after.log_capitals)
    return replace(after, log_capitals=(best,) * len(FRACTIONS), log_e=best)


def margin_ignored(evidence: Evidence, *, treated: bool, value: float, share: float, margin: float = 0.0) -> Evidence:
    """Wrong: the margin has no effect."""
    return observe_difference(evidence, treated=treated, value=value, share=share)


def test_no_bet_grows_in_expectation_under_the_null() -> None:
    assert not violates_the_null(observe_difference)


@pytest.mark.parametrize("wrong", [share_ignored, peeks_at_the_value, keeps_the_best_bet, margin_ignored])
def test_the_exact_check_finds_wrong_implementations(wrong: Observe) -> None:
    assert violates_the_null(wrong)


@pytest.mark.parametrize("share", SHARES)
def test_at_the_margin_every_bet_is_fair(share: float) -> None:
    for evidence in histories():
        growth = expected_growth(observe_difference, evidence, share, (0.6, 0.5), margin=0.1)
        assert growth == pytest.approx([1.0] * len(FRACTIONS), abs=1e-12)


def test_the_weighted_difference_is_unbiased_for_every_centre() -> None:
    for share, centre in itertools.product(SHARES, (0.0, 0.3, 1.0)):
        expectation = share * weighted_difference(treated=True, value=0.7, share=share, centre=centre)
        expectation += (1 - share) * weighted_difference(treated=False, value=0.4, share=share, centre=centre)
        assert expectation == pytest.approx(0.3)


def test_the_exact_probability_of_a_false_crossing_is_below_the_error() -> None:
    assert 0 < crossing_chance(observe_difference, 0.5, 0.5, error=0.5, depth=7) <= 0.5
    assert crossing_chance(observe_difference, 0.2, 0.4, error=0.5, depth=7) <= 0.5


def test_no_value_ends_the_game() -> None:
    """The largest bet keeps half of its capital at the worst outcome."""
    for share, value, treated, margin in itertools.product(
        (0.01, 0.5, 0.99), (0.0, 1.0), (True, False), (-0.9, 0, 0.9)
    ):
        after = observe_difference(Evidence(), treated=treated, value=value, share=share, margin=margin)
        assert min(after.log_capitals) >= math.log(0.5) - 1e-12


def false_crossings(decides: Callable[[list[tuple[bool, float]], float], bool], share: float, runs: int) -> int:
    """Runs of 300 requests of equal arms in which a test decides that the treated arm is better."""
    numbers = random.Random(7)
    return sum(
        decides(
            [(numbers.random() < share, float(numbers.random() < 0.7)) for _ in range(300)],
            share,
        )
        for _ in range(runs)
    )


def by_betting(requests: list[tuple[bool, float]], share: float) -> bool:
    evidence = Evidence()
    for treated, value in requests:
        evidence = observe_difference(evidence, treated=treated, value=value, share=share)
    return evidence.peak >= math.log(1 / 0.2)


def by_peeking_at_a_z_test(requests: list[tuple[bool, float]], share: float) -> bool:
    """Wrong: a fixed-horizon test at 20 %, looked at after every request beyond the twentieth."""
    totals = {True: ArmTotals(), False: ArmTotals()}
    for count, (treated, value) in enumerate(requests):
        totals[treated] = totals[treated].plus(value)
        if count < 20 or not all(each.count for each in totals.values()):
            continue
        pooled = sum(each.total for each in totals.values()) / (count + 1)
        error = math.sqrt(pooled * (1 - pooled) * sum(1 / each.count for each in totals.values()))
        if (
            error
            and (totals[True].total / totals[True].count - totals[False].total / totals[False].count) / error > 0.8416
        ):
            return True
    return False


def test_optional_stopping_keeps_the_error_where_a_repeated_z_test_does_not() -> None:
    """At 20 % error, 100 runs have more than 32 false decisions with a probability below 0.3 %."""
    assert false_crossings(by_betting, 0.5, 100) <= 32
    assert false_crossings(by_betting, 0.1, 100) <= 32
    assert false_crossings(by_peeking_at_a_z_test, 0.5, 100) > 40


def test_a_drift_that_both_arms_share_is_no_difference() -> None:
    """The mean falls from 0.9 to 0.1 while the share of the treated arm rises from 0.05 to 0.5.

    Naive arm means differ by far then, because most treated requests come late.
    """
    numbers, wrong = random.Random(3), 0
    naive: list[float] = []
    for _ in range(60):
        better = Evidence()
        for step in range(400):
            share, mean = 0.05 + 0.45 * step / 400, 0.9 - 0.8 * step / 400
            treated, value = numbers.random() < share, float(numbers.random() < mean)
            better = observe_difference(better, treated=treated, value=1 - value, share=share)
        assert better.treated.mean is not None and better.control.mean is not None
        naive.append(better.treated.mean - better.control.mean)
        wrong += better.peak >= math.log(1 / 0.2)
    assert statistics.fmean(naive) > 0.1
    assert wrong <= 21  # 20 % of 60 and three standard deviations


def test_ranks_find_a_slower_arm_among_heavy_tails_and_keep_the_error() -> None:
    def crossed(factor: float, numbers: random.Random) -> bool:
        evidence, history = Evidence(), RankHistory()
        for _ in range(250):
            treated = numbers.random() < 0.3
            seconds = numbers.paretovariate(1.1) * (factor if treated else 1.0)  # no finite variance
            rank, history = observe_rank(history, seconds)
            evidence = observe_difference(evidence, treated=treated, value=rank, share=0.3)
        return evidence.peak >= math.log(1 / 0.2)

    numbers = random.Random(11)
    assert sum(crossed(1.0, numbers) for _ in range(60)) <= 21
    assert sum(crossed(0.8, numbers) for _ in range(60)) <= 21, "a faster arm is not slower"
    assert sum(crossed(2.0, numbers) for _ in range(20)) >= 18


def test_a_rank_depends_on_earlier_values_alone() -> None:
    history = RankHistory()
    ranks: list[float] = []
    for value in (5.0, 7.0, 6.0, 6.0, math.inf, 1.0):
        rank, history = observe_rank(history, value)
        ranks.append(rank)
    assert ranks == [0.5, 1.0, 0.5, 0.5, 1.0, 0.0]
    for value in range(600):
        _, history = observe_rank(history, float(value))
    assert history.latest == tuple(map(float, range(100, 600))) and list(history.ordered) == sorted(history.latest)
    with pytest.raises(ConfigError, match="NaN"):
        observe_rank(history, math.nan)


def test_the_average_of_logarithms_does_not_overflow() -> None:
    assert average_log_e([1000.0, 1000.0]) == pytest.approx(1000.0)
    assert average_log_e([0.0, -math.inf]) == pytest.approx(math.log(0.5))
    assert average_log_e([0.0, -math.inf], [3, 1]) == pytest.approx(math.log(0.75))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": 1.2}, "value is 1.2"),
        ({"value": math.nan}, "value is nan"),
        ({"share": 0.0}, "share is 0.0"),
        ({"share": math.nan}, "share is nan"),
        ({"margin": 1.0}, "margin is 1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        observe_difference(Evidence(), treated=True, **{"value": 0.5, "share": 0.5, **options})
