"""Requests are judged in the order of their assignment, whenever their values come."""

from __future__ import annotations

import random

from leyden.serving.continual import RequestOrder, RequestOutcome


def test_a_request_is_released_after_all_earlier_ones() -> None:
    order = RequestOrder(["reward"], waiting_seconds=10)
    for place in range(3):
        order.assign(f"r{place}", key=f"user-{place}", canary=place == 1, share=0.5, time=float(place))
    order.value("r1", "reward", 1.0)
    assert list(order.release(now=5)) == []
    order.value("r0", "reward", 0.0)
    assert list(order.release(now=5)) == [
        RequestOutcome(False, 0.5, {"reward": 0.0}),
        RequestOutcome(True, 0.5, {"reward": 1.0}),
    ]
    assert list(order.release(now=11.9)) == [] and len(order) == 1
    assert list(order.release(now=12)) == [RequestOutcome(False, 0.5, {})], "released without its value"
    order.value("r2", "reward", 1.0)
    assert order.late == 1 and list(order.release(now=99)) == []


def test_only_the_first_request_of_a_key_counts() -> None:
    order = RequestOrder(["reward"], waiting_seconds=0)
    for place in range(3):
        order.assign(f"r{place}", key="ann", canary=True, share=0.5, time=0.0)
    order.assign("r0", key="ann", canary=True, share=0.5, time=0.0)
    assert len(list(order.release(now=0))) == 1 and order.repeated == 2


def test_the_last_value_counts() -> None:
    order = RequestOrder(["reward"], waiting_seconds=5)
    order.assign("r", key="r", canary=True, share=0.5, time=0.0)
    order.value("r", "reward", 1.0)
    order.value("r", "reward", 0.0)
    assert next(order.release(now=0)).values == {"reward": 0.0}


def test_the_order_of_arrival_does_not_change_what_is_released() -> None:
    def released(seed: int) -> list[RequestOutcome]:
        order = RequestOrder(["reward"], waiting_seconds=1000)
        for place in range(50):
            order.assign(str(place), key=str(place), canary=place % 2 == 0, share=0.5, time=float(place))
        arrivals = list(range(50))
        random.Random(seed).shuffle(arrivals)
        found: list[RequestOutcome] = []
        for place in arrivals:
            order.value(str(place), "reward", place / 50)
            found += order.release(now=100)
        return found

    assert released(1) == released(2) and len(released(1)) == 50
