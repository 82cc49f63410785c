"""Model calls have a role that is not what the user trains: helpers count as the agent, or the agent as none."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_OTHERS = ("auxiliary", "subagent", "compaction", "discarded")


def _find(run: Evidence) -> Finding | None:
    trained, doubtful = run.total("model_calls"), run.total("doubtful_calls")
    left_out = {name: n for name in _OTHERS if (n := run.total(f"{name}_calls"))}
    unmatched = [(n, each) for each, n in run.refusals.most_common() if each.startswith("agent_match=")]
    share_out = sum(left_out.values()) / max(1.0, trained + sum(left_out.values()))
    evidence = [f"{n:,} rollouts: {reason}" for n, reason in unmatched[:2]]
    if share_out > 0.8:
        evidence.append(f"{share_out:.0%} of the model calls are not trained on, by their roles: {_shown(left_out)}")
    if doubtful > 0.3 * trained:
        evidence.append(
            f"{doubtful:,.0f} of the {trained:,.0f} calls that are trained on may be of the agent's helpers"
        )
    if not evidence:
        return None
    return Finding(
        cause="the trained calls are not those of the agent",
        evidence=tuple(evidence),
        remedy="Correct agent_match, choose roles with adapter=TraceToTriplet(roles=[...]), or let the program name the "
        "role of a call by the attribute leyden.role.",
        command=f"leyden show {run.source} --worst -n 1",
        severity="critical" if unmatched or not trained else "warning",
        share=1.0 if unmatched else max(share_out, doubtful / max(trained, 1.0)),
    )


def _shown(left_out: dict[str, float]) -> str:
    return ", ".join(f"{n:,.0f} {name}" for name, n in left_out.items())


RULE = Rule("wrong-roles", _find, explains=("flat-groups", "untrained-model"))
