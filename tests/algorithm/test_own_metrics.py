"""Numbers of an agent's own are metrics: further dimensions of its reward, and its annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leyden as ly
from leyden.algorithm.evaluation import Evaluation
from leyden.algorithm.own_metrics import means_of, own_metrics
from leyden.testing import FakeUpstream
from leyden.training.runs import open_run
from leyden.types import Span, SpanEvent
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving


def span(name: str, **attributes: Any) -> Span:
    ids = {"rollout_id": "ro", "attempt_id": "at", "trace_id": "0" * 32, "span_id": "1" * 16}
    return Span(**ids, sequence_id=1, name=name, attributes=attributes)


def emitted(*spans: Span | None) -> dict[str, float]:
    return own_metrics([each for each in spans if each is not None])


def reward(value: Any, primary: str | None = None) -> Span:
    return ly.emit_reward(value, primary_key=primary, propagate=False)


def annotation(**values: Any) -> Span:
    return ly.emit_annotation(values, propagate=False)


def test_each_dimension_but_the_primary_one_is_a_metric_under_its_name() -> None:
    assert emitted(reward({"right": 1, "short": 0.5, "a/b c": True}, "right")) == {
        "reward/short": 0.5,
        "reward/a/b c": 1,
    }
    assert emitted(reward(0.5), reward(1.0)) == {}


def test_dimensions_of_an_earlier_reward_are_kept_and_the_last_value_of_a_name_counts() -> None:
    first = reward({"right": 0, "short": 0.5, "late": 1}, "right")
    second = reward({"late": 0, "short": 1.0}, "late")
    assert emitted(first, second) == {"reward/right": 0, "reward/short": 1.0}
    assert emitted(first, reward(2.0)) == {"reward/right": 0, "reward/short": 0.5, "reward/late": 1}


def test_numbers_of_annotations_are_metrics_and_other_values_are_not() -> None:
    made = annotation(
        reward=3, kl=np.array(2.5), game={"level": np.int64(3)}, won=np.bool_(True), note="text", several=[1.0, 2.0]
    )
    assert emitted(made, annotation(kl=1.5), reward(1.0)) == {
        "annotation/reward": 3,
        "annotation/kl": 1.5,
        "annotation/game.level": 3,
        "annotation/won": 1,
    }


def test_numbers_of_other_spans_and_of_recorders_are_no_metrics() -> None:
    event = SpanEvent(name="gen_ai.evaluation.result", attributes={"gen_ai.evaluation.score.value": 1.0})
    call = span("leyden.model_call", **{"gen_ai.usage.input_tokens": 3}).model_copy(update={"events": [event]})
    theirs = span("agentlightning.annotation", **{"agentlightning.tag.0": 1, "depth": 2})
    assert emitted(call, theirs) == {"annotation/depth": 2}


def test_a_mean_is_over_the_rollouts_that_have_the_number() -> None:
    assert means_of([{"b": 1.0, "a": 4.0}, {}, {"b": 3.0}]) == {"a": 4.0, "b": 2.0}
    assert means_of([]) == {}


@ly.rollout
async def agent(task: int) -> None:
    if task == 3:
        raise ValueError("no such task")
    ly.emit_annotation({"length": task})
    ly.emit_reward({"right": task / 2, "short": float(task == 1)}, primary_key="right")


@pytest.mark.parametrize("algorithm", [Evaluation(), ly.Baseline()])
def test_an_algorithm_records_their_means_over_its_succeeded_rollouts(algorithm: Any, tmp_path: Path) -> None:
    ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run").fit(agent, val_dataset=[1, 2, 3])
    (row,) = open_run(tmp_path / "run").metrics("val")
    assert (row.metrics["annotation/length"], row.metrics["reward/short"], row.metrics["reward"]) == (1.5, 0.5, 0.75)


@ly.rollout
async def numbered(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> None:
    knows = rules.RULES[task["topic"]] in prompt_template.template
    ly.emit_message("Here is what to do." if knows else f"I do not know about {task['topic']}.")
    ly.emit_annotation({"number": task["number"]})
    ly.emit_reward({"right": float(knows), "high": task["number"] / 10}, primary_key="right")
    if task["number"] == 12:
        raise ValueError("too high")


@pytest.mark.parametrize("kind", ["apo", "gepa"])
async def test_prompt_optimisers_record_their_means_over_the_rollouts_of_a_step(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    if kind == "gepa":
        pytest.importorskip("gepa")
    made: Any = (
        ly.APO(gradient_batch_size=2, val_batch_size=15, beam_width=1, branch_factor=1, beam_rounds=1)
        if kind == "apo"
        else ly.GEPA(max_steps=1, minibatch_size=2)
    )
    async with FakeUpstream(reply=rules.reply if kind == "apo" else evolving.reply) as upstream:
        await ly.Trainer(
            algorithm=made,
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            run_dir=tmp_path / "run",
        ).afit(numbered, rules.TRAIN, rules.VAL)
    run = open_run(tmp_path / "run")
    if kind == "apo":
        before = run.metrics("val")[0]
        assert (before.iteration, before.metrics["annotation/number"], before.metrics["reward/high"]) == (0, 10.5, 1.05)
        assert "annotation/number" not in run.metrics("val")[-1].metrics  # it measured no rollout
    (row,) = run.metrics("train")
    assert 0.0 <= row.metrics["annotation/number"] <= 11.0
    assert row.metrics["reward/high"] == pytest.approx(row.metrics["annotation/number"] / 10)
