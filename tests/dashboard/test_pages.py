"""The dashboard's pages in a real browser: they say what the store says, and recorded text is never markup."""

from __future__ import annotations

import importlib.util
import re
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.cli.demo import WEIGHTS
from leyden.training.runs import open_run
from tests.browser import CHROMIUM, Browser, Page, browser
from tests.dashboard.conftest import Dashboard, make_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (apt-get install chromium)"),
    pytest.mark.timeout(240),
]
SHOWN = "!document.querySelector('main[aria-busy]') && document.querySelector('main h1')?.textContent"


@ly.llm_rollout
async def count(task: int, llm: ly.LLM) -> float:
    messages: Any = [{"role": "user", "content": f"the number after {task}"}]
    answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    return float(answer.choices[0].message.content == str(task + 1))


@pytest.fixture(scope="module")
def trained(runs: Path) -> Path:
    """The folder of runs, with one of a policy that was trained for two steps."""
    if not (runs / "trained").exists():
        algorithm = ly.GRPO(
            ly.EmbeddedBackend(WEIGHTS, device="cpu"),
            n_steps=3,
            tasks_per_step=4,
            rollouts_per_task=8,
            max_tokens=4,
            validate_first=True,
            val_every_n_steps=3,
        )
        ly.Trainer(algorithm=algorithm, run_dir=runs / "trained").fit(count, range(9), val_dataset=range(4))
    return runs


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as started:
        yield started


async def show(page: Page, dashboard: Dashboard, view: str) -> str:
    """Open a view and return its heading."""
    await page.open(f"{dashboard.url}#/{view}")
    await page.wait_for("document.readyState === 'complete'")
    return await page.wait_for(SHOWN)


def views(dashboard: Dashboard) -> dict[str, str]:
    """Return an address of each kind of view."""
    runs = {each["name"]: each["run_id"] for each in dashboard.view("runs")["runs"]}
    run = runs["trained"]
    row = next(each for each in dashboard.view("rollouts", run=run, mode="train")["rollouts"] if each["group_id"])
    return {
        "runs": "runs",
        "run": f"run?run={run}",
        "failing run": f"run?run={runs['first']}",
        "rollouts": f"rollouts?run={run}",
        "rollout": f"rollout?run={run}&id={row['rollout_id']}",
        "group": f"group?run={run}&group={row['group_id']}",
        "compare": f"compare?run={runs['first']},{runs['second']}",
        "workers": f"workers?run={run}",
        "resources": f"resources?run={run}",
        "an unknown run": "run?run=nothing",
    }


async def test_every_view_is_shown_without_an_error_a_barrier_or_another_host(
    trained: Path, dashboard: Dashboard, chromium: Browser, tmp_path: Path
) -> None:
    found = importlib.util.find_spec("axe_core_python")
    assert found is not None and found.origin is not None, "make test-all GROUP=browser installs axe"
    axe = (Path(found.origin).parent / "axe.min.js").read_text()
    for dark in (False, True):
        async with chromium.page(dark=dark) as page:
            for name, view in views(dashboard).items():
                await show(page, dashboard, view)
                await page.evaluate(axe)
                checked = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
                serious = [
                    (each["id"], [node["html"][:120] for node in each["nodes"]][:3])
                    for each in checked["violations"]
                    if each["impact"] in ("serious", "critical")
                ]
                assert not serious, (name, dark, serious)
                await page.picture(tmp_path / f"{name}-{'dark' if dark else 'light'}.png")
            assert [each for each in page.problems if "400" not in each and "404" not in each] == []
            assert {re.match(r"\w+://[^/]+/", each)[0] for each in page.requests} <= {dashboard.url}  # pyright: ignore[reportOptionalSubscript]


async def test_no_view_is_wider_than_360_pixels(trained: Path, dashboard: Dashboard, chromium: Browser) -> None:
    async with chromium.page(360, 740) as page:
        for name, view in views(dashboard).items():
            await show(page, dashboard, view)
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360, name


async def test_the_pages_say_what_the_store_says(trained: Path, dashboard: Dashboard, chromium: Browser) -> None:
    run = open_run(trained / "trained")
    reward = run.summary_metrics().reward
    assert reward is not None
    async with chromium.page() as page:
        await show(page, dashboard, "runs")
        names = await page.evaluate("[...document.querySelectorAll('tbody th')].map((each) => each.textContent)")
        assert names == ["trained", "second", "first"]
        await show(page, dashboard, f"run?run={run.record.run_id}")
        curve = await page.evaluate("document.querySelector('svg.chart').getAttribute('aria-label')")
        assert f"in {len(reward.values)} values" in curve
        await show(page, dashboard, f"rollouts?run={run.record.run_id}&mode=train")
        assert "96 rollouts fit" in await page.evaluate("document.querySelector('.head').textContent")
        row = dashboard.view("rollouts", run=run.record.run_id, mode="train")["rollouts"][0]
        await show(page, dashboard, f"rollout?run={run.record.run_id}&id={row['rollout_id']}")
        said = await page.evaluate("document.querySelector('.conversation').innerText")
        assert f"the number after {row['task']}" in said and (row["answer"] or "") in said
        assert await page.evaluate("document.querySelectorAll('.token.sampled').length") >= 1


