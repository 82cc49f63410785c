"""An option has no effect, by the run's configuration, its log, or what the agent asks for."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_WARNED = r"is used by nothing|has no effect|is ignored|nothing is validated|no use for it"


def _find(run: Evidence) -> Finding | None:
    evidence = [line.text for line in run.logged(_WARNED)][-3:]
    steps, warmup, limit = (run.option(f"algorithm.{name}") for name in ("n_steps", "warmup_steps", "max_tokens"))
    if isinstance(warmup, int) and isinstance(steps, int) and warmup >= steps > 1:
        evidence.append(f"warmup_steps={warmup} and n_steps={steps}: the learning rate never reaches its value")
    asked = [
        call.settings.get("max_tokens", call.settings.get("max_completion_tokens")) for _, c in run.calls for call in c
    ]
    if isinstance(limit, int) and asked and limit not in asked:
        other = "no limit" if None in asked else f"max_tokens={asked[0]}"
        evidence.append(
            f"max_tokens={limit} of the algorithm: none of {len(asked)} sampled calls has it, they ask for {other}"
        )
    if not evidence:
        return None
    return Finding(
        cause="an option has no effect",
        evidence=tuple(evidence),
        remedy="Leave the option out, or give what it needs. An agent takes the algorithm's options by passing "
        "**llm.sampling_parameters to the model.",
        command=f"leyden show {run.source}",
        share=0.5,
    )


RULE = Rule("ignored-option", _find)
