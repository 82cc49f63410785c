"""The e-detector of a drop: its exact expectation, its run length without a change, its delay after one."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from leyden.errors import ConfigError
from leyden.statistics import ChangeEvidence, observe_change

REFERENCE = 0.7


def requests_until_alarm(mean: float, run_length: float, numbers: random.Random, *, at_most: int) -> int:
    evidence = ChangeEvidence()
    while evidence.count < at_most and evidence.log_e < math.log(run_length):
        evidence = observe_change(evidence, value=float(numbers.random() < mean), reference=REFERENCE)
    return evidence.count


def test_the_expected_detector_is_the_number_of_observations() -> None:
    """E[R_n] = n if the mean is the reference, over all outcomes: the sum of n capitals, each with expectation 1."""
    for n in (1, 4, 8):
        expectation = 0.0
        for values in itertools.product((0.0, 1.0), repeat=n):
            evidence = ChangeEvidence()
            for value in values:
                evidence = observe_change(evidence, value=value, reference=REFERENCE)
            chance = math.prod(REFERENCE if value else 1 - REFERENCE for value in values)
            expectation += chance * math.exp(evidence.log_e)
        assert expectation == pytest.approx(n)


def test_alarms_without_a_change_are_rare_and_a_drop_is_found_soon() -> None:
    numbers = random.Random(5)
    lengths = [requests_until_alarm(0.7, 200, numbers, at_most=2000) for _ in range(60)]
    assert statistics.fmean(lengths) >= 120  # 200 less three standard errors
    delays = [requests_until_alarm(0.4, 5000, numbers, at_most=2000) for _ in range(30)]
    assert statistics.median(delays) <= 60


def test_a_drop_late_in_a_long_quiet_time_is_found_as_soon() -> None:
    numbers, evidence = random.Random(6), ChangeEvidence()
    for _ in range(3000):
        evidence = observe_change(evidence, value=float(numbers.random() < 0.8), reference=REFERENCE)
    assert evidence.log_e < math.log(5000)
    for delay in range(200):
        if evidence.log_e >= math.log(5000):
            assert delay <= 100
            return
        evidence = observe_change(evidence, value=float(numbers.random() < 0.4), reference=REFERENCE)
    pytest.fail("a drop from 0.8 to 0.4 is not found within 200 requests")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="reference is 1"):
        observe_change(ChangeEvidence(), value=0.5, reference=1.0)
    with pytest.raises(ConfigError, match=r"value is -0\.1"):
        observe_change(ChangeEvidence(), value=-0.1, reference=0.5)
