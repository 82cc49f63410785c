"""The policy fell: its reward was good and is gone, or it says one thing only and earns little."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.trends import best_of, levels, rose

_WINDOW = 3
_ERRORS = 5.0
"""The best of many windows is above the truth by chance, so a fall counts from more standard errors on."""
_ENOUGH = 8
_CHANGES = ("entropy", "kl", "grad_norm", "response_tokens")


def _find(run: Evidence) -> Finding | None:
    found = levels(run)
    if not found:
        return None
    first, best, last = found[0], best_of(found), found[-1]
    restored = [n for n, _ in run.series("restored_to")]
    fell = best.above(last) > _ERRORS and best.mean - last.mean > 0.5 * (best.mean - first.mean)
    low = last.mean < 0.5 * (run.option("algorithm.success_reward") or 1.0) and not rose(found)
    signs = _narrowed(run) if low and not fell else []
    if not fell and not signs and not restored:
        return None
    evidence = list(signs)
    if fell:
        evidence.append(f"the mean reward was {best} up to step {best.at} and is {last} now")
        evidence += _changes(run, best.at)
    if restored:
        evidence.append(f"the run went back to its best weights in step {', '.join(map(str, restored))}")
    kept = "model/ has the best weights if the run ended by itself."
    if run.option("algorithm.hand_back") == "last":
        kept = "hand_back='last' keeps only the weights as they are now; leave it out."
    end = run.rows[-1].iteration or 1
    return Finding(
        cause="the policy fell and the run went back to its best weights"
        if not fell and not signs
        else "the policy has fallen: its reward was better before"
        if fell
        else "the policy gives nearly the same answer each time, and earns little",
        evidence=tuple(evidence),
        remedy=f"Train with half the learning rate, or find one with `leyden lr-range`. {kept}",
        command=f"leyden plot {run.source} --metric reward",
        severity="critical" if fell or signs else "warning",
        share=1 - best.at / end if fell else 1.0 if signs else len(restored) / end,
    )


def _narrowed(run: Evidence) -> list[str]:
    """Return the signs that the answers have become all alike since the run began."""
    signs: list[str] = []
    entropy = [value for _, value in run.series("entropy")]
    if len(entropy) >= 2 * _WINDOW:
        before, now = mean_of(entropy[:_WINDOW]), mean_of(entropy[-_WINDOW:])
        if now < 0.02 < before and now < 0.05 * before:
            signs.append(f"the entropy fell from {figure(before, 3)} to {figure(now, 3)} nats a token")
    lengths = answer_lengths(run)
    if len(lengths) >= 2 * _WINDOW:
        before, now = mean_of(lengths[:_WINDOW]), mean_of(lengths[-_WINDOW:])
        if now <= 1.0 < 1.5 < before:
            signs.append(f"the answers shrank from {figure(before, 3)} tokens to {figure(now, 3)}")
    ends = [tuple(tokens.response_ids) for _, calls in run.calls if (tokens := calls[-1].tokens) is not None]
    if len(ends) >= _ENOUGH and len(set(ends)) == 1 and run.total("flat_groups") < run.total("groups"):
        signs.append(f"the newest {len(ends)} rollouts end with one answer, and earlier ones did not")
    return signs


def answer_lengths(run: Evidence) -> list[float]:
    """Return the mean tokens of a model's answer in each training step."""
    calls = dict(run.series("model_calls"))
    return [tokens / calls[n] for n, tokens in run.series("response_tokens") if calls.get(n)]


def _changes(run: Evidence, at: int) -> list[str]:
    changes: list[str] = []
    for name in _CHANGES:
        values = run.series(name)
        before = [value for n, value in values if n <= at][-_WINDOW:]
        if before and len(values) > _WINDOW:
            now = mean_of(value for _, value in values[-_WINDOW:])
            if not 0.5 < (now + 1e-9) / (mean_of(before) + 1e-9) < 2:
                changes.append(f"{name} went from {figure(mean_of(before), 3)} to {figure(now, 3)}")
    return changes


RULE = Rule(
    "collapse",
    _find,
    explains=("flat-groups", "cut-answers", "untrained-model"),
    during_fit=True,
    warned="the reward has fallen|all answers are the same",
)
