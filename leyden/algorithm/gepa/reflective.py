"""Make records of rollouts for the reflection model: the calls that used a prompt, and the rewards.

Pure functions of templates, scores and spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyden._lib.formatting import figure
from leyden._lib.json import Json
from leyden._lib.text import as_json
from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import message_text
from leyden.adapter.normalise import ModelCallView
from leyden.algorithm.evaluator import Score
from leyden.algorithm.prompts.texts import shown_text
from leyden.algorithm.usage import calls_with
from leyden.types import PromptTemplate, find_reward_spans, get_rewards_from_span, semconv


def reflective_record(score: Score, prompt: PromptTemplate) -> dict[str, Any]:
    """Return a rollout as an example of one prompt, with the keys of the package `gepa`: "Inputs", "Generated Outputs"
    and "Feedback".

    It contains the calls that used the prompt, or all calls if none of them did.
    """
    spans = [] if score.result is None else list(score.result.spans)
    answered = [call for call in model_calls(spans) if call.output_messages]
    calls = calls_with(prompt, answered) or answered
    task = None if score.result is None else score.result.rollout.input
    feedback = [f"The reward is {figure(score.reward)}."]
    if len(rewards := objective_rewards(score)) > 1:
        feedback.append("Its parts: " + ", ".join(f"{name} {figure(each)}" for name, each in rewards.items()) + ".")
    feedback += [
        shown_text(str(span.attributes.get(semconv.MESSAGE_BODY, ""))) for span in spans if span.name == semconv.MESSAGE
    ]
    if score.reason is not None:
        feedback.append(f"The run failed: {shown_text(score.reason)}")
    return {
        "Inputs": {
            "task": shown_text(task if isinstance(task, str) else as_json(task)),
            **_conversation(calls, prompt),
        },
        "Generated Outputs": "\n".join(
            shown_text("\n".join(_text(message) for message in call.output_messages)) for call in calls
        )
        or "(no call of a model was recorded)",
        "Feedback": "\n".join(feedback),
    }


def objective_rewards(score: Score) -> dict[str, float]:
    """Return all dimensions of a rollout's last reward, by name; an empty dict if it has none."""
    found = [] if score.result is None or score.failed else find_reward_spans(score.result.spans)
    return get_rewards_from_span(found[-1]) if found else {}


def objective_scores(scores: Sequence[Score], known: dict[str, None], failed_reward: float) -> list[dict[str, float]]:
    """Return the rewards of each rollout by dimension, for the package `gepa`.

    A rollout gets `failed_reward` in each known dimension that its reward lacks, whether it failed or succeeded,
    because the package takes a mean over the rollouts that have the dimension. If none is known, the score is a
    dimension by itself, for all rollouts from then on, because the package needs at least one.

    known: the dimensions of all rollouts so far, to which those of `scores` are added.
    """
    found = [objective_rewards(score) for score in scores]
    known |= dict.fromkeys(name for each in found for name in each)
    if not known:
        known[semconv.PRIMARY_REWARD] = None
    of_all = known.keys() & {semconv.PRIMARY_REWARD}
    return [
        {**dict.fromkeys(known, failed_reward), **dict.fromkeys(of_all, score.reward), **each}
        for each, score in zip(found, scores, strict=True)
    ]


def _conversation(calls: Sequence[ModelCallView], prompt: PromptTemplate) -> dict[str, str]:
    """Leave out system messages, and the prompt itself."""
    messages = calls[-1].input_messages if calls else []
    texts = [_text(message) for message in messages if message.get("role") not in ("system", "developer")]
    lines = [shown_text(text) for text in texts if text and text.strip() != prompt.template.strip()]
    return {"messages": "\n".join(lines)} if lines else {}


def _text(message: Json) -> str:
    return message_text(message.get("content"))
