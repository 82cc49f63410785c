"""Options are refused by their names, and right ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.options import check_flag, check_number, check_port, check_token


@pytest.mark.parametrize("value", ["2", None, True, float("nan"), float("inf"), 1.5, 0, 11, [2]])
def test_what_is_no_whole_number_of_the_range_is_refused_with_name_value_and_remedy(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_number("size", value, at_least=1, at_most=10, whole=True)
    assert str(caught.value) == f"size is {value!r}; it must be a whole number, at least 1 and at most 10"


def test_the_limits_themselves_are_right_and_what_must_be_above_one_is_not() -> None:
    for value in (1, 10):
        check_number("size", value, at_least=1, at_most=10, whole=True)
    check_number("seconds", 0.001, above=0)
    with pytest.raises(ConfigError, match=r"^seconds is 0; it must be a number, above 0$"):
        check_number("seconds", 0, above=0)


def test_none_is_right_only_where_it_means_something() -> None:
    check_number("most", None, at_least=1, or_none="no limit")
    with pytest.raises(ConfigError, match=r"at least 1, or None for no limit$"):
        check_number("most", 0, at_least=1, or_none="no limit")


@pytest.mark.parametrize("value", [-1, 65536, "80", True])
def test_a_port_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^port is "):
        check_port("port", value)


def test_a_flag_is_true_or_false() -> None:
    check_flag("daemon", value=False)
    with pytest.raises(ConfigError, match=r"^daemon is 'no'; possible: True, False$"):
        check_flag("daemon", "no")


def test_a_token_is_demanded_where_other_machines_reach_the_server() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "store.example"):
        with pytest.raises(
            ConfigError, match=rf"^host '{host}'.* give key, or bind to 127\.0\.0\.1, or say open=True$"
        ):
            check_token("key", None, host=host, or_say="open=True")
        check_token("key", None, host=host, or_say="open=True", insecure=True)
        check_token("key", "sesame", host=host)
    check_token("key", None, host="::1")


@pytest.mark.parametrize("token", ["", " ", "\t\n"])
def test_an_empty_token_is_refused_even_where_none_is_needed(token: str) -> None:
    for options in ({"host": "127.0.0.1"}, {"host": "0.0.0.0", "insecure": True}):
        with pytest.raises(ConfigError, match=r"^key is empty"):
            check_token("key", token, **options)


def test_a_token_of_another_type_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^key is bytes; it must be a string, or None$"):
        check_token("key", b"secret", host="127.0.0.1")
