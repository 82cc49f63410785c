"""A reflection model that answers after a minute, without a budget, is waited for and warned of."""

from __future__ import annotations

from typing import Any

import pytest

import leyden as ly
from leyden.testing import FakeUpstream, Misbehaviour
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving

pytest.importorskip("openai")
pytest.importorskip("gepa")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("algorithm", "reply", "mark"),
    [
        (ly.APO(beam_width=1, branch_factor=1, beam_rounds=3, val_batch_size=15), rules.reply, "<prompt>"),
        (ly.GEPA(**{**evolving.OPTIONS, "max_steps": 2}), evolving.reply, "new instruction"),
    ],
    ids=["APO", "GEPA"],
)
async def test_an_answer_after_a_minute_is_used_and_the_wait_is_warned_of(
    algorithm: Any, reply: Any, mark: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    def fault(body: dict[str, Any]) -> Misbehaviour | None:
        nonlocal asked
        asked += mark in str(body["messages"][0]["content"])
        return Misbehaviour(delay_seconds=60) if asked == 1 else None

    async with FakeUpstream(reply=reply, fault=fault) as upstream:
        trainer = ly.Trainer(
            algorithm=algorithm,
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            store="memory",
            progress=False,
        )
        result = (await trainer.afit(rules.quick, rules.TRAIN, rules.VAL)).result
    assert caplog.text.count("no answer of the reflection model for 30 s") == 1
    assert result.reward is not None and result.reward > 0
