"""The part of the store's contract about versions of resources: any version, its origin, labels, where models listen."""

from __future__ import annotations

import asyncio

import pytest

from leyden.errors import ConfigError, LabelMoved, UnknownResources
from leyden.store import LightningStore
from leyden.types import LLM, NamedResources, PromptTemplate, ProxyLLM, Retention
from tests.contracts.store.support import claimed, ids


def prompt(text: str) -> NamedResources:
    """Resources of one prompt."""
    return {"prompt": PromptTemplate(template=text)}


async def written(store: LightningStore, *texts: str, resources_id: str = "rs") -> None:
    """Write a version for each text."""
    for text in texts:
        await store.update_resources(resources_id, prompt(text))


async def labels(store: LightningStore) -> dict[str, tuple[str, int]]:
    """Where each label is."""
    return {each.label: (each.resources_id, each.version) for each in await store.get_labels()}


# ---- versions --------------------------------------------------------------------------------------------------------


async def test_any_version_can_be_read(store: LightningStore) -> None:
    await written(store, "a", "b", "c")
    for version, text in enumerate("abc", start=1):
        read = await store.get_resources_by_id("rs", version=version)
        assert (read.version, read.resources) == (version, prompt(text))
    assert (await store.get_resources_by_id("rs")).version == 3
    assert (await store.get_resources_by_id("rs", version=None)).version == 3
    for missing in (0, 4, -1, 2**62):
        with pytest.raises(UnknownResources, match=rf"version {missing} of resources 'rs'"):
            await store.get_resources_by_id("rs", version=missing)
    with pytest.raises(UnknownResources, match="'other'"):
        await store.get_resources_by_id("other", version=1)


async def test_all_versions_are_listed_with_their_origin(store: LightningStore) -> None:
    await store.add_resources(prompt("a"), resources_id="rs", author="ada")
    await store.update_resources("rs", prompt("b"), author="run-1")
    await store.add_resources(prompt("c"), resources_id="branch", parent=("rs", 1))
    await store.update_resources("branch", prompt("d"), parent=("rs", 2))
    listed = await store.query_resources(all_versions=True)
    assert [(update.resources_id, update.version, update.parent, update.author) for update in listed] == [
        ("rs", 1, None, "ada"),
        ("rs", 2, ("rs", 1), "run-1"),
        ("branch", 1, ("rs", 1), None),
        ("branch", 2, ("rs", 2), None),
    ]
    assert listed.total == 4
    assert [update.version for update in await store.query_resources()] == [2, 2]
    newest_first = await store.query_resources(
        resources_id="rs", all_versions=True, sort_by="version", sort_order="desc", limit=1
    )
    assert ([update.version for update in newest_first], newest_first.total) == ([2], 2)
    with pytest.raises(UnknownResources, match=r"version 9 of resources 'rs'"):
        await store.add_resources(prompt("e"), parent=("rs", 9))
    assert (await store.query_resources(all_versions=True)).total == 4


