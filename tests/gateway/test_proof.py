"""Tokens are recorded only when everything agrees; each disagreement has its own words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from leyden.gateway.record import ModelCall, Unproven, token_record


def call_with(response: dict[str, Any], error: str | None = None) -> ModelCall:
    return ModelCall("ro", "at", "0" * 32, None, 0, "chat", 0.0, response=response, error=error)


def good() -> dict[str, Any]:
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    choice = {"index": 0, "token_ids": [5, 2], "logprobs": logprobs, "policy_versions": [3, 4]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"prompt_token_ids": [1, 2, 3], "choices": [choice], "usage": usage}


def test_a_good_answer_is_proven() -> None:
    record = token_record(call_with(good()))
    assert record.model_dump() == {
        "prompt_ids": [1, 2, 3],
        "response_ids": [5, 2],
        "logprobs": [-0.5, -1.5],
        "policy_versions": [3, 4],
        "loss_mask": None,
    }
    assert type(record).unpack(record.pack()) == record


def test_logprobs_and_versions_may_be_absent_as_a_whole() -> None:
    response = good()
    response["choices"][0].update(logprobs=None, policy_versions=None)
    record = token_record(call_with(response))
    assert record.logprobs is None
    assert record.policy_versions is None


def at_choice(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda response: response["choices"][0].update(fields)


def at_top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda response: response.update(fields)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (at_top(choices=[]), "no choices"),
        (at_top(choices=None), "no choices"),
        (at_top(choices=["x"]), "is a str"),
        (at_top(prompt_token_ids=None), "no prompt_token_ids"),
        (at_top(prompt_token_ids=[1, 2]), "counts 3 prompt_tokens, but the upstream gave 2"),
        (at_choice(token_ids=None), "no token_ids"),
        (at_choice(token_ids=[5]), "counts 2 completion_tokens, but the upstream gave 1"),
        (at_choice(token_ids=[5, -1]), "no token id"),
        (at_choice(token_ids=[5, 2**31]), "no token id"),
        (at_choice(token_ids=[5, 2.0]), "no token id"),
        (at_choice(token_ids=[5, True]), "no token id"),
        (at_choice(token_ids="52"), "no token_ids"),
        (at_top(usage=None), "no usage"),
        (at_top(usage={}), "None prompt_tokens"),
        (at_choice(logprobs={"content": [{"logprob": -0.5}]}), "1 logprobs for 2"),
        (at_choice(logprobs={"content": None}), "0 logprobs for 2"),
        (at_choice(logprobs={"content": [{"logprob": -0.5}, {}]}), "cannot be read"),
        (at_choice(logprobs={"content": [{"logprob": -0.5}, {"logprob": None}]}), "cannot be read"),
        (at_choice(logprobs={"token_logprobs": [-0.5, float("nan")]}), "not finite"),
        (at_choice(logprobs=[-0.5, -1.5]), "cannot be read"),
        (at_choice(policy_versions=[3]), "1 policy_versions for 2"),
    ],
)
def test_whatever_disagrees_is_refused_with_its_reason(damage: Callable[[dict[str, Any]], None], reason: str) -> None:
    response = copy.deepcopy(good())
    damage(response)
    with pytest.raises(Unproven, match=reason):
        token_record(call_with(response))


def test_a_failed_call_has_no_tokens() -> None:
    with pytest.raises(Unproven, match="boom"):
        token_record(call_with(good(), error="boom"))
