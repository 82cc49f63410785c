"""The rules of the doctor: one module each, and one line here.

Where two rules could explain the same run, the one that names the root cause lists the other in `explains`.
"""

from leyden.doctor.rule import Rule
from leyden.doctor.rules import (
    agent_raises,
    changed_sampling,
    chat_template,
    collapse,
    constant_reward,
    cut_answers,
    double_instrumentation,
    flat_groups,
    ignored_option,
    learning_rate,
    long_prompts,
    missing_metrics,
    no_reward,
    no_token_ids,
    overfitting,
    reward_hacking,
    split_turns,
    stale_weights,
    task_data,
    unstable_loss,
    untrained_model,
    upstream_unreachable,
    wrong_roles,
)

RULES: tuple[Rule, ...] = (
    upstream_unreachable.RULE,
    # learning and data
    no_token_ids.RULE,
    no_reward.RULE,
    changed_sampling.RULE,
    chat_template.RULE,
    long_prompts.RULE,
    agent_raises.RULE,
    wrong_roles.RULE,
    split_turns.RULE,
    double_instrumentation.RULE,
    cut_answers.RULE,
    learning_rate.RULE,
    stale_weights.RULE,
    unstable_loss.RULE,
    flat_groups.RULE,
    collapse.RULE,
    reward_hacking.RULE,
    overfitting.RULE,
    task_data.EMPTY,
    task_data.REPEATED,
    task_data.LEAKED,
    constant_reward.RULE,
    missing_metrics.RULE,
    ignored_option.RULE,
    untrained_model.RULE,
)
