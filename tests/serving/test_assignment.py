"""Users keep their arms, shares are what they say, and the control never goes away."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter

import pytest

from leyden.errors import ConfigError
from leyden.serving.assignment import CONTROL, Assignment, AssignmentRule, CanaryShare, Users, place_of
from leyden.types import VersionKey

LABELS: dict[str, VersionKey] = {"production": ("rs", 1), "canary": ("rs", 2)}
USERS = [f"user-{n}" for n in range(20_000)]


def arms(assignment: Assignment, key: str = "key") -> list[str]:
    return [assignment.assign(key, user, LABELS).arm for user in USERS]


@pytest.mark.parametrize("percent", [0.0, 1.0, 10.0, 50.0, 99.0])
def test_shares_are_what_they_say(percent: float) -> None:
    share = 100 * arms(Assignment(canary_percent=percent)).count("canary") / len(USERS)
    deviation = 100 * (percent / 100 * (1 - percent / 100) / len(USERS)) ** 0.5
    assert abs(share - percent) <= 4 * deviation


def test_a_user_keeps_the_arm_and_a_larger_share_takes_nobody_out_of_the_canary() -> None:
    small, large = arms(Assignment(canary_percent=5)), arms(Assignment(canary_percent=20))
    assert arms(Assignment(canary_percent=5)) == small
    assert {user for user, arm in zip(USERS, small, strict=True) if arm == "canary"} < {
        user for user, arm in zip(USERS, large, strict=True) if arm == "canary"
    }


def test_a_release_gives_its_canary_to_nobody_from_its_deadline_on() -> None:
    shares = {LABELS["canary"]: CanaryShare(0.5, "r1", until=1000.0)}

    def n_canary(now: float) -> int:
        found = [Assignment(canary_percent=50).assign("key", user, LABELS, shares=shares, now=now) for user in USERS]
        return sum(each.version == LABELS["canary"] for each in found)

    assert n_canary(999.9) > 0.4 * len(USERS)
    assert n_canary(1000.0) == 0


def test_another_key_or_salt_is_another_assignment() -> None:
    half = Assignment(canary_percent=50)
    for other in (arms(half, "other"), arms(Assignment(canary_percent=50, salt="next"))):
        same = sum(a == b for a, b in zip(arms(half), other, strict=True)) / len(USERS)
        assert 0.48 < same < 0.52


def test_places_are_uniform() -> None:
    places = sorted(place_of("key", user) for user in USERS)
    largest_gap = max(abs(place / 100 - i / len(USERS)) for i, place in enumerate(places))
    assert largest_gap < 1.95 / len(USERS) ** 0.5  # Kolmogorov-Smirnov at 0.1 %


N_IDS = 100_000
SHAPES: dict[str, list[str]] = {
    "numbers from 0": [str(n) for n in range(N_IDS)],
    "numbers below 0": [str(-n) for n in range(1, N_IDS + 1)],
    "numbers with zeros": [f"{n:020d}" for n in range(N_IDS)],
    "floats": [f"{n}.0" for n in range(N_IDS)],
    "uuids": [str(uuid.uuid5(uuid.NAMESPACE_DNS, str(n))) for n in range(N_IDS)],
    "emails": [f"ada.lovelace+{n}@example.com" for n in range(N_IDS)],
    "Chinese and emoji": [f"用户{n}🙂" for n in range(N_IDS)],
    "long texts that differ at their ends": [f"{'x' * 300}{n}" for n in range(N_IDS)],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_of_any_shape_are_users_who_are_spread_evenly_and_stay_in_the_canary_as_it_grows(shape: str) -> None:
    given = Users()
    ids = SHAPES[shape]
    users = [user for each in ids if (user := given.identify(each)) is not None]
    assert len(set(users)) == N_IDS
    places = [place_of("key", user, "r1") for user in users]
    counts = Counter(int(place) for place in places)
    expected = N_IDS / 100
    chi_square = sum((counts[cell] - expected) ** 2 / expected for cell in range(100))
    assert 51.0 < chi_square < 172.0  # 99 degrees of freedom: 1e-5 on either side
    # Neighbours among the ids are no neighbours among the places.
    pairs = Counter((int(a / 10), int(b / 10)) for a, b in itertools.pairwise(places))
    of_pair = (N_IDS - 1) / 100
    assert sum((pairs[a, b] - of_pair) ** 2 / of_pair for a in range(10) for b in range(10)) < 172.0
    before = set[str]()
    for percent in (1, 10, 20, 50, 99):
        assignment = Assignment(canary_percent=percent, salt="r1")
        inside = {user for user in users[:10_000] if assignment.assign("key", user, LABELS).arm == "canary"}
        assert inside == {user for user, place in zip(users[:10_000], places, strict=False) if place < percent}
        assert before < inside
        before = inside


@pytest.mark.parametrize("user", ["0", "-1", "00", "1e3", "0x0", "\uff10"])
def test_an_id_that_looks_like_a_number_has_the_canary_at_some_share(user: str) -> None:
    identified = Users().identify(user)
    assert identified == user
    assert Assignment(canary_percent=99).assign("a", identified, LABELS).arm == "canary"


def test_without_a_canary_everybody_has_production() -> None:
    assigned = Assignment(canary_percent=99).assign("key", "u", {"production": ("rs", 1)})
    assert (assigned.arm, assigned.version) == (CONTROL, ("rs", 1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"canary_percent": 100.0}, "canary_percent"),
        ({"canary_percent": -1.0}, "canary_percent"),
        ({"canary_percent": float("nan")}, "canary_percent"),
        ({"min_control_percent": 0.0}, "min_control_percent"),
        ({"rules": ()}, "rules"),
    ],
)
def test_the_control_never_goes_away(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Assignment(**options)  # type: ignore[arg-type]


def test_rules_choose_by_task_type_and_quality() -> None:
    rules = [
        AssignmentRule(task_type="legal", min_quality=0.9, label="legal-best", policy="apo"),
        AssignmentRule(task_type="legal", label="legal", policy="few-shot"),
        AssignmentRule(),
    ]
    labels: dict[str, VersionKey] = {**LABELS, "legal-best": ("best", 3), "legal": ("fair", 1)}
    assignment = Assignment(rules=rules)

    def chosen(task_type: str | None, quality: float | None) -> tuple[VersionKey, str | None]:
        assigned = assignment.assign("key", "u", labels, task_type=task_type, quality=quality)
        return assigned.version, assigned.policy

    assert chosen("legal", 0.95) == (("best", 3), "apo")
    assert chosen("legal", 0.5) == (("fair", 1), "few-shot")
    assert chosen("legal", None) == (("fair", 1), "few-shot")
    assert chosen("chat", 0.95) == (("rs", 1), None)
    with pytest.raises(ConfigError, match=r"no rule fits task_type='chat'"):
        Assignment(rules=rules[:2]).assign("key", "u", labels, task_type="chat")
    with pytest.raises(ConfigError, match="'legal'"):
        assignment.assign("key", "u", LABELS, task_type="legal")
