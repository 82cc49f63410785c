"""One table says which request fields change the sampled distribution, and with which values."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.dialects import DIALECTS, WrongType, check_types
from leyden.dialects.sampling import SAMPLING_PARAMETERS, WITH_ANOTHER, changes

CHANGED: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "typical_p": 0.9,
    "top_a": 0.2,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 6e-4,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "no_repeat_ngram_size": 3,
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2],
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "mirostat": 2,
    "mirostat_target": 5.0,
    "typical": 0.9,
    "rep_pen": 1.1,
    "cfg_scale": 2.0,
    "encoder_no_repeat_ngram_size": 3,
    "banned_strings": ["no"],
    "lora_path": "another",
    "use_beam_search": True,
    "best_of": 4,
    "min_tokens": 5,
    "ignore_eos": True,
    "do_sample": False,
    "logits_processors": ["mine"],
    "vllm_xargs": {"mine": 1},
    "extra_body": {"top_k": 40},
}


def test_neutral_values_change_nothing_and_others_do() -> None:
    for name, parameter in SAMPLING_PARAMETERS.items():
        assert changes({name: None}) == {}
        for value in parameter.neutral:
            assert changes({name: value}) == {}, name
    assert changes(CHANGED) == CHANGED
    assert changes({"top_p": 1.0, "top_k": -1, "repetition_penalty": 1, "temperature": 0.3, "length_penalty": 2}) == {}
    assert changes({"use_beam_search": 0, "top_p": True}) == {"use_beam_search": 0, "top_p": True}
    assert changes({"logit_bias": {"5": 0, "6": 0.0}, "n": 4, "best_of": 4}) == {}
    assert changes({"logit_bias": {"5": 0, "6": 1}, "n": 2, "best_of": 4}).keys() == {"logit_bias", "best_of"}
    assert not WITH_ANOTHER & SAMPLING_PARAMETERS.keys()


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_sampling_parameters_have_one_type_in_every_dialect(dialect: str) -> None:
    fields = DIALECTS[dialect].field_types
    for name, parameter in SAMPLING_PARAMETERS.items():
        check_types({name: None}, fields)
        for value in parameter.neutral:
            check_types({name: value}, fields)
        wrong = "hot" if str not in parameter.types else 5
        with pytest.raises(WrongType, match=f"^{name} must be "):
            check_types({name: wrong}, fields)
    check_types(CHANGED, fields)
