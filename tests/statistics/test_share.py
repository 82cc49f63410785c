"""The e-process on the share of an arm: fair under the assumed share, and quick under another."""

from __future__ import annotations

import math
import random

import pytest

from leyden.errors import ConfigError
from leyden.statistics import ShareEvidence, observe_share


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_every_bet_is_fair_under_the_assumed_share(share: float) -> None:
    evidence = observe_share(ShareEvidence(), treated=True, share=share)
    after = {treated: observe_share(evidence, treated=treated, share=share) for treated in (True, False)}
    for place, before in enumerate(evidence.log_capitals):
        growth = sum(
            chance * math.exp(after[treated].log_capitals[place] - before)
            for treated, chance in ((True, share), (False, 1 - share))
        )
        assert growth == pytest.approx(1)


@pytest.mark.parametrize("actual", [0.05, 0.2])
def test_half_and_double_of_the_assumed_share_are_found(actual: float) -> None:
    numbers, evidence = random.Random(1), ShareEvidence()
    for _ in range(1000):
        evidence = observe_share(evidence, treated=numbers.random() < actual, share=0.1)
    assert evidence.peak >= math.log(100)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="share is 0"):
        observe_share(ShareEvidence(), treated=True, share=0)
