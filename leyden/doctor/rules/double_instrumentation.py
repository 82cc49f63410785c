"""Several instruments record the same model call."""

from __future__ import annotations

from collections import Counter

from leyden.adapter.normalise import GATEWAY, read_model_call
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    pairs, doubled, example = Counter[str](), 0, ""
    for rollout, calls in run.calls:
        for call in calls:
            if len(call.spans) < 2:
                continue
            views = [view for span in call.spans if (view := read_model_call(span)) is not None and view.response_id]
            sources = [(view.convention, view.span.name) for view in views if view.convention != GATEWAY]
            own = [(view.convention, view.span.name) for view in views if view.convention == GATEWAY]
            # a framework's span around its SDK's has the same convention, another name, and is no second instrument
            if len({kind for kind, _ in sources}) > 1 or len(set(sources)) < len(sources) or len(own) > 1:
                doubled += 1
                example = f"{views[0].response_id} in rollout {rollout.rollout.rollout_id}"
                pairs[" and ".join(f"{name} ({kind})" for kind, name in sorted(sources or own))] += 1
    n_calls = sum(len(calls) for _, calls in run.calls)
    if not doubled:
        return None
    return Finding(
        cause="model calls are recorded by two instruments",
        evidence=(
            f"{doubled:,} of the {n_calls:,} sampled calls have one response id in two records, such as {example}",
            *(f"{n:,} times {names}" for names, n in pairs.most_common(2)),
        ),
        remedy="Keep one instrumentation: leave out the tracer's, or the one that the agent's program starts. Leyden counts "
        "each call once; the records are larger, and other tools count twice.",
        command=f"leyden show {run.source} --best -n 1",
        share=doubled / n_calls,
    )


RULE = Rule("double-instrumentation", _find)