async def test_a_digest_is_of_what_an_agent_sees(store: LightningStore) -> None:
    one: NamedResources = {"llm": ProxyLLM(endpoint="http://a/v1", model="m", api_key="1"), **prompt("x")}
    two: NamedResources = {**prompt("x"), "llm": ProxyLLM(endpoint="http://b/v1", model="m", api_key="2")}
    other: NamedResources = {**two, "llm": ProxyLLM(endpoint="http://b/v1", model="n", api_key="2")}
    digests = [(await store.add_resources(resources)).digest for resources in (one, two, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64


async def test_a_retried_write_is_one_version(store: LightningStore) -> None:
    first = await store.add_resources(prompt("a"), resources_id="rs", author="ada")
    assert await store.add_resources(prompt("a"), resources_id="rs") == first
    second = await store.update_resources("rs", prompt("b"))
    assert await store.update_resources("rs", prompt("b")) == second
    assert (await store.query_resources(all_versions=True)).total == 2


# ---- labels ----------------------------------------------------------------------------------------------------------


async def test_a_label_is_on_one_version_and_moves(store: LightningStore) -> None:
    await written(store, "a", "b")
    assert await store.get_labelled_resources("production") is None
    await store.set_label("production", "rs", 1)
    await store.set_label("candidate", "rs", 2)
    labelled = await store.get_labelled_resources("production")
    assert labelled is not None
    assert labelled.resources == prompt("a")
    await store.set_label("production", "rs", 2)
    assert await labels(store) == {"candidate": ("rs", 2), "production": ("rs", 2)}
    await store.remove_label("candidate")
    await store.remove_label("candidate")
    assert await labels(store) == {"production": ("rs", 2)}


async def test_a_label_moves_only_from_where_it_is_expected(store: LightningStore) -> None:
    await written(store, "a", "b", "c")
    await store.set_label("production", "rs", 1, expected=None)
    await store.set_label("production", "rs", 1, expected=None)  # repeated
    with pytest.raises(LabelMoved, match=r"'production'.*version 1 of 'rs', not on no version"):
        await store.set_label("production", "rs", 2, expected=None)
    await store.set_label("production", "rs", 2, expected=("rs", 1))
    await store.set_label("production", "rs", 2, expected=("rs", 1))  # repeated
    with pytest.raises(LabelMoved, match=r"version 2 of 'rs', not on version 1"):
        await store.set_label("production", "rs", 3, expected=("rs", 1))
    assert await labels(store) == {"production": ("rs", 2)}


async def test_of_many_who_move_a_label_from_one_version_one_succeeds(store: LightningStore) -> None:
    await written(store, *"abcdefgh")
    await store.set_label("production", "rs", 1)
    moves = [store.set_label("production", "rs", version, expected=("rs", 1)) for version in range(2, 9)]
    done = await asyncio.gather(*moves, return_exceptions=True)
    assert sorted(type(each).__name__ for each in done) == ["LabelMoved"] * 6 + ["NoneType"]
    winner = 2 + [each is None for each in done].index(True)
    assert await labels(store) == {"production": ("rs", winner)}


async def test_a_label_needs_a_version_and_a_name(store: LightningStore) -> None:
    await written(store, "a")
    for resources_id, version in (("rs", 2), ("rs", 0), ("other", 1)):
        with pytest.raises(UnknownResources):
            await store.set_label("production", resources_id, version)
    with pytest.raises(ConfigError, match="label"):
        await store.set_label("", "rs", 1)
    assert await labels(store) == {}


async def test_retention_keeps_a_labelled_version(store: LightningStore) -> None:
    for text in "abc":
        await store.update_resources("rs", prompt(text))
        rollout = await claimed(store, resources_id="rs")
        assert rollout.resources_version == ord(text) - ord("a") + 1
        await store.update_attempt(**ids(rollout), status="succeeded")
    await store.set_label("production", "rs", 1)
    assert await store.prune(Retention(max_rollouts=1)) == 2
    kept = await store.query_resources(all_versions=True)
    assert [update.version for update in kept] == [1, 3]
    assert (await store.get_resources_by_id("rs", version=1)).resources == prompt("a")


# ---- where models listen ---------------------------------------------------------------------------------------------


async def test_an_address_by_name_is_filled_in_when_resources_are_read(store: LightningStore) -> None:
    resources: NamedResources = {
        "llm": ProxyLLM(endpoint="gateway://run-1", model="m"),
        "plain": LLM(endpoint="http://elsewhere/v1", model="n", api_key="k"),
    }
    first = await store.add_resources(resources, resources_id="rs")
    assert first.resources == resources
    await store.set_label("production", "rs", 1)
    for port in (1, 2):
        address = f"http://127.0.0.1:{port}/v1"
        await store.set_endpoint("run-1", address, api_key=f"key-{port}")
        reads = [
            await store.get_resources_by_id("rs", version=1),
            await store.get_latest_resources(),
            await store.get_labelled_resources("production"),
            (await store.query_resources())[0],
        ]
        for read in reads:
            assert read is not None
            llm, plain = read.resources["llm"], read.resources["plain"]
            assert isinstance(llm, ProxyLLM)
            assert (llm.endpoint, llm.api_key) == (address, f"key-{port}")
            assert plain == resources["plain"]
            assert (read.version, read.digest) == (1, first.digest)
    assert (await store.update_resources("rs", resources)).version == 1
    with pytest.raises(ConfigError, match="name"):
        await store.set_endpoint("", "http://a/v1")
