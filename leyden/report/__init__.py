"""A run as one page: `report_data` reads it into plain data, `page` draws them as HTML that needs nothing else.

The data are JSON, made by functions of a recorded run or of an open store, which other viewers can serve. They know
runs, spans and the doctor, and no algorithm, engine or trainer. What cannot be read, or cannot be known exactly, is
None or empty, and `reason` or `left_out` says why. To show something more, add it to a view, and draw it in `page.py`.

    report_data   {version, written, runs: [RUN], comparison: None, or what `compare_runs` returns}
    RUN           {head, paused_seconds, configuration, learned, findings, curves, failures, outcomes, samples, group,
                  prompts, control, left_out: [text]}
    head          what `as_data` returns: name, state, cause, options, times, reward, val_reward, ...
    configuration {versions, git, data, seed}, as recorded
    learned       {basis: "val", "train" or None, first, last, best: [iteration, reward], reason,
                  difference: None or {mean, low, high, method, tasks}}, of the last validation to the first
    findings      [{rule, cause, evidence: [text], remedy, command, severity, share}], the root cause first
    curves        [{name, train, smooth: [[iteration, value]], window, val: [[iteration, mean, low, high]], points,
                  not_finite}] of the metrics that changed; long ones keep the extremes of each stretch
    failures      {count, groups: [{reason, reason_kind, count, example}]}
    outcomes      None or {finished, failed, rewards: {mode: MEASURE}, tokens, cost, seconds: MEASURE}
    MEASURE       `MeasureSummary`: {count, mean, minimum, maximum, histogram: {edges, counts}}
    samples       {failed, best, worst: [ROLLOUT]}
    group         None or {group_id, size, estimator, reason, rollouts: [ROLLOUT]}, by descending reward
    ROLLOUT       {rollout_id, mode, status, iteration, reward, rewards, seconds, tokens, cost, task, answer, advantage,
                  largest: the largest advantage of its group, reason, messages: [MESSAGE], left_out: [text],
                  sequences: [{pieces: [PIECE], left_out, reason}]}
    MESSAGE       {role, text, tool_calls: [{name, arguments}], call}, as `leyden.adapter.transcript.conversation`
    PIECE         {text, kind: "context", "sampled" or "masked", tokens, id, probability}: a sampled token, or all
                  tokens between two of them
    prompts       [{id, version, name, changes: [["same", "added" or "removed", text]]}], the oldest first
    control       [`ControlLine` as JSON]
"""

from leyden.report.page import page as page
from leyden.report.run_data import report_data as report_data
from leyden.report.run_data import run_data as run_data
from leyden.report.writing import write_at_end as write_at_end
from leyden.report.writing import write_report as write_report
