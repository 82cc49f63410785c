"""How soon and how rightly a canary is judged, with traffic as functions whose truth is known.

Every row has 200 runs with the seeds 0 to 199. Rewards are 0 or 1, with a mean of each arm's own. Leyden
judges after every request, at its defaults: promotion at 5 %, rollback at 20 % error. Beside it:

- *known means*: the same game with the one bet that is best for the true means, which nobody knows;
- *z-test, one look*: a one-sided test at 5 % with the number of requests fixed in advance and looked at once;
- *z-test, every look*: the same test looked at after every request, as people do with a dashboard.

The last table has 20 runs of 10,000 requests in which the best of three versions becomes the worst. The
trigger finds the drop, a candidate is chosen by its mean reward on 50 recorded tasks for each version, and
a canary with a fifth of the traffic decides.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.harness import Peer, Row, Sample, summary
from benchmarks.report import Table
from leyden.serving.continual import (
    COST,
    FAILURE,
    LATENCY,
    REWARD,
    Drift,
    GuardSettings,
    RequestOutcome,
    Trigger,
    TriggerState,
    decide,
    observe,
    observe_reward,
    reason_to_learn,
    start,
)
from leyden.statistics import weighted_difference

HEADLINES = ()
RUNS = 200
REWARD_ONLY = GuardSettings(metrics=(REWARD,))
FOUR_METRICS = GuardSettings(metrics=(REWARD, FAILURE, LATENCY, COST))
Z_95 = statistics.NormalDist().inv_cdf(0.95)


@dataclass(frozen=True)
class Traffic:
    """Requests with rewards of 0 and 1 and a fixed share of the canary. Other metrics are equal in both arms."""

    canary_mean: float
    control_mean: float
    share: float
    requests: int
    only_reward: bool = True

    def outcomes(self, seed: int) -> Iterator[RequestOutcome]:
        numbers = random.Random(seed)
        for _ in range(self.requests):
            canary = numbers.random() < self.share
            values = {"reward": float(numbers.random() < (self.canary_mean if canary else self.control_mean))}
            if not self.only_reward:
                values["failure"] = float(numbers.random() < 0.02)
                values["latency"] = numbers.lognormvariate(0, 1)
                values["cost"] = numbers.lognormvariate(0, 0.5)
            yield RequestOutcome(canary, self.share, values)


@dataclass(frozen=True)
class Judgement:
    decision: str
    """`promote`, `roll_back`, or `continue` if the requests ran out."""
    requests: int
    canary_requests: int


def judge(traffic: Traffic, seed: int, settings: GuardSettings) -> Judgement:
    """Leyden's verdict, after as many requests as it takes."""
    state, count = start(settings), 0
    for count, outcome in enumerate(traffic.outcomes(seed), 1):
        state = observe(settings, state, outcome)
        verdict = decide(settings, state)
        if verdict.decision != "continue":
            return Judgement(verdict.decision, count, verdict.canary_requests)
    return Judgement("continue", count, state.canary_requests)


def known_means(traffic: Traffic, seed: int, *, error: float) -> Judgement:
    """The rollback that the best bet for the true means finds."""
    share, canary, control = traffic.share, traffic.canary_mean, traffic.control_mean
    centre = (1 - share) * canary + share * control
    outcomes = [  # probability and gain
        (share * canary, -weighted_difference(treated=True, value=1, share=share, centre=centre)),
        (share * (1 - canary), -weighted_difference(treated=True, value=0, share=share, centre=centre)),
        ((1 - share) * control, -weighted_difference(treated=False, value=1, share=share, centre=centre)),
        ((1 - share) * (1 - control), -weighted_difference(treated=False, value=0, share=share, centre=centre)),
    ]
    largest = -1 / min(gain for _, gain in outcomes)
    bets = [largest * step / 200 for step in range(1, 200)]
    bet = max(bets, key=lambda each: sum(chance * math.log1p(each * gain) for chance, gain in outcomes))
    capital, canary_requests, count = 0.0, 0, 0
    for count, outcome in enumerate(traffic.outcomes(seed), 1):
        value = outcome.values["reward"] or 0.0
        gain = -weighted_difference(treated=outcome.canary, value=value, share=share, centre=centre)
        capital += math.log1p(bet * gain)
        canary_requests += outcome.canary
        if capital >= -math.log(error):
            return Judgement("roll_back", count, canary_requests)
    return Judgement("continue", count, canary_requests)


