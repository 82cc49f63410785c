"""Dotted paths: which option they name, and what setting it makes of the settings."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.training.runs.start import check_sections, option_path, option_value, with_option


def test_a_path_without_a_section_is_the_algorithms_or_the_vessels():
    assert option_path("optim.learning_rate", {}) == ("algorithm", "optim", "learning_rate")
    assert option_path("policy.lr", {"vessel": {}}) == ("vessel", "policy", "lr")
    assert option_path("trainer.n_runners", {}) == ("trainer", "n_runners")
    assert option_path("val", {"vessel": {}}) == ("val",)


@pytest.mark.parametrize("path", ["", ".", "a..b", "trainer.", ".trainer", "algorthm.x", "trainr.n_runners"])
def test_a_path_that_names_nothing_is_refused(path: str):
    with pytest.raises(ConfigError):
        option_path(path, {})


def test_setting_an_option_leaves_the_settings_as_they_are():
    settings: dict[str, Any] = {"algorithm": {"optim": {"learning_rate": 1.0}}, "trainer": None}
    made = with_option(settings, ("algorithm", "optim", "learning_rate"), 2.0)
    assert option_value(made, ("algorithm", "optim", "learning_rate")) == 2.0
    assert settings["algorithm"]["optim"]["learning_rate"] == 1.0
    assert with_option(settings, ("trainer", "n_runners"), 4)["trainer"] == {"n_runners": 4}


def test_a_component_that_is_only_named_gets_options():
    assert with_option({"algorithm": "baseline"}, ("algorithm", "n_epochs"), 2) == {
        "algorithm": {"type": "baseline", "n_epochs": 2}
    }


def test_an_item_of_a_list_is_set_by_its_place():
    settings = {"trainer": {"callbacks": [{"type": "A"}, {"type": "B"}]}}
    made = with_option(settings, ("trainer", "callbacks", "1", "every"), 3)
    assert made["trainer"]["callbacks"] == [{"type": "A"}, {"type": "B", "every": 3}]
    assert option_value(made, ("trainer", "callbacks", "1", "every")) == 3
    for place in ("2", "-1", "x"):
        with pytest.raises(ConfigError, match="no place in a list of 2"):
            with_option(settings, ("trainer", "callbacks", place), 1)


@pytest.mark.parametrize("path", [("trainer", "n_runners", "x"), ("agent", "x"), ("train", "x")])
def test_an_option_of_something_without_options_is_refused(path: tuple[str, ...]):
    with pytest.raises(ConfigError, match="which has no options"):
        with_option({"agent": "a.py:a", "train": "t.jsonl", "trainer": {"n_runners": 1}}, path, 1)


def test_unknown_sections_and_both_halves_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'trainer'"):
        check_sections({"trainr": {}}, "t.yaml")
    with pytest.raises(ConfigError, match="leave agent out"):
        check_sections({"vessel": {}, "agent": "a"}, "t.yaml")
