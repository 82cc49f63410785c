"""The example's data: features know nothing of their own day, and no order of the test reaches into the training."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden_compat.order_execution import OrderDir, SingleAssetOrderExecutionSimple, load_bars, load_orders

SCRIPT = Path(__file__).parents[2] / "packages" / "leyden-compat" / "examples" / "rl_order_execution" / "make_data.py"


@pytest.fixture(scope="module")
def make_data() -> Any:
    spec = importlib.util.spec_from_file_location("make_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(make_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sp500")
    make_data.main(folder)
    return folder


def test_no_feature_of_a_day_depends_on_that_day_or_a_later_one(make_data: Any) -> None:
    rng = np.random.default_rng(0)
    close, volume = np.exp(np.cumsum(rng.normal(0, 0.01, 60))), rng.uniform(1, 2, 60)
    other_close, other_volume = close.copy(), volume.copy()
    other_close[40:] *= 2
    other_volume[40:] *= 3
    one, two = make_data.known_before(close, volume), make_data.known_before(other_close, other_volume)
    for name in one:
        assert np.array_equal(one[name][:41], two[name][:41]), name
        assert not np.array_equal(one[name], two[name]), name


def test_training_and_test_do_not_share_a_day_and_windows_of_the_test_do_not_overlap(data: Path) -> None:
    train, test = (load_orders(data / "orders" / f"{name}.csv") for name in ("train", "test"))
    assert max(order.end_time for order in train) <= min(order.start_time for order in test)
    sales, purchases = test[::2], test[1::2]
    assert {order.direction for order in sales} == {OrderDir.SELL}
    assert [(order.start_time, order.end_time) for order in sales] == [
        (order.start_time, order.end_time) for order in purchases
    ]
    assert all(one.end_time <= two.start_time for one, two in itertools.pairwise(sales))


def test_every_order_of_the_test_has_ten_days_and_twap_is_their_mean(data: Path) -> None:
    bars = load_bars(data / "bars", "SP500")
    assert len(bars) > 5000
    for order in load_orders(data / "orders" / "test.csv"):
        simulator = SingleAssetOrderExecutionSimple(order, data / "bars", ticks_per_step=1)
        while not simulator.done():
            simulator.step(0.1 if simulator.cur_step < 9 else simulator.position)
        assert simulator.cur_step == 10
        assert simulator.metrics is not None
        assert simulator.metrics["pa"] == pytest.approx(0.0, abs=1e-6)


def test_torch_is_not_needed() -> None:
    assert importlib.util.find_spec("torch") is None
    assert "leyden_compat.order_execution" in sys.modules
