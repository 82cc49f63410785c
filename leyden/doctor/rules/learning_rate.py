"""The learning rate is far from the one that suits the model's size."""

from __future__ import annotations

from leyden._lib.formatting import figure
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.trends import best_of, levels, rose
from leyden.objectives.schedules import default_learning_rate

_HIGH, _LOW = 10.0, 1 / 20.0


def _find(run: Evidence) -> Finding | None:
    rate, size = run.option("algorithm.optim.learning_rate"), run.option("model.n_weights")
    if not isinstance(rate, int | float) or rate <= 0 or not isinstance(size, int) or not run.total("optimizer_steps"):
        return None
    adapter = run.option("algorithm.backend.lora") is not None
    usual, reward = default_learning_rate(size, adapter=adapter), levels(run)
    kl = [value for _, value in run.series("kl")]
    high, moved = rate > usual, max(kl, default=0.0)
    stays = bool(reward) and abs(reward[-1].above(reward[0])) < 3 and moved < 1e-3 and not run.series("restored_to")
    stays = stays and run.total("optimizer_steps", last=3) > 0
    learned = rose(reward) and best_of(reward).above(reward[-1]) < 3
    if (rate / usual < _HIGH or learned) if high else (rate / usual > _LOW or not stays):
        return None
    evidence = [
        f"learning_rate is {figure(rate, 3)}; {figure(usual, 1)} suits {'an adapter of ' * adapter}a model of {size:,} weights"
    ]
    if reward:
        evidence.append(f"the mean reward went from {reward[0]} to {reward[-1]}")
    if kl:
        evidence.append(f"the largest kl of a step was {figure(moved, 2)}")
    return Finding(
        cause=f"the learning rate is {figure(rate / usual if high else usual / rate, 2)} times too {'large' if high else 'small'}",
        evidence=tuple(evidence),
        remedy="Leave optim out to take the rate for the model's size, or find one.",
        command="leyden lr-range --help",
        severity="critical" if high and moved > 0.1 else "warning",
    )


RULE = Rule(
    "learning-rate",
    _find,
    explains=("unstable-loss", "collapse", "untrained-model", "flat-groups", "cut-answers"),
    during_fit=True,
)
