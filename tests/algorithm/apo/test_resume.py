"""A resumed search keeps what a crash has left half written. Kills: `tests/algorithm/test_prompt_kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

import leyden as ly
from leyden.algorithm.collector import rollout_id_at
from leyden.algorithm.prompts import read_history
from leyden.testing import FakeUpstream
from tests.algorithm.apo import rules

pytest.importorskip("openai")


async def test_a_record_that_a_crash_left_open_stays_in_the_history_of_the_resumed_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    async def fit(rounds: int, upstream: FakeUpstream, *, resume: bool) -> str:
        trainer = ly.Trainer(
            algorithm=ly.APO(**{**rules.OPTIONS, "beam_rounds": rounds}),
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            run_dir=directory,
            progress=False,
        )
        return (await trainer.afit(rules.quick, rules.TRAIN, rules.VAL, resume=resume)).run_id

    async with FakeUpstream(reply=rules.reply) as upstream:
        run_id = await fit(1, upstream, resume=False)
        async with ly.open_store(directory / "store.sqlite") as store:
            [first, *_] = await read_history(store, run_id)
            open_record = first.model_copy(update={"round": 2, "branch": 77})
            await store.start_rollout(  # the first of the two writes of the second round's record
                {"algorithm": "APO", "purpose": "selection", "round": 2},
                metadata={"run_id": run_id, "candidates": [open_record.model_dump(mode="json")]},
                rollout_id=rollout_id_at(run_id, "selection", 2),
                attempt_id="at-decided",
                run_id=None,
                group_id=f"{run_id}/algorithm",
            )
        assert await fit(2, upstream, resume=True) == run_id
    async with ly.open_store(directory / "store.sqlite", read_only=True) as store:
        history = await read_history(store, run_id)
    assert [each for each in history if each.round == 2] == [open_record]
