"""The compiled check is the space's own answer, faster."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from leyden.rl.spaces import GymSpaceValidationError, layout_of

DTYPES = st.sampled_from(
    [
        np.float32,
        np.float64,
        np.float16,
        np.int8,
        np.int32,
        np.int64,
        np.uint8,
        np.uint64,
        np.bool_,
        np.complex64,
        object,
        "U3",
    ]
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)


@st.composite
def boxes(draw: Any) -> spaces.Box:
    dtype = draw(st.sampled_from([np.float32, np.float64, np.float16, np.int8, np.uint8, np.int64]))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=3))
    if np.issubdtype(dtype, np.floating) and draw(st.booleans()):
        low = draw(st.sampled_from([-np.inf, -1.0]))
        return spaces.Box(low, draw(st.sampled_from([np.inf, 1.0])), shape, dtype)
    ends = [0, 1] if dtype == np.uint8 else [-2, 1]
    low = draw(hnp.arrays(dtype, shape, elements=st.sampled_from(ends)))
    return spaces.Box(low, (low + draw(st.integers(0, 2))).astype(dtype), shape, dtype)


LEAVES = st.one_of(
    boxes(),
    st.builds(
        lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 5),
        st.integers(-3, 3),
        st.sampled_from([np.int64, np.int32, np.int8]),
    ),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
    st.just(spaces.Text(4)),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(spaces.Dict, st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
        st.builds(spaces.Tuple, st.lists(inner, max_size=3)),
    ),
    max_leaves=4,
)

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-6, 6),
    st.integers(2**62, 2**66),
    st.floats(),
    st.text(max_size=5),
    st.integers(-4, 4).map(np.int64),
    st.integers(-4, 4).map(np.int8),
    st.integers(0, 4).map(np.uint64),
    st.floats(width=32).map(np.float32),
    st.lists(st.integers(-1, 4), max_size=3),
    DTYPES.flatmap(
        lambda dtype: (
            hnp.arrays(dtype, SHAPES) if dtype is not object else hnp.arrays(dtype, SHAPES, elements=st.integers(0, 1))
        )
    ),
)


def contains(space: Any, x: Any) -> bool:
    """Qlib's recursion, with gymnasium's own answer at its leaves."""
    if isinstance(space, spaces.Dict):
        return (
            isinstance(x, dict)
            and len(x) == len(space)
            and all(k in x and contains(space[k], x[k]) for k in space.spaces)
        )
    if isinstance(space, spaces.Tuple):
        x = tuple(x) if isinstance(x, list) or (isinstance(x, np.ndarray) and x.ndim) else x
        return isinstance(x, tuple) and len(x) == len(space) and all(map(contains, space.spaces, x))
    return bool(space.contains(x))


def verdict(answer: Any) -> bool | type[BaseException]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return answer() in (None, True)
    except GymSpaceValidationError:
        return False
    except Exception as error:  # noqa: BLE001 -- the space itself may choke on a sample; so must the check
        return type(error)


def spoil(draw: Any, x: Any) -> Any:
    """One part of a sample, changed."""
    if isinstance(x, dict) and x and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(x)))
        return {k: spoil(draw, v) if k == key else v for k, v in x.items() if k != key or draw(st.booleans())}
    if isinstance(x, tuple) and x and draw(st.booleans()):
        at = draw(st.integers(0, len(x) - 1))
        return draw(st.sampled_from([tuple, list]))(spoil(draw, v) if i == at else v for i, v in enumerate(x))
    if isinstance(x, np.ndarray) and x.size and draw(st.booleans()):
        x = x.astype(draw(st.sampled_from([x.dtype, np.float64, np.float32, np.int64, np.int8])))
        value = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3, -3, 0]))
        if np.issubdtype(x.dtype, np.floating) or np.isfinite(value):
            x.flat[draw(st.integers(0, x.size - 1))] = value
        return draw(
            st.sampled_from([x, x[..., None], x.T, x.reshape(-1), np.asfortranarray(x), x.view(np.ma.MaskedArray)])
        )
    return draw(ODD)


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.parametrize("number", [300, -300, 2**62, 2**70])
def test_a_number_that_does_not_fit_the_dtype_is_not_in_the_space(number: int) -> None:
    space = spaces.Box(-2, 2, (), np.int8)
    assert not space.contains(number)
    with pytest.raises(GymSpaceValidationError, match="does not contain it"):
        layout_of(space).check(number)


@settings(max_examples=200)
@given(st.data(), SPACES, st.integers(0, 2**31))
def test_the_check_answers_as_the_space_does(data: st.DataObject, space: Any, seed: int) -> None:
    space.seed(seed)
    sample = space.sample()
    if data.draw(st.booleans()):
        sample = spoil(data.draw, sample)
    with np.errstate(all="ignore"):
        expected, got = verdict(lambda: contains(space, sample)), verdict(lambda: layout_of(space).check(sample))
    assert got == expected, (space, sample)


def test_the_error_names_the_part_the_sample_and_every_level() -> None:
    space = spaces.Dict({"prices": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (2,), np.float32)])})
    with pytest.raises(GymSpaceValidationError, match=r"'prices'.*index 1.*1 NaN") as caught:
        layout_of(space).check({"prices": (1, np.array([0.5, np.nan], np.float32))})
    assert "Space: Dict" in str(caught.value) and "Sample: {'prices'" in str(caught.value)
    levels: list[Any] = [caught.value]
    while levels[-1].__cause__ is not None:
        levels.append(levels[-1].__cause__)
    assert [type(level.space).__name__ for level in levels] == ["Dict", "Tuple", "Box"]
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_missing_and_unknown_keys_are_told_apart() -> None:
    check = layout_of(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)})).check
    with pytest.raises(GymSpaceValidationError, match="'b' is missing"):
        check({"a": 0, "c": 0})
    with pytest.raises(GymSpaceValidationError, match=r"keys \['a', 'b'\]"):
        check({"a": 0})
