"""Signs that the policy earns its reward by something else than what the reward stands for."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden._lib.numbers import mean_of
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.rules.collapse import answer_lengths
from leyden.doctor.rules.overfitting import passes_over, validation_fall
from leyden.doctor.trends import levels, rose

_ENOUGH = 8
_FACTOR = 4.0
"""By how much answers change in length before that is a sign."""


def _find(run: Evidence) -> Finding | None:
    reward = levels(run)
    if not rose(reward):
        return None
    evidence: list[str] = []
    if (fall := validation_fall(run)) is not None and (passes_over(run) or 3) < 3:
        evidence.append(f"the validation reward fell from {fall[0]} to {fall[1]}, on tasks like those of training")
    names = sorted({name for row in run.train_rows for name in row.metrics if name.startswith("reward/")})
    parts = {name: found for name in names if (found := levels(run, name))}
    risen = max((each[-1].mean for each in parts.values() if rose(each)), default=0.0)
    for name, part in parts.items():
        if part[0].above(part[-1]) > 5:
            evidence.append(f"{name} fell from {part[0]} to {part[-1]}")
        elif risen and all(0 < each.mean < 0.1 * risen for each in (part[0], part[-1])) and not rose(part):
            evidence.append(f"{name} stayed at {part[-1]}, while another part of the reward rose to {figure(risen, 3)}")
    lengths, limit = answer_lengths(run), run.option("algorithm.max_tokens")
    if len(lengths) >= 10 and not rose(levels(run, stage="val", window=1), 2.0):
        before, now = mean_of(lengths[:5]), mean_of(lengths[-5:])
        learned_to_end = limit is not None and before > 0.8 * limit and now < before
        if not learned_to_end and not 1 / _FACTOR < now / max(before, 1e-9) < _FACTOR:
            evidence.append(f"the answers went from {figure(before, 3)} tokens to {figure(now, 3)}")
    if (same := _same_answer(run)) > 0:
        evidence.append(f"the newest {same} rollouts have different prompts, the same answer, and a high reward")
    if not evidence:
        return None
    rise = f"the mean training reward rose from {reward[0]} to {reward[-1]}"
    return Finding(
        cause="the reward may be earned by something else than what it stands for",
        evidence=(rise, *evidence),
        remedy="Read the best rollouts. If they are not what you want, correct the reward, and validate by another one.",
        command=f"leyden show {run.source} --best -n 5",
    )


def _same_answer(run: Evidence) -> int:
    """Return how many sampled training rollouts with different prompts end in one answer and a high reward; 0 if their
    answers differ.
    """
    high = 0.9 * max((value for _, value in run.series("reward_max")), default=1.0)
    ends = [
        (tuple(calls[0].tokens.prompt_ids), tuple(calls[-1].tokens.response_ids))
        for sampled, calls in run.calls
        if sampled.rollout.mode == "train"
        and (sampled.rollout.attempt.reward or 0.0) >= high
        and calls[0].tokens is not None
        and calls[-1].tokens is not None
    ]
    prompts, answers = {prompt for prompt, _ in ends}, {answer for _, answer in ends}
    return len(ends) if len(ends) >= _ENOUGH and len(prompts) >= _ENOUGH // 2 and len(answers) == 1 else 0


RULE = Rule("reward-hacking", _find, explains=("overfitting",), during_fit=True)
