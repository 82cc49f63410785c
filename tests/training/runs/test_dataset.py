"""The rows of a data set are what the spans hold, or there is none and its reason is counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.training.runs import RecordedRun
from leyden.training.runs.dataset import FORMATS, Format, Rows, Selection
from leyden.training.runs.dataset_file import open_rows
from leyden.types import Feedback, Span, TokenRecord, semconv
from leyden.types.run_record import algorithm_group
from tests.training.runs.recorded_attempts import TOOL, USER, Call, Played, calls, play, record, result, said

SUNNY, WRONG = said("It is sunny in Oslo."), said("No idea.")
TWO_TURNS = [
    Call([USER], [calls("Oslo")]),
    Call([USER, calls("Oslo"), result("sunny")], [SUNNY]),
]


def rows_of(
    run: RecordedRun, format: Format = "messages", selection: Selection | None = None, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """The rows and the ids that were left out, by reason."""
    rows = Rows(run, selection or Selection(), format, **options)

    async def read(store: ly.LightningStore) -> list[dict[str, Any]]:
        return [row async for row in rows.read(store)]

    return run.read_store(read), {reason: ids for reason, ids in rows.selection.left_out.items() if ids}


def tokens(prompt: list[int], response: list[int]) -> TokenRecord:
    return TokenRecord(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.5] * len(response),
        policy_versions=[3] * len(response),
    )


def test_a_conversation_is_a_row_with_where_it_comes_from(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [Played({"city": "Oslo"}, TWO_TURNS, 1.0, group="g")])
    whole = [USER, calls("Oslo"), result("sunny"), SUNNY]
    (row,), left_out = rows_of(run)
    assert (row["messages"], row["tools"], left_out) == (whole, [TOOL], {})
    assert row["provenance"] == {
        "run": run.record.run_id,
        "rollout": "ro-0",
        "attempt": "at-0",
        "mode": "train",
        "iteration": 2,
        "group": "g",
        "task": '{"city": "Oslo"}',
        "reward": 1.0,
        "reward_name": "primary",
        "model": "policy",
        "policy_versions": None,
        "resources_id": None,
        "resources_version": None,
        "spans": ["0000000000000001", "0000000000000002"],
    }
    (row,), _ = rows_of(run, "completion")
    assert (row["prompt"], row["completion"]) == (whole[:3], whole[3:])
    every, _ = rows_of(run, "completion", every_answer=True)
    assert [(row["prompt"], row["completion"]) for row in every] == [([USER], [whole[1]]), (whole[:3], whole[3:])]
    assert [row["provenance"]["spans"] for row in every] == [["0000000000000001"], row["provenance"]["spans"]]
    (row,), _ = rows_of(run, "verifiers")
    assert (row["prompt"], row["completion"][-1]) == ([USER], SUNNY)
    assert json.loads(row["completion"][0]["tool_calls"][0]) == {
        "id": "c1",
        "name": "get_weather",
        "arguments": '{"city": "Oslo"}',
    }
    assert (row["reward"], row["metrics"], row["info"]) == (1.0, {"primary": 1.0}, {"task": {"city": "Oslo"}})


def test_each_branch_has_a_row_and_no_answer_stands_in_a_row_twice(tmp_path: Path) -> None:
    other = {"role": "user", "content": "And in Rome?"}
    branches = [
        *TWO_TURNS,
        Call([USER, calls("Oslo"), result("rain")], [WRONG]),  # the history was rewritten
        Call([other], [said("a"), said("b")], tools=()),  # two choices
    ]
    rows, left_out = rows_of(record(tmp_path / "run", [Played(0, branches, 1.0)]))
    assert [row["messages"][-1] for row in rows] == [SUNNY, WRONG, said("a"), said("b")]
    assert [row["provenance"]["spans"] for row in rows] == [
        ["0000000000000001", "0000000000000002"],
        ["0000000000000001", "0000000000000003"],
        ["0000000000000004"],
        ["0000000000000004"],
    ]
    assert not left_out


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            Call([USER], [SUNNY], attributes={semconv.GEN_AI_FINISH_REASONS: ["length"]}),
            "an answer was cut off (length)",
        ),
        (
            Call([USER], [SUNNY], attributes={semconv.GEN_AI_OPERATION: "text_completion"}),
            "it is a call of the completions",
        ),
        (Call([], [SUNNY]), "its prompt was not recorded"),
        (Call([USER], []), "no answer of the model to the agent was recorded"),
        (
            Call([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], [SUNNY]),
            "a message has a part of type 'input_audio'",
        ),
        (Call([USER], [{**SUNNY, "function_call": {"name": "f"}}]), "a message has 'function_call'"),
    ],
)
def test_a_conversation_that_is_not_whole_is_counted_with_its_reason(tmp_path: Path, call: Call, reason: str) -> None:
    run = record(tmp_path / "run", [Played(0, [call], 1.0), Played(1, TWO_TURNS, 1.0)])
    for format in ("messages", "completion", "verifiers"):
        rows, left_out = rows_of(run, format)
        assert [row["provenance"]["rollout"] for row in rows] == ["ro-1"]
        ((found, ids),) = left_out.items()
        assert found.startswith(reason) and ids == ["ro-0"]


def test_only_the_agents_own_answers_are_rows(tmp_path: Path) -> None:
    title = {"role": "system", "content": "You are a title generator. Answer with a short title for the conversation."}
    judge = Span(
        rollout_id="",
        attempt_id="",
        sequence_id=0,
        trace_id="1" * 32,
        span_id="a" * 16,
        name="judges",
        attributes={semconv.OPERATION_NAME: semconv.REWARD},
        start_time=12.9,
        end_time=13.6,
    )
    others = [
        Call([title, USER], [said("Oslo's weather")], tools=()),
        Call([USER], [said("ten of ten")], parent="a" * 16),
        Call([USER], [said("again")], attributes={semconv.REPLAYED: True}),
        Call([USER], [said("hidden")], attributes={semconv.ROLE: "subagent"}),
    ]
    run = record(tmp_path / "run", [Played(0, [*TWO_TURNS, *others], 1.0, spans=[judge])])
    for every, answers in ((False, [SUNNY]), (True, [calls("Oslo"), SUNNY])):
        rows, _ = rows_of(run, every_answer=every)
        assert [row["messages"][-1] for row in rows] == answers


def test_reasoning_is_kept_and_one_that_was_dropped_makes_another_branch(tmp_path: Path) -> None:
    thought = {**said("Let me see."), "reasoning_content": "Oslo is in Norway."}
    more = {"role": "user", "content": "Go on."}
    dropped = [Call([USER], [thought], tools=()), Call([USER, said("Let me see."), more], [SUNNY], tools=())]
    kept = [Call([USER], [thought], tools=()), Call([USER, thought, more], [SUNNY], tools=())]
    run = record(tmp_path / "run", [Played(0, dropped, 1.0), Played(1, kept, 1.0)])
    rows, _ = rows_of(run)
    assert [[len(row["messages"]), row["provenance"]["rollout"]] for row in rows] == [
        [2, "ro-0"],
        [4, "ro-0"],
        [4, "ro-1"],
    ]
    assert rows[0]["messages"][1] == rows[2]["messages"][1] == thought


def test_which_rollouts_are_read_and_why_others_are_not(tmp_path: Path) -> None:
    one = [Call([USER], [SUNNY])]
    played = [
        Played({"city": "Oslo"}, one, 1.0),
        Played({"city": "Rome"}, one, 0.25),
        Played({"city": "Oslo"}, one, None),
        Played({"city": "Oslo"}, one, 1.0, mode="val"),
        Played({"city": "Oslo"}, one, None, status="failed"),
        Played({"city": "Oslo"}, one, 1.0, mode=None),
        Played("Oslo", one, 0.5, status="running"),
    ]
    run = record(tmp_path / "run", played)

    def ids(**options: Any) -> tuple[list[str], dict[str, list[str]]]:
        rows, left_out = rows_of(run, selection=Selection(**options))
        return [row["provenance"]["rollout"] for row in rows], left_out

    unfinished = run.read_store(lambda store: store.get_rollout_by_id("ro-6")).status
    found, left_out = ids()
    assert found == ["ro-0", "ro-1", "ro-2", "ro-5"]
    assert left_out == {
        "its mode is val (a condition that names mode decides itself)": ["ro-3"],
        "it is failed": ["ro-4"],
        f"it is {unfinished}": ["ro-6"],
    }
    found, left_out = ids(min_reward=0.5)
    assert found == ["ro-0", "ro-5"]
    assert (left_out["its reward is below 0.5"], left_out["it has no reward"]) == (["ro-1"], ["ro-2"])
    assert ids(where="mode == 'val' and reward == 1")[0] == ["ro-3"]
    assert ids(where="status == 'failed'")[0] == ["ro-4"]
    found, left_out = ids(where="task.city == 'Oslo' and reward > 0.5")
    assert found == ["ro-0", "ro-5"]
    assert (left_out["it has no reward"], left_out["the condition does not hold"]) == (["ro-2"], ["ro-1"])
    with pytest.raises(ConfigError, match=r"at rollout ro-0: \{'city': 'Oslo'\} and 1 have no order"):
        ids(where="task > 1")


def test_a_row_of_tokens_is_what_the_gateway_recorded(tmp_path: Path) -> None:
    first, second = tokens([1, 2], [3, 4]), tokens([1, 2, 3, 4, 5], [6])
    both = [Call([USER], [calls("Oslo")], tokens=first), Call([USER, calls("Oslo")], [SUNNY], tokens=second)]
    branch = Call([USER], [WRONG], tokens=tokens([1, 9], [7]))
    unproven = Call([USER], [WRONG], attributes={semconv.TOKENS_REFUSED: "the server gave no ids"})
    run = record(
        tmp_path / "run",
        [Played(0, [*both, branch], 1.0), Played(1, [*both, unproven], 1.0), Played(2, [], 1.0)],
    )
    rows, left_out = rows_of(run, "tokens")
    assert [(row["input_ids"], row["assistant_masks"], row["logprobs"]) for row in rows] == [
        ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]),
        ([1, 9, 7], [0, 0, 1], [0.0, 0.0, -0.5]),
    ]
    sources = [(row["provenance"]["spans"], row["provenance"]["policy_versions"]) for row in rows]
    assert sources == [(["0000000000000001", "0000000000000002"], [3, 3]), (["0000000000000003"], [3, 3])]
    assert left_out == {
        "the server gave no ids": ["ro-1"],
        "no answer of the model to the agent was recorded": ["ro-2"],
    }


def test_a_pair_has_one_prompt_and_the_best_and_the_worst_answer(tmp_path: Path) -> None:
    other = {"role": "user", "content": "What is the weather in Rome?"}

    def answer(text: str, prompt: Any = USER) -> list[Call]:
        return [Call([prompt], [said(text)], tools=())]

    played = [
        Played("a", answer("worst"), 0.0, group="g"),
        Played("a", answer("middle"), 0.5, group="g"),
        Played("a", answer("best"), 1.0, group="g"),
        Played("a", answer("also best"), 1.0, group="g"),
        Played("a", answer("alone", other), 1.0, group="g"),  # another prompt
        Played("b", answer("equal"), 0.5, group="h"),
        Played("b", answer("equal too"), 0.5, group="h"),
        Played({"n": 1}, answer("of a task"), 0.25),  # without a group
        Played({"n": 1}, answer("better"), 0.5),
        Played("c", answer("one"), 1.0, group="i"),
        Played("c", answer("two"), None, group="i"),
    ]
    run = record(tmp_path / "run", played)
    rows, left_out = rows_of(run, "preference")
    assert [(row["prompt"], row["chosen"], row["rejected"], row["margin"]) for row in rows] == [
        ([USER], [said("best")], [said("worst")], 1.0),
        ([USER], [said("better")], [said("of a task")], 0.25),
    ]
    sources = rows[0]["provenance"]
    assert [sources[side]["rollout"] for side in ("chosen", "rejected")] == ["ro-2", "ro-0"]
    assert [sources[side]["reward"] for side in ("chosen", "rejected")] == [1.0, 0.0]
    assert left_out == {
        "it has no reward": ["ro-10"],
        "it is neither the best nor the worst of its group": ["ro-1", "ro-3"],
        "no rollout of its group has the same prompt and another reward": ["ro-4"],
        "the rewards of its group differ too little": ["ro-5", "ro-6", "ro-9"],
    }
    assert [row["margin"] for row in rows_of(run, "preference", margin=0.25)[0]] == [1.0]


def test_a_pair_begins_where_its_conversations_part_and_has_no_words_of_others(tmp_path: Path) -> None:
    def played(city: str, heard: str, last: Any, reward: float, group: str) -> Played:
        turns = [Call([USER], [calls(city)]), Call([USER, calls(city), result(heard)], [last])]
        return Played(group, turns, reward, group=group)

    run = record(
        tmp_path / "run",
        [
            played("Oslo", "sunny", SUNNY, 1.0, "last answer"),
            played("Oslo", "sunny", WRONG, 0.0, "last answer"),
            played("Oslo", "sunny", SUNNY, 1.0, "tool call"),
            played("Rome", "rain", WRONG, 0.0, "tool call"),
            played("Oslo", "sunny", SUNNY, 1.0, "tool result"),
            played("Oslo", "rain", WRONG, 0.0, "tool result"),
            played("Oslo", "sunny", SUNNY, 1.0, "beginning"),
            Played("beginning", TWO_TURNS[:1], 0.0, group="beginning"),
        ],
    )
    (row,), left_out = rows_of(run, "preference")
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([USER, calls("Oslo"), result("sunny")], [SUNNY], [WRONG])
    assert {reason[:60]: sorted(ids) for reason, ids in left_out.items()} == {
        "there are messages between its answers that the model did no": ["ro-2", "ro-3"],
        "the two conversations do not part at an answer of the model": ["ro-4", "ro-5", "ro-6", "ro-7"],
    }
    rows, _ = rows_of(run, "preference", between=True)
    assert [row["chosen"] for row in rows] == [[SUNNY], [calls("Oslo"), result("sunny"), SUNNY]]
    assert rows[1]["rejected"] == [calls("Rome"), result("rain"), WRONG]


def test_another_reward_takes_the_place_of_the_first(tmp_path: Path) -> None:
    one = [Call([USER], [SUNNY])]
    run = record(tmp_path / "run", [Played(0, one, 1.0, {"style": 0.1}), Played(1, one, 0.0, {"style": 0.9})])

    async def add(*feedback: Feedback) -> None:
        async with run.open_store(read_only=False) as store:
            await store.add_many_feedback(feedback)

    rows, left_out = rows_of(run, selection=Selection(reward="style", min_reward=0.5))
    assert [(row["provenance"]["rollout"], row["provenance"]["reward"]) for row in rows] == [("ro-1", 0.9)]
    assert left_out == {"its reward is below 0.5": ["ro-0"]}
    asyncio.run(
        add(Feedback(rollout_id="ro-0", source="user", value=3), Feedback(rollout_id="ro-0", source="user", value=2))
    )
    rows, left_out = rows_of(run, selection=Selection(reward="user"))
    assert [row["provenance"]["reward"] for row in rows] == [2.0], "the last one counts"
    assert left_out == {"it has no reward 'user'": ["ro-1"]}
    with pytest.raises(ConfigError, match="no rollout has the reward 'none'; there are: primary, style, user"):
        rows_of(run, selection=Selection(reward="none"))
    asyncio.run(add(Feedback(rollout_id="ro-1", source="style", value=1)))
    with pytest.raises(ConfigError, match="'style' is a dimension of the reward of rollout ro-1 and the source"):
        rows_of(run, selection=Selection(reward="style"))


def test_what_the_algorithm_asked_is_no_row(tmp_path: Path) -> None:
    run = record(tmp_path / "run", [Played(0, TWO_TURNS, 1.0)])

    async def add() -> None:
        async with run.open_store(read_only=False) as store:
            await play(store, 7, Played(0, TWO_TURNS, 1.0, group=algorithm_group(run.record.run_id)))

    asyncio.run(add())
    for format in FORMATS:
        assert "ro-7" not in json.dumps(rows_of(run, format))


@pytest.mark.parametrize(
    "bad", [{"messages": [said("\ud83d")]}, {"messages": [], "reward": float("nan")}, {"logprobs": [float("-inf")]}]
)
def test_a_row_that_json_cannot_hold_is_refused_and_the_others_stay(tmp_path: Path, bad: Any) -> None:
    good = {"messages": [said("\u2028 \x1b[31m <b> \U0001f600 \u202e")], "provenance": {}}
    with open_rows(tmp_path / "new" / "rows.jsonl", "messages") as write:
        write(good)
        with pytest.raises(ValueError, match=r"surrogates|compliant"):
            write(bad)
        write(good)
    lines = (tmp_path / "new/rows.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == [good, good] and lines[-1] == b""


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("before")
    with pytest.raises(TypeError, match="not JSON serializable"), open_rows(path, "messages") as write:
        write({"messages": [object()]})
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("before", ["rows.jsonl"])
    for name in ("rows.csv", "rows"):
        with pytest.raises(ConfigError, match="it must end in"), open_rows(tmp_path / name, "messages"):
            pass
