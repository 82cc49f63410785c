"""Few-shot search finds the demonstrations that a model needs, and says what is missing."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm.prompts.records import read_best
from leyden.errors import ConfigError, NoTrainingData
from leyden.testing import FakeUpstream
from leyden.training.runs import open_run

pytest.importorskip("openai")

CODES = {"red": "{R}", "green": "{G}", "blue": "{B}", "grey": "{Y}"}
KNOWN = {"red"}
"""Colours that the model can code without an example."""


def reply(body: dict[str, Any]) -> str:
    """Answer with the code of the last colour, if the prompt shows an example of it; red is easy, and grey is hard."""
    text = body["messages"][0]["content"]
    colour = re.findall(r"Code (\w+)\.", text)[-1]
    if colour == "grey" and "carefully" not in text:
        return "?"
    shown = {json.loads(task)["colour"] for task in re.findall(r"Task: (.*)", text)}
    # The model is lucky with odd numbers, which is how it comes to have examples.
    lucky = re.search(r"number (\d+)", text.splitlines()[-1])
    odd = lucky is not None and int(lucky.group(1)) % 2 == 1
    return CODES[colour] if colour in KNOWN | shown or odd else "?"


@ly.rollout
async def coder(task: dict[str, Any], llm: ly.LLM, prompt_template: ly.PromptTemplate) -> float:
    prompt = prompt_template.format(colour=task["colour"], number=task["number"])
    answer = await llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": prompt}])
    return float(answer.choices[0].message.content == CODES[task["colour"]])


def tasks(numbers: range, colours: tuple[str, ...] = ("red", "green", "blue")) -> list[dict[str, Any]]:
    return [{"colour": colour, "number": number} for number in numbers for colour in colours]


async def search(
    run_dir: Path, algorithm: Any, train: Any, val: Any, prompt: str = "For number {number}: Code {colour}."
) -> Any:
    async with FakeUpstream(reply=reply) as server:
        trainer = ly.Trainer(
            algorithm=algorithm,
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": server.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=prompt)},
            run_dir=run_dir,
        )
        return (await trainer.afit(coder, train, val)).result


async def test_demonstrations_of_what_the_model_lacks_are_found(tmp_path: Path) -> None:
    algorithm = ly.FewShot(n_candidates=24, n_demonstrations=4, seed=1)
    result = await search(tmp_path / "run", algorithm, tasks(range(4)), tasks(range(10, 30, 2)))
    assert result.against_first.difference.mean == pytest.approx(2 / 3), "the first prompt codes red alone"
    assert result.reward == 1.0
    prompt = result.prompts["prompt"]
    shown = {json.loads(task)["colour"] for task in re.findall(r"Task: (.*)", prompt.format(colour="x", number=0))}
    assert {"green", "blue"} <= shown
    assert prompt.placeholders == ("number", "colour")


@pytest.mark.slow
@pytest.mark.merge
async def test_instructions_are_searched_together_with_demonstrations(tmp_path: Path) -> None:
    colours = ("green", "grey")
    algorithm = ly.FewShot(
        n_candidates=16,
        n_demonstrations=3,
        instructions=["Think carefully about number {number}: Code {colour}."],
        seed=2,
    )
    train, val = tasks(range(6), colours) + tasks(range(6), ("red",)), tasks(range(10, 30, 2), colours)
    result = await search(tmp_path / "run", algorithm, train, val)
    assert result.reward == result.against_first.difference.mean == 0.5, (
        "grey has no example, because the first instruction never solves it"
    )
    assert "green" in result.prompts["prompt"].template


async def test_the_best_version_is_labelled_and_can_be_read(tmp_path: Path) -> None:
    result = await search(tmp_path / "run", ly.FewShot(seed=1), tasks(range(4)), tasks(range(10, 30, 2)))
    run = open_run(tmp_path / "run")
    async with ly.SqliteLightningStore(tmp_path / "run" / "store.sqlite") as store:
        labelled = await read_best(store, run.record.run_id)
    assert (labelled.resources_id, labelled.version) == (result.resources_id, result.version)
    assert labelled.resources["prompt"] == result.prompts["prompt"]


async def test_nothing_to_demonstrate_is_an_error_that_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(
        NoTrainingData, match=r"no training task was solved with a reward of at least 1 .*instructions="
    ):
        await search(tmp_path / "run", ly.FewShot(), tasks(range(0, 4, 2), ("green",)), tasks(range(2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_candidates": 1}, "n_candidates is 1"),
        ({"n_demonstrations": 0}, "n_demonstrations is 0"),
        ({"min_reward": float("nan")}, "min_reward is nan"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ly.FewShot(**options)


async def test_an_instruction_with_other_placeholders_and_missing_data_are_refused(tmp_path: Path) -> None:
    for number, (algorithm, val, message) in enumerate(
        [
            (
                ly.FewShot(instructions=["Code {color}."]),
                tasks(range(2)),
                r"instruction 'Code {color}.' cannot be used: it lacks",
            ),
            (ly.FewShot(), None, "FewShot needs a train_dataset and a val_dataset"),
            (ly.FewShot(resource_name="promt"), tasks(range(2)), "resource_name is 'promt'; did you mean 'prompt'"),
        ]
    ):
        with pytest.raises(ConfigError, match=message):
            await search(tmp_path / str(number), algorithm, tasks(range(2)), val)


def test_it_is_a_function_with_algo_in_fewer_than_a_hundred_lines() -> None:
    source = Path(inspect.getsourcefile(ly.FewShot) or "").read_text()
    assert len(source.splitlines()) < 100
    tutorial = Path(__file__).parents[2] / "docs" / "algorithm-zoo" / "few-shot.md"
    assert f"```python\n{source}```" in tutorial.read_text(), "the tutorial shows another text"
    assert isinstance(ly.FewShot(), type(ly.algo(lambda: None)))