def z_test(traffic: Traffic, seed: int, *, every_look: bool) -> Judgement:
    """A one-sided two-sample z-test at 5 %, at the end or after every request beyond the hundredth."""
    sums, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    count = 0
    for count, outcome in enumerate(traffic.outcomes(seed), 1):
        sums[outcome.canary] += outcome.values["reward"] or 0.0
        counts[outcome.canary] += 1
        if count == traffic.requests or (every_look and count > 100):
            pooled = sum(sums.values()) / count
            spread = math.sqrt(pooled * (1 - pooled) * (1 / counts[True] + 1 / counts[False]))
            if sums[True] / counts[True] - sums[False] / counts[False] > Z_95 * spread:
                return Judgement("promote", count, counts[True])
    return Judgement("continue", count, counts[True])


EQUAL = Traffic(0.7, 0.7, share=0.5, requests=2000)
BETTER = Traffic(0.8, 0.7, share=0.5, requests=4000)
WORSE_AT_HALF = Traffic(0.5, 0.7, share=0.5, requests=4000)
WORSE_AT_A_TENTH = Traffic(0.5, 0.7, share=0.1, requests=20000)


def main(peer: Peer | None) -> list[Row | Table]:
    del peer
    rollbacks = [
        rollback(
            "canary 20 points worse, half of the traffic: canary requests until rollback", WORSE_AT_HALF, REWARD_ONLY
        ),
        rollback(
            "canary 20 points worse, a tenth of the traffic: canary requests until rollback",
            WORSE_AT_A_TENTH,
            REWARD_ONLY,
        ),
        rollback(
            "canary 20 points worse, half of the traffic, four metrics guarded: canary requests until rollback",
            replace(WORSE_AT_HALF, only_reward=False),
            FOUR_METRICS,
        ),
    ]
    return [*rollbacks, decisions(), drift()]


def rollback(name: str, traffic: Traffic, settings: GuardSettings) -> Row:
    """Canary requests of each run until the rollback; a run without one counts all of its requests."""

    def timed(judged: Callable[[int], Judgement]) -> list[Sample]:
        samples: list[Sample] = []
        for seed in range(RUNS):
            began = time.process_time()
            judgement = judged(seed)
            samples.append(Sample(judgement.canary_requests, time.process_time() - began))
        return samples

    ours = timed(lambda seed: judge(traffic, seed, settings))
    oracle = timed(lambda seed: known_means(traffic, seed, error=settings.rollback_error))
    return summary(name, "requests", ours, oracle, "known means", higher_is_better=False)


def decisions() -> Table:
    """Return how many of 200 runs were promoted and rolled back, and what the z-test does on the same
    traffic."""
    lines: list[list[str]] = []
    for name, traffic, target in (
        ("equal versions, 2,000 requests", EQUAL, "at most 16 promoted"),
        ("10 points better, 4,000 requests", BETTER, "at least 180 promoted"),
        ("20 points worse, 4,000 requests", WORSE_AT_HALF, "rolled back"),
        ("20 points worse, a tenth of 20,000 requests", WORSE_AT_A_TENTH, "rolled back"),
    ):
        judgements = [judge(traffic, seed, REWARD_ONLY) for seed in range(RUNS)]
        by_z = ["", ""]
        if traffic.canary_mean >= traffic.control_mean:
            by_z = [
                str(sum(z_test(traffic, seed, every_look=looks).decision == "promote" for seed in range(RUNS)))
                for looks in (False, True)
            ]
        lines.append(
            [
                name,
                target,
                str(sum(each.decision == "promote" for each in judgements)),
                str(sum(each.decision == "roll_back" for each in judgements)),
                f"{statistics.median(each.requests for each in judgements):,.0f}",
                *by_z,
            ]
        )
        print(" | ".join(lines[-1]), flush=True)
    columns = [
        "200 runs",
        "target",
        "promoted",
        "rolled back",
        "requests, median",
        "promoted by a z-test, one look",
        "promoted by a z-test, every look",
    ]
    return Table("What becomes of a canary", columns, lines)


