"""Conditions on rollouts: what they mean, what is unknown, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.training.runs.where import Missing, Where

NAMES = ("reward", "mode", "tokens", "task")
OF = {
    "reward": 0.5,
    "mode": "train",
    "tokens": None,
    "task": {"city": "Oslo", "n": 1, "ok": True, "none": None, "l": [1, 2]},
}


def decide(text: str, of: dict[str, Any] = OF) -> bool | Missing:
    return Where(text, NAMES).decide(of)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("reward >= 0.5", True),
        ("0 < reward < 0.5", False),
        ("0 < reward <= 0.5 and mode == 'train'", True),
        ("not reward == 0.5 or mode in ['val', 'train']", True),
        ('task["city"] == task.city and task.l[1] == 2 and task.l[-1] == 2', True),
        ("'slo' in task.city and 'city' in task and 3 not in task.l", True),
        ("task.l == [1, 2.0] and task.l != [1, 3]", True),
        ("reward > -1 and reward != 0 and task.ok", True),
        ("task.n == true", False),  # JSON's kinds: a number is no boolean
        ("task.ok == 1", False),
        ("task.n == '1'", False),
        ("task.n == 1.0", True),
        ("tokens == None and task.none == null and task.other is None", True),
        ("mode is not None and reward != None", True),
        ("tokens != None", False),
        # unknown, unless the rest decides
        ("tokens > 5", "tokens"),
        ("not tokens > 5", "tokens"),
        ("tokens == 5", "tokens"),
        ("tokens != 5", "tokens"),
        ("task.none.deep > 1", "task.none"),
        ("task.l[7] > 1", "task.l[7]"),
        ("task.other in [1]", "task.other"),
        ("reward not in [tokens, 1]", "tokens"),
        ("tokens > 5 or reward > 0", True),
        ("tokens > 5 and reward < 0", False),
        ("tokens > 5 and reward > 0", "tokens"),
        ("tokens > 5 or reward < 0", "tokens"),
    ],
)
def test_a_condition_holds_does_not_hold_or_is_unknown(text: str, held: bool | str) -> None:
    assert decide(text) == (Missing(held) if isinstance(held, str) else held)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("reward >", "cannot be read"),
        ("reward = 1", "cannot be read"),
        ("x" * 6000, "longer than"),
        ("((((" * 2000, "longer than|cannot be read"),
        ("tusk > 1", "names 'tusk'; there are: reward, mode, tokens, task"),
        ("open('f')", "names 'open'"),
        ("task.city.upper() == 'OSLO'", r"has 'task.city.upper\(\)'"),
        ("reward + 1 > 1", "has 'reward \\+ 1'"),
        ("[reward for reward in task]", "has '\\[reward for"),
        ("(lambda: 1)", "has 'lambda: 1'"),
        ("f'{reward}' == '1'", "has"),
        ("task[0:1] == []", "has"),
        ("reward if mode else 1", "has"),
        ("~reward == 1", "has 'Invert'"),
        ("-reward == 1", "has '-reward'"),
        ("reward == 1j", "has '1j'"),
        ("reward == b'1'", "has"),
        ("(reward := 1) == 1", "has"),
    ],
)
def test_what_is_no_condition_is_refused_when_it_is_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Where(text, NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward > 'a'", "0.5 and 'a' have no order"),
        ("mode > 1", "'train' and 1 have no order"),
        ("task.ok > 0", "True and 0 have no order"),
        ("task > 1", "have no order"),
        ("reward", "'reward' is 0.5 and no condition"),
        ("reward and mode == 'train'", "'reward' is 0.5 and no condition"),
        ("not mode", "'mode' is 'train' and no condition"),
        ("1 in reward", "1 cannot be in 0.5"),
        ("1 in mode", "1 cannot be in 'train'"),
        ("not " * 1200 + "task.ok", "nested too deep|cannot be read"),
    ],
)
def test_values_that_cannot_be_compared_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(text)


VALUES = st.none() | st.integers(-3, 3) | st.floats(-3, 3)


@given(VALUES, VALUES, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]))
def test_a_comparison_and_its_opposite_never_both_hold(left: Any, right: Any, op: str) -> None:
    of = {**OF, "reward": left, "tokens": right}
    held, opposite = decide(f"reward {op} tokens", of), decide(f"not reward {op} tokens", of)
    if left is None or right is None:
        assert isinstance(held, Missing) and held == opposite
    else:
        assert held is eval(f"left {op} right")
        assert opposite is not held
