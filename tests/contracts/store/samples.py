"""The part of the store's contract that a monitor needs: time series."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from pydantic import ValidationError

from leyden.errors import ConfigError
from leyden.store import LightningStore
from leyden.types import Sample

DAY_SECONDS = 86_400.0


def sample(name: str = "cpu_percent", at: float = 0.0, value: float = 1.0, worker_id: str | None = None) -> Sample:
    """A sample `at` seconds from now."""
    return Sample(name=name, time=_NOW + at, value=value, worker_id=worker_id)


_NOW = time.time()


async def test_samples_come_back_by_time_however_they_were_added(store: LightningStore) -> None:
    late, early = sample(at=2.0, value=-0.5), sample(at=1.0, value=1e300)
    await store.add_many_samples([late])
    await store.add_many_samples([early, sample("queue_length", at=1.5)])
    await store.add_many_samples([])
    assert list(await store.query_samples(name="cpu_percent")) == [early, late]
    assert [s.name for s in await store.query_samples()] == ["cpu_percent", "queue_length", "cpu_percent"]
    assert list(await store.query_samples(name="cpu_percent", sort_order="desc", limit=1)) == [late]
    assert list(await store.query_samples(name="nothing")) == []


async def test_samples_are_found_by_name_worker_and_time(store: LightningStore) -> None:
    await store.add_many_samples([sample(n, at, at, w) for n in "ab" for at in (1, 2, 3) for w in ("w0", "w1", None)])

    async def found(**asked: Any) -> int:
        page = await store.query_samples(**asked)
        assert page.total == len(page)
        return len(page)

    assert await found() == 18
    assert await found(name="a") == 9
    assert await found(worker_id="w0") == 6
    assert await found(name="b", worker_id="w1", measured_from=_NOW + 2) == 2
    assert await found(measured_from=_NOW + 2, measured_before=_NOW + 3) == 6
    assert await found(measured_before=_NOW + 1) == 0
    page = await store.query_samples(limit=5, offset=16)
    assert (len(page), page.total) == (2, 18)


async def test_a_series_has_one_figure_at_one_time_and_the_first_stays(store: LightningStore) -> None:
    first = [sample(value=1.0), sample(value=2.0, worker_id="w")]
    await store.add_many_samples(first)
    await store.add_many_samples([*first, sample(value=3.0), sample(at=1.0, value=4.0), sample(at=1.0, value=5.0)])
    assert sorted(s.value for s in await store.query_samples()) == [1.0, 2.0, 4.0]


async def test_many_add_samples_at_once(store: LightningStore) -> None:
    batches = [[sample(f"m{i}", at, worker_id=f"w{k}") for i in range(3)] for k in range(8) for at in range(5)]
    await asyncio.gather(*(store.add_many_samples(batch) for batch in batches + batches))
    assert (await store.query_samples(limit=1)).total == 8 * 5 * 3


async def test_samples_of_more_than_a_week_go_as_others_come(store: LightningStore) -> None:
    await store.add_many_samples([sample(at=-8 * DAY_SECONDS + i) for i in range(200)])
    await store.add_many_samples([sample(at=-6 * DAY_SECONDS)])
    for i in range(4):
        await store.add_many_samples([sample(at=i)])
    kept = await store.query_samples()
    assert [round(s.time - _NOW) for s in kept] == [-6 * DAY_SECONDS, 0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "a\n"}, {"worker_id": ""}, {"name": "x" * 201}])
async def test_a_sample_of_no_name_or_worker_is_refused_and_nothing_is_added(
    store: LightningStore, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="1 to 200 printable"):
        await store.add_many_samples([sample(), sample().model_copy(update=wrong)])
    assert not await store.query_samples()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
async def test_a_number_that_is_not_finite_is_refused(store: LightningStore, number: float) -> None:
    with pytest.raises(ValidationError):
        Sample(name="x", time=1.0, value=number)
    for field in ("value", "time"):
        with pytest.raises(ConfigError):
            await store.add_many_samples([sample().model_copy(update={field: number})])
    with pytest.raises(ConfigError):
        await store.query_samples(measured_from=float("nan"))


async def test_a_question_for_samples_that_is_no_question_is_refused(store: LightningStore) -> None:
    for wrong in ({"limit": 0}, {"offset": -1}, {"sort_order": "up"}):
        with pytest.raises(ConfigError):
            await store.query_samples(**wrong)  # type: ignore[arg-type]