# ---- production while the best version changes -------------------------------------------------------------------------

DRIFT_RUNS, DRIFT_REQUESTS, CHANGE_AT = 20, 10_000, 3000
BEFORE, AFTER = (0.8, 0.5, 0.6), (0.4, 0.8, 0.6)
"""Mean reward of each of three versions before and after the change."""
CANARY_SHARE, CANARY_REQUESTS, RECORDED_TASKS = 0.2, 3000, 50
TRIGGER = Trigger(drift=Drift(tolerance=0.1, reference_count=200, run_length=10_000))


@dataclass
class Production:
    """Serving, with or without learning, one request after another."""

    learns: bool
    numbers: random.Random
    version: int = 0
    candidate: int | None = None

    def run(self) -> list[float]:
        """The mean reward that each request could expect, of the version that answered it."""
        expected: list[float] = []
        state, guard, asked = TriggerState(since=0.0), start(REWARD_ONLY), 0
        for count in range(DRIFT_REQUESTS):
            means = BEFORE if count < CHANGE_AT else AFTER
            canary = self.candidate is not None and self.numbers.random() < CANARY_SHARE
            mean = means[self.candidate if canary and self.candidate is not None else self.version]
            reward = float(self.numbers.random() < mean)
            expected.append(mean)
            if self.candidate is not None:
                asked += 1
                guard = observe(REWARD_ONLY, guard, RequestOutcome(canary, CANARY_SHARE, {"reward": reward}))
                decision = decide(REWARD_ONLY, guard).decision
                if decision == "promote":
                    self.version = self.candidate
                if decision != "continue" or asked == CANARY_REQUESTS:
                    self.candidate, state = None, TriggerState(since=count)
            elif self.learns:
                state = observe_reward(TRIGGER, state, reward)
                if reason_to_learn(TRIGGER, state, count):
                    self.candidate, guard, asked = self.best_candidate(means), start(REWARD_ONLY), 0
        return expected

    def best_candidate(self, means: tuple[float, ...]) -> int:
        """The version with the highest mean reward on recorded tasks, other than the one in production."""
        others = [version for version in range(len(means)) if version != self.version]
        return max(others, key=lambda each: sum(self.numbers.random() < means[each] for _ in range(RECORDED_TASKS)))


def drift() -> Table:
    """The expected reward of production at the end, and how soon it has recovered."""
    lines: list[list[str]] = []
    for name, learns in (("with learning", True), ("without learning", False)):
        runs = [Production(learns, random.Random(seed)).run() for seed in range(DRIFT_RUNS)]
        ends = [statistics.fmean(expected[-1000:]) for expected in runs]
        recovered = [
            next(
                (
                    count
                    for count in range(CHANGE_AT, DRIFT_REQUESTS - 100, 10)
                    if statistics.fmean(expected[count : count + 100]) >= max(AFTER) - 0.05
                ),
                None,
            )
            for expected in runs
        ]
        soon = sorted(count - CHANGE_AT for count in recovered if count is not None)
        lines.append(
            [
                name,
                f"{statistics.fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
                f"{sum(end >= max(AFTER) - 0.05 for end in ends)} of {DRIFT_RUNS}",
                f"{statistics.median(soon):,.0f} ({soon[0]:,} to {soon[-1]:,})" if soon else "never",
            ]
        )
        print(" | ".join(lines[-1]), flush=True)
    columns = [
        f"production, best mean {max(AFTER):g} after the change",
        "expected reward in the last 1,000 requests",
        "runs within 5 points of the best",
        "requests from the change until then, median",
    ]
    return Table("When the best version becomes the worst", columns, lines)