@pytest.mark.merge
async def test_recorded_text_is_never_markup(trained: Path, dashboard: Dashboard, chromium: Browser) -> None:
    run = open_run(trained / "first").record.run_id
    (failed,) = dashboard.view("rollouts", run=run, status="failed")["rollouts"]
    async with chromium.page() as page:
        for view in (f"run?run={run}", f"rollouts?run={run}", f"rollout?run={run}&id={failed['rollout_id']}"):
            await show(page, dashboard, view)
            assert "<script>alert(1)</script>" in await page.evaluate("document.querySelector('main').textContent")
            assert await page.evaluate("document.querySelectorAll('main script, main img').length") == 0
            text = await page.evaluate("document.querySelector('main').textContent")
            assert not re.search("[\x1b\u202e]", text) and r"\x202e" in text
        assert page.problems == []


async def test_a_bar_of_the_histogram_filters_and_the_address_keeps_it(
    trained: Path, dashboard: Dashboard, chromium: Browser
) -> None:
    run = open_run(trained / "first").record.run_id
    async with chromium.page() as page:
        await show(page, dashboard, f"rollouts?run={run}")
        await page.evaluate("[...document.querySelectorAll('.bar:not(:disabled)')].at(-1).click()")
        await page.wait_for("document.querySelector('.head').textContent.includes('10 rollouts fit')")
        address = await page.evaluate("location.hash")
        assert "min_reward=" in address
        await show(page, dashboard, address.removeprefix("#/"))
        assert "10 rollouts fit" in await page.evaluate("document.querySelector('.head').textContent")


async def test_keys_go_from_row_to_row_and_up(trained: Path, dashboard: Dashboard, chromium: Browser) -> None:
    async with chromium.page() as page:
        await show(page, dashboard, "runs")
        focused = "document.activeElement.textContent"
        for key, name in (("j", "trained"), ("j", "second"), ("k", "trained")):
            await page.key(key)
            assert await page.evaluate(focused) == name
        await page.evaluate("document.activeElement.click()")
        await page.wait_for("document.querySelector('h1').textContent.startsWith('trained')")
        await page.key("u")
        await page.wait_for("document.querySelector('h1').textContent === 'Runs'")


async def test_a_page_follows_a_run_and_goes_on_after_its_server_was_started_again(
    tmp_path: Path, chromium: Browser
) -> None:
    make_run(tmp_path / "runs" / "one", 4)
    first = Dashboard(tmp_path / "runs")
    port = re.search(r":(\d+)/", first.url)
    assert port is not None
    rows = "document.querySelectorAll('tbody tr').length"
    async with chromium.page() as page:
        await show(page, first, "runs")
        await page.wait_for("document.querySelector('#live.live')")
        making = threading.Thread(target=make_run, args=(tmp_path / "runs" / "two", 4))
        making.start()
        await page.wait_for(f"{rows} === 2")
        making.join()
        first.stop()
        await page.wait_for("document.querySelector('#live.away')")
        shutil.rmtree(tmp_path / "runs" / "one")
        second = Dashboard(tmp_path / "runs", "--port", port[1])
        await page.wait_for(f"document.querySelector('#live.live') && {rows} === 1")
        second.stop()


async def test_a_token_is_taken_from_behind_the_address_and_asked_for_otherwise(
    trained: Path, chromium: Browser
) -> None:
    with Dashboard(trained, "--token", "open-sesame-12345") as started:
        async with chromium.page() as page:
            await page.open(started.url)
            await page.wait_for("document.querySelector('#token')")
            await page.evaluate("document.querySelector('#token').value = 'open-sesame-12345'")
            await page.evaluate("document.querySelector('form').requestSubmit()")
            await page.wait_for("document.querySelector('h1')?.textContent === 'Runs'")
            assert not [each for each in page.requests if "sesame" in each]
        async with chromium.page() as page:
            await page.open(f"{started.url}#token=open-sesame-12345")
            await page.wait_for("document.querySelector('h1')?.textContent === 'Runs'")
            assert await page.evaluate("location.hash") == "#/"


async def test_a_person_judges_by_keyboard_and_the_answers_are_in_the_store(tmp_path: Path, chromium: Browser) -> None:
    make_run(tmp_path / "one", 4)
    run = open_run(tmp_path / "one").record.run_id
    with Dashboard(tmp_path / "one") as started:
        async with chromium.page() as page:
            await show(page, started, f"review?run={run}&order=worst")
            await page.evaluate("document.querySelector('#who').value = 'ada'")
            await page.evaluate("document.querySelector('form').requestSubmit()")
            for n, key in enumerate(("1", "0", "s", "5"), start=1):
                judged = n - 1 if n < 3 else 2
                await page.wait_for(
                    f"document.querySelector('.head')?.textContent.includes('ada has judged {judged};')"
                )
                await page.wait_for("document.querySelector('.answers')")
                assert await page.evaluate("document.querySelector('.message.reward')") is None
                await page.key(key)
                if key == "s":
                    await page.wait_for("document.querySelector('#said').textContent.startsWith('skipped')")
            await page.wait_for("document.querySelector('.head').textContent.includes('ada has judged 3;')")
            await page.key("n")
            await page.wait_for("document.querySelector('#written')")
            await page.evaluate("document.querySelector('#written').value = 'looks odd'")
            await page.evaluate("document.querySelector('#text form').requestSubmit()")
            await page.wait_for("document.querySelector('main').textContent.includes('Nothing is left')")
            assert page.problems == []
        found = started.view("rollouts", run=run)["rollouts"]
        said = [each for row in found for each in started.view("feedback", run=run, id=row["rollout_id"])]
        assert sorted((each["kind"], each["value"]) for each in said) == [
            ("label", "looks odd"),
            ("reward", 0.0),
            ("reward", 0.5),
            ("reward", 1.0),
        ]
        assert {each["source"] for each in said} == {"ada"}
