"""Which servers a `model_list` names."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.gateway import LLMProxy
from leyden.gateway.upstream import UpstreamModel, upstream_models

AT = {"api_base": "http://gpu:8000/v1", "api_key": "k"}
INSTALLED = importlib.util.find_spec("litellm") is not None


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_an_entry_of_agent_lightnings_for_a_server_with_openais_api_is_asked_directly(provider: str) -> None:
    entry = {"model_name": "policy", "litellm_params": {"model": f"{provider}/Qwen/Qwen3-4B", **AT}}
    [model] = upstream_models([entry])["policy"]
    assert (model.endpoint, model.name_there, model.api_key) == ("http://gpu:8000/v1", "Qwen/Qwen3-4B", "k")
    assert model.litellm_params is None
    assert model.record_tokens


@pytest.mark.parametrize(
    "params",
    [
        {"model": "bedrock/anthropic.claude"},
        {"model": "openai/gpt-4.1"},
        {"model": "openai/m", **AT, "drop_params": True},
        {"model": "openai", **AT},
    ],
)
def test_any_other_is_asked_through_litellm_and_recorded_as_text(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden._lib.extras.find_spec", lambda name: name)
    [model] = upstream_models([{"model_name": "m", "litellm_params": params}])["m"]
    assert model.litellm_params == params
    assert model.address.startswith(f"litellm:{params['model']}")
    assert model.name_there == params["model"]
    assert model.record_tokens is False


@pytest.mark.skipif(INSTALLED, reason="litellm is installed")
def test_without_litellm_the_entry_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'leyden\[litellm\]'"):
        UpstreamModel("m", litellm_params={"model": "bedrock/x"})


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"litellm_params": {}}, "no model"),
        ({"litellm_params": {"model": "x"}, "endpoint": "http://x/v1"}, "give one of them"),
        ({"litellm_params": {"model": "x"}, "dialects": ("messages",)}, "asked in chat, completions, embeddings"),
        ({}, "has no 'endpoint'"),
        ({"endpoint": "ftp://x"}, "base URL"),
    ],
)
def test_what_names_no_server_is_refused(entry: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        upstream_models([{"model_name": "m", **entry}])


def test_a_gateways_digest_of_its_models_changes_with_what_answers_and_with_no_key() -> None:
    entry = {"model_name": "m", "endpoint": "http://gpu:8000/v1", "api_key": "a"}

    def digest(options: dict[str, Any] | None = None, **changed: Any) -> str:
        return LLMProxy(model_list=[{**entry, **changed}], **(options or {})).models_digest()

    assert digest() == digest(api_key="b") == digest({"timeout_seconds": 5})
    others = [
        digest(model_name="n"),
        digest(endpoint="http://gpu:8001/v1"),
        digest(upstream_model="large"),
        digest(sampling_parameters={"temperature": 0}),
        digest({"sampling_overrides": {"val": {"temperature": 0}}}),
    ]
    assert len({digest(), *others}) == 6
