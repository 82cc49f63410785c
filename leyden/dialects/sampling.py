"""The sampling parameters of model servers: their types, and the values that change nothing.

With all parameters at a neutral value, each token is drawn from the model's own distribution. The engine accepts
neutral values and refuses those that it cannot honour, the gateway records the parameters, and training refuses calls
whose parameters changed the distribution. All of them read this one table, in every dialect. To add a parameter, add a
line.

A grammar is no parameter of this table: it is part of the task, and servers report the log-probabilities under it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from leyden._lib.json import Json
from leyden.dialects.fields import shown
from leyden.dialects.request_checks import (
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    OBJECT,
    STRING,
    TEXT_OR_LIST,
    FieldTypes,
    Types,
)
from leyden.errors import Untranslatable


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """A request field that changes which tokens are drawn."""

    types: Types
    """The Python types of its JSON values."""
    neutral: tuple[Any, ...]
    """The values that change nothing. null changes nothing either."""


def _rows(types: Types, neutral: tuple[Any, ...], names: str) -> dict[str, SamplingParameter]:
    return dict.fromkeys(names.split(), SamplingParameter(types, neutral))


SAMPLING_PARAMETERS: Final[Mapping[str, SamplingParameter]] = {
    **_rows(NUMBER, (1,), "temperature top_p typical_p typical tfs tfs_z guidance_scale cfg_scale"),
    **_rows(INTEGER, (-1, 0), "top_k"),
    **_rows(NUMBER, (-1, 0), "top_n_sigma nsigma"),
    **_rows(NUMBER, (0,), "min_p top_a epsilon_cutoff eta_cutoff smoothing_factor dynatemp_range penalty_alpha skew"),
    **_rows(NUMBER, (0,), "frequency_penalty presence_penalty dry_multiplier xtc_probability diversity_penalty"),
    **_rows(NUMBER, (-1,), "adaptive_target mirostat_target"),
    **_rows(NUMBER, (1,), "repetition_penalty repeat_penalty rep_pen encoder_repetition_penalty"),
    **_rows(INTEGER, (0,), "no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    **_rows(INTEGER, (0,), "mirostat mirostat_mode min_tokens min_length min_new_tokens"),
    **_rows(INTEGER, (1,), "best_of num_beams num_beam_groups beam_width"),
    **_rows(BOOLEAN, (True,), "do_sample"),
    **_rows(BOOLEAN, (False,), "use_beam_search ignore_eos ban_eos_token dynamic_temperature watermark"),
    **_rows(LIST, ([],), "bad_words bad_words_ids allowed_token_ids suppress_tokens begin_suppress_tokens"),
    **_rows(LIST, ([],), "sequence_bias logits_processors logit_processors force_words_ids lora"),
    **_rows(LIST, ([],), "exponential_decay_length_penalty"),
    **_rows(TEXT_OR_LIST, ([], ""), "samplers dola_layers banned_tokens banned_strings"),
    **_rows(STRING, ("",), "custom_token_bans custom_logit_processor lora_path"),
    **_rows(INTEGER, (-1,), "thinking_token_budget"),
    # Besides logit_bias: objects that servers and clients read further parameters from.
    **_rows(OBJECT, ({},), "logit_bias vllm_xargs extra_args custom_params extra_body sampling_params options"),
}
"""Parameters by the name of their field: those of OpenAI, vLLM, SGLang, llama.cpp, TGI and transformers."""

WITH_ANOTHER: Final = {
    *("length_penalty", "early_stopping", "repeat_last_n", "repetition_penalty_range", "negative_prompt"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range", "dry_sequence_breakers", "xtc_threshold"),
    *("mirostat_tau", "mirostat_eta", "dynatemp_low", "dynatemp_high", "dynatemp_exponent", "smoothing_curve"),
    *("mirostat_lr", "adaptive_decay", "temperature_last", "top_p_min", "top_p_decay", "min_keep", "rep_pen_range"),
}
"""Parameters that change nothing unless a parameter of the table does: details of beam search, DRY, XTC, Mirostat,
repetition penalties, dynamic temperature, smoothing and guidance."""


FIELD_TYPES: Final[FieldTypes] = {
    **{name: parameter.types for name, parameter in SAMPLING_PARAMETERS.items()},
    "stream": BOOLEAN,
    "stream_options": OBJECT,
    "metadata": OBJECT,
    "user": STRING,
}
"""Types of the fields that the requests of all dialects with an answer share."""


OPTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "truncation": ("disabled",),
    "background": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "web_search_options": (),
    "audio": (),
    "seed": (),
}
"""The values that change nothing, of options that some APIs lack. They hold where the API has no tools."""
ABOUT_THE_CALL: Final = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "priority", "request_id", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control", "cache_salt"),
    *("inference_geo", "speed"),
}
"""Fields that do not change the response, whatever their value is: they tell whose call it is, and how fast and how
cached it shall be."""


def equals_any(value: Any, values: Sequence[Any]) -> bool:
    """Return whether a JSON value is one of several. A number is no boolean."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def is_neutral(name: str, value: Any, request: Mapping[str, Any]) -> bool:
    """Return whether a value of a parameter of the table leaves the distribution as it is.

    request: the request that has the parameter.
    """
    if value is None or equals_any(value, SAMPLING_PARAMETERS[name].neutral):
        return True
    if name == "logit_bias" and isinstance(value, dict):
        return all(equals_any(bias, (0, None)) for bias in cast(Json, value).values())
    # The best n of n responses are all of them.
    return name == "best_of" and equals_any(value, (request.get("n"),))


def stop_strings(stop: Any) -> list[Any]:
    """Return the strings of a field `stop` that can end a response. An empty one ends none."""
    given = cast(list[Any], stop) if isinstance(stop, list) else [stop]
    return [each for each in given if each is not None and each != ""]


def check_neutral(request: Json, table: Mapping[str, Sequence[Any]], where: str) -> None:
    """Raise Untranslatable for a field that has no counterpart in the API `where`, unless its value changes nothing
    there.

    table: the values that change nothing, by the field's name. null changes nothing either, and the table of sampling
        parameters tells their values.
    """
    for name, values in table.items():
        value = request.get(name)
        if value is None or equals_any(value, values):
            continue
        if name not in SAMPLING_PARAMETERS or not is_neutral(name, value, request):
            raise Untranslatable(name, f"is {shown(value)}, which {where} cannot express; leave it out")


def changes(request: Mapping[str, Any]) -> Json:
    """Return a request's parameters that change the distribution, except the temperature, which training can handle."""
    return {
        name: value
        for name, value in request.items()
        if name in SAMPLING_PARAMETERS and name != "temperature" and not is_neutral(name, value, request)
    }
