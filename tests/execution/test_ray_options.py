"""What can be known of the strategy `ray` without Ray."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.execution.ray import RayExecutionStrategy
from leyden.execution.ray_cluster import in_words, room_for
from tests.execution import agents


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'leyden\[ray\]'"):
        ly.Trainer(algorithm="baseline", strategy="ray", store="memory").fit(agents.double, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_runners": 0}, "n_runners is 0"),
        ({"drain_seconds": -1}, "drain_seconds is -1"),
        ({"num_cpus": -1}, "num_cpus is -1"),
        ({"num_gpus": -0.5}, "num_gpus is -0.5"),
        ({"num_gpus": 1.5}, "num_gpus is 1.5; above 1 it must be a whole number"),
        ({"resources": {"CPU": 2}}, "resources has 'CPU'; say num_cpus=2"),
        ({"resources": {"antenna": 0}}, r"resources\['antenna'\] is 0"),
        ({"max_restarts": -2}, "max_restarts is -2"),
        ({"server_host": "0.0.0.0"}, "server_host is '0.0.0.0'"),
        ({"placement_seconds": 0}, "placement_seconds is 0"),
    ],
)
def test_wrong_options_are_refused_with_their_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayExecutionStrategy(**options)


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises((ConfigError, TypeError), match="start_method"):
        ly.Trainer(strategy={"type": "ray", "start_method": "spawn"})


def test_room_is_counted_node_by_node() -> None:
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]
    assert room_for({"CPU": 1.0, "GPU": 0.0}, nodes, 9) == 6
    assert room_for({"CPU": 3.0}, nodes, 9) == 1
    assert room_for({"CPU": 1.0, "GPU": 0.5}, nodes, 9) == 2
    assert room_for({"CPU": 0.1}, [{"CPU": 0.3}], 9) == 3
    assert room_for({"CPU": 0.0}, nodes, 9) == 9
    assert room_for({"antenna": 1.0}, nodes, 9) == 0
    assert room_for({"CPU": 0.0}, [], 9) == 0


def test_what_ray_adds_to_a_nodes_resources_is_left_out_in_words() -> None:
    node = {"CPU": 2.0, "GPU": 0.0, "memory": 3.0 * 2**30, "node:10.0.0.1": 1.0, "object_store_memory": 1e8}
    assert in_words(node) == "CPU=2, memory=3.0 GB"
    assert in_words({}) == "nothing"
