"""A run as one page: `report_data` reads it into plain data, `page` draws them as HTML that needs nothing else.

The data are JSON, made by functions of a recorded run or of an open store, which other viewers can serve. They know
runs, spans and the doctor, and no algorithm, engine or trainer. What cannot be read or computed exactly is None or left
out, and `reason` or `left_out` says why. To show something more, add it to a view and draw it in `page.py`.

    report_data(runs)  {version, written, runs: [RUN], comparison: None or what `compare_runs` returns}
    run_data(run)      RUN: {head, paused_seconds, configuration, learned, findings, unread, curves, constant, outcomes,
                       failures, samples, group, resources, control, left_out: [text]}
    head               what `as_data` returns: name, state, cause, options, times, reward, val_reward, ...
    configuration      {versions, git, data, seed}
    learned            {basis: "validation" | "training" | None, first, last, best: {iteration, reward}, reason,
                       difference: None or {mean, low, high, method, tasks}}: the last validation against the first
    findings           [{rule, cause, evidence: [text], remedy, command, severity, share}], the root cause first
    curves             [{name, train: POINTS, smooth: POINTS, window, val: [{iteration, mean, low, high}], points,
                       not_finite}], POINTS: [[iteration, value]]; longer curves keep the extremes of each stretch
    constant           {name: value} of the metrics that never changed
    outcomes           {statuses, rewards: {mode: MEASURE}, tokens, cost, seconds: MEASURE or None}
    MEASURE            {count, mean, minimum, maximum, histogram: {edges, counts}}
    failures           {count, groups: [{reason, reason_kind, count, example}]}
    samples            {failed: [ROLLOUT], best: [ROLLOUT], worst: [ROLLOUT]}, the newest failures
    group              None or {group_id, iteration, credit: CREDIT, rollouts: [ROLLOUT]}: the newest with a signal
    CREDIT             {estimator, advantages: {rollout_id: number}, reason, used: bool or None}
    ROLLOUT            {rollout_id, mode, status, reward, rewards, iteration, seconds, tokens, cost, task, answer,
                       advantage, reason, messages: [MESSAGE], sequences: [{pieces: [PIECE], left_out, reason}]}
    MESSAGE            {role, text, tool_calls: [{name, arguments}], call}, as `leyden.adapter.transcript.conversation`
    PIECE              {text, kind: "context" | "sampled" | "masked", tokens, id, probability}: one sampled token, or
                       all tokens between two of them
    resources          [{id, version, name, changes: [["same" | "added" | "removed", text]]}], the oldest first
    control            [ControlLine as a dict]
"""

from leyden.report.page import page as page
from leyden.report.run_data import report_data as report_data
from leyden.report.run_data import run_data as run_data
from leyden.report.writing import write_at_end as write_at_end
from leyden.report.writing import write_report as write_report
